"""What a few seeds can tell: intervals, paired tests, crossings, and the width of a basin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its confidence interval of level `LEVEL`."""

    mean: float
    low: float | None
    """None where there is one value only, which tells nothing of its spread."""
    high: float | None


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Student's t test of the differences of pairs."""

    difference: Interval
    """First minus second."""
    p: float
    """How likely a mean difference at least as far from zero is where there is none; two-sided."""


@dataclass(frozen=True, kw_only=True)
class Basin:
    """The learning rates whose loss is close to the best one."""

    low: float
    high: float
    open_low: bool
    """Whether the basin goes on below the grid."""
    open_high: bool
    """Whether it goes on above the grid."""

    @property
    def factor(self) -> float:
        """Width as the ratio of its ends."""
        return self.high / self.low


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean and its t interval, for independent values of a normal distribution."""
    found = np.asarray(values, float)
    mean = float(found.mean())
    if len(found) < 2:
        return Interval(mean=mean, low=None, high=None)
    degrees = len(found) - 1
    half = stdtrit(degrees, 0.5 + LEVEL / 2) * found.std(ddof=1) / math.sqrt(len(found))
    return Interval(mean=mean, low=mean - float(half), high=mean + float(half))


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest | None:
    """Whether the mean of `first` differs from that of `second`, pair by pair.

    Pairs share a seed, hence weights and tokens: what these do to the loss cancels.

    Returns:
      The test; None for fewer than two pairs.

    Raises:
      ValueError: the two are not of the same length.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} losses cannot be paired.")
    if len(first) < 2:
        return None
    differences = np.asarray(first, float) - np.asarray(second, float)
    spread = differences.std(ddof=1) / math.sqrt(len(differences))
    mean = float(differences.mean())
    if spread == 0:
        p = 1.0 if mean == 0 else 0.0
    else:
        p = 2 * float(stdtr(len(differences) - 1, -abs(mean) / spread))
    return PairedTest(difference=mean_interval(differences.tolist()), p=p)


def holm(p_values: Sequence[float]) -> list[float]:
    """P values adjusted for their number (Holm, 1979): if one is below α, some difference that is
    none is called one with probability α at most."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def first_crossing(
    positions: Sequence[float], losses: Sequence[float], target: float
) -> float | None:
    """Where a curve first comes down to a loss, on straight lines between its points.

    Args:
      positions: increasing, such as tokens or seconds.
      losses: at these.
      target: the loss to come down to.

    Returns:
      The position, None if the curve stays above.
    """
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0 or not math.isfinite(losses[i - 1]):
                return float(positions[i])
            before, there = positions[i - 1], positions[i]
            share = (losses[i - 1] - target) / (losses[i - 1] - loss)
            return float(before + share * (there - before))
    return None


def basin(rates: Sequence[float], losses: Sequence[float], tolerance: float) -> Basin | None:
    """The rates around the best one whose loss exceeds the best by `tolerance` at most.

    Between the points of the grid the loss is taken as linear in the logarithm of the rate; a loss
    that is not finite ends the basin at the last finite rate.

    Args:
      rates: increasing.
      losses: at these, infinite where a run diverged.
      tolerance: nats.

    Returns:
      The basin; None where no loss is finite.
    """
    found = np.where(np.isfinite(losses), losses, np.inf)
    if not np.isfinite(found).any():
        return None
    best = int(np.argmin(found))
    limit = found[best] + tolerance
    low, open_low = _edge(rates[best::-1], found[best::-1].tolist(), limit)
    high, open_high = _edge(rates[best:], found[best:].tolist(), limit)
    return Basin(low=low, high=high, open_low=open_low, open_high=open_high)


def _edge(rates: Sequence[float], losses: Sequence[float], limit: float) -> tuple[float, bool]:
    """Where the loss first exceeds the limit, and whether it does so only beyond the last rate."""
    for i in range(1, len(rates)):
        if losses[i] > limit:
            if not math.isfinite(losses[i]):
                return rates[i - 1], False
            share = (limit - losses[i - 1]) / (losses[i] - losses[i - 1])
            return rates[i - 1] * (rates[i] / rates[i - 1]) ** share, False
    return rates[-1], True
