"""One writer at a time: whoever opens a directory of checkpoints for writing owns it until closed.

On a local path the kernel holds the lock (`flock` on `.lock`), and lets go of it when the process
dies however it dies, so it is never stale and nobody ever has to delete a file. Object stores have
no kernel: see `maxmars.checkpoint.lease`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from typing import IO, Any

from maxmars import distributed
from maxmars.checkpoint.lease import Lease, in_use, owner_record
from maxmars.workdir import is_remote, make_directory, require_access

_LOGGER = logging.getLogger(__name__)

# A process that is being killed keeps its lock until its memory is freed.
_PATIENCE_S = 2.0
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class FileLock:
    """A kernel lock on `<directory>/.lock`."""

    def __init__(self, directory: Any, patience_s: float = _PATIENCE_S) -> None:
        """Lock the directory, which must exist; another owner has `patience_s` to go.

        Raises:
          ValueError: it has another owner.
          OSError: the file cannot be created.
        """
        path = directory / ".lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._file: IO[str] = os.fdopen(descriptor, "r+")
        try:
            if not _flock(descriptor, time.monotonic() + patience_s):
                raise in_use(directory, self._file.read())
            with contextlib.suppress(OSError):  # for other runs' messages only
                self._file.truncate(0)
                self._file.write(owner_record())
                self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def check(self) -> None:
        """Do nothing: the kernel does not lose it."""

    def release(self) -> None:
        """Let others have it."""
        with contextlib.suppress(OSError):
            self._file.truncate(0)
        self._file.close()


def acquire(directory: Any) -> FileLock | Lease | None:
    """Make the directory and own it, in the name of all processes; they must all call.

    Returns:
      The lock, in the primary process; None in the others.

    Raises:
      ValueError: another run owns it; every process raises.
      OSError: it cannot be written to; every process raises.
    """
    lock, problem = None, None
    if distributed.is_primary():
        try:
            require_access(directory)
            make_directory(directory)
            lock = Lease.open(directory) if is_remote(directory) else FileLock(directory)
        except (ValueError, OSError, ImportError) as error:
            problem = error
    if distributed.everywhere(problem is None):
        return lock
    raise problem or OSError(f"process 0 could not open {directory} for writing; it says why.")


def _flock(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            _LOGGER.warning(
                "this file system has no locks (%s): make sure yourself that no other run writes "
                "to the same --workdir",
                error.strerror,
            )
            return True
