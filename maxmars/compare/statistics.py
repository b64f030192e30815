"""Statistics of a few seeds: intervals, paired tests and crossings.

Trials of different contenders with the same seed start from the same weights and read the same
tokens, so tests are paired by seed. All p values of a table are adjusted together (`holm`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats

CONFIDENCE = 0.95
POWER = 0.8


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its confidence interval at level `CONFIDENCE`."""

    mean: float
    low: float | None
    """Lower end; None, like the upper one, for a single value, whose spread is unknown."""
    high: float | None


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Student's paired t test, two-sided."""

    difference: Interval
    """First minus second."""
    p: float
    """Probability of a mean difference at least as far from zero, if the true one is zero."""


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean and Student's t interval of independent, normally distributed values.

    One value alone has no interval, and neither have values of which one is infinite.
    """
    mean = float(np.mean(values))
    if len(values) < 2 or not math.isfinite(mean):
        return Interval(mean=mean, low=None, high=None)
    half = scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * scipy.stats.sem(values)
    return Interval(mean=mean, low=mean - float(half), high=mean + float(half))


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest | None:
    """Test whether the mean of `first` differs from the mean of `second`.

    Values at the same position are a pair. Here a pair shares a seed, hence initial weights and
    tokens, so that the effect of these on the loss cancels.

    Returns:
      The test; None for fewer than two pairs.

    Raises:
      ValueError: the two have different lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} losses cannot be paired.")
    if len(first) < 2:
        return None
    differences = np.subtract(first, second)
    if np.ptp(differences) == 0:  # scipy's statistic is 0/0 or infinite, with a warning
        p = 1.0 if differences[0] == 0 else 0.0
    else:
        p = float(scipy.stats.ttest_rel(first, second).pvalue)
    return PairedTest(difference=mean_interval(differences.tolist()), p=p)


def seeds_needed(differences: Sequence[float], effect: float, most: int = 10_000) -> int | None:
    """The number of pairs with which a paired t test finds a difference with probability `POWER`.

    Args:
      differences: of pairs, whose spread is taken for the true one.
      effect: the true difference of the means.
      most: the largest number looked at.

    Returns:
      The number, for a two-sided test at level 1 - `CONFIDENCE`; None for fewer than two
      differences, whose spread is unknown, and where more than `most` are needed.
    """
    if len(differences) < 2:
        return None
    spread = float(np.std(differences, ddof=1))
    if spread == 0:
        return 2

    def power(n: int) -> float:
        limit = scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)
        # The other tail, a significant difference of the wrong sign, counts next to nothing.
        return float(scipy.stats.nct.sf(limit, n - 1, effect / spread * math.sqrt(n)))

    high = 2  # doubled until it suffices: the power grows with n, so bisection finds the least
    while power(high) < POWER:
        high *= 2
        if high > most:
            return None
    return bisect.bisect_left(range(high), POWER, lo=max(2, high // 2), key=power)


def holm(p_values: Sequence[float]) -> list[float]:
    """P values adjusted for their number (Holm, 1979).

    Calling the differences with an adjusted p below alpha significant controls the family-wise
    error rate at alpha.
    """
    ascending = np.argsort(p_values)
    # The smallest p is multiplied by their number, the next one by one less, and so on; a running
    # maximum keeps the adjusted ones in the same order.
    scaled = [(len(ascending) - rank) * p_values[index] for rank, index in enumerate(ascending)]
    adjusted = np.empty(len(ascending))
    adjusted[ascending] = np.minimum(1.0, np.maximum.accumulate(scaled)) if scaled else []
    return adjusted.tolist()


def first_crossing(
    positions: Sequence[int] | Sequence[float], losses: Sequence[float], target: float
) -> float | None:
    """Position where a curve first comes down to a loss, on straight lines between its points.

    Args:
      positions: increasing, such as tokens.
      losses: the curve at these positions.
      target: the loss to come down to.

    Returns:
      The position; None if the curve stays above the target.
    """
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0 or not math.isfinite(losses[i - 1]):  # no line leads to this point
                return float(positions[i])
            share = (losses[i - 1] - target) / (losses[i - 1] - loss)
            return float(positions[i - 1] + share * (positions[i] - positions[i - 1]))
    return None
