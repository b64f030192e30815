"""What a run reports of its steps: their metrics, one step late, and the steps that were skipped.

The metrics of step t - 1 are fetched after step t was dispatched, so that the device never waits. A
step that is not due for a line costs the loop one number from the device: whether it was skipped.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from maxmars.checkpoint.digest import digest_and_finite
from maxmars.config.chips import peak_flops
from maxmars.train.journal import run_seconds, shares
from maxmars.train.norms import named_norms
from maxmars.train.optimizer import learning_rate_scales
from maxmars.train.run import Run
from maxmars.train.step import NO_TARGETS, SKIP_REASONS


class DivergedError(ValueError):
    """More steps in a row were skipped than the config allows."""

    def __init__(self, reason: str, advice: str) -> None:
        """`reason` says which step was skipped and why, `advice` how to continue the run."""
        super().__init__(f"{reason} {advice}")
        self.reason = reason


class StepReporter:
    """Takes the metrics of each step, and writes those that are due to the run's files."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pending: tuple[int, Any] | None = None
        self._flops = run.train_step.parameters.flops_per_token
        mesh = run.train_step.mesh
        peak = peak_flops(mesh.devices.flat[0].device_kind)
        self._peak = None if peak is None else peak * mesh.size
        self.is_skipping = False
        """Whether the update of the last step reported was not applied."""
        self._before: dict[str, float] | None = None  # seconds at the last line, by activity
        self._steps = -1
        self._clipped: list[Any] = []  # of each step since the last line, still on the device
        self._rate_scales = learning_rate_scales(run.config.optimizer, run.train_step.parameters)

    def add(self, step: int, metrics: Any) -> None:
        """Report the step before and keep this one."""
        self.flush()
        self._pending = (step, metrics)
        if self._before is None:
            jax.block_until_ready(metrics)
            self._before = self._run.clock.seconds
            seconds = sum(self._before.values()) - self._before.get("evaluation", 0.0)
            self._run.writer.write(step, {"perf/time_to_first_step": seconds})

    def flush(self) -> None:
        """Report the step that is kept, if there is one."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        run, num_steps = self._run, self._run.config.num_steps
        metrics = dict(metrics)
        if "train/grad_clipped" in metrics:
            self._clipped.append(metrics.pop("train/grad_clipped"))
        consecutive_skips = metrics.pop("train/consecutive_skips").item()  # waits for the step
        reason = metrics.pop("train/skip_reason")
        self.is_skipping = consecutive_skips > 0
        self._steps += 1
        due = step == 1 or step % run.config.log.every == 0 or step == num_steps
        if not due and not consecutive_skips:
            return
        values = self._numbers(metrics) | self._examples(step)
        if consecutive_skips:
            self._skipped(step, values, consecutive_skips, reason.item())
        values |= self._rates(step)
        run.writer.write(step, values)

    def _numbers(self, metrics: dict[str, Any]) -> dict[str, float]:
        """What a step measured, and what follows from it, as numbers."""
        fetched = jax.device_get(metrics)
        norms = named_norms(fetched, self._run.train_step.parameters)
        values = norms | {name: value.item() for name, value in fetched.items() if not value.ndim}
        for part, scale in self._rate_scales.items():
            values[f"train/learning_rate/{part}"] = scale * values["train/learning_rate"]
        if self._clipped:
            values["train/grad_clip_fraction"] = float(np.mean(jax.device_get(self._clipped)))
            self._clipped.clear()
        return values

    def _examples(self, step: int) -> dict[str, int]:
        """Which examples of `maxmars.data.examples` a step read."""
        batch_size = self._run.config.global_batch_size
        later = self._run.step - step + 1  # batches taken since the one before
        first = self._run.batches.position - later * batch_size
        return {"train/first_example": first, "train/num_examples": batch_size}

    def _rates(self, step: int) -> dict[str, float]:
        """Of the steps since the last line, and their waits for data: nothing else counts."""
        if self._before is None or self._steps < 1:
            return {}
        now = self._run.clock.seconds
        waited, stepped = (
            (now.get(name, 0.0) - self._before.get(name, 0.0)) / self._steps
            for name in ("data_wait", "steps")
        )
        tokens_per_sec = self._run.config.tokens_per_step / (stepped + waited)
        rates = {
            "perf/tokens_per_sec": tokens_per_sec,
            "perf/step_time": stepped + waited,
            "perf/data_wait": waited,
            "perf/goodput": shares(run_seconds(self._run.journal.sessions(step)))["steps"],
        }
        if self._peak is not None:
            rates["perf/mfu"] = tokens_per_sec * self._flops / self._peak
        self._before, self._steps = now, 0
        return rates

    def _skipped(
        self, step: int, values: dict[str, float], consecutive_skips: int, reason: int
    ) -> None:
        """Report a skipped step.

        Raises:
          DivergedError: too many steps in a row were skipped.
        """
        run = self._run
        loss, norm = values["train/loss"], values["train/grad_norm"]
        text = (
            f"step {step} was skipped ({SKIP_REASONS[reason]}): loss {loss:.4g}, gradient norm "
            f"{norm:.4g}, {values['train/skipped']} skipped in all; it read the examples from "
            f"{values['train/first_example']} on, as maxmars.data.examples gives them."
        )
        if consecutive_skips <= run.config.guard.max_consecutive_skips:
            run.progress.message(text)
            return
        run.writer.write(step, values)
        last = run.checkpointer.latest_step()
        lower_rate = "a lower optimizer.learning_rate or more schedule.warmup_steps"
        stands, way_out = "There is no checkpoint yet", f"Start again with {lower_rate}"
        if last is not None:
            stands = f"The last checkpoint is of step {last}"
            way_out = f"Continue with {lower_rate} (name them in --resume-overrides)"
        if reason == NO_TARGETS:
            way_out = (
                "The `mask` of the data has to count a target in every step, or allow such steps "
                "by --guard.max-consecutive-skips 10"
            )
        elif all(digest_and_finite(run.state.params)[1].values()):
            way_out += ", or without such steps by --guard.max-consecutive-skips 10"
        elif step == 2 and run.config.schedule.warmup_steps:
            way_out = (
                "The parameters are not finite after step 1, whose rate is 0 where there is a "
                "warm-up: an optimizer that divides by the rate needs --schedule.warmup-steps 0"
            )
        else:
            way_out = (
                "The parameters are not finite since an earlier update, though its gradient was. "
                + way_out
            )
        raise DivergedError(
            text,
            f"That makes {consecutive_skips} in a row, more than guard.max_consecutive_skips "
            f"allows. {stands}. {way_out}.",
        )
