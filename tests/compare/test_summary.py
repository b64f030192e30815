"""What a comparison of made-up losses found."""

import dataclasses
import math
import re

import pytest
import scipy.stats
from made_up import change_comparison, made_comparison, made_curve, made_row
from refusals import refused
from tiny import tiny_config

from maxmars import cli
from maxmars.compare.grids import make_grid
from maxmars.compare.report import write_report
from maxmars.compare.statistics import holm
from maxmars.compare.summary import summarize
from maxmars.compare.trials import Trial, open_comparison, write_row
from maxmars.config import AdamWConfig, OptaxConfig

pytestmark = pytest.mark.smoke

CONFIG = tiny_config(optimizer=AdamWConfig(learning_rate=1e-3))
LOSSES = {"a": (3.0, 3.1, 2.9), "b": (2.0, 2.2, 2.1), "c": (2.5, 2.8, 2.2)}


def write(workdir, losses, num_seeds=3, *, with_curves=False):
    """A comparison with these losses of its contenders; one that is None is not finished. Without
    curves no figure is drawn."""
    changes = {} if with_curves else {"curve": None}
    grid = make_grid(CONFIG, "learning_rate", (1e-3,))
    open_comparison(made_comparison(CONFIG, [grid], losses, num_seeds=num_seeds), workdir)
    for name, by_seed in losses.items():
        for seed, loss in enumerate(by_seed):
            if loss is not None:
                write_row(made_up(name, seed, loss, **changes), workdir)


def made_up(name, seed, loss, **changes):
    """The result of a trial whose loss fell from 6 to this."""
    trial = Trial(contender=name, setting=(("learning_rate", 1e-3),), seed=seed)
    return made_row(trial, loss, **{"curve": made_curve(loss), "step_time_s": 0.1} | changes)


def page_of(workdir):
    """The page of its report."""
    write_report({"": summarize(workdir)}, workdir)
    return (workdir / "report.md").read_text()


SEVERAL = "The trials ran on several devices"


def test_every_pair_is_tested_with_holms_method_over_all_pairs(tmp_path):
    write(tmp_path, LOSSES)
    pairs = {(pair.first, pair.second): pair for pair in summarize(tmp_path).pairs}
    assert list(pairs) == [("b", "c"), ("b", "a"), ("c", "a")]  # the lower mean first
    p = {pair: scipy.stats.ttest_rel(LOSSES[pair[0]], LOSSES[pair[1]]).pvalue for pair in pairs}
    assert {pair: pairs[pair].test.p for pair in pairs} == p
    assert [pair.p_adjusted for pair in pairs.values()] == holm(list(p.values()))
    page = page_of(tmp_path)
    assert "| b | c | " in page
    assert "| c | a | " in page
    assert SEVERAL not in page


def test_the_data_speed_up_pairs_the_runs_of_a_seed(tmp_path):
    write(tmp_path, {"a": (3.0, 2.0, None), "b": (2.9, None, 5.0)}, with_curves=True)
    a, b = (outcome.best for outcome in summarize(tmp_path).outcomes)
    assert a.speed_up is None
    gain = b.speed_up
    assert gain.mean == pytest.approx((6 - 2.9) / (6 - 3.0))  # of seed 0; the curves are lines
    assert gain.low is None
    # Contender and baseline exchanged give the inverse.
    change_comparison(tmp_path, lambda fields: fields.update(baseline="b"))
    a, _ = (outcome.best for outcome in summarize(tmp_path).outcomes)
    assert a.speed_up.mean == pytest.approx(1 / gain.mean)


@pytest.mark.usefixtures("without_figures")
def test_the_time_speed_up_counts_the_dearer_step(tmp_path, capsys):
    write(tmp_path, {"a": (3.0,), "b": (2.0,), "c": (4.5,)}, num_seeds=1, with_curves=True)
    write_row(made_up("b", 0, 2.0, step_time_s=0.2), tmp_path)
    write_row(made_up("c", 0, 4.5, step_time_s=0.07), tmp_path)
    cli.main(["report", str(tmp_path)])
    printed, page = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    for name, tokens, seconds in (("a", "–", "–"), ("b", "1.33", "0.67"), ("c", "0.50", "0.71")):
        row, *_ = re.findall(rf"^{name} .*", printed, re.MULTILINE)
        assert row.replace("x", "").split()[-3:-1] == [tokens, seconds]
        assert re.search(rf"\| {name} .* \| {tokens} \| {seconds} \| 0 of 1 \|\n", page)
    write_row(made_up("a", 0, 3.0, step_time_s=None), tmp_path)
    assert "| 1.33 | – |" in page_of(tmp_path)  # no step of the baseline was timed


