"""The statistics on numbers whose answers are known, and on runs that are made up."""

import functools
import math

import numpy as np
import pytest
import scipy.stats
from made_up import made_comparison, made_row
from refusals import refused
from tiny import tiny_config

from maxmars.compare.grids import make_grid
from maxmars.compare.search import Search, next_trials
from maxmars.compare.statistics import (
    first_crossing,
    holm,
    mean_interval,
    paired_test,
    seeds_needed,
)

CONFIG = tiny_config()


def test_intervals_and_paired_tests_are_students():
    values = mean_interval([1.0, 2.0, 3.0])
    assert values.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # of the table
    assert mean_interval([1.5]).low is None
    first, second = np.random.default_rng(0).normal(size=(2, 5)).tolist()
    expected, test = scipy.stats.ttest_rel(first, second), paired_test(first, second)
    assert test.p == pytest.approx(expected.pvalue, rel=1e-9)
    low, high = expected.confidence_interval(0.95)
    assert (test.difference.low, test.difference.high) == pytest.approx((low, high))
    # Pairs that do not vary.
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


OPTIMA = {"learning_rate": 3.1e-3, "weight_decay": 0.04, "b1": 0.87, "b2": 0.94}


@functools.cache
def grid_of(field):
    return make_grid(CONFIG, field)


def losses_made_up(rng, gains, fields, noise, **options):
    """Losses by seed of made-up contenders at their best settings, tuned as real ones are.

    All have the same bowl of losses over the fields, but for their gains. Every seed moves all
    losses alike; `noise` is what each run adds of its own.
    """
    names = [f"c{i}" for i in range(len(gains))]
    compared = made_comparison(CONFIG, map(grid_of, fields), names, finalists=2, **options)
    of_seed = rng.normal(0, 0.03, len(compared.seeds))
    own = {field: getattr(CONFIG.optimizer, field) for field in OPTIMA}
    results = {}
    while trials := next_trials(compared, results):
        for trial in trials:
            at = own | dict(trial.setting)
            distances = (
                0.05 * math.log2(at["learning_rate"] / OPTIMA["learning_rate"]) ** 2,
                0.005 * math.log((at["weight_decay"] + 1e-4) / OPTIMA["weight_decay"], 3) ** 2,
                0.02 * math.log2((1 - at["b1"]) / (1 - OPTIMA["b1"])) ** 2,
                0.01 * math.log2((1 - at["b2"]) / (1 - OPTIMA["b2"])) ** 2,
            )
            loss = 1.75 + sum(distances) + of_seed[trial.seed] + rng.normal(0, noise)
            loss -= gains[names.index(trial.contender)]
            results[trial] = made_row(trial, loss)
    searches = [Search(contender, compared, results) for contender in compared.contenders]
    return [search.losses_at(search.best) for search in searches]


@pytest.mark.seconds
def test_planted_differences_are_detected():
    rng = np.random.default_rng(1)
    p_values = []
    for _ in range(30):
        baseline, *others = losses_made_up(
            rng, (0.0, 0.05, -0.05), ["learning_rate"], noise=0.004, budget=6
        )
        tests = [paired_test(losses, baseline) for losses in others]
        assert tests[0].difference.mean < 0 < tests[1].difference.mean
        p_values.append(holm([test.p for test in tests]))
    assert (np.mean(np.array(p_values) < 0.05, axis=0) > 0.9).all()


@pytest.mark.slow
def test_two_searches_over_several_fields_rarely_tell_identical_optimizers_apart():
    rng = np.random.default_rng(0)
    p_values = [
        paired_test(
            *losses_made_up(rng, (0, 0), OPTIMA, noise=0.008, num_seeds=5, budget=80, confirm=3)
        ).p
        for _ in range(60)
    ]
    # 0.067 of 300; where a budget of 28 ends all searches, 0.28 of them are told apart.
    assert np.mean([p < 0.05 for p in p_values]) < 0.12
