"""Rows of a comparison of tiny models: forged, and on another mesh."""

import dataclasses
import json
import math

import pytest
from made_up import change_comparison, change_rows, made_curve, made_row
from refusals import stopped

from maxmars import cli
from maxmars.compare.trials import Trial
from maxmars.compare.verify import judge
from maxmars.config import MeshConfig, PythonSourcesConfig, to_dict


def verify(kept):
    cli.main(["compare", "verify", str(kept), "--contender", "lion"])


def forge(kept, row, **config):
    """Give Lion's rows other fields, and its config in `compare.json` too."""

    def forged(before):
        environment = before["environment"] | row.get("environment", {})
        return before | row | {"environment": environment}

    change_rows(kept, forged)
    changes = {name: to_dict(value) for name, value in config.items()}
    change_comparison(kept, lambda fields: fields["configs"]["lion"].update(changes))


@pytest.mark.slow
def test_on_another_mesh_rounding_may_differ(kept, capsys):
    forge(kept, {"environment": {"jax": "0.1", "num_cores": 999}}, mesh=MeshConfig(fsdp=4))
    verify(kept)
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
def test_a_row_of_another_start_is_refused(row, config, problem, made, capsys):
    forge(made, row, **config)
    with stopped(1):
        verify(made)
    assert problem in capsys.readouterr().out


@pytest.fixture
def row():
    """A row that its repetition may be compared with."""
    trial = Trial(contender="lion", setting=(("learning_rate", 4e-3),), seed=0)
    losses = tuple((step, 6.0 - step) for step in range(4))
    return made_row(trial, 3.0, curve=made_curve(3.0), train_losses=losses, final_state="1" * 64)


OTHER = "0" * 64


def better(by, digest=None, at=-1):
    """A row with a lower loss at one of its two evaluations, and another digest of its end."""

    def forged(row):
        losses = [*row.curve.losses]
        losses[at] -= by
        curve = dataclasses.replace(row.curve, losses=tuple(losses))
        end = digest or row.final_state
        return dataclasses.replace(row, loss=losses[-1], curve=curve, final_state=end)

    return forged


def without_an_evaluation(row):
    first = {name: getattr(row.curve, name)[1:] for name in ("steps", "tokens", "losses")}
    return dataclasses.replace(row, curve=dataclasses.replace(row.curve, **first))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (better(1e-4), None),
        (better(0.015), "0.015 nats"),  # of a run that is equal bit by bit
        (better(0.015, OTHER), None),
        (better(0.03, OTHER), "0.03 nats"),
        (better(0.03, at=0), "0.03 nats"),
        (better(0.03, OTHER, at=0), None),
        (better(0.06, OTHER, at=0), "0.06 nats"),
        (lambda row: dataclasses.replace(row, loss=math.nan), "inf"),
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
def test_a_file_that_a_comparison_names_elsewhere_does_not_run(made, tmp_path, command):
    foreign = tmp_path / "foreign.py"
    foreign.write_text("import pathlib; pathlib.Path(__file__).with_name('it ran').touch()")
    make = {"type": "Source", "file": str(foreign), "function": "make", "sha256": None}
    model = {"type": "ModuleConfig", "make": make, "vocab_size": 257, "max_seq_len": 16}
    fields = json.loads((made / "compare.json").read_text())
    for config in fields["configs"].values():
        config["model"] = model
    (made / "compare.json").write_text(json.dumps(fields))
    names = {"DIR": str(made), "OUT": str(tmp_path / "out")}
    with stopped(1) as errors:
        cli.main([names.get(word, word) for word in command.split()])
    assert str(made / "sources") in errors.lines[-1]
    assert not (tmp_path / "it ran").exists()
