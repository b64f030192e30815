"""What a comparison shows while it runs: a line a cell, and on a terminal a bar of the one at work.

What cells themselves would print is left out; it is in their metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class CellProgress:
    """Progress of one cell after the other; a `run.Progress` for each of them."""

    def __init__(self, console: Console | None = None) -> None:
        """Print to `console` (default: standard output)."""
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[found]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal or self._console.is_dumb_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> CellProgress:
        """Begin to show."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        self._bar.stop()

    def begin(self, text: str, num_steps: int) -> None:
        """A cell, or several together, begin."""
        self.end()
        self._task = self._bar.add_task(text, total=num_steps, found="")

    def end(self) -> None:
        """Take the bar of the cell away."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False)
        self._console.file.flush()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Move the bar."""
        if self._task is not None:
            found = f"step {step}  loss {float(metrics['train/loss']):.3f}"
            self._bar.update(self._task, completed=step, found=found)

    def message(self, text: str) -> None:
        """Leave out what a cell says."""

    def finish(self, text: str) -> None:
        """Leave out what a cell comes to."""
