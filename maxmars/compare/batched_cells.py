"""Cells that differ in nothing but the learning rate, as one program by `jax.vmap`.

They read the same tokens. A small model leaves most of an accelerator idle, so that several fit in
the time of one; on a CPU one by one is as a rule the faster way. `time_both_ways` finds out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxmars.compare.cells import Cell, CellResult
from maxmars.compare.one_cell import Session, make_result, open_cell
from maxmars.compare.programs import Programs
from maxmars.config import TrainConfig
from maxmars.data.pipeline import TrainBatches
from maxmars.run import Run
from maxmars.step_reporter import DivergedError, StepReporter
from maxmars.train import evaluate
from maxmars.train_step import TrainStep

_TIMED_S = 4.0
_ROUNDS = (5, 30)

Step = Callable[[Any, jax.Array], tuple[Any, dict[str, jax.Array]]]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Steps of a contender one by one and several together, each compiled before."""

    num_cells: int
    single_s: float
    """Median time of a step of one cell."""
    batched_s: float | None
    """Median time of a step of all together; None if they do not fit on the device."""

    @property
    def ratio(self) -> float:
        """Cells an hour together over those one by one."""
        return 0.0 if self.batched_s is None else self.num_cells * self.single_s / self.batched_s

    def text(self, num_steps: int) -> str:
        """For people: both rates for runs of so many steps, evaluations aside."""
        single = 3600 / (num_steps * self.single_s)
        if self.batched_s is None:
            return f"{single:.1f} cells/hour one by one; {self.num_cells} together do not fit"
        together = self.num_cells * 3600 / (num_steps * self.batched_s)
        return (
            f"{single:.1f} cells/hour one by one, {together:.1f} by {self.num_cells} together "
            f"(ratio {self.ratio:.2f})"
        )


def make_batched_step(step: TrainStep) -> Step:
    """The train step of several states stacked on a first axis, on the same tokens."""
    batched = jax.jit(jax.vmap(step.jitted, in_axes=(0, None)), donate_argnums=0)

    def call(states: Any, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        with jax.set_mesh(step.mesh):
            return batched(states, tokens)

    return call


def time_both_ways(
    configs: Sequence[TrainConfig], programs: Programs, step: Step, session: Session
) -> Timing:
    """Time the steps of these cells one by one and together; compiles both."""
    batches = TrainBatches(programs.tokens, configs[0], programs.mesh, prefetch_steps=0)
    tokens = next(batches)
    batches.close()
    states = [programs.initial_state(config) for config in configs]
    single = _Timed(programs.train_step, states[0], tokens)
    together = _Timed(step, _stack(states), tokens)
    fits = True
    with session.watchdog.watching("timing steps of one cell and of cells together"):
        single.warm_up()
        try:
            together.warm_up()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            fits = False
        began, (least, most) = time.monotonic(), _ROUNDS
        # In turns, so that what else the machine does hits both alike.
        for number in range(most):
            for _ in configs:
                single.time()
            if fits:
                together.time()
            if number + 1 >= least and time.monotonic() - began > _TIMED_S:
                break
    return Timing(
        num_cells=len(configs),
        single_s=single.median_s,
        batched_s=together.median_s if fits else None,
    )


class _Timed:
    """A step that is timed again and again."""

    def __init__(self, step: Step, state: Any, tokens: jax.Array) -> None:
        self._step, self._state, self._tokens = step, state, tokens
        self._times: list[float] = []

    def warm_up(self) -> None:
        """Two steps, the first of which compiles."""
        self.time()
        self.time()
        self._times.clear()

    def time(self) -> None:
        """One step."""
        began = time.monotonic()
        self._state, metrics = self._step(self._state, self._tokens)
        jax.block_until_ready((self._state, metrics))
        self._times.append(time.monotonic() - began)

    @property
    def median_s(self) -> float:
        """Median of the times."""
        return float(np.median(self._times))


def run_cells_together(
    cells: Sequence[Cell],
    configs: Sequence[TrainConfig],
    programs: Programs,
    step: Step,
    single_s: float,
    session: Session,
) -> list[CellResult] | None:
    """Run cells that differ in the learning rate alone, from their beginning.

    Args:
      cells: which.
      configs: theirs.
      programs: theirs.
      step: from `make_batched_step`.
      single_s: time of a step of one cell alone, which the results report.
      session: of the comparison.

    Returns:
      Their results; None if they were asked to stop before the end.
    """
    started = time.monotonic()
    problems: dict[int, str] = {}
    with contextlib.ExitStack() as stack:
        batches = TrainBatches(programs.tokens, configs[0], programs.mesh)
        stack.callback(batches.close)
        states = [programs.initial_state(config) for config in configs]
        runs = [
            open_cell(cell, config, session, programs, state, batches, stack)
            for cell, config, state in zip(cells, configs, states, strict=True)
        ]
        if not _take_steps(runs, step, _stack(states), session, problems):
            return None
    seconds = (time.monotonic() - started) / len(cells)
    return [
        make_result(
            cell,
            config,
            session,
            problem=problems.get(index),
            seconds=seconds,
            batch_size=len(cells),
            step_time_s=single_s,
        )
        for index, (cell, config) in enumerate(zip(cells, configs, strict=True))
    ]


def _take_steps(
    runs: Sequence[Run], step: Step, states: Any, session: Session, problems: dict[int, str]
) -> bool:
    """All steps of all runs, or False; those that diverge go on unseen, and `problems` says why."""
    config, batches = runs[0].config, runs[0].batches
    reporters = [StepReporter(run, time.monotonic()) for run in runs]
    _evaluate(runs, states, problems)
    pending: tuple[int, Any] | None = None
    for number in range(1, config.num_steps + 1):
        session.watchdog.begin(f"step {number} of {len(runs)} cells together", "batched step")
        states, metrics = step(states, next(batches))
        for run in runs:
            run.step = number
        _report(reporters, pending, problems)
        pending = (number, metrics)
        if number == config.num_steps or len(problems) == len(runs):
            break
        if session.stops.due(number):
            session.watchdog.rest()
            return False
        if config.eval.every is not None and number % config.eval.every == 0:
            _report(reporters, pending, problems, flush=True)
            pending = None
            session.watchdog.rest()
            with contextlib.ExitStack() as stack:
                for reporter in reporters:
                    stack.enter_context(reporter.paused())
                _evaluate(runs, states, problems)
    _report(reporters, pending, problems, flush=True)
    session.watchdog.rest()
    _evaluate(runs, states, problems)
    return True


def _report(
    reporters: Sequence[StepReporter],
    pending: tuple[int, Any] | None,
    problems: dict[int, str],
    *,
    flush: bool = False,
) -> None:
    """Hand each run its share of the metrics of a step, which is over by now."""
    if pending is None:
        return
    number, metrics = pending[0], jax.device_get(pending[1])
    for index, reporter in enumerate(reporters):
        if index in problems:
            continue
        try:
            reporter.add(
                number, {name: np.asarray(value[index]) for name, value in metrics.items()}
            )
            if flush:
                reporter.flush()
        except DivergedError as error:
            problems[index] = str(error).partition(" That makes ")[0]


def _evaluate(runs: Sequence[Run], states: Any, problems: dict[int, str]) -> None:
    for index, run in enumerate(runs):
        if index not in problems:
            run.state = jax.tree.map(lambda leaf, i=index: leaf[i], states)
            evaluate(run)


def _stack(states: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
