"""Run the trials of a comparison that are missing, each by `maxmars.train`, then write the report.

A comparison is fair when its contenders differ only in how they train. Their configs are compared
before the first trial runs, and before each trial the digests of its initial weights and of its
first and last batch are compared with those of the other trials of its seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from maxmars.checkpoint.digest import combine, digest
from maxmars.checkpoint.journal import Began, Rewound, Saved, read_journal, session_starts
from maxmars.checkpoint.lock import FileLock, is_owned
from maxmars.compare.curves import TRAINING_LOSS, read_recorded
from maxmars.compare.report import write_report
from maxmars.compare.search import Search, next_trials
from maxmars.compare.summary import Summary, summarize
from maxmars.compare.trials import (
    Comparison,
    Contender,
    Row,
    Rows,
    Trial,
    check_comparable,
    open_comparison,
    read_rows,
    write_row,
)
from maxmars.config import TrainConfig
from maxmars.config.errors import in_words
from maxmars.config.numbers import duration
from maxmars.distributed import sharding
from maxmars.distributed.files import read_json
from maxmars.distributed.progress import Progress
from maxmars.distributed.run_process import RunProcess
from maxmars.distributed.workdir import CHECKPOINTS, ENVIRONMENT
from maxmars.model.parameters import Parameters
from maxmars.plan.collectives import collectives
from maxmars.train import compile_cache, train
from maxmars.train.auto import choose_precision
from maxmars.train.optimizer import check_optimizer
from maxmars.train.reporter import DivergedError
from maxmars.train.resolve import resolve_config
from maxmars.train.step import make_train_step
from maxmars.train.training import open_training

RISE = 0.5
"""A run diverged if its validation loss ends more than this many nats above its lowest value."""

_POLL_S = 5.0  # between looks for rows of other processes

Digests = tuple[str, str]
"""Digests of the weights that a run starts from, and of the batches of its first and last step."""


def compare(comparison: Comparison, workdir: Path) -> Summary | None:
    """Run the trials that a comparison lacks, on all devices, and write its report.

    Any number of processes may do so at the same time: whoever locks a trial's directory first runs
    it, and all read the rows anew before they choose. Where all trials that are left run already,
    this waits for the others.

    Args:
      comparison: what is compared; every config evaluates (`eval.every` is not None).
      workdir: directory of the comparison, on a disk of this machine.

    Returns:
      The summary; None after SIGTERM or Ctrl-C, which save the trial that is running. The next
      call continues it.

    Raises:
      ValueError: the contenders are not comparable or do not fit the mesh and the data, or
        `workdir` holds another comparison.
      FileNotFoundError: there is no data, or a Python file that a config names is gone.
    """
    check_comparable(comparison.contenders)
    for contender in comparison.contenders:
        _check_optimizer(contender.config)
    keep_programs(workdir)
    comparison = _with_precision(comparison)
    open_comparison(comparison, workdir)
    contenders = {contender.name: contender for contender in comparison.contenders}
    print(f"trials and their logs: {workdir / 'cells'}", flush=True)
    if finished := len(read_rows(comparison, workdir)):
        print(f"{finished} trials are finished and kept", flush=True)
    starts: dict[tuple[str, int], Digests] = {}
    with RunProcess() as process:
        process.started()  # a signal finishes the step and saves the trial
        # Each turn: what is missing by the rows on the disk, one trial of it, its row.
        while True:
            rows = read_rows(comparison, workdir)
            pending = next_trials(comparison, rows)
            if not pending or process.stop_due():
                break
            taken = _take(pending, workdir)
            if taken is None:
                _wait_for_others(comparison, workdir, process)
                continue
            trial, lock = taken
            try:
                rows = read_rows(comparison, workdir)
                if trial in rows:  # another process finished it just now
                    continue
                contender = contenders[trial.contender]
                key = trial.contender, trial.seed
                if key not in starts:  # the trial's own values may be refused
                    starts[key] = find_start(dataclasses.replace(contender.config, seed=trial.seed))
                _check_same_start(trial, starts[key], rows.values())
                directory = trial.directory(workdir)
                if refusal := _why_refused(trial, contender):
                    row = _refused_row(trial, refusal, starts[key])
                else:
                    row = run_trial(trial, trial.config(contender), directory, starts[key], process)
                if row is None:
                    break
                # One row a contender has the cost, for which a step is compiled.
                if not any(r.cost for t, r in rows.items() if t.contender == trial.contender):
                    row = dataclasses.replace(row, cost=step_cost(contender.config))
                write_row(row, workdir)
                # A finished trial is never continued, and the states of a whole grid fill a disk.
                shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)
            finally:
                lock.release()
            print(_progress(row, comparison, rows | {trial: row}, workdir), flush=True)
    if pending:
        print(f"stopped with {len(rows)} finished trials; the same command continues")
        return None
    summary = summarize(workdir)
    write_report({"": summary}, workdir)
    return summary


def keep_programs(workdir: Path) -> None:
    """Cache what JAX compiles, for all trials: those with equal programs compile once."""
    platform = jax.devices()[0].platform
    if platform == "cpu":
        compile_cache.keep_in_cache(platform)
    else:
        compile_cache.keep_beside(workdir, platform)


def _take(trials: Iterable[Trial], workdir: Path) -> tuple[Trial, FileLock] | None:
    """Lock the first trial that no process runs; None where all run."""
    for trial in trials:
        directory = trial.directory(workdir)
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ValueError):  # another process has it
            return trial, FileLock(directory, timeout_s=0.0)
    return None


def _wait_for_others(comparison: Comparison, workdir: Path, process: RunProcess) -> None:
    """Wait until a trial is free to run, none is missing, or a signal came."""
    with Progress() as progress:
        while not process.stop_due():
            rows = read_rows(comparison, workdir)
            pending = next_trials(comparison, rows)
            if not all(is_owned(trial.directory(workdir)) for trial in pending) or not pending:
                return
            waiting = f"waiting for trials of other processes: {len(pending)}"
            progress.update(waiting, len(rows), len(rows) + len(pending))
            time.sleep(_POLL_S)


def _with_precision(comparison: Comparison) -> Comparison:
    """The comparison with `model.compute_dtype` `auto` replaced: all trials then have one dtype,
    also those that run after the comparison moved to another machine."""
    contenders = []
    for contender in comparison.contenders:
        config = contender.config
        config = choose_precision(config, sharding.training_mesh(config.mesh, config.model))
        contenders.append(dataclasses.replace(contender, config=config))
    return dataclasses.replace(comparison, contenders=tuple(contenders))


def find_start(config: TrainConfig) -> Digests:
    """Digest the weights that a run starts from, and its first and last batch: all batches between
    follow from the same data and seed, by the same rule.

    Raises:
      ValueError: data, model and mesh do not fit together.
      FileNotFoundError: there is no data.
    """
    mesh = sharding.training_mesh(config.mesh, config.model)
    training = open_training(resolve_config(config, Parameters(config.model, mesh)))
    weights = combine(digest(training.new_state().params))
    sha = hashlib.sha256()
    for step in (0, config.num_steps - 1):
        with contextlib.closing(
            training.batches(step * config.global_batch_size, prefetch=False)
        ) as batches:
            for _, array in sorted(next(batches).items()):
                sha.update(np.asarray(array).tobytes())
    return weights, sha.hexdigest()


def _check_optimizer(config: TrainConfig) -> None:
    mesh = sharding.training_mesh(config.mesh, config.model)
    check_optimizer(config.optimizer, Parameters(config.model, mesh), config.ema_decay)


def _why_refused(trial: Trial, contender: Contender) -> str | None:
    """Why config or optimizer refuses a trial's values; None if they take them.

    Each grid was extended by itself, so two values may not be allowed together; and only an
    optimizer of the user's own knows which values it takes.
    """
    try:
        config = trial.config(contender)
    except ValueError as error:
        return str(error)
    try:
        _check_optimizer(config)
    except ValueError as error:
        return f"the optimizer refuses it: {in_words(error)}"
    return None


def _refused_row(trial: Trial, reason: str, start: Digests) -> Row:
    """The row of a trial that does not run."""
    return Row(
        trial=trial,
        loss=math.inf,
        diverged=reason,
        step_time_s=None,
        seconds=0.0,
        initial_weights=start[0],
        tokens=start[1],
        curve=None,
        train_losses=(),
        final_state=None,
        environment={},
    )


def _check_same_start(trial: Trial, start: Digests, rows: Iterable[Row]) -> None:
    for other in rows:
        recorded = (other.initial_weights, other.tokens)
        if other.trial.seed == trial.seed and start != recorded:
            what = "weights" if start[0] != recorded[0] else "tokens"
            raise ValueError(
                f"{trial.contender} and {other.trial.contender} have other {what} with seed "
                f"{trial.seed}, so their losses cannot be paired. Did the data or the code change "
                "since the comparison began? Choose another --workdir."
            )


def run_trial(
    trial: Trial,
    config: TrainConfig,
    directory: Path,
    start: Digests,
    process: RunProcess | None = None,
) -> Row | None:
    """Train a trial, or continue it; None if a signal stopped it before its end.

    Args:
      trial: which one it is.
      config: its config.
      directory: its working directory.
      start: see `find_start`.
      process: see `train`.
    """
    loss, diverged, began_s = math.inf, None, time.monotonic()
    try:
        if not train(config, directory, process=process, quiet=True).done:
            return None
    except DivergedError as error:
        diverged = error.reason
    run = read_recorded(directory, config)
    curve = run.curve  # None where it diverged before its first evaluation
    if diverged is None:
        assert curve is not None, "every run evaluates"
        loss, lowest = curve.losses[-1], min(curve.losses)
        if not loss <= lowest + RISE:  # also where the loss is not a number
            diverged = f"the validation loss ended at {loss:.4g}, but had been {lowest:.4g}."
            loss = math.inf
    lines = read_journal(directory)
    states = [line.digest for line in lines if isinstance(line, Began | Saved | Rewound)]
    return Row(
        trial=trial,
        loss=loss,
        diverged=diverged,
        step_time_s=run.step_time_s,
        seconds=time.monotonic() - began_s,
        initial_weights=start[0],
        tokens=start[1],
        curve=curve,
        train_losses=tuple((step, loss) for step, _, loss in run.points.get(TRAINING_LOSS, ())),
        final_state=states[-1] if states and diverged is None else None,
        environment=read_json(directory / ENVIRONMENT) or {},
        data=next((session.data for session in reversed(session_starts(lines))), None),
    )


def _progress(row: Row, comparison: Comparison, rows: Rows, workdir: Path) -> str:
    """Text on how a trial ended, how many trials there are at most, and their time at most."""
    trial = row.trial
    # A contender's missing trials may take as long as its finished ones.
    num_left, seconds_left = 0, 0.0
    for contender in comparison.contenders:
        own = [r.seconds for t, r in rows.items() if t.contender == contender.name]
        left = Search(contender, comparison, rows).most_trials_left
        num_left += left
        seconds_left += left * float(np.mean(own or [row.seconds]))
    num_elsewhere = sum(is_owned(t.directory(workdir)) for t in next_trials(comparison, rows))
    width = max(len(contender.name) for contender in comparison.contenders)
    text = f"[{len(rows):>3}/{len(rows) + num_left}] {trial.contender:<{width}}  "
    text += "diverged" if row.diverged else f"validation loss {row.loss:.4f}"
    text += f"  {duration(row.seconds)}"
    if num_left:
        text += f", at most {duration(seconds_left / (1 + num_elsewhere))} left"
    details = [trial.name, *([row.diverged] if row.diverged else [])]
    return "\n        ".join([text, *details])


def step_cost(config: TrainConfig) -> dict[str, int]:
    """Bytes that a contender's train step stores and moves, on one device.

    Where there are several devices this compiles the step, whose program has the collectives.
    """
    mesh = sharding.training_mesh(config.mesh, config.model)
    resolved = resolve_config(config, Parameters(config.model, mesh))
    step = make_train_step(resolved.config, resolved.parameters)
    state = step.abstract_state
    moved = 0
    if mesh.size > 1:
        compiled: jax.stages.Compiled = step.lower().compile()
        moved = sum(c.bytes for c in collectives(compiled, mesh))
    return {
        "num_parameters": step.parameters.count,
        "num_devices": mesh.size,
        "parameter_bytes": sharding.bytes_on_chip(state.params),
        "optimizer_state_bytes": sharding.bytes_on_chip((state.opt_state, state.prev_params)),
        "collective_bytes": moved,
    }
