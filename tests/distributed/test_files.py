"""Files of a working directory, on a disk and through the real libraries in a bucket."""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import resource

import fake_gcs
import pytest
from etils import epath
from refusals import refused, stopped
from running import run_python

from maxmars import cli
from maxmars.distributed import files


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.resolve("a/b") == files.resolve("~/a/b") == tmp_path / "a/b"
    assert isinstance(files.resolve(tmp_path), epath.Path)
    assert files.is_remote(epath.Path("gs://bucket/run"))
    assert not files.is_remote(files.resolve("a"))
    for wrong in ("gs:/bucket/run", "gs:///run", "gs://", "s3://bucket/run"):
        with refused(ValueError, wrong, "gs://BUCKET/"):
            files.resolve(wrong)


@pytest.mark.parametrize("mount", ["gs", "s3", "az", "hf"])
def test_a_mount_named_like_a_scheme_is_on_the_disk(mount):
    path = files.resolve(f"/{mount}/no-such-tokens")
    for place in (path, path / "a", path.parent, files.resolve(path), epath.Path(str(path))):
        assert not files.is_remote(place)
    assert os.path.normpath(path).lstrip("/") == f"{mount}/no-such-tokens"
    assert files.read_text(f"/{mount}/no-such-tokens/file") is None


def test_files_are_written_and_read(tmp_path):
    path = tmp_path / "new" / "file"
    assert files.read_text(path) is None
    for text in ("one", "zwei\n"):
        files.write_text(path, text)
        assert files.read_text(path) == text
    assert [p.name for p in path.parent.iterdir()] == ["file"]  # nothing temporary


def test_a_replacement_that_fails_leaves_the_file(tmp_path):
    files.write_text(tmp_path / "file", "before")

    def fail():
        with files.replacing(tmp_path / "file") as temporary:
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, "no space")

    with refused(OSError, "no space"):
        fail()
    assert (tmp_path / "file").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def append(path, line):
    with contextlib.closing(files.LineFile(path)) as lines:
        lines.write(line)


