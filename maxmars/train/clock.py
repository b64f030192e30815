"""The clock of a run: seconds by activity, and a watchdog for hangs.

The loop names its intervals, `with clock("steps", "step 5", kind="step")`. Goodput and the rates in
metrics come from the seconds of each activity (`journal.ACTIVITIES`), hangs from the interval that
is open. Other processes would wait in a collective for ever for a process that hangs, so each
watches itself, by a thread: an interval that takes too long ends the process with the stacks of all
threads and exit code 75, and a launcher starts the run again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

from maxmars.distributed.run_process import end_hanging

_TIMEOUT_FACTOR = 10


class _Interval(NamedTuple):
    """An interval that has begun and not ended."""

    activity: str
    name: str | None = None
    """Name for the message of a hang; None has no timeout."""
    timeout_s: float = 0.0
    kind: str | None = None
    began: float = 0.0


class Clock(contextlib.AbstractContextManager["Clock"]):
    """Times exactly one activity of a process at a time. Inside a `with` block on the clock, a
    watchdog ends a process that hangs.

    The timeout of an interval with a kind, such as a step, is `hang_timeout_s`, or ten times the
    previous interval of the kind if that is longer. The first of a kind, which may compile, and a
    named interval without a kind, such as a checkpoint, have ten times `hang_timeout_s`. None
    disables the watchdog.
    """

    def __init__(
        self,
        hang_timeout_s: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s, self._now = hang_timeout_s, now
        self.start = time.time()
        """Start of the process, seconds since 1970."""
        self._seconds: dict[str, float] = {}
        self._since = now()
        # Outside of all blocks: `start` until the first step, then `other`.
        self._open = _Interval("start")
        self._previous_s: dict[str, float] = {}  # kind -> seconds of the interval before
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Clock:
        if self._timeout_s is not None:
            self._thread = threading.Thread(
                target=self._watch, args=(self._timeout_s,), daemon=True, name="watchdog"
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @contextlib.contextmanager
    def __call__(
        self, activity: str, name: str | None = None, *, kind: str | None = None
    ) -> Generator[None, None, None]:
        """Time a block as one interval of an activity, which interrupts the block around it.

        Args:
          activity: one of `journal.ACTIVITIES`. The first of the `steps` counts as `compile`.
          name: name of the interval in the message of a hang; None has no timeout.
          kind: name of many intervals, each about as long as the previous one.
        """
        if activity == "steps" and kind not in self._previous_s:
            activity = "compile"
        outer = self._open
        self._begin(activity, name, kind)
        began = self._since
        # No `finally`: after an error the interval stays open, and its timeout covers the closing
        # of the run, which may wait for other processes.
        yield
        # A new object, which the watchdog, by identity, takes for a new interval: the outer block
        # gets its whole timeout again.
        self._switch_to(_Interval("other") if activity == "compile" else outer._replace())
        if kind is not None:
            self._previous_s[kind] = self._since - began

    def lap(self, kind: str) -> None:
        """Begin the next interval of a kind, such as a batch, within a block, and end the last."""
        if self._open.kind == kind:
            self._previous_s[kind] = self._now() - self._open.began
        self._begin(self._open.activity, kind, kind)

    def _begin(self, activity: str, name: str | None, kind: str | None) -> None:
        hang_timeout_s = self._timeout_s or 0.0
        usual_s = hang_timeout_s if kind is None else self._previous_s.get(kind, hang_timeout_s)
        timeout_s = max(hang_timeout_s, _TIMEOUT_FACTOR * usual_s)
        self._switch_to(_Interval(activity, name, timeout_s, kind, self._now()))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each activity so far."""
        self._switch_to(self._open)
        return dict(self._seconds)

    def _switch_to(self, interval: _Interval) -> None:
        now = self._now()
        activity = self._open.activity
        self._seconds[activity] = self._seconds.get(activity, 0.0) + now - self._since
        self._open, self._since = interval, now

    def _watch(self, hang_timeout_s: float) -> None:
        tick_s = min(1.0, hang_timeout_s / 10)
        interval, elapsed_s, last_tick = self._open, 0.0, time.monotonic()
        while not self._stop.wait(tick_s):
            now = time.monotonic()
            # At most two ticks count: a process that was suspended, by Ctrl-Z for example, did not
            # hang meanwhile.
            passed_s, last_tick = min(now - last_tick, 2 * tick_s), now
            if self._open is not interval:
                interval, elapsed_s = self._open, 0.0
                continue
            elapsed_s += passed_s
            if interval.name is not None and elapsed_s > interval.timeout_s:
                end_hanging(interval.name, elapsed_s, hang_timeout_s)
