"""One writer at a time: a run owns its directory of checkpoints while it has it open for writing.

On a disk the kernel holds the lock (`flock` on `.lock`) and releases it when the process dies,
however it dies. A lock is never stale, nobody has to delete a file, and a second run is refused. An
object store has no kernel, and cannot tell whether an owner is alive: there a second run takes over
(`Claim`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from typing import IO, Any, TypeVar

from maxmars.config.errors import EXTERNAL_ERRORS
from maxmars.distributed import processes
from maxmars.distributed.files import (
    is_remote,
    make_directory,
    open_store,
    parse_json,
    reporting,
    require_access,
    try_lock,
)

_PATIENCE_S = 2.0  # a process that is being killed keeps its lock until its memory is freed
_OWNER_KEY = "owner.json"
_CHECK_RETRIES = 16  # for a minute: a run should not end for a short fault of the network

T = TypeVar("T")


class InUseError(ValueError):
    """Another run owns the directory, or has taken it over."""


def acquire(directory: Any) -> FileLock | Claim | None:
    """Make the directory and own it, in the name of all processes; they must all call.

    On a disk the primary process gets the lock, and the others None.

    Raises:
      InUseError: another run owns it; every process raises.
      OSError: it cannot be written to; every process raises.
    """

    def own() -> FileLock | Claim:
        require_access(directory)
        make_directory(directory)
        return Claim.take(directory) if is_remote(directory) else FileLock(directory)

    lock = _in_primary(own, directory)
    generation = processes.from_primary(lock.generation if isinstance(lock, Claim) else None)
    return lock if generation is None else Claim(directory, generation)


def check_together(lock: FileLock | Claim | None, directory: Any) -> None:
    """Check that the directory is still this run's; all processes must call, and get one answer.

    Raises:
      InUseError, OSError: it is not, or nobody can tell; see the `check` of both locks.
    """
    _in_primary(lambda: lock and lock.check(), directory)


def _in_primary(function: Callable[[], T], directory: Any) -> T | None:
    """What a function returns in the primary process, None in the others; its error in all."""
    result, problem = None, None
    if processes.is_primary():
        try:
            result = function()
        except EXTERNAL_ERRORS as error:
            problem = error
    told = None if problem is None else type(problem).__name__
    if (told := processes.from_primary(told)) is None:
        return result
    kind = InUseError if told == InUseError.__name__ else OSError
    raise problem or kind(
        f"process 0 could not open {directory} for writing, or has lost it; it says why."
    )


def is_owned(directory: Any, patience_s: float = 0.0) -> bool:
    """Whether a living process on any host owns a directory.

    Waits `patience_s` for it to go. In a bucket none is: a new start takes over.
    """
    require_access(directory)
    if is_remote(directory):
        return False
    path = directory / ".lock"
    try:
        with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+") as file:
            return not try_lock(file, path, patience_s)
    except OSError:
        return False


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


class Claim:
    """Ownership of a directory in a bucket: the last process that wrote `owner.json` has it.

    A start writes the object and remembers its generation, which the store gives to each write. The
    run asks before each save whether that is still the object's: the start after it wins, and this
    run writes and deletes nothing more. (A save that it began before can still end: no object store
    has a way to prevent that.)

    Args:
      directory: path in the bucket.
      generation: of the object, in hex, as the primary process wrote it.
    """

    def __init__(self, directory: Any, generation: str) -> None:
        self.generation = generation
        self._name = os.fspath(directory)
        self._store = open_store(directory, max_retries=_CHECK_RETRIES)

    @classmethod
    def take(cls, directory: Any) -> Claim:
        """Write the object.

        Raises:
          OSError: it cannot be written.
        """
        record = json.dumps(_owner()).encode()
        with reporting(directory):
            stamp = open_store(directory).write(_OWNER_KEY, record).result()
        return cls(directory, stamp.generation.hex())

    def check(self) -> None:
        """Raise InUseError if another start has taken over, OSError if the store cannot tell."""
        with reporting(self._name):
            owner = self._store.read(_OWNER_KEY).result()
        if owner.stamp.generation.hex() != self.generation:
            raise InUseError(
                f"{_describe_owner(owner.value)} has taken over {self._name}, as the last start of "
                "a run in a bucket wins: this one writes and deletes nothing more there, and ends. "
                "To go on here, stop the other and give the same command again."
            )

    def release(self) -> None:
        """Nothing: the object tells who had the directory last, and a new start waits for none."""


def _owner() -> dict[str, Any]:
    """This process, as its record tells others."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _fields(record: str | bytes) -> dict[str, Any]:
    """The fields of an owner's record; none of a file that is damaged or of another kind."""
    with contextlib.suppress(ValueError):
        fields = parse_json(record)
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
