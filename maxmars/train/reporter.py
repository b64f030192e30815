"""Reports of training steps: metrics, one step late, and skipped steps.

The metrics of step t - 1 are fetched after step t was dispatched, so that the device never waits. A
step that is not due for a line of metrics costs the loop one number from the device: whether the
step was skipped. Rates count the time in steps and in waits for data since the last line, without
evaluations and checkpoints.
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
        """`reason` names the skipped step and the cause, `advice` a way to continue the run."""
        super().__init__(f"{reason} {advice}")
        self.reason = reason


class StepReporter:
    """Takes the metrics of each step, and writes lines that are due to the run's sinks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pending: tuple[int, Any] | None = None
        self._flops = run.train_step.parameters.flops_per_token
        mesh = run.train_step.mesh
        peak = peak_flops(mesh.devices.flat[0].device_kind)
        self._peak = None if peak is None else peak * mesh.size
        self.is_skipping = False
        """Whether the last reported step was skipped."""
        self._seconds: dict[str, float] | None = None  # by activity, at the last line
        self._num_steps = -1  # since the last line; the first step, which compiles, has no rate
        self._clipped: list[Any] = []  # `train/grad_clipped` since the last line, on the device
        self._rate_scales = learning_rate_scales(run.config.optimizer, run.train_step.parameters)

    def add(self, step: int, metrics: Any) -> None:
        """Report the step before, and hold the metrics of this one back."""
        self.flush()
        self._pending = (step, metrics)
        if self._seconds is None:
            jax.block_until_ready(metrics)
            self._seconds = self._run.clock.seconds
            seconds = sum(self._seconds.values()) - self._seconds.get("evaluation", 0.0)
            self._run.sinks.write(step, {"perf/time_to_first_step": seconds})

    def flush(self) -> None:
        """Report the step whose metrics are held back, if any."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        run, num_steps = self._run, self._run.config.num_steps
        metrics = dict(metrics)
        if "train/grad_clipped" in metrics:
            self._clipped.append(metrics.pop("train/grad_clipped"))
        # `item` waits until the device has finished this step; the next one is running already.
        consecutive_skips = metrics.pop("train/consecutive_skips").item()
        reason = metrics.pop("train/skip_reason")
        self.is_skipping = consecutive_skips > 0
        self._num_steps += 1
        due = step == 1 or step % run.config.log.every == 0 or step == num_steps
        if not due and not consecutive_skips:
            return
        values = self._numbers(metrics) | self._examples(step)
        if consecutive_skips:
            self._report_skip(step, values, consecutive_skips, reason.item())
        values |= self._rates(step)
        run.sinks.write(step, values)

    def _numbers(self, metrics: dict[str, Any]) -> dict[str, float]:
        """The metrics of a step as numbers, with those derived from them."""
        fetched = jax.device_get(metrics)
        norms = named_norms(fetched, self._run.train_step.parameters)
        values = norms | {name: value.item() for name, value in fetched.items() if not value.ndim}
        for component, scale in self._rate_scales.items():
            values[f"train/learning_rate/{component}"] = scale * values["train/learning_rate"]
        if self._clipped:
            values["train/grad_clip_fraction"] = float(np.mean(jax.device_get(self._clipped)))
            self._clipped.clear()
        return values

    def _examples(self, step: int) -> dict[str, int]:
        """The examples that a step read, as `maxmars.data.examples` numbers them."""
        batch_size = self._run.config.global_batch_size
        num_batches = self._run.step - step + 1  # of this step and the later ones
        first = self._run.batches.position - num_batches * batch_size
        return {"train/first_example": first, "train/num_examples": batch_size}

    def _rates(self, step: int) -> dict[str, float]:
        """Rates over the steps since the last line; empty if there are none."""
        if self._seconds is None or self._num_steps < 1:
            return {}
        now = self._run.clock.seconds
        data_wait_s, compute_s = (
            (now.get(name, 0.0) - self._seconds.get(name, 0.0)) / self._num_steps
            for name in ("data_wait", "steps")
        )
        step_s = compute_s + data_wait_s
        tokens_per_sec = self._run.config.tokens_per_step / step_s
        rates = {
            "perf/tokens_per_sec": tokens_per_sec,
            "perf/step_time": step_s,
            "perf/data_wait": data_wait_s,
            "perf/goodput": shares(run_seconds(self._run.journal.sessions(step)))["steps"],
        }
        if self._peak is not None:
            rates["perf/mfu"] = tokens_per_sec * self._flops / self._peak
        self._seconds, self._num_steps = now, 0
        return rates

    def _report_skip(
        self, step: int, values: dict[str, float], consecutive_skips: int, reason: int
    ) -> None:
        """Print a skipped step, or end the run.

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
        run.sinks.write(step, values)  # `flush` will not: the error ends it
        latest = run.checkpointer.latest_step()
        lower_rate = "a lower optimizer.learning_rate or more schedule.warmup_steps"
        saved, way_out = "There is no checkpoint yet", f"Start again with {lower_rate}"
        if latest is not None:
            saved = f"The last checkpoint is of step {latest}"
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
            f"allows. {saved}. {way_out}.",
        )
