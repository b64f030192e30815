"""Check by its journal that a run is one trajectory: what is in its workdir was computed in order.

The journal (see `checkpoint/journal.py`) must be whole, each line after the one above it. Its
trajectory leads from the first step to the newest checkpoint. Each checkpoint that is still there
must be one of it, and hold the arrays that its line names. `--replay` computes some steps again.
Whether the metrics are as they were recorded is said beside the verdict: no step depends on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from maxmars.checkpoint import find, list_steps, load, read
from maxmars.checkpoint.digest import combine, digest
from maxmars.checkpoint.environment import changes_since
from maxmars.checkpoint.journal import (
    Began,
    Line,
    Rewound,
    Saved,
    broken_links,
    changes_of_config,
    complete_save,
    lines_until,
    metrics_changed_since,
    read_journal,
    session_starts,
    trajectory,
)
from maxmars.checkpoint.reader import DamagedError, check_arrays, require_64_bits
from maxmars.checkpoint.writer import Retention
from maxmars.config import (
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    TrainConfig,
    differences,
)
from maxmars.config.errors import about
from maxmars.data.verification import hashed_by, verify_split
from maxmars.distributed.files import read_json, resolve
from maxmars.distributed.recorded_code import recorded_code
from maxmars.distributed.sharding import training_mesh
from maxmars.distributed.workdir import (
    JOURNAL,
    KEPT_SOURCES,
    METRICS,
    SUMMARY,
)
from maxmars.model.parameters import Parameters
from maxmars.train.auto import with_remat
from maxmars.train.metrics import read_metrics, validation_losses
from maxmars.train.resolve import Recorded, resolve_config
from maxmars.train.resume import fixed_schedule, rounding_changes, rounding_of
from maxmars.train.rewind import rewinds_in_words
from maxmars.train.step import saved_state
from maxmars.train.training import open_training


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of `audit`, JSON-ready by `dataclasses.asdict`."""

    workdir: str
    last_step: int
    """Of the newest checkpoint."""
    lines: int
    """Of the journal, that the trajectory consists of."""
    sessions: int
    """That the trajectory consists of."""
    changes: list[str]
    """What changed on the way that may change the rounding, and at which step."""
    config_changes: list[str]
    """Which fields of the config changed, and at which step."""
    rewinds: list[str]
    """How it was rewound: to a checkpoint, past examples."""
    problems: list[str]
    """Where the run is not one trajectory; empty if it is."""
    code: list[str]
    """Own functions that do not run any more, as the run has not kept their files as recorded."""
    metrics: str | None
    """`as recorded`, or `changed since step N`; None where the journal is not whole."""
    uncovered_metrics: int
    """Lines of metrics after the newest checkpoint, which nothing vouches for."""
    replayed: str | None
    """The steps that were computed again, in words."""

    @property
    def verdict(self) -> str:
        """`one trajectory`, `one trajectory up to rounding`, or `broken`."""
        if self.problems:
            return "broken"
        return "one trajectory up to rounding" if self.changes else "one trajectory"

    @property
    def text(self) -> str:
        """The result, in lines for people."""
        lines = [f"{self.workdir}: {self.verdict}"]
        lines[0] += f", steps 0 to {self.last_step}"
        lines[0] += f" (sessions: {self.sessions}, lines of its journal: {self.lines})"
        lines += [f"  broken: {problem}" for problem in self.problems]
        lines += [f"  changed: {change}" for change in self.changes]
        lines += [f"  config changed: {change}" for change in self.config_changes]
        lines += [f"  rewound: {rewound}" for rewound in self.rewinds]
        lines += [f"  code: {refused}" for refused in self.code]
        if self.metrics is not None:
            lines.append(f"  {METRICS}: {self.metrics}")
        if self.uncovered_metrics:
            lines.append(
                f"  {self.uncovered_metrics} lines of metrics after step {self.last_step} are not "
                "saved yet: the next start makes their steps again"
            )
        return "\n".join([*lines, *([f"  {self.replayed}"] if self.replayed else [])])


