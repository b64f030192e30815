"""Which cells to run next: the search for the best setting with one seed, then more seeds.

The choice depends on the results so far alone, so that a comparison that was stopped, or that
several processes share, continues by asking again. It goes in two stages:

1. Coordinate descent with the first seed, over at most `budget` cells of each contender: all
   scanned learning rates at the config's own other values; then one field after the other, each
   moved to its better neighbour in the grid as long as that lowers the loss; the round is repeated
   until it changes nothing. Then the learning rate is moved together with each other field, since
   the best rate depends on most of them, and a better setting begins the rounds anew. With
   `confirm` above 1, the best setting so far and those that could be better run with as many seeds,
   and the mean over them decides: at the edge of stability a run may be lucky with one.
2. All seeds at the `finalists` best settings: one seed cannot tell close ones apart. Their mean
   losses decide.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from maxmars.compare.cells import Cell, CellResult, Comparison, Contender, Setting, make_setting
from maxmars.compare.grids import LEARNING_RATE, Grid, Number

Results = Mapping[Cell, CellResult]

_Values = dict[str, Number]
_Try = tuple[Setting, int]  # with this seed


@dataclass(frozen=True, kw_only=True)
class Search:
    """How far the search of a contender has come."""

    tried: tuple[Setting, ...]
    """The settings that it asked for so far, in this order; the last ones may be without result."""
    missing: tuple[Cell, ...]
    """Cells that it asked for and that have no result."""
    untried: tuple[Setting, ...]
    """Neighbours of the best setting for which the budget was too small."""
    budget_left: int
    """Cells that it may still ask for."""


def next_cells(comparison: Comparison, results: Results) -> list[Cell]:
    """The cells to run next; none when the comparison is complete."""
    num_finished = Counter(cell.contender for cell in results)
    # In turns, so that changes of the machine's speed over the hours affect all alike.
    contenders = sorted(comparison.contenders, key=lambda c: num_finished[c.name])
    rows = itertools.zip_longest(*(_missing(c, comparison, results) for c in contenders))
    return [cell for row in rows for cell in row if cell is not None]


def most_cells_left(contender: Contender, comparison: Comparison, results: Results) -> int:
    """How many cells of a contender are missing at most; fewer if its search ends early."""
    found = search(contender, comparison, results)
    if not found.missing:
        return len(_missing(contender, comparison, results))
    of_seeds = comparison.finalists * (len(comparison.seeds) - comparison.confirm)
    return len(found.missing) + found.budget_left + of_seeds


def search(contender: Contender, comparison: Comparison, results: Results) -> Search:
    """Replay the search of a contender on the results so far."""
    losses = {
        (cell.setting, cell.seed): result.loss
        for cell, result in results.items()
        if cell.contender == contender.name
    }
    asked: list[_Try] = []
    missing: list[_Try] = []
    left: list[_Try] = []
    for wanted in _descend(contender, comparison.seeds[: comparison.confirm], losses):
        new = [one for one in dict.fromkeys(wanted) if one not in asked]
        affordable = new[: comparison.budget - len(asked)]
        asked += affordable
        missing = [one for one in affordable if one not in losses]
        left = [] if missing else new[len(affordable) :]
        if missing or left:
            break
    return Search(
        tried=_settings(asked),
        missing=tuple(Cell(contender=contender.name, setting=s, seed=n) for s, n in missing),
        untried=_settings(left),
        budget_left=comparison.budget - len(asked),
    )


def settings_of(
    contender: Contender, comparison: Comparison, results: Results
) -> tuple[Setting, ...]:
    """The settings that the search of a contender tried, then those of its other finished cells,
    which a search with other options left."""
    own = {cell.setting for cell in results if cell.contender == contender.name}
    tried = search(contender, comparison, results).tried
    return tuple(dict.fromkeys([*tried, *sorted(own)]))


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


def _settings(tries: Iterable[_Try]) -> tuple[Setting, ...]:
    return tuple(dict.fromkeys(setting for setting, _ in tries))


def _missing(contender: Contender, comparison: Comparison, results: Results) -> list[Cell]:
    if missing := search(contender, comparison, results).missing:
        return list(missing)
    settings = _finalists(contender, comparison, results)
    cells = [
        Cell(contender=contender.name, setting=s, seed=n)
        for s in settings
        for n in comparison.seeds
    ]
    return [cell for cell in cells if cell not in results]


def _finalists(contender: Contender, comparison: Comparison, results: Results) -> list[Setting]:
    """The best settings of those that diverged with no seed so far, by the search's seeds."""
    by_search = dataclasses.replace(comparison, seeds=comparison.seeds[: comparison.confirm])
    found = {
        setting: losses_at(contender, setting, by_search, results)
        for setting in settings_of(contender, comparison, results)
        if np.isfinite(losses_at(contender, setting, comparison, results)).all()
    }
    most = max(map(len, found.values()), default=0)  # a mean over fewer would not compare
    means = {s: np.mean(losses) for s, losses in found.items() if 0 < len(losses) == most}
    return sorted(means, key=lambda setting: means[setting])[: comparison.finalists]


def _descend(
    contender: Contender, seeds: tuple[int, ...], losses: Mapping[_Try, float]
) -> Generator[list[_Try]]:
    """Coordinate descent: yields the tries whose losses it reads when it is asked to go on."""

    def tries(candidates: Iterable[_Values], seeds: tuple[int, ...]) -> list[_Try]:
        settings = [make_setting(contender.config, values) for values in candidates]
        return [(setting, seed) for setting in settings for seed in seeds]

    def order(values: _Values, seeds: tuple[int, ...] = seeds[:1]) -> tuple[float, float]:
        # Of settings that diverge, the one with the lower rate is closer to one that does not.
        loss = float(np.mean([losses[one] for one in tries([values], seeds)]))
        return loss, 0.0 if math.isfinite(loss) else values.get(LEARNING_RATE, 0.0)

    def mean(values: _Values) -> tuple[float, float]:
        return order(values, seeds)

    def moved(best: _Values, candidates: list[_Values]) -> Generator[list[_Try], None, _Values]:
        """A candidate that is better than the best setting so far, or that."""
        yield tries(candidates, seeds[:1])
        for closest in sorted(candidates, key=order):
            # Where the best one so far was lucky with the first seed, its mean is what to beat.
            if order(closest) >= max(order(best), mean(best)):
                break
            yield tries([closest], seeds)
            if mean(closest) < mean(best):
                return closest
        return best

    start = {grid.field: grid.scanned[0] for grid in contender.grids}
    scans = [grid for grid in contender.grids if len(grid.scanned) > 1]
    candidates = [start | {grid.field: v} for grid in scans for v in grid.scanned] or [start]
    yield tries(candidates, seeds[:1])
    best = min(candidates, key=order)
    yield tries([best], seeds)
    while (better := (yield from moved(best, candidates))) != best:
        best = better
    while True:
        before = best
        for grid in contender.grids:
            while (better := (yield from moved(best, _neighbours(best, grid)))) != best:
                best = better
        if best == before:
            best = yield from moved(best, _diagonals(best, contender))
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
