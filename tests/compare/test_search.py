"""Which trials are run, on losses that are made up."""

import math

import pytest
from made_up import made_comparison, made_row, made_rows
from refusals import refused
from tiny import tiny_config

from maxmars.compare.grids import make_grid, value_of, with_values
from maxmars.compare.search import Search, next_trials
from maxmars.compare.trials import Trial
from maxmars.config import AdamWConfig, MuonConfig, OptaxConfig, ScheduleConfig

pytestmark = pytest.mark.smoke

GRID = (1e-3, 2e-3, 4e-3, 8e-3)
CONFIG = tiny_config(optimizer=AdamWConfig(learning_rate=2e-3, b1=0.9, weight_decay=0.1))


def comparison(fields=("learning_rate",), *, names=("a",), budget=8, **changes):
    grids = [make_grid(CONFIG, f, GRID if f == "learning_rate" else ()) for f in fields]
    return made_comparison(CONFIG, grids, names, budget=budget, **changes)


def run(compared, loss):
    """The trials that are asked for, in their order, and all results."""
    results = made_rows(compared, lambda trial: made_row(trial, loss(trial)))
    return list(results), results


def search_of(compared, results):
    """The search of the first contender, after these results."""
    return Search(compared.contenders[0], compared, results)


def rate_of(trial):
    return dict(trial.setting)["learning_rate"]


def bowl(trial, best=2e-3):
    return 2.0 + math.log2(rate_of(trial) / best) ** 2 + 0.01 * trial.seed


def valley(trial):
    """A valley along which the best rate falls with b1, at its lowest for b1=0.98."""
    values = {"learning_rate": 2e-3, "b1": 0.9, "weight_decay": 0.1} | dict(trial.setting)
    b1 = math.log2((1 - values["b1"]) / 0.02)
    rate = math.log2(values["learning_rate"] / 1e-3)
    return 2.0 + (rate - 0.5 * b1) ** 2 + 0.1 * b1**2 + 0.01 * trial.seed


def test_a_scan_then_seeds_at_the_best_rate():
    compared = comparison()
    asked, results = run(compared, bowl)
    # The search ends after four trials, of its eight; then come the two other seeds.
    for finished, left in ((0, 8 + 2), (3, 5 + 2), (4, 2), (6, 0)):
        so_far = {trial: results[trial] for trial in asked[:finished]}
        assert search_of(compared, so_far).most_trials_left == left
    assert [(rate_of(c), c.seed) for c in asked[:4]] == [(rate, 0) for rate in GRID]
    assert {(rate_of(c), c.seed) for c in asked[4:]} == {(2e-3, 1), (2e-3, 2)}
    assert search_of(compared, results).best == (("learning_rate", 2e-3),)


def test_a_grid_is_extended_as_long_as_the_loss_falls_and_the_budget_lasts():
    asked, _ = run(comparison(num_seeds=1), lambda trial: bowl(trial, 3.2e-2))
    assert [rate_of(trial) for trial in asked[4:]] == [1.6e-2, 3.2e-2, 6.4e-2]
    short = comparison(num_seeds=1, budget=5)
    asked, results = run(short, lambda trial: bowl(trial, 3.2e-2))
    assert [rate_of(trial) for trial in asked[4:]] == [1.6e-2]
    assert search_of(short, results).untried == ((("learning_rate", 3.2e-2),),)
    asked, _ = run(comparison(num_seeds=1), lambda trial: bowl(trial, 5e-4))
    assert {rate_of(trial) for trial in asked[4:]} == {5e-4, 2.5e-4}


def test_fields_are_moved_one_after_the_other_and_with_the_rate():
    fields = ("learning_rate", "b1", "weight_decay")
    compared = comparison(fields, num_seeds=1, budget=60)
    asked, results = run(compared, valley)
    search = search_of(compared, results)
    assert dict(search.best) == {"learning_rate": 1e-3, "b1": 0.98}
    assert search.untried == search.missing == ()
    assert len(asked) == len(set(asked)) < 40
    # The same search with a smaller budget is its beginning.
    assert run(comparison(fields, num_seeds=1, budget=12), valley)[0] == asked[:12]


def test_every_contender_has_the_same_budget():
    fields = ("learning_rate", "b1", "weight_decay")
    compared = comparison(fields, names=("a", "b", "c"), budget=9, finalists=2)
    asked, _ = run(compared, lambda trial: valley(trial) + 0.1 * (trial.contender == "b"))
    assert [trial.contender for trial in asked[:12]] == ["a", "b", "c"] * 4  # they take turns
    for name in ("a", "b", "c"):
        assert sum(trial.contender == name for trial in asked) == 9 + 2 * 2


