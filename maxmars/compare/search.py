"""Which cells to run next: the search for the best setting with one seed, then more seeds.

The choice depends on the results so far alone, so that a comparison that was stopped, or that
several processes share, continues by asking again. It goes in two stages:

1. Coordinate descent with the first seed, over at most `budget` settings of each contender: all
   scanned learning rates at the config's own other values; then one field after the other, each
   moved to its better neighbour in the grid as long as that lowers the loss; the round is repeated
   until it changes nothing. Then the learning rate is moved together with each other field, since
   the best rate depends on most of them, and a better setting begins the rounds anew.
2. All seeds at the `finalists` best settings: one seed cannot tell close ones apart. Their mean
   losses decide.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from maxmars.compare.cells import Cell, CellResult, Comparison, Contender, Setting, make_setting
from maxmars.compare.grids import LEARNING_RATE, Grid, Number

Results = Mapping[Cell, CellResult]

_Values = dict[str, Number]


@dataclass(frozen=True, kw_only=True)
class Search:
    """How far the search of a contender has come."""

    tried: tuple[Setting, ...]
    """The settings that it asked for so far, in this order; the last ones may be without result."""
    missing: tuple[Setting, ...]
    """Those without a result."""
    untried: tuple[Setting, ...]
    """Neighbours of the best setting for which the budget was too small."""


def next_cells(comparison: Comparison, results: Results) -> list[Cell]:
    """The cells to run next; none when the comparison is complete."""
    num_finished = Counter(cell.contender for cell in results)
    # In turns, so that changes of the machine's speed over the hours affect all alike.
    contenders = sorted(comparison.contenders, key=lambda c: num_finished[c.name])
    rows = itertools.zip_longest(*(_missing(c, comparison, results) for c in contenders))
    return [cell for row in rows for cell in row if cell is not None]


def search(contender: Contender, comparison: Comparison, results: Results) -> Search:
    """Replay the search of a contender on the results so far."""
    losses = {
        cell.setting: result.loss
        for cell, result in results.items()
        if cell.contender == contender.name and cell.seed == comparison.seeds[0]
    }
    tried: list[Setting] = []
    for wanted in _descend(contender, losses):
        new = [setting for setting in dict.fromkeys(wanted) if setting not in tried]
        affordable = new[: comparison.budget - len(tried)]
        tried += affordable
        missing = tuple(setting for setting in affordable if setting not in losses)
        if missing or affordable != new:
            untried = () if missing else tuple(new[len(affordable) :])
            return Search(tried=tuple(tried), missing=missing, untried=untried)
    return Search(tried=tuple(tried), missing=(), untried=())


def best_setting(contender: Contender, comparison: Comparison, results: Results) -> Setting | None:
    """The setting with the lowest mean loss among the finalists with the most finished seeds.

    None where every setting diverged or none is finished.
    """
    sound = {
        s: losses_at(contender, s, comparison, results)
        for s in _finalists(contender, comparison, results)
    }
    most = max(map(len, sound.values()), default=0)
    means = {setting: np.mean(found) for setting, found in sound.items() if len(found) == most}
    return min(means, key=lambda setting: means[setting], default=None)


def results_at(
    contender: Contender, setting: Setting, comparison: Comparison, results: Results
) -> list[CellResult]:
    """The results of the finished cells at a setting, in the order of the seeds."""
    cells = [
        Cell(contender=contender.name, setting=setting, seed=seed) for seed in comparison.seeds
    ]
    return [results[cell] for cell in cells if cell in results]


def losses_at(
    contender: Contender, setting: Setting, comparison: Comparison, results: Results
) -> list[float]:
    """The final losses of the finished cells at a setting, in the order of the seeds."""
    return [result.loss for result in results_at(contender, setting, comparison, results)]


def _missing(contender: Contender, comparison: Comparison, results: Results) -> list[Cell]:
    first, *others = comparison.seeds
    settings, seeds = search(contender, comparison, results).missing, [first]
    if not settings:
        settings, seeds = tuple(_finalists(contender, comparison, results)), others
    cells = [Cell(contender=contender.name, setting=s, seed=n) for s in settings for n in seeds]
    return [cell for cell in cells if cell not in results]


def _finalists(contender: Contender, comparison: Comparison, results: Results) -> list[Setting]:
    """The best settings of the first seed that diverged with no seed so far."""
    found = {
        setting: losses_at(contender, setting, comparison, results)
        for setting in search(contender, comparison, results).tried
    }
    sound = {s: losses for s, losses in found.items() if losses and np.isfinite(losses).all()}
    return sorted(sound, key=lambda setting: sound[setting][0])[: comparison.finalists]


def _descend(contender: Contender, losses: Mapping[Setting, float]) -> Iterator[list[Setting]]:
    """Coordinate descent: yields the settings whose losses it reads when it is asked to go on."""

    def setting(values: _Values) -> Setting:
        return make_setting(contender.config, values)

    def order(values: _Values) -> tuple[float, float]:
        # Of settings that diverge, the one with the lower rate is closer to one that does not.
        loss = losses[setting(values)]
        return loss, 0.0 if math.isfinite(loss) else dict(setting(values))[LEARNING_RATE]

    start = {grid.field: grid.scanned[0] for grid in contender.grids}
    scans = [grid for grid in contender.grids if len(grid.scanned) > 1]
    candidates = [start | {grid.field: v} for grid in scans for v in grid.scanned] or [start]
    yield list(map(setting, candidates))
    best = min(candidates, key=order)
    while True:
        before = best
        for grid in contender.grids:
            while candidates := _neighbours(best, grid):
                yield list(map(setting, candidates))
                if order(closest := min(candidates, key=order)) >= order(best):
                    break
                best = closest
        if best != before:
            continue
        candidates = _diagonals(best, contender)
        yield list(map(setting, candidates))
        best = min([best, *candidates], key=order)
        if best == before:
            return


def _neighbours(values: _Values, grid: Grid) -> list[_Values]:
    """The values with the next lower and the next higher value of one field."""
    index = grid.values.index(values[grid.field])
    near = [*grid.values[max(0, index - 1) : index], *grid.values[index + 1 : index + 2]]
    return [values | {grid.field: value} for value in near]


def _diagonals(values: _Values, contender: Contender) -> list[_Values]:
    """The values with the next rates, each with the next values of one other field."""
    grids = {grid.field: grid for grid in contender.grids}
    rates = grids.pop(LEARNING_RATE, None)
    return [
        moved
        for grid in grids.values()
        for rate in (_neighbours(values, rates) if rates else [])
        for moved in _neighbours(rate, grid)
    ]
