"""A directory in the making, `OUT.partial`: locked, resumable, published by one rename."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from maxmars.data.sources import LateStatus

_RETRY_S = 0.2


class PartialDirectory:
    """Where a directory is made before it gets its name; a context that holds the lock on it.

    What is left after a failure stays, so that a later run can continue; `discard` removes it.

    Args:
      out: the directory to make.
      wait: wait while another process makes it, rather than fail.

    Attributes:
      path: `OUT.partial`.
      content: the directory in it where token shards are written.

    Raises:
      FileExistsError: `out` exists, or another process is making it.
    """

    def __init__(self, out: Path, *, wait: bool = False) -> None:
        """Name the directory; make nothing."""
        self._out, self._wait = out, wait
        self.path = out.with_name(f"{out.name}.partial")
        self.content = self.path / "content"
        self._lock: IO[str] | None = None

    def __enter__(self) -> PartialDirectory:
        """Make and lock the directory."""
        self._refuse_if_out_exists()
        found = set()
        with contextlib.suppress(FileNotFoundError):
            found = {path.name for path in self.path.iterdir()}
        if found and "lock" not in found:
            raise FileExistsError(
                f"{self.path}, where {self._out} would be made, exists and is no unfinished "
                "preparation; delete or rename it."
            )
        with LateStatus() as status:
            while not self._try_lock():
                status.update(f"waiting for another process that prepares {self._out}")
                time.sleep(_RETRY_S)
        try:
            self._refuse_if_out_exists()  # another process may have been faster
        except FileExistsError:
            self.__exit__()
            raise
        if not self.content.exists():
            self._remove_all_but_lock()  # left by a run that was killed after it had published
            self.content.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _refuse_if_out_exists(self) -> None:
        if not self._out.exists():
            return
        if (self.path / "lock").exists() and not self.content.exists():
            shutil.rmtree(self.path, ignore_errors=True)  # what publishing leaves behind
        raise FileExistsError(f"{self._out} exists; delete it or choose another name.")

    def _try_lock(self) -> bool:
        """Whether the lock is ours now."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            file = (self.path / "lock").open("a+")
        except FileNotFoundError:
            return False  # its owner has just removed the directory
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            if self._wait:
                return False
            raise FileExistsError(
                f"process {owner or 'unknown'} is preparing {self._out} at this moment; wait for "
                "it or choose another name."
            ) from error
        except OSError as error:
            file.close()
            raise OSError(
                f"the file system of {self.path} cannot lock files ({error.strerror}); write to "
                "a local disk and move the result here."
            ) from error
        # The owner before us may have removed the file that we have locked.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (self.path / "lock").stat()):
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
                self._lock = file
                return True
        file.close()
        return False

    def claim(self, arguments: Mapping[str, Any]) -> None:
        """Compare the arguments with those of the run that left something here, if any did.

        What counts is `state.json`: a run that saved no state left nothing to continue.

        Raises:
          ValueError: they differ.
        """
        earlier = self.read("arguments.json")
        if earlier is None or self.read("state.json") is None:
            self.write("arguments.json", dict(arguments))
        elif earlier != arguments:
            names = {n for n in {*earlier, *arguments} if earlier.get(n) != arguments.get(n)}
            differences = ", ".join(
                f"{name} was {_short(earlier.get(name))}, now {_short(arguments.get(name))}"
                for name in sorted(names)
            )
            raise ValueError(
                f"{self.path} holds an unfinished preparation with other arguments: {differences}. "
                "Run the earlier command to finish it, or delete that directory to start anew."
            )

    def read(self, name: str) -> Any:
        """A JSON file beside the content; None if there is none.

        Raises:
          ValueError: it is damaged.
        """
        path = self.path / name
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{path} is damaged; delete {self.path} to start anew.") from error

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file beside the content, atomically."""
        path = self.path / name
        temporary = path.with_name(f"{name}.tmp")
        with temporary.open("w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(self.path)

    def publish(self, directory: Path) -> None:
        """Give a directory in here its name, and remove the rest.

        Raises:
          FileExistsError: `out` has appeared.
        """
        for path in (*directory.rglob("*"), directory):
            sync(path)
        self._refuse_if_out_exists()
        directory.rename(self._out)
        sync(self._out.absolute().parent)
        self.discard()

    def discard(self) -> None:
        """Remove everything, the lock last of all."""
        self._remove_all_but_lock()
        shutil.rmtree(self.path, ignore_errors=True)

    def _remove_all_but_lock(self) -> None:
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "lock":
                path.unlink(missing_ok=True)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def sync(path: Path) -> None:
    """Bring a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
