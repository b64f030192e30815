"""What a run records: `metrics.jsonl`, and in `sessions.jsonl` where its time went.

`README.md` beside this file lists the keys.

Each start of the process is a session. Its times are written now and then; at most a minute before
a kill is lost and counts as restart.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from maxmars.distributed import processes
from maxmars.distributed.files import (
    LineFile,
    Workdir,
    json_number,
    read_json_lines,
    write_text,
)
from maxmars.train.clock import Clock
from maxmars.train.trackers import Trackers


class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
    """Appends to `<workdir>/metrics.jsonl`: one JSON object a line, with `step` and metrics.

    Non-finite values are the strings "NaN", "Infinity" and "-Infinity": valid JSON, which `float()`
    reads back. Only the primary process writes.
    """

    def __init__(
        self,
        workdir: Workdir,
        resume_step: int = 0,
        *,
        tokens: Callable[[int], int] | None = None,
        may_write: Callable[[], None] = lambda: None,
        trackers: Trackers | None = None,
        on_write: Callable[[int, Mapping[str, Any]], None] = lambda step, metrics: None,
    ) -> None:
        """Open the file of a run that continues after `resume_step` steps.

        Lines of later steps, which the run is about to write again, are dropped; at step 0 all are.
        `tokens` says how many the run has trained on after a step, which each line then has. For
        `may_write` see `files.LineFile`. The `trackers` and `on_write` get each line too; the
        trackers are closed.
        """
        self._tokens, self._on_write = tokens, on_write
        self._lines: LineFile | None = None
        self._trackers = trackers or Trackers({}, lambda text: None)
        if processes.is_primary():
            path = workdir / "metrics.jsonl"
            found = read_metrics(workdir, repair=True) if resume_step else []
            kept = [line for line in found if line["step"] <= resume_step]
            if path.exists():
                write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._lines = LineFile(path, may_write)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line; values are numbers or arrays of one element."""
        if self._tokens is not None:
            metrics = {"tokens": self._tokens(step), **metrics}
        if self._lines is not None:
            line = {"step": step} | {key: json_number(value) for key, value in metrics.items()}
            self._lines.write(json.dumps(line, allow_nan=False))
        self._on_write(step, metrics)
        self._trackers.write(step, metrics)

    def sync(self) -> None:
        """Have all lines where a kill does not reach them."""
        if self._lines is not None:
            self._lines.sync()
        self._trackers.sync()

    def close(self) -> None:
        """Close the file and the trackers; `write` must not be called after it."""
        if self._lines is not None:
            self._lines.close()
        self._trackers.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(workdir: Workdir, *, repair: bool = False) -> list[dict[str, Any]]:
    """The lines of `<workdir>/metrics.jsonl` but for damaged ones; none if there is no such file.

    Each has the integer `step`; the other values are numbers, or "NaN", "Infinity", "-Infinity".
    For `repair` see `files.read_json_lines`.
    """

    def is_number(value: Any) -> bool:
        is_finite = type(value) in (int, float) and abs(value) < math.inf
        return is_finite or value in ("NaN", "Infinity", "-Infinity")

    def is_sound(line: dict[str, Any]) -> bool:
        whole = (line.get("step"), line.get("tokens", 0))
        return all(type(n) is int for n in whole) and all(map(is_number, line.values()))

    return read_json_lines(workdir / "metrics.jsonl", is_sound, repair=repair)


_LONGEST_S = 1e11  # the times in a damaged line may be absurd

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
    command: str | None = None
    """The command line that started it; None if there was none, as in Python."""


def run_seconds(sessions: list[Session]) -> dict[str, float]:
    """Seconds of each of `ACTIVITIES` over all sessions of a run, the last of which is the newest.

    Steps that a later session made again count as `repeated`, at their session's mean time.
    """
    total = dict.fromkeys(ACTIVITIES, 0.0)
    reached = math.inf  # what later sessions went on from
    after = None
    for session in reversed(sessions):
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
        after = session
    return total


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each activity's share of the time."""
    total = sum(seconds.values()) or 1.0
    return {name: spent / total for name, spent in seconds.items()}