@pytest.mark.parametrize("write", [files.write_text, append])
def test_an_error_of_a_write_names_the_file(write, tmp_path):
    """The system does not: neither of a full disk, nor of a file that may not be so long."""
    path, (soft, hard) = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_text("before\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with refused(OSError, path) as raised:
            write(path, "a" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert path.read_text().startswith("before\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_lines_follow_those_that_are_there(tmp_path):
    for text in ("one", "two"):
        append(tmp_path / "log", text)
    assert files.read_text(tmp_path / "log") == "one\ntwo\n"


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b'{"step": \xe2}', b'{"stfp": 2}', b"[2]", b"7", b"[" * 100_000]
)
def test_a_line_that_does_not_parse_is_skipped_and_counted(tmp_path, caplog, line):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2, "a": "b"}\n{"step": 3')
    assert files.read_json_lines(path, "step") == [{"step": 1}, {"step": 2, "a": "b"}]
    files.read_json_lines(path, "step")
    (told,) = caplog.messages  # once, however often it is read
    assert f"{path}: damaged lines skipped: 1" in told
    append(path, '{"step": 4}')  # below what a kill cut off
    assert files.read_json_lines(path, "step")[-1] == {"step": 4}
    assert f"{path}: damaged lines skipped: 2" in caplog.messages[-1]


def test_json(tmp_path):
    path = tmp_path / "file.json"
    assert files.read_json(path) is None
    files.write_json(path, {"a": [1, "ä"]})
    assert files.read_json(path) == {"a": [1, "ä"]}
    for damage in (b"\xff", b'{"a": ', b""):
        path.write_bytes(damage)
        with refused(ValueError, path):
            files.read_json(path)
    with pytest.raises(IsADirectoryError):  # errors on a disk stay what they are
        files.read_text(tmp_path)


@pytest.mark.parametrize("read", [files.read_json, files.read_json_object])
def test_what_does_not_end_or_is_nested_too_deep_is_refused_in_a_line(tmp_path, read):
    path = tmp_path / "config.json"
    for content in ("[" * 10**6, '{"a": ' * 10**6, "[" * 10**6 + "]" * 10**6):
        path.write_text(content)
        with refused(ValueError, path):
            read(path)
    os.mkfifo(tmp_path / "pipe")
    for endless in ("/dev/zero", "pipe"):
        path.unlink()
        path.symlink_to(endless)
        with refused(ValueError, path):
            read(path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no space
    with refused(ValueError, path):
        read(path)


def test_digest_and_cache(tmp_path, monkeypatch):
    content, blocks = os.urandom(3_000_000), []
    (tmp_path / "file").write_bytes(content)
    assert files.sha256_of(tmp_path / "file", blocks.append) == hashlib.sha256(content).hexdigest()
    assert sum(blocks) == len(content)
    monkeypatch.setenv("MAXMARS_CACHE", "~/there")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_directory() == tmp_path / "there"
    monkeypatch.delenv("MAXMARS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert files.cache_directory() == tmp_path / "caches" / "maxmars"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_directory() == tmp_path / ".cache" / "maxmars"


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/proc/nobody")
    for name in ("MAXMARS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    run = str(tmp_path / "run")
    with stopped(1, "~/.cache/maxmars", "MAXMARS_CACHE") as errors:
        cli.main(["train", "quickstart", "--workdir", run, "--num-processes", "1"])
    assert len(errors.lines) == 1
    assert not (tmp_path / "run").exists()


def test_a_lock_has_one_owner_until_its_file_is_closed(tmp_path):
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second:
        assert files.try_lock(first, path)
        assert not files.try_lock(second, path)
        fcntl.flock(first, fcntl.LOCK_UN)
        assert files.try_lock(second, path)


BUCKET = """
import logging, sys, time
from maxmars.distributed import files

logging.basicConfig(stream=sys.stdout, format="%(message)s")
run = files.resolve("gs://bucket/run")
path = run / "file.json"
assert files.read_text(path) is None
for text in ("one", "zwei"):
    files.write_text(path, text)
    assert files.read_text(path) == text
log = run / "log"
lines = files.LineFile(log)
lines.write("one")
assert files.read_text(log) is None
lines.sync()
assert files.read_text(log) == "one\\n"
lines.write("two")
lines.close()
lines = files.LineFile(log, lambda: None, every_s=0.05)  # now and then
lines.write("three")
deadline = time.monotonic() + 30
while files.read_text(log) != "one\\ntwo\\nthree\\n":
    assert time.monotonic() < deadline
    time.sleep(0.02)
lines.close()

problem = [OSError("another run took over")]
def may_write():
    for error in problem:
        raise error
lines = files.LineFile(log, may_write)
lines.write("four")
lines.sync()  # warns
assert files.read_text(log).endswith("three\\n")
problem.clear()
lines.close()
assert files.read_text(log).endswith("three\\nfour\\n")
"""

needs_gcsfs = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs (extra `gcs`)"
)


@pytest.mark.seconds
@needs_gcsfs
def test_a_bucket_has_whole_files_and_lines_now_and_then():
    with fake_gcs.serve() as server:
        done = run_python("-c", BUCKET, environment=server.environment)
    warning = "new lines of gs://bucket/run/log are not there yet: another run took over"
    assert warning in done.stdout.splitlines()


ASK = """
import json, sys, time
from maxmars.distributed import files

errors = {}
for bucket in sys.argv[1:]:
    started = time.monotonic()
    try:
        files.resolve(f"gs://{bucket}/run")
        place = f"gs://{bucket}/run/checkpoints"
        with files.reporting(place):
            files.open_store(place).write("a", b"").result()
    except (OSError, ImportError) as error:
        errors[bucket] = str(error)
    assert time.monotonic() - started < 45
print(json.dumps(errors))
"""


def ask(environment, *buckets):
    return json.loads(run_python("-c", ASK, *buckets, environment=environment).stdout)


@needs_gcsfs
def test_buckets_that_cannot_be_used_are_told_in_a_line_each():
    with fake_gcs.serve() as server:
        errors = ask(server.environment, "bucket", "missing", "status-401", "status-403")
    assert set(server.objects) == {"run/checkpoints/a"}
    assert "gs://missing/run/checkpoints" in errors["missing"]
    for status in ("401", "403"):
        error = errors.pop(f"status-{status}")
        assert error.startswith(f"gs://status-{status} ")
        assert "`gcloud auth application-default login`" in error
    assert errors.keys() == {"missing"}


COMMANDS_ON_A_BUCKET = (
    "train quickstart --workdir gs://bucket/run --num-processes 1",
    "train quickstart:data=gs://bucket/tokens --num-processes 1",
    "data prepare gs://bucket/*.txt tokens",
)


@needs_gcsfs
@pytest.mark.seconds
@pytest.mark.parametrize("command", COMMANDS_ON_A_BUCKET)
def test_a_store_that_is_not_reached_is_told_in_a_line(command, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code = 2 if "data=gs://bucket" in command else 1  # of CONFIG
    with stopped(code, "gs://bucket", "check the network") as errors:
        cli.main(command.split())
    assert len(errors.lines) == 1
