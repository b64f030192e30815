"""Signals to real training processes: they stop between two steps, and the run goes on unharmed."""

import signal

import pytest
from running import (
    finish,
    records,
    start,
    start_together,
    train_here,
    wait_for_steps,
    wait_until,
    write_config,
)

from maxmars.checkpoint import list_steps
from maxmars.distributed.exits import EXIT_CODE, OWN_ERROR

pytestmark = pytest.mark.multiprocess

CONFIG = """
    num_steps=40,
    model=dataclasses.replace(MODEL, num_layers=1),
    optimizer=ADAMW,
    num_microbatches=1,
    eval=EvalConfig(every=1, num_windows=16, batch_size=16),
    checkpoint=CheckpointConfig(every=None),
"""
# An evaluation that takes far longer than the test.
LONG = ("--eval.num-windows", "400000", "--eval.batch-size", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the config file."""
    return write_config(tmp_path_factory.mktemp("preemption"), CONFIG)


@pytest.mark.seconds
def test_a_signal_stops_after_the_step_and_the_losses_are_those_of_an_undisturbed_run(
    folder, capsys
):
    process = start(folder, "once", devices=8)
    wait_for_steps(folder / "once", 9, process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == EXIT_CODE, output
    stopped = max(step for step, _ in records(folder / "once"))
    assert 9 <= stopped < 40
    train_here(folder, "once")
    assert f"continuing from step {stopped}" in capsys.readouterr().out
    train_here(folder, "undisturbed")
    undisturbed = records(folder / "undisturbed")
    assert len(undisturbed) == 40 + 41
    # To the last bit, with the evaluation that the signal may have come before.
    assert records(folder / "once") == undisturbed


@pytest.mark.seconds
def test_a_signal_in_an_evaluation_saves_first_and_the_run_evaluates_later(folder):
    """At the end a step is saved before its evaluation: test_own_evaluation.py."""
    workdir, steps = folder / "evaluating", ("--schedule.decay-steps", "4", "--num-steps")
    train_here(folder, "evaluating", *steps, "1", "--eval.every", "None")
    process = start(folder, "evaluating", *steps, "4", "--eval.every", "2", *LONG)
    wait_until(lambda: (2, "train/loss") in records(workdir), process)
    process.send_signal(signal.SIGUSR1)
    code, output = finish(process)
    assert code == EXIT_CODE, output
    assert max(list_steps(workdir / "checkpoints")) == 2
    before = records(workdir)
    assert (2, "eval/loss") not in before
    train_here(folder, "evaluating", *steps, "3", "--eval.every", "2")
    assert records(workdir).keys() == {
        *before,
        (2, "eval/loss"),
        (3, "train/loss"),
        (3, "eval/loss"),
    }


@pytest.mark.slow
def test_two_that_could_not_stop_together_are_refused_before_a_step(folder, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "false")
    for code, output in [finish(one) for one in start_together(folder, "deaf", 2)]:
        assert code == OWN_ERROR, output
        assert "JAX_ENABLE_PREEMPTION_SERVICE=false" in output.splitlines()[-1]
        assert "Traceback" not in output
    assert not (folder / "deaf").exists()
