"""A whole comparison of tiny models: its cells, what it records, how it continues."""

import csv
import dataclasses
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from made_up import cell_result, change_comparison, change_rows

from maxmars import cli
from maxmars.checkpoint import read
from maxmars.checkpoint.journal import read_journal
from maxmars.compare.cells import Cell, Comparison, Contender, read_results, write_result
from maxmars.compare.grids import make_grid
from maxmars.compare.run import compare
from maxmars.config import AdEMAMixConfig
from maxmars.train import train
from maxmars.train.journal import began_in

LION = Cell(contender="lion", setting=(("learning_rate", 4e-3),), seed=0)
ROOT = Path(__file__).parents[2]


def series(workdir, key):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[key] for row in rows if key in row}


def reported(workdir):
    """What `report.json` holds of a comparison of one size."""
    (size,) = json.loads((workdir / "report.json").read_text())["sizes"]
    return size


def test_what_a_comparison_leaves_behind(compared):
    files = {p.relative_to(compared).as_posix() for p in compared.glob("*")}
    files |= {p.relative_to(compared).as_posix() for p in compared.glob("figures/*")}
    losses = ("loss_time", "loss_tokens", "training_loss_time", "training_loss_tokens")
    drawn = (*losses, "every_run", "rates_and_norms", "tuning_learning_rate")
    assert files == {
        *("cells", "compare.json", "rows.jsonl", "figures", *(f"figures/{n}.png" for n in drawn)),
        *("report.json", "report.md", "results.csv", "results.tex"),
    }
    files = {p.name for p in LION.directory(compared).iterdir()}
    assert files >= {"config.json", "environment.json", "metrics.jsonl", "logs"}
    assert "checkpoints" not in files


def test_what_the_command_prints(compared):
    printed = (compared.parent / "printed").read_text()
    assert re.search(r"] lion .*\n +learning_rate=0.001,seed=0\n", printed)
    assert re.search(r"] adamw +diverged .*\n +learning_rate=10000.0,seed=0\n", printed)
    table = printed.partition("- baseline")[2].partition("tokens, time:")[0]
    assert [line.split()[0] for line in table.splitlines()[2:] if line] == ["adamw", "lion"]
    assert max(map(len, table.splitlines())) <= 80


