"""Rows of a real comparison of tiny models: repeated and forged."""

import json
import shutil
from pathlib import Path

import pytest

from maxmars import cli
from maxmars.config import PythonSourcesConfig, to_dict


@pytest.fixture
def kept(compared, tmp_path):
    """A copy of what of a comparison is kept."""
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("compare.json", "rows.jsonl"):
        shutil.copy(compared / name, kept)
    return kept


def forge(kept, change, contender="lion"):
    """Change the fields of the rows of a contender, or the config that it has in `compare.json`."""
    path = kept / "rows.jsonl"
    rows = list(map(json.loads, path.read_text().splitlines()))
    fields = json.loads((kept / "compare.json").read_text())
    for row in rows:
        if row["cell"]["contender"] == contender:
            change(row, fields["sizes"][""]["configs"][contender])
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (kept / "compare.json").write_text(json.dumps(fields))


def verify(kept, *options, contender="lion"):
    """The exit code of the command."""
    try:
        cli.main(["compare", "verify", str(kept), "--contender", contender, *options])
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.seconds
def test_a_run_is_repeated_bit_by_bit(compared, tmp_path, capsys):
    (report,) = json.loads((compared / "report.json").read_text())["sizes"]
    best = min((o for o in report["outcomes"]), key=lambda o: o["loss"]["mean"])["name"]
    cli.main(["compare", "verify", str(compared), "--workdir", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert f"{best}, seed 0, 4 steps: " in printed
    assert "equal bit by bit" in printed
    assert "changed since" not in printed
    assert (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.seconds
def test_a_copy_of_the_rows_is_repeated(kept, capsys):
    assert verify(kept, "--seed", "1") == 0
    assert "lion, seed 1, 4 steps: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_first_steps_alone(kept, capsys):
    def log_fewer(row, config):
        config["log"]["every"] = 2
        row["train_losses"] = [pair for pair in row["train_losses"] if pair[0] != 3]

    assert verify(kept, "--steps", "2") == 0
    printed = capsys.readouterr().out
    assert "seed 0, 2 steps: equal" in printed
    assert "not computed again" in printed
    # The last of them was one of many of the row's run, which did not log it.
    forge(kept, log_fewer)
    assert verify(kept, "--steps", "3") == 0
    assert "seed 0, 3 steps: equal" in capsys.readouterr().out


@pytest.mark.slow
def test_the_first_steps_of_a_run_that_is_shorter_than_its_warmup(kept, capsys):
    def warm_up(row, config):
        config["schedule"]["warmup_steps"] = 5
        # Of a rate that hardly grows.
        row["cell"]["setting"] = [["learning_rate", 1e-9]]
        row["train_losses"] = row["train_losses"][:1]

    forge(kept, warm_up)
    assert verify(kept, "--steps", "1") == 0
    assert "seed 0, 1 steps: equal" in capsys.readouterr().out


@pytest.mark.slow
def test_under_soap_only_whole_runs_are_judged_on_another_machine(
    compare_command, tmp_path, capsys
):
    """Its first bases depend on rounding, here imitated."""
    config, workdir = tmp_path / "config.py", tmp_path / "soap"
    text = Path(compare_command[1]).read_text().replace('"lion"]', '"lion", "soap"]')
    text = text.replace("import CheckpointConfig", "import SoapConfig, CheckpointConfig")
    config.write_text(text.replace("LionConfig()", "SoapConfig()"))
    words = ["compare", str(config), "--optimizers", "soap", "--seeds", "1", "--num-steps", "4"]
    words += ["--learning-rates", "3e-3", "--budget", "1", "--finalists", "1"]
    cli.main([*words, "--workdir", str(workdir)])
    path = workdir / "rows.jsonl"
    row = json.loads(path.read_text())
    row["train_losses"] = [(step, loss + 0.1) for step, loss in row["train_losses"]]
    path.write_text(f"{json.dumps(row)}\n")
    assert verify(workdir, contender="soap") == 0
    assert "1.0e-01" in capsys.readouterr().out
    assert verify(workdir, "--steps", "2", contender="soap") == 1
    assert "--steps" in capsys.readouterr().out


@pytest.mark.slow
def test_on_another_mesh_rounding_may_differ(kept, capsys):
    def split(row, config):
        config["mesh"]["fsdp"] = 4
        row["environment"] |= {"jax": "0.1", "num_cores": 999}

    forge(kept, split)
    assert verify(kept) == 0
    printed = capsys.readouterr().out
    assert "seed 0, 4 steps: confirmed, " in printed
    assert printed.startswith("changed since: jax 0.1 -> ")
    assert "num_cores 999 -> " in printed


def better(row, config):
    row["loss"] = row["curve"]["losses"][-1] = row["loss"] - 0.05


def slightly_better(row, config):
    row["loss"] = row["curve"]["losses"][-1] = row["loss"] - 0.015


def better_on_the_way(row, config):
    row["curve"]["losses"][0] -= 1


def easier_start(row, config):
    row["train_losses"][0][1] -= 0.01


def no_start(row, config):
    del row["train_losses"][0]


def other_tokens(row, config):
    row["tokens"] = "0" * 64


def other_weights(row, config):
    row["initial_weights"] = "0" * 64


def higher_rate(row, config):
    row["cell"]["setting"][0][1] *= 4


def no_numbers(row, config):
    higher_rate(row, config)
    row["train_losses"][1:] = [(step, "NaN") for step, _ in row["train_losses"][1:]]


@pytest.mark.parametrize(
    ("change", "steps", "problem"),
    [
        pytest.param(no_numbers, "2", "by inf", marks=pytest.mark.slow),
        (better, "4", "0.05 nats"),
        (slightly_better, "4", "0.015"),
        (easier_start, "4", "0.01"),
        pytest.param(easier_start, "2", "0.01", marks=pytest.mark.slow),
        pytest.param(no_start, "2", "training losses", marks=pytest.mark.slow),
        pytest.param(better_on_the_way, "4", "validation loss", marks=pytest.mark.slow),
        (other_tokens, "4", "tokens"),
        (other_weights, "4", "weights"),
        pytest.param(higher_rate, "4", "training loss", marks=pytest.mark.slow),
    ],
)
def test_a_forged_row_is_refused(change, steps, problem, kept, capsys):
    forge(kept, change)
    assert verify(kept, "--steps", steps) == 1
    printed = capsys.readouterr().out
    assert problem in printed


def test_tokens_of_another_python_are_named(kept, capsys):
    def of_python_sources(row, config):
        config["data"] = to_dict(PythonSourcesConfig())
        row["environment"]["python"] = "3.9.1"

    forge(kept, of_python_sources)
    assert verify(kept) == 1
    assert "Python 3.9.1" in capsys.readouterr().out


OWN = """
import optax

def make(learning_rate, *, matrix_specs, mesh, damping):
    return optax.adam(learning_rate, eps=damping)
"""


@pytest.mark.seconds
def test_own_code_is_kept_and_must_be_the_same(compare_command, tmp_path, capsys):
    own, config = tmp_path / "own.py", tmp_path / "config.py"
    own.write_text(OWN)
    make = f'OptaxConfig(make={f"{own}:make"!r}, options={{"damping": 0.02}}, learning_rate=4e-3)'
    text = (
        Path(compare_command[1]).read_text().replace("ADAMW if optimizer", f"{make} if optimizer")
    )
    config.write_text(text.replace("EvalConfig, LionConfig", "EvalConfig, LionConfig, OptaxConfig"))
    words = ["compare", str(config), "--optimizers", "adamw", "--learning-rates", "4e-3"]
    words += ["--num-steps", "4", "--budget", "1", "--seeds", "1"]
    words += ["--workdir", str(tmp_path / "made")]
    cli.main(words)
    shutil.rmtree(tmp_path / "made" / "cells")
    (tmp_path / "made").rename(tmp_path / "kept")
    own.write_text(OWN + "# Changed since.\n")
    assert verify(tmp_path / "kept", contender="adamw") == 0
    assert "confirmed, same digest" in capsys.readouterr().out
    (copy,) = (tmp_path / "kept" / "sources").rglob("own.py")
    copy.write_text(OWN.replace("damping)", "2 * damping)"))
    assert verify(tmp_path / "kept", contender="adamw") == 1
    assert f"{own} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["{folder}", "--contender", "sgd"], 1, "sgd"),
        (["{folder}", "--seed", "7"], 1, "--seed 7"),
        (["{folder}", "--steps", "0"], 2, "--steps 0"),
        (["{folder}", "--data", "{folder}/x"], 1, "{folder}/x"),
        (["{folder}/none"], 1, "{folder}/none"),
        ([], 2, "DIR"),
    ],
)
def test_what_cannot_be_repeated(words, code, named, kept, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", "verify", *(w.format(folder=kept) for w in words)])
    assert stop.value.code == code
    assert named.format(folder=kept) in capsys.readouterr().err
