"""Writer of a run's journal, and the time of a run by activity and session.

`checkpoint/journal.py` defines the lines, and derives the trajectory from them. Each line has the
seconds of its session so far, so the time of a run over all restarts, and its goodput, follow from
the journal: a kill loses only the seconds after the last line. Steps that a later session repeats
are no goodput.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from maxmars.checkpoint.journal import (
    Began,
    Ended,
    Line,
    PrefixHash,
    Rewound,
    Saved,
    below,
    broken_links,
    lines_until,
    metrics_changed_since,
    read_journal,
    session_starts,
)
from maxmars.distributed import processes
from maxmars.distributed.files import LineFile
from maxmars.distributed.workdir import JOURNAL, METRICS
from maxmars.train.clock import Clock

_LOGGER = logging.getLogger(__name__)

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
"""Activities of a run, between which all its time is divided, with their names in tables."""


class Journal(contextlib.AbstractContextManager["Journal"]):
    """Writes the lines of one session, in the primary process.

    Args:
      workdir: directory of the run.
      clock: clock of this process.
      began: first line of the session. In a run that continues, `begin` fills in `init_from` from
        the earlier sessions.
      checkpoint: journal hash in the restored checkpoint; None for a new run.
      prefix: returns number and hash of the lines of metrics so far.
      may_write: see `files.LineFile`.
    """

    def __init__(
        self,
        workdir: epath.Path,
        clock: Clock,
        began: Began,
        *,
        checkpoint: str | None = None,
        prefix: Callable[[], PrefixHash] = PrefixHash,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._workdir, self._path = workdir, workdir / JOURNAL
        self._clock, self._may_write = clock, may_write
        self._began, self._checkpoint, self._prefix = began, checkpoint, prefix
        self._earlier = read_journal(workdir) if processes.is_primary() else []
        self._sessions = sessions_of(self._earlier)
        self._newest = self._earlier[-1] if self._earlier else None
        self._file: LineFile | None = None

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the line `began`. Warn if lines of the journal are missing, or if `rows`, the lines
        of metrics so far, were changed."""
        if not processes.is_primary():
            return
        if self._checkpoint is not None:
            self._warn_of_changes(rows, self._checkpoint)
            for earlier in session_starts(self._earlier)[-1:]:  # each session repeats `init_from`
                self._began = dataclasses.replace(self._began, init_from=earlier.init_from)
        self._file = LineFile(self._path, self._may_write)
        self._write(self._began)

    def _warn_of_changes(self, rows: Sequence[Mapping[str, Any]], checkpoint: str) -> None:
        step = self._began.step
        if lines_until(self._earlier, checkpoint) is None or broken_links(self._earlier):
            _LOGGER.warning(
                "%s lacks lines of step %d or before; the run goes on, and `maxmars audit` will "
                "call it broken",
                self._path,
                step,
            )
        saved = [line.step for line in self._earlier if isinstance(line, Saved | Rewound)]
        if saved and saved[-1] > step:
            _LOGGER.warning(
                "the checkpoint of step %d, which %s tells of, was not completed, or is gone or "
                "damaged; the steps after %d are made again",
                saved[-1],
                self._path,
                step,
            )
        since = metrics_changed_since(rows, self._earlier, checkpoint)
        if since is not None:
            _LOGGER.warning(
                "%s changed since step %d; training does not depend on it, and goes on",
                self._workdir / METRICS,
                since,
            )

    def saved(self, step: int, digest: str, position: int, tokens: int) -> str | None:
        """Write a line for a checkpoint that is about to be saved; return the line's hash, for the
        checkpoint, or None in processes other than the primary."""
        metrics = self._prefix()
        line = Saved(step=step, digest=digest, position=position, tokens=tokens, metrics=metrics)
        return self._write(line)

    def ended(self, step: int, *, done: bool) -> str | None:
        """Write the line of an orderly end, after the last save; return the line's hash."""
        return self._write(Ended(step=step, done=done, metrics=self._prefix()))

    def sessions(self, step: int, *, done: bool = False) -> list[Session]:
        """All sessions of the run; the last is this one, up to `step`."""
        now = Session.of(self._began, step, self._clock.seconds, done=done)
        return [*self._sessions, now]

    def _write(self, line: Line) -> str | None:
        if self._file is None:
            return None
        self._newest = below(self._newest, line, self._clock.seconds)
        self._file.write(self._newest.text)
        self._file.sync()  # in a bucket, a checkpoint could otherwise exist before its line
        return self._newest.hash

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, kw_only=True)
class Session:
    """One start of a run, up to the last line in the journal."""

    start: float
    """Start of the process, seconds since 1970."""
    end: float
    """Time of the last line, seconds since 1970."""
    first_step: int
    """Step from which the session continued."""
    last_step: int
    """Step of the last line."""
    seconds: Mapping[str, float]
    """Seconds of each activity."""
    done: bool
    """Whether the run was complete; a later session is then no restart."""

    @classmethod
    def of(
        cls, began: Began, last_step: int, spent: Mapping[str, float], *, done: bool = False
    ) -> Session:
        """Make a session from its first line, its last step, and its seconds by activity."""
        seconds = {**dict.fromkeys(ACTIVITIES, 0.0), **spent}
        return cls(
            start=began.start,
            end=began.start + sum(seconds.values()),
            first_step=began.step,
            last_step=last_step,
            seconds=seconds,
            done=done,
        )


def sessions_of(lines: Iterable[Line]) -> list[Session]:
    """All sessions in a journal, also those whose steps were lost."""
    sessions: list[Session] = []
    began: Began | None = None
    for line in lines:
        if isinstance(line, Began):
            began = line
        elif isinstance(line, Rewound) or began is None:
            continue
        else:
            sessions.pop()  # each line replaces the session as the line before had it
        done = isinstance(line, Ended) and line.done
        sessions.append(Session.of(began, line.step, line.seconds, done=done))
    return sessions


def run_seconds(sessions: Sequence[Session]) -> dict[str, float]:
    """Seconds of each of `ACTIVITIES` over all sessions of a run, in order of time.

    Steps that a later session repeats count as `repeated`, at the mean time of their session.
    """
    total = dict.fromkeys(ACTIVITIES, 0.0)
    restart_step = math.inf  # least step from which a later session continued
    after = None
    for session in reversed(sessions):
        for name, seconds in session.seconds.items():
            total[name] += seconds
        num_steps = session.last_step - session.first_step
        num_lost = min(max(session.last_step - restart_step, 0), num_steps)
        if num_lost:
            lost_s = session.seconds["steps"] * num_lost / num_steps
            total["steps"] -= lost_s
            total["repeated"] += lost_s
        restart_step = min(restart_step, session.first_step)
        if after is not None and not session.done:  # clocks of two hosts may differ: at least 0
            total["restart"] += max(0.0, after.start - session.end)
        after = session
    return total


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Share of each activity in the sum of seconds."""
    total = sum(seconds.values()) or 1.0
    return {name: spent / total for name, spent in seconds.items()}