def test_what_is_reported(compared):
    report = reported(compared)
    adamw, lion = report["outcomes"]
    assert report["num_missing"] == 0
    assert adamw["num_diverged"] == 1
    assert adamw["settings"][1] == {"setting": {"learning_rate": 1e4}, "losses": ["Infinity"]}
    assert lion["test"]["difference"]["mean"] == pytest.approx(
        lion["loss"]["mean"] - adamw["loss"]["mean"]
    )
    assert len(lion["untried"]) == 1  # the budget has room for the two rates alone
    assert lion["cost"]["optimizer_state_bytes"] < adamw["cost"]["optimizer_state_bytes"]
    assert lion["cost"]["collective_bytes"] > 0
    assert lion["step_time_s"] > 0
    assert lion["curves"][0]["tokens"] == [0, 4 * 256]
    page = (compared / "report.md").read_text()
    assert page.count("](figures/") == 7
    assert report["digests"]["0"]["tokens"][:12] in page
    p = lion["test"]["p_adjusted"]
    for text in (page, (compared.parent / "printed").read_text()):
        assert f" {p:.2g}† " in text  # of two seeds
        assert f" {p:.2g} " not in text

    with (compared / "results.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["name"], second["name"]) == ("adamw", "lion")
    loss = [float(second[f"loss{end}"]) for end in ("", "_low", "_high")]
    assert loss == list(lion["loss"].values())
    assert (first["difference"], second["num_seeds"], second["search_ended"]) == ("", "2", "False")
    table = (compared / "results.tex").read_text()
    assert table.count("\\\\\n") == 3
    assert "learning\\_rate=" in table
    assert f"{lion['loss']['mean']:.4f}" in table


def test_with_the_same_seed_all_cells_have_the_same_weights_and_tokens(compared, comparison):
    seen = {}
    for result in read_results(comparison, compared).values():
        directory = result.cell.directory(compared)
        losses = (series(directory, "eval/loss")[0], series(directory, "train/loss")[1])
        start = (result.initial_weights, result.tokens, *losses)
        seen.setdefault(result.cell.seed, set()).add(start)
    (first,), (second,) = seen.values()
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_cell_is_the_run_that_train_makes(compared, comparison, tmp_path):
    train(LION.config(comparison.contenders[1]), tmp_path)
    ours = LION.directory(compared)
    for key in ("train/loss", "eval/loss", "train/learning_rate"):
        assert series(ours, key) == series(tmp_path, key)
    result = read_results(comparison, compared)[LION]
    assert result.loss == series(ours, "eval/loss")[4]
    assert dict(result.train_losses) == series(ours, "train/loss")
    assert result.final_state == read(tmp_path / "checkpoints").digest
    assert result.environment["jax"] == jax.__version__


def test_a_result_survives_its_file(comparison, tmp_path):
    result = cell_result(LION, math.inf, diverged="step 3 was skipped")
    assert read_results(comparison, tmp_path) == {}
    write_result(result, tmp_path)
    assert read_results(comparison, tmp_path) == {LION: result}


@pytest.mark.seconds
def test_missing_cells_are_run_and_finished_ones_kept(compare_command, kept, comparison, capsys):
    """Of a comparison of the format before, which had no sizes; its runs are gone, and rows are
    damaged. The larger budget extends its grids."""
    before = read_results(comparison, kept)
    fields = json.loads((kept / "compare.json").read_text())
    (kept / "compare.json").write_text(json.dumps({"format": 4, **fields["sizes"][""]}))
    damaged = '[]\n{"cell": 1}\n{"loss": "x"}\n{'
    settings = [list(map(list, LION.setting)), 0]
    change_rows(
        kept, lambda r: damaged if [r["cell"]["setting"], r["cell"]["seed"]] == settings else r
    )
    rows = (kept / "rows.jsonl").read_text().replace('"size": "", ', "")
    (kept / "rows.jsonl").write_text(rows + '{"cell": {"contender": "lion", "sett')  # a kill
    assert read_results(comparison, kept).keys() == before.keys() - {LION}

    cli.main([*compare_command, str(kept), "--budget", "3", "--json"])
    out, err = capsys.readouterr()
    assert f"{len(before) - 1} cells" in err
    assert json.loads(out) == {"sizes": [reported(kept)]}
    after = read_results(comparison, kept)
    assert after[LION].loss == before[LION].loss
    assert all(after[cell] == before[cell] for cell in before if cell != LION)
    assert err.count(",seed=") == len(after) - len(before) + 1
    fields["sizes"][""]["budget"] = 3
    assert json.loads((kept / "compare.json").read_text()) == fields
    for outcome in reported(kept)["outcomes"]:
        rates = [row["setting"]["learning_rate"] for row in outcome["settings"]]
        assert len(rates) == 3
        assert not min(rates[:2]) <= rates[2] <= max(rates[:2]) or outcome["name"] == "adamw"


@pytest.mark.seconds
def test_a_search_that_starts_from_another_comparison(compare_command, compared, tmp_path, capsys):
    """What is compared is recorded before the first cell begins, which here is refused."""
    words = [*compare_command, str(tmp_path), "--optimizers", "adamw", "lion"]
    words += ["--start-from", str(compared), "--model.max-seq-len", "1000"]
    with pytest.raises(SystemExit):
        cli.main([*words, "--tune", "learning_rate", "weight_decay"])
    assert "model.max_seq_len=1000" in capsys.readouterr().err
    grids = json.loads((tmp_path / "compare.json").read_text())["sizes"][""]["compared"]
    for outcome in reported(compared)["outcomes"]:
        rate = outcome["setting"]["learning_rate"]
        assert grids[outcome["name"]][0]["scanned"] == [rate / 2, rate, rate * 2]


@pytest.mark.seconds
def test_a_dry_run_says_cells_and_time_and_writes_nothing(
    compare_command, compared, tmp_path, capsys
):
    cli.main([*compare_command, str(tmp_path / "new"), "--dry-run"])
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"adamw, learning_rate 0.004 10000 3 \d", printed)
    assert re.search(r"lion, learning_rate 0.001 0.004 3 \d", printed)
    assert re.search(r" 6 cells .*\d", printed)
    assert not (tmp_path / "new").exists()

    cli.main([*compare_command, str(compared), "--dry-run"])  # is complete
    assert re.search(" 0 cells .* 0:00", capsys.readouterr().out)


OWN = """
import optax

def make(learning_rate, *, matrix_specs, mesh, damping):
    if damping > LARGEST:
        raise ValueError(f"damping={damping} is more than {LARGEST}")
    return optax.adam(learning_rate, eps=damping)

LARGEST = """


