"""`maxmars audit`: check that a run is one trajectory, each state computed from the one before.

The journal (see `checkpoint/journal.py`) must be whole, with a trajectory from the first step to
the newest checkpoint. Each remaining checkpoint must have a line in the trajectory, and arrays that
agree with the digests. The hash chain shows changed lines, not a journal that was forged as a
whole: for that `--replay` computes steps again. The state of the metrics is reported beside the
verdict, as no step depends on it.
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

from maxmars.checkpoint import list_steps, load, read
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
from maxmars.config import CheckpointConfig, EvalConfig, LogConfig, TrainConfig, differences
from maxmars.config.errors import about
from maxmars.data.verification import hashed_by, verify_split
from maxmars.distributed.files import read_json
from maxmars.distributed.recorded_code import recorded_code
from maxmars.distributed.sharding import training_mesh
from maxmars.distributed.workdir import JOURNAL, KEPT_SOURCES, METRICS, SUMMARY
from maxmars.model.parameters import Parameters
from maxmars.train.auto import with_remat
from maxmars.train.metrics import read_metrics, validation_losses
from maxmars.train.resolve import Recorded, resolve_config
from maxmars.train.resume import fixed_schedule, rounding_changes, rounding_of
from maxmars.train.rewind import find_run, rewinds_in_words
from maxmars.train.step import saved_state
from maxmars.train.training import open_training


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of `audit`, JSON-ready by `dataclasses.asdict`."""

    workdir: str
    last_step: int
    """Step of the newest checkpoint."""
    lines: int
    """Number of the journal's lines in the trajectory."""
    sessions: int
    """Number of sessions in the trajectory."""
    changes: list[str]
    """Changes between sessions that may change the rounding, with their steps."""
    config_changes: list[str]
    """Changes of config fields, with their steps."""
    rewinds: list[str]
    """Rewinds in the trajectory, in words."""
    problems: list[str]
    """Reasons why the run is not one trajectory; empty if it is."""
    code: list[str]
    """Reasons why own functions cannot run: their copies in `sources/` are not as recorded."""
    metrics: str | None
    """`as recorded`, or `changed since step N`; None where the journal is not whole."""
    uncovered_metrics: int
    """Number of lines of metrics after the newest checkpoint, of which the journal has no hash."""
    replayed: str | None
    """Result of `replay`, in words; None without one."""

    @property
    def verdict(self) -> str:
        """`one trajectory`, `one trajectory up to rounding`, or `broken`."""
        if self.problems:
            return "broken"
        return "one trajectory up to rounding" if self.changes else "one trajectory"

    @property
    def text(self) -> str:
        """The result as lines of text."""
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
      replay: number of steps to compute again on this machine, from a checkpoint (or the seed) to
        a saved step, whose digest is compared.
      compare_arrays: read the arrays of every checkpoint and compare them with their digests.
        Without this an audit takes a second or two, and trusts the digests in the checkpoints.
      log: gets a line before each long task.

    Raises:
      FileNotFoundError: there is no run.
      ValueError: no checkpoint can be read; arrays of 64 bits need 64-bit JAX; or no `replay` steps
        can be computed again, for example because `recorded_code` refuses the run's own code.
    """
    checkpoints = find_run(workdir)
    directory = checkpoints.parent
    # Listed before the newest is read: a run may save, and delete, while it is audited.
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
    to_replay = None if replay is None or problems else _choose_replay(steps, chain, replay)

    def retained() -> set[int]:
        now = list_steps(checkpoints)
        if since is not None and config.checkpoint.keep_best is not None:
            return set(now)  # the best one does not follow from changed losses
        losses = validation_losses(read_metrics(directory), config.checkpoint.keep_best_of)
        return Retention(config.checkpoint, losses).choose(now)

    problems += _check_checkpoints(checkpoints, steps, retained, chain, log, arrays=compare_arrays)
    replayed = None
    if to_replay is not None and not problems:
        replayed, problem = _replay(checkpoints, chain, *to_replay, log)
        problems += [problem] if problem else []
    return Audit(
        workdir=str(directory),
        last_step=newest.step,
        lines=len(chain),
        sessions=len(session_starts(chain)),
        changes=_changes_of_rounding(session_starts(chain)),
        config_changes=[f"at step {s}: {text}" for s, text in changes_of_config(chain).items()],
        rewinds=rewinds_in_words(chain),
        problems=problems,
        code=list(_unrecorded_code(directory, config)),
        metrics=None if lines_until_newest is None else metrics,
        uncovered_metrics=sum(row["step"] > newest.step for row in rows),
        replayed=replayed,
    )


def _unrecorded_code(run: Any, config: Any) -> Iterator[str]:
    """Errors of `recorded_code` for a run's own functions, one for each part of the config."""
    for folder, part in KEPT_SOURCES.items():
        try:
            recorded_code(getattr(config, part, ()), run, folder)
        except ValueError as error:
            yield str(error)


