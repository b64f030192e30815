"""One writer at a time: a run owns its directory of checkpoints while it has it open for writing.

On a disk the kernel holds the lock (`flock` on `.lock`) and releases it when the process dies,
however it dies. A lock is never stale, and nobody has to delete a file. An object store has no
kernel: there a `Lease` takes its place.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from typing import IO, Any

from maxmars.config.errors import EXTERNAL_ERRORS
from maxmars.distributed import processes
from maxmars.distributed.files import (
    is_remote,
    make_directory,
    open_store,
    reporting,
    require_access,
    try_lock,
)

_LOGGER = logging.getLogger(__name__)

_PATIENCE_S = 2.0  # a process that is being killed keeps its lock until its memory is freed
_LEASE_KEY = "owner.json"
_LEASE_S = 60.0
_SIGN_OF_LIFE_S = 20.0  # an owner renews its lease every 15 s


class InUseError(ValueError):
    """Another run owns the directory."""


def acquire(directory: Any) -> FileLock | Lease | None:
    """Make the directory and own it, in the name of all processes; they must all call.

    The primary process gets the lock, the others None.

    Raises:
      InUseError: another run owns it; every process raises.
      OSError: it cannot be written to; every process raises.
    """
    lock, problem = None, None
    if processes.is_primary():
        try:
            require_access(directory)
            make_directory(directory)
            if is_remote(directory):
                lock = Lease(open_store(directory), os.fspath(directory))
            else:
                lock = FileLock(directory)
        except EXTERNAL_ERRORS as error:
            problem = error
    told = None if problem is None else type(problem).__name__
    if (told := processes.from_primary(told)) is None:
        return lock
    kind = InUseError if told == InUseError.__name__ else OSError
    raise problem or kind(f"process 0 could not open {directory} for writing; it says why.")


def is_owned(directory: Any, patience_s: float = 0.0) -> bool:
    """Whether a living process on any host owns a directory.

    Waits `patience_s` for an owner on a disk. In a bucket a living owner rewrites its lease within
    `_SIGN_OF_LIFE_S`; without a lease the answer comes at once.
    """
    require_access(directory)
    if is_remote(directory):
        return _is_rewritten(open_store(directory), os.fspath(directory))
    path = directory / ".lock"
    try:
        with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+") as file:
            return not try_lock(file, path, patience_s)
    except OSError:
        return False


def _is_rewritten(store: Any, name: str) -> bool:
    """Whether a lease is there, and gets another generation while it is watched."""
    seen, deadline = set(), time.monotonic() + _SIGN_OF_LIFE_S
    while len(seen) < 2 and time.monotonic() < deadline:
        with reporting(name):
            lease = store.read(_LEASE_KEY).result()
        if lease.state == "missing":
            return False
        seen.add(lease.stamp.generation)
        time.sleep(0.5)
    return len(seen) == 2


class FileLock:
    """A kernel lock on `<directory>/.lock`, whose contents tell other runs who owns it.

    Raises:
      InUseError: the directory has another owner, who did not go within `patience_s`.
      OSError: the file cannot be created, or is a link.
    """

    def __init__(self, directory: Any, patience_s: float = _PATIENCE_S) -> None:
        path = directory / ".lock"
        self._path = path
        # What a link leads to would be written over.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._file: IO[str] = os.fdopen(os.open(path, flags, 0o666), "r+")
        try:
            if not try_lock(self._file, path, patience_s):
                raise _in_use(directory, self._file.read())
            with contextlib.suppress(OSError):  # a full disk: others learn less, but are kept out
                self._file.truncate(0)
                self._file.write(json.dumps(_owner()))
                self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def check(self) -> None:
        """Raise OSError if the directory is not the one that was locked: deleted, renamed, or its
        lock file was."""
        try:
            is_ours = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            raise OSError(
                f"{self._path} was deleted or moved while this run held it, so the directory may "
                "belong to another run; nothing more is written there."
            )

    def release(self) -> None:
        """Let others have the directory."""
        with contextlib.suppress(OSError):
            self._file.truncate(0)
        self._file.close()


class Lease:
    """Ownership of a directory in an object store: a small object that its owner keeps rewriting.

    The store's generations decide, not clocks and not the object's contents. Every write names the
    generation that it replaces, or that there is none, so that the store refuses one of two that
    want it. An owner writes every quarter of the lease's duration. Whoever sees the generation
    stand still for a whole duration, on its own clock, may take over. An owner that could not renew
    for so long, or that finds another one's object, has lost the lease and must not start another
    save. (A save that it began before can still end: no object store has a way to prevent that.)

    Args:
      store: `tensorstore.KvStore` at the directory, whose writes are conditional on generations.
      name: name of the directory, for messages.
      duration_s: duration of the lease; taking over from a dead owner takes as long.

    Raises:
      InUseError: the directory has a living owner.
      OSError: it cannot be read or written.
    """

    def __init__(self, store: Any, name: str, duration_s: float = _LEASE_S) -> None:
        self._store, self._name, self._duration_s = store, name, duration_s
        self._token = uuid.uuid4().hex
        self._record = json.dumps(_owner() | {"token": self._token}).encode()
        self._generation = self._take()
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_stopped, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise OSError if this run may own the directory no more: it must not write there."""
        if self._lost or time.monotonic() - self._renewed > self._duration_s:
            raise OSError(
                f"this run lost its ownership of {self._name} (another run took over, or the store "
                "could not be reached for too long), so it must not write there any more."
            )

    def release(self) -> None:
        """Let others have the directory at once."""
        self._stop.set()
        self._thread.join()
        if not self._lost:
            try:
                self._store.write(_LEASE_KEY, None, if_equal=self._generation).result()
            except Exception as error:
                _LOGGER.warning("%s stays owned until the lease expires: %s", self._name, error)

    def _take(self) -> bytes:
        """Write the object when there is none, or when its owner is dead; its generation."""
        watched, since = None, 0.0
        while True:
            lease = self._read()
            generation = lease.stamp.generation
            if lease.state == "missing" or (
                generation == watched and time.monotonic() - since > self._duration_s
            ):
                taken = self._write(generation)
                if taken:
                    return taken
            elif watched is None:
                watched, since = generation, time.monotonic()
                _LOGGER.warning(
                    "%s: waiting up to %.0f s to see whether its owner, %s, is alive",
                    *(self._name, self._duration_s, _describe_owner(lease.value)),
                )
            elif generation != watched:
                raise _in_use(self._name, lease.value)
            time.sleep(self._duration_s / 20)

    def _write(self, generation: bytes) -> bytes:
        """Write if the object still has this generation; the new one, or b"" if it has not."""
        started = time.monotonic()
        with reporting(self._name):
            stamp = self._store.write(_LEASE_KEY, self._record, if_equal=generation).result()
        written = stamp.generation
        if written:
            self._renewed = started
        return written

    def _read(self) -> Any:
        with reporting(self._name):
            return self._store.read(_LEASE_KEY).result()

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(self._duration_s / 4):
            try:
                written = self._write(self._generation)
                if not written:  # perhaps our own write came first, whose answer was lost
                    lease = self._read()
                    if _fields(lease.value).get("token") != self._token:
                        self._lost = True
                        _LOGGER.error("another run took over %s", self._name)
                        return
                    written = lease.stamp.generation
                self._generation = written
            except Exception as error:  # the store may be back in time
                _LOGGER.warning("the lease of %s could not be renewed: %s", self._name, error)


def _owner() -> dict[str, Any]:
    """This process, as its record tells others."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _fields(record: str | bytes) -> dict[str, Any]:
    """The fields of an owner's record; none of a file that is damaged or of another kind."""
    with contextlib.suppress(ValueError):
        fields = json.loads(record)
        if isinstance(fields, dict):
            return fields
    return {}


def _describe_owner(record: str | bytes) -> str:
    fields = _fields(record)
    if not {"host", "pid", "since"} <= fields.keys():
        return "another run"
    return f"process {fields['pid']} on {fields['host']} (since {fields['since']})"


def _in_use(directory: Any, record: str | bytes) -> InUseError:
    return InUseError(
        f"{directory} is being written by {_describe_owner(record)}: two runs in one directory "
        "would overwrite each other's checkpoints. Wait until it ends or stop it, or choose "
        "another --workdir."
    )