@pytest.mark.seconds
def test_an_optimizer_of_the_users_own(compare_command, tmp_path, capsys):
    """A search goes beyond what it takes, of which only its function knows; such a value counts as
    diverged. Its code is kept, and must be the same when a result is repeated."""
    own = tmp_path / "own.py"
    own.write_text(f"{OWN}0.03")
    words = [*compare_command[:-1], "--optimizers", f"{own}:make", "--learning-rates", "4e-3"]
    words += ["--tune", "damping", "learning_rate", "--budget", "3", "--seeds", "1", "--workdir"]
    cli.main([*words, str(tmp_path / "made")])
    printed = " ".join(capsys.readouterr().out.split())
    refused = r"damping=0\.04,seed=0 the optimizer refuses it: own\.py:\d+: damping=0\.04 is more"
    assert re.search(refused, printed)
    (outcome,) = reported(tmp_path / "made")["outcomes"]
    losses = {row["setting"].get("damping"): row["losses"][0] for row in outcome["settings"]}
    assert losses.keys() == {None, 0.01, 0.04}
    assert losses[0.04] == "Infinity"
    assert max(losses[None], losses[0.01]) < 10

    shutil.rmtree(tmp_path / "made" / "cells")
    kept = (tmp_path / "made").rename(tmp_path / "kept")
    own.write_text(f"{OWN}0.05")  # cells of other code are none of this comparison

    def refusal(*words):
        with pytest.raises(SystemExit) as stop:
            cli.main(list(words))
        assert stop.value.code == 1
        return capsys.readouterr().err

    error = refusal(*words, str(kept))
    assert str(own) in error
    assert str(kept) in error
    cli.main(["compare", "verify", str(kept)])
    assert "confirmed, same digest" in capsys.readouterr().out
    (copy,) = (kept / "sources").rglob("own.py")
    copy.write_text(f"{OWN}0.02")
    own.write_text(f"{OWN}0.03")  # where the file lay: only the copy counts
    assert f"{copy} " in refusal("compare", "verify", str(kept))
    own.write_text(f"{OWN}0.01")  # it refuses the config's own value: nothing runs
    assert "own.py:6: damping=0.02" in refusal(*words, str(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


@pytest.mark.seconds
def test_values_that_are_not_allowed_together_count_as_diverged(comparison, tmp_path):
    """Each grid is one of its own: AdEMAMix takes a b1 of 0.95, and a b3 of 0.92."""
    first = comparison.contenders[0]
    config = dataclasses.replace(first.config, optimizer=AdEMAMixConfig(b1=0.9, b3=0.999))
    grids = tuple(make_grid(config, f, v) for f, v in (("b1", (0.95,)), ("b3", (0.92,))))
    contender = Contender(name="ademamix", config=config, grids=grids)
    alone = Comparison(
        contenders=(contender,), baseline="ademamix", seeds=(0,), budget=1, finalists=1
    )
    assert compare([alone], tmp_path)
    (result,) = read_results(alone, tmp_path).values()
    assert result.loss == math.inf
    assert "b1=0.95" in result.diverged
    assert "b3=0.92" in result.diverged


@pytest.mark.seconds
def test_comparisons_and_runs_in_one_report(compared, tmp_path, capsys):
    """Several comparisons, of rows alone, are a column as sizes are."""
    for name, width in (("a-large", 32), ("small", 16)):
        (tmp_path / name).mkdir()
        for file in ("compare.json", "rows.jsonl"):
            shutil.copy(compared / file, tmp_path / name)

        def resize(fields, width=width):
            for config in fields["configs"].values():
                config["model"]["embed_dim"] = width

        change_comparison(tmp_path / name, resize)
    words = ["report", str(tmp_path / "a-large"), str(tmp_path / "small"), "--out"]
    cli.main([*words, str(tmp_path / "out"), "--format", "svg"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80
    small, large = json.loads((tmp_path / "out" / "report.json").read_text())["sizes"]
    assert (small["size"], large["size"]) == ("small", "a-large")
    assert large["outcomes"] == reported(compared)["outcomes"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| small | lion | " in page
    assert "](figures/small/loss_tokens.svg)" in page
    assert "rates_and_norms" not in page

    run = shutil.copytree(LION.directory(compared), tmp_path / "one")
    cli.main(["report", str(compared), str(run), "--out", str(tmp_path / "both")])
    lines = json.loads((tmp_path / "both" / "report.json").read_text())
    names = [line["name"] for line in lines]
    assert names == [f"{compared.name}: adamw", f"{compared.name}: lion", "one"]


@pytest.mark.seconds
def test_the_pages_figures_are_made_of_rows(compared, tmp_path, monkeypatch, capsys):
    kept = tmp_path / ".github" / "results" / "which"
    kept.mkdir(parents=True)
    for name in ("compare.json", "rows.jsonl"):
        shutil.copy(compared / name, kept)
    figures = tmp_path / ".github" / "figures"
    figures.mkdir()
    names = ("which-loss_tokens.png", "other.png")
    (tmp_path / "README.md").write_text("".join(f"![](.github/figures/{name})" for name in names))
    tool = str(ROOT / "tools" / "figures.py")
    monkeypatch.setattr(sys, "argv", [tool, "--root", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(tool, run_name="__main__")
    assert stop.value.code == 1
    assert "other.png MISSING" in capsys.readouterr().out
    size = (compared / "figures" / "loss_tokens.png").stat().st_size
    assert 0 < (figures / names[0]).stat().st_size < size / 2
    assert not (kept / "report.md").exists()


@pytest.mark.slow
def test_two_sizes_in_one_comparison(compare_command, tmp_path, capsys):
    tuned = "--learning-rates 4e-3 --budget 1 --finalists 1 --seeds 1"
    workdir = tmp_path / "out"
    words = [*compare_command, str(workdir), "--optimizers", "adamw", "lion", *tuned.split()]
    cli.main([*words, "--sizes", "32", "16"])
    printed = capsys.readouterr().out
    assert "[  2/2] 16 " in printed
    assert printed.rindex("size 16") < printed.rindex("size 32") < printed.index("data speed-up")
    cells = [json.loads(line)["cell"] for line in (workdir / "rows.jsonl").read_text().splitlines()]
    assert [cell["size"] for cell in cells] == ["32"] * 2 + ["16"] * 2
    assert (workdir / "cells/32/lion/learning_rate=0.004,seed=0/metrics.jsonl").exists()
    small, large = json.loads((workdir / "report.json").read_text())["sizes"]
    assert (small["size"], large["size"]) == ("16", "32")
    assert small["num_parameters"] < large["num_parameters"]
    assert small["digests"]["0"]["initial_weights"] != large["digests"]["0"]["initial_weights"]
    with (workdir / "results.csv").open() as file:
        assert [row["size"] for row in csv.DictReader(file)] == ["16"] * 2 + ["32"] * 2
    assert {p.name for p in (workdir / "figures").iterdir()} == {"16", "32", "speed_up.png"}

    # One size alone continues, and keeps the other one in the report.
    before = (workdir / "report.md").read_text()
    assert "| 32 | lion | learning_rate=" in before
    cli.main([*words, "--sizes", "16"])
    assert (workdir / "report.md").read_text() == before
    assert "2 cells" in capsys.readouterr().out
    cli.main(["compare", "verify", str(workdir), "--contender", "lion", "--size", "32"])
    assert "32, lion, seed 0, 4 steps: " in capsys.readouterr().out
    cli.main([*words, "--start-from", str(workdir / "16"), "--dry-run"])
    assert "At most 2 cells" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_share_the_cells(compare_command, compared, comparison, tmp_path):
    command = [sys.executable, "-m", "maxmars", *compare_command, str(tmp_path)]
    workers = [
        subprocess.Popen([*command, "--cells", part], stdout=subprocess.PIPE, text=True)
        for part in ("0/2", "1/2")
    ]
    printed = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    first, second = (set(re.findall(r"\] (\S+) .*\n +(\S+,seed=\d)", text)) for text in printed)
    assert first
    assert second
    assert not first & second
    one, shared = read_results(comparison, compared), read_results(comparison, tmp_path)
    assert {cell: result.loss for cell, result in shared.items()} == {
        cell: result.loss for cell, result in one.items()
    }


@pytest.mark.slow
def test_a_killed_comparison_continues_its_cell(compare_command, tmp_path):
    words = ["--num-steps", "40", "--seeds", "1", "--learning-rates", "1e-3", "--eval.every", "20"]
    words += ["--budget", "1", "--optimizers", "adamw", "--checkpoint.every", "1", "--workdir"]
    command = [*compare_command[:2], *words]
    cell = Cell(contender="adamw", setting=(("learning_rate", 1e-3),), seed=0)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    cli.main([*command, str(undisturbed)])
    process = subprocess.Popen([sys.executable, "-m", "maxmars", *command, str(killed)])
    checkpoints = cell.directory(killed) / "checkpoints"
    deadline = time.monotonic() + 120
    while not [p for p in checkpoints.glob("*") if p.name.isdigit() and int(p.name) >= 5]:
        assert process.poll() is None  # it runs until it is killed
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "rows.jsonl").exists()
    cli.main([*command, str(killed)])
    began = began_in(read_journal(cell.directory(killed)))
    assert len({line["step"] for line in began}) == 2  # the second did not begin at step 0
    for key in ("train/loss", "eval/loss"):
        assert series(cell.directory(killed), key) == series(cell.directory(undisturbed), key)
