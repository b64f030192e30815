"""How a command shows where it is, and the log that each process of a run keeps.

Only the primary process prints. Where another process stands, or what it failed with, is in
`<workdir>/logs/host_<process>.log`.
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
import rich.live
import rich.progress_bar
import rich.table
import rich.text

from maxmars.config.numbers import duration
from maxmars.distributed.exits import leaving_at_once
from maxmars.distributed.files import LineFile, Workdir
from maxmars.distributed.workdir import LOGS, of_process

_PLAIN_EVERY_S = 10.0, 60.0  # at first, and after an hour and a half
_BAR_WIDTH = 20
_DELAY_S = 2.0
_LOGGER = logging.getLogger("maxmars")


class _Warnings(logging.Handler):
    """Gives the warnings that maxmars logs to `show`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # of a full disk: a warning must not stop a run
            self._show(record.getMessage())


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Progress of one task after another.

    On a terminal it is one live line with a bar, above which the lines to keep stay. Elsewhere it
    is a line with the time every 10 seconds, in a long run every minute, besides the lines to keep.
    Notebooks are no terminals. Within its `with` block the warnings that maxmars logs, such as of a
    damaged checkpoint, are lines like the others.
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
          stderr: print to standard error, where the output of the command is for other programs;
            the live line goes away at the end, and a task of less than two seconds shows nothing.
          quiet: print no lines; on a terminal show only the live line, which goes away at the end.
          console: instead of standard output or error.
          clock: in seconds.
        """
        self._console = console or rich.console.Console(
            stderr=stderr,
            highlight=False,
            force_jupyter=False,  # in a notebook rich makes a block of its own of each line
            force_terminal=(sys.stderr if stderr else sys.stdout).isatty(),  # not FORCE_COLOR
        )
        self._clock, self._start = clock, clock()
        self._stderr, self._quiet = stderr, quiet
        self._pace: tuple[int | None, int, float] = (None, 0, 0.0)  # total, first done, its time
        self._last_done = 0
        self._last_line: float | None = None
        self._is_kept = False  # whether the live line also stays above it
        jax = sys.modules.get("jax")  # asking it more would start its devices, or load it
        self._is_primary = (
            jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0
        )
        self._is_live = (
            self._is_primary and self._console.is_terminal and not self._console.is_dumb_terminal
        )
        self._early: list[str] = []  # lines before `copy_to`
        self._copy: Callable[[str], None] = self._early.append
        self._live: rich.live.Live | None = None
        self._warnings = _Warnings(self.message)
        self._handlers, self._propagates = _LOGGER.handlers[:], _LOGGER.propagate

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def copy_to(self, write: Callable[[str], None]) -> None:
        """In every process, give each line so far and from now on to `write` as well."""
        for text in self._early:
            write(text)
        self._copy = write

    def update(
        self,
        text: str,
        done: int | None = None,
        total: int | None = None,
        *,
        seconds_left: float | None = None,
        keep: bool = False,
    ) -> None:
        """Show how far the task is.

        Args:
          text: what to show.
          done: number of parts that are done, such as steps; a smaller one than before, or another
            `total`, begins another task.
          total: number of all parts.
          seconds_left: an estimate to show as long as the pace is not known.
          keep: print this line also where the next one would soon take its place.
        """
        now = self._clock()
        first_every, last_every = _PLAIN_EVERY_S
        every = min(max(first_every, (now - self._start) / 100), last_every)
        if done is not None and total is not None:
            if self._pace[0] != total or done < self._last_done:
                self._pace = (total, done, now)
            self._last_done = done
            _, first, since = self._pace
            if done > first:
                seconds_left = (total - done) * (now - since) / (done - first)
            if seconds_left is not None and done < total:
                text = f"{text}  ETA {duration(seconds_left)}"
        if self._stderr and self.elapsed_s < _DELAY_S:
            return
        due = self._last_line is None or now - self._last_line >= every
        self._is_kept = keep
        if due or keep or (done is not None and done == total):
            self._last_line = now
            self._copy(text)
            if keep or not self._is_live:
                self._print(text)
        if self._is_live:
            if self._live is None:
                self._live = rich.live.Live(
                    console=self._console, auto_refresh=False, transient=self._quiet or self._stderr
                )
                self._live.start()
            self._live.update(self._with_bar(text, done, total), refresh=True)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Generator[None]:
        """Show `text` and the seconds so far while the block runs, which may be one long call such
        as a compilation; on a terminal the live line then goes away."""
        began, done = self._clock(), threading.Event()

        def show() -> None:
            with contextlib.suppress(OSError):  # nobody reads it
                while not done.wait(0.2):
                    if (seconds := self._clock() - began) > _DELAY_S / 2:
                        self.update(f"{text}, {seconds:.0f} s")

        thread = threading.Thread(target=show, daemon=True, name="waiting")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.close()

    def message(self, text: str) -> None:
        """Print lines; on a terminal, above the live one."""
        self._copy(text)
        self._print(text)

    def close(self) -> None:
        """End the live line, which stays on the screen as it is unless it does above."""
        if self._live is not None:
            self._live.transient |= self._is_kept
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        self._handlers, self._propagates = _LOGGER.handlers[:], _LOGGER.propagate
        if not self._quiet:  # else who printed them goes on, as this prints no lines
            _LOGGER.handlers.clear()
            _LOGGER.propagate = False
        _LOGGER.addHandler(self._warnings)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        _LOGGER.handlers[:], _LOGGER.propagate = self._handlers, self._propagates

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

    def _with_bar(
        self, line: str, done: int | None, total: int | None
    ) -> rich.console.RenderableType:
        text = rich.text.Text(line, no_wrap=True, overflow="ellipsis")
        width = min(_BAR_WIDTH, self._console.width - len(line) - 2)
        if done is None or not total or width < _BAR_WIDTH // 2:
            return text
        row = rich.table.Table.grid(padding=(0, 2, 0, 0))
        row.add_row(rich.progress_bar.ProgressBar(total, done, width), text)
        return row


@contextlib.contextmanager
def loading_jax(*, stderr: bool = False) -> Generator[None]:
    """Say on a terminal that the block imports what loads JAX, which takes seconds; Ctrl-C then
    ends the process at once. For `stderr` see `Progress`."""
    progress = Progress(stderr=stderr, quiet=True)
    with leaving_at_once(), progress, progress.waiting("loading JAX"):
        yield


class HostLog(contextlib.AbstractContextManager["HostLog"]):
    """Appends lines with the time; an error that leaves the `with` block is written as well.

    Within the block the log also gets the errors that Python can raise nowhere. After a save that
    failed each write that was under way has one, in a thread of TensorStore.
    """

    def __init__(
        self, workdir: Workdir, process: int, *, may_write: Callable[[], None] = lambda: None
    ) -> None:
        """Open `<workdir>/logs/host_<process>.log`; for `may_write` see `files.LineFile`."""
        self.path = workdir / of_process(LOGS, process, ".log")
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
            with contextlib.suppress(OSError):  # of a full disk
                self.write("".join(traceback.format_exception(unraisable.exc_value)).rstrip())
