"""Which cells to run next: a scan of the rates with one seed, then more seeds around the best.

A pure function of the results so far, so that a comparison which is stopped continues by asking
again. Around the best rate means: the best one gets all seeds, and so does a neighbour in the grid
whose loss in the scan is within `_CLOSE` standard deviations (over the best one's seeds) of the
best: one seed cannot tell such rates apart. If a neighbour's mean then is the lower one, it is the
best, and its neighbours are looked at in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from maxmars.compare.cells import Cell, CellResult, Contender

Results = Mapping[Cell, CellResult]

_CLOSE = 2.0


def next_cells(
    contenders: Sequence[Contender], seeds: Sequence[int], results: Results
) -> list[Cell]:
    """The cells that are missing next, contenders in turns; none when the comparison is done.

    Args:
      contenders: what is compared.
      seeds: the first is that of the scan.
      results: of the finished cells.
    """
    scans = [
        [Cell(contender=c.name, learning_rate=rate, seed=seeds[0]) for rate in c.learning_rates]
        for c in contenders
    ]
    missing = _in_turns(scans, results)
    return missing or _in_turns([_around_best(c, seeds, results) for c in contenders], results)


def best_rate(contender: Contender, seeds: Sequence[int], results: Results) -> float | None:
    """The rate of the lowest mean loss among those with the most finished seeds.

    None where every rate diverged or none is finished.
    """
    means: dict[float, float] = {}
    most = 0
    for rate in contender.learning_rates:
        losses = losses_at(contender, rate, seeds, results)
        if not losses or not np.isfinite(losses).all():
            continue
        if len(losses) > most:
            means, most = {}, len(losses)
        if len(losses) == most:
            means[rate] = float(np.mean(losses))
    return min(means, key=lambda rate: means[rate], default=None)


def losses_at(
    contender: Contender, rate: float, seeds: Sequence[int], results: Results
) -> list[float]:
    """The final losses at a rate, as far as the cells are finished, in the order of the seeds."""
    cells = [Cell(contender=contender.name, learning_rate=rate, seed=seed) for seed in seeds]
    return [results[cell].loss for cell in cells if cell in results]


def neighbours(contender: Contender, rate: float) -> list[float]:
    """The rates beside one in the grid."""
    grid = contender.learning_rates
    index = grid.index(rate)
    return [*grid[max(0, index - 1) : index], *grid[index + 1 : index + 2]]


def _in_turns(lists: Sequence[Sequence[Cell]], results: Results) -> list[Cell]:
    """One cell of each list after the other, so that what the machine does meanwhile hits all."""
    rows = itertools.zip_longest(*lists)
    return [cell for row in rows for cell in row if cell is not None and cell not in results]


def _around_best(contender: Contender, seeds: Sequence[int], results: Results) -> list[Cell]:
    """The cells of more seeds that matter, once the scan is complete."""

    def cells(rate: float) -> list[Cell]:
        return [Cell(contender=contender.name, learning_rate=rate, seed=seed) for seed in seeds]

    losses = {r: losses_at(contender, r, seeds, results) for r in contender.learning_rates}
    alive = {rate: found for rate, found in losses.items() if np.isfinite(found).all()}
    if not alive:
        return []
    candidate = min(alive, key=lambda rate: alive[rate][0])
    if len(alive[candidate]) < len(seeds):
        return cells(candidate)
    best = best_rate(contender, seeds, results)
    assert best is not None, "the candidate has all its seeds"
    if len(seeds) < 2:
        return []
    limit = alive[best][0] + _CLOSE * float(np.std(alive[best], ddof=1))
    close = [n for n in neighbours(contender, best) if n in alive and alive[n][0] <= limit]
    return [cell for rate in close for cell in cells(rate)]
