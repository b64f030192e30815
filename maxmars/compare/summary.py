"""What a comparison found, read from its directory, also before it is complete."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxmars.compare.curves import (
    NAMES,
    TRAINING_LOSS,
    VALIDATION_LOSS,
    Line,
    Recorded,
    read_recorded,
)
from maxmars.compare.grids import Number, value_of
from maxmars.compare.search import Search
from maxmars.compare.statistics import (
    Interval,
    PairedTest,
    first_crossing,
    holm,
    mean_interval,
    paired_test,
    seeds_needed,
)
from maxmars.compare.trials import (
    Comparison,
    Contender,
    Row,
    Setting,
    read_comparison,
    read_rows,
    with_kept_code,
)
from maxmars.model.parameters import Parameters

EFFECT = 0.01
"""The difference in nats for which the report says how many seeds would find it."""

FEWEST_SEEDS = 3
"""Of a p value without `MARK`."""

MARK = "†"
MARK_MEANS = "†: p of fewer than three seeds, or of a search that did not end."


@dataclass(frozen=True, kw_only=True)
class Best:
    """A contender at its best setting."""

    setting: Setting
    losses: dict[int, float]
    """Seed -> final validation loss."""
    loss: Interval
    """Final validation loss over the seeds."""
    test: PairedTest | None
    """Against the baseline at its best setting, paired by seed; None for the baseline itself."""
    seeds_needed: int | None
    """Seeds with which that test would find a difference of `EFFECT`; None where unknown."""
    speed_up: Interval | None
    """How many times fewer tokens it needs than the baseline, see `_speed_up`."""
    line: Line
    """Curves of the seeds."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A setting of a contender that has finished trials."""

    value: Number
    """Of one field."""
    losses: Sequence[float]
    """Final losses of its runs in nats a token; infinite where a run diverged."""
    on_slice: bool
    """Whether all other fields are as in the best setting."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a comparison found of one contender."""

    contender: Contender
    search: Search
    losses: dict[Setting, list[float]]
    """Setting -> final losses by seed, in the order of the search, then of other finished trials;
    infinite where a run diverged."""
    best: Best | None
    """None where every setting diverged, or none is finished."""
    step_time_s: float | None
    """Median over the contender's trials."""
    rows: tuple[Row, ...]
    """Of all finished trials."""
    cost: Mapping[str, int]
    """See `run.step_cost`; empty before the contender's first trial."""

    @property
    def num_trials(self) -> int:
        """Number of finished trials."""
        return len(self.rows)

    @property
    def num_diverged(self) -> int:
        """How many of them diverged."""
        return sum(row.diverged is not None for row in self.rows)

    @property
    def has_diverged(self) -> bool:
        """Whether it diverged at every setting, and no trial is missing."""
        return self.best is None and self.num_trials > 0 and not self.search.missing

    def tried(self, field: str) -> list[Tried]:
        """Every setting that has a finished trial, by its value of a field."""
        best = None if self.best is None else dict(self.best.setting)
        if best is not None:
            best.pop(field, None)
        tried = []
        for setting, losses in self.losses.items():
            others = dict(setting)
            value = others.pop(field, value_of(self.contender.config, field))
            if losses and value is not None:
                tried.append(Tried(value=value, losses=losses, on_slice=others == best))
        return sorted(tried, key=lambda one: one.value)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two contenders at their best settings, the first with the lower mean loss."""

    first: str
    second: str
    test: PairedTest
    """First minus second, paired by seed."""
    p_adjusted: float
    """By Holm's method over all pairs of the comparison."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a comparison found."""

    comparison: Comparison
    num_parameters: int
    """Parameters of the model."""
    outcomes: tuple[Outcome, ...]
    num_missing: int
    """Trials that are known to be missing; more may follow from their losses."""
    digests: dict[int, tuple[str, str]]
    """Seed -> digests of the initial weights and the tokens that all its trials share."""
    p_adjusted: dict[str, float]
    """Contender -> p of its test, adjusted for the number of tests by Holm's method."""
    pairs: tuple[Pair, ...]
    """Every pair of contenders, by the mean losses."""
    environment: dict[str, Any]
    """Versions and devices of the first trial; empty before it."""

    def mark(self, *names: str) -> str:
        """What stands after a p value of these contenders: `MARK` where it says less than it
        seems, as `MARK_MEANS` says."""
        named = [o for o in self.outcomes if o.contender.name in names]
        few = any(o.best is None or len(o.best.losses) < FEWEST_SEEDS for o in named)
        return MARK if few or not all(o.search.is_at_its_end for o in named) else ""


