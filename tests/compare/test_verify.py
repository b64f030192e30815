"""Rows of a real comparison of tiny models: repeated and forged."""

import dataclasses
import json
import math

import pytest
from made_up import change_comparison, change_rows

from maxmars import cli
from maxmars.compare.cells import Cell, read_results
from maxmars.compare.summary import summarize
from maxmars.compare.verify import judge
from maxmars.config import (
    MeshConfig,
    PythonSourcesConfig,
    ScheduleConfig,
    SoapConfig,
    to_dict,
)

STEPS = 4


def verify(kept, *options):
    """The exit code of the command."""
    try:
        cli.main(["compare", "verify", str(kept), "--contender", "lion", *options])
    except SystemExit as stop:
        return stop.code
    return 0


def forge(kept, row, **config):
    """Give Lion's rows other fields, and its config in `compare.json` too."""

    def forged(before):
        environment = before["environment"] | row.get("environment", {})
        return before | row | {"environment": environment}

    change_rows(kept, forged)
    changes = {name: to_dict(value) for name, value in config.items()}
    change_comparison(kept, lambda fields: fields["configs"]["lion"].update(changes))


@pytest.mark.seconds
def test_a_run_is_repeated_bit_by_bit(compared, tmp_path, capsys):
    best = min(summarize(compared).outcomes, key=lambda o: o.best.loss.mean).contender.name
    cli.main(["compare", "verify", str(compared), "--workdir", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert f"{best}, seed 0, {STEPS} steps: " in printed
    assert "equal bit by bit" in printed
    assert "changed since" not in printed
    assert (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.seconds
def test_the_first_steps_of_a_copy_whose_runs_are_shorter_than_their_warmup(kept, capsys):
    forge(kept, {}, schedule=ScheduleConfig(warmup_steps=5))
    assert verify(kept, "--steps", "1", "--seed", "1") == 0
    printed = capsys.readouterr().out
    assert "lion, seed 1, 1 steps: equal" in printed
    assert "not computed again" in printed


@pytest.mark.slow
def test_on_another_mesh_rounding_may_differ(kept, capsys):
    forge(kept, {"environment": {"jax": "0.1", "num_cores": 999}}, mesh=MeshConfig(fsdp=4))
    assert verify(kept) == 0
    printed = capsys.readouterr().out
    assert "seed 0, 4 steps: confirmed, " in printed
    assert printed.startswith("changed since: jax 0.1 -> ")
    assert "num_cores 999 -> " in printed


@pytest.mark.parametrize(
    ("row", "config", "problem"),
    [
        ({"tokens": "0" * 64}, {}, "tokens"),
        ({"initial_weights": "0" * 64}, {}, "weights"),
        ({"environment": {"python": "3.9.1"}}, {"data": PythonSourcesConfig()}, "Python 3.9.1"),
    ],
)
def test_a_row_of_another_start_is_refused(row, config, problem, kept, capsys):
    forge(kept, row, **config)
    assert verify(kept) == 1
    assert problem in capsys.readouterr().out


@pytest.fixture(scope="module")
def row(compared, comparison):
    """Lion's row, to which its repetition here is equal bit by bit."""
    cell = Cell(contender="lion", setting=(("learning_rate", 4e-3),), seed=0)
    return read_results(comparison, compared)[cell]


@pytest.fixture
def config(comparison, row):
    return row.cell.config(comparison.contenders[1])


def better(by, also_early=0.0):
    """A row whose final loss is better than that of its run, and all training losses by so much."""

    def change(row):
        *first, last = row.curve.losses
        curve = dataclasses.replace(row.curve, losses=(*first, last - by))
        train_losses = tuple((step, loss - also_early) for step, loss in row.train_losses)
        changes = {"loss": row.loss - by, "curve": curve, "train_losses": train_losses}
        state = "0" * 64 if also_early else row.final_state
        return dataclasses.replace(row, **changes, final_state=state)

    return change


def better_on_the_way(row):
    first, *others = row.curve.losses
    curve = dataclasses.replace(row.curve, losses=(first - 1, *others))
    return dataclasses.replace(row, curve=curve)


def with_train_losses(change):
    """A row with `change(step, loss)` for each training loss; None leaves it out."""

    def forged(row):
        pairs = [(step, change(step, loss)) for step, loss in row.train_losses]
        pairs = tuple((step, loss) for step, loss in pairs if loss is not None)
        return dataclasses.replace(row, train_losses=pairs, final_state="0" * 64)

    return forged


easier_start = with_train_losses(lambda step, loss: loss - 0.01 * (step == 1))
no_numbers = with_train_losses(lambda step, loss: loss if step == 1 else math.nan)
no_start = with_train_losses(lambda step, loss: None if step == 1 else loss)
not_each_step = with_train_losses(lambda step, loss: None if step == 3 else loss)
rounded = with_train_losses(lambda step, loss: loss + 1e-7 * step)


@pytest.mark.parametrize(
    ("change", "steps", "problem"),
    [
        (better(0.05), STEPS, "0.05 nats"),
        (better(0.015), STEPS, "0.015"),  # of a run that is equal bit by bit
        (better(0.015, also_early=1e-4), STEPS, None),
        (better(0.03, also_early=1e-4), STEPS, "0.03 nats"),
        (better_on_the_way, STEPS, "validation loss"),
        (easier_start, STEPS, "0.01"),
        (easier_start, 2, "0.01"),
        (no_numbers, 2, "by inf"),
        (no_start, 2, "training losses"),
        (not_each_step, 3, None),  # the last step is always logged, here but not there
        (rounded, STEPS, None),
        (lambda row: row, 2, None),
    ],
)
def test_what_confirms_a_row(change, steps, problem, row, config):
    first = tuple(pair for pair in row.train_losses if pair[0] <= steps)
    verdict = judge(change(row), dataclasses.replace(row, train_losses=first), config, steps)
    assert verdict.problem is None if problem is None else problem in verdict.problem
    assert verdict.is_whole == (steps == STEPS)


def test_under_soap_only_whole_runs_are_judged_on_another_machine(row, config):
    """Its first bases depend on rounding."""
    config = dataclasses.replace(config, optimizer=SoapConfig())
    assert judge(easier_start(row), row, config, STEPS).problem is None
    assert "--steps" in judge(easier_start(row), row, config, 2).problem
    assert "by inf" in judge(no_numbers(row), row, config, STEPS).problem


@pytest.mark.parametrize("command", ["compare verify DIR", "report DIR --out OUT"])
def test_a_file_that_a_comparison_names_elsewhere_does_not_run(kept, tmp_path, command, capsys):
    foreign = tmp_path / "foreign.py"
    foreign.write_text("import pathlib; pathlib.Path(__file__).with_name('it ran').touch()")
    make = {"type": "Source", "file": str(foreign), "function": "make", "sha256": None}
    model = {"type": "ModuleConfig", "make": make, "vocab_size": 257, "max_seq_len": 16}
    fields = json.loads((kept / "compare.json").read_text())
    for config in fields["configs"].values():
        config["model"] = model
    (kept / "compare.json").write_text(json.dumps(fields))
    names = {"DIR": str(kept), "OUT": str(tmp_path / "out")}
    with pytest.raises(SystemExit) as stop:
        cli.main([names.get(word, word) for word in command.split()])
    assert stop.value.code == 1
    assert str(kept / "sources") in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "it ran").exists()
