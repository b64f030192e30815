"""Which cells to run next: first all rates with one seed, then more seeds around the best rate.

The choice depends on the results so far alone, so that a comparison that was stopped continues by
asking again. It goes in two stages:

1. The scan: every rate of every grid, with the first seed.
2. All seeds at the best rate, and at each neighbour of it in the grid whose loss in the scan is
   within `_CLOSE` standard deviations of the best (over the seeds at the best rate): one seed
   cannot tell such rates apart. Where a neighbour's mean then is lower, it becomes the best rate,
   and its neighbours are looked at in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from maxmars.compare.cells import Cell, CellResult, Contender

Results = Mapping[Cell, CellResult]

_CLOSE = 2.0


def next_cells(
    contenders: Sequence[Contender], seeds: Sequence[int], results: Results
) -> list[Cell]:
    """The cells to run next, contenders in turns; none when the comparison is complete.

    Args:
      contenders: what is compared.
      seeds: the first scans the grids.
      results: of the finished cells.
    """

    def missing(cells: Sequence[Sequence[Cell]]) -> list[Cell]:
        # In turns, so that changes of the machine's speed over the hours affect all alike.
        rows = itertools.zip_longest(*cells)
        return [cell for row in rows for cell in row if cell is not None and cell not in results]

    scans = [_cells(c, c.learning_rates, seeds[:1]) for c in contenders]
    return missing(scans) or missing([_around_best(c, seeds, results) for c in contenders])


def best_rate(contender: Contender, seeds: Sequence[int], results: Results) -> float | None:
    """The rate with the lowest mean loss among the rates with the most finished seeds.

    None where every rate diverged or none is finished.
    """
    sound = _sound(contender, seeds, results)
    most = max(map(len, sound.values()), default=0)
    means = {rate: np.mean(found) for rate, found in sound.items() if len(found) == most}
    return min(means, key=lambda rate: means[rate], default=None)


def results_at(
    contender: Contender, rate: float, seeds: Sequence[int], results: Results
) -> list[CellResult]:
    """The results of the finished cells at a rate, in the order of the seeds."""
    return [results[cell] for cell in _cells(contender, [rate], seeds) if cell in results]


def losses_at(
    contender: Contender, rate: float, seeds: Sequence[int], results: Results
) -> list[float]:
    """The final losses of the finished cells at a rate, in the order of the seeds."""
    return [result.loss for result in results_at(contender, rate, seeds, results)]


def edge_of_grid(contender: Contender, rate: float) -> tuple[Literal["low", "high"], float] | None:
    """The end of the grid at which a rate lies, and the rate by which to extend the grid there.

    None for a rate inside the grid. A grid of one rate is to be extended by its double.
    """
    grid = contender.learning_rates
    if len(grid) == 1:
        return "high", 2 * rate
    if rate == grid[-1]:
        return "high", float(f"{rate**2 / grid[-2]:.3g}")
    return ("low", float(f"{rate**2 / grid[1]:.3g}")) if rate == grid[0] else None


def _cells(contender: Contender, rates: Sequence[float], seeds: Sequence[int]) -> list[Cell]:
    return [
        Cell(contender=contender.name, learning_rate=rate, seed=seed)
        for rate in rates
        for seed in seeds
    ]


def _sound(
    contender: Contender, seeds: Sequence[int], results: Results
) -> dict[float, list[float]]:
    """Losses at each rate that has some and never diverged."""
    losses = {r: losses_at(contender, r, seeds, results) for r in contender.learning_rates}
    return {rate: found for rate, found in losses.items() if found and np.isfinite(found).all()}


def _around_best(contender: Contender, seeds: Sequence[int], results: Results) -> list[Cell]:
    """The cells of the second stage that follow from the results so far, finished ones included."""
    sound = _sound(contender, seeds, results)
    if not sound:
        return []
    scanned = min(sound, key=lambda rate: sound[rate][0])
    if len(sound[scanned]) < len(seeds):
        return _cells(contender, [scanned], seeds)
    if len(seeds) < 2:
        return []
    best = best_rate(contender, seeds, results)
    assert best is not None, "the best rate of the scan has all its seeds"
    limit = sound[best][0] + _CLOSE * float(np.std(sound[best], ddof=1))
    grid = contender.learning_rates
    index = grid.index(best)
    neighbours = [*grid[max(0, index - 1) : index], *grid[index + 1 : index + 2]]
    close = [rate for rate in neighbours if rate in sound and sound[rate][0] <= limit]
    return _cells(contender, close, seeds)