def audit(
    workdir: str | os.PathLike[str],
    *,
    replay: int | None = None,
    compare_arrays: bool = True,
    log: Callable[[str], None] = print,
) -> Audit:
    """Check a run.

    Args:
      workdir: directory of the run, or of its checkpoints, on a disk or `gs://`.
      replay: compute so many steps again from a checkpoint, on this machine, and compare the
        digests; the run must have saved the step where they end.
      compare_arrays: read the arrays of every checkpoint and compare them with their digests.
        Without it a second or two are enough, and what the checkpoints say of themselves counts.
      log: gets a line for what takes a while.

    Raises:
      FileNotFoundError: there is no run.
      ValueError: no checkpoint can be read, or compared without 64-bit JAX; or no `replay` steps
        can be computed again, for example as `recorded_code` refuses the code that made them.
    """
    directory = resolve(workdir)
    checkpoints, named = find(directory) or (None, None)
    if checkpoints is None or named is not None:
        raise FileNotFoundError(f"{directory} is not the directory of a run with checkpoints.")
    directory = checkpoints.parent  # of the run, also where its checkpoints were named
    steps = list_steps(checkpoints)
    newest = read(checkpoints)
    config = newest.config
    if compare_arrays:
        require_64_bits(newest)
    lines = read_journal(directory)
    lines_until_newest = lines_until(lines, newest.journal)
    chain = trajectory(lines_until_newest or ())
    problems = [
        f"{JOURNAL} is not whole: its line `{line.kind}` of step {line.step} was not written "
        "after the line above it"
        for line in broken_links(lines)
    ]
    if lines_until_newest is None:
        problems.append(f"{JOURNAL} lacks the line of the checkpoint of step {newest.step}")
    summary = read_json(directory / SUMMARY) or {}
    if summary.get("journal") and lines_until(lines, summary["journal"]) is None:
        problems.append(f"{JOURNAL} lacks its last line of step {summary['step']}, see {SUMMARY}")
    problems += _check_links(chain)
    if (complete := complete_save(lines)) > list_steps(checkpoints)[-1]:
        problems.append(f"the checkpoint of step {complete}, complete by {JOURNAL}, is gone")
    rows = read_metrics(directory)
    since = metrics_changed_since(rows, lines, newest.journal)
    metrics = "as recorded" if since is None else f"changed since step {since}"
    chosen = None if replay is None or problems else _range_to_replay(steps, chain, replay)

    def kept() -> set[int]:
        now = list_steps(checkpoints)
        if since is not None and config.checkpoint.keep_best is not None:
            return set(now)  # the changed losses do not say which one was the best
        losses = validation_losses(read_metrics(directory), config.checkpoint.keep_best_of)
        return Retention(config.checkpoint, losses).choose(now)

    problems += _check_checkpoints(checkpoints, steps, kept, chain, log, arrays=compare_arrays)
    replayed = None
    if chosen is not None and not problems:
        replayed, problem = _replay(checkpoints, chain, *chosen, log)
        problems += [problem] if problem else []
    return Audit(
        workdir=str(directory),
        last_step=newest.step,
        lines=len(chain),
        sessions=len(session_starts(chain)),
        changes=_changes(session_starts(chain)),
        config_changes=[f"at step {s}: {text}" for s, text in changes_of_config(chain).items()],
        rewinds=rewinds_in_words(chain),
        problems=problems,
        code=list(_unrecorded_code(directory, config)),
        metrics=None if lines_until_newest is None else metrics,
        uncovered_metrics=sum(row["step"] > newest.step for row in rows),
        replayed=replayed,
    )


def _unrecorded_code(run: Any, config: Any) -> Iterator[str]:
    """What the rule of `recorded_code` refuses of a run's own functions, a line for each part."""
    for folder, part in KEPT_SOURCES.items():
        try:
            recorded_code(getattr(config, part, ()), run, folder)
        except ValueError as error:
            yield str(error)


def _without_evaluations(config: TrainConfig) -> TrainConfig:
    """What decides the steps of a run: evaluations may change, and run no code of an audit."""
    # Which need evaluations.
    kept = dataclasses.replace(config.checkpoint, keep_best=None, keep_best_of=None)
    return dataclasses.replace(config, eval=EvalConfig(every=None), checkpoint=kept)


