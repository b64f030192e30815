"""What the cells of a comparison say, read from its workdir; needs no JAX."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from maxmars.compare.cells import Cell, CellResult, Contender, finished
from maxmars.compare.record import Comparison, read_record
from maxmars.compare.search import Results, best_rate, losses_at, next_cells
from maxmars.compare.statistics import (
    Basin,
    Interval,
    PairedTest,
    basin,
    first_crossing,
    holm,
    mean_interval,
    paired_test,
)
from maxmars.report.curves import Line
from maxmars.report.figures import RatePoint

TOLERANCE = 0.05
"""Nats above the best loss at which a learning rate still counts as good."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a comparison found of one contender."""

    contender: Contender
    rates: tuple[RatePoint, ...]
    best_rate: float | None
    """None where all diverged, and then all that follows from it is None too."""
    loss: Interval | None
    """Final validation loss at the best rate, over seeds."""
    edge: Literal["low", "high"] | None
    """The end of the grid at which the best rate lies."""
    next_rate: float | None
    """The rate by which to extend the grid there."""
    basin: Basin | None
    """Rates within `TOLERANCE` of the best one, by the means over the seeds that each has."""
    line: Line | None
    """The curves at the best rate."""
    test: PairedTest | None
    """Against the baseline, seed by seed, each at its best rate; None of the baseline itself."""
    p_adjusted: float | None
    """P of the test, adjusted for the number of contenders (Holm)."""
    tokens_to_baseline: float | None
    """Tokens after which the mean curve comes down to the baseline's final loss; None if never."""
    seconds_to_baseline: float | None
    """Time of the steps to there."""
    step_time_s: float | None
    """Median over its cells."""
    num_cells: int
    num_diverged: int
    programs: dict[str, Any]
    """See `programs.describe`; with the timing of both ways."""

    @property
    def missing_rates(self) -> int:
        """Rates of the grid without a finished cell."""
        return sum(not rate.losses for rate in self.rates)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a comparison found."""

    comparison: Comparison
    outcomes: tuple[Outcome, ...]
    num_missing: int
    """Cells that are known to be missing."""
    environment: dict[str, Any]
    """Versions and devices, of the first cell."""

    @property
    def baseline(self) -> Outcome:
        """The outcome of the baseline."""
        return next(o for o in self.outcomes if o.contender.name == self.comparison.baseline)


def summarize(workdir: Path) -> Summary:
    """Read a comparison, finished or not.

    Raises:
      FileNotFoundError: the workdir holds none.
      ValueError: no cell is finished yet.
    """
    comparison = read_record(workdir)
    results = {
        result.cell: result
        for contender in comparison.contenders
        for result in finished(workdir, contender.name)
        if result.cell.seed in comparison.seeds
    }
    if not results:
        raise ValueError(f"no cell of {workdir} is finished yet; start its comparison again.")
    baseline = next(c for c in comparison.contenders if c.name == comparison.baseline)
    rate = best_rate(baseline, comparison.seeds, results)
    target = None
    if rate is not None:
        target = float(np.mean(losses_at(baseline, rate, comparison.seeds, results)))
    outcomes = [_outcome(c, comparison, results, target, workdir) for c in comparison.contenders]
    first = next(iter(results)).directory(workdir) / "environment.json"
    return Summary(
        comparison=comparison,
        outcomes=_with_adjusted(outcomes),
        num_missing=len(next_cells(comparison.contenders, comparison.seeds, results)),
        environment=json.loads(first.read_text()) if first.is_file() else {},
    )


def _outcome(
    contender: Contender,
    comparison: Comparison,
    results: Results,
    target: float | None,
    workdir: Path,
) -> Outcome:
    seeds = comparison.seeds
    mine = [result for cell, result in results.items() if cell.contender == contender.name]
    rates = tuple(
        RatePoint(learning_rate=r, losses=tuple(losses_at(contender, r, seeds, results)))
        for r in contender.learning_rates
    )
    best = best_rate(contender, seeds, results)
    at_best = [] if best is None else _cells_at(contender, best, seeds, results)
    times = [r.step_time_s for r in mine if r.step_time_s is not None]
    step_time_s = float(np.median(times)) if times else None
    line = None
    if at_best:
        curves = tuple(
            dataclasses.replace(result.curve(workdir), step_time_s=step_time_s)
            for result in at_best
        )
        line = Line(name=contender.name, curves=curves)
    tokens = None if line is None or target is None else tokens_to(line, target)
    per_step = contender.config.tokens_per_step
    edge = None if best is None else _edge(contender, best)
    path = workdir / "cells" / contender.name / "programs.json"
    return Outcome(
        contender=contender,
        rates=rates,
        best_rate=best,
        loss=mean_interval([r.loss for r in at_best]) if at_best else None,
        edge=edge,
        next_rate=None if edge is None else _next_rate(contender, edge),
        basin=_basin(rates),
        line=line,
        test=_test(contender, best, comparison, results),
        p_adjusted=None,
        tokens_to_baseline=tokens,
        seconds_to_baseline=None
        if tokens is None or step_time_s is None
        else tokens / per_step * step_time_s,
        step_time_s=step_time_s,
        num_cells=len(mine),
        num_diverged=sum(r.diverged is not None for r in mine),
        programs=json.loads(path.read_text()) if path.is_file() else {},
    )


def _cells_at(
    contender: Contender, rate: float, seeds: Sequence[int], results: Results
) -> list[CellResult]:
    cells = [Cell(contender=contender.name, learning_rate=rate, seed=seed) for seed in seeds]
    return [results[cell] for cell in cells if cell in results]


def tokens_to(line: Line, target: float) -> float | None:
    """Tokens after which the mean of a line's curves comes down to a loss; None if never."""
    tokens, losses = line.points
    positions = tokens.astype(float).tolist()
    return first_crossing(positions, losses.mean(axis=0).tolist(), target)


