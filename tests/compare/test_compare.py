"""A whole comparison of tiny models: its cells, what it records, how it continues."""

import csv
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from refusals import refused

from maxmars import cli
from maxmars.checkpoint import read
from maxmars.checkpoint.journal import read_journal
from maxmars.compare.cells import (
    Cell,
    CellResult,
    Comparison,
    Contender,
    read_results,
    write_result,
)
from maxmars.compare.grids import make_grid
from maxmars.compare.report import write_report
from maxmars.compare.run import compare
from maxmars.compare.summary import summarize
from maxmars.config import AdEMAMixConfig
from maxmars.train import train
from maxmars.train.journal import began_in

LION = Cell(contender="lion", setting=(("learning_rate", 4e-3),), seed=0)


def series(workdir, key):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[key] for row in rows if key in row}


def reported(workdir):
    """What `report.json` holds of a comparison of one size."""
    (size,) = json.loads((workdir / "report.json").read_text())["sizes"]
    return size


def forget(workdir, cell, line=""):
    """Replace the row of a cell by a line, or by nothing."""
    path = workdir / "rows.jsonl"
    setting = [list(pair) for pair in cell.setting]
    theirs = {"size": "", "contender": cell.contender, "setting": setting, "seed": cell.seed}
    rows = path.read_text().splitlines()
    rows = [line if json.loads(row)["cell"] == theirs else row for row in rows]
    path.write_text("".join(f"{row}\n" for row in rows if row))


@pytest.fixture
def copied(compared, tmp_path):
    """A copy of the comparison to write into."""
    return shutil.copytree(compared, tmp_path / "copied")