def _check_links(chain: Sequence[Began | Saved | Rewound]) -> list[str]:
    """Each line goes on from the state, and the data, of the one before."""
    problems, batch_size = [], 0
    for before, after in zip([None, *chain], chain, strict=False):
        if isinstance(after, Saved):
            if before is None:
                continue
            taken = after.position - before.position
            if taken != (after.step - before.step) * batch_size:
                problems.append(
                    f"{taken} examples were read between steps {before.step} and {after.step}"
                )
            continue
        what, skipped = f"the session that began at step {after.step}", 0
        if isinstance(after, Rewound):
            what, skipped = f"the run that was rewound to step {after.step}", after.skip_examples
        else:
            batch_size = after.config["global_batch_size"]
        if before is None and not after.step:
            continue
        if before is None or (before.step, before.digest) != (after.step, after.digest):
            problems.append(f"{what} had another state")
        elif before.position + skipped != after.position:
            problems.append(f"{what} had other data")
    data = {began.data for began in session_starts(chain)}
    if len(data) > 1:
        problems.append(f"the sessions read {len(data)} different data")
    return problems


def _check_checkpoints(
    directory: Any,
    steps: Sequence[int],
    kept: Callable[[], set[int]],
    chain: Sequence[Line],
    log: Callable[[str], None],
    *,
    arrays: bool,
) -> list[str]:
    """Each checkpoint is one that the trajectory names, with the arrays of its digests; one that
    is not among those `kept` may be damaged, or gone."""
    problems, saved = [], {line.hash for line in chain if isinstance(line, Saved)}
    for step in steps:
        try:
            checkpoint = read(directory, step)
            if checkpoint.journal not in saved:
                problems.append(
                    f"the checkpoint of step {step} is not of this run: {JOURNAL} does not lead "
                    "to it"
                )
            if arrays:
                log(f"checkpoint {step}: comparing the arrays with their digests")
                check_arrays(checkpoint)
        except (FileNotFoundError, ValueError, DamagedError) as error:
            # A kill may have come while a checkpoint was deleted that the run does not keep, or the
            # run goes on and deletes it now.
            if step in kept():
                problems.append(f"the checkpoint of step {step} is damaged: {error}")
            else:
                log(f"checkpoint {step} is not whole: the run was to delete it")
    return problems


def _changes(began: Sequence[Began]) -> list[str]:
    """What changed from session to session that may change the rounding, by step."""
    changes = []
    for before, after in itertools.pairwise(began):
        earlier, now = before.environment, after.environment
        differing = changes_since(earlier, now)
        for name in ("mesh", "device_kinds", "num_devices", "num_processes"):
            if earlier.get(name) != now.get(name):
                differing.append(f"{name} {earlier.get(name)} -> {now.get(name)}")
        roundings = [
            {"global_batch_size": config.global_batch_size, **rounding_of(config, here["platform"])}
            for config, here in ((before.train_config(), earlier), (after.train_config(), now))
        ]
        differing += rounding_changes(*roundings)
        changes += [f"at step {after.step}: {', '.join(differing)}"] if differing else []
    return changes


def _range_to_replay(
    steps: Sequence[int], chain: Sequence[Line], count: int
) -> tuple[int, int, Began]:
    """The last `count` steps that can be computed again, as the steps before the first and of the
    last of them, and the session that made them.

    Raises:
      ValueError: there are none.
    """
    saved = {line.step for line in chain if isinstance(line, Saved)}
    # The state of step 0 is made anew, if it was made from the seed.
    began = chain[0]
    is_from_seed = isinstance(began, Began) and began.step == 0 and began.init_from is None
    starts = sorted({*steps, *([0] if is_from_seed else [])})
    ranges = [(first, first + count) for first in reversed(starts) if first + count in saved]
    if not ranges:
        known = sorted({last - first for first in starts for last in saved if last > first})
        raise ValueError(
            f"--replay {count}: nothing that is still there is {count} steps before a saved step; "
            f"take one of {', '.join(map(str, known))}."
        )
    made = [(first, last, _makers(chain, first, last)) for first, last in ranges]
    first, last, makers = next((some for some in made if len(some[2]) == 1), made[0])
    began, *others = makers
    if others:
        when = " or ".join(str(other.step) for other in others)
        raise ValueError(
            f"--replay {count}: config or code changed on the way, or the run was rewound, at step "
            f"{when}; take another K."
        )
    return first, last, began


