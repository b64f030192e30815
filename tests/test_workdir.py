"""Files of a working directory, on a disk and in what stands for a bucket."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import fake_gcs
import pytest
from etils import epath

from maxmars import workdir
from maxmars.metrics import MetricsWriter, recorded_steps


@pytest.fixture(params=["disk", "bucket"])
def place(request, tmp_path, monkeypatch):
    """A new directory; as a bucket it is still on the disk, but taken for one."""
    if request.param == "disk":
        return tmp_path / "run"
    (tmp_path / "run").mkdir()  # a bucket has none to make
    monkeypatch.setattr(workdir, "is_remote", lambda path: True)
    return epath.Path(tmp_path / "run")


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "is_remote", lambda path: True)
    return epath.Path(tmp_path)


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert workdir.resolve("a/b") == workdir.resolve("~/a/b") == tmp_path / "a/b"
    assert type(workdir.resolve("a")) is type(Path("a"))
    path = workdir.resolve("gs://bucket/run")
    assert os.fspath(path / "checkpoints") == "gs://bucket/run/checkpoints"
    assert workdir.is_remote(path)
    assert not workdir.is_remote(workdir.resolve("a"))
    for wrong in ("gs:/bucket/run", "gs:///run", "gs://", "s3://bucket/run"):
        with pytest.raises(ValueError, match=f"{wrong} must be a path on a disk, or gs://BUCKET/"):
            workdir.resolve(wrong)


def test_files_are_written_and_read(place):
    path = place / "file.json"
    assert workdir.read_text(path) is None
    for text in ("one", "zwei\n"):
        workdir.write_text(path, text)
        assert workdir.read_text(path) == text
    workdir.append_line(place / "lines", "a")
    workdir.append_line(place / "lines", "b")
    assert workdir.read_text(place / "lines") == "a\nb\n"
    assert {p.name for p in place.iterdir()} == {"file.json", "lines"}  # nothing temporary


def test_lines_follow_those_that_are_there(place):
    for text in ("one", "two"):
        lines = workdir.open_lines(place / "log")
        lines.write(text)
        lines.close()
    assert workdir.read_text(place / "log") == "one\ntwo\n"


def test_metrics_are_cut_to_the_step_of_the_resume(place):
    with MetricsWriter(place) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"train/loss": 1.0})
    with MetricsWriter(place, 2):
        assert recorded_steps(place, "train/loss") == {1, 2}


def test_in_a_bucket_lines_are_there_when_synced_and_now_and_then(bucket, monkeypatch):
    path = bucket / "metrics.jsonl"
    lines = workdir.open_lines(path)
    lines.write("one")
    assert workdir.read_text(path) is None
    lines.sync()
    assert workdir.read_text(path) == "one\n"
    before = path.stat()
    lines.sync()
    assert path.stat() == before
    lines.close()
    monkeypatch.setattr(workdir, "_EVERY_S", 0.01)
    lines = workdir.open_lines(path)
    lines.write("two")
    wait_for(lambda: workdir.read_text(path) == "one\ntwo\n")
    lines.close()


def test_a_failed_upload_is_told_and_made_good(bucket, monkeypatch, caplog):
    put = workdir.write_text

    def fail(path, text):
        raise OSError(f"{path} cannot be used (no network)")

    path = bucket / "metrics.jsonl"
    lines = workdir.open_lines(path)
    lines.write("one")
    monkeypatch.setattr(workdir, "write_text", fail)
    lines.sync()
    assert f"new lines of {path} are not there yet: {path} cannot be used (no" in caplog.text
    monkeypatch.setattr(workdir, "write_text", put)
    lines.close()
    assert workdir.read_text(path) == "one\n"


def test_a_run_that_lost_its_directory_overwrites_no_metrics(bucket, caplog):
    def lost():
        raise OSError("another run took over")

    path = bucket / "metrics.jsonl"
    lines = workdir.open_lines(path, lost)
    workdir.write_text(path, "of the other run\n")
    lines.write("one")
    lines.close()
    assert "another run took over" in caplog.text
    assert workdir.read_text(path) == "of the other run\n"


def test_errors_on_a_disk_stay_what_they_are(tmp_path):
    with pytest.raises(IsADirectoryError):
        workdir.read_text(tmp_path)


ASK = """
import json, sys, time
from maxmars import workdir
from maxmars.checkpoint.lease import Lease
workdir._PROBE_S = 2.0
found = {}
for bucket in sys.argv[1:]:
    started = time.monotonic()
    try:
        workdir.require_access(f"gs://{bucket}/run")
        Lease.open(f"gs://{bucket}/run/checkpoints").release()
    except (OSError, ImportError) as error:
        found[bucket] = str(error)
    assert time.monotonic() - started < 20
print(json.dumps(found))
"""


def ask(environment, *buckets):
    done = subprocess.run(
        [sys.executable, "-c", ASK, *buckets],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_gcsfs = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs (extra `gcs`)"
)


@needs_gcsfs
def test_buckets_that_cannot_be_used_are_told_in_a_line_each():
    with fake_gcs.serve() as server:
        found = ask(server.environment, "bucket", "missing", "status-401", "status-403")
        unreachable = server.environment | {"TENSORSTORE_GCS_HTTP_URL": "http://127.0.0.1:9"}
    assert server.objects == {}
    assert found["missing"] == (
        "gs://missing/run/checkpoints cannot be used (NOT_FOUND: The specified bucket does not "
        "exist.); make the bucket, or check its name."
    )
    for status in ("401", "403"):
        error = found.pop(f"status-{status}")
        assert error.startswith(f"gs://status-{status} cannot be used (PERMISSION_DENIED: ")
        assert "log in (`gcloud auth application-default login`), or give the machine's" in error
    assert found.keys() == {"missing"}
    found = ask(unreachable, "bucket")
    assert found["bucket"].startswith("gs://bucket cannot be used (")
    assert found["bucket"].endswith("); check the network.")
