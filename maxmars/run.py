"""A run that is open: everything that the loop works with, restored or new."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from maxmars import distributed, sharding
from maxmars.attention import choose_attention
from maxmars.checkpoint import Checkpointer
from maxmars.config import TrainConfig, to_dict
from maxmars.data.pipeline import SplitTokens, TrainBatches, ValidationBatches, open_data
from maxmars.data.tokenizer import save_tokenizer
from maxmars.evaluate import EvalStep, make_eval_step, validation_loss
from maxmars.goodput import Goodput
from maxmars.hellaswag import HellaSwagInLoop
from maxmars.host_log import HostLog
from maxmars.init_from import InitFrom, Initial, check_origin, load_initial, record_origin
from maxmars.mesh_checks import check_mesh
from maxmars.metrics import MetricsWriter, write_environment, write_json
from maxmars.model import num_parameters
from maxmars.precision import choose_precision
from maxmars.program_cache import ProgramCache, default_directory
from maxmars.progress_line import ProgressLine
from maxmars.remat import choose_remat
from maxmars.resume import continued_config, record_changes, stored_config
from maxmars.trackers import check_trackers, open_trackers
from maxmars.train_step import (
    TrainState,
    TrainStep,
    init_train_state,
    make_hyperparams,
    make_train_step,
)
from maxmars.watchdog import Watchdog
from maxmars.workdir import Workdir


@runtime_checkable
class Progress(Protocol):
    """What shows how a run gets on, such as a `ProgressLine`."""

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show metrics after `step` steps."""
        ...

    def message(self, text: str) -> None:
        """Print lines."""
        ...

    def finish(self, text: str) -> None:
        """Print the last lines."""
        ...


@dataclass(kw_only=True)
class Run:
    """A run that is open: what stays, and where it stands."""

    config: TrainConfig
    workdir: Workdir
    mesh: Mesh
    train_step: TrainStep
    batches: TrainBatches
    evaluate: Callable[[Any], float] | None
    hellaswag: HellaSwagInLoop | None
    checkpointer: Checkpointer | None
    """None where nothing is saved, as in the cells of a comparison."""
    programs: ProgramCache
    watchdog: Watchdog
    writer: MetricsWriter
    progress: Progress
    state: TrainState
    step: int
    goodput: Goodput = field(default_factory=Goodput)
    eval_loss: float | None = None
    eval_step: int | None = None


