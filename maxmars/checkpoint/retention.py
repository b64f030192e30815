"""Which checkpoints are kept, and when one is due by the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxmars import distributed
from maxmars.config import CheckpointConfig


class Retention:
    """Keeps the newest, the best, and some for good, as a `CheckpointConfig` says.

    `outdated` holds steps that the run will write anew: they count as nothing, but are not deleted
    while they are newer than what is kept.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        """Start with no known metrics."""
        self._config = config
        self._metric: dict[int, float] = {}
        self.outdated: set[int] = set()

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Remember the metrics of the checkpoint of a step.

        Raises:
          ValueError: there are some, but not the one that decides which is best.
        """
        name = self._config.best_metric
        self._metric.pop(step, None)
        if self._config.keep_best is None or not metrics:
            return
        if name not in metrics:
            raise ValueError(
                f"checkpoint.best_metric={name!r} is not stored with checkpoints; "
                f"{', '.join(metrics)} is."
            )
        if math.isfinite(metrics[name]):
            self._metric[step] = metrics[name]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether to keep each checkpoint (Orbax's PreservationPolicy)."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = self.kept(steps)
        return [step in kept for step in steps]

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Those of the steps whose checkpoints are kept."""
        valid = sorted(set(steps) - self.outdated)
        newest = valid[-self._config.keep_last :]
        if not newest:
            return set(steps)
        kept = set(newest) | {step for step in steps if step > newest[0]}
        if self._config.keep_best is not None:
            scored = [step for step in valid if step in self._metric]
            kept |= set(sorted(scored, key=self._rank)[: self._config.keep_best])
        if self._config.keep_every is not None:
            # The first at or after each multiple: by minutes, steps are no round numbers.
            windows = {step // self._config.keep_every: step for step in reversed(valid)}
            kept |= {step for window, step in windows.items() if window > 0}
        return kept

    def _rank(self, step: int) -> tuple[float, int]:
        return self._metric[step], -step


class SaveTimer:
    """Says when `every_minutes` are over since the last save, at the same step in every process.

    The primary process's clock decides. Asking the others costs an exchange between processes, so
    the clock is only looked at after half of the steps that fit into the time left, then half of
    the rest, and so on.
    """

    def __init__(
        self, every_minutes: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the time now; None is never due."""
        self._interval_s = None if every_minutes is None else 60 * every_minutes
        self._clock = clock
        self._since = clock()
        self._first_step: int | None = None
        self._next_look = 0

    def restart(self) -> None:
        """Start the time anew: a checkpoint was written."""
        self._since = self._clock()
        self._first_step = None
        self._next_look = 0

    def is_due(self, step: int) -> bool:
        """Whether the time is over; every process must ask at each step."""
        if self._interval_s is None or step < self._next_look:
            return False
        if self._first_step is None:
            self._first_step = step
        elapsed = self._clock() - self._since
        steps_left = (self._interval_s - elapsed) * (step - self._first_step) / max(elapsed, 1e-9)
        ahead = max(1, min(int(steps_left / 2), 10**6))
        due, ahead = distributed.from_primary([int(elapsed >= self._interval_s), ahead])
        self._next_look = step + ahead
        return bool(due)
