"""How a run shows where it is: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import Any

import rich.console
import rich.live
import rich.text

from maxmars import distributed
from maxmars.metrics import duration, short

_PLAIN_EVERY_S = 10.0
_BAR_WIDTH = 20


class ProgressLine:
    """Progress of a run: on a terminal one live line, elsewhere a line with the time now and then.

    Only the primary process prints; see `copy_to` for the others. Notebooks are no terminals.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        console: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show progress towards `num_steps` on `console` (default: standard output)."""
        self._num_steps = num_steps
        self._console = console or rich.console.Console(
            highlight=False,
            force_jupyter=False,  # which makes a block of its own of each line
            force_terminal=sys.stdout.isatty(),  # whatever FORCE_COLOR says
        )
        self._clock = clock
        self._first: tuple[int, float] | None = None  # step and time of the first update
        self._last_line: float | None = None
        self._enabled = distributed.is_primary()
        self._copy: Callable[[str], None] | None = None
        self._live: rich.live.Live | None = None
        if self._enabled and self._console.is_terminal and not self._console.is_dumb_terminal:
            starting = rich.text.Text("starting", style="dim")
            self._live = rich.live.Live(starting, console=self._console, auto_refresh=False)
            self._live.start(refresh=True)

    def copy_to(self, write: Callable[[str], None]) -> None:
        """From now on, in every process, give each line to `write` as well."""
        self._copy = write

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show metrics after `step` steps: `train/loss`, and `perf/...` as far as it is there."""
        line, now = self._line(step, metrics), self._clock()
        due = self._last_line is None or now - self._last_line >= _PLAIN_EVERY_S
        if due or step == self._num_steps:
            self._last_line = now
            if self._copy is not None:
                self._copy(line)
            if self._live is None:
                self._print(line)
        if self._live is not None:
            self._live.update(self._with_bar(step, line), refresh=True)

    def message(self, text: str) -> None:
        """Print lines; on a terminal, above the live one."""
        if self._copy is not None:
            self._copy(text)
        self._print(text)

    def finish(self, text: str) -> None:
        """Print the last lines of the run, below the live one, which is over."""
        self.close()
        self.message(text)

    def close(self) -> None:
        """End the live line, which stays on the screen as it is."""
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def _print(self, text: str) -> None:
        if not self._enabled:
            return
        if self._console.is_terminal:
            text = "\n".join(self._wrapped(line) for line in text.splitlines())
        else:
            text = f"{time.strftime('%H:%M:%S')} {text}"
        self._console.print(text, markup=False, soft_wrap=True)
        self._console.file.flush()

    def _wrapped(self, line: str) -> str:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        return textwrap.fill(
            line,
            self._console.width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def _with_bar(self, step: int, line: str) -> rich.text.Text:
        text = rich.text.Text(line, no_wrap=True, overflow="ellipsis")
        room = min(_BAR_WIDTH, self._console.width - len(line) - 2)
        if room < _BAR_WIDTH // 2:
            return text
        full = room * step // max(1, self._num_steps)
        sign = "=" if self._console.options.ascii_only else "━"
        bar = rich.text.Text.assemble((full * sign, "cyan"), ((room - full) * sign, "bright_black"))
        return rich.text.Text.assemble(bar, "  ", text, no_wrap=True, overflow="ellipsis")

    def _line(self, step: int, metrics: Mapping[str, Any]) -> str:
        width = len(str(self._num_steps))
        parts = [f"step {step:>{width}}/{self._num_steps}"]
        parts.append(f"loss {float(metrics['train/loss']):.4f}")
        if "perf/tokens_per_sec" in metrics:
            parts.append(f"{short(float(metrics['perf/tokens_per_sec']))} tok/s")
        if "perf/mfu" in metrics:
            parts.append(f"MFU {float(metrics['perf/mfu']):.1%}")
        remaining_s = self._remaining_s(step, metrics)
        if remaining_s is not None:
            parts.append(f"ETA {duration(remaining_s)}")
        return "  ".join(parts)

    def _remaining_s(self, step: int, metrics: Mapping[str, Any]) -> float | None:
        """Seconds to the end at the pace since the first update, evaluations included.

        At the first update, whose time is mostly compilation, at the pace of its steps alone.
        """
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        if step == self._num_steps:
            return None
        if step > first_step:
            return (self._num_steps - step) * (now - first_time) / (step - first_step)
        if "perf/step_time" in metrics:
            return (self._num_steps - step) * float(metrics["perf/step_time"])
        return None
