"""The choice of the next trials: a search for the best setting with one seed, then more seeds.

The choice depends on the rows so far alone, so that a comparison that was stopped, or that
several processes share, continues by asking again. It goes in three stages:

1. Coordinate descent with the first seed, over at most `budget` trials of each contender: all
   scanned learning rates at the config's own other values; then one field after the other, each
   moved to its better neighbour in the grid as long as that lowers the loss; the round is repeated
   until it changes nothing. Then the learning rate is moved together with each other field, since
   the best rate depends on most of them, and a better setting begins the rounds anew. With
   `confirm` above 1, the best setting so far and those that could be better run with as many seeds,
   and the mean over them decides: at the edge of stability a run may be lucky with one.
2. All seeds at the `finalists` best settings: one seed cannot tell close ones apart. Their mean
   losses decide.
3. These trials, or those of an earlier search with other options, may make another setting the
   best one than that at which the descent ended. Then its neighbours are tried as well, within the
   budget, and the second stage comes again, until all neighbours of the best setting are tried.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from maxmars.compare.grids import LEARNING_RATE, Grid, Number, value_of
from maxmars.compare.trials import Comparison, Contender, Row, Rows, Setting, Trial, make_setting

_Values = dict[str, Number]


class Search:
    """The search of one contender, replayed on the rows so far."""

    requested: tuple[Setting, ...]
    """Settings that the search requested so far, in order; the last may have no rows yet."""
    missing: tuple[Trial, ...]
    """Requested trials without a row."""
    finals: tuple[Trial, ...]
    """Trials of the finalists without a row; none as long as requested trials are missing."""
    untried: tuple[Setting, ...]
    """Settings that would be next, for which the budget was too small."""
    budget_left: int
    """Number of trials that the search may still request."""
    best: Setting | None
    """The setting with the lowest mean loss among the finalists with the most finished seeds; None
    where every setting diverged or none is finished."""

    def __init__(self, contender: Contender, comparison: Comparison, rows: Rows) -> None:
        """Replay the search on the rows of its contender."""
        self._comparison, self._name = comparison, contender.name
        self._rows = {trial: row for trial, row in rows.items() if trial.contender == self._name}
        self._requested: dict[Trial, None] = {}  # an ordered set; counts against the budget
        losses = _Losses(contender, comparison.seeds[: comparison.confirm], self._rows)
        # The search has no state. It starts anew on all rows, and each list of trials that it
        # yields is looked up:
        #
        #   _descend yields [lr 1e-3, 2e-3, 4e-3]    all have rows: go on
        #   _descend yields [lr 2e-3, wd 0.1]        no row: this is `missing`, the next trials
        #
        # With these rows the next replay comes one step further.
        missing, left = self._take_affordable(_descend(contender, losses))
        while True:
            finals = [t for s in self._finalists() for t in self._trials_at(s)]
            finals = [] if missing else [trial for trial in finals if trial not in self._rows]
            self.best = self._best()
            # Another setting may still become the best one, or the budget is used up: no round of
            # the neighbours yet.
            if missing or left or finals or self.best is None:
                break
            num_requested = len(self._requested)
            missing, left = self._take_affordable(_neighbourhood(self.best, contender, losses))
            if not left and len(self._requested) == num_requested:
                break
        self.requested, self.untried = _settings(self._requested), _settings(left)
        self.missing, self.finals = tuple(missing), tuple(finals)
        self.budget_left = comparison.budget - len(self._requested)

    @property
    def is_at_its_end(self) -> bool:
        """Whether the best setting has all seeds, and all its neighbours were tried."""
        return not (self.missing or self.finals or self.untried)

    @property
    def next_trials(self) -> Sequence[Trial]:
        """The trials to run next; none when the search is complete."""
        return self.missing or self.finals

    @property
    def most_trials_left(self) -> int:
        """Largest number of missing trials: fewer if the search ends early, and more only if the
        seeds make another setting the best one than that at which it ended."""
        if not self.missing:
            return len(self.finals)
        comparison = self._comparison
        of_seeds = comparison.finalists * (len(comparison.seeds) - comparison.confirm)
        return len(self.missing) + self.budget_left + of_seeds

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The requested settings, then those of other finished trials, from a search with other
        options."""
        others = sorted({trial.setting for trial in self._rows})
        return tuple(dict.fromkeys([*_settings(self._requested), *others]))

    def rows_at(self, setting: Setting) -> list[Row]:
        """The rows of a setting, in the order of the seeds."""
        return [self._rows[trial] for trial in self._trials_at(setting) if trial in self._rows]

    def losses_at(self, setting: Setting) -> list[float]:
        """The final losses of the finished trials at a setting, in the order of the seeds."""
        return [result.loss for result in self.rows_at(setting)]

    def _trials_at(self, setting: Setting) -> list[Trial]:
        seeds = self._comparison.seeds
        return [Trial(contender=self._name, setting=setting, seed=seed) for seed in seeds]

    def _take_affordable(self, steps: Iterable[list[Trial]]) -> tuple[list[Trial], list[Trial]]:
        """Take the steps of a search as far as the rows and the budget go.

        Returns:
          The trials that have no row yet, and those for which the budget is too small.
        """
        for wanted in steps:
            new = [trial for trial in dict.fromkeys(wanted) if trial not in self._requested]
            affordable = new[: self._comparison.budget - len(self._requested)]
            self._requested |= dict.fromkeys(affordable)
            missing = [trial for trial in affordable if trial not in self._rows]
            left = [] if missing else new[len(affordable) :]
            if missing or left:
                return missing, left
        return [], []

    def _finalists(self) -> list[Setting]:
        """The best settings by the search's seeds, without those that diverged with any seed."""
        seeds = self._comparison.seeds[: self._comparison.confirm]
        of_search = {
            setting: [r.loss for r in self.rows_at(setting) if r.trial.seed in seeds]
            for setting in self.settings
            if np.isfinite(self.losses_at(setting)).all()
        }
        most = max(map(len, of_search.values()), default=0)  # a mean over fewer would not compare
        means = {s: np.mean(losses) for s, losses in of_search.items() if 0 < len(losses) == most}
        return sorted(means, key=lambda setting: means[setting])[: self._comparison.finalists]

    def _best(self) -> Setting | None:
        """The setting with the lowest mean, of the finalists and of all that ran with all seeds."""
        losses_of = {setting: self.losses_at(setting) for setting in self._finalists()}
        # A setting that ran with all seeds may have lost its place among the finalists to one that
        # is luckier with the first seed.
        for setting in self.settings:
            losses = self.losses_at(setting)
            if len(losses) == len(self._comparison.seeds) and np.isfinite(losses).all():
                losses_of.setdefault(setting, losses)
        most = max(map(len, losses_of.values()), default=0)
        means = {s: np.mean(losses) for s, losses in losses_of.items() if len(losses) == most}
        return min(means, key=lambda setting: means[setting], default=None)


