"""Whole comparisons of tiny models in this process."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from tiny import ADAMW, short_config

from maxmars.compare.batched_cells import (
    Timing,
    make_batched_step,
    run_cells_together,
    time_both_ways,
)
from maxmars.compare.cell_progress import CellProgress
from maxmars.compare.cells import Cell, CellResult, Contender, finished, read_result
from maxmars.compare.comparison import compare
from maxmars.compare.one_cell import Session, run_cell
from maxmars.compare.programs import ProgramStore
from maxmars.compare.record import Comparison
from maxmars.compare.report_files import write_report
from maxmars.config import EvalConfig, LogConfig
from maxmars.optimizer_config import LionConfig, MarsConfig
from maxmars.preemption import StopRequests
from maxmars.program_cache import ProgramCache
from maxmars.train import train
from maxmars.watchdog import Watchdog

RATES = (1e-3, 4e-3)


def series(workdir, key):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[key] for row in rows if key in row}


def comparison_of(tokens, **changes):
    """AdamW, with a rate that diverges, and Lion; four steps, evaluated at the end alone."""
    config = short_config(tokens, num_steps=4, eval=EvalConfig(every=9, num_windows=16), **changes)
    adamw = Contender(
        name="adamw",
        config=dataclasses.replace(config, optimizer=ADAMW),
        learning_rates=(*RATES, 1e4),
    )
    lion = Contender(
        name="lion",
        config=dataclasses.replace(config, optimizer=LionConfig()),
        learning_rates=RATES,
    )
    return Comparison(contenders=(adamw, lion), baseline="adamw", seeds=(0, 1))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens") / "tokens"


@pytest.fixture(scope="module")
def compared(tmp_path_factory, tokens):
    workdir = tmp_path_factory.mktemp("compared")
    assert compare(comparison_of(tokens), workdir, jax.devices()[:2])
    return workdir


def test_what_a_comparison_leaves_behind(compared):
    assert {p.name for p in compared.iterdir()} == {
        "cells",
        "compare.json",
        "figures",
        "report.html",
        "report.json",
        "report.md",
    }
    names = {p.name for p in (compared / "figures").iterdir()}
    kinds = ("learning_rates", "loss_time", "loss_tokens")
    assert names == {f"{kind}.{suffix}" for kind in kinds for suffix in ("png", "svg")}
    cell = Cell(contender="lion", learning_rate=1e-3, seed=0).directory(compared)
    files = {p.name for p in cell.iterdir()}
    assert files == {"config.json", "environment.json", "metrics.jsonl", "result.json"}


def test_the_report_says_what_was_found(compared):
    report = json.loads((compared / "report.json").read_text())
    adamw, lion = report["outcomes"]
    assert report["num_missing"] == 0
    assert adamw["num_diverged"] == 1
    assert adamw["rates"][2]["losses"] == ["Infinity"]
    assert lion["test"]["difference"]["mean"] == pytest.approx(
        lion["loss"]["mean"] - adamw["loss"]["mean"]
    )
    assert adamw["tokens_to_baseline"] == 4 * 16 * 16  # its own loss, at the end
    assert lion["best_rate_at_edge"] in ("low", "high")
    assert lion["programs"]["optimizer_state_bytes"] < adamw["programs"]["optimizer_state_bytes"]
    assert lion["programs"]["collective_bytes"] > 0
    assert lion["step_time_s"] > 0
    page = (compared / "report.html").read_text()
    assert "Extend the grid: the best rate of lion" in page
    assert page.count("data:image/svg+xml;base64,") == 3
    assert not any(mark in page for mark in ("http:", "https:", "<script", "<link", "@import"))


def test_within_a_seed_all_start_from_the_same_weights_and_read_the_same_tokens(compared):
    for seed in (0, 1):
        values = {
            (series(d, "eval/loss")[0], series(d, "train/loss")[1])
            for name in ("adamw", "lion")
            for d in (compared / "cells" / name).glob(f"*_seed_{seed}")
        }
        assert len(values) == 1


@pytest.mark.slow
def test_a_cell_is_the_run_that_train_makes(compared, tokens, tmp_path):
    lion = comparison_of(tokens).contenders[1]
    cell = Cell(contender="lion", learning_rate=4e-3, seed=0)
    train(cell.config(lion), tmp_path)
    ours = cell.directory(compared)
    for key in ("train/loss", "eval/loss", "train/learning_rate"):
        expected = series(tmp_path, key)
        assert series(ours, key) == pytest.approx(expected, abs=1e-5)  # on another mesh
    assert read_result(cell, compared).loss == series(ours, "eval/loss")[4]


def test_only_unfinished_cells_are_run_again(compared, tokens, capsys):
    cell = Cell(contender="adamw", learning_rate=4e-3, seed=0)
    before = {r.cell: r for n in ("adamw", "lion") for r in finished(compared, n)}
    (cell.directory(compared) / "result.json").unlink()  # as after a kill
    assert compare(comparison_of(tokens), compared, jax.devices()[:2])
    printed = capsys.readouterr().out
    assert f"{len(before) - 1} cells are finished and kept" in printed
    assert printed.count("validation loss") == 1
    after = {r.cell: r for n in ("adamw", "lion") for r in finished(compared, n)}
    assert after.keys() == before.keys()
    assert after[cell].loss == before[cell].loss
    assert all(after[c] == before[c] for c in before if c != cell)


def test_another_config_is_refused(compared, tokens):
    other = comparison_of(tokens, gradient_clip_norm=0.5)
    with pytest.raises(
        ValueError, match=r"its adamw differs in gradient_clip_norm \(1.0 there, 0.5 here\)"
    ):
        compare(other, compared)


def test_contenders_must_be_measured_alike(tokens, tmp_path):
    given = comparison_of(tokens)
    longer = dataclasses.replace(given.contenders[1].config, num_steps=5)
    contenders = (
        given.contenders[0],
        dataclasses.replace(given.contenders[1], config=longer),
    )
    with pytest.raises(ValueError, match="num_steps is 4 there and 5 here"):
        compare(dataclasses.replace(given, contenders=contenders), tmp_path)


def test_a_comparison_that_is_not_finished_is_reported_as_such(compared, tmp_path, tokens):
    given = comparison_of(tokens)
    record = json.loads((compared / "compare.json").read_text())
    (tmp_path / "compare.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"no cell of .* is finished yet"):
        write_report(tmp_path)
    cell = Cell(contender="adamw", learning_rate=1e-3, seed=0)
    there = cell.directory(tmp_path)
    there.mkdir(parents=True)
    for path in cell.directory(compared).iterdir():
        (there / path.name).write_bytes(path.read_bytes())
    summary = write_report(tmp_path)
    assert summary.num_missing == len(given.contenders[0].learning_rates) + len(RATES) - 1
    assert "UNFINISHED" in (tmp_path / "report.md").read_text()


@pytest.fixture
def session(tmp_path):
    """On one device, in this process."""
    with (
        ProgramCache(None, print) as cache,
        Watchdog(None, tmp_path) as watchdog,
        StopRequests() as stops,
        CellProgress() as progress,
    ):
        yield Session(
            workdir=tmp_path,
            programs=ProgramStore(jax.devices()[:1]),
            cache=cache,
            watchdog=watchdog,
            stops=stops,
            progress=progress,
        )


@pytest.mark.slow
def test_cells_together_equal_single_runs_and_nothing_compiles_twice(session, tokens):
    config = short_config(
        tokens,
        num_steps=100,
        optimizer=MarsConfig(variant="shampoo", ns_dtype="float32"),
        eval=EvalConfig(every=50, num_windows=16),
        log=LogConfig(every=1),
    )
    contender = Contender(name="one", config=config, learning_rates=(1e-3, 3e-3))
    cells = [Cell(contender="one", learning_rate=r, seed=s) for s in (0, 1) for r in (1e-3, 3e-3)]
    single = [run_cell(cell, cell.config(contender), session) for cell in cells]
    programs = session.programs.get(config)
    assert programs.train_step.jitted._cache_size() == 1

    alone = [series(cell.directory(session.workdir), "train/loss") for cell in cells[:2]]
    configs = [cell.config(contender) for cell in cells[:2]]
    step = make_batched_step(programs.train_step)
    timing = time_both_ways(configs, programs, step, session)
    together = run_cells_together(cells[:2], configs, programs, step, timing.single_s, session)
    for cell, before, one, several in zip(cells, alone, single, together, strict=False):
        after = series(cell.directory(session.workdir), "train/loss")
        assert list(after) == list(range(1, 101))
        np.testing.assert_allclose(list(after.values()), list(before.values()), rtol=0, atol=1e-5)
        assert several.loss == pytest.approx(one.loss, abs=1e-5)
        assert (one.batch_size, several.batch_size) == (1, 2)
    assert single[0].loss != single[1].loss
    assert single[0].loss != single[2].loss


@pytest.mark.slow
def test_a_cell_that_diverges_does_not_stop_those_beside_it(session, tokens):
    config = short_config(tokens, num_steps=4, eval=EvalConfig(every=2, num_windows=16))
    contender = Contender(name="one", config=config, learning_rates=(1e-3, 1e20))
    cells = [Cell(contender="one", learning_rate=rate, seed=0) for rate in (1e-3, 1e20)]
    configs = [cell.config(contender) for cell in cells]
    programs = session.programs.get(configs[0])
    step = make_batched_step(programs.train_step)
    sound, diverged = run_cells_together(cells, configs, programs, step, 0.1, session)
    assert math.isfinite(sound.loss)
    assert sound.diverged is None
    assert diverged.loss == math.inf
    assert "not finite" in diverged.diverged


def test_both_rates_and_their_ratio_are_printed():
    timing = Timing(num_cells=4, single_s=0.1, batched_s=0.2)
    assert timing.text(num_steps=360) == (
        "100.0 cells/hour one by one, 200.0 by 4 together (ratio 2.00)"
    )
    alone = Timing(num_cells=4, single_s=0.1, batched_s=None)
    assert alone.ratio == 0
    assert "4 together do not fit" in alone.text(num_steps=360)


def test_a_result_survives_its_file(tmp_path):
    cell = Cell(contender="a", learning_rate=1e-3, seed=3)
    result = CellResult(
        cell=cell,
        loss=math.inf,
        diverged="step 3 was skipped",
        step_time_s=None,
        seconds=1.5,
        batch_size=2,
    )
    assert read_result(cell, tmp_path) is None
    result.write(tmp_path)
    assert read_result(cell, tmp_path) == result
