"""The table and the figure of the continuum, of losses that are made up."""

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

from maxmars.compare.cells import (
    Cell,
    CellResult,
    Comparison,
    Contender,
    open_comparison,
    write_result,
)
from maxmars.compare.curves import Curve
from maxmars.compare.grids import Grid
from maxmars.config import load_config

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SPREAD = (0.0, 0.02, -0.01)  # by seed


def write(root, name, losses, *, steps=1024, tokens="tokens", rates=(4e-3,), seeds=3):
    """A finished comparison with these losses of its arms, and a small one of the seed's own."""
    contenders = []
    for choice in losses:
        config = load_config(f"{TOOLS / 'examples' / 'continuum.py'}:optimizer={choice}")
        config = dataclasses.replace(config, num_steps=steps)
        grids = tuple(
            Grid(field=field, values=values, scanned=values[:1])
            for field, values in (("learning_rate", rates), ("b1", (0.8,)))
        )
        contenders.append(Contender(name=choice, config=config, grids=grids))
    comparison = Comparison(
        contenders=tuple(contenders),
        baseline=next(iter(losses)),
        seeds=(0, 1, 2),
        budget=1,
        finalists=1,
    )
    open_comparison(comparison, root / name)
    for choice, (loss, own) in losses.items():
        for seed, spread in enumerate(SPREAD[:seeds]):
            cell = Cell(contender=choice, setting=SETTING, seed=seed)
            loss_of_seed = loss + spread + own * seed
            write_result(made_up(cell, loss_of_seed, tokens), root / name)


SETTING = (("learning_rate", 4e-3), ("b1", 0.8))


def made_up(cell, loss, tokens):
    return CellResult(
        cell=cell,
        loss=loss,
        diverged=None,
        step_time_s=0.1,
        seconds=1.0,
        initial_weights="weights",
        tokens=f"{tokens} {cell.seed}",
        curve=Curve(
            loss_of="validation loss",
            steps=(0, 1),
            tokens=(0, 100),
            losses=(5.0, loss),
            step_time_s=0.1,
        ),
        train_losses=(),
        final_state=None,
        environment={},
    )


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import continuum_report

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["continuum_report.py", *map(str, arguments)])
        continuum_report.main()

    return run


def test_every_arm_is_set_against_nadamw_of_its_batch_and_steps(tool, tmp_path, capsys):
    base = {"nesterov-g2": (1.7, 0), "0": (1.8, 1e-3), "0.025-c2": (1.75, 2e-3)}
    write(tmp_path, "tuned", base)
    write(tmp_path, "clip", {"0.025-c2-clip": (1.6, 1e-3)})
    longer = {"nesterov-g2": (1.4, 0), "0.025-c2": (1.3, 1e-3)}
    write(tmp_path, "longer", longer, steps=4096)
    tool(tmp_path, "--figure", tmp_path / "figure.png")
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| γ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[1] for row in cells] == [
        *("MARS-AdamW", "NAdamW", "MARS, no clip", "AdamW"),
        *("MARS, no clip", "NAdamW"),
    ]
    # The means over the seeds 0, 1 and 2; the common spread of the seeds cancels in differences.
    assert [row[5].split(" ")[0] for row in cells] == [
        "−0.099",
        "",
        "+0.052",
        "+0.101",
        "−0.099",
        "",
    ]
    assert cells[0][2] == "0.004, 0.8, 0.95"
    assert [row[3] for row in cells[:4]] == ["0.1", "0.8", "0.1", "0"]  # γ b1 / (1 − b1)
    assert "8 sequences a step, 4,096 steps" in printed
    assert (tmp_path / "figure.png").stat().st_size > 20_000


def test_a_choice_whose_search_the_budget_ended_is_marked(tool, tmp_path, capsys):
    write(tmp_path, "tuned", {"nesterov-g2": (1.7, 0)})
    write(tmp_path, "more", {"0": (1.8, 1e-3)}, rates=(4e-3, 8e-3))  # with a budget of 1
    tool(tmp_path)
    printed = capsys.readouterr().out
    assert "| NAdamW | 0.004, 0.8" in printed
    assert "| AdamW | 0.004*, 0.8" in printed
    write(tmp_path, "running", {"0.025-c2": (1.6, 0)}, seeds=2)
    tool(tmp_path)
    assert "| MARS, no clip | 0.004*, 0.8" in capsys.readouterr().out
    write(tmp_path / "alone", "more", {"nesterov-g2": (1.8, 0)}, rates=(4e-3, 8e-3))
    with pytest.raises(SystemExit, match="no search is at its end"):
        tool(tmp_path / "alone", "--figure", tmp_path / "figure.png")


def test_what_has_nothing_to_be_set_against_is_left_out(tool, tmp_path, capsys):
    write(tmp_path, "tuned", {"nesterov-g2": (1.7, 0), "0": (1.8, 1e-3)})
    write(tmp_path, "longer", {"0": (1.3, 1e-3), "0.025-c2": (1.2, 1e-3)}, steps=4096)
    write(tmp_path, "begun", {"0-clip": (1.8, 0)})
    shutil.rmtree(tmp_path / "begun" / "cells")
    tool(tmp_path, "--figure", tmp_path / "figure.png")
    printed = capsys.readouterr().out
    assert "1,024 steps" in printed
    assert "4,096 steps" not in printed
    assert "clip" not in printed


def test_the_figure_of_the_tuned_choices_alone(tool, tmp_path, recwarn):
    write(tmp_path, "tuned", {"nesterov-g2": (1.7, 0), "0": (1.8, 1e-3)})
    tool(tmp_path, "--figure", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert not recwarn.list


def test_what_did_not_read_the_same_tokens_is_refused(tool, tmp_path):
    write(tmp_path, "tuned", {"nesterov-g2": (1.7, 0)})
    write(tmp_path, "clip", {"0-clip": (1.6, 0)}, tokens="others")
    with pytest.raises(SystemExit, match="0-clip and nesterov-g2 of 1,024 steps differ in their"):
        tool(tmp_path)


def test_a_choice_that_two_comparisons_have_is_refused(tool, tmp_path):
    write(tmp_path, "tuned", {"nesterov-g2": (1.7, 0), "0": (1.8, 0)})
    write(tmp_path, "again", {"0": (1.6, 0)})
    with pytest.raises(SystemExit, match="have 0 with 8 sequences a step, 1,024 steps"):
        tool(tmp_path)


@pytest.mark.parametrize("directory", [".", "missing"])
def test_a_directory_without_comparisons(tool, tmp_path, directory, capsys):
    with pytest.raises(SystemExit):
        tool(tmp_path / directory)
    assert "no finished cell of nesterov-g2 is in" in capsys.readouterr().err
