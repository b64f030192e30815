"""A whole comparison of tiny models: its cells, what it records, how it continues."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxmars import cli
from maxmars.compare.cells import Cell, CellResult, finished_cells, write_result
from maxmars.compare.report import write_report
from maxmars.compare.run import compare
from maxmars.train import train

LION = Cell(contender="lion", learning_rate=4e-3, seed=0)


def series(workdir, key):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[key] for row in rows if key in row}


def by_cell(workdir, comparison):
    return {result.cell: result for result in finished_cells(workdir, comparison.contenders)}


@pytest.fixture
def copied(compared, tmp_path):
    """A copy of the comparison to write into."""
    return shutil.copytree(compared, tmp_path / "copied")


def test_what_a_comparison_leaves_behind(compared):
    assert {p.name for p in compared.iterdir()} == {
        "cells",
        "compare.json",
        "figures",
        "report.json",
        "report.md",
    }
    figures = {p.name for p in (compared / "figures").iterdir()}
    assert figures == {"learning_rates.png", "loss_time.png", "loss_tokens.png"}
    files = {p.name for p in LION.directory(compared).iterdir()}
    assert files >= {"config.json", "environment.json", "metrics.jsonl", "logs", "result.json"}
    assert "checkpoints" not in files


def test_what_the_command_prints(compared):
    printed = (compared.parent / "printed").read_text()
    assert "rate 0.001    seed 0  validation loss" in printed
    assert "adamw  rate 10000    seed 0  diverged" in printed
    table = printed.partition("- baseline")[2].partition("tokens, time:")[0]
    assert [line.split()[0] for line in table.splitlines()[2:] if line] == ["adamw", "lion"]
    assert max(map(len, table.splitlines())) <= 80


def test_the_report_says_what_was_found(compared):
    report = json.loads((compared / "report.json").read_text())
    adamw, lion = report["outcomes"]
    assert report["num_missing"] == 0
    assert adamw["num_diverged"] == 1
    assert adamw["rates"][1]["losses"] == ["Infinity"]
    assert lion["test"]["difference"]["mean"] == pytest.approx(
        lion["loss"]["mean"] - adamw["loss"]["mean"]
    )
    assert adamw["tokens_to_baseline"] == 4 * 16 * 16  # its own loss, at the end
    assert lion["best_rate_at_edge"] in ("low", "high")
    assert lion["cost"]["optimizer_state_bytes"] < adamw["cost"]["optimizer_state_bytes"]
    assert lion["cost"]["collective_bytes"] > 0
    assert lion["step_time_s"] > 0
    assert lion["curves"][0]["tokens"] == [0, 4 * 256]
    page = (compared / "report.md").read_text()
    assert "Extend the grid: the best rate of lion" in page
    assert page.count("](figures/") == 3
    assert report["digests"]["0"]["tokens"][:12] in page


def test_with_the_same_seed_all_cells_have_the_same_weights_and_tokens(compared, comparison):
    results = by_cell(compared, comparison).values()
    seen = {}
    for result in results:
        directory = result.cell.directory(compared)
        losses = (series(directory, "eval/loss")[0], series(directory, "train/loss")[1])
        seen.setdefault(result.cell.seed, set()).add(
            (result.initial_weights, result.tokens, *losses)
        )
    assert [len(values) for values in seen.values()] == [1, 1]
    (first,), (second,) = seen.values()
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_cell_is_the_run_that_train_makes(compared, comparison, tmp_path):
    train(LION.config(comparison.contenders[1]), tmp_path)
    ours = LION.directory(compared)
    for key in ("train/loss", "eval/loss", "train/learning_rate"):
        assert series(ours, key) == series(tmp_path, key)
    assert by_cell(compared, comparison)[LION].loss == series(ours, "eval/loss")[4]


def test_only_unfinished_cells_are_run_and_give_the_same_again(copied, comparison, capsys):
    before = by_cell(copied, comparison)
    (LION.directory(copied) / "result.json").unlink()  # as after a kill
    assert compare(comparison, copied)
    printed = capsys.readouterr().out
    assert f"{len(before) - 1} cells are finished and kept" in printed
    assert printed.count("validation loss") == 1
    after = by_cell(copied, comparison)
    assert after.keys() == before.keys()
    assert after[LION].loss == before[LION].loss
    assert all(after[cell] == before[cell] for cell in before if cell != LION)


@pytest.mark.slow
def test_a_grid_is_extended_by_naming_the_new_rate_alone(copied, compare_command, capsys):
    before = {"adamw": [4e-3, 1e4], "lion": [1e-3, 4e-3]}
    assert json.loads((copied / "compare.json").read_text())["compared"] == before
    rates = compare_command.index("--learning-rates") + 1
    words = [*compare_command[:rates], "lion=5e-4", *compare_command[rates + 1 :]]
    cli.main([*words, str(copied)])
    printed = capsys.readouterr().out
    assert "6 cells are finished and kept" in printed
    assert printed.count("  validation loss ") == 1
    compared = json.loads((copied / "compare.json").read_text())["compared"]
    assert compared == before | {"lion": [5e-4, 1e-3, 4e-3]}


def with_config(comparison, index, **changes):
    """The comparison with other fields in the config of one contender."""
    contenders = list(comparison.contenders)
    config = dataclasses.replace(contenders[index].config, **changes)
    contenders[index] = dataclasses.replace(contenders[index], config=config)
    return dataclasses.replace(comparison, contenders=tuple(contenders))


def another_config(comparison, workdir):
    return with_config(comparison, 0, gradient_clip_norm=0.5)


def longer_run(comparison, workdir):
    return with_config(comparison, 1, num_steps=5)


def another_version(comparison, workdir):
    fields = json.loads((workdir / "compare.json").read_text())
    del fields["format"]  # as the first version wrote it
    (workdir / "compare.json").write_text(json.dumps(fields))
    return comparison


def damaged(comparison, workdir):
    (workdir / "compare.json").write_text('{"format": 2, "conf')
    return comparison


def other_tokens(comparison, workdir):
    results = by_cell(workdir, comparison)
    (LION.directory(workdir) / "result.json").unlink()
    adamw = results[dataclasses.replace(LION, contender="adamw")]
    write_result(dataclasses.replace(adamw, tokens="0" * 64), workdir)
    return comparison


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_config, "its adamw differs in gradient_clip_norm (1.0 there, 0.5 here)"),
        (longer_run, "cannot be compared: num_steps is 4 there and 5 here"),
        (another_version, "holds a comparison that another version of maxmars wrote"),
        (damaged, "compare.json is damaged; restore it, or choose another --workdir"),
        (other_tokens, "lion and adamw have other tokens with seed 0"),
    ],
)
def test_what_cannot_be_continued(change, message, copied, comparison):
    changed = change(comparison, copied)
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the message is below
        compare(changed, copied)
    assert message in str(refused.value)


def test_a_comparison_that_is_not_complete_is_reported_as_such(compared, comparison, tmp_path):
    shutil.copy(compared / "compare.json", tmp_path)
    with pytest.raises(ValueError, match=r"no cell of .* is finished yet"):
        write_report(tmp_path)
    shutil.copytree(LION.directory(compared), LION.directory(tmp_path))
    summary = write_report(tmp_path)
    assert summary.num_missing == sum(len(c.learning_rates) for c in comparison.contenders) - 1
    assert "UNFINISHED" in (tmp_path / "report.md").read_text()


def test_one_rate_and_one_seed(compared, tmp_path):
    shutil.copytree(LION.directory(compared), LION.directory(tmp_path))
    fields = json.loads((compared / "compare.json").read_text())
    changed = {"compared": {"lion": [4e-3]}, "baseline": "lion", "seeds": [0]}
    (tmp_path / "compare.json").write_text(json.dumps(fields | changed))
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "lion was run at one rate only, so it is not tuned." in text
    (lion,) = json.loads((tmp_path / "report.json").read_text())["outcomes"]
    assert lion["loss"]["low"] is None
    assert lion["test"] is None


def test_the_report_of_a_comparison_from_the_command_line(compared, tmp_path, capsys):
    run = shutil.copytree(LION.directory(compared), tmp_path / "one")
    cli.main(["report", str(compared)])
    printed = capsys.readouterr().out
    assert "tokens, time: to the final loss of adamw" in printed
    assert f"report: {compared / 'report.md'}" in printed
    cli.main(["report", str(compared), str(run), "--out", str(tmp_path / "out")])
    names = [found["name"] for found in json.loads((tmp_path / "out/report.json").read_text())]
    assert names == [f"{compared.name}: adamw", f"{compared.name}: lion", "one"]


def test_a_result_survives_its_file(tmp_path, comparison):
    result = CellResult(
        cell=dataclasses.replace(LION, seed=3),
        loss=math.inf,
        diverged="step 3 was skipped",
        step_time_s=None,
        seconds=1.5,
        initial_weights="0a",
        tokens="1b",
    )
    assert finished_cells(tmp_path, comparison.contenders) == []
    write_result(result, tmp_path)
    assert finished_cells(tmp_path, comparison.contenders) == [result]


@pytest.mark.slow
def test_a_killed_comparison_continues_its_cell(tmp_path):
    tests = str(Path(__file__).parents[1])
    config = tmp_path / "config.py"
    config.write_text(
        f"import sys\nsys.path.insert(0, {tests!r})\nfrom pathlib import Path\n"
        "from tiny import short_config\n\n"
        f"def get_config():\n    return short_config(Path({str(tmp_path / 'tokens')!r}))\n"
    )
    words = ["--steps", "40", "--seeds", "1", "--learning-rates", "1e-3", "--eval.every", "20"]
    command = [sys.executable, "-m", "maxmars", "compare", str(config), *words, "--workdir"]
    cell = Cell(contender="tiny", learning_rate=1e-3, seed=0)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    subprocess.run([*command, str(undisturbed)], check=True)
    process = subprocess.Popen([*command, str(killed)])
    checkpoints = cell.directory(killed) / "checkpoints"
    deadline = time.monotonic() + 120
    while not [p for p in checkpoints.glob("*") if p.name.isdigit() and int(p.name) >= 5]:
        assert process.poll() is None, "the comparison ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (cell.directory(killed) / "result.json").exists()
    subprocess.run([*command, str(killed)], check=True)
    sessions = (cell.directory(killed) / "sessions.jsonl").read_text().splitlines()
    first_steps = {json.loads(line)["first_step"] for line in sessions}
    assert len(first_steps) == 2  # the second session did not begin at step 0
    for key in ("train/loss", "eval/loss"):
        assert series(cell.directory(killed), key) == series(cell.directory(undisturbed), key)