@pytest.mark.seconds
def test_what_a_comparison_leaves_behind(compared):
    assert {p.name for p in compared.iterdir()} == {
        "cells",
        "compare.json",
        "figures",
        "report.json",
        "report.md",
        "results.csv",
        "results.tex",
        "rows.jsonl",
    }
    figures = {p.name for p in (compared / "figures").iterdir()}
    assert figures == {
        "every_run.png",
        "loss_time.png",
        "training_loss_time.png",
        "loss_tokens.png",
        "rates_and_norms.png",
        "training_loss_tokens.png",
        "tuning_learning_rate.png",
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


def test_the_report_says_what_was_found(compared):
    report = reported(compared)
    adamw, lion = report["outcomes"]
    assert report["num_missing"] == 0
    assert adamw["num_diverged"] == 1
    assert adamw["settings"][1] == {"setting": {"learning_rate": 1e4}, "losses": ["Infinity"]}
    assert lion["test"]["difference"]["mean"] == pytest.approx(
        lion["loss"]["mean"] - adamw["loss"]["mean"]
    )
    assert adamw["tokens_to_baseline"] == 4 * 16 * 16  # its own loss, at the end
    assert len(lion["untried"]) == 1  # the budget has room for the two rates alone
    assert lion["cost"]["optimizer_state_bytes"] < adamw["cost"]["optimizer_state_bytes"]
    assert lion["cost"]["collective_bytes"] > 0
    assert lion["step_time_s"] > 0
    assert lion["curves"][0]["tokens"] == [0, 4 * 256]
    page = (compared / "report.md").read_text()
    assert page.count("](figures/") == 7
    assert report["digests"]["0"]["tokens"][:12] in page


def test_results_are_tables_for_other_programs_too(compared):
    report = reported(compared)
    with (compared / "results.csv").open() as file:
        adamw, lion = csv.DictReader(file)
    assert (adamw["name"], lion["name"]) == ("adamw", "lion")
    loss = report["outcomes"][1]["loss"]
    assert [float(lion[f"loss{end}"]) for end in ("", "_low", "_high")] == list(loss.values())
    assert (adamw["difference"], lion["num_seeds"], lion["search_ended"]) == ("", "2", "False")
    table = (compared / "results.tex").read_text()
    assert table.count("\\\\\n") == 3
    assert "learning\\_rate=" in table
    assert f"{report['outcomes'][1]['loss']['mean']:.4f}" in table


def test_a_p_of_two_seeds_has_a_mark(compared):
    p = reported(compared)["outcomes"][1]["test"]["p_adjusted"]
    for text in ((compared / "report.md").read_text(), (compared.parent / "printed").read_text()):
        assert f" {p:.2g}† " in text
        assert f" {p:.2g} " not in text


def test_with_the_same_seed_all_cells_have_the_same_weights_and_tokens(compared, comparison):
    results = read_results(comparison, compared).values()
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
    result = read_results(comparison, compared)[LION]
    assert result.loss == series(ours, "eval/loss")[4]
    assert dict(result.train_losses) == series(ours, "train/loss")
    assert result.final_state == read(tmp_path / "checkpoints").digest
    assert result.environment["jax"] == jax.__version__


@pytest.mark.seconds
def test_only_unfinished_cells_are_run_and_give_the_same_again(copied, comparison, capsys):
    before = read_results(comparison, copied)
    forget(copied, LION)
    with (copied / "rows.jsonl").open("a") as file:
        file.write('{"cell": {"contender": "lion", "sett')  # a kill came within the row
    shutil.rmtree(copied / "cells" / "adamw")
    assert compare([comparison], copied)
    printed = capsys.readouterr().out
    assert f"{len(before) - 1} cells" in printed
    assert printed.count("validation loss") == 1
    after = read_results(comparison, copied)
    assert after.keys() == before.keys()
    assert after[LION].loss == before[LION].loss
    assert all(after[cell] == before[cell] for cell in before if cell != LION)


@pytest.mark.slow
def test_a_larger_budget_extends_the_grid_and_keeps_the_finished_cells(
    copied, compare_command, capsys
):
    words = [*compare_command, str(copied), "--budget", "3"]
    before = len((copied / "rows.jsonl").read_text().splitlines())
    cli.main([*words, "--json", "True"])
    out, err = capsys.readouterr()
    assert f"{before} cells" in err
    report = reported(copied)
    assert json.loads(out) == {"sizes": [report]}
    for outcome in report["outcomes"]:
        assert len(outcome["settings"]) == 3
        rates = [row["setting"]["learning_rate"] for row in outcome["settings"]]
        assert not min(rates[:2]) <= rates[2] <= max(rates[:2]) or outcome["name"] == "adamw"


@pytest.mark.seconds
def test_a_search_that_starts_from_another_comparison(compare_command, compared, tmp_path, capsys):
    """What is compared is recorded before the first cell begins, which here is refused."""
    words = [*compare_command, str(tmp_path), "--optimizers", "adamw", "lion"]
    words += ["--start-from", str(compared), "--model.max-seq-len", "1000"]
    with pytest.raises(SystemExit):
        cli.main([*words, "--tune", "weight_decay"])
    assert "learning_rate too" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*words, "--tune", "learning_rate", "weight_decay"])
    assert "model.max_seq_len=1000" in capsys.readouterr().err
    found = reported(compared)["outcomes"]
    best = {outcome["name"]: outcome["setting"]["learning_rate"] for outcome in found}
    grids = json.loads((tmp_path / "compare.json").read_text())["sizes"][""]["compared"]
    for name, rate in best.items():
        assert grids[name][0]["scanned"] == [rate / 2, rate, rate * 2]


def test_a_start_from_a_setting_of_an_earlier_search_over_more_fields(
    compare_command, copied, comparison, tmp_path, capsys
):
    for cell, result in read_results(comparison, copied).items():
        if cell.setting == LION.setting and cell.contender == "lion":
            better = dataclasses.replace(cell, setting=(*cell.setting, ("b1", 0.8)))
            write_result(dataclasses.replace(result, cell=better, loss=1.0), copied)
    words = [*compare_command, str(tmp_path / "new"), "--start-from", str(copied)]
    words += ["--optimizers", "adamw", "lion"]
    with pytest.raises(SystemExit):
        cli.main([*words, "--tune", "learning_rate"])
    assert "b1 too" in capsys.readouterr().err


@pytest.mark.seconds
def test_a_dry_run_says_cells_and_time_and_writes_nothing(
    compare_command, compared, tmp_path, capsys
):
    cli.main([*compare_command, str(tmp_path / "new"), "--dry-run", "True"])
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"adamw, learning_rate 0.004 10000 3 \d", printed)
    assert re.search(r"lion, learning_rate 0.001 0.004 3 \d", printed)
    assert re.search(r" 6 cells .*\d", printed)
    assert not (tmp_path / "new").exists()

    cli.main([*compare_command, str(compared), "--dry-run", "True"])  # is complete
    assert re.search(" 0 cells .* 0:00", capsys.readouterr().out)


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


