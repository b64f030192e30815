"""What a comparison of made-up losses found."""

import numpy as np
import pytest
import scipy.stats
from tiny import tiny_config

from maxmars.compare.cells import (
    Cell,
    CellResult,
    Comparison,
    Contender,
    open_comparison,
    write_result,
)
from maxmars.compare.curves import Curve
from maxmars.compare.grids import make_grid
from maxmars.compare.report import write_report
from maxmars.compare.sizes import speed_up
from maxmars.compare.statistics import holm
from maxmars.compare.summary import summarize
from maxmars.config import AdamWConfig

CONFIG = tiny_config(optimizer=AdamWConfig(learning_rate=1e-3))
LOSSES = {"a": (3.0, 3.1, 2.9), "b": (2.0, 2.2, 2.1), "c": (2.5, 2.8, 2.2)}


def write(workdir, losses, num_seeds=3):
    """A comparison with these losses of its contenders; one that is None is not finished."""
    grid = make_grid(CONFIG, "learning_rate", (1e-3,))
    assert grid is not None
    comparison = Comparison(
        contenders=tuple(Contender(name=name, config=CONFIG, grids=(grid,)) for name in losses),
        baseline="a",
        seeds=tuple(range(num_seeds)),
        budget=1,
        finalists=1,
    )
    open_comparison(comparison, workdir)
    for name, by_seed in losses.items():
        for seed, loss in enumerate(by_seed):
            if loss is not None:
                write_result(made_up(name, seed, loss), workdir)


def test_every_pair_is_tested_with_holms_method_over_all_pairs(tmp_path):
    write(tmp_path, LOSSES)
    summary = write_report(tmp_path)
    found = {(pair.first, pair.second): pair for pair in summary.pairs}
    assert list(found) == [("b", "c"), ("b", "a"), ("c", "a")]  # the lower mean first
    p = {pair: scipy.stats.ttest_rel(LOSSES[pair[0]], LOSSES[pair[1]]).pvalue for pair in found}
    assert {pair: found[pair].test.p for pair in found} == p
    assert [pair.p_adjusted for pair in found.values()] == holm(list(p.values()))
    page = (tmp_path / "report.md").read_text()
    assert "| b | c | " in page
    assert "| c | a | " in page


def test_with_many_seeds_the_baseline_ends_at_its_own_loss(tmp_path):
    """NumPy sums eight numbers in another order than the points of eight curves."""
    rng, losses = np.random.default_rng(0), np.zeros(8)
    while not np.mean(losses) < np.stack([losses, losses], axis=1).mean(axis=0)[1]:
        losses = rng.uniform(2, 3, 8)
    write(tmp_path, {"a": losses.tolist(), "b": (losses - 0.1).tolist()}, num_seeds=8)
    a, b = (outcome.best for outcome in write_report(tmp_path).outcomes)
    assert a.tokens_to_baseline == 100
    assert b.tokens_to_baseline == pytest.approx(100 * (6 - losses.mean()) / (6.1 - losses.mean()))
    assert "not reached" not in (tmp_path / "report.md").read_text()


def test_the_data_speed_up_pairs_the_runs_of_a_seed(tmp_path):
    write(tmp_path, {"a": (3.0, 2.0, None), "b": (2.9, None, 5.0), "c": (None, None, 2.0)})
    summary = summarize(tmp_path)
    _, b, c = summary.outcomes
    found = speed_up(b, summary)
    assert found.mean == pytest.approx((6 - 2.9) / (6 - 3.0))  # of seed 0; the curves are lines
    assert found.low is None
    assert speed_up(c, summary) is None


def made_up(name: str, seed: int, loss: float) -> CellResult:
    return CellResult(
        cell=Cell(contender=name, setting=(("learning_rate", 1e-3),), seed=seed),
        loss=loss,
        diverged=None,
        step_time_s=0.1,
        seconds=1.0,
        initial_weights="weights",
        tokens="tokens",
        curve=Curve(
            loss_of="validation loss",
            tokens=(0, 100),
            losses=(6.0, loss),
            tokens_per_step=100,
            step_time_s=0.1,
        ),
        train_losses=((1, 6.0),),
        final_state="end",
        environment={},
    )
