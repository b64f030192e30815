"""Where the time of a run went, from its first start to now, restarts and lost steps included.

Each start of the process is a session. `<workdir>/sessions.jsonl` gets its times now and then; what
a killed one did since it last wrote, at most a minute, counts as restart.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from maxmars.metrics import json_lines
from maxmars.workdir import BucketLines, DiskLines, Workdir, open_lines, read_text, write_text

ACTIVITIES = {
    "steps": "steps that count",
    "repeated": "steps lost to a stop, made again",
    "data_wait": "waiting for data",
    "compile": "first steps, which compile",
    "start": "opening the run",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "restart": "between the sessions",
    "other": "other",
}
"""What a run's time is spent on, and how a table calls it."""

_LEAST_EVERY_S, _MOST_EVERY_S = 5.0, 60.0
_EVERY_SHARE = 0.01  # of the session's time


@dataclass(frozen=True, kw_only=True)
class Session:
    """One start of the process, as far as it was recorded."""

    start: float
    """When it began, seconds since 1970."""
    end: float
    """When this was recorded."""
    first_step: int
    """Step that it went on from."""
    last_step: int
    """Step that it had reached."""
    seconds: Mapping[str, float]
    """Of each activity."""
    done: bool
    """Whether the run was complete: what comes later is no restart."""


def run_seconds(sessions: list[Session]) -> dict[str, float]:
    """Seconds of each of `ACTIVITIES` over all sessions of a run, the last of which is the newest.

    Steps that a later session made again count as `repeated`, at their session's mean time.
    """
    total = dict.fromkeys(ACTIVITIES, 0.0)
    reached = math.inf  # what later sessions went on from
    for session, after in zip(reversed(sessions), [None, *reversed(sessions)][:-1], strict=True):
        for name, seconds in session.seconds.items():
            total[name] += seconds
        made = session.last_step - session.first_step
        lost = min(max(session.last_step - reached, 0), made)
        if lost:
            wasted = session.seconds["steps"] * lost / made
            total["steps"] -= wasted
            total["repeated"] += wasted
        reached = min(reached, session.first_step)
        if after is not None and not session.done:
            total["restart"] += max(0.0, after.start - session.end)
    return total


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each activity's share of the time."""
    total = sum(seconds.values()) or 1.0
    return {name: spent / total for name, spent in seconds.items()}


class Goodput(contextlib.AbstractContextManager["Goodput"]):
    """What this process spends its time on; always exactly one activity, at first `start`.

    It keeps books in every process, and a file in the primary one once `record` was called.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to count."""
        self._clock = clock
        self._start, self._began = time.time(), clock()
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._activity, self._since = "start", clock()
        self._earlier: list[Session] = []
        self._first_step = self._last_step = 0
        self._done = False
        self._lines: DiskLines | BucketLines | None = None
        self._written = clock()

    def record(
        self, workdir: Workdir, step: int, may_write: Callable[[], None] = lambda: None
    ) -> None:
        """Read what earlier sessions left, and from now on write to `<workdir>/sessions.jsonl`.

        A run that begins anew, at step 0, keeps the earlier ones: their steps were for nothing.

        Args:
          workdir: of the run.
          step: that this session goes on from.
          may_write: see `workdir.open_lines`.
        """
        from maxmars import distributed  # loads JAX, which reading does without

        self._first_step = self._last_step = step
        if not distributed.is_primary():
            return
        path = workdir / "sessions.jsonl"
        self._earlier = read_sessions(workdir)
        if self._earlier:  # only the last line of each is of use
            write_text(path, "".join(_line(session) + "\n" for session in self._earlier))
        self._lines = open_lines(path, may_write)
        self._write()

    def begin(self, activity: str) -> None:
        """What was done before is over, and this begins."""
        now = self._clock()
        self._seconds[self._activity] += now - self._since
        self._activity, self._since = activity, now

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Time spent here is this activity's; afterwards the one of before goes on."""
        before = self._activity
        self.begin(activity)
        yield
        self.begin(before)

    def waited(self, seconds: float) -> None:
        """So many seconds of the steps were spent waiting for data."""
        self._seconds["steps"] -= seconds
        self._seconds["data_wait"] += seconds

    def reached(self, step: int, *, done: bool = False, write: bool = False) -> None:
        """The run has come to this step, and perhaps to its end; written now and then."""
        self._last_step, self._done = step, done
        now = self._clock()
        every_s = _EVERY_SHARE * (now - self._began)
        every_s = min(max(every_s, _LEAST_EVERY_S), _MOST_EVERY_S)
        if write or now - self._written > every_s:
            self._write()

    def share(self) -> float:
        """Share of the run's time so far that went into steps that count."""
        return shares(run_seconds(self.sessions()))["steps"]

    def sessions(self) -> list[Session]:
        """All of the run, this one as it stands."""
        self.begin(self._activity)
        now = Session(
            start=self._start,
            end=self._start + sum(self._seconds.values()),
            first_step=self._first_step,
            last_step=self._last_step,
            seconds=dict(self._seconds),
            done=self._done,
        )
        return [*self._earlier, now]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write where it ends, and close."""
        if self._lines is not None:
            self._write()
            self._lines.close()

    def _write(self) -> None:
        self._written = self._clock()
        if self._lines is not None:
            self._lines.write(_line(self.sessions()[-1]))


def read_sessions(workdir: Workdir) -> list[Session]:
    """The sessions that `<workdir>/sessions.jsonl` tells of, oldest first."""
    found = {}
    for line in json_lines(read_text(workdir / "sessions.jsonl") or ""):
        session = _session(line)
        found[session.start] = session
    return sorted(found.values(), key=lambda session: session.start)


def _line(session: Session) -> str:
    seconds = {name: round(spent, 3) for name, spent in session.seconds.items()}
    return json.dumps(vars(session) | {"seconds": seconds})


def _session(line: dict[str, Any]) -> Session:
    return Session(**{name: line[name] for name in Session.__dataclass_fields__})