def test_a_finalist_that_one_seed_cannot_tell_apart_may_win():
    def loss(trial):
        if trial.seed == 0:
            return bowl(trial, 2e-3 * 2**0.49)  # 2e-3 is better by a hair
        return bowl(trial, 4e-3) + 0.2 * trial.seed

    compared = comparison(finalists=2)
    asked, results = run(compared, loss)
    assert {rate_of(trial) for trial in asked if trial.seed > 0} == {2e-3, 4e-3}
    assert search_of(compared, results).best == (("learning_rate", 4e-3),)


def test_the_search_goes_on_around_a_finalist_that_wins_with_all_seeds():
    def loss(trial):
        b1 = dict(trial.setting).get("b1", 0.9)
        lucky = 0.03 if trial.seed == 0 and b1 == 0.9 else 0.0
        return bowl(trial) + abs(b1 - 0.98) / 4 - lucky

    compared = comparison(("learning_rate", "b1"), budget=40, finalists=2)
    asked, results = run(compared, loss)
    best = search_of(compared, results).best
    assert dict(best) == {"learning_rate": 2e-3, "b1": 0.98}
    assert search_of(compared, results).is_at_its_end
    tried = {(rate_of(c), dict(c.setting).get("b1", 0.9)) for c in asked}
    assert tried >= {(rate, b1) for rate in (1e-3, 2e-3, 4e-3) for b1 in (0.95, 0.98, 0.99)}
    # A finalist that lacks a seed is not the end.
    trial = Trial(contender="a", setting=best, seed=2)
    short = {c: r for c, r in results.items() if c != trial}
    assert next_trials(compared, short) == [trial]
    assert not search_of(compared, short).is_at_its_end
    # The budget may be too small for it.
    small = comparison(("learning_rate", "b1"), budget=12, finalists=2)
    _, results = run(small, loss)
    assert search_of(small, results).untried


def test_a_setting_that_ran_with_all_seeds_is_not_displaced_by_luckier_ones():
    """Its neighbour is lucky with the first seed, and so comes before it among the finalists."""
    by_setting = {  # with the first seed, and with the others
        (2e-3, 0.9): (2.0, 2.3),
        (4e-3, 0.9): (2.01, 2.0),
        (8e-3, 0.95): (1.9, 2.4),
    }

    def loss(trial):
        losses = by_setting.get((rate_of(trial), dict(trial.setting).get("b1", 0.9)), (2.5, 2.5))
        return losses[min(trial.seed, 1)]

    compared = comparison(("learning_rate", "b1"), budget=40, finalists=2)
    asked, results = run(compared, loss)
    lucky = (("learning_rate", 8e-3), ("b1", 0.95))
    assert {trial.seed for trial in asked if trial.setting == lucky} == {0, 1, 2}
    assert dict(search_of(compared, results).best) == {"learning_rate": 4e-3}
    assert search_of(compared, results).is_at_its_end


def on_the_edge(trial):
    """The higher the rate the better, but above 2e-3 each other seed goes wrong."""
    values = {"b1": 0.9} | dict(trial.setting)
    lucky = rate_of(trial) <= 2e-3 or trial.seed % 2 == 0
    return (1.0 if lucky else 1.4) - 10 * rate_of(trial) + abs(values["b1"] - 0.8)


def test_a_setting_that_was_lucky_with_one_seed_is_not_confirmed():
    fields = ("learning_rate", "b1")
    compared = comparison(fields, num_seeds=5, budget=30, confirm=3)
    asked, results = run(compared, on_the_edge)
    best = search_of(compared, results).best
    assert dict(best) == {"learning_rate": 2e-3, "b1": 0.8}
    assert sorted(trial.seed for trial in asked if trial.setting == best) == [0, 1, 2, 3, 4]
    # Only what may be better than the best setting so far runs with more seeds.
    repeated = {trial.setting for trial in asked if trial.seed > 0}
    assert len(repeated) < len({trial.setting for trial in asked}) / 2
    # Their trials are of the budget.
    short = comparison(num_seeds=5, budget=6, confirm=3)
    asked, results = run(short, on_the_edge)
    assert [(rate_of(c), c.seed) for c in asked[4:6]] == [(8e-3, 1), (8e-3, 2)]
    assert search_of(short, results).untried == ((("learning_rate", 4e-3),),)
    # One seed alone is taken in.
    alone = comparison(fields, num_seeds=5, budget=30)
    _, results = run(alone, on_the_edge)
    assert dict(search_of(alone, results).best)["learning_rate"] > 2e-3


def test_another_field_keeps_the_trials_so_far():
    _, results = run(comparison(), bowl)
    trials = next_trials(comparison(("learning_rate", "b1"), budget=20), results)
    assert [dict(trial.setting) for trial in trials] == [
        {"learning_rate": 2e-3, "b1": 0.8},
        {"learning_rate": 2e-3, "b1": 0.95},
    ]


