"""Rows of a comparison of tiny models, forged."""

import dataclasses
import math

import pytest
from made_up import change_comparison, change_rows, made_curve, made_row
from refusals import stopped

from maxmars import cli
from maxmars.compare.trials import Trial
from maxmars.compare.verify import judge
from maxmars.config import PythonSourcesConfig, to_dict

LION = Trial(contender="lion", setting=(("learning_rate", 4e-3),), seed=0)


def verify(workdir):
    cli.main(["compare", "verify", str(workdir), "--contender", "lion"])


def forge(workdir, row, **config):
    """Give Lion's rows other fields, and its config in `compare.json` too."""

    def forged(before):
        environment = before["environment"] | row.get("environment", {})
        return before | row | {"environment": environment}

    change_rows(workdir, forged)
    changes = {name: to_dict(value) for name, value in config.items()}
    change_comparison(workdir, lambda fields: fields["configs"]["lion"].update(changes))


@pytest.mark.parametrize(
    ("row", "config", "problem"),
    [
        ({"tokens": "0" * 64}, {}, "tokens"),
        ({"initial_weights": "0" * 64}, {}, "weights"),
        ({"environment": {"python": "3.9.1"}}, {"data": PythonSourcesConfig()}, "Python 3.9.1"),
    ],
)
def test_a_row_of_another_start_is_refused(row, config, problem, made, capsys):
    forge(made, row, **config)
    with stopped(1):
        verify(made)
    assert problem in capsys.readouterr().out


LOSSES = tuple((step, 6.0 - step) for step in range(4))
ROW = made_row(LION, 3.0, curve=made_curve(3.0), train_losses=LOSSES, final_state="1" * 64)
OTHER = "0" * 64


def better(by, digest=ROW.final_state, at=-1):
    """The row with a lower loss at one of its two evaluations."""
    losses = [*ROW.curve.losses]
    losses[at] -= by
    curve = dataclasses.replace(ROW.curve, losses=tuple(losses))
    return dataclasses.replace(ROW, loss=losses[-1], curve=curve, final_state=digest)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (better(1e-4), None),
        (better(0.015), "0.015 nats"),  # of a run that is equal bit by bit
        (better(0.015, OTHER), None),
        (better(0.03, OTHER), "0.03 nats"),
        (better(0.03, at=0), "0.03 nats"),
        (better(0.03, OTHER, at=0), None),
        (better(0.06, OTHER, at=0), "0.06 nats"),
        (dataclasses.replace(ROW, loss=math.nan), "inf"),
        (dataclasses.replace(ROW, curve=None), "inf"),
        (dataclasses.replace(ROW, curve=dataclasses.replace(ROW.curve, tokens=(0, 99))), "inf"),
    ],
)
def test_what_confirms_a_row(row, problem):
    verdict = judge(row, ROW)
    assert verdict.problem is None if problem is None else problem in verdict.problem


def test_only_a_run_whose_every_number_is_the_same_is_equal_bit_by_bit():
    assert "same digest" in judge(ROW, ROW).text
    thinned = dataclasses.replace(ROW, train_losses=LOSSES[::2])  # as rows that are kept for long
    for row in (ROW, thinned):
        assert "bit by bit" in judge(row, ROW).text
    for row in (better(1e-9), better(0.0, OTHER)):
        assert "up to rounding" in judge(row, ROW).text


@pytest.mark.parametrize("command", ["compare verify DIR", "report DIR --out OUT"])
def test_a_file_that_a_comparison_names_elsewhere_does_not_run(made, tmp_path, command):
    foreign = tmp_path / "foreign.py"
    foreign.write_text("import pathlib; pathlib.Path(__file__).with_name('it ran').touch()")
    make = {"type": "Source", "file": str(foreign), "function": "make", "sha256": None}
    model = {"type": "ModuleConfig", "make": make, "vocab_size": 257, "max_seq_len": 16}

    def change(fields):
        for config in fields["configs"].values():
            config["model"] = model

    change_comparison(made, change)
    names = {"DIR": str(made), "OUT": str(tmp_path / "out")}
    with stopped(1) as errors:
        cli.main([names.get(word, word) for word in command.split()])
    assert str(made / "sources") in errors.lines[-1]
    assert not (tmp_path / "it ran").exists()
