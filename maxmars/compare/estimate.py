"""How many cells a comparison takes, and how long: a few steps of each contender are timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from maxmars.compare.cells import Comparison, Contender, check_comparable, read_results
from maxmars.compare.grids import Grid
from maxmars.compare.run import keep_programs
from maxmars.compare.search import Search
from maxmars.compare.tables import fold, print_table
from maxmars.config import TrainConfig
from maxmars.config.numbers import duration
from maxmars.data.batches import TrainBatches, open_data
from maxmars.distributed import sharding
from maxmars.model.parameters import Parameters
from maxmars.train.auto import prepare
from maxmars.train.step import init_train_state

_NUM_TIMED = 8
_START_S = 4.0  # of a cell: opening it, tracing, loading programs; measured on two CPU cores


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is left of a contender."""

    contender: Contender
    num_cells: int
    """At most, see `Search.most_cells_left`."""
    cell_s: float
    """Time of a cell."""
    compile_s: float
    """Time in which what the first cell needs is compiled."""
    step_s: float | None
    """Time of a step; None where finished cells say the time of a cell."""

    @property
    def seconds(self) -> float:
        """Time of all its cells, at most."""
        return self.compile_s + self.num_cells * self.cell_s if self.num_cells else 0.0


def estimate(comparison: Comparison, workdir: Path) -> list[Estimate]:
    """What is left of each contender in `workdir`, which is read and not written.

    The time of a contender's cells is the mean of its finished ones. Of one without, steps are
    made; a token that is evaluated is taken for a third of one that is trained on.

    Raises:
      ValueError: the contenders are not comparable or do not fit the mesh and the data.
      FileNotFoundError: there is no data, or a Python file that a config names is gone.
    """
    check_comparable(comparison.contenders)
    keep_programs(workdir)  # what is compiled here is not compiled again
    results = read_results(comparison, workdir)
    estimates = []
    for contender in comparison.contenders:
        own = [r.seconds for cell, r in results.items() if cell.contender == contender.name]
        num_cells = Search(contender, comparison, results).most_cells_left
        compile_s, step_s = (0.0, None) if own or not num_cells else _timed(contender.config)
        estimates.append(
            Estimate(
                contender=contender,
                num_cells=num_cells,
                cell_s=float(np.mean(own or [_cell_s(contender.config, step_s or 0.0)])),
                compile_s=compile_s,
                step_s=step_s,
            )
        )
    return estimates


def _timed(config: TrainConfig) -> tuple[float, float]:
    """The time until the first step is made, and that of a later one."""
    began = time.monotonic()
    mesh = sharding.training_mesh(config)
    tokens = open_data(config.data, "train", model=config.model)
    parameters = Parameters(config.model, mesh)
    train_step = prepare(config, parameters, tokens.types)
    config = train_step.config
    batches = TrainBatches(tokens, config, mesh, prefetch_steps=0)
    state, ends = init_train_state(config, parameters), []
    for _ in range(1 + _NUM_TIMED):
        state, metrics = train_step(state, next(batches))
        jax.block_until_ready(metrics)
        ends.append(time.monotonic())
    batches.close()
    return ends[0] - began, float(np.median(np.diff(ends)))


def _cell_s(config: TrainConfig, step_s: float) -> float:
    every = config.eval.every
    assert every is not None, "every run evaluates"
    num_evaluations = 1 + -(-config.num_steps // every)
    scored = config.eval.num_windows * config.model.max_seq_len / config.tokens_per_step
    return _START_S + step_s * (config.num_steps + num_evaluations * scored / 3)


def print_estimate(estimates: list[Estimate], comparison: Comparison, num_processes: int) -> None:
    """Print the cells and times in 80 columns."""
    rows = [
        (
            ", ".join([each.contender.name, *map(_begin, each.contender.grids)]),
            f"{each.num_cells}",
            "" if each.step_s is None else f"{1e3 * each.step_s:.1f}",
            duration(each.cell_s),
            duration(each.seconds),
        )
        for each in estimates
    ]
    print_table(("begins with", "cells", "ms", "a cell", "in all"), rows)
    num_cells = sum(each.num_cells for each in estimates)
    seconds = sum(each.seconds for each in estimates) / num_processes
    print(
        fold(
            f"At most {num_cells} cells in about {duration(seconds)}: each contender is tuned with "
            f"at most {comparison.budget}, and its {comparison.finalists} best settings run with "
            f"{len(comparison.seeds)} seeds. ms: of a step."
        )
    )


def _begin(grid: Grid) -> str:
    return " ".join([grid.field, *(f"{value:g}" for value in grid.scanned)])
