"""The training loop: open a run, step, and run hooks.

Hooks are a list of (every, function): evaluation and checkpoints now, anything else later.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from maxmars import distributed
from maxmars.config import TrainConfig
from maxmars.init_from import InitFrom
from maxmars.metrics import flops_per_token, peak_flops, recorded_steps
from maxmars.model import num_parameters
from maxmars.preemption import StopRequests
from maxmars.run import Run, open_run
from maxmars.skipped_steps import write_skipped_step


def train(
    config: TrainConfig,
    workdir: Path | str,
    *,
    init_from: InitFrom | None = None,
    resume_overrides: Sequence[str] = (),
) -> bool:
    """Train as `config` says, or continue the run in `workdir`.

    Writes `config.json`, `environment.json`, `tokenizer/`, `metrics.jsonl`, `checkpoints/` and
    `logs/` into `workdir`. Every process of a distributed run calls this.

    Args:
      config: what to train.
      workdir: directory of the run.
      init_from: weights that a new run starts from, recorded in `init_from.json`; None draws them
        at random. Of a run that continues it must be what it started from, or None.
      resume_overrides: dotted names of fields that change on purpose when the run continues, which
        otherwise refuses (see `resume`); what changed is recorded in `config_changes.jsonl`.

    Returns:
      Whether all steps are done. They are not after SIGTERM or Ctrl-C, which end the step that is
      under way, save, and return (see `preemption`).

    Raises:
      ValueError: the mesh, the data and the model do not fit together, `workdir` holds another run,
        or the loss is no longer finite.
      FileNotFoundError: there is no data, or nothing to start from.
    """
    if str(workdir).startswith("gs:"):
        raise ValueError(
            f"--workdir {workdir} is in a bucket, and a run needs a directory: mount the bucket or "
            "a shared disk on every host and name a path there."
        )
    workdir = Path(workdir).absolute()
    with contextlib.ExitStack() as stack:
        run = open_run(config, workdir, init_from, resume_overrides, stack)
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


Hooks = Sequence[tuple[int | None, Callable[[Run], None]]]


def _hooks(run: Run) -> Hooks:
    config = run.config
    return [
        (config.eval.every, _evaluate),
        (config.eval.hellaswag_every, _score_hellaswag),
        (config.checkpoint.every, _save),
    ]


def _loop(run: Run, hooks: Hooks, stops: StopRequests) -> bool:
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


def _is_missing(run: Run, every: int | None, key: str) -> bool:
    """Whether the step to start from is one to evaluate at, and it never was: at step 0, or after
    a run that was stopped before it could."""
    if every is None or run.step % every:
        return False
    primary = distributed.is_primary()  # the one that has the file
    known = not primary or run.step in recorded_steps(run.workdir, key)
    return not distributed.everywhere(known)


def _evaluate(run: Run) -> None:
    if run.evaluate is None or run.eval_step == run.step:
        return
    run.eval_loss, run.eval_step = run.evaluate(run.state.params), run.step
    run.writer.write(run.step, {"eval/loss": run.eval_loss})
    run.progress.message(f"step {run.step}: validation loss {run.eval_loss:.4f} nats a token")


def _score_hellaswag(run: Run) -> None:
    if run.hellaswag is not None:
        found = run.hellaswag(run.state.params)
        run.writer.write(run.step, found.metrics)
        run.progress.message(f"step {run.step}: {found.text}")


def _save(run: Run, *, wait: bool = False) -> None:
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


def _summary(run: Run, seconds: float) -> str:
    loss = "" if run.eval_loss is None else f", validation loss {run.eval_loss:.4f} nats a token"
    minutes, rest = divmod(round(seconds), 60)
    return f"done: {run.step} steps in {minutes} min {rest} s{loss}; see {run.workdir}"


class _StepReporter:
    """Metrics of step t − 1 are fetched after step t was dispatched: the device never waits."""

    def __init__(self, run: Run):
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
        """Say that a step was skipped and what it was made of; raise if there are too many."""
        run = self._run
        loss, norm = values["train/loss"], values["train/grad_norm"]
        finite = math.isfinite(loss) and math.isfinite(norm)
        reason = "a spike of the loss" if finite else "not finite"
        ahead = run.step - step + 1  # batches taken since the one before
        where = write_skipped_step(
            run.workdir,
            run.config,
            run.batches,
            step=step,
            first_example=run.batches.position - ahead * run.config.global_batch_size,
            found={"reason": reason, **values},
        )
        text = f"step {step} was skipped ({reason}): loss {loss:.4g}, gradient norm {norm:.4g}"
        text += f", {values['train/skipped']} skipped in all; {where}."
        if in_a_row <= run.config.guard.max_skipped_in_a_row:
            run.progress.message(text)
            return
        run.writer.write(step, values)
        last = run.checkpointer.latest_step()
        raise ValueError(
            f"{text} That makes {in_a_row} in a row, more than guard.max_skipped_in_a_row allows. "
            f"The last checkpoint is {'missing' if last is None else f'of step {last}'}. Continue "
            "with a lower optimizer.learning_rate or more schedule.warmup_steps (name them in "
            "--resume-overrides), or without such steps by --guard.max-skipped-in-a-row 10."
        )