def next_trials(comparison: Comparison, rows: Rows) -> list[Trial]:
    """The trials to run next; none when the comparison is complete."""
    num_finished = Counter(trial.contender for trial in rows)
    # In turns, so that changes of the machine's speed over the hours affect all alike.
    contenders = sorted(comparison.contenders, key=lambda c: num_finished[c.name])
    searches = [Search(contender, comparison, rows) for contender in contenders]
    turns = itertools.zip_longest(*(search.next_trials for search in searches))
    return [trial for turn in turns for trial in turn if trial is not None]


def _settings(trials: Iterable[Trial]) -> tuple[Setting, ...]:
    return tuple(dict.fromkeys(trial.setting for trial in trials))


@dataclass(frozen=True)
class _Losses:
    """Losses of a contender's values, as far as they were tried."""

    contender: Contender
    seeds: tuple[int, ...]
    """Seeds over which a setting must be better."""
    rows: Rows

    def trials_first_seed(self, candidates: Iterable[_Values]) -> list[Trial]:
        """The trials of values with the first seed."""
        return self._trials(candidates, self.seeds[:1])

    def trials_all_seeds(self, candidates: Iterable[_Values]) -> list[Trial]:
        """The trials of values with each seed."""
        return self._trials(candidates, self.seeds)

    def first_seed_loss(self, values: _Values) -> tuple[float, float]:
        """Key to sort values: their loss with the first seed."""
        return self._mean(self.trials_first_seed([values]), values)

    def mean_loss(self, values: _Values) -> tuple[float, float]:
        """Key to compare values: their mean loss over the seeds."""
        return self._mean(self.trials_all_seeds([values]), values)

    def loss_to_beat(self, best: _Values) -> tuple[float, float]:
        """Key to beat with the first seed: the mean loss of best values that were lucky with it."""
        return max(self.first_seed_loss(best), self.mean_loss(best))

    def _trials(self, candidates: Iterable[_Values], seeds: tuple[int, ...]) -> list[Trial]:
        settings = [make_setting(self.contender.config, values) for values in candidates]
        name = self.contender.name
        return [Trial(contender=name, setting=s, seed=seed) for s in settings for seed in seeds]

    def _mean(self, trials: list[Trial], values: _Values) -> tuple[float, float]:
        # Of settings that diverge, one with a lower rate is closer to those that do not.
        loss = float(np.mean([self.rows[trial].loss for trial in trials]))
        return loss, 0.0 if math.isfinite(loss) else values.get(LEARNING_RATE, 0.0)