def _without_evaluations(config: TrainConfig) -> TrainConfig:
    """The config without evaluations, which change no step and should run no code in an audit."""
    # `keep_best` chooses by evaluations, and a config with it alone is refused.
    checkpoint = dataclasses.replace(config.checkpoint, keep_best=None, keep_best_of=None)
    return dataclasses.replace(config, eval=EvalConfig(every=None), checkpoint=checkpoint)


def _check_links(chain: Sequence[Began | Saved | Rewound]) -> list[str]:
    """Check that each line continues from the state and the data position of the line before."""
    problems, batch_size = [], 0
    for before, after in zip([None, *chain], chain, strict=False):
        if isinstance(after, Saved):
            if before is None:
                continue
            num_read = after.position - before.position
            if num_read != (after.step - before.step) * batch_size:
                problems.append(
                    f"{num_read} examples were read between steps {before.step} and {after.step}"
                )
            continue
        what, skipped = f"the session that began at step {after.step}", 0
        if isinstance(after, Rewound):
            what, skipped = f"the run that was rewound to step {after.step}", after.skip_examples
        else:
            batch_size = after.config["global_batch_size"]
        if before is None and not after.step:  # a new run begins
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
    retained: Callable[[], set[int]],
    chain: Sequence[Line],
    log: Callable[[str], None],
    *,
    arrays: bool,
) -> list[str]:
    """Check that each checkpoint has a line in the trajectory and, with `arrays`, arrays that agree
    with the digests. Damage is a problem only in checkpoints that the run retains."""
    problems, saved_hashes = [], {line.hash for line in chain if isinstance(line, Saved)}
    for step in steps:
        try:
            checkpoint = read(directory, step)
            if checkpoint.journal not in saved_hashes:
                problems.append(
                    f"the checkpoint of step {step} is not of this run: {JOURNAL} does not lead "
                    "to it"
                )
            if arrays:
                log(f"checkpoint {step}: comparing the arrays with their digests")
                check_arrays(checkpoint)
        except (FileNotFoundError, ValueError, DamagedError) as error:
            # Deletion of a checkpoint that is not retained may be under way, or was cut by a kill.
            # The run may be training, so `retained` looks anew.
            if step in retained():
                problems.append(f"the checkpoint of step {step} is damaged: {error}")
            else:
                log(f"checkpoint {step} is not whole: the run was to delete it")
    return problems


def _changes_of_rounding(sessions: Sequence[Began]) -> list[str]:
    """Changes between sessions that may change the rounding, in words, with their steps."""
    changes = []
    for before, after in itertools.pairwise(sessions):
        earlier, now = before.environment, after.environment
        differing = changes_since(earlier, now)
        for name in ("mesh", "device_kinds", "num_devices", "num_processes"):
            if earlier.get(name) != now.get(name):
                differing.append(f"{name} {earlier.get(name)} -> {now.get(name)}")
        roundings = [
            {"global_batch_size": config.global_batch_size, **rounding_of(config, env["platform"])}
            for config, env in ((before.train_config(), earlier), (after.train_config(), now))
        ]
        differing += rounding_changes(*roundings)
        changes += [f"at step {after.step}: {', '.join(differing)}"] if differing else []
    return changes


