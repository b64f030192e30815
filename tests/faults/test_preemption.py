"""Signals to real training processes: they stop between two steps, and the run goes on unharmed."""

import signal
import time
from pathlib import Path

import pytest
from running import finish, records, start, start_two, wait_for_steps, wait_until

from maxmars.checkpoint import list_steps
from maxmars.distributed.exits import EXIT_CODE

pytestmark = pytest.mark.multiprocess

CONFIG = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
from maxmars.config import CheckpointConfig, EvalConfig
from tiny import ADAMW, MODEL, tiny_config

def get_config():
    return tiny_config(
        num_steps=40,
        model=dataclasses.replace(MODEL, num_layers=1),
        optimizer=ADAMW,
        num_microbatches=1,
        eval=EvalConfig(every=1, num_windows=16, batch_size=16),
        checkpoint=CheckpointConfig(every=None),
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the config file."""
    path = tmp_path_factory.mktemp("preemption")
    (path / "config.py").write_text(CONFIG.format(tests=str(Path(__file__).parents[1])))
    return path


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The losses of a run that nothing disturbed."""
    assert finish(start(folder, "undisturbed"))[0] == 0
    found = records(folder / "undisturbed")
    assert len(found) == 40 + 41
    return found


@pytest.mark.seconds
def test_a_signal_stops_after_the_step_and_the_run_goes_on(folder):
    found = stop_and_continue(folder, "once", signal.SIGTERM)
    steps = range(41)
    assert found.keys() == {
        *((step, "train/loss") for step in steps[1:]),
        *((step, "eval/loss") for step in steps),
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_losses_are_those_of_an_undisturbed_run(folder, undisturbed, number):
    # To the last bit, with the evaluation that the signal may have come before.
    assert stop_and_continue(folder, number.name, number) == undisturbed


def stop_and_continue(folder, name, number):
    """The losses of a run that ends by a signal and is started again."""
    process = start(folder, name)
    wait_for_steps(folder / name, 9, process)
    process.send_signal(number)
    code, output = finish(process)
    assert code == EXIT_CODE, output
    assert "the same command continues" in output
    stopped = max(step for step, _ in records(folder / name))
    assert 9 <= stopped < 40
    code, output = finish(start(folder, name))
    assert code == 0, output
    assert f"continuing from step {stopped}" in output
    return records(folder / name)


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(folder, undisturbed):
    process = start(folder, "twice")
    wait_for_steps(folder / "twice", 3, process)
    process.send_signal(signal.SIGSTOP)  # so that both are waiting
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code in (128 + signal.SIGINT, EXIT_CODE), output  # the first may have been enough
    assert finish(start(folder, "twice"))[0] == 0
    assert records(folder / "twice") == undisturbed


@pytest.mark.slow
def test_an_interrupt_of_one_process_stops_both_at_the_same_step(folder, undisturbed):
    # Many steps: JAX tells the other process within a second, and both agree on a step to come.
    longer = ("--schedule.decay-steps", "40", "--num-steps")
    processes = start_two(folder, "two", *longer, "2000")
    wait_for_steps(folder / "two", 5, processes[0])
    processes[1].send_signal(signal.SIGINT)
    results = [finish(process) for process in processes]
    assert [code for code, _ in results] == [EXIT_CODE] * 2, results
    stopped = max(step for step, _ in records(folder / "two"))
    code, output = finish(start(folder, "two", *longer, str(max(stopped + 2, 40))))
    assert code == 0, output
    assert f"continuing from step {stopped}" in output
    ours = {key: value for key, value in records(folder / "two").items() if key[0] <= 40}
    assert ours.keys() == undisturbed.keys()
    for key, value in ours.items():
        assert value == pytest.approx(undisturbed[key], abs=1e-5)


@pytest.mark.slow
def test_a_signal_before_the_first_step_of_two_that_continue(folder):
    assert [finish(one)[0] for one in start_two(folder, "early", "--num-steps", "4")] == [0, 0]
    longer = ("--schedule.decay-steps", "4", "--num-steps", "3000")
    log = folder / "early" / "logs" / "host_001.log"
    before = log.stat().st_size
    processes = start_two(folder, "early", *longer)
    wait_until(lambda: log.stat().st_size > before, processes[1])  # JAX has the signal by then
    processes[1].send_signal(signal.SIGTERM)
    results = [finish(process) for process in processes]
    assert [code for code, _ in results] == [EXIT_CODE] * 2, results
    assert "stopped after 5 steps" in results[0][1]


@pytest.mark.slow
def test_the_first_save_of_two_that_continue_is_that_at_a_signal(folder):
    assert [finish(one)[0] for one in start_two(folder, "first", "--num-steps", "4")] == [0, 0]
    longer = ("--schedule.decay-steps", "4", "--num-steps", "3000", "--checkpoint.every", "None")
    processes = start_two(folder, "first", *longer)
    wait_for_steps(folder / "first", 6, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    results = [finish(process) for process in processes]
    assert [code for code, _ in results] == [EXIT_CODE] * 2, results
    assert max(list_steps(folder / "first" / "checkpoints")) > 4


LONG = ("--eval.num-windows", "400000", "--eval.batch-size", "2")


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("step", "at"),
    [
        (2, "in the middle"),
        pytest.param(4, "at the end", marks=pytest.mark.slow),
        pytest.param(0, "at the start", marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_an_evaluation_saves_first_and_the_run_evaluates_later(folder, step, at):
    workdir = begin_without_evaluations(folder, at, step)
    arguments = evaluating_at(step)
    process = start(folder, at, *arguments, *LONG)
    if step:
        wait_for_steps(workdir, step, process)
    else:
        wait_until((workdir / "journal.jsonl").exists, process)
        time.sleep(2)  # the evaluation, which takes far longer, begins
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == EXIT_CODE, output
    assert step == 0 or max(list_steps(workdir / "checkpoints")) == step
    assert (step, "eval/loss") not in records(workdir)
    code, output = finish(start(folder, at, *arguments))
    assert code == 0, output
    assert (step, "eval/loss") in records(workdir)


@pytest.mark.slow
def test_two_processes_leave_an_evaluation_together(folder):
    workdir = begin_without_evaluations(folder, "both", 2)
    processes = start_two(folder, "both", *evaluating_at(2), *LONG)
    wait_for_steps(workdir, 2, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    results = [finish(process) for process in processes]
    assert [code for code, _ in results] == [EXIT_CODE] * 2, results
    assert max(list_steps(workdir / "checkpoints")) == 2
    assert (2, "eval/loss") not in records(workdir)
    results = [finish(process) for process in start_two(folder, "both", *evaluating_at(2))]
    assert [code for code, _ in results] == [0, 0], results
    assert (2, "eval/loss") in records(workdir)


def begin_without_evaluations(folder, name, step):
    """The directory of a run that has made the steps before this one."""
    arguments = ("--num-steps", str(step - 1), "--schedule.decay-steps", "4")
    if step > 1:
        assert finish(start(folder, name, *arguments, "--eval.every", "None"))[0] == 0
    return folder / name


def evaluating_at(step):
    every = ("--eval.every", str(step or 4))
    return ("--num-steps", "4", "--schedule.decay-steps", "4", *every)


@pytest.mark.slow
def test_a_kill_in_the_last_evaluation_loses_no_step(folder):
    # A second or more for each evaluation: after the start, and after the last step, once saved.
    long = ("--num-steps", "2", "--eval.every", "1000", "--eval.num-windows", "8000")
    process = start(folder, "evaluated", *long)
    wait_until(lambda: list_steps(folder / "evaluated" / "checkpoints"), process)
    process.kill()
    code, output = finish(process)
    assert code == -signal.SIGKILL, output
    assert list_steps(folder / "evaluated" / "checkpoints") == [2]
    before = records(folder / "evaluated")
    assert (2, "eval/loss") not in before
    code, output = finish(start(folder, "evaluated", *long))
    assert code == 0, output
    assert "step 2: validation loss" in output
    assert "first step after" not in output
    assert records(folder / "evaluated").keys() == {*before, (2, "eval/loss")}


@pytest.mark.slow
def test_two_that_could_not_stop_together_are_refused_before_a_step(folder, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "false")
    for code, output in [finish(one) for one in start_two(folder, "deaf")]:
        assert code == 1, output
        assert "JAX_ENABLE_PREEMPTION_SERVICE=false" in output.splitlines()[-1]
        assert "Traceback" not in output
    assert not (folder / "deaf").exists()
