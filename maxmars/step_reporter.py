"""What the steps report: metrics, one step late, and an error after too many skipped ones.

A step that is not due for a line costs the loop one number from the device: whether it was skipped.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from maxmars.metrics import flops_per_token, peak_flops
from maxmars.model import num_parameters
from maxmars.model_parts import learning_rate_scales, named_norms
from maxmars.run import Run
from maxmars.skipped_steps import write_skipped_step


class DivergedError(ValueError):
    """More steps in a row were skipped than the config allows."""


class StepReporter:
    """Metrics of step t − 1 are fetched after step t was dispatched: the device never waits."""

    def __init__(self, run: Run, started: float) -> None:
        """Report to the run's writer and progress line, from its first step here on.

        Args:
          run: the run.
          started: when it was started (monotonic), less the time of evaluations before the steps.
        """
        self._run = run
        self._started = started
        self._pending: tuple[int, Any] | None = None
        self._flops = flops_per_token(num_parameters(run.config.model), run.config.model)
        peak = peak_flops(run.mesh.devices.flat[0].device_kind)
        self._peak = None if peak is None else peak * run.mesh.size
        self._since: float | None = None  # starts after the first step, which compiles
        self._steps = -1
        self._paused = 0.0
        self._waited = 0.0
        self._clipped: list[Any] = []  # of each step since the last line, still on the device
        self._rate_scales = learning_rate_scales(run.config.optimizer, run.config.model)

    def add(self, step: int, metrics: Any) -> None:
        """Report the step before and keep this one."""
        self.flush()
        self._pending = (step, metrics)
        if self._since is None:
            jax.block_until_ready(metrics)
            self._since, self._waited = time.monotonic(), 0.0
            self._run.goodput.begin("steps")
            self._run.programs.seal()
            seconds = self._since - self._started
            self._run.writer.write(step, {"perf/time_to_first_step": seconds})
            self._run.progress.message(f"first step after {seconds:.1f} s")

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
        run = self._run
        in_a_row, clipped = "train/skipped_in_a_row", "train/grad_clipped"
        if clipped in metrics:
            self._clipped.append(metrics[clipped])
        skipped = metrics[in_a_row].item()  # waits for the step
        self._steps += 1
        due = step == 1 or step % run.config.log.every == 0 or step == run.config.num_steps
        if not due and not skipped:
            return
        fetched = jax.device_get({k: v for k, v in metrics.items() if k not in (in_a_row, clipped)})
        values = self._named(fetched)
        if skipped:
            self._skipped(step, values, skipped)
        values |= self._rates()
        run.goodput.reached(step)
        run.writer.write(step, values)
        run.progress.update(step, values)

    def _named(self, fetched: dict[str, Any]) -> dict[str, float]:
        """What a step measured, and what follows from it, as numbers."""
        norms = fetched.pop("train/norms", None)
        values = {name: value.item() for name, value in fetched.items()}
        for part, scale in self._rate_scales.items():
            values[f"train/learning_rate/{part}"] = scale * values["train/learning_rate"]
        if self._clipped:
            values["train/grad_clip_fraction"] = float(np.mean(jax.device_get(self._clipped)))
            self._clipped.clear()
        return values if norms is None else values | named_norms(norms)

    def _rates(self) -> dict[str, float]:
        if self._since is None or self._steps < 1:
            return {}
        now = time.monotonic()
        seconds = (now - self._since - self._paused) / self._steps
        waited = self._waited / self._steps
        self._run.goodput.waited(self._waited)
        self._since, self._steps, self._paused, self._waited = now, 0, 0.0, 0.0
        tokens_per_sec = self._run.config.tokens_per_step / seconds
        rates = {
            "perf/tokens_per_sec": tokens_per_sec,
            "perf/step_time": seconds,
            "perf/data_wait": waited,
            "perf/goodput": self._run.goodput.share(),
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
        last = None if run.checkpointer is None else run.checkpointer.latest_step()
        raise DivergedError(
            f"{text} That makes {in_a_row} in a row, more than guard.max_skipped_in_a_row allows. "
            f"The last checkpoint is {'missing' if last is None else f'of step {last}'}. Continue "
            "with a lower optimizer.learning_rate or more schedule.warmup_steps (name them in "
            "--resume-overrides), or without such steps by --guard.max-skipped-in-a-row 10."
        )
