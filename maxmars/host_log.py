"""What each process of a run did, in a file of its own: `<workdir>/logs/host_000.log`.

Only the primary process prints; where another one stands, or what it failed with, is told here.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from maxmars.workdir import Workdir, open_lines


class HostLog(contextlib.AbstractContextManager["HostLog"]):
    """Appends lines with the time; an error that leaves the `with` block is written as well."""

    def __init__(
        self, workdir: Workdir, process: int, *, may_write: Callable[[], None] = lambda: None
    ) -> None:
        """Open `<workdir>/logs/host_<process>.log`, after what earlier parts of the run wrote.

        For `may_write` see `workdir.open_lines`.
        """
        self.path = workdir / "logs" / f"host_{process:03d}.log"
        self._lines = open_lines(self.path, may_write)

    def write(self, text: str) -> None:
        """Append a line, on a disk at once."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._lines.write(f"{now} {text}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the error, if there is one, and close."""
        if error is not None:
            self.write("".join(traceback.format_exception(error)).rstrip())
        self._lines.close()
