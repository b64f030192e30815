"""The training loop: open everything, restore or initialise, step, and run hooks.

Hooks are a list of (every, function): evaluation and checkpoints now, anything else later.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from maxmars import distributed, sharding
from maxmars.checkpoint import Checkpointer
from maxmars.config import TrainConfig, to_dict
from maxmars.data.pipeline import SplitTokens, TrainBatches, ValidationBatches, open_data
from maxmars.data.tokenizer import save_tokenizer
from maxmars.evaluate import make_eval_step, validation_loss
from maxmars.hellaswag import HellaSwagInLoop
from maxmars.init_from import InitFrom, Initial, check_origin, load_initial, record_origin
from maxmars.metrics import (
    MetricsWriter,
    ProgressLine,
    flops_per_token,
    peak_flops,
    recorded_steps,
    write_environment,
    write_json,
)
from maxmars.model import num_parameters
from maxmars.preemption import StopRequests
from maxmars.resume import continued_config, stored_config
from maxmars.train_step import TrainState, TrainStep, check_mesh, init_train_state, make_train_step


def train(config: TrainConfig, workdir: Path | str, *, init_from: InitFrom | None = None) -> bool:
    """Train as `config` says, or continue the run in `workdir`.

    Writes `config.json`, `environment.json`, `tokenizer/`, `metrics.jsonl` and `checkpoints/` into
    `workdir`. Every process of a distributed run calls this.

    Args:
      config: what to train.
      workdir: directory of the run.
      init_from: weights that a new run starts from, recorded in `init_from.json`; None draws them
        at random. Of a run that continues it must be what it started from, or None.

    Returns:
      Whether all steps are done. They are not after SIGTERM or Ctrl-C, which end the step that is
      under way, save, and return (see `preemption`).

    Raises:
      ValueError: the mesh, the data and the model do not fit together, `workdir` holds another run,
        or the loss is no longer finite.
      FileNotFoundError: there is no data, or nothing to start from.
    """
    workdir = Path(workdir).absolute()
    with contextlib.ExitStack() as stack:
        run = _open_run(config, workdir, init_from, stack)
        if run.step >= run.config.num_steps:
            run.progress.message(
                f"{workdir}: all {run.step} steps are done. Train longer with --num-steps, or "
                "start anew with another --workdir."
            )
            return True
        started = time.monotonic()
        stops = stack.enter_context(StopRequests())
        if _is_missing(run, run.config.eval.every, "eval/loss"):
            _evaluate(run)
        if _is_missing(run, run.config.eval.hellaswag_every, "eval/hellaswag_acc_norm"):
            _score_hellaswag(run)
        if not _loop(run, _hooks(run), stops):
            _save(run, wait=True)
            run.progress.message(
                f"stopped after {run.step} steps; the checkpoint is complete, and the same command "
                "continues."
            )
            return False
        _evaluate(run)
        _score_hellaswag(run)
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
    hellaswag: HellaSwagInLoop | None
    checkpointer: Checkpointer
    writer: MetricsWriter
    progress: ProgressLine
    state: TrainState
    step: int
    eval_loss: float | None = None
    eval_step: int | None = None


def _open_run(
    config: TrainConfig, workdir: Path, init_from: InitFrom | None, stack: contextlib.ExitStack
) -> _Run:
    # Everything that can be wrong is found before anything is written.
    mesh = sharding.make_mesh(config.mesh)
    check_mesh(config, mesh)
    checkpoints = workdir / "checkpoints"
    progress = ProgressLine(config.num_steps)
    stack.callback(progress.close)
    stored = stored_config(checkpoints)
    if stored is not None:
        config = continued_config(stored, config, workdir, progress.message)
        check_origin(workdir, init_from)
    tokens = open_data(config.data, "train", model=config.model)
    next(TrainBatches(tokens, config, mesh, prefetch_steps=0))  # enough tokens, and readable?
    evaluate = _make_evaluate(config, mesh, progress)
    wanted = config.eval.hellaswag_every is not None
    hellaswag = HellaSwagInLoop(config, mesh, tokens) if wanted else None
    initial = None
    if stored is None and init_from is not None:
        initial = load_initial(config, mesh, init_from)

    checkpointer = stack.enter_context(Checkpointer(checkpoints, config, mesh=mesh))
    _write_description(config, workdir, mesh, tokens)
    progress.message(_description(config, mesh, tokens))
    train_step = make_train_step(config, mesh)
    state, step, position = _restore_or_init(
        config, workdir, train_step, checkpointer, initial, progress
    )
    batches = TrainBatches(tokens, config, mesh, position=position)
    stack.callback(batches.close)
    return _Run(
        config=config,
        workdir=workdir,
        mesh=mesh,
        train_step=train_step,
        batches=batches,
        evaluate=evaluate,
        hellaswag=hellaswag,
        checkpointer=checkpointer,
        writer=stack.enter_context(MetricsWriter(workdir, resume_step=step)),
        progress=progress,
        state=state,
        step=step,
    )


def _make_evaluate(
    config: TrainConfig, mesh: Mesh, progress: ProgressLine
) -> Callable[[Any], float] | None:
    if config.eval.every is None:
        return None
    tokens = open_data(config.data, "val", model=config.model)
    for stream in tokens.streams:
        if stream.split != "val":
            progress.message(f"validation takes split {stream.split!r} of {stream.directory}")
    batches = ValidationBatches(
        tokens,
        mesh,
        length=config.model.max_seq_len,
        num_windows=config.eval.num_windows,
        batch_size=config.eval_batch_size,
    )
    if batches.num_windows < config.eval.num_windows:
        progress.message(
            f"the validation split has {batches.num_windows} windows, fewer than "
            f"eval.num_windows={config.eval.num_windows}; all are scored."
        )
    eval_step = make_eval_step(config.model, mesh)
    return lambda params: validation_loss(eval_step, params, batches).loss


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
    workdir: Path,
    train_step: TrainStep,
    checkpointer: Checkpointer,
    initial: Initial | None,
    progress: ProgressLine,
) -> tuple[TrainState, int, int]:
    """State, step and data position to start from."""
    if checkpointer.latest_step() is not None:
        restored = checkpointer.restore(train_step.abstract_state)
        progress.message(f"continuing from step {restored.step}")
        return restored.state, restored.step, restored.data_position
    record_origin(workdir, initial)
    if initial is None:
        return init_train_state(config, train_step.mesh), 0, 0
    progress.message(initial.text)
    return initial.state, 0, 0


Hooks = Sequence[tuple[int | None, Callable[[_Run], None]]]


def _hooks(run: _Run) -> Hooks:
    config = run.config
    return [
        (config.eval.every, _evaluate),
        (config.eval.hellaswag_every, _score_hellaswag),
        (config.checkpoint.every, _save),
    ]


def _loop(run: _Run, hooks: Hooks, stops: StopRequests) -> bool:
    """Step until `num_steps`; hooks run between steps, not after the last one.

    Returns:
      Whether it got there; if not, it was asked to stop.
    """
    reporter = _StepReporter(run)
    while run.step < run.config.num_steps:
        with reporter.waiting():
            tokens = next(run.batches)
        run.state, metrics = run.train_step(run.state, tokens)
        run.step += 1
        reporter.add(run.step, metrics)
        if run.step == run.config.num_steps:
            break
        if stops.due(run.step):  # before the hooks: there may be little time left to save
            reporter.flush()
            return False
        due = [hook for every, hook in hooks if every is not None and run.step % every == 0]
        if run.checkpointer.is_due(run.step) and _save not in due:
            due.append(_save)
        if due:
            reporter.flush()  # a checkpoint must not be complete before its step's metrics are
            with reporter.paused():
                for hook in due:
                    hook(run)
    reporter.flush()
    return True


def _is_missing(run: _Run, every: int | None, key: str) -> bool:
    """Whether the step to start from is one to evaluate at, and it never was: at step 0, or after
    a run that was stopped before it could."""
    if every is None or run.step % every:
        return False
    primary = distributed.is_primary()  # the one that has the file
    known = not primary or run.step in recorded_steps(run.workdir, key)
    return not distributed.everywhere(known)


def _evaluate(run: _Run) -> None:
    if run.evaluate is None or run.eval_step == run.step:
        return
    run.eval_loss, run.eval_step = run.evaluate(run.state.params), run.step
    run.writer.write(run.step, {"eval/loss": run.eval_loss})
    run.progress.message(f"step {run.step}: validation loss {run.eval_loss:.4f} nats a token")


def _score_hellaswag(run: _Run) -> None:
    if run.hellaswag is not None:
        found = run.hellaswag(run.state.params)
        run.writer.write(run.step, found.metrics)
        run.progress.message(f"step {run.step}: {found.text}")


def _save(run: _Run, *, wait: bool = False) -> None:
    fresh = run.eval_loss is not None and run.eval_step == run.step
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


class _StepReporter:
    """Metrics of step t − 1 are fetched after step t was dispatched: the device never waits."""

    def __init__(self, run: _Run):
        self._run = run
        self._pending: tuple[int, Any] | None = None
        self._flops = flops_per_token(num_parameters(run.config.model), run.config.model)
        peak = peak_flops(run.mesh.devices.flat[0].device_kind)
        self._peak = None if peak is None else peak * run.mesh.size
        self._since: float | None = None  # starts after the first step, which compiles
        self._steps = -1
        self._paused = 0.0
        self._waited = 0.0

    def add(self, step: int, metrics: Any) -> None:
        """Report the step before and keep this one."""
        self.flush()
        self._pending = (step, metrics)
        if self._since is None:
            jax.block_until_ready(metrics)
            self._since, self._waited = time.monotonic(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent here is waiting for data."""
        started = time.monotonic()
        yield
        self._waited += time.monotonic() - started

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent here does not count as steps."""
        started = time.monotonic()
        yield
        self._paused += time.monotonic() - started

    def flush(self) -> None:
        """Report the step that is kept, if there is one."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        self._steps += 1
        run = self._run
        skipped = values.pop("train/skipped_in_a_row")
        if skipped:
            self._skipped(step, values, skipped)
        elif step > 1 and step % run.config.log.every and step != run.config.num_steps:
            return
        values |= self._rates()
        run.writer.write(step, values)
        run.progress.update(step, values)

    def _rates(self) -> dict[str, float]:
        if self._since is None or self._steps < 1:
            return {}
        now = time.monotonic()
        seconds = (now - self._since - self._paused) / self._steps
        waited = self._waited / self._steps
        self._since, self._steps, self._paused, self._waited = now, 0, 0.0, 0.0
        tokens_per_sec = self._run.config.tokens_per_step / seconds
        rates = {
            "perf/tokens_per_sec": tokens_per_sec,
            "perf/step_time": seconds,
            "perf/data_wait": waited,
        }
        if self._peak is not None:
            rates["perf/mfu"] = tokens_per_sec * self._flops / self._peak
        return rates

    def _skipped(self, step: int, values: dict[str, float], in_a_row: int) -> None:
        loss, norm = values["train/loss"], values["train/grad_norm"]
        finite = math.isfinite(loss) and math.isfinite(norm)
        reason = "the loss is a spike" if finite else "they are not finite"
        found = f"step {step} was skipped: loss {loss:.4g}, gradient norm {norm:.4g}; {reason}"
        if in_a_row <= self._run.config.guard.max_skipped_in_a_row:
            total = values["train/skipped"]
            self._run.progress.message(f"{found} ({total} skipped in all).")
            return
        self._run.writer.write(step, values)
        last = self._run.checkpointer.latest_step()
        raise ValueError(
            f"{found}. {in_a_row} steps in a row are more than guard.max_skipped_in_a_row allows. "
            f"The last checkpoint is {'missing' if last is None else f'of step {last}'}. "
            "Lower optimizer.learning_rate or raise schedule.warmup_steps."
        )