OWN = """
import optax

def make(learning_rate, *, matrix_specs, mesh, damping):
    if damping > largest:
        raise ValueError(f"damping={damping} is more than {largest}")
    return optax.adam(learning_rate, eps=damping)
"""


@pytest.mark.seconds
def test_a_value_that_an_own_optimizer_refuses_counts_as_diverged(
    compare_command, tmp_path, capsys
):
    """A search goes beyond what the optimizer takes, of which only its function knows."""
    own, config = tmp_path / "own.py", tmp_path / "config.py"
    own.write_text(OWN.replace("largest", "0.03"))
    text = Path(compare_command[1]).read_text()
    make = f'OptaxConfig(make={f"{own}:make"!r}, options={{"damping": 0.02}}, learning_rate=4e-3)'
    text = text.replace("ADAMW if optimizer", f"{make} if optimizer")
    config.write_text(text.replace("EvalConfig, LionConfig", "EvalConfig, LionConfig, OptaxConfig"))
    words = ["compare", str(config), "--optimizers", "adamw", "--learning-rates", "4e-3"]
    words += ["--num-steps", "4", "--tune", "damping", "learning_rate", "--budget", "3"]
    words += ["--seeds", "1"]
    cli.main([*words, "--workdir", str(tmp_path / "refused")])
    printed = " ".join(capsys.readouterr().out.split())
    refused = r"damping=0\.04,seed=0 the optimizer refuses it: own\.py:\d+: damping=0\.04 is more"
    assert re.search(refused, printed)
    (outcome,) = reported(tmp_path / "refused")["outcomes"]
    losses = {row["setting"].get("damping"): row["losses"][0] for row in outcome["settings"]}
    assert losses.keys() == {None, 0.01, 0.04}
    assert losses[0.04] == "Infinity"
    assert max(losses[None], losses[0.01]) < 10

    # Cells of other code are none of this comparison.
    own.write_text(OWN.replace("largest", "0.03") + "\n# Changed.\n")
    with pytest.raises(SystemExit):
        cli.main([*words, "--workdir", str(tmp_path / "refused")])
    changed = f"{own} has changed since the comparison in {tmp_path / 'refused'} began"
    assert changed in capsys.readouterr().err

    own.write_text(OWN.replace("largest", "0.01"))  # of the config's own value: nothing runs
    with pytest.raises(SystemExit):
        cli.main([*words, "--workdir", str(tmp_path / "nothing")])
    assert "own.py:6: damping=0.02" in capsys.readouterr().err
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
    (found,) = read_results(alone, tmp_path).values()
    assert found.loss == math.inf
    assert "b1=0.95" in found.diverged
    assert "b3=0.92" in found.diverged


