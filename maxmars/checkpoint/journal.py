"""The journal of a run: a line for each begin and end of a session, each save and each rewind.

`<workdir>/journal.jsonl` only grows. Every line holds the hash of the line above (`before`), and
every checkpoint the hash of its `saved` line, which is written first. So no line can be changed,
removed or inserted without a trace, lines of lost steps included. The history of a run follows from
the lines: the trajectory that led to a checkpoint, where the time went, changes of the config, and
the initial weights. The chain has no keys: a forger who writes all lines anew is found only by
computing the steps again (`audit --replay`).

A kill may leave an incomplete line. The next session continues below; no line holds the hash of the
incomplete one, so the chain is whole. A kill may also leave a `saved` line without a complete
checkpoint: the next session begins at an older step, and later steps are not in the trajectory.

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

from maxmars.checkpoint.environment import commit_of
from maxmars.config import TrainConfig, differences, from_dict
from maxmars.distributed.files import read_json_lines
from maxmars.distributed.workdir import JOURNAL


@dataclass(frozen=True)
class PrefixHash:
    """Number and hash of the first lines of the metrics. The hash is a chain: SHA-256 of the hash
    of the lines before and the next line, in hex."""

    lines: int = 0
    sha256: str = ""

    def after(self, line: Mapping[str, Any]) -> PrefixHash:
        """The hash of the same lines and this one."""
        text = f"{self.sha256}\n{json.dumps(line)}"
        return PrefixHash(self.lines + 1, hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Line:
    """Fields of all lines. `below` fills them in for a new line."""

    kind: ClassVar[str]

    step: int
    """Step of the run at this line."""
    time: str = ""
    """Time of writing, with the time zone."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the session so far, by activity."""
    before: str | None = None
    """Hash of the line above; None in the first line."""
    as_read: str | None = field(default=None, repr=False, compare=False)
    """JSON of a line from the file, unknown fields included, for its hash; None for a new line."""

    @property
    def text(self) -> str:
        """JSON of the line, as in the file."""
        if self.as_read is not None:
            return self.as_read
        fields = dataclasses.asdict(self)
        head = {"kind": self.kind, "time": fields.pop("time"), "step": fields.pop("step")}
        tail = {"seconds": fields.pop("seconds"), "before": fields.pop("before")}
        del fields["as_read"]
        # `from_` of `Rewound` is "from" in the file, which is a keyword of Python.
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
    """Start of the process, in seconds since 1970."""
    digest: str
    position: int
    """Training examples consumed."""
    command: str | None
    """The command line; None if the run was started in Python."""
    config: Mapping[str, Any]
    """JSON-ready; see `train_config`."""
    data: str
    """Digest of the data."""
    environment: Mapping[str, Any]
    init_from: dict[str, Any] | None
    """Origin of the run's initial weights, see `init_from.Initial`; None for random weights."""

    def train_config(self) -> TrainConfig:
        return from_dict(self.config)


@dataclass(frozen=True, kw_only=True)
class Saved(Line):
    """A checkpoint of this state is about to be written."""

    kind = "saved"

    digest: str
    position: int
    tokens: int
    """Tokens trained on so far."""
    metrics: PrefixHash


@dataclass(frozen=True, kw_only=True)
class Ended(Line):
    """A session ends without a fault; its last state is that of its last save or of its begin."""

    kind = "ended"

    done: bool
    """Whether all steps and evaluations of the run are done."""
    metrics: PrefixHash


@dataclass(frozen=True, kw_only=True)
class Rewound(Line):
    """`maxmars rewind` went back to the checkpoint of a step, or stayed there."""

    kind = "rewound"

    from_: int
    """The step of the newest checkpoint before."""
    digest: str
    """Digest of the checkpoint of `step`."""
    position: int
    """Training examples consumed or skipped."""
    skip_examples: int
    new_optimizer_state: bool


_KINDS: dict[str, type[Line]] = {kind.kind: kind for kind in (Began, Saved, Ended, Rewound)}


def line_of(values: Mapping[str, Any]) -> Line:
    """A line from its JSON object.

    Raises:
      KeyError: the object names no known kind, or lacks a field of its kind.
    """
    kind = _KINDS[values["kind"]]
    names = {each.name for each in dataclasses.fields(kind)} - {"as_read"}
    given: dict[str, Any] = {name: values[name.removesuffix("_")] for name in names}
    if "metrics" in given:
        given["metrics"] = PrefixHash(**given["metrics"])
    return kind(**given, as_read=json.dumps(values))


def below(above: Line | None, line: Line, seconds: Mapping[str, float]) -> Line:
    """A new line, completed with time, seconds and the hash of the line above (None: the first)."""
    return dataclasses.replace(
        line,
        time=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        seconds={name: round(spent, 3) for name, spent in seconds.items()},
        before=None if above is None else above.hash,
    )


