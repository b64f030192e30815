"""What the steps report: metrics, one step late, and an error after too many skipped ones."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from maxmars.config import TrainConfig
from maxmars.metrics import MetricsWriter, ProgressLine, flops_per_token, peak_flops
from maxmars.model import num_parameters


class StepReporter:
    """Metrics of step t − 1 are fetched after step t was dispatched: the device never waits."""

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        writer: MetricsWriter,
        progress: ProgressLine,
        last_checkpoint: Callable[[], int | None],
    ) -> None:
        """Report to a writer and a progress line, from the first step of this process on.

        Args:
          config: of the run.
          mesh: its devices.
          writer: of metrics.jsonl.
          progress: what the user sees.
          last_checkpoint: step of the newest checkpoint, for the error of a run that stops.
        """
        self._config = config
        self._writer = writer
        self._progress = progress
        self._last_checkpoint = last_checkpoint
        self._pending: tuple[int, Any] | None = None
        self._flops = flops_per_token(num_parameters(config.model), config.model)
        peak = peak_flops(mesh.devices.flat[0].device_kind)
        self._peak = None if peak is None else peak * mesh.size
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
        skipped = values.pop("train/skipped_in_a_row")
        if skipped:
            self._skipped(step, values, skipped)
        elif step > 1 and step % self._config.log.every and step != self._config.num_steps:
            return
        values |= self._rates()
        self._writer.write(step, values)
        self._progress.update(step, values)

    def _rates(self) -> dict[str, float]:
        if self._since is None or self._steps < 1:
            return {}
        now = time.monotonic()
        seconds = (now - self._since - self._paused) / self._steps
        waited = self._waited / self._steps
        self._since, self._steps, self._paused, self._waited = now, 0, 0.0, 0.0
        tokens_per_sec = self._config.tokens_per_step / seconds
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
        if in_a_row <= self._config.guard.max_skipped_in_a_row:
            total = values["train/skipped"]
            self._progress.message(f"{found} ({total} skipped in all).")
            return
        self._writer.write(step, values)
        last = self._last_checkpoint()
        raise ValueError(
            f"{found}. {in_a_row} steps in a row are more than guard.max_skipped_in_a_row allows. "
            f"The last checkpoint is {'missing' if last is None else f'of step {last}'}. "
            "Lower optimizer.learning_rate or raise schedule.warmup_steps."
        )
