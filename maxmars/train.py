"""The training loop: open everything, restore or initialise, step, and run hooks.

Hooks are a list of (every, function): evaluation and checkpoints now, anything else later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from maxmars import distributed, sharding
from maxmars.checkpoint import Checkpointer, load_config
from maxmars.config import TrainConfig, differences, to_dict
from maxmars.data.pipeline import SplitTokens, TrainBatches, ValidationBatches, open_data
from maxmars.data.tokenizer import save_tokenizer
from maxmars.evaluate import make_eval_step, validation_loss
from maxmars.metrics import (
    MetricsWriter,
    ProgressLine,
    recorded_steps,
    write_environment,
    write_json,
)
from maxmars.model import num_parameters
from maxmars.preemption import StopRequests
from maxmars.step_reporter import StepReporter
from maxmars.train_step import TrainState, TrainStep, check_mesh, init_train_state, make_train_step
from maxmars.watchdog import Watchdog

# What may change when a run continues; everything else defines the run.
_MAY_CHANGE = (
    "name",
    "num_steps",
    "num_microbatches",
    "schedule.decay_steps",
    "data.verify",
    "data.cache_dir",
    "model.remat",
    "model.scan_unroll",
    "mesh.",
    "eval.",
    "checkpoint.",
    "log.",
    "guard.max_skipped_in_a_row",
    "hang_timeout_s",
)


def train(config: TrainConfig, workdir: Path | str) -> bool:
    """Train as `config` says, or continue the run in `workdir`.

    Writes `config.json`, `environment.json`, `tokenizer/`, `metrics.jsonl` and `checkpoints/` into
    `workdir`. Every process of a distributed run calls this.

    Returns:
      Whether all steps are done. They are not after SIGTERM or Ctrl-C, which end the step that is
      under way, save, and return (see `preemption`).

    Raises:
      ValueError: the mesh, the data and the model do not fit together, `workdir` holds another run,
        or the loss is no longer finite.
      FileNotFoundError: there is no data.
    """
    workdir = Path(workdir).absolute()
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(config.hang_timeout_s, workdir / "checkpoints"))
        run = _open_run(config, workdir, watchdog, stack)
        stack.push(watchdog.leave_if_others_are_gone)
        if run.step >= run.config.num_steps:
            run.progress.message(
                f"{workdir}: all {run.step} steps are done. Train longer with --num-steps, or "
                "start anew with another --workdir."
            )
            return True
        started = time.monotonic()
        stops = stack.enter_context(StopRequests())
        if _evaluation_is_missing(run):
            _evaluate(run)
        if not _loop(run, _hooks(run), stops):
            _save(run, wait=True)
            run.progress.message(
                f"stopped after {run.step} steps; the checkpoint is complete, and the same command "
                "continues."
            )
            return False
        _evaluate(run)
        _save(run, wait=True)
        run.progress.message(_summary(run, time.monotonic() - started))
        return True


@dataclass(kw_only=True)
class _Run:
    """A run that is open: what stays, and where it stands."""

    config: TrainConfig
    workdir: Path
    mesh: Mesh
    train_step: TrainStep
    batches: TrainBatches
    evaluate: Callable[[Any], float] | None
    checkpointer: Checkpointer
    watchdog: Watchdog
    writer: MetricsWriter
    progress: ProgressLine
    state: TrainState
    step: int
    eval_loss: float | None = None
    eval_step: int | None = None


def _open_run(
    config: TrainConfig, workdir: Path, watchdog: Watchdog, stack: contextlib.ExitStack
) -> _Run:
    # Everything that can be wrong is found before anything is written.
    mesh = sharding.make_mesh(config.mesh)
    check_mesh(config, mesh)
    checkpoints = workdir / "checkpoints"
    progress = ProgressLine(config.num_steps)
    stack.callback(progress.close)
    config = _continued_config(config, checkpoints, progress)
    tokens = open_data(config.data, "train", model=config.model)
    next(TrainBatches(tokens, config, mesh, prefetch_steps=0))  # enough tokens, and readable?
    evaluate = _make_evaluate(config, mesh, watchdog, progress)

    checkpointer = stack.enter_context(Checkpointer(checkpoints, config, mesh=mesh))
    _write_description(config, workdir, mesh, tokens)
    progress.message(_description(config, mesh, tokens))
    train_step = make_train_step(config, mesh)
    with watchdog.watching("reading the checkpoint"):
        state, step, position = _restore_or_init(config, mesh, train_step, checkpointer, progress)
    batches = TrainBatches(tokens, config, mesh, position=position)
    stack.callback(batches.close)
    return _Run(
        config=config,
        workdir=workdir,
        mesh=mesh,
        train_step=train_step,
        batches=batches,
        evaluate=evaluate,
        checkpointer=checkpointer,
        watchdog=watchdog,
        writer=stack.enter_context(MetricsWriter(workdir, resume_step=step)),
        progress=progress,
        state=state,
        step=step,
    )


def _continued_config(
    config: TrainConfig, checkpoints: Path, progress: ProgressLine
) -> TrainConfig:
    """The config to continue with; unchanged where there is nothing to continue."""
    try:
        stored = load_config(checkpoints)
    except FileNotFoundError:
        return config
    changed = [
        f"{name} ({old} there, {new} here)"
        for name, old, new in differences(stored, config)
        if not name.startswith(_MAY_CHANGE)
    ]
    if changed:
        raise ValueError(
            f"{checkpoints.parent} holds another run: it differs in {', '.join(changed)}. "
            "Continue it with its own values, or choose another --workdir."
        )
    if config.schedule.decay_steps is None and config.decay_steps != stored.decay_steps:
        progress.message(
            f"num_steps is now {config.num_steps}; the learning rate still follows the schedule "
            f"over {stored.decay_steps} steps (change it with --schedule.decay-steps)."
        )
        schedule = dataclasses.replace(config.schedule, decay_steps=stored.decay_steps)
        config = dataclasses.replace(config, schedule=schedule)
    return config


def _make_evaluate(
    config: TrainConfig, mesh: Mesh, watchdog: Watchdog, progress: ProgressLine
) -> Callable[[Any], float] | None:
    if config.eval.every is None:
        return None
    tokens = open_data(config.data, "val", model=config.model)
    for stream in tokens.streams:
        if stream.split != "val":
            progress.message(f"validation takes split {stream.split!r} of {stream.directory}")
    batches = ValidationBatches(tokens, config, mesh)
    if batches.num_windows < config.eval.num_windows:
        progress.message(
            f"the validation split has {batches.num_windows} windows, fewer than "
            f"eval.num_windows={config.eval.num_windows}; all are scored."
        )
    eval_step = make_eval_step(config.model, mesh)
    watched = functools.partial(watchdog.over, batches, "batch of the evaluation")
    return lambda params: validation_loss(eval_step, params, watched()).loss


def _write_description(config: TrainConfig, workdir: Path, mesh: Mesh, tokens: SplitTokens) -> None:
    if distributed.is_primary():
        write_json(workdir / "config.json", to_dict(config))
        write_environment(workdir, mesh)
        stream = tokens.streams[0]
        save_tokenizer(stream.directory, stream.tokenizer, workdir / "tokenizer")


def _description(config: TrainConfig, mesh: Mesh, tokens: SplitTokens) -> str:
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return (
        f"{config.name}: {num_parameters(config.model) / 1e6:.2f}M parameters on "
        f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({axes}), "
        f"{config.tokens_per_step:,} tokens a step, {tokens.num_tokens:,} training tokens"
    )


def _restore_or_init(
    config: TrainConfig,
    mesh: Mesh,
    train_step: TrainStep,
    checkpointer: Checkpointer,
    progress: ProgressLine,
) -> tuple[TrainState, int, int]:
    """State, step and data position to start from."""
    if checkpointer.latest_step() is None:
        return init_train_state(config, mesh), 0, 0
    restored = checkpointer.restore(train_step.abstract_state)
    progress.message(f"continuing from step {restored.step}")
    return restored.state, restored.step, restored.data_position


Hooks = Sequence[tuple[int | None, Callable[[_Run], None]]]


def _hooks(run: _Run) -> Hooks:
    return [(run.config.eval.every, _evaluate), (run.config.checkpoint.every, _save)]


def _loop(run: _Run, hooks: Hooks, stops: StopRequests) -> bool:
    """Step until `num_steps`; hooks run between steps, not after the last one.

    Returns:
      Whether it got there; if not, it was asked to stop.
    """
    reporter = StepReporter(
        run.config, run.mesh, run.writer, run.progress, run.checkpointer.latest_step
    )
    while run.step < run.config.num_steps:
        run.watchdog.begin(f"reading the tokens of step {run.step + 1}", "tokens")
        with reporter.waiting():
            tokens = next(run.batches)
        run.watchdog.begin(f"step {run.step + 1}", "step")
        run.state, metrics = run.train_step(run.state, tokens)
        run.step += 1
        reporter.add(run.step, metrics)
        if run.step == run.config.num_steps:
            break
        if stops.due(run.step):  # before the hooks: there may be little time left to save
            break
        due = [hook for every, hook in hooks if every is not None and run.step % every == 0]
        if run.checkpointer.is_due(run.step) and _save not in due:
            due.append(_save)
        if due:
            reporter.flush()  # a checkpoint must not be complete before its step's metrics are
            run.watchdog.rest()
            with reporter.paused():
                for hook in due:
                    hook(run)
    reporter.flush()
    run.watchdog.rest()
    return run.step == run.config.num_steps


def _evaluation_is_missing(run: _Run) -> bool:
    """Whether the step to start from is one to evaluate at, and it never was: at step 0, or after
    a run that was stopped before it could."""
    every = run.config.eval.every
    if every is None or run.step % every:
        return False
    primary = distributed.is_primary()  # the one that has the file
    known = not primary or run.step in recorded_steps(run.workdir, "eval/loss")
    return not distributed.everywhere(known)


def _evaluate(run: _Run) -> None:
    if run.evaluate is None or run.eval_step == run.step:
        return
    run.eval_loss, run.eval_step = run.evaluate(run.state.params), run.step
    run.writer.write(run.step, {"eval/loss": run.eval_loss})
    run.progress.message(f"step {run.step}: validation loss {run.eval_loss:.4f} nats a token")


def _save(run: _Run, *, wait: bool = False) -> None:
    fresh = run.eval_loss is not None and run.eval_step == run.step
    with run.watchdog.watching(f"writing the checkpoint of step {run.step}"):
        blocked_s = run.checkpointer.save(
            run.step,
            run.state,
            data_position=run.batches.position,
            metrics={"eval/loss": run.eval_loss} if fresh else None,
            wait=wait,
        )
    if blocked_s is not None:
        run.writer.write(run.step, {"perf/checkpoint_blocking_time": blocked_s})


def _summary(run: _Run, seconds: float) -> str:
    loss = "" if run.eval_loss is None else f", validation loss {run.eval_loss:.4f} nats a token"
    minutes, rest = divmod(round(seconds), 60)
    return f"done: {run.step} steps in {minutes} min {rest} s{loss}; see {run.workdir}"