class Sessions(contextlib.AbstractContextManager["Sessions"]):
    """The sessions of a run, the last of which is this one and spends its time as `clock` says.

    It keeps books in every process, and a file in the primary one once `record` was called.
    """

    def __init__(self, clock: Clock, *, command: str | None = None) -> None:
        self._clock, self._command = clock, command
        self._earlier: list[Session] = []
        self._first_step = self._last_step = 0
        self._done = False
        self._lines: LineFile | None = None
        self._written_s = 0.0

    def record(
        self, workdir: Workdir, step: int, may_write: Callable[[], None] = lambda: None
    ) -> None:
        """Read what earlier sessions left, and from now on write to `<workdir>/sessions.jsonl`.

        This session goes on from `step`. A run that begins anew, at step 0, keeps the earlier
        sessions: their steps were for nothing. For `may_write` see `files.LineFile`.
        """
        self._first_step = self._last_step = step
        if not processes.is_primary():
            return
        path = workdir / "sessions.jsonl"
        self._earlier = read_sessions(workdir, repair=True)
        if path.exists():  # only the last line of each is of use
            write_text(path, "".join(_line(session) + "\n" for session in self._earlier))
        self._lines = LineFile(path, may_write)
        self._write()

    def reached(self, step: int, *, done: bool = False, write: bool = False) -> None:
        """The run has come to this step, and perhaps to its end; written now and then."""
        self._last_step, self._done = step, done
        so_far_s = sum(self._clock.seconds.values())
        every_s = min(max(0.01 * so_far_s, 5.0), 60.0)
        if write or so_far_s - self._written_s > every_s:
            self._write()

    def goodput(self) -> float:
        """Share of the run's time so far that went into steps that count."""
        return shares(run_seconds(self.all()))["steps"]

    def all(self) -> list[Session]:
        """All of the run, this one as it stands."""
        seconds = dict.fromkeys(ACTIVITIES, 0.0) | self._clock.seconds
        now = Session(
            start=self._clock.start,
            end=self._clock.start + sum(seconds.values()),
            first_step=self._first_step,
            last_step=self._last_step,
            seconds=seconds,
            done=self._done,
            command=self._command,
        )
        return [*self._earlier, now]

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._write()
            self._lines.close()

    def _write(self) -> None:
        session = self.all()[-1]
        self._written_s = sum(session.seconds.values())
        if self._lines is not None:
            self._lines.write(_line(session))


def read_sessions(workdir: Workdir, *, repair: bool = False) -> list[Session]:
    """The sessions in `<workdir>/sessions.jsonl`, oldest first, but for damaged lines.

    For `repair` see `files.read_json_lines`.
    """

    def is_time(value: Any) -> bool:
        return type(value) in (int, float) and abs(value) < _LONGEST_S

    def is_sound(line: dict[str, Any]) -> bool:
        seconds = line.get("seconds")
        return (
            isinstance(seconds, dict)
            and seconds.keys() == ACTIVITIES.keys()
            and all(map(is_time, [line.get("start"), line.get("end"), *seconds.values()]))
            and all(type(line.get(name)) is int for name in ("first_step", "last_step"))
            and isinstance(line.get("done"), bool)
            and isinstance(line.get("command"), str | None)
        )

    sessions = {}
    for line in read_json_lines(workdir / "sessions.jsonl", is_sound, repair=repair):
        session = Session(**{n: line[n] for n in Session.__dataclass_fields__ if n in line})
        sessions[session.start] = session  # the last line of a session has all before it
    return list(sessions.values())


def _line(session: Session) -> str:
    seconds = {name: round(spent, 3) for name, spent in session.seconds.items()}
    return json.dumps(vars(session) | {"seconds": seconds})
