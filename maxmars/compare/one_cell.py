"""Running one cell, by the loop that `maxmars train` runs."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

from maxmars.compare.cell_progress import CellProgress
from maxmars.compare.cells import Cell, CellResult
from maxmars.compare.programs import Programs, ProgramStore
from maxmars.config import TrainConfig, to_dict
from maxmars.data.pipeline import TrainBatches
from maxmars.metrics import MetricsWriter, read_metrics, write_environment, write_json
from maxmars.preemption import StopRequests
from maxmars.program_cache import ProgramCache
from maxmars.report.curves import median_step_time, read_curve
from maxmars.run import Run, make_evaluate
from maxmars.step_reporter import DivergedError
from maxmars.train import take_steps
from maxmars.train_step import TrainState
from maxmars.watchdog import Watchdog

RISE = 0.5
"""A run diverged if its validation loss ends more than this many nats above its lowest value."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What the cells of one call of `compare` share."""

    workdir: Path
    programs: ProgramStore
    cache: ProgramCache
    watchdog: Watchdog
    stops: StopRequests
    progress: CellProgress


def run_cell(cell: Cell, config: TrainConfig, session: Session) -> CellResult | None:
    """Run a cell from its beginning; None if it was asked to stop before its end.

    Raises:
      ValueError, FileNotFoundError: mesh, data and model do not fit together.
    """
    started = time.monotonic()
    programs = session.programs.get(config)
    with contextlib.ExitStack() as stack:
        batches = TrainBatches(programs.tokens, config, programs.mesh)
        stack.callback(batches.close)
        state = programs.initial_state(config)
        run = open_cell(cell, config, session, programs, state, batches, stack)
        problem = None
        try:
            if not take_steps(run, session.stops, started):
                return None
        except DivergedError as error:
            problem = str(error).partition(" That makes ")[0]
    return make_result(
        cell, config, session, problem=problem, seconds=time.monotonic() - started, batch_size=1
    )


def open_cell(
    cell: Cell,
    config: TrainConfig,
    session: Session,
    programs: Programs,
    state: TrainState,
    batches: TrainBatches,
    stack: contextlib.ExitStack,
) -> Run:
    """A cell as a run at step 0, without checkpoints; what must be closed goes on `stack`."""
    directory = cell.directory(session.workdir)
    write_json(directory / "config.json", to_dict(config))
    write_environment(directory, programs.mesh)
    evaluate = make_evaluate(config, programs.eval_step, session.watchdog, lambda _: None)
    return Run(
        config=config,
        workdir=directory,
        mesh=programs.mesh,
        train_step=programs.train_step,
        batches=batches,
        evaluate=evaluate,
        hellaswag=None,
        checkpointer=None,
        programs=session.cache,
        watchdog=session.watchdog,
        writer=stack.enter_context(MetricsWriter(directory)),
        progress=session.progress,
        state=state,
        step=0,
    )


def make_result(
    cell: Cell,
    config: TrainConfig,
    session: Session,
    *,
    problem: str | None,
    seconds: float,
    batch_size: int,
    step_time_s: float | None = None,
) -> CellResult:
    """The result of a cell whose metrics are written.

    Args:
      cell: which.
      config: its config.
      session: of the comparison.
      problem: why it ended early, None if it did not.
      seconds: what it took.
      batch_size: cells that ran together.
      step_time_s: of a step of this cell alone; None takes it from the metrics.
    """
    directory = cell.directory(session.workdir)
    loss = math.inf
    if problem is None:
        curve = read_curve(directory, config)
        loss, lowest = curve.losses[-1], min(curve.losses)
        if not loss <= lowest + RISE:  # also where it is no number
            problem = f"the validation loss ended at {loss:.4g}, but had been {lowest:.4g}."
            loss = math.inf
    if step_time_s is None and batch_size == 1:
        step_time_s = median_step_time(read_metrics(directory))
    return CellResult(
        cell=cell,
        loss=loss,
        diverged=problem,
        step_time_s=step_time_s,
        seconds=seconds,
        batch_size=batch_size,
    )