def summarize(workdir: Path) -> Summary:
    """Read a comparison, complete or not.

    Raises:
      ValueError: `workdir` holds no comparison, or none of its trials is finished yet.
    """
    comparison = read_comparison(workdir)
    rows = read_rows(comparison, workdir)
    if not rows:
        raise ValueError(f"no trial of {workdir} is finished yet; start its comparison again.")
    searches = {c.name: Search(c, comparison, rows) for c in comparison.contenders}
    base = searches[comparison.baseline]
    baselines = [] if base.best is None else base.rows_at(base.best)
    outcomes = []
    for contender in comparison.contenders:
        search = searches[contender.name]
        own = [row for trial, row in rows.items() if trial.contender == contender.name]
        times = [r.step_time_s for r in own if r.step_time_s is not None]
        step_time_s = float(np.median(times)) if times else None
        outcomes.append(
            Outcome(
                contender=contender,
                search=search,
                losses={setting: search.losses_at(setting) for setting in search.settings},
                best=_best(contender, search, baselines, step_time_s, workdir),
                step_time_s=step_time_s,
                rows=tuple(own),
                cost=next((r.cost for r in own if r.cost), {}),
            )
        )
    model = with_kept_code(comparison.contenders[0].config.model, workdir)
    p = {o.contender.name: o.best.test.p for o in outcomes if o.best and o.best.test}
    return Summary(
        comparison=comparison,
        num_parameters=Parameters(model).count,
        outcomes=tuple(outcomes),
        num_missing=sum(len(search.next_trials) for search in searches.values()),
        digests={r.trial.seed: (r.initial_weights, r.tokens) for r in rows.values()},
        p_adjusted=dict(zip(p, holm(list(p.values())), strict=True)),
        pairs=_pairs(outcomes),
        environment=dict(next((r.environment for r in rows.values()), {})),
    )


def _pairs(outcomes: Sequence[Outcome]) -> tuple[Pair, ...]:
    best = {o.contender.name: o.best for o in outcomes if o.best is not None}
    ranked = sorted(best.items(), key=lambda item: item[1].loss.mean)
    tested: dict[tuple[str, str], PairedTest] = {}
    for (first, ours), (second, theirs) in itertools.combinations(ranked, 2):
        seeds = [seed for seed in ours.losses if seed in theirs.losses]
        losses = [[best.losses[s] for s in seeds] for best in (ours, theirs)]
        if sum(losses[0]) > sum(losses[1]):  # of the seeds that both have
            first, second, losses = second, first, losses[::-1]
        test = paired_test(*losses)
        if test is not None:
            tested[first, second] = test
    adjusted = holm([test.p for test in tested.values()])
    return tuple(
        Pair(first=first, second=second, test=test, p_adjusted=p)
        for ((first, second), test), p in zip(tested.items(), adjusted, strict=True)
    )


def _best(
    contender: Contender,
    search: Search,
    baselines: Sequence[Row],
    step_time_s: float | None,
    workdir: Path,
) -> Best | None:
    if search.best is None:
        return None
    ours = search.rows_at(search.best)
    runs = []
    for row in ours:  # what is in the row, and the rest where the run's metrics are still there
        read = read_recorded(row.trial.directory(workdir), contender.config)
        points = {**read.points, **recorded(row, contender).points}
        runs.append(Recorded(points=points, step_time_s=step_time_s))  # the same for all seeds
    line = Line(name=contender.name, runs=tuple(runs))
    gain = test = needed = None
    if baselines and contender.name != baselines[0].trial.contender:
        theirs = {r.trial.seed: r.loss for r in baselines}
        pairs = [(r.loss, theirs[r.trial.seed]) for r in ours if r.trial.seed in theirs]
        test = paired_test([a for a, _ in pairs], [b for _, b in pairs])
        needed = seeds_needed([a - b for a, b in pairs], EFFECT)
        gain = _speed_up(ours, baselines)
    return Best(
        setting=search.best,
        losses={r.trial.seed: r.loss for r in ours},
        loss=mean_interval([r.loss for r in ours]),
        test=test,
        seeds_needed=needed,
        speed_up=gain,
        line=line,
    )


def _speed_up(ours: Sequence[Row], baselines: Sequence[Row]) -> Interval | None:
    """How many times fewer tokens a contender needs than the baseline; below 1, it needs more.

    Of the two runs of a seed, the better one is read: the tokens of a whole run, over those after
    which its curve first comes down to the final loss of the other. This is the speed-up where the
    contender is the better one, and its inverse where the baseline is. The mean over the seeds is
    the geometric one, so that contender and baseline exchanged give the inverse.

    None where no seed has both runs, and where one ends above its first loss.
    """
    theirs, logs = {r.trial.seed: r.curve for r in baselines}, []
    for result in ours:
        our, their = result.curve, theirs.get(result.trial.seed)
        if our is None or their is None:
            continue
        is_better = our.losses[-1] <= their.losses[-1]
        better, worse = (our, their) if is_better else (their, our)
        crossing = first_crossing(better.tokens, better.losses, worse.losses[-1])
        if not crossing:
            return None
        logs.append((1 if is_better else -1) * math.log(better.tokens[-1] / crossing))
    if not logs:
        return None
    log_mean = mean_interval(logs)
    low, high = (None if end is None else math.exp(end) for end in (log_mean.low, log_mean.high))
    return Interval(mean=math.exp(log_mean.mean), low=low, high=high)


def recorded(row: Row, contender: Contender) -> Recorded:
    """The losses of a row; all steps of a trial have the tokens that its config says."""
    tokens_per_step = contender.config.tokens_per_step
    points = {TRAINING_LOSS: [(s, s * tokens_per_step, loss) for s, loss in row.train_losses]}
    if row.curve is not None and row.curve.loss_of == NAMES[VALIDATION_LOSS]:
        curve = row.curve
        points[VALIDATION_LOSS] = list(zip(curve.steps, curve.tokens, curve.losses, strict=True))
    points = {metric: of_metric for metric, of_metric in points.items() if of_metric}
    return Recorded(points=points, step_time_s=row.step_time_s)