def _replay(
    directory: Any,
    chain: Sequence[Line],
    first: int,
    last: int,
    began: Began,
    log: Callable[[str], None],
) -> tuple[str | None, str | None]:
    """Compute steps again; what was done, and what came out wrong."""
    saved = {line.step: line.digest for line in chain if isinstance(line, Saved)}
    sessions = 1 + sum(first < began.step < last for began in session_starts(chain))
    steps = f"steps {first + 1} to {last}" + f" (of {sessions} sessions)" * (sessions > 1)
    config = _without_evaluations(began.train_config())
    with about(f"--replay {last - first}, steps {first + 1} to {last}"):
        parts = {
            part: recorded_code(getattr(config, part), directory.parent, folder)
            for folder, part in KEPT_SOURCES.items()
        }
    config = dataclasses.replace(config, **parts)
    log(f"computing steps {first + 1} to {last} again")
    computed = _digest_after(directory, chain, began, config, first, last, log)
    if computed == saved[last]:
        return f"{steps}, computed again: the same digest", None
    return None, (
        f"{steps}, computed again on {jax.device_count()} x {jax.devices()[0].device_kind}, end "
        f"with the digest {computed[:16]}, not {saved[last][:16]}"
    )


def _makers(chain: Sequence[Line], first: int, last: int) -> list[Began]:
    """The sessions that made the steps after `first` up to `last`. Sessions with equal training
    configs count once."""

    def of_steps(began: Began) -> TrainConfig:
        config = _without_evaluations(began.train_config())
        return dataclasses.replace(
            config,
            num_steps=last,
            schedule=fixed_schedule(config),
            checkpoint=CheckpointConfig(every=None),
            log=LogConfig(),
        )

    makers: list[Began] = []
    for before, line in zip([None, *chain], chain, strict=False):
        if not isinstance(line, Began):
            continue
        if line.step <= first:
            makers = [line]
        elif line.step < last and (
            _changes_data_or_state(before) or differences(of_steps(makers[-1]), of_steps(line))
        ):
            makers.append(line)
    return makers


def _changes_data_or_state(line: Line | None) -> bool:
    """Whether it is a rewind after which the steps are others than before."""
    return isinstance(line, Rewound) and (line.skip_examples > 0 or line.new_optimizer_state)


def _digest_after(
    directory: Any,
    chain: Sequence[Line],
    began: Began,
    config: TrainConfig,
    first: int,
    last: int,
    log: Callable[[str], None],
) -> str:
    """Restore the state of step `first`, make the steps up to `last`, and digest the state."""
    mesh = training_mesh(config.mesh, config.model)
    # What the run chose by itself stays where it ran, and need not fit elsewhere.
    requested = dataclasses.replace(config, num_microbatches=None)
    if "model.remat" in config.asked:
        requested = with_remat(requested, "auto")
    recorded = Recorded(config, began.environment)
    resolved = resolve_config(requested, Parameters(config.model, mesh), recorded=recorded)
    for text in resolved.messages:
        log(text)
    training = open_training(resolved)
    if training.data_digest != began.data:
        raise ValueError(f"the data in {config.data} are others than those of the run.")
    if config.data.verify:
        log("comparing the tokens with their checksums")
        verify_split(training.data.files, "train", hashed_by(directory.parent))
    if first in list_steps(directory):  # as is step 0 of a run from other weights
        rewinds = (line for line in chain if isinstance(line, Rewound) and line.step == first)
        rewound = next(rewinds, None)
        _, state, position = training.restore(
            lambda stored: load(directory, stored(read(directory, first)), first),
            skip_examples=0 if rewound is None else rewound.skip_examples,
            new_optimizer_state=rewound is not None and rewound.new_optimizer_state,
        )
    else:
        state, position = training.new_state(), 0
    with contextlib.closing(training.batches(position)) as batches:
        for _ in range(first, last):
            state, metrics = training.step(state, next(batches))
            # With many steps under way at once, threads of XLA's CPU devices starve each other.
            jax.block_until_ready(metrics)
    return combine(digest(saved_state(training.step, state)))