def _descend(contender: Contender, losses: _Losses) -> Generator[list[Trial]]:
    """Coordinate descent. Yields trials, and on resumption reads their losses."""

    def moved(best: _Values, candidates: list[_Values]) -> Generator[list[Trial], None, _Values]:
        """A candidate that is better than the best values so far, or these."""
        yield losses.trials_first_seed(candidates)
        # From the best with the first seed on: the first that the mean over the seeds confirms
        # wins, and those behind the limit need no further seed.
        for closest in sorted(candidates, key=losses.first_seed_loss):
            if losses.first_seed_loss(closest) >= losses.loss_to_beat(best):
                break
            yield losses.trials_all_seeds([closest])
            if losses.mean_loss(closest) < losses.mean_loss(best):
                return closest
        return best

    start = {grid.field: grid.scanned[0] for grid in contender.grids}
    scans = [grid for grid in contender.grids if len(grid.scanned) > 1]
    candidates = [start | {grid.field: v} for grid in scans for v in grid.scanned] or [start]
    yield losses.trials_first_seed(candidates)
    # Stage 1 a: the scans, each from the config's own values. The winner runs with all seeds of
    # `confirm`, and whoever could have beaten it gets the same chance.
    best = min(candidates, key=losses.first_seed_loss)
    yield losses.trials_all_seeds([best])
    while (better := (yield from moved(best, candidates))) != best:
        best = better
    while True:
        before = best
        # Stage 1 b: one field after the other, moved by one value until that no longer helps.
        for grid in contender.grids:
            while (better := (yield from moved(best, _neighbours(best, grid)))) != best:
                best = better
        if best == before:
            best = yield from moved(best, _diagonals(best, contender))
            if best == before:
                return


def _neighbourhood(
    setting: Setting, contender: Contender, losses: _Losses
) -> Generator[list[Trial]]:
    """Yield the neighbours of a setting, then, with all seeds, those that may be better."""
    own = {grid.field: value_of(contender.config, grid.field) for grid in contender.grids}
    best: _Values = {field: v for field, v in own.items() if v is not None} | dict(setting)
    neighbours = [near for grid in contender.grids for near in _neighbours(best, grid)]
    candidates = [*neighbours, *_diagonals(best, contender)]
    yield losses.trials_first_seed(candidates)
    limit = losses.loss_to_beat(best)
    yield losses.trials_all_seeds(
        near for near in candidates if losses.first_seed_loss(near) < limit
    )


def _neighbours(values: _Values, grid: Grid) -> list[_Values]:
    """The values with the next lower and the next higher value of one field."""
    own = values[grid.field]
    lower = [value for value in grid.values if value < own][-1:]
    higher = [value for value in grid.values if value > own][:1]
    return [values | {grid.field: value} for value in (*lower, *higher)]


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