def test_with_unequal_numbers_of_seeds_the_common_ones_decide_which_is_lower(tmp_path):
    losses = {"a": (3.0, 3.1, 2.9), "b": (2.9, 3.0, None), "c": (2.8, 2.9, 3.4)}
    write(tmp_path, losses, with_curves=True)
    summary = summarize(tmp_path)
    assert {(pair.first, pair.second) for pair in summary.pairs} == {
        ("b", "a"),
        ("a", "c"),  # of all seeds
        ("c", "b"),  # of the first two, though its mean of three is higher
    }
    _, b, _ = summary.outcomes
    assert b.best.speed_up.mean == pytest.approx(math.sqrt((6 - 2.9) / (6 - 3.1)))  # of these two


def test_what_diverged_so_far_has_not_diverged_at_every_setting(tmp_path):
    write(tmp_path, {"a": (3.0, 3.1, 2.9), "b": (None, None, None)})
    write_row(made_up("b", 0, math.inf, diverged="rose by 0.6", curve=None), tmp_path)
    lower = "b diverged at every setting: give it lower rates."
    assert lower in page_of(tmp_path)  # at the one that there is

    def scan_two(fields):
        fields["compared"]["b"][0] |= {"values": [5e-4, 1e-3], "scanned": [5e-4, 1e-3]}
        fields["budget"] = 2

    change_comparison(tmp_path, scan_two)
    text = page_of(tmp_path)
    assert "UNFINISHED" in text
    assert lower not in text


def test_trials_of_several_devices_are_told_apart(tmp_path):
    write(tmp_path, LOSSES)
    for name, kind in (("a", "H100"), ("b", "H200")):
        environment = {"num_devices": 1, "device_kinds": [kind], "jax": "0.11.0"}
        row = made_up(name, 0, LOSSES[name][0], environment=environment, curve=None)
        write_row(row, tmp_path)
    text = page_of(tmp_path)
    assert SEVERAL in text
    assert "1 x H100: a; 1 x H200: b." in text


def test_one_of_several_comparisons_that_is_unfinished_is_told_as_such(tmp_path, capsys):
    small, large = tmp_path / "small", tmp_path / "large"
    write(small, LOSSES)
    write(large, LOSSES | {"b": (2.0, None, None)})
    cli.main(["report", str(small), str(large), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert printed.index("comparison large") < printed.index("missing, 2 ")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "small: UNFINISHED" not in page
    assert re.search("large: UNFINISHED.* 2 ", page)
    assert "2.0000 (1 of 3 seeds)" in page
    assert "| large | c | learning_rate=0.001" in page


def test_the_seeds_that_would_find_a_small_difference_are_one_sentence(tmp_path):
    write(tmp_path, LOSSES)
    needed = {o.contender.name: o.best.seeds_needed for o in summarize(tmp_path).outcomes}
    assert needed["a"] is None
    (line,) = [text for text in page_of(tmp_path).splitlines() if text.startswith("Seeds that")]
    assert f"{needed['b']:,} (b)" in line
    assert f"{needed['c']:,} (c)" in line


def test_the_same_file_of_an_own_optimizer_may_have_another_path(tmp_path, monkeypatch):
    own = tmp_path / "own.py"
    own.write_text("def make(learning_rate): ...\n")
    monkeypatch.chdir(tmp_path)

    def opened(path):
        optimizer = OptaxConfig(make=f"{path}:make", learning_rate=1e-3)
        config = dataclasses.replace(CONFIG, optimizer=optimizer)
        open_comparison(made_comparison(config, (), ["own"]), tmp_path / "compared")

    opened("own.py")
    opened(own)
    (tmp_path / "other.py").write_text("def make(learning_rate): return None\n")
    with refused(ValueError, "optimizer.make", f"{own}:make", "other.py:make"):
        opened("other.py")
