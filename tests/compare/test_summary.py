"""What a comparison of made-up losses found."""

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
from maxmars.config import AdamWConfig

CONFIG = tiny_config(optimizer=AdamWConfig(learning_rate=1e-3))
LOSSES = {"a": (3.0, 3.1, 2.9), "b": (2.0, 2.2, 2.1), "c": (2.5, 2.8, 2.2)}


def test_every_pair_is_tested_with_holms_method_over_all_pairs(tmp_path):
    grid = make_grid(CONFIG, "learning_rate", (1e-3,))
    assert grid is not None
    comparison = Comparison(
        contenders=tuple(Contender(name=name, config=CONFIG, grids=(grid,)) for name in LOSSES),
        baseline="a",
        seeds=(0, 1, 2),
        budget=1,
        finalists=1,
    )
    open_comparison(comparison, tmp_path)
    for name, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            write_result(made_up(name, seed, loss), tmp_path)
    summary = write_report(tmp_path)
    found = {(pair.first, pair.second): pair for pair in summary.pairs}
    assert list(found) == [("b", "c"), ("b", "a"), ("c", "a")]  # the lower mean first
    p = {pair: scipy.stats.ttest_rel(LOSSES[pair[0]], LOSSES[pair[1]]).pvalue for pair in found}
    for rank, pair in enumerate(sorted(p, key=lambda pair: p[pair])):
        assert found[pair].test.p == p[pair]
        assert found[pair].p_adjusted >= (3 - rank) * p[pair] or found[pair].p_adjusted == 1
    page = (tmp_path / "report.md").read_text()
    assert "| b | c | " in page
    assert "| c | a | " in page


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
