"""Signals to real training processes: they stop between two steps, and the run goes on unharmed."""

import signal
import time

import pytest
from running import (
    finish,
    records,
    start,
    start_two,
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the config file."""
    return write_config(tmp_path_factory.mktemp("preemption"), CONFIG)


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The losses of a run that nothing disturbed."""
    train_here(folder, "undisturbed")
    losses = records(folder / "undisturbed")
    assert len(losses) == 40 + 41
    return losses


@pytest.mark.seconds
def test_a_signal_stops_after_the_step_and_the_losses_are_those_of_an_undisturbed_run(
    folder, undisturbed, capsys
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
    # To the last bit, with the evaluation that the signal may have come before.
    assert records(folder / "once") == undisturbed


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(folder, undisturbed):
    process = start(folder, "twice", devices=8)
    wait_for_steps(folder / "twice", 3, process)
    process.send_signal(signal.SIGSTOP)  # so that both are waiting
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code in (128 + signal.SIGINT, EXIT_CODE), output  # the first may have been enough
    train_here(folder, "twice")
    assert records(folder / "twice") == undisturbed


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step_also_before_their_first(folder, undisturbed, capsys):
    # Many steps: JAX tells the other process within a second, and both agree on a step to come.
    workdir, longer = folder / "two", ("--schedule.decay-steps", "40", "--num-steps")
    log, size = workdir / "logs" / "host_001.log", 0

    def stop(number, ready):
        processes = start_two(folder, "two", *longer, "2000")
        wait_until(ready, processes[1])
        processes[1].send_signal(number)
        results = [finish(process) for process in processes]
        assert [code for code, _ in results] == [EXIT_CODE] * 2, results
        return max(step for step, _ in records(workdir)), results[0][1]

    stopped, _ = stop(signal.SIGINT, lambda: len(records(workdir)) > 9)
    size = log.stat().st_size
    # JAX has the signal once the process logs. The first save of these two is that at the signal.
    again, output = stop(signal.SIGTERM, lambda: log.stat().st_size > size)
    assert stopped <= again <= stopped + 1  # it may still have had to evaluate
    assert f"stopped after {again} steps" in output
    train_here(folder, "two", *longer, str(max(again + 2, 40)))
    assert f"continuing from step {again}" in capsys.readouterr().out
    ours = {key: value for key, value in records(workdir).items() if key[0] <= 40}
    assert ours.keys() == undisturbed.keys()
    for key, value in ours.items():
        assert value == pytest.approx(undisturbed[key], abs=1e-5)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("step", "count", "number"),
    [
        pytest.param(0, 1, signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(2, 2, signal.SIGUSR1, marks=pytest.mark.slow),
        (4, 1, signal.SIGUSR2),
    ],
)
def test_a_signal_in_an_evaluation_saves_first_and_the_run_evaluates_later(
    folder, step, count, number
):
    """At the start, in the middle, which two processes leave together, and at the end."""
    name = f"evaluating_{step}"
    workdir, four = folder / name, ("--schedule.decay-steps", "4", "--num-steps")
    if step:
        train_here(folder, name, *four, str(step - 1), "--eval.every", "None")
    evaluating = (*four, "4", "--eval.every", str(step or 4))
    long = ("--eval.num-windows", "400000", "--eval.batch-size", "2")
    begin = start if count == 1 else start_two
    started = begin(folder, name, *evaluating, *long)
    processes = [started] if count == 1 else started
    if step:
        wait_for_steps(workdir, step, processes[0])
    else:
        wait_until((workdir / "journal.jsonl").exists, processes[0])
        time.sleep(2)  # the evaluation, which takes far longer, begins
    processes[-1].send_signal(number)
    results = [finish(process) for process in processes]
    assert [code for code, _ in results] == [EXIT_CODE] * count, results
    assert step == 0 or max(list_steps(workdir / "checkpoints")) == step
    assert (step, "eval/loss") not in records(workdir)
    train_here(folder, name, *evaluating)
    assert (step, "eval/loss") in records(workdir)


@pytest.mark.slow
def test_a_kill_in_the_last_evaluation_loses_no_step(folder, capsys):
    # A second or more for each evaluation: after the start, and after the last step, once saved.
    workdir = folder / "evaluated"
    long = ("--num-steps", "2", "--eval.every", "1000", "--eval.num-windows", "8000")
    process = start(folder, "evaluated", *long)
    wait_until(lambda: list_steps(workdir / "checkpoints"), process)
    process.kill()
    code, output = finish(process)
    assert code == -signal.SIGKILL, output
    assert list_steps(workdir / "checkpoints") == [2]
    before = records(workdir)
    assert (2, "eval/loss") not in before
    train_here(folder, "evaluated", *long)
    output = capsys.readouterr().out
    assert "step 2: validation loss" in output
    assert "first step after" not in output
    assert records(workdir).keys() == {*before, (2, "eval/loss")}


@pytest.mark.slow
def test_two_that_could_not_stop_together_are_refused_before_a_step(folder, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "false")
    for code, output in [finish(one) for one in start_two(folder, "deaf")]:
        assert code == OWN_ERROR, output
        assert "JAX_ENABLE_PREEMPTION_SERVICE=false" in output.splitlines()[-1]
        assert "Traceback" not in output
    assert not (folder / "deaf").exists()