def test_rows_alone_are_enough_to_report(compared, tmp_path):
    for name in ("compare.json", "rows.jsonl"):
        shutil.copy(compared / name, tmp_path)
    write_report(summarize(tmp_path), tmp_path)
    assert reported(tmp_path)["outcomes"] == reported(compared)["outcomes"]
    assert "rates_and_norms" not in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_two_sizes_in_one_comparison(compare_command, tmp_path, capsys):
    tuned = "--learning-rates 4e-3 --budget 1 --finalists 1 --seeds 1"
    workdir = tmp_path / "out"
    words = [*compare_command, str(workdir), "--optimizers", "adamw", "lion", *tuned.split()]
    cli.main([*words, "--sizes", "32", "16", "--dry-run", "True"])
    assert capsys.readouterr().out.count("At most 2 cells") == 2
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
    assert "| 32 | lion | learning_rate=" in (workdir / "report.md").read_text()
    assert {p.name for p in (workdir / "figures").iterdir()} == {"16", "32", "speed_up.png"}

    # One size alone continues, and keeps the other one in the report.
    before = (workdir / "report.md").read_text()
    cli.main([*words, "--sizes", "16"])
    assert (workdir / "report.md").read_text() == before
    assert "2 cells" in capsys.readouterr().out
    for chosen, size in (([], "16"), (["--size", "32"], "32")):
        cli.main(["compare", "verify", str(workdir), "--contender", "lion", *chosen])
        assert f"{size}, lion, seed 0, 4 steps: " in capsys.readouterr().out
    cli.main([*words, "--start-from", str(workdir / "16"), "--dry-run", "True"])
    assert "At most 2 cells" in capsys.readouterr().out
    for more, message in (
        (["--start-from", str(workdir)], f"must be one of {workdir / '16'}, {workdir / '32'}"),
        ([], f"{workdir} holds a comparison of the sizes 32, 16"),
    ):
        with pytest.raises(SystemExit):
            cli.main([*words, *more])
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_pages_figures_are_made_of_rows(compared, tmp_path):
    kept = tmp_path / ".github" / "results" / "which"
    kept.mkdir(parents=True)
    for name in ("compare.json", "rows.jsonl"):
        shutil.copy(compared / name, kept)
    figures = tmp_path / ".github" / "figures"
    figures.mkdir()
    names = ("which-loss_tokens.png", "other.png")
    (tmp_path / "README.md").write_text("".join(f"![](.github/figures/{name})" for name in names))
    tool = Path(__file__).parents[2] / "tools" / "figures.py"
    command = [sys.executable, str(tool), "--root", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "other.png MISSING" in found.stdout
    size = (compared / "figures" / "loss_tokens.png").stat().st_size
    assert 0 < (figures / names[0]).stat().st_size < size / 2
    assert not (kept / "report.md").exists()


@pytest.mark.seconds
def test_several_comparisons_are_a_column_as_sizes_are(compared, tmp_path, capsys):
    for name, width in (("a-large", 32), ("small", 16)):
        (tmp_path / name).mkdir()
        fields = json.loads((compared / "compare.json").read_text())
        for config in fields["sizes"][""]["configs"].values():
            config["model"]["embed_dim"] = width
        (tmp_path / name / "compare.json").write_text(json.dumps(fields))
        shutil.copy(compared / "rows.jsonl", tmp_path / name)
    words = ["report", str(tmp_path / "a-large"), str(tmp_path / "small"), "--out"]
    cli.main([*words, str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80
    found = json.loads((tmp_path / "out" / "report.json").read_text())["sizes"]
    assert [size["size"] for size in found] == ["small", "a-large"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| small | lion | " in page
    assert "](figures/small/loss_tokens.png)" in page
    cli.main([*words, str(tmp_path / "out"), "--format", "svg"])
    with pytest.raises(SystemExit):
        cli.main([*words, str(compared)])
    assert f"{compared} holds report.md" in capsys.readouterr().err


@pytest.mark.seconds
def test_a_comparison_of_the_format_before_continues(copied, comparison, capsys):
    """It had no sizes: its fields stood where now those of each size do, and no row named one."""
    before = read_results(comparison, copied)
    fields = json.loads((copied / "compare.json").read_text())
    (copied / "compare.json").write_text(json.dumps({"format": 4, **fields["sizes"][""]}))
    forget(copied, LION)
    rows = (copied / "rows.jsonl").read_text()
    (copied / "rows.jsonl").write_text(rows.replace('"size": "", ', ""))
    assert compare([comparison], copied)
    assert capsys.readouterr().out.count("validation loss") == 1
    assert json.loads((copied / "compare.json").read_text()) == fields
    after = read_results(comparison, copied)
    assert {cell: r.loss for cell, r in after.items()} == {c: r.loss for c, r in before.items()}


@pytest.mark.parametrize("text", ["[]", '{"cell": 1}', '{"loss": "x"}', "{"])
def test_a_damaged_row_is_none(text, copied, comparison):
    before = read_results(comparison, copied)
    forget(copied, LION, text)
    assert read_results(comparison, copied) == {c: r for c, r in before.items() if c != LION}


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
    (workdir / "compare.json").write_text('{"format": 5, "conf')
    return comparison


def other_tokens(comparison, workdir):
    results = read_results(comparison, workdir)
    forget(workdir, LION)
    adamw = results[dataclasses.replace(LION, contender="adamw")]
    write_result(dataclasses.replace(adamw, tokens="0" * 64), workdir)
    return comparison


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (another_config, ["adamw", "gradient_clip_norm", "1.0", "0.5"]),
        (longer_run, ["num_steps", "4", "5"]),
        (another_version, ["format 1"]),
        (damaged, ["compare.json"]),
        (other_tokens, ["lion", "adamw", "seed 0"]),
    ],
)
def test_what_cannot_be_continued(change, named, copied, comparison):
    changed = change(comparison, copied)
    with refused(ValueError, *named):
        compare([changed], copied)


def test_a_comparison_that_is_not_complete_is_reported_as_such(compared, comparison, tmp_path):
    shutil.copy(compared / "compare.json", tmp_path)
    with refused(ValueError, tmp_path):
        summarize(tmp_path)
    write_result(read_results(comparison, compared)[LION], tmp_path)
    write_report(summarize(tmp_path), tmp_path)
    assert reported(tmp_path)["num_missing"] == len(comparison.contenders) * comparison.budget - 1
    assert "UNFINISHED" in (tmp_path / "report.md").read_text()


def test_one_rate_and_one_seed(compared, comparison, tmp_path):
    write_result(read_results(comparison, compared)[LION], tmp_path)
    fields = json.loads((compared / "compare.json").read_text())
    grid = {"field": "learning_rate", "values": [4e-3], "scanned": [4e-3]}
    changed = {"compared": {"lion": [grid]}, "baseline": "lion", "seeds": [0]}
    fields["sizes"][""] |= changed
    (tmp_path / "compare.json").write_text(json.dumps(fields))
    write_report(summarize(tmp_path), tmp_path)
    (lion,) = reported(tmp_path)["outcomes"]
    assert lion["loss"]["low"] is None
    assert lion["test"] is None


@pytest.mark.seconds
def test_the_report_of_a_comparison_from_the_command_line(compared, tmp_path, capsys):
    run = shutil.copytree(LION.directory(compared), tmp_path / "one")
    cli.main(["report", str(compared)])
    printed = capsys.readouterr().out
    assert f"report: {compared / 'report.md'}" in printed
    cli.main(["report", str(compared), str(run), "--out", str(tmp_path / "out")])
    names = [found["name"] for found in json.loads((tmp_path / "out/report.json").read_text())]
    assert names == [f"{compared.name}: adamw", f"{compared.name}: lion", "one"]


def test_a_result_survives_its_file(comparison, tmp_path):
    result = CellResult(
        cell=dataclasses.replace(LION, seed=1),
        loss=math.inf,
        diverged="step 3 was skipped",
        step_time_s=None,
        seconds=1.5,
        initial_weights="0a",
        tokens="1b",
        curve=None,
        train_losses=(),
        final_state=None,
        environment={},
    )
    assert read_results(comparison, tmp_path) == {}
    write_result(result, tmp_path)
    assert read_results(comparison, tmp_path) == {result.cell: result}


@pytest.mark.slow
def test_a_killed_comparison_continues_its_cell(tmp_path):
    tests = str(Path(__file__).parents[1])
    config = tmp_path / "config.py"
    config.write_text(
        f"import sys\nsys.path.insert(0, {tests!r})\nfrom pathlib import Path\n"
        "from tiny import short_config\n\n"
        f"def get_config():\n    return short_config(Path({str(tmp_path / 'tokens')!r}))\n"
    )
    words = ["--num-steps", "40", "--seeds", "1", "--learning-rates", "1e-3", "--eval.every", "20"]
    words += ["--budget", "1"]
    command = [sys.executable, "-m", "maxmars", "compare", str(config), *words, "--workdir"]
    cell = Cell(contender="tiny", setting=(("learning_rate", 1e-3),), seed=0)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    subprocess.run([*command, str(undisturbed)], check=True)
    process = subprocess.Popen([*command, str(killed)])
    checkpoints = cell.directory(killed) / "checkpoints"
    deadline = time.monotonic() + 120
    while not [p for p in checkpoints.glob("*") if p.name.isdigit() and int(p.name) >= 5]:
        assert process.poll() is None  # it runs until it is killed
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "rows.jsonl").exists()
    subprocess.run([*command, str(killed)], check=True)
    began = began_in(read_journal(cell.directory(killed)))
    assert len({line["step"] for line in began}) == 2  # the second did not begin at step 0
    for key in ("train/loss", "eval/loss"):
        assert series(cell.directory(killed), key) == series(cell.directory(undisturbed), key)