def read_journal(workdir: epath.PathLike) -> list[Line]:
    """The lines of `<workdir>/journal.jsonl`; an empty list if there is no file.

    Raises:
      ValueError: another version of maxmars wrote it, with a field that this one does not have.
    """
    workdir = epath.Path(workdir)
    lines = _read(workdir)
    for line in session_starts(lines):
        fields = json.loads(line.text)
        if used := [name for name in fields if fields[name] and not hasattr(line, name)]:
            raise ValueError(
                f"{workdir / JOURNAL}: the session that began at step {line.step} has a field "
                f"{used[0]}, which this maxmars does not read. Use the run with the code of commit "
                f"{commit_of(line.environment)}, or start a new one from its weights with "
                f"--init-from {workdir} and another --workdir."
            )
    return lines


def _read(workdir: epath.Path) -> list[Line]:
    return read_json_lines(workdir / JOURNAL, parse=line_of)


def mismatched_field(workdir: epath.Path, meta: Mapping[str, Any]) -> str | None:
    """The first field in which a checkpoint's `meta` differs from its line in the journal; None if
    none differs, or the line is missing."""
    lines = {line.hash: line for line in _read(workdir)}
    saved = began = lines.get(meta.get("journal") or "")
    while began is not None and not isinstance(began, Began):
        # By hashes, not by position: above this line there may be an incomplete one.
        began = lines.get(began.before or "")
    recorded: dict[str, Any] = {}
    if began is not None:
        recorded |= {"data_digest": began.data, "config": began.config}
    if isinstance(saved, Saved):
        recorded |= {"data_position": saved.position, "step": saved.step}
        recorded |= {"digest": saved.digest, "tokens": saved.tokens}
    return next((name for name in recorded if recorded[name] != meta[name]), None)


# --- what follows from the lines ------------------------------------------------------------------


def lines_until(lines: Sequence[Line], last: str | None) -> Sequence[Line] | None:
    """The lines up to the line with this hash; None if no line has it."""
    hashes = [line.hash for line in lines]
    return lines[: hashes.index(last) + 1] if last in hashes else None


def broken_links(lines: Sequence[Line]) -> list[Line]:
    """The lines whose `before` is not the hash of the line above."""
    hashes = [None, *(line.hash for line in lines)]
    return [line for above, line in zip(hashes, lines, strict=False) if line.before != above]


def complete_save(lines: Iterable[Line]) -> int:
    """The step of the last save that is surely complete and not rewound or lost; 0 if none."""
    complete = latest = 0
    for line in lines:
        # A line of any other kind names the step of a complete checkpoint. A `saved` line proves
        # that the save before is complete, as a run has one save under way at most.
        complete = latest if isinstance(line, Saved) else line.step
        latest = line.step
    return complete


def trajectory(lines: Iterable[Line]) -> list[Began | Saved | Rewound]:
    """The lines that led to the state of the last line.

    A session continues from the save of its first step, or from the last rewind to that step. Not
    in the trajectory are saves after that step, sessions that saved nothing, and rewinds to another
    step (whose newer checkpoints were not set aside, or were put back by hand).
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
    """The lines of a trajectory that led to the begin of a session at `step`."""
    chain = list(chain)
    while chain and (isinstance(chain[-1], Began) or chain[-1].step > step):
        chain.pop()
    to_here = [rewound for rewound in rewinds if rewound.step == step]
    # Of several rewinds to one step the last counts, also if the first was before another session.
    if to_here and chain and isinstance(chain[-1], Rewound):
        chain.pop()
    return [*chain, *to_here[-1:]]


def rewound_to(lines: Sequence[Line], step: int) -> Rewound | None:
    """The rewind from which a session that begins at `step` now would continue; None if none."""
    since = itertools.takewhile(lambda line: not isinstance(line, Began), reversed(lines))
    rewinds = [line for line in since if isinstance(line, Rewound)]
    *_, last = [None, *_led_to(step, trajectory(lines), rewinds[::-1])]
    return last if isinstance(last, Rewound) else None


def session_starts(lines: Iterable[Line]) -> list[Began]:
    return [line for line in lines if isinstance(line, Began)]


def changes_of_config(lines: Iterable[Line]) -> dict[int, str]:
    """Changes of config fields between the sessions of a trajectory, in words, by step."""
    changes = {}
    for before, after in itertools.pairwise(session_starts(lines)):
        rows = differences(before.train_config(), after.train_config())
        if rows:
            changes[after.step] = ", ".join(f"{name} {a} -> {b}" for name, a, b in rows)
    return changes


def metrics_changed_since(
    rows: Iterable[Mapping[str, Any]], lines: Sequence[Line], checkpoint: str | None
) -> int | None:
    """The last step up to which the metrics are as the journal recorded them; None if all are.

    A run appends to its metrics; a resume first cuts them at its step. So each save of the
    trajectory records the hash of a prefix of the file. The end of a session at the newest
    checkpoint does too: it may have added the evaluations of that step.

    Args:
      rows: lines of `metrics.jsonl`.
      lines: lines of the journal.
      checkpoint: hash of a journal line, as the newest checkpoint holds it.
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
            recorded = line.metrics
            if recorded.lines >= len(prefixes) or prefixes[recorded.lines] != recorded:
                return since
        since = line.step
    return None
