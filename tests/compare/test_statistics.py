"""The statistics on numbers whose answers are known, and on runs that are made up."""

import math

import numpy as np
import pytest
import scipy.stats
from made_up import cell_result
from refusals import refused
from tiny import tiny_config

from maxmars.compare.cells import Comparison, Contender
from maxmars.compare.grids import make_grid
from maxmars.compare.search import best_setting, losses_at, next_cells
from maxmars.compare.statistics import (
    basin,
    first_crossing,
    holm,
    mean_interval,
    paired_test,
    seeds_needed,
)

INF, CONFIG = math.inf, tiny_config()


def test_an_interval_from_the_table():
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.low == pytest.approx(4.0 - found.high)
    assert mean_interval([1.5]).low is None


def test_the_paired_test_is_students():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 5)).tolist()
    expected = scipy.stats.ttest_rel(first, second)
    found = paired_test(first, second)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    low, high = expected.confidence_interval(0.95)
    assert (found.difference.low, found.difference.high) == pytest.approx((low, high))


def test_pairs_that_do_not_vary():
    assert paired_test([1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert paired_test([1.5, 2.5], [1.0, 2.0]).p == 0.0
    assert paired_test([1.0], [2.0]) is None
    with refused(ValueError, "3 and 2"):
        paired_test([1.0, 2.0, 3.0], [1.0, 2.0])


def test_the_seeds_that_a_difference_needs():
    spread = [0.99, 1.01]  # its standard deviation is 0.0141
    n = seeds_needed(spread, 0.02)
    rng = np.random.default_rng(0)
    power = {
        seeds: np.mean(scipy.stats.ttest_1samp(pairs, 0.0, axis=1).pvalue < 0.05)
        for seeds in (n - 1, n)
        for pairs in [rng.normal(0.02, np.std(spread, ddof=1), size=(40_000, seeds))]
    }
    assert power[n - 1] < 0.8 <= power[n] + 0.006  # three standard errors
    assert seeds_needed(spread, 0.002) > 100 * n / 2
    assert seeds_needed([1.0], 0.01) is None
    assert seeds_needed([1.0, 1.0], 0.01) == 2
    assert seeds_needed([0.0, 1.0], 1e-6) is None


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@pytest.mark.parametrize(
    ("target", "expected"),
    [(3.5, 50.0), (3.0, 100.0), (2.5, 150.0), (2.0, 200.0), (1.9, None), (4.0, 0.0), (9.0, 0.0)],
)
def test_where_a_curve_comes_down_to_a_loss(target, expected):
    assert first_crossing([0.0, 100.0, 200.0, 300.0], [4.0, 3.0, 2.0, 2.2], target) == expected


def test_the_width_of_a_basin():
    rates = [1e-3, 2e-3, 4e-3, 8e-3]
    found = basin(rates, [3.0, 2.0, 2.1, 2.3], 0.2)
    assert found.low == pytest.approx(2e-3 * 2**-0.2)
    assert found.high == pytest.approx(4e-3 * 2**0.5)
    assert (found.open_low, found.open_high) == (False, False)
    found = basin(rates, [INF, 2.1, 2.0, 2.1], 0.2)
    assert (found.low, found.open_low, found.high, found.open_high) == (2e-3, False, 8e-3, True)
    assert found.factor == 4
    assert basin(rates, [INF] * 4, 0.2) is None


def compare_made_up(rng, gains, *, num_seeds=3, noise=0.004):
    """Adjusted p and differences of made-up contenders, tuned and tested as real ones are.

    Every seed moves all losses alike, by much; `noise` is what each run adds of its own.
    """
    rates = make_grid(CONFIG, "learning_rate", (1e-3, 2e-3, 4e-3, 8e-3))
    compared = Comparison(
        contenders=tuple(
            Contender(name=f"c{i}", config=CONFIG, grids=(rates,)) for i in range(len(gains))
        ),
        baseline="c0",
        seeds=tuple(range(num_seeds)),
        budget=6,
        finalists=2,
    )
    results = {}
    of_seed = rng.normal(0, 0.05, num_seeds)
    while cells := next_cells(compared, results):
        for cell in cells:
            bowl = 0.04 * math.log2(dict(cell.setting)["learning_rate"] / 2.5e-3) ** 2
            loss = 2.0 + bowl - gains[int(cell.contender[1:])] + of_seed[cell.seed]
            results[cell] = cell_result(cell, loss + rng.normal(0, noise))
    at_best = [
        losses_at(c, best_setting(c, compared, results), compared, results)
        for c in compared.contenders
    ]
    tests = [paired_test(losses, at_best[0]) for losses in at_best[1:]]
    return holm([t.p for t in tests]), [t.difference.mean for t in tests]


@pytest.mark.seconds
def test_planted_differences_are_detected():
    rng = np.random.default_rng(1)
    found = [compare_made_up(rng, (0.0, 0.05, -0.05)) for _ in range(30)]
    better, worse = np.array([p for p, _ in found]).T
    assert np.mean(better < 0.05) > 0.9
    assert np.mean(worse < 0.05) > 0.9
    assert all(differences[0] < 0 < differences[1] for _, differences in found)


@pytest.mark.slow
def test_where_there_is_no_difference_one_is_rarely_found():
    rng = np.random.default_rng(2)
    noise = rng.normal(size=(1500, 2, 3)).tolist()
    wrong = np.mean([paired_test(*pair).p < 0.05 for pair in noise])
    assert 0.04 < wrong < 0.06  # its standard error is 0.006
    # The choice of the best rate by the same losses does not change that, nor do more contenders.
    wrong = np.mean([min(compare_made_up(rng, (0.0,) * 3)[0]) < 0.05 for _ in range(100)])
    assert wrong < 0.12  # at most 0.05; its standard error is 0.022


@pytest.mark.slow
def test_two_searches_over_several_fields_rarely_tell_identical_optimizers_apart():
    rng = np.random.default_rng(0)
    found = [compare_identical(rng) for _ in range(100)]
    # 0.067 of 300; where a budget of 28 ends all searches, 0.28 of them are told apart.
    assert np.mean([p < 0.05 for p in found]) < 0.12


def compare_identical(rng, *, budget=80, confirm=3, num_seeds=5, noise=0.008):
    """p of two searches with the same bowl of losses over four fields, whose noise differs."""
    fields = ("learning_rate", "weight_decay", "b1", "b2")
    compared = Comparison(
        contenders=tuple(
            Contender(
                name=name, config=CONFIG, grids=tuple(make_grid(CONFIG, field) for field in fields)
            )
            for name in ("one", "other")
        ),
        baseline="one",
        seeds=tuple(range(num_seeds)),
        budget=budget,
        confirm=confirm,
        finalists=2,
    )
    of_seed = rng.normal(0, 0.01, num_seeds)
    own = {field: getattr(CONFIG.optimizer, field) for field in fields}
    results = {}
    while cells := next_cells(compared, results):
        for cell in cells:
            at = own | dict(cell.setting)
            distances = (
                0.05 * math.log2(at["learning_rate"] / 3.1e-3) ** 2,
                0.005 * math.log((at["weight_decay"] + 1e-4) / 0.04, 3) ** 2,
                0.02 * math.log2((1 - at["b1"]) / 0.13) ** 2,
                0.01 * math.log2((1 - at["b2"]) / 0.06) ** 2,
            )
            loss = 1.75 + sum(distances) + of_seed[cell.seed] + rng.normal(0, noise)
            results[cell] = cell_result(cell, loss)
    one, other = (
        losses_at(c, best_setting(c, compared, results), compared, results)
        for c in compared.contenders
    )
    return paired_test(one, other).p


def test_intervals_hold_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(3)
    found = [mean_interval(values) for values in rng.normal(size=(1500, 3)).tolist()]
    assert np.mean([i.low < 0 < i.high for i in found]) == pytest.approx(0.95, abs=0.015)
