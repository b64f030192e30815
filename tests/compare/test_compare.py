"""A whole comparison of tiny models: its trials, what it records, how it continues."""

import csv
import dataclasses
import json
import math
import re
import runpy
import shutil
import signal
import sys
import threading
from pathlib import Path

import jax
import pytest
from made_up import change_comparison, change_rows, made_row
from refusals import stopped
from running import start_python, wait_until
from tiny import values_of

from maxmars import cli
from maxmars.checkpoint import read
from maxmars.checkpoint.journal import read_journal, session_starts
from maxmars.compare.summary import summarize
from maxmars.compare.trials import Trial, describe_setting, read_rows, write_row
from maxmars.config import MeshConfig, to_dict
from maxmars.train import train

pytestmark = pytest.mark.seconds
LION = Trial(contender="lion", setting=(("learning_rate", 4e-3),), seed=0)
ROOT = Path(__file__).parents[2]


def outcomes(workdir):
    """What a comparison found, by contender."""
    return {outcome.contender.name: outcome for outcome in summarize(workdir).outcomes}


def table(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_what_a_comparison_leaves_behind(compared):
    files = {p.relative_to(compared).as_posix() for p in compared.glob("*")}
    files |= {p.relative_to(compared).as_posix() for p in compared.glob("figures/*")}
    drawn = ("loss_time", "loss_tokens", "norms", "norms_by_component", "tuning_learning_rate")
    assert files == {
        *("cells", "compare.json", "rows.jsonl", "figures", *(f"figures/{n}.png" for n in drawn)),
        *("report.md", "results.csv", "results.tex", "curves.csv"),
    }
    files = {p.name for p in LION.directory(compared).iterdir()}
    assert files >= {"config.json", "environment.json", "metrics.jsonl", "logs"}
    assert "checkpoints" not in files


def test_what_the_command_prints(compared):
    printed = (compared.parent / "printed").read_text()
    assert re.search(r"] lion .*\n +learning_rate=0.001,seed=0\n", printed)
    assert re.search(r"] adamw +diverged .*\n +learning_rate=10000.0,seed=0\n", printed)
    rows = printed.partition("- baseline")[2].partition("tokens, time:")[0].splitlines()
    assert [row.split()[0] for row in rows[2:] if row] == ["adamw", "lion"]
    assert max(map(len, rows)) <= 80


def test_what_is_reported(compared):
    summary = summarize(compared)
    adamw, lion = summary.outcomes
    assert summary.num_missing == 0
    assert adamw.num_diverged == 1
    assert adamw.losses[(("learning_rate", 1e4),)] == [math.inf]
    assert lion.best.test.difference.mean == pytest.approx(
        lion.best.loss.mean - adamw.best.loss.mean
    )
    assert len(lion.search.untried) == 1  # the budget has room for the two rates alone
    assert lion.cost["optimizer_state_bytes"] < adamw.cost["optimizer_state_bytes"]
    assert lion.cost["collective_bytes"] > 0
    assert lion.step_time_s > 0
    assert [p[1] for p in lion.best.line.runs[0].points["eval/loss"]] == [0, 4 * 256]
    page = (compared / "report.md").read_text()
    assert page.count("](figures/") == 5
    assert summary.digests[0][1][:12] in page
    p = summary.p_adjusted["lion"]
    for text in (page, (compared.parent / "printed").read_text()):
        assert f" {p:.2g}† " in text  # of two seeds
        assert f" {p:.2g} " not in text

    rows = [row for row in table(compared / "curves.csv") if row["contender"] == "lion"]
    assert {(row["best"], row["seed"]) for row in rows} >= {("True", "0"), ("True", "1")}
    last = {row["step"]: row for row in rows if (row["best"], row["seed"]) == ("True", "0")}["4"]
    assert float(last["eval/loss"]) == lion.best.losses[0]
    assert float(last["train/grad_norm/mlp"]) > 0
    assert last["setting"] == describe_setting(lion.best.setting)

    first, second = table(compared / "results.csv")
    assert (first["name"], second["name"]) == ("adamw", "lion")
    loss = [float(second[f"loss{end}"]) for end in ("", "_low", "_high")]
    assert loss == list(dataclasses.astuple(lion.best.loss))
    assert (first["difference"], second["num_seeds"], second["search_ended"]) == ("", "2", "False")
    latex = (compared / "results.tex").read_text()
    assert latex.count("\\\\\n") == 3
    assert "learning\\_rate=" in latex
    assert f"{lion.best.loss.mean:.4f}" in latex


def test_with_the_same_seed_all_trials_have_the_same_weights_and_tokens(compared, comparison):
    seen = {}
    for result in read_rows(comparison, compared).values():
        directory = result.trial.directory(compared)
        losses = (values_of(directory, "eval/loss")[0], values_of(directory, "train/loss")[1])
        start = (result.initial_weights, result.tokens, *losses)
        seen.setdefault(result.trial.seed, set()).add(start)
    (first,), (second,) = seen.values()
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_trial_is_the_run_that_train_makes(compared, comparison, tmp_path):
    train(LION.config(comparison.contenders[1]), tmp_path)
    ours = LION.directory(compared)
    for key in ("train/loss", "eval/loss", "train/learning_rate"):
        assert values_of(ours, key) == values_of(tmp_path, key)
    result = read_rows(comparison, compared)[LION]
    assert result.loss == values_of(ours, "eval/loss")[4]
    assert dict(result.train_losses) == values_of(ours, "train/loss")
    assert result.final_state == read(tmp_path / "checkpoints").digest
    assert result.environment["jax"] == jax.__version__


def test_a_run_is_repeated_bit_by_bit(compared, tmp_path, capsys):
    best = min(summarize(compared).outcomes, key=lambda o: o.best.loss.mean).contender.name
    cli.main(["compare", "verify", str(compared), "--workdir", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert f"{best}, seed 0: " in printed
    assert "equal bit by bit" in printed
    assert "changed since" not in printed
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_on_another_mesh_rounding_may_differ(kept, capsys):
    before = {"jax": "0.1", "num_cores": 999}
    change_rows(kept, lambda row: row | {"environment": row["environment"] | before})
    mesh = {"mesh": to_dict(MeshConfig(fsdp=4))}
    change_comparison(kept, lambda fields: fields["configs"]["lion"].update(mesh))
    cli.main(["compare", "verify", str(kept), "--contender", "lion"])
    printed = capsys.readouterr().out
    assert "seed 0: confirmed, " in printed
    assert printed.startswith("changed since: jax 0.1 -> ")
    assert "num_cores 999 -> " in printed


def test_a_result_survives_its_file(comparison, tmp_path):
    result = made_row(LION, math.inf, diverged="step 3 was skipped")
    assert read_rows(comparison, tmp_path) == {}
    write_row(result, tmp_path)
    assert read_rows(comparison, tmp_path) == {LION: result}


@pytest.mark.usefixtures("without_figures")
def test_missing_trials_are_run_and_finished_ones_kept(compare_command, kept, comparison, capsys):
    """Its runs are gone, and rows are damaged. The larger budget extends its grids."""
    before = read_rows(comparison, kept)
    fields = json.loads((kept / "compare.json").read_text())
    damaged = '[]\n{"cell": 1}\n{"loss": "x"}\n{'
    settings = [list(map(list, LION.setting)), 0]
    change_rows(
        kept, lambda r: damaged if [r["cell"]["setting"], r["cell"]["seed"]] == settings else r
    )
    rows = (kept / "rows.jsonl").read_text()
    (kept / "rows.jsonl").write_text(rows + '{"cell": {"contender": "lion", "sett')  # a kill
    assert read_rows(comparison, kept).keys() == before.keys() - {LION}

    cli.main([*compare_command, str(kept), "--budget", "3"])
    printed = capsys.readouterr().out
    assert f"{len(before) - 1} trials" in printed
    after = read_rows(comparison, kept)
    assert after[LION].loss == before[LION].loss
    assert all(after[trial] == before[trial] for trial in before if trial != LION)
    assert printed.count(",seed=") == len(after) - len(before) + 1
    assert json.loads((kept / "compare.json").read_text()) == fields | {"budget": 3}
    for name, outcome in outcomes(kept).items():
        rates = [dict(setting)["learning_rate"] for setting in outcome.losses]
        assert len(rates) == 3
        assert not min(rates[:2]) <= rates[2] <= max(rates[:2]) or name == "adamw"


def test_a_search_that_starts_from_another_comparison(compare_command, compared, tmp_path):
    """What is compared is recorded before the first trial begins, which here is refused."""
    words = [*compare_command, str(tmp_path), "--optimizers", "adamw", "lion"]
    words += ["--start-from", str(compared), "--model.max-seq-len", "1000"]
    with stopped(1, "model.max_seq_len=1000"):
        cli.main([*words, "--tune", "learning_rate", "weight_decay"])
    grids = json.loads((tmp_path / "compare.json").read_text())["compared"]
    for name, outcome in outcomes(compared).items():
        rate = dict(outcome.best.setting)["learning_rate"]
        assert grids[name][0]["scanned"] == [rate / 2, rate, rate * 2]


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(
    compare_command, compared, tmp_path, capsys
):
    cli.main([*compare_command, str(tmp_path / "new"), "--dry-run"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "adamw: begins with learning_rate 0.004 10000" in printed
    assert "lion: begins with learning_rate 0.001 0.004" in printed
    assert "At most 6 runs of 4 steps" in printed
    assert not (tmp_path / "new").exists()
    assert printed in " ".join((compared.parent / "printed").read_text().split())  # it begins so

    cli.main([*compare_command, str(compared), "--dry-run"])  # is complete
    assert "At most 0 runs" in capsys.readouterr().out
    cli.main([*compare_command, str(tmp_path), "--dry-run", "--optimizers", "lion"])
    printed = capsys.readouterr().out
    assert "lion is alone" in printed
    assert "--optimizers" in printed


OWN = """
import optax

def make(learning_rate, *, matrix_specs, mesh, damping):
    if damping > LARGEST:
        raise ValueError(f"damping={damping} is more than {LARGEST}")
    return optax.adam(learning_rate, eps=damping)

LARGEST = """


@pytest.mark.usefixtures("without_figures")
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
    (outcome,) = outcomes(tmp_path / "made").values()
    losses = {dict(setting).get("damping"): row[0] for setting, row in outcome.losses.items()}
    assert losses.keys() == {None, 0.01, 0.04}
    assert losses[0.04] == math.inf
    assert max(losses[None], losses[0.01]) < 10

    shutil.rmtree(tmp_path / "made" / "cells")
    kept = (tmp_path / "made").rename(tmp_path / "kept")
    own.write_text(f"{OWN}0.05")  # trials of other code are none of this comparison

    with stopped(1, own, kept):
        cli.main([*words, str(kept)])
    cli.main(["compare", "verify", str(kept)])
    assert "confirmed, same digest" in capsys.readouterr().out
    (copy,) = (kept / "sources").rglob("own.py")
    copy.write_text(f"{OWN}0.02")
    own.write_text(f"{OWN}0.03")  # where the file lay: only the copy counts
    with stopped(1, f"{copy} "):
        cli.main(["compare", "verify", str(kept)])
    own.write_text(f"{OWN}0.01")  # it refuses the config's own value: nothing runs
    with stopped(1, "own.py:6: damping=0.02"):
        cli.main([*words, str(tmp_path / "nothing")])
    assert not (tmp_path / "nothing").exists()


def test_comparisons_and_runs_in_one_report(compared, kept, tmp_path, capsys, request):
    """Several comparisons, of rows alone, have a column."""
    for name, width in (("a-large", 32), ("small", 16)):
        shutil.copytree(kept, tmp_path / name)

        def resize(fields, width=width):
            for config in fields["configs"].values():
                config["model"]["embed_dim"] = width

        change_comparison(tmp_path / name, resize)
    words = ["report", str(tmp_path / "a-large"), str(tmp_path / "small"), "--out"]
    cli.main([*words, str(tmp_path / "out"), "--format", "svg"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80
    rows = table(tmp_path / "out" / "results.csv")
    assert [row["comparison"] for row in rows] == ["small"] * 2 + ["a-large"] * 2
    assert [row | {"comparison": "", "num_parameters": "_"} for row in rows[2:]] == [
        row | {"num_parameters": "_"} for row in table(compared / "results.csv")
    ]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| small | lion | " in page
    assert "](figures/small/loss_tokens.svg)" in page
    assert "](figures/speed_up.svg)" in page
    assert "small/norms.svg" in page  # of the training losses in the rows
    assert "norms_by_component" not in page

    run = shutil.copytree(LION.directory(compared), tmp_path / "one")
    cli.main(["report", str(compared), str(run), "--out", str(tmp_path / "both")])
    page = (tmp_path / "both" / "report.md").read_text()
    rows = re.findall(r"^\| (.+?) \| [\d,]+ \|", page, re.MULTILINE)
    assert rows == [f"{compared.name}: adamw", f"{compared.name}: lion", "one (1 seed)"]

    # Two runs of the comparison are named with their contenders.
    request.getfixturevalue("without_figures")
    trials = [LION, dataclasses.replace(LION, contender="adamw")]
    trials = [str(trial.directory(compared)) for trial in trials]
    cli.main(["report", *trials, "--out", str(tmp_path / "cells")])
    page = (tmp_path / "cells" / "report.md").read_text()
    assert re.findall(r"^\| (.+?) \| [\d,]+ \|", page, re.MULTILINE) == [
        "lion/learning_rate=0.004,seed=0",
        "adamw/learning_rate=0.004,seed=0",
    ]


def test_the_pages_figures_are_made_of_rows(compared, kept, tmp_path, monkeypatch, capsys):
    rows = shutil.copytree(kept, tmp_path / ".github" / "results" / "which")
    figures = tmp_path / ".github" / "figures"
    figures.mkdir()
    names = ("which-loss_tokens.png", "other.png")
    (tmp_path / "README.md").write_text("".join(f"![](.github/figures/{name})" for name in names))
    tool = str(ROOT / "tools" / "figures.py")
    monkeypatch.setattr(sys, "argv", [tool, "--root", str(tmp_path)])
    with stopped(1):
        runpy.run_path(tool, run_name="__main__")
    assert "other.png MISSING" in capsys.readouterr().out
    size = (compared / "figures" / "loss_tokens.png").stat().st_size
    assert 0 < (figures / names[0]).stat().st_size < size / 2
    assert not (rows / "report.md").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_processes_share_the_trials_and_one_that_is_killed_is_replaced(
    compare_command, tmp_path, capsys
):
    """Two give the same command. One holds still within a trial while the other one, which is this
    process, runs the other trial; then it is killed, and its trial is continued to the same weights
    as undisturbed."""
    words = ["--num-steps", "24", "--seeds", "1", "--learning-rates", "4e-3", "--budget", "1"]
    words += ["--eval.every", "12", "--optimizers", "adamw", "lion", "--workdir"]
    shared = tmp_path / "shared"
    words = [*compare_command[:2], *words, str(shared), "--checkpoint.every", "2"]

    def begun():
        """The trials that have saved a step."""
        saved = shared.glob("cells/*/*/checkpoints/*")
        return {path.parents[1] for path in saved if path.name.isdigit() and int(path.name) >= 2}

    def kill_when_the_other_trial_is_done():
        wait_until(lambda: rows.exists() and rows.read_text().count("\n") == 1, first)
        first.kill()

    rows = shared / "rows.jsonl"
    first = start_python(tmp_path, "-m", "maxmars", *words, devices=len(jax.devices()))
    killer = threading.Thread(target=kill_when_the_other_trial_is_done)
    try:
        wait_until(begun, first)
        first.send_signal(signal.SIGSTOP)
        (held,) = begun()
        killer.start()
        cli.main(words)
    finally:
        first.kill()
        first.communicate()
    killer.join()
    assert ",seed=" in capsys.readouterr().out
    assert rows.read_text().count("\n") == 2  # no trial was run twice
    starts = {
        trial: [at.step for at in session_starts(read_journal(trial))]
        for trial in shared.glob("cells/*/*")
    }
    (own,) = starts.keys() - {held}
    assert starts[own] == [0]
    assert len(starts[held]) == 2
    assert starts[held][0] == 0 < starts[held][1]
    assert (shared / "results.csv").read_text().count("\n") == 3
    cli.main(["compare", "verify", str(shared), "--contender", held.parent.name])
    assert "equal bit by bit" in capsys.readouterr().out
