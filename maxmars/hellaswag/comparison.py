"""Is one model better than another on the same questions? Paired, as the scores are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

_RESAMPLES = 100_000


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The difference of two accuracies on the same questions."""

    difference: float
    """First minus second."""
    interval_95: tuple[float, float]
    """Bootstrap interval of the difference: questions are drawn with replacement."""
    mcnemar_p: float
    """How likely so uneven a split of the questions that only one of the two answers rightly is
    between equally good models: McNemar's test, exact and two-sided."""
    only_first: int
    """Questions that only the first answers rightly."""
    only_second: int
    """Questions that only the second answers rightly."""


def compare(
    first: Bool[np.ndarray, " questions"],
    second: Bool[np.ndarray, " other"],
    *,
    seed: int = 0,
) -> PairedDifference:
    """Compare which questions two models answer rightly.

    Args:
      first: whether the first model answers each question rightly.
      second: the same of the second model.
      seed: of the bootstrap's draws.

    Raises:
      ValueError: the two are not of the same length, or empty.
    """
    count = len(first)
    if len(second) != count or not count:
        raise ValueError(
            f"{count} and {len(second)} questions cannot be paired; score both models on the same."
        )
    only_first = int((first & ~second).sum())
    only_second = int((second & ~first).sum())
    # Each question adds 1, -1 or 0 to the difference, so a resample is a multinomial draw.
    shares = np.array([only_first, only_second, count - only_first - only_second]) / count
    draws = np.random.default_rng(seed).multinomial(count, shares, _RESAMPLES)
    low, high = np.quantile((draws[:, 0] - draws[:, 1]) / count, (0.025, 0.975))
    return PairedDifference(
        difference=(only_first - only_second) / count,
        interval_95=(float(low), float(high)),
        mcnemar_p=_mcnemar(only_first, only_second),
        only_first=only_first,
        only_second=only_second,
    )


def _mcnemar(only_first: int, only_second: int) -> float:
    """Twice the smaller tail of a binomial of probability 1/2, which is 1 at most."""
    count = only_first + only_second
    log_terms = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        for k in range(min(only_first, only_second) + 1)
    ]
    tail = math.fsum(math.exp(term - count * math.log(2)) for term in log_terms)
    return min(1.0, 2 * tail)