def test_trials_that_a_search_with_other_options_left_may_win():
    fields = ("learning_rate", "b1", "weight_decay")
    _, left = run(comparison(fields, num_seeds=1, budget=60), valley)
    best = search_of(comparison(fields, num_seeds=1), left).best
    short = comparison(fields, num_seeds=2, budget=4)
    asked = next_trials(short, left)
    assert best not in search_of(short, left).requested
    assert asked == [Trial(contender="a", setting=best, seed=1)]


def test_where_rates_diverge_the_search_goes_down():
    compared = comparison(budget=12)
    asked, results = run(compared, lambda c: math.inf if rate_of(c) > 3e-4 else bowl(c))
    assert search_of(compared, results).best == (("learning_rate", 2.5e-4),)
    compared = comparison(budget=7)
    asked, results = run(compared, lambda _: math.inf)
    assert len(asked) == 7
    assert search_of(compared, results).best is None
    asked, results = run(comparison(("b1",), budget=3), lambda _: math.inf)  # no rate is tuned
    assert len(asked) == len(results) == 3


def test_a_best_rate_that_diverges_with_another_seed_loses():
    def loss(trial):
        return math.inf if (rate_of(trial), trial.seed) == (2e-3, 1) else bowl(trial)

    compared = comparison()
    asked, results = run(compared, loss)
    ((_, rate),) = search_of(compared, results).best
    assert rate in (1e-3, 4e-3)
    assert {trial.seed for trial in asked if rate_of(trial) == rate} == {0, 1, 2}


def test_losses_that_are_all_equal_come_to_an_end():
    asked, _ = run(comparison(("learning_rate", "b1"), budget=50), lambda _: 2.0)
    assert len(asked) <= 4 + 1 + 2 + 4 + 2


def own_optimizer(**options):
    return OptaxConfig(make="f.py:g", learning_rate=1e-3, options=options)


@pytest.mark.parametrize(
    ("optimizer", "field", "given", "near"),
    [
        (AdamWConfig(b2=0.97), "b2", (), (0.95, 0.97, 0.98)),
        (AdamWConfig(b1=0.9), "b1", (0.9, 0.95), (0.8, 0.9, 0.95, 0.975)),
        (AdamWConfig(weight_decay=0.1), "weight_decay", (), (0.0111, 0.0333, 0.1, 0.3)),
        (AdamWConfig(weight_decay=0.0), "weight_decay", (), (0.0, 0.0333, 0.1, 0.3)),
        (AdamWConfig(), "weight_decay", (0.1, 0.2), (0.05, 0.1, 0.2, 0.4)),
        (AdamWConfig(), "warmup", (), (0, 12, 25, 50, 100, 200)),
        (MuonConfig(), "momentum", (), (0.9, 0.95, 0.98)),
        (own_optimizer(b3=0.9999), "b3", (), (0.999, 0.9995, 0.9998, 0.9999)),
        (own_optimizer(k=4), "k", (), (2, 4, 8)),
        (own_optimizer(beta_2=0.5), "beta_2", (0.5, 0.9), (0.5, 0.9, 0.98)),
        (own_optimizer(alpha=0.9), "alpha", (), (0.45, 0.9, 1.8)),
    ],
)
def test_the_values_of_a_field(optimizer, field, given, near):
    schedule = ScheduleConfig(warmup_steps=50)
    config = tiny_config(optimizer=optimizer, num_steps=500, schedule=schedule)
    values = make_grid(config, field, given).values
    assert list(values) == sorted(set(values))
    start = values.index(near[0])
    assert values[start : start + len(near)] == near
    if field.startswith("b"):
        assert 0 <= min(values) <= max(values) < 1
    for value in values:  # the config takes them all
        assert value_of(with_values(config, {field: value}), field) == value


def test_a_grid_begins_where_another_comparison_ended():
    rates = make_grid(CONFIG, "learning_rate", start=0.004)
    assert rates.scanned == (0.002, 0.004, 0.008)
    decay = make_grid(CONFIG, "b1", start=0.985)
    assert decay.scanned == (0.985,)
    assert decay.values[decay.values.index(0.985) - 1] == 0.98
    assert make_grid(CONFIG, "weight_decay", start=0.0).scanned == (0.0,)
    # A contender without the field has no grid of it.
    assert make_grid(tiny_config(optimizer=MuonConfig()), "b1") is None


@pytest.mark.parametrize(
    ("optimizer", "field", "given", "named"),
    [
        (CONFIG.optimizer, "b1", (0.9, 1.5), "b1=1.5"),
        (CONFIG.optimizer, "warmup", (2.5,), "warmup=2.5"),
        (own_optimizer(b1=0.9), "b1", (0.9, 1.0), "b1=1"),
        (own_optimizer(alpha=1.0), "alpha", (-1.0, 1.0), "alpha=-1"),
    ],
)
def test_values_that_a_contender_refuses(optimizer, field, given, named):
    with refused(ValueError, named):
        make_grid(tiny_config(optimizer=optimizer), field, given)