def _edge(contender: Contender, best: float) -> Literal["low", "high"] | None:
    grid = contender.learning_rates
    if best == grid[-1]:
        return "high"
    return "low" if best == grid[0] else None


def _next_rate(contender: Contender, edge: Literal["low", "high"]) -> float:
    """The next rate of the grid beyond its edge, rounded; of a single rate, the double."""
    grid = contender.learning_rates
    if len(grid) == 1:
        return 2 * grid[0]
    ends = (grid[0], grid[1]) if edge == "low" else (grid[-1], grid[-2])
    return float(f"{ends[0] ** 2 / ends[1]:.3g}")


def _basin(rates: Sequence[RatePoint]) -> Basin | None:
    scanned = [rate for rate in rates if rate.losses]
    losses = [float(np.mean(rate.losses)) for rate in scanned]
    return basin([rate.learning_rate for rate in scanned], losses, TOLERANCE) if scanned else None


def _test(
    contender: Contender, best: float | None, comparison: Comparison, results: Results
) -> PairedTest | None:
    if contender.name == comparison.baseline or best is None:
        return None
    baseline = next(c for c in comparison.contenders if c.name == comparison.baseline)
    other = best_rate(baseline, comparison.seeds, results)
    if other is None:
        return None
    ours = {r.cell.seed: r.loss for r in _cells_at(contender, best, comparison.seeds, results)}
    theirs = {r.cell.seed: r.loss for r in _cells_at(baseline, other, comparison.seeds, results)}
    shared = [seed for seed in comparison.seeds if seed in ours and seed in theirs]
    return paired_test([ours[s] for s in shared], [theirs[s] for s in shared])


def _with_adjusted(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    tested = [o for o in outcomes if o.test is not None]
    adjusted = holm([o.test.p for o in tested if o.test is not None])
    found = {o.contender.name: p for o, p in zip(tested, adjusted, strict=True)}
    return tuple(dataclasses.replace(o, p_adjusted=found.get(o.contender.name)) for o in outcomes)
