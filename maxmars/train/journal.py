"""The journal of a run: what each session began with, saved and ended with, one line each.

`<workdir>/journal.jsonl` only grows. Every line holds the hash of the line above it (`before`), and
a checkpoint the hash of the line that told of it before it was written. So no line can be changed,
taken away or put between without a trace, those of lost steps included. What else is known of a
run's past follows from its lines: the trajectory that led to a checkpoint, where the time went,
what changed, and which weights it started from. There are no keys: whoever writes all lines anew is
found only by computing the steps again (`audit --replay`).

A kill may leave a line without its end. The next session goes on below it, and as no line holds its
hash, nothing is missing. It may also leave a `saved` line whose checkpoint was not completed: the
next session begins at an older step, and the steps after that are no part of the trajectory.
`maxmars rewind` adds a line too, from which the next session goes on.

The fields of all lines are `kind`, `time`, `step`, `seconds` (of the session so far, by activity)
and `before`. Besides,

* `began` has `start` (of the process, seconds since 1970), `digest` and `position` of the state and
  the data that the session has, `command`, `config`, `data` (their digest), `environment`,
  and `init_from` (the origin of the run's weights; None for random ones);
* `saved` has `digest`, `position`, `tokens` and `metrics`, a `Mark` of the metrics so far;
* `ended` has `done` (all steps and evaluations are made) and `metrics`;
* `rewound` has `from` (the step that was saved last), `digest` of the checkpoint of its step,
  `skip_examples` and the `position` after these, and `new_optimizer_state`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxmars.checkpoint.journal import Line, config_of, hash_of, read_journal
from maxmars.config import differences
from maxmars.distributed import processes
from maxmars.distributed.files import LineFile, Workdir
from maxmars.distributed.workdir import JOURNAL, METRICS
from maxmars.train.clock import Clock
from maxmars.train.metrics import Mark

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
      began: the fields of the line `began`; without `init_from` it is that of earlier sessions.
      checkpoint: the hash in the checkpoint that was restored; None without one.
      mark: says which metrics the run has recorded so far.
      may_write: see `files.LineFile`.
    """

    def __init__(
        self,
        workdir: Workdir,
        clock: Clock,
        began: Mapping[str, Any],
        *,
        checkpoint: str | None = None,
        mark: Callable[[], Mark] = Mark,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._workdir, self._path = workdir, workdir / JOURNAL
        self._clock, self._may_write = clock, may_write
        self._began: dict[str, Any] = {"start": clock.start, **began}
        self._checkpoint, self._mark = checkpoint, mark
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
        self._compare(rows)
        self._file = LineFile(self._path, self._may_write)
        if "init_from" not in self._began:
            self._began["init_from"] = origin(self._earlier)
        self._write("began", self._began["step"], self._began)

    def _compare(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._checkpoint is None:
            return
        step, told = self._began["step"], lines_to(self._earlier, self._checkpoint)
        if told is None or broken_links(self._earlier):
            _LOGGER.warning(
                "%s lacks lines of step %d or before; the run goes on, and `maxmars audit` will "
                "call it broken",
                self._path,
                step,
            )
        saved = [line["step"] for line in self._earlier if line["kind"] in ("saved", "rewound")]
        if saved and saved[-1] > step:
            _LOGGER.warning(
                "the checkpoint of step %d, which %s tells of, was not completed, or is gone or "
                "damaged; the steps after %d are made again",
                saved[-1],
                self._path,
                step,
            )
        since = metrics_changed_since(rows, self._earlier, self._checkpoint)
        if since is not None:
            _LOGGER.warning(
                "%s changed since step %d; training does not depend on it, and goes on",
                self._workdir / METRICS,
                since,
            )

    def saved(self, step: int, digest: str, position: int, tokens: int) -> str | None:
        """A checkpoint of this state is about to be written; the hash to store in it."""
        metrics = self._mark()._asdict()
        fields = {"digest": digest, "position": position, "tokens": tokens, "metrics": metrics}
        return self._write("saved", step, fields)

    def ended(self, step: int, *, done: bool) -> str | None:
        """The session ends in order, with the state that it saved last or began with."""
        return self._write("ended", step, {"done": done, "metrics": self._mark()._asdict()})

    def sessions(self, step: int, *, done: bool = False) -> list[Session]:
        """All of the run, the last of which is this one, as it stands at `step`."""
        seconds = self._clock.seconds
        began = {"kind": "began", "step": self._began["step"], "seconds": seconds, **self._began}
        now = {"kind": "ended", "step": step, "seconds": seconds, "done": done}
        return [*self._sessions, *sessions_of([began, now])]

    def _write(self, kind: str, step: int, fields: Mapping[str, Any]) -> str | None:
        if self._file is None:
            return None
        line = make_line(self._last, kind, step, fields, self._clock.seconds)
        self._file.write(json.dumps(line))
        self._file.sync()  # a checkpoint in a bucket is not to be there before its line
        self._last = line
        return hash_of(line)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def make_line(
    above: Line | None,
    kind: str,
    step: int,
    fields: Mapping[str, Any],
    seconds: Mapping[str, float],
) -> Line:
    """A line that is to stand below `above`, the last of the journal; None in an empty one."""
    return {
        "kind": kind,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "step": step,
        **fields,
        "seconds": {name: round(spent, 3) for name, spent in seconds.items()},
        "before": None if above is None else hash_of(above),
    }


# --- what follows from the lines ----------------------------------------------------------------


def lines_to(lines: Sequence[Line], last: str | None) -> Sequence[Line] | None:
    """The lines up to the one with this hash; None if there is none."""
    hashes = [hash_of(line) for line in lines]
    return lines[: hashes.index(last) + 1] if last in hashes else None


def broken_links(lines: Sequence[Line]) -> list[Line]:
    """The lines that were not written after the line above them."""
    hashes = [None, *map(hash_of, lines)]
    return [line for above, line in zip(hashes, lines, strict=False) if line["before"] != above]


def complete_save(lines: Iterable[Line]) -> int:
    """The step of the last checkpoint that was complete, as what came after it tells, and neither
    rewound nor lost before the last session began; 0 without one."""
    complete = latest = 0
    for line in lines:
        complete = latest if line["kind"] == "saved" else line["step"]
        latest = line["step"]
    return complete


def trajectory(lines: Iterable[Line]) -> list[Line]:
    """The lines `began`, `saved` and `rewound` that led to the last of these lines.

    A session goes on from the save of the step that it began at, or from the last rewind to it;
    what was saved after that step, and a session that saved nothing, led nowhere. Neither did a
    rewind to another step, whose checkpoints were not set aside, or were put back by hand.
    """
    chain: list[Line] = []
    rewinds: list[Line] = []  # since the last session began
    for line in lines:
        if line["kind"] == "rewound":
            rewinds.append(line)
        elif line["kind"] == "saved":
            chain.append(line)
        elif line["kind"] == "began":
            while chain and (chain[-1]["kind"] == "began" or chain[-1]["step"] > line["step"]):
                chain.pop()
            to_here = [rewound for rewound in rewinds if rewound["step"] == line["step"]]
            if to_here and chain and chain[-1]["kind"] == "rewound":
                chain.pop()
            chain += [*to_here[-1:], line]
            rewinds.clear()
    return chain


def rewound_to(lines: Sequence[Line], step: int) -> Line | None:
    """The rewind that a session goes on from which begins at a step now; None if there is none."""
    *_, last, _ = [None, *trajectory([*lines, {"kind": "began", "step": step}])]
    return last if last is not None and last["kind"] == "rewound" else None


def began_in(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == "began"]


def origin(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Where the weights of a run came from at its first step, which every session says; None for
    random ones."""
    began = began_in(lines)
    return began[-1]["init_from"] if began else None


def changes_of_config(lines: Iterable[Line]) -> dict[int, str]:
    """The fields that changed from session to session of a trajectory, in words, by step."""
    changes = {}
    for before, after in itertools.pairwise(began_in(lines)):
        rows = differences(config_of(before), config_of(after))
        if rows:
            changes[after["step"]] = ", ".join(f"{name} {a} -> {b}" for name, a, b in rows)
    return changes


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


def sessions_of(lines: Iterable[Line]) -> list[Session]:
    """All sessions that left these lines, also those that led nowhere."""
    sessions: list[Session] = []
    began: Line | None = None
    for line in lines:
        if line["kind"] == "began":
            began = line
        elif line["kind"] == "rewound" or began is None:
            continue
        else:
            sessions.pop()
        seconds = dict.fromkeys(ACTIVITIES, 0.0) | line["seconds"]
        session = Session(
            start=began["start"],
            end=began["start"] + sum(seconds.values()),
            first_step=began["step"],
            last_step=line["step"],
            seconds=seconds,
            done=line.get("done", False),
        )
        sessions.append(session)
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


def metrics_changed_since(
    rows: Iterable[Mapping[str, Any]], lines: Sequence[Line], checkpoint: str | None
) -> int | None:
    """The last step up to which metrics are as the journal recorded them; None if all are.

    A run only appends to its metrics, or continues after some of them. So each line of its
    trajectory vouches for a beginning of the file, and so does the end of a session at its newest
    checkpoint, which may have made the evaluations of that step.

    Args:
      rows: lines of `metrics.jsonl`.
      lines: of the journal.
      checkpoint: the hash in the newest checkpoint.
    """
    told = lines_to(lines, checkpoint)
    if told is None:
        return None
    newest, later = told[-1]["step"], lines[len(told) :]
    ends = [line for line in later if line["kind"] == "ended" and line["step"] == newest]
    marks = [Mark()]
    for row in rows:
        marks.append(marks[-1].after(row))
    since = 0
    for line in [*trajectory(told), *ends]:
        if "metrics" in line:
            vouched = Mark(**line["metrics"])
            if vouched.lines >= len(marks) or marks[vouched.lines] != vouched:
                return since
        since = line["step"]
    return None
