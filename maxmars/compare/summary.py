"""What a comparison found, read from its directory, also before it is complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from maxmars.compare.cells import (
    CellResult,
    Comparison,
    Contender,
    read_comparison,
    read_results,
)
from maxmars.compare.curves import Line, read_curve
from maxmars.compare.search import (
    Results,
    best_rate,
    edge_of_grid,
    losses_at,
    next_cells,
    results_at,
)
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
from maxmars.distributed.files import read_json

TOLERANCE = 0.05
"""Nats above the best loss at which a learning rate still counts as good."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """A contender at its best learning rate."""

    best_rate: float
    best_rate_at_edge: Literal["low", "high"] | None
    """The end of the grid at which the rate lies; None inside the grid."""
    next_rate: float | None
    """The rate by which to extend the grid at that end."""
    loss: Interval
    """Final validation loss over the seeds."""
    test: PairedTest | None
    """Against the baseline at its best rate, paired by seed; None for the baseline itself."""
    tokens_to_baseline: float | None
    """Tokens after which the mean curve comes down to the baseline's final loss; None if never."""
    seconds_to_baseline: float | None
    """Time of the steps on these tokens."""
    line: Line
    """Curves of the seeds."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a comparison found of one contender."""

    contender: Contender
    losses: dict[float, list[float]]
    """Learning rate of the grid -> final losses by seed; infinite where a run diverged."""
    best: Best | None
    """None where every rate diverged, or none is finished."""
    basin: Basin | None
    """Rates within `TOLERANCE` of the best loss, by the means over the seeds that each rate has."""
    step_time_s: float | None
    """Median over the contender's cells."""
    num_cells: int
    num_diverged: int
    cost: dict[str, Any]
    """See `run.step_cost`; empty before the contender's first cell."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a comparison found."""

    comparison: Comparison
    outcomes: tuple[Outcome, ...]
    num_missing: int
    """Cells that are known to be missing; more may follow from their losses."""
    digests: dict[int, tuple[str, str]]
    """Seed -> digests of the initial weights and the tokens that all its cells share."""
    p_adjusted: dict[str, float]
    """Contender -> p of its test, adjusted for the number of tests by Holm's method."""
    environment: dict[str, Any]
    """Versions and devices of the first cell."""


def summarize(workdir: Path) -> Summary:
    """Read a comparison, complete or not.

    Raises:
      ValueError: `workdir` holds no comparison, or none of its cells is finished yet.
    """
    comparison = read_comparison(workdir)
    results = read_results(comparison, workdir)
    if not results:
        raise ValueError(f"no cell of {workdir} is finished yet; start its comparison again.")
    seeds = comparison.seeds
    baseline = next(c for c in comparison.contenders if c.name == comparison.baseline)
    rate = best_rate(baseline, seeds, results)
    baselines = [] if rate is None else results_at(baseline, rate, seeds, results)
    outcomes = []
    for contender in comparison.contenders:
        own = [result for cell, result in results.items() if cell.contender == contender.name]
        times = [r.step_time_s for r in own if r.step_time_s is not None]
        step_time_s = float(np.median(times)) if times else None
        losses = {r: losses_at(contender, r, seeds, results) for r in contender.learning_rates}
        means = {r: float(np.mean(found)) for r, found in losses.items() if found}
        outcomes.append(
            Outcome(
                contender=contender,
                losses=losses,
                best=_best(contender, seeds, results, baselines, step_time_s, workdir),
                basin=basin(list(means), list(means.values()), TOLERANCE),
                step_time_s=step_time_s,
                num_cells=len(own),
                num_diverged=sum(r.diverged is not None for r in own),
                cost=read_json(workdir / "cells" / contender.name / "cost.json") or {},
            )
        )
    p = {o.contender.name: o.best.test.p for o in outcomes if o.best and o.best.test}
    environment = read_json(next(iter(results)).directory(workdir) / "environment.json")
    return Summary(
        comparison=comparison,
        outcomes=tuple(outcomes),
        num_missing=len(next_cells(comparison.contenders, seeds, results)),
        digests={r.cell.seed: (r.initial_weights, r.tokens) for r in results.values()},
        p_adjusted=dict(zip(p, holm(list(p.values())), strict=True)),
        environment=environment or {},
    )


def _best(
    contender: Contender,
    seeds: Sequence[int],
    results: Results,
    baselines: Sequence[CellResult],
    step_time_s: float | None,
    workdir: Path,
) -> Best | None:
    rate = best_rate(contender, seeds, results)
    if rate is None:
        return None
    edge, next_rate = edge_of_grid(contender, rate) or (None, None)
    ours = results_at(contender, rate, seeds, results)
    curves = [read_curve(r.cell.directory(workdir), contender.config) for r in ours]
    # One step time for all seeds, so that their curves have the same times as well.
    curves = [dataclasses.replace(curve, step_time_s=step_time_s) for curve in curves]
    line = Line(name=contender.name, curves=tuple(curves))
    tokens = seconds = test = None
    if baselines:
        positions, losses = line.points
        target = float(np.mean([r.loss for r in baselines]))
        tokens = first_crossing(positions.tolist(), losses.mean(axis=0).tolist(), target)
        if tokens is not None and step_time_s is not None:
            seconds = tokens / contender.config.tokens_per_step * step_time_s
        if contender.name != baselines[0].cell.contender:
            theirs = {r.cell.seed: r.loss for r in baselines}
            pairs = [(r.loss, theirs[r.cell.seed]) for r in ours if r.cell.seed in theirs]
            test = paired_test([a for a, _ in pairs], [b for _, b in pairs])
    return Best(
        best_rate=rate,
        best_rate_at_edge=edge,
        next_rate=next_rate,
        loss=mean_interval([r.loss for r in ours]),
        test=test,
        tokens_to_baseline=tokens,
        seconds_to_baseline=seconds,
        line=line,
    )
