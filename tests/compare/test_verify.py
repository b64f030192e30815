"""Rows of a real comparison of tiny models: repeated and forged."""

import dataclasses
import json
import math

import pytest
from made_up import change_comparison, change_rows
from refusals import stopped

from maxmars import cli
from maxmars.compare.summary import summarize
from maxmars.compare.trials import Trial, read_rows
from maxmars.compare.verify import judge
from maxmars.config import (
    MeshConfig,
    PythonSourcesConfig,
    to_dict,
)


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
    assert f"{best}, seed 0: " in printed
    assert "equal bit by bit" in printed
    assert "changed since" not in printed
    assert (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_on_another_mesh_rounding_may_differ(kept, capsys):
    forge(kept, {"environment": {"jax": "0.1", "num_cores": 999}}, mesh=MeshConfig(fsdp=4))
    assert verify(kept) == 0
    printed = capsys.readouterr().out
    assert "seed 0: confirmed, " in printed
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
    trial = Trial(contender="lion", setting=(("learning_rate", 4e-3),), seed=0)
    return read_rows(comparison, compared)[trial]


def better(by, digest=None):
    """A row whose final loss is better than that of its run, with another digest of its end."""

    def forged(row):
        *first, last = row.curve.losses
        curve = dataclasses.replace(row.curve, losses=(*first, last - by))
        end = row.final_state if digest is None else digest
        return dataclasses.replace(row, loss=row.loss - by, curve=curve, final_state=end)

    return forged


def better_on_the_way(by, digest=None):
    def forged(row):
        first, *others = row.curve.losses
        curve = dataclasses.replace(row.curve, losses=(first - by, *others))
        end = row.final_state if digest is None else digest
        return dataclasses.replace(row, curve=curve, final_state=end)

    return forged


def without_a_number(row):
    return dataclasses.replace(row, loss=math.nan)


def without_an_evaluation(row):
    first = {name: getattr(row.curve, name)[1:] for name in ("steps", "tokens", "losses")}
    return dataclasses.replace(row, curve=dataclasses.replace(row.curve, **first))


OTHER = "0" * 64


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda row: row, None),
        (better(1e-4), None),
        (better(0.015), "0.015 nats"),  # of a run that is equal bit by bit
        (better(0.015, OTHER), None),
        (better(0.03, OTHER), "0.03 nats"),
        (better_on_the_way(0.03), "0.03 nats"),
        (better_on_the_way(0.03, OTHER), None),
        (better_on_the_way(0.06, OTHER), "0.06 nats"),
        (without_a_number, "inf"),
        (without_an_evaluation, "inf"),
    ],
)
def test_what_confirms_a_row(change, problem, row):
    verdict = judge(change(row), row)
    assert verdict.problem is None if problem is None else problem in verdict.problem


def test_only_a_run_whose_every_number_is_the_same_is_equal_bit_by_bit(row):
    assert "same digest" in judge(row, row).text
    assert "bit by bit" in judge(row, row).text
    thinned = dataclasses.replace(row, train_losses=row.train_losses[::2])
    assert "bit by bit" in judge(thinned, row).text  # as rows that are kept for long
    for change in (better(1e-9), better(0.0, OTHER)):
        assert "up to rounding" in judge(change(row), row).text


@pytest.mark.parametrize("command", ["compare verify DIR", "report DIR --out OUT"])
def test_a_file_that_a_comparison_names_elsewhere_does_not_run(kept, tmp_path, command):
    foreign = tmp_path / "foreign.py"
    foreign.write_text("import pathlib; pathlib.Path(__file__).with_name('it ran').touch()")
    make = {"type": "Source", "file": str(foreign), "function": "make", "sha256": None}
    model = {"type": "ModuleConfig", "make": make, "vocab_size": 257, "max_seq_len": 16}
    fields = json.loads((kept / "compare.json").read_text())
    for config in fields["configs"].values():
        config["model"] = model
    (kept / "compare.json").write_text(json.dumps(fields))
    names = {"DIR": str(kept), "OUT": str(tmp_path / "out")}
    with stopped(1) as errors:
        cli.main([names.get(word, word) for word in command.split()])
    assert str(kept / "sources") in errors.lines[-1]
    assert not (tmp_path / "it ran").exists()
