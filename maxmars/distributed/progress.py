"""Progress of a command on the terminal, and the log of each process of a run.

Only the primary process prints; every process writes its progress and its error to
`<workdir>/logs/host_<process>.log`. On a terminal rich draws one live row; elsewhere (SLURM's
files, pipes, notebooks) lines with the time come every 10 to 60 seconds.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Generator
from types import TracebackType

import rich.console
import rich.progress
import rich.table
import rich.text
from etils import epath

from maxmars.config.numbers import duration
from maxmars.distributed.exits import leaving_at_once
from maxmars.distributed.files import LineFile
from maxmars.distributed.workdir import LOGS, of_process

_DELAY_S = 2.0
_LOGGER = logging.getLogger("maxmars")


class _Warnings(logging.Handler):
    """Gives the warnings that maxmars logs to `show`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a full disk: a warning must not stop a run
            self._show(record.getMessage())


class _Time(rich.progress.ProgressColumn):
    """Time left of a task with a total, elapsed time of a task without."""

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        return rich.text.Text(_time_of(task))


def _time_of(task: rich.progress.Task) -> str:
    if task.total is None:
        return duration(task.elapsed or 0.0)
    left = task.time_remaining
    return f"ETA {duration(float(left))}" if left else ""


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Progress of one task after another.

    On a terminal, rich's live row with a bar, which disappears at the end; permanent lines stand
    above. Elsewhere, permanent lines, and between them a line with the time every 10 seconds, in a
    long run every minute. Within the `with` block, warnings that maxmars logs are permanent lines.
    """

    def __init__(
        self,
        *,
        stderr: bool = False,
        quiet: bool = False,
        console: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show progress on `console`.

        Args:
          stderr: print to standard error, for a command whose output is for other programs; nothing
            is shown in the first two seconds.
          quiet: print no lines; on a terminal show only the live row.
          console: replaces standard output or error.
          clock: returns seconds.
        """
        self._console = console or rich.console.Console(
            stderr=stderr,
            highlight=False,
            force_jupyter=False,  # in a notebook rich makes a block of its own of each line
            force_terminal=(sys.stderr if stderr else sys.stdout).isatty(),  # not FORCE_COLOR
        )
        self._clock, self._start = clock, clock()
        self._stderr, self._quiet = stderr, quiet
        self._last_line: float | None = None
        # `process_index` alone would start JAX's devices, and an import would load JAX.
        jax = sys.modules.get("jax")
        self._is_primary = (
            jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0
        )
        self._is_live = (
            self._is_primary and self._console.is_terminal and not self._console.is_dumb_terminal
        )
        self._rows = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TextColumn("{task.description}", markup=False),
            _Time(rich.table.Column(no_wrap=True)),
            console=self._console,
            refresh_per_second=4,
            speed_estimate_period=3600.0,
            transient=True,
            get_time=clock,
            disable=not self._is_live,
        )
        self._task: rich.progress.Task | None = None
        self._early: list[str] = []
        self._copy: Callable[[str], None] = self._early.append
        self._warnings = _Warnings(self.message)
        self._handlers, self._propagates = _LOGGER.handlers[:], _LOGGER.propagate

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def copy_to(self, write: Callable[[str], None]) -> None:
        """Give all earlier and later lines to `write` as well, in every process."""
        for text in self._early:
            write(text)
        self._copy = write

    def update(
        self, text: str, done: int = 0, total: int | None = None, *, keep: bool = False
    ) -> None:
        """Show the progress of the task.

        Args:
          text: description of the task and its state.
          done: number of finished parts, such as steps. A smaller number than before, or another
            `total`, begins a new task.
          total: number of all parts; None if they are not counted.
          keep: print this line permanently.
        """
        task = self._task
        if task is None or total != task.total or done < task.completed:
            if task is not None:
                self._rows.remove_task(task.id)
            self._rows.add_task(text, total=total, completed=done)
            task = self._task = self._rows.tasks[-1]
            self._rows.advance(task.id, 0)  # start of the speed: parts done before do not count
        self._rows.update(task.id, description=text, completed=done)
        if self._stderr and self.elapsed_s < _DELAY_S:
            return
        if total is not None:
            text = f"{text}  {_time_of(task)}".rstrip()
        self._show(text, keep=keep)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Generator[None]:
        """Show `text`, on a terminal with the elapsed time, if the block takes over two seconds.

        A timer does so, as the block may be one long call such as a compilation.
        """
        row = self._rows.add_task(text, total=None, visible=False)

        def show() -> None:
            self._rows.update(row, visible=True)
            self._last_line = None
            with contextlib.suppress(OSError):
                self._show(text)

        timer = threading.Timer(_DELAY_S, show)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            self._rows.remove_task(row)  # while live: rich's next start moves up by the last height
            self.close()

    def message(self, text: str) -> None:
        """Print lines; on a terminal, above the live row."""
        self._copy(text)
        self._print(text)

    def close(self) -> None:
        """Remove the live row."""
        if self._is_live:
            self._rows.stop()

    def __enter__(self) -> Progress:
        self._handlers, self._propagates = _LOGGER.handlers[:], _LOGGER.propagate
        if not self._quiet:  # a quiet `Progress` prints no lines, so other handlers must
            _LOGGER.handlers.clear()
            _LOGGER.propagate = False
        _LOGGER.addHandler(self._warnings)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        _LOGGER.handlers[:], _LOGGER.propagate = self._handlers, self._propagates

    def _show(self, line: str, *, keep: bool = False) -> None:
        """Show the live rows; without them, print the line if one is due."""
        now, every = self._clock(), min(max(10.0, self.elapsed_s / 100), 60.0)
        if keep or self._last_line is None or now - self._last_line >= every:
            self._last_line = now
            self._copy(line)
            if keep or not self._is_live:
                self._print(line)
        self._rows.start()

    def _print(self, text: str) -> None:
        if self._quiet or not self._is_primary:
            return
        if self._console.is_terminal:
            text = "\n".join(self._wrapped(line) for line in text.splitlines())
        else:
            text = f"{time.strftime('%H:%M:%S')} {text}"
        self._console.print(text, markup=False, soft_wrap=True)
        self._console.file.flush()

    def _wrapped(self, line: str) -> str:
        return textwrap.fill(
            line,
            self._console.width,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )


