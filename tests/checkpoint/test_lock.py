"""One writer at a time: kernel locks on a disk, and the last start in a bucket."""

import importlib.util
import json
import subprocess
import sys

import fake_gcs
import pytest
from etils import epath
from refusals import refused

from maxmars.checkpoint.lock import FileLock, acquire

pytestmark = pytest.mark.smoke


def test_a_directory_that_is_gone_or_another_one_is_noticed(tmp_path):
    path = epath.Path(tmp_path) / "run"
    path.mkdir()
    lock = FileLock(path)
    lock.check()
    path.rename(tmp_path / "moved")
    with refused(OSError, path):
        lock.check()
    path.mkdir()
    other = FileLock(path)
    other.check()
    with refused(OSError, path):
        lock.check()
    lock.release()
    other.release()


def test_a_link_is_no_lock(tmp_path):
    (tmp_path / "precious").write_text("keep")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with refused(OSError, tmp_path / ".lock"):
        FileLock(epath.Path(tmp_path))
    assert (tmp_path / "precious").read_text() == "keep"


def test_a_damaged_record_is_no_obstacle(tmp_path):
    path = epath.Path(tmp_path) / "new"
    lock = acquire(path)
    (path / ".lock").write_text("no JSON")
    with refused(ValueError, path):
        FileLock(path, timeout_s=0.0)
    lock.release()
    FileLock(path).release()


CLIENT = """
import json
from maxmars.checkpoint import list_steps
from maxmars.checkpoint.lock import InUseError, acquire, is_owned
directory = "gs://bucket/run/checkpoints"

first = acquire(directory)
first.check()
second = acquire(directory)
try:
    first.check()
except InUseError as error:
    taken_over = str(error)
second.check()
first.release()
second.check()
print(json.dumps([taken_over, is_owned(directory), list_steps(directory)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs (extra `gcs`)")
def test_in_a_bucket_the_last_start_owns_the_directory():
    """And a step counts once it is committed. The client reads where the server is at its first
    use: hence a process of its own."""
    with fake_gcs.serve() as server:
        for name in ("3/meta/data.json", "3/commit_success.txt", "4/meta/data.json", "x/y"):
            server.put(f"run/checkpoints/{name}", b"{}")
        before = set(server.objects)
        process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            env=server.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    taken_over, is_owned, steps = json.loads(output)
    assert f"process {process.pid} on" in taken_over
    assert "gs://bucket/run/checkpoints" in taken_over
    assert not is_owned
    assert steps == [3]
    assert set(server.objects) == before | {"run/checkpoints/owner.json"}
    assert [name for name, _, _ in server.writes] == ["run/checkpoints/owner.json"] * 2
