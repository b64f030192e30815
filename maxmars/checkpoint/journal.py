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

`maxmars.train.journal` writes the lines of a session.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from etils import epath

from maxmars.config import TrainConfig, differences, from_dict
from maxmars.distributed.files import read_json_lines
from maxmars.distributed.workdir import JOURNAL


@dataclass(frozen=True)
class PrefixHash:
    """The first lines of the metrics: how many, and a chain of SHA-256, in hex, of each line behind
    the digest of those before it."""

    lines: int = 0
    sha256: str = ""

    def after(self, line: Mapping[str, Any]) -> PrefixHash:
        """With one line more."""
        text = f"{self.sha256}\n{json.dumps(line)}"
        return PrefixHash(self.lines + 1, hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Line:
    """What all lines have. `below` completes a new one."""

    kind: ClassVar[str]

    step: int
    """Where the run stands."""
    time: str = ""
    """When it was written, with the time zone."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of the session so far, by activity."""
    before: str | None = None
    """Hash of the line above; None in the first."""
    as_read: str | None = field(default=None, repr=False, compare=False)
    """JSON of a line that was read, with whatever else it has; None of a new one."""

    @property
    def text(self) -> str:
        """JSON of the line, as it stands in the file."""
        if self.as_read is not None:
            return self.as_read
        fields = dataclasses.asdict(self)
        head = {"kind": self.kind, "time": fields.pop("time"), "step": fields.pop("step")}
        tail = {"seconds": fields.pop("seconds"), "before": fields.pop("before")}
        del fields["as_read"]
        own = {name.removesuffix("_"): value for name, value in fields.items()}
        return json.dumps(head | own | tail)

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256, in hex, of the text; the next line holds it as `before`."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Began(Line):
    """A session begins with this state."""

    kind = "began"

    start: float
    """Of the process, seconds since 1970."""
    digest: str
    position: int
    """Examples that were read."""
    command: str | None
    """None if the run was started in Python."""
    config: Mapping[str, Any]
    """JSON-ready; see `train_config`."""
    data: str
    """Digest of the data."""
    environment: Mapping[str, Any]
    init_from: dict[str, Any] | None
    """Where the run's weights came from at its first step, see `init_from.Initial`; None for random
    ones."""

    def train_config(self) -> TrainConfig:
        return from_dict(self.config)


@dataclass(frozen=True, kw_only=True)
class Saved(Line):
    """A checkpoint of this state is about to be written."""

    kind = "saved"

    digest: str
    position: int
    tokens: int
    """That the run has trained on."""
    metrics: PrefixHash


@dataclass(frozen=True, kw_only=True)
class Ended(Line):
    """A session ends in order, with the state that it saved last or began with."""

    kind = "ended"

    done: bool
    """Whether all steps and evaluations are made."""
    metrics: PrefixHash


@dataclass(frozen=True, kw_only=True)
class Rewound(Line):
    """`maxmars rewind` went back to the checkpoint of a step, or stayed there."""

    kind = "rewound"

    from_: int
    """The step that was saved last."""
    digest: str
    """Of the checkpoint."""
    position: int
    """After the examples that are left out."""
    skip_examples: int
    new_optimizer_state: bool


_KINDS: dict[str, type[Line]] = {kind.kind: kind for kind in (Began, Saved, Ended, Rewound)}


def line_of(values: Mapping[str, Any]) -> Line:
    """A line from its JSON object.

    Raises:
      KeyError: it is of no kind, or lacks a field of its kind.
    """
    kind = _KINDS[values["kind"]]
    names = {each.name for each in dataclasses.fields(kind)} - {"as_read"}
    given: dict[str, Any] = {name: values[name.removesuffix("_")] for name in names}
    if "metrics" in given:
        given["metrics"] = PrefixHash(**given["metrics"])
    return kind(**given, as_read=json.dumps(values))


def below(above: Line | None, line: Line, seconds: Mapping[str, float]) -> Line:
    """A new line, complete, below the last one of the journal; None is above the first."""
    return dataclasses.replace(
        line,
        time=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        seconds={name: round(spent, 3) for name, spent in seconds.items()},
        before=None if above is None else above.hash,
    )


def read_journal(workdir: epath.PathLike) -> list[Line]:
    """The lines of `<workdir>/journal.jsonl`; none if there is no file.

    Raises:
      ValueError: a session was steered by options of `train`, as before there was `rewound`.
    """
    workdir = epath.Path(workdir)
    lines = _read(workdir)
    for line in session_starts(lines):
        if json.loads(line.text).get("order"):
            commit = (line.environment.get("git_commit") or "unknown").removesuffix("-dirty")
            raise ValueError(
                f"{workdir / JOURNAL}: the session that began at step {line.step} was steered "
                "by --rewind, --skip-examples or --new-optimizer-state of `train`, which are no "
                f"more. Use the run with the code of commit {commit}, or start a new one from its "
                f"weights with --init-from {workdir} and another --workdir."
            )
    return lines


def _read(workdir: epath.Path) -> list[Line]:
    return read_json_lines(workdir / JOURNAL, parse=line_of)


def mismatched_field(workdir: epath.Path, meta: Mapping[str, Any]) -> str | None:
    """The first field in which a checkpoint's `meta` differs from the journal; None if they agree,
    or the line whose hash the checkpoint holds is not there."""
    lines = {line.hash: line for line in _read(workdir)}
    saved = began = lines.get(meta.get("journal") or "")
    while began is not None and not isinstance(began, Began):
        began = lines.get(began.before or "")  # which was above it when it was written
    recorded: dict[str, Any] = {}
    if began is not None:
        recorded |= {"data_digest": began.data, "config": began.config}
    if isinstance(saved, Saved):
        recorded |= {"data_position": saved.position, "step": saved.step}
        recorded |= {"digest": saved.digest, "tokens": saved.tokens}
    return next((name for name in recorded if recorded[name] != meta[name]), None)


# --- what follows from the lines ------------------------------------------------------------------


def lines_until(lines: Sequence[Line], last: str | None) -> Sequence[Line] | None:
    """The lines up to the one with this hash; None if there is none."""
    hashes = [line.hash for line in lines]
    return lines[: hashes.index(last) + 1] if last in hashes else None


def broken_links(lines: Sequence[Line]) -> list[Line]:
    """The lines that were not written after the line above them."""
    hashes = [None, *(line.hash for line in lines)]
    return [line for above, line in zip(hashes, lines, strict=False) if line.before != above]


def complete_save(lines: Iterable[Line]) -> int:
    """The step of the last checkpoint that was complete, as what came after it tells, and neither
    rewound nor lost before the last session began; 0 without one."""
    complete = latest = 0
    for line in lines:
        complete = latest if isinstance(line, Saved) else line.step
        latest = line.step
    return complete


def trajectory(lines: Iterable[Line]) -> list[Began | Saved | Rewound]:
    """The lines that led to the last of these lines.

    A session goes on from the save of the step that it began at, or from the last rewind to it;
    what was saved after that step, and a session that saved nothing, led nowhere. Neither did a
    rewind to another step, whose checkpoints were not set aside, or were put back by hand.
    """
    chain: list[Began | Saved | Rewound] = []
    rewinds: list[Rewound] = []  # since the last session began
    for line in lines:
        if isinstance(line, Rewound):
            rewinds.append(line)
        elif isinstance(line, Saved):
            chain.append(line)
        elif isinstance(line, Began):
            chain = [*_led_to(line.step, chain, rewinds), line]
            rewinds = []
    return chain


def _led_to(
    step: int, chain: Sequence[Began | Saved | Rewound], rewinds: Sequence[Rewound]
) -> list[Began | Saved | Rewound]:
    """The lines of a trajectory that led to a session which begins at a step."""
    chain = list(chain)
    while chain and (isinstance(chain[-1], Began) or chain[-1].step > step):
        chain.pop()
    to_here = [rewound for rewound in rewinds if rewound.step == step]
    if to_here and chain and isinstance(chain[-1], Rewound):
        chain.pop()
    return [*chain, *to_here[-1:]]


def rewound_to(lines: Sequence[Line], step: int) -> Rewound | None:
    """The rewind that a session goes on from which begins at a step now; None if there is none."""
    since = itertools.takewhile(lambda line: not isinstance(line, Began), reversed(lines))
    rewinds = [line for line in since if isinstance(line, Rewound)]
    *_, last = [None, *_led_to(step, trajectory(lines), rewinds[::-1])]
    return last if isinstance(last, Rewound) else None


def session_starts(lines: Iterable[Line]) -> list[Began]:
    return [line for line in lines if isinstance(line, Began)]


def changes_of_config(lines: Iterable[Line]) -> dict[int, str]:
    """The fields that changed from session to session of a trajectory, in words, by step."""
    changes = {}
    for before, after in itertools.pairwise(session_starts(lines)):
        rows = differences(before.train_config(), after.train_config())
        if rows:
            changes[after.step] = ", ".join(f"{name} {a} -> {b}" for name, a, b in rows)
    return changes


def metrics_changed_since(
    rows: Iterable[Mapping[str, Any]], lines: Sequence[Line], checkpoint: str | None
) -> int | None:
    """The last step up to which metrics are as the journal recorded them; None if all are.

    A run only appends to its metrics, or continues after some of them. So each save of its
    trajectory vouches for a beginning of the file, and so does the end of a session at its newest
    checkpoint, which may have made the evaluations of that step.

    Args:
      rows: lines of `metrics.jsonl`.
      lines: of the journal.
      checkpoint: the hash in the newest checkpoint.
    """
    until = lines_until(lines, checkpoint)
    if until is None:
        return None
    newest, later = until[-1].step, lines[len(until) :]
    ends = [line for line in later if isinstance(line, Ended) and line.step == newest]
    prefixes = [PrefixHash()]
    for row in rows:
        prefixes.append(prefixes[-1].after(row))
    since = 0
    for line in [*trajectory(until), *ends]:
        if isinstance(line, Saved | Ended):
            vouched = line.metrics
            if vouched.lines >= len(prefixes) or prefixes[vouched.lines] != vouched:
                return since
        since = line.step
    return None
