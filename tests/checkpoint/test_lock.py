"""One writer at a time: kernel locks, and leases on a store with conditional writes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import tensorstore
from etils import epath

from maxmars import distributed
from maxmars.checkpoint import lock as lock_module
from maxmars.checkpoint.lease import Lease
from maxmars.checkpoint.lock import FileLock, acquire

HOLD = """
import sys, time
from etils import epath
from maxmars.checkpoint.lock import FileLock
lock = FileLock(epath.Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


def test_the_kernel_frees_the_lock_of_a_killed_process(tmp_path):
    path = epath.Path(tmp_path)
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout.readline() == "locked\n"
        with pytest.raises(
            ValueError, match=rf"is being written by process {owner.pid} on .*--wor"
        ):
            FileLock(path, patience_s=0.2)
        owner.send_signal(signal.SIGKILL)
        FileLock(path).release()
    FileLock(path).release()


def test_an_unreadable_record_is_no_obstacle(tmp_path):
    path = epath.Path(tmp_path)
    (path / ".lock").write_text("no JSON")
    lock = FileLock(path)
    (path / ".lock").write_text("again")
    with pytest.raises(ValueError, match="is being written by another run"):
        FileLock(path, patience_s=0.0)
    lock.release()


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock_module.fcntl, "flock", refuse)
    FileLock(epath.Path(tmp_path)).release()
    assert "has no locks (Function not implemented)" in caplog.text


def test_other_processes_of_a_run_take_no_lock(tmp_path, monkeypatch):
    path = epath.Path(tmp_path) / "new"
    mine = acquire(path)
    monkeypatch.setattr(distributed, "is_primary", lambda: False)
    assert acquire(path) is None
    monkeypatch.setattr(distributed, "everywhere", lambda ok: False)
    with pytest.raises(OSError, match=r"process 0 could not open .*; it says why"):
        acquire(path)
    mine.release()


DURATION_S = 0.4


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    spec = {"driver": request.param, "path": f"{tmp_path}/"}
    return tensorstore.KvStore.open(spec, context=tensorstore.Context()).result()


def lease(store):
    return Lease(store, "gs://bucket/run", DURATION_S)


def owner(store):
    return json.loads(store.read("owner.json").result().value)


def test_a_lease_is_refused_while_its_owner_lives_and_free_when_released(store):
    mine = lease(store)
    time.sleep(2 * DURATION_S)  # renewed meanwhile
    mine.check()
    with pytest.raises(ValueError, match=rf"run is being written by process {os.getpid()} on"):
        lease(store)
    mine.check()
    mine.release()
    assert store.read("owner.json").result().state == "missing"
    started = time.monotonic()
    lease(store).release()
    assert time.monotonic() - started < DURATION_S


def kill(owner):
    """Stop renewing, as a killed process does."""
    owner._stop.set()
    owner._thread.join()


def test_a_dead_owners_lease_is_taken_over_after_its_duration(store):
    dead = lease(store)
    kill(dead)
    started = time.monotonic()
    mine = lease(store)
    assert time.monotonic() - started > DURATION_S
    assert owner(store)["token"] == mine._token
    with pytest.raises(OSError, match="lost its ownership of gs://bucket/run"):
        dead.check()
    mine.check()
    dead.release()  # deletes its own generation only
    assert owner(store)["token"] == mine._token
    mine.release()


def test_an_owner_that_slept_too_long_notices_that_it_lost(store):
    sleeper = lease(store)
    kill(sleeper)
    mine = lease(store)
    sleeper._renew()
    assert sleeper._lost
    with pytest.raises(OSError, match="lost its ownership"):
        sleeper.check()
    mine._renew()
    mine.check()
    mine.release()


def test_a_write_whose_answer_was_lost_is_not_a_loss(store):
    mine = lease(store)
    kill(mine)
    mine._write(mine._generation)  # the new generation is forgotten
    mine._renew()
    assert not mine._lost
    mine._renew()
    mine.check()
    mine.release()


class Busy:
    """A store in which somebody else writes between our read and our write."""

    def __init__(self, store, record):
        self._store, self._record = store, record

    def read(self, key):
        return self._store.read(key)

    def write(self, key, value, if_equal):
        if self._record is not None:
            self._store.write(key, self._record).result()
            self._record = None
        return self._store.write(key, value, if_equal=if_equal)


def test_of_two_that_start_together_one_is_refused(store):
    first = lease(store)
    kill(first)
    record = store.read("owner.json").result().value
    store.write("owner.json", None).result()
    started = time.monotonic()
    second = lease(Busy(store, record))  # waits for the first, which is dead
    assert time.monotonic() - started > DURATION_S
    second.release()