@contextlib.contextmanager
def loading_jax(*, stderr: bool = False) -> Generator[None]:
    """Show on a terminal that the block loads JAX, which takes seconds; Ctrl-C in it ends the
    process at once. For `stderr` see `Progress`."""
    progress = Progress(stderr=stderr, quiet=True)
    with leaving_at_once(), progress, progress.waiting("loading JAX"):
        yield


class HostLog(contextlib.AbstractContextManager["HostLog"]):
    """Log of one process: lines with the time, and an error that leaves the `with` block.

    Within the block the log also gets unraisable errors, such as those of TensorStore's threads
    after a failed save.
    """

    def __init__(
        self, workdir: epath.PathLike, process: int, *, may_write: Callable[[], None] = lambda: None
    ) -> None:
        """Open `<workdir>/logs/host_<process>.log`; for `may_write` see `files.LineFile`."""
        self.path = epath.Path(workdir) / of_process(LOGS, process, ".log")
        self._lines = LineFile(self.path, may_write)

    def __enter__(self) -> HostLog:
        self._previous, sys.unraisablehook = sys.unraisablehook, self._write_unraisable
        return self

    def write(self, text: str) -> None:
        """Append `text` after the date and time."""
        self._lines.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.write("".join(traceback.format_exception(error)).rstrip())
        sys.unraisablehook = self._previous
        self._lines.close()

    def _write_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_value is not None:
            with contextlib.suppress(OSError):
                self.write("".join(traceback.format_exception(unraisable.exc_value)).rstrip())
