"""One writer at a time: kernel locks on a disk, and the last start in a bucket."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import fake_gcs
import pytest
from etils import epath
from refusals import refused
from states import MESH, config, make_state, place

from maxmars.checkpoint import Checkpointer
from maxmars.checkpoint.lock import FileLock, acquire

pytestmark = pytest.mark.smoke
TESTS = str(Path(fake_gcs.__file__).parent)
needs_gcsfs = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs (extra `gcs`)"
)


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
import json, os
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
print(json.dumps([os.getpid(), taken_over, is_owned(directory), list_steps(directory)]))
"""


def run_client(program, server):
    """What a program prints, JSON on the last line. Clients read where the server is at their first
    use: hence a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=server.environment | {"PYTHONPATH": TESTS},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@needs_gcsfs
def test_in_a_bucket_the_last_start_owns_the_directory():
    """And a step counts once it is committed."""
    with fake_gcs.serve() as server:
        for name in ("3/meta/data.json", "3/commit_success.txt", "4/meta/data.json", "x/y"):
            server.put(f"run/checkpoints/{name}", b"{}")
        before = set(server.objects)
        pid, taken_over, is_owned, steps = run_client(CLIENT, server)
    assert f"process {pid} on" in taken_over
    assert "gs://bucket/run/checkpoints" in taken_over
    assert not is_owned
    assert steps == [3]
    assert set(server.objects) == before | {"run/checkpoints/owner.json"}
    assert [name for name, _, _ in server.writes] == ["run/checkpoints/owner.json"] * 2


OPENING = """
import json
from maxmars.checkpoint import Checkpointer
from maxmars.config import MeshConfig
from maxmars.distributed import sharding
from tiny import tiny_config

config, mesh = tiny_config(), sharding.make_mesh(MeshConfig())
with Checkpointer("gs://bucket/run/checkpoints", config, mesh=mesh) as checkpointer:
    print(json.dumps(checkpointer.latest_step()))
"""


@pytest.mark.slow
@needs_gcsfs
def test_in_a_bucket_the_run_before_may_delete_a_checkpoint_meanwhile(tmp_path):
    """It ends at its next save, and until then deletes what it need not keep."""
    with Checkpointer(tmp_path, config(), mesh=MESH) as checkpointer:
        for step in (3, 4):
            checkpointer.save(step, place(make_state()), data_position=0, wait=True)

    def delete_the_oldest(path):
        if server.lists.count("run/checkpoints/3/") > 1:  # Orbax takes it for a checkpoint
            for name in [name for name in server.objects if "/checkpoints/3/" in name]:
                del server.objects[name]

    with fake_gcs.serve() as server:
        server.put_directory(tmp_path, "run/checkpoints")
        for step in (3, 4):
            server.put(f"run/checkpoints/{step}/commit_success.txt", b"")
        server.on_request = delete_the_oldest
        assert run_client(OPENING, server) == 4
        assert not any("/checkpoints/3/" in name for name in server.objects)
