"""One writer at a time: kernel locks, and leases on a store with conditional writes."""

import importlib.util
import json
import os
import subprocess
import sys
import time

import fake_gcs
import pytest
import tensorstore
from etils import epath
from refusals import refused

from maxmars.checkpoint.lock import FileLock, Lease, acquire


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
        FileLock(path, patience_s=0.0)
    lock.release()
    FileLock(path).release()


DURATION_S = 0.4


class Network:
    """The way of one run to a store, with the accidents that it can meet."""

    def __init__(self, store):
        self.store = store
        self.is_cut = False
        self.loses_answer = False
        self.other_writes = None
        """What somebody else writes between our next read and our next write."""

    def read(self, key):
        if self.is_cut:
            raise OSError("no network")
        return self.store.read(key)

    def write(self, key, value, if_equal):
        if self.is_cut:
            raise OSError("no network")
        if self.other_writes is not None:
            self.store.write(key, self.other_writes).result()
            self.other_writes = None
        written = self.store.write(key, value, if_equal=if_equal)
        if self.loses_answer:
            self.loses_answer = False
            written.result()
            raise OSError("no answer")
        return written


@pytest.fixture
def store():
    return tensorstore.KvStore.open({"driver": "memory"}, context=tensorstore.Context()).result()


def lease(store):
    return Lease(store, "gs://bucket/run", DURATION_S)


def record(store):
    return store.read("owner.json").result().value


def test_a_living_owner_keeps_its_lease_and_a_silent_one_loses_it(store, caplog):
    network = Network(store)
    silent = lease(network)
    time.sleep(2 * DURATION_S)  # renewed meanwhile
    with refused(ValueError, "gs://bucket/run", f"process {os.getpid()}"):
        lease(store)
    silent.check()
    network.is_cut = True
    started = time.monotonic()
    mine = lease(store)
    assert time.monotonic() - started > DURATION_S
    with refused(OSError, "gs://bucket/run"):
        silent.check()
    network.is_cut = False  # it awakes, and sees that another run took over
    deadline = time.monotonic() + 10
    while "took over gs://bucket/run" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with refused(OSError, "gs://bucket/run"):
        silent.check()
    silent.release()  # deletes nothing of the other
    mine.check()
    mine.release()
    assert store.read("owner.json").result().state == "missing"


def test_a_write_whose_answer_was_lost_is_not_a_loss(store):
    network = Network(store)
    mine = lease(network)
    before = record(store)
    network.loses_answer = True
    time.sleep(2 * DURATION_S)
    assert not network.loses_answer
    mine.check()
    assert record(store) == before
    mine.release()


def test_of_two_that_start_together_one_is_refused(store):
    network, other = Network(store), Network(store)
    first = lease(other)
    other.is_cut = True
    network.other_writes = record(store)
    store.write("owner.json", None).result()
    started = time.monotonic()
    second = lease(network)  # waits for the first, which is silent
    assert time.monotonic() - started > DURATION_S
    second.release()
    first.release()


CLIENT = """
import json, time
from maxmars.checkpoint import list_steps
from maxmars.checkpoint.lock import Lease, is_owned
from maxmars.distributed.files import open_store
directory = "gs://bucket/run/checkpoints"

first = Lease(open_store(directory), directory, 1.0)
time.sleep(0.5)  # renewed meanwhile
try:
    Lease(open_store(directory), directory, 1.0)
    refused = None
except ValueError as error:
    refused = str(error)
owned = is_owned(directory)
first.check()
first.release()
print(json.dumps([refused, owned, is_owned(directory), list_steps(directory)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs (extra `gcs`)")
def test_buckets_through_the_real_client():
    """Every write names the generation that it replaces, and a step counts once it is committed.

    The client reads where the server is at its first use: hence a process of its own.
    """
    with fake_gcs.serve() as server:
        for name in ("3/meta/data.json", "3/commit_success.txt", "4/meta/data.json", "x/y"):
            server.put(f"run/checkpoints/{name}", b"{}")
        before = set(server.objects)
        done = subprocess.run(
            [sys.executable, "-c", CLIENT],
            env=server.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    refused, owned, owned_after, steps = json.loads(done.stdout)
    assert (owned, owned_after) == (True, False)
    assert refused.startswith("gs://bucket/run/checkpoints ")
    assert steps == [3]
    assert set(server.objects) == before
    assert {name for name, _, _ in server.writes} == {"run/checkpoints/owner.json"}
    assert all(wanted is not None for _, wanted, _ in server.writes)
    assert server.writes[0][1] == 0
    assert len(server.writes) >= 3  # made, renewed, deleted