def _choose_replay(
    steps: Sequence[int], chain: Sequence[Line], count: int
) -> tuple[int, int, Began]:
    """Choose the newest `count` steps that one config can compute again; return the step to start
    from, the last step, and the session with the config.

    Raises:
      ValueError: there are no such steps.
    """
    saved_steps = {line.step for line in chain if isinstance(line, Saved)}
    # No checkpoint of step 0 is needed for a run whose first state follows from the seed.
    began = chain[0]
    is_from_seed = isinstance(began, Began) and began.step == 0 and began.init_from is None
    starts = sorted({*steps, *([0] if is_from_seed else [])})
    ranges = [(start, start + count) for start in reversed(starts) if start + count in saved_steps]
    if not ranges:
        counts = sorted({end - start for start in starts for end in saved_steps if end > start})
        raise ValueError(
            f"--replay {count}: nothing that is still there is {count} steps before a saved step; "
            f"take one of {', '.join(map(str, counts))}."
        )
    for start, end in ranges:
        if len(sessions := _sessions_of_steps(chain, start, end)) == 1:
            return start, end, sessions[0]
    _, *others = _sessions_of_steps(chain, *ranges[0])
    when = " or ".join(str(other.step) for other in others)
    raise ValueError(
        f"--replay {count}: config or code changed on the way, or the run was rewound, at step "
        f"{when}; take another K."
    )


def _replay(
    directory: Any,
    chain: Sequence[Line],
    start: int,
    end: int,
    began: Began,
    log: Callable[[str], None],
) -> tuple[str | None, str | None]:
    """Compute steps again; return the result and the problem, in words, one of which is None."""
    saved_digests = {line.step: line.digest for line in chain if isinstance(line, Saved)}
    sessions = 1 + sum(start < began.step < end for began in session_starts(chain))
    steps = f"steps {start + 1} to {end}" + f" (of {sessions} sessions)" * (sessions > 1)
    config = _without_evaluations(began.train_config())
    with about(f"--replay {end - start}, steps {start + 1} to {end}"):
        parts = {
            part: recorded_code(getattr(config, part), directory.parent, folder)
            for folder, part in KEPT_SOURCES.items()
        }
    config = dataclasses.replace(config, **parts)
    log(f"computing steps {start + 1} to {end} again")
    computed = _digest_after(directory, chain, began, config, start, end, log)
    if computed == saved_digests[end]:
        return f"{steps}, computed again: the same digest", None
    return None, (
        f"{steps}, computed again on {jax.device_count()} x {jax.devices()[0].device_kind}, end "
        f"with the digest {computed[:16]}, not {saved_digests[end][:16]}"
    )


def _sessions_of_steps(chain: Sequence[Line], start: int, end: int) -> list[Began]:
    """The sessions that made the steps after `start` up to `end`. Successive sessions count once if
    their configs make the same steps."""

    def config_of_steps(began: Began) -> TrainConfig:
        config = _without_evaluations(began.train_config())
        return dataclasses.replace(
            config,
            num_steps=end,
            schedule=fixed_schedule(config),
            checkpoint=CheckpointConfig(every=None),
            log=LogConfig(),
        )

    sessions: list[Began] = []
    for before, line in zip([None, *chain], chain, strict=False):
        if not isinstance(line, Began):
            continue
        if line.step <= start:
            sessions = [line]  # the last session at or before `start` made the first step
        elif line.step < end and (
            _changes_data_or_state(before)
            or differences(config_of_steps(sessions[-1]), config_of_steps(line))
        ):
            sessions.append(line)
    return sessions


def _changes_data_or_state(line: Line | None) -> bool:
    """Whether a line is a rewind that skips examples or resets the optimizer's state."""
    return isinstance(line, Rewound) and (line.skip_examples > 0 or line.new_optimizer_state)


def _digest_after(
    directory: Any,
    chain: Sequence[Line],
    began: Began,
    config: TrainConfig,
    start: int,
    end: int,
    log: Callable[[str], None],
) -> str:
    """Restore the state of step `start`, make the steps up to `end`, and return the digest of the
    state."""
    mesh = training_mesh(config.mesh, config.model)
    # Choices of the run are chosen anew, as they may not fit here. On the same hardware
    # `resolve_config` takes the recorded ones.
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
    if start in list_steps(directory):  # with `--init-from`, step 0 too has a checkpoint
        rewinds = (line for line in chain if isinstance(line, Rewound) and line.step == start)
        rewound = next(rewinds, None)
        _, state, position = training.restore(
            lambda stored: load(directory, stored(read(directory, start)), start),
            skip_examples=0 if rewound is None else rewound.skip_examples,
            new_optimizer_state=rewound is not None and rewound.new_optimizer_state,
        )
    else:
        state, position = training.new_state(), 0
    with contextlib.closing(training.batches(position)) as batches:
        for _ in range(start, end):
            state, metrics = training.step(state, next(batches))
            # Wait: with many steps in flight, threads of XLA's CPU devices starve each other.
            jax.block_until_ready(metrics)
    return combine(digest(saved_state(training.step, state)))
