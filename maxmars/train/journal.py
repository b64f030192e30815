"""Where the time of a run went, session by session, and the writer of its journal.

`checkpoint/journal.py` has the lines and what follows from them.
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
"""What a run's time is spent on, and how a table calls it."""


class Journal(contextlib.AbstractContextManager["Journal"]):
    """Writes the lines of one session; in processes other than the primary it writes nothing.

    Args:
      workdir: directory of the run.
      clock: of this process.
      began: what the session begins with. A run that continues has the `init_from` of its earlier
        sessions.
      checkpoint: the hash in the checkpoint that was restored; None without one.
      prefix: says which metrics the run has recorded so far.
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
        self._last = self._earlier[-1] if self._earlier else None
        self._file: LineFile | None = None

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The session begins, in a run with these lines of metrics.

        A warning says where lines of the journal are missing, or metrics were changed.
        """
        if not processes.is_primary():
            return
        if self._checkpoint is not None:
            self._compare(rows, self._checkpoint)
            first = next(iter(session_starts(self._earlier)[-1:]), self._began)
            self._began = dataclasses.replace(self._began, init_from=first.init_from)
        self._file = LineFile(self._path, self._may_write)
        self._write(self._began)

    def _compare(self, rows: Sequence[Mapping[str, Any]], checkpoint: str) -> None:
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
        """A checkpoint of this state is about to be written; the hash to store in it."""
        metrics = self._prefix()
        line = Saved(step=step, digest=digest, position=position, tokens=tokens, metrics=metrics)
        return self._write(line)

    def ended(self, step: int, *, done: bool) -> str | None:
        """The session ends in order, with the state that it saved last or began with."""
        return self._write(Ended(step=step, done=done, metrics=self._prefix()))

    def sessions(self, step: int, *, done: bool = False) -> list[Session]:
        """All of the run, the last of which is this one, as it stands at `step`."""
        now = Session.of(self._began, step, self._clock.seconds, done=done)
        return [*self._sessions, now]

    def _write(self, line: Line) -> str | None:
        if self._file is None:
            return None
        self._last = below(self._last, line, self._clock.seconds)
        self._file.write(self._last.text)
        self._file.sync()  # a checkpoint in a bucket is not to be there before its line
        return self._last.hash

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, kw_only=True)
class Session:
    """One start of the process, as far as it was recorded: a kill loses what came after a save."""

    start: float
    """When it began, seconds since 1970."""
    end: float
    """When it was recorded last."""
    first_step: int
    """Step that it went on from."""
    last_step: int
    """Step that it had reached."""
    seconds: Mapping[str, float]
    """Of each activity."""
    done: bool
    """Whether the run was complete: what comes later is no restart."""

    @classmethod
    def of(
        cls, began: Began, last_step: int, spent: Mapping[str, float], *, done: bool = False
    ) -> Session:
        """A session by the line that it began with, and the seconds that it has spent."""
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
    """All sessions that left these lines, also those that led nowhere."""
    sessions: list[Session] = []
    began: Began | None = None
    for line in lines:
        if isinstance(line, Began):
            began = line
        elif isinstance(line, Rewound) or began is None:
            continue
        else:
            sessions.pop()
        done = isinstance(line, Ended) and line.done
        sessions.append(Session.of(began, line.step, line.seconds, done=done))
    return sessions


def run_seconds(sessions: Sequence[Session]) -> dict[str, float]:
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