def open_run(
    config: TrainConfig,
    workdir: Workdir,
    init_from: InitFrom | None,
    resume_overrides: Sequence[str],
    watchdog: Watchdog,
    stack: contextlib.ExitStack,
) -> Run:
    """Open a run to begin or to continue it; see `train.train`.

    What must be closed goes on `stack`.
    """
    # Everything that can be wrong is found before anything is written.
    mesh = sharding.make_mesh(config.mesh)
    check_mesh(config, mesh.shape)
    check_trackers(config.log, workdir)
    checkpoints = workdir / "checkpoints"
    progress = ProgressLine(config.num_steps)
    stack.callback(progress.close)
    stored = stored_config(checkpoints, resume_overrides)
    if stored is not None:
        config = continued_config(
            stored,
            config,
            checkpoints,
            mesh=mesh,
            overrides=resume_overrides,
            say=progress.message,
        )
    chosen: list[str] = []  # said once the host's log is open
    config = choose_precision(config, mesh, chosen.append)
    attention = choose_attention(config.model, mesh.devices.flat[0].platform)
    check_origin(workdir, init_from, continues=stored is not None)
    tokens = open_data(config.data, "train", model=config.model)
    next(TrainBatches(tokens, config, mesh, prefetch_steps=0))  # enough tokens, and readable?
    evaluate = None
    if config.eval.every is not None:
        eval_step = make_eval_step(config.model, mesh)
        evaluate = make_evaluate(config, eval_step, watchdog, progress.message)
    wanted = config.eval.hellaswag_every is not None
    hellaswag = HellaSwagInLoop(config, mesh, tokens) if wanted else None
    initial = None
    if stored is None and init_from is not None:
        with watchdog.watching("reading the weights to start from"):
            initial = load_initial(config, mesh, init_from)

    checkpointer = stack.enter_context(Checkpointer(checkpoints, config, mesh=mesh))
    _write_description(config, workdir, mesh, tokens)
    owner = checkpointer.check_owner
    host_log = HostLog(workdir, jax.process_index(), may_write=owner)
    progress.copy_to(stack.enter_context(host_log).write)
    progress.message(_description(config, mesh, tokens))
    for text in chosen:
        progress.message(text)
    if attention.reason is not None:
        progress.message(f"attention is plain and slower: {attention.reason}")
    directory = default_directory(workdir, mesh.devices.flat[0].platform)
    programs = stack.enter_context(ProgramCache(directory, progress.message))
    with watchdog.watching("choosing model.remat"):
        train_step = make_train_step(choose_remat(config, mesh, progress.message), mesh)
    with watchdog.watching("reading the checkpoint"):
        state, step, position = _restore_or_init(
            config, workdir, train_step, checkpointer, initial, progress
        )
    if stored is not None:
        record_changes(workdir, step, stored, config)
    batches = TrainBatches(tokens, config, mesh, position=position)
    stack.callback(batches.close)
    trackers = open_trackers(config, workdir, step, say=progress.message, may_write=owner)
    return Run(
        config=config,
        workdir=workdir,
        mesh=mesh,
        train_step=train_step,
        batches=batches,
        evaluate=evaluate,
        hellaswag=hellaswag,
        checkpointer=checkpointer,
        programs=programs,
        watchdog=watchdog,
        writer=stack.enter_context(
            MetricsWriter(workdir, step, may_write=owner, trackers=trackers)
        ),
        progress=progress,
        state=state,
        step=step,
    )


def make_evaluate(
    config: TrainConfig, eval_step: EvalStep, watchdog: Watchdog, say: Callable[[str], None]
) -> Callable[[Any], float]:
    """The validation loss as a function of parameters, in nats a token.

    Args:
      config: whose validation windows are taken.
      eval_step: of its model, on the mesh of the parameters.
      watchdog: watches over each batch.
      say: is told if the data has no split `val`, or fewer windows than are asked for.

    Raises:
      ValueError, FileNotFoundError: see `open_data` and `ValidationBatches`.
    """
    tokens = open_data(config.data, "val", model=config.model)
    for stream in tokens.streams:
        if stream.split != "val":
            say(f"validation takes split {stream.split!r} of {stream.directory}")
    batches = ValidationBatches(
        tokens,
        eval_step.mesh,
        length=config.model.max_seq_len,
        num_windows=config.eval.num_windows,
        batch_size=config.eval_batch_size,
    )
    if batches.num_windows < config.eval.num_windows:
        say(
            f"the validation split has {batches.num_windows} windows, fewer than "
            f"eval.num_windows={config.eval.num_windows}; all are scored."
        )
    watched = functools.partial(watchdog.over, batches, "batch of the evaluation")
    return lambda params: validation_loss(eval_step, params, watched()).loss


def _write_description(
    config: TrainConfig, workdir: Workdir, mesh: Mesh, tokens: SplitTokens
) -> None:
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
    workdir: Workdir,
    train_step: TrainStep,
    checkpointer: Checkpointer,
    initial: Initial | None,
    progress: ProgressLine,
) -> tuple[TrainState, int, int]:
    """State, step and data position to start from."""
    if checkpointer.latest_step() is not None:
        restored = checkpointer.restore(train_step.abstract_state)
        progress.message(f"continuing from step {restored.step}")
        hyperparams = make_hyperparams(config, train_step.mesh)  # they may have changed
        state = dataclasses.replace(restored.state, hyperparams=hyperparams)
        return state, restored.step, restored.data_position
    if initial is None:
        return init_train_state(config, train_step.mesh), 0, 0
    record_origin(workdir, initial)
    progress.message(initial.text)
    return initial.state, 0, 0
