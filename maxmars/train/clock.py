"""The clock of a run: what each second went into, and the end of a process that hangs.

The loop says what it begins, `with clock("steps", "step 5", kind="step")`, and the clock is read by
three. Its seconds by activity are where a session's time went (`journal.ACTIVITIES`); those of
steps and of waiting for data make the rates of a line of metrics; and a thread looks at what has
been begun and is not over. Collectives wait for ever for a process that hangs. So each process
watches itself: where something takes too long, it ends with the stacks of all threads, one line and
exit code 75, and a launcher starts the run again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

from maxmars.distributed.run_process import end_hanging

_PATIENCE = 10


class _Interval(NamedTuple):
    """What was begun and is not over."""

    activity: str
    name: str | None = None
    """As the message of a hang has it; None may take as long as it likes."""
    allowed_s: float = 0.0
    kind: str | None = None
    began: float = 0.0


class Clock(contextlib.AbstractContextManager["Clock"]):
    """Counts a process's seconds by activity, always one, and inside a `with` block ends it if one
    takes too long.

    An interval of a kind, such as a step, may take `hang_timeout_s`, or ten times as long as the
    one before it if that is longer. The first of a kind, which may have to compile, and a named
    interval of no kind, such as a checkpoint, may take ten times `hang_timeout_s`. With None
    nothing is watched.
    """

    def __init__(
        self,
        hang_timeout_s: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s, self._now = hang_timeout_s, now
        self.start = time.time()
        """When the process began, seconds since 1970."""
        self._seconds: dict[str, float] = {}
        self._since = now()
        # Time outside of all blocks opens the run until its first step, and then is of no activity.
        self._open = _Interval("start")
        self._last_s: dict[str, float] = {}  # kind -> seconds that the last one took
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Clock:
        if self._timeout_s is not None:
            arguments = (self._timeout_s,)
            self._thread = threading.Thread(
                target=self._watch, args=arguments, daemon=True, name="watchdog"
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
        """The time in this block is this activity's, whichever block is around it.

        Args:
          activity: of `journal.ACTIVITIES`. The first of the `steps` counts as `compile`.
          name: what the message of a hang calls it; None is not watched.
          kind: of which many come, each about as long as the one before.
        """
        if activity == "steps" and kind not in self._last_s:
            activity = "compile"
        around = self._open
        self._begin(activity, name, kind)
        began = self._since
        # An error leaves the interval open: it is watched while the run is closed, which may wait
        # for other processes.
        yield
        # A new object, as the thread tells intervals apart by identity: the block around goes on
        # with all of its time.
        self._turn_to(_Interval("other") if activity == "compile" else around._replace())
        if kind is not None:
            self._last_s[kind] = self._since - began

    def lap(self, kind: str) -> None:
        """Within a block, the next of a kind begins, such as a batch; the one before is over."""
        if self._open.kind == kind:
            self._last_s[kind] = self._now() - self._open.began
        self._begin(self._open.activity, kind, kind)

    def _begin(self, activity: str, name: str | None, kind: str | None) -> None:
        timeout_s = self._timeout_s or 0.0
        last_s = timeout_s if kind is None else self._last_s.get(kind, timeout_s)
        allowed_s = max(timeout_s, _PATIENCE * last_s)
        self._turn_to(_Interval(activity, name, allowed_s, kind, self._now()))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each activity so far."""
        self._turn_to(self._open)
        return dict(self._seconds)

    def _turn_to(self, interval: _Interval) -> None:
        now = self._now()
        activity = self._open.activity
        self._seconds[activity] = self._seconds.get(activity, 0.0) + now - self._since
        self._open, self._since = interval, now

    def _watch(self, timeout_s: float) -> None:
        tick_s = min(1.0, timeout_s / 10)
        seen, lasted_s, then = self._open, 0.0, time.monotonic()
        while not self._stop.wait(tick_s):
            now = time.monotonic()
            # A process that was stopped for a while, by Ctrl-Z for example, did not hang.
            passed_s, then = min(now - then, 2 * tick_s), now
            if self._open is not seen:
                seen, lasted_s = self._open, 0.0
                continue
            lasted_s += passed_s
            if seen.name is not None and lasted_s > seen.allowed_s:
                end_hanging(seen.name, lasted_s, timeout_s)
