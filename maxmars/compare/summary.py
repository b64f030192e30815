"""The summary of a comparison, read from its directory, also before it is complete.

`summarize` makes an `Outcome` of each contender's rows: its search replayed, its best setting, and
there the test against the baseline and the speed-up over it. Reports only write what is here.
"""

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
    with_recorded_code,
)
from maxmars.model.parameters import Parameters

EFFECT = 0.01
"""The difference in nats for which the report says how many seeds would find it."""

FEWEST_SEEDS = 3
"""Number of seeds from which a p value has no `MARK`."""

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
    """Test against the baseline at its best setting, paired by seed; None for the baseline."""
    seeds_needed: int | None
    """Seeds with which that test would find a difference of `EFFECT`; None where unknown."""
    speed_up: Interval | None
    """Tokens that the baseline needs for a loss, over the contender's; see `_speed_up`."""
    line: Line
    """Curves of the seeds."""


@dataclass(frozen=True, kw_only=True)
class TriedSetting:
    """A setting of a contender that has finished trials."""

    value: Number
    """The setting's value of one field."""
    losses: Sequence[float]
    """Final losses of its runs in nats a token; infinite where a run diverged."""
    on_slice: bool
    """Whether all other fields are as in the best setting."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a comparison for one contender."""

    contender: Contender
    search: Search
    losses: dict[Setting, list[float]]
    """Setting -> final losses by seed, in the order of the search, then of other finished trials;
    infinite where a run diverged."""
    best: Best | None
    """The best setting; None where every setting diverged, or none is finished."""
    step_time_s: float | None
    """Median over the contender's trials."""
    rows: tuple[Row, ...]
    """Rows of all finished trials."""
    cost: Mapping[str, int]
    """Bytes of a step, see `run.step_cost`; empty before the contender's first trial."""

    @property
    def num_trials(self) -> int:
        """Number of finished trials."""
        return len(self.rows)

    @property
    def num_diverged(self) -> int:
        """Number of finished trials that diverged."""
        return sum(row.diverged is not None for row in self.rows)

    @property
    def has_diverged(self) -> bool:
        """Whether the contender diverged at every setting, and no trial is missing."""
        return self.best is None and self.num_trials > 0 and not self.search.missing

    def tried(self, field: str) -> list[TriedSetting]:
        """Every setting that has a finished trial, by its value of a field."""
        best = None if self.best is None else dict(self.best.setting)
        if best is not None:
            best.pop(field, None)
        tried = []
        for setting, losses in self.losses.items():
            others = dict(setting)
            value = others.pop(field, value_of(self.contender.config, field))
            if losses and value is not None:
                tried.append(TriedSetting(value=value, losses=losses, on_slice=others == best))
        return sorted(tried, key=lambda one: one.value)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two contenders at their best settings, the first with the lower mean loss."""

    first: str
    second: str
    test: PairedTest
    """First minus second, paired by seed."""
    p_adjusted: float
    """The p value, adjusted by Holm's method over all pairs of the comparison."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Result of a comparison."""

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
        """Mark behind a p value of these contenders: `MARK`, as `MARK_MEANS` explains, or none."""
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
    # The baseline first: each contender is tested against it, whatever their order.
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
                cost=next((r.cost for r in own if r.cost), {}),  # in one of the rows
            )
        )
    model = with_recorded_code(comparison.contenders[0].config.model, workdir)
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
    for (first, lower), (second, higher) in itertools.combinations(ranked, 2):
        seeds = [seed for seed in lower.losses if seed in higher.losses]
        losses = [[best.losses[s] for s in seeds] for best in (lower, higher)]
        # The means over all seeds may rank them otherwise than the seeds that both have.
        if sum(losses[0]) > sum(losses[1]):
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
    own_rows = search.rows_at(search.best)
    runs = []
    for row in own_rows:  # losses are in the row; other metrics only where the run's files are
        stored = read_recorded(row.trial.directory(workdir), contender.config)
        points = {**stored.points, **record_of(row, contender).points}
        runs.append(Recorded(points=points, step_time_s=step_time_s))  # the same for all seeds
    line = Line(name=contender.name, runs=tuple(runs))
    speed_up = test = needed = None
    if baselines and contender.name != baselines[0].trial.contender:
        base = {r.trial.seed: r.loss for r in baselines}
        pairs = [(r.loss, base[r.trial.seed]) for r in own_rows if r.trial.seed in base]
        test = paired_test([a for a, _ in pairs], [b for _, b in pairs])
        needed = seeds_needed([a - b for a, b in pairs], EFFECT)
        speed_up = _speed_up(own_rows, baselines)
    return Best(
        setting=search.best,
        losses={r.trial.seed: r.loss for r in own_rows},
        loss=mean_interval([r.loss for r in own_rows]),
        test=test,
        seeds_needed=needed,
        speed_up=speed_up,
        line=line,
    )


def _speed_up(own_rows: Sequence[Row], baselines: Sequence[Row]) -> Interval | None:
    """Data speed-up: the tokens that the baseline needs for a loss, over the contender's.

    For each seed: all tokens of the run with the lower final loss, over the tokens after which its
    curve comes down to the final loss of the other run. This is the speed-up if the lower loss is
    the contender's, and its inverse if it is the baseline's. The mean over the seeds is geometric,
    so that contender and baseline exchanged give the inverse.

    None where no seed has both runs, and where one ends above its first loss.
    """
    base_curves, logs = {r.trial.seed: r.curve for r in baselines}, []
    for row in own_rows:
        own, base = row.curve, base_curves.get(row.trial.seed)
        if own is None or base is None:
            continue
        is_better = own.losses[-1] <= base.losses[-1]
        better, worse = (own, base) if is_better else (base, own)
        crossing = first_crossing(better.tokens, better.losses, worse.losses[-1])
        if not crossing:
            return None
        # Exchanging the two runs turns the sign: the mean of logarithms is then symmetric.
        logs.append((1 if is_better else -1) * math.log(better.tokens[-1] / crossing))
    if not logs:
        return None
    log_mean = mean_interval(logs)
    low, high = (None if end is None else math.exp(end) for end in (log_mean.low, log_mean.high))
    return Interval(mean=math.exp(log_mean.mean), low=low, high=high)


def record_of(row: Row, contender: Contender) -> Recorded:
    """The losses of a row as a run's record, by steps and tokens."""
    # Rows have no tokens: all steps of a trial have those that its config says.
    tokens_per_step = contender.config.tokens_per_step
    points = {TRAINING_LOSS: [(s, s * tokens_per_step, loss) for s, loss in row.train_losses]}
    if row.curve is not None and row.curve.loss_of == NAMES[VALIDATION_LOSS]:
        curve = row.curve
        points[VALIDATION_LOSS] = list(zip(curve.steps, curve.tokens, curve.losses, strict=True))
    points = {metric: of_metric for metric, of_metric in points.items() if of_metric}
    return Recorded(points=points, step_time_s=row.step_time_s)
