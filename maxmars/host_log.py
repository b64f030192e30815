"""What each process of a run did, in a file of its own: `<workdir>/logs/host_000.log`.

Only the primary process prints; where another one stands, or what it failed with, is told here.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from pathlib import Path
from types import TracebackType


class HostLog(contextlib.AbstractContextManager["HostLog"]):
    """Appends lines with the time; an error that leaves the `with` block is written as well."""

    def __init__(self, workdir: Path, process: int) -> None:
        """Open `<workdir>/logs/host_<process>.log`, after what earlier parts of the run wrote."""
        self.path = workdir / "logs" / f"host_{process:03d}.log"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a")

    def write(self, text: str) -> None:
        """Append a line, on the disk at once."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write(f"{now} {text}\n")
        self._file.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the error, if there is one, and close."""
        if error is not None:
            self.write("".join(traceback.format_exception(error)).rstrip())
        self._file.close()
