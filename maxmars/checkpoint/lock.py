"""One writer at a time: a run owns its directory of checkpoints while the directory is open.

On a disk the kernel holds the lock (`flock` on `.lock`), and releases it when the process dies by
any cause. So a lock is never stale, nobody has to delete a file, and a second run is refused. An
object store has no such lock, and cannot tell whether an owner is alive: there a second run takes
over (`Claim`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import IO

from etils import epath

from maxmars.distributed import processes
from maxmars.distributed.files import (
    is_remote,
    make_directory,
    open_store,
    parse_json,
    reporting,
    try_lock,
)

_TIMEOUT_S = 2.0  # a process that is being killed keeps its lock until its memory is freed
_OWNER_KEY = "owner.json"
_CHECK_RETRIES = 16  # for a minute: a run should not end for a short fault of the network


class InUseError(ValueError):
    """Another run owns the directory, or has taken over."""


def acquire(directory: epath.PathLike) -> FileLock | Claim | None:
    """Make a directory, and own it for all processes of the run; all must call.

    Returns:
      The lock in the primary process, and None in the others; in a bucket a claim in each.

    Raises:
      InUseError: another run owns the directory.
      OSError: the directory cannot be written to.
      Processes other than the primary raise ValueError instead.
    """
    lock = None

    def own() -> str | None:
        nonlocal lock
        if is_remote(directory):
            return write_claim(directory)
        make_directory(directory)
        lock = FileLock(directory)
        return None

    generation = processes.text_from_primary(own)
    return lock if generation is None else Claim(directory, generation)


def is_owned(directory: epath.PathLike, timeout_s: float = 0.0) -> bool:
    """Whether a living process on any host owns a directory, after a wait of at most `timeout_s`.

    A directory in a bucket is never owned: a new start takes over.
    """
    if is_remote(directory):
        return False
    path = os.path.join(directory, ".lock")
    try:
        with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+") as file:
            return not try_lock(file, path, timeout_s)
    except OSError:
        return False


class FileLock:
    """A kernel lock on `<directory>/.lock`; the contents of the file describe the owner.

    Raises:
      InUseError: the directory still has another owner after `timeout_s`.
      OSError: the file cannot be created, or is a link.
    """

    def __init__(self, directory: epath.PathLike, timeout_s: float = _TIMEOUT_S) -> None:
        self._path = os.path.join(directory, ".lock")
        # O_NOFOLLOW: the target of a link would be overwritten.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._file: IO[str] = os.fdopen(os.open(self._path, flags, 0o666), "r+")
        try:
            if not try_lock(self._file, self._path, timeout_s):
                owner = _describe_owner(self._file.read())
                raise InUseError(
                    f"{directory} is being written by {owner}: two runs in one directory would "
                    "overwrite each other's checkpoints. Wait until it ends or stop it, or choose "
                    "another --workdir."
                )
            with contextlib.suppress(OSError):  # a full disk: the lock holds without a description
                self._file.truncate(0)
                self._file.write(_owner_record())
                self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def check(self) -> None:
        """Raise OSError if the lock file is gone from its path: it or the directory was deleted or
        renamed."""
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


def write_claim(directory: epath.PathLike) -> str:
    """Write `owner.json` into a directory in a bucket.

    Returns:
      The object's generation after this write, in hex; see `Claim`.

    Raises:
      OSError: the object cannot be written.
    """
    with reporting(directory):
        stamp = open_store(directory).write(_OWNER_KEY, _owner_record().encode()).result()
    return stamp.generation.hex()


class Claim:
    """Ownership of a directory in a bucket: the last process that wrote `owner.json` is the owner.

    Before each save, a run compares the object's generation with that of its own write. If they
    differ, a later start has taken over, and this run writes and deletes nothing more. (A save that
    is under way may still be completed: object stores cannot prevent that.)

    Args:
      directory: path in the bucket.
      generation: generation of the object when the primary process wrote it, in hex.
    """

    def __init__(self, directory: epath.PathLike, generation: str) -> None:
        self._directory, self._generation = directory, generation
        self._store = open_store(directory, max_retries=_CHECK_RETRIES)

    def check(self) -> None:
        """Raise InUseError if another start has taken over, OSError if the store times out."""
        with reporting(self._directory):
            owner = self._store.read(_OWNER_KEY).result()
        if owner.stamp.generation.hex() != self._generation:
            raise InUseError(
                f"{_describe_owner(owner.value)} has taken over {self._directory}, as the last "
                "start of a run in a bucket wins: this one writes and deletes nothing more there, "
                "and ends. To go on here, stop the other and give the same command again."
            )

    def release(self) -> None:
        """Do nothing: a new start takes over anyway, and the object shows the last owner."""


def _owner_record() -> str:
    """JSON that describes this process."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since})


def _describe_owner(record: str | bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged record is no obstacle
        owner = parse_json(record)
        return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"
    return "another run"
