"""One of two processes dies, hangs, fails or never comes: the other ends, and says why."""

import signal
import time
from pathlib import Path

import pytest
from training_runs import finish, free_port, start_python, start_two, wait_for_steps, wait_until

from maxmars.checkpoint import list_steps
from maxmars.preemption import EXIT_CODE
from maxmars.verify_resume import first_difference

pytestmark = pytest.mark.multiprocess

CONFIG = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
from maxmars.config import CheckpointConfig, EvalConfig
from tiny import MODEL, tiny_config

def get_config():
    return tiny_config(
        num_steps=48,
        global_batch_size=64,
        model=dataclasses.replace(MODEL, num_layers=1),
        eval=EvalConfig(every=None),
        checkpoint=CheckpointConfig(every=16),
        hang_timeout_s=5.0,
    )
"""


@pytest.mark.slow
def test_one_of_two_is_killed_then_one_hangs_and_the_run_ends_as_if_undisturbed(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(tests=str(Path(__file__).parents[1])))
    workdir = tmp_path / "run"

    other, victim = start_two(tmp_path, "run")
    wait_until(lambda: list_steps(workdir / "checkpoints"), other)
    victim.kill()
    assert_ended(workdir, other, "process 0 of 2 has lost another one of its run")
    finish(victim)

    begun = (workdir / "metrics.jsonl").stat().st_ino  # a life writes the file anew
    other, victim = start_two(tmp_path, "run")
    wait_until(lambda: (workdir / "metrics.jsonl").stat().st_ino != begun, other)
    wait_for_steps(workdir, 20, other)
    victim.send_signal(signal.SIGSTOP)
    output = assert_ended(workdir, other, "process 0 of 2 hangs: ")
    assert "step_reporter.py" in output  # where it waits
    victim.kill()
    finish(victim)

    results = [finish(process) for process in start_two(tmp_path, "run")]
    assert [code for code, _ in results] == [0, 0], results
    assert "continuing from step 16" in results[0][1]
    assert [finish(process)[0] for process in start_two(tmp_path, "undisturbed")] == [0, 0]
    assert first_difference(tmp_path / "undisturbed", workdir) is None


def assert_ended(workdir, process, reason):
    code, output = finish(process, timeout_s=60)
    assert code == EXIT_CODE, output
    assert reason in output
    last = max(list_steps(workdir / "checkpoints"))
    assert f"continues from the checkpoint of step {last}" in output
    return output


@pytest.mark.slow
def test_the_first_process_is_killed_in_the_middle_of_training(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(tests=str(Path(__file__).parents[1])))
    victim, other = start_two(tmp_path, "run")
    wait_for_steps(tmp_path / "run", 6, victim)
    victim.kill()
    code, output = finish(other, timeout_s=60)
    finish(victim)
    assert code == EXIT_CODE, output
    assert "process 1 of 2 has lost another one of its run" in output


# Joins a run of two, says so, and then does what its last argument says.
PEER = """
import sys, time
from pathlib import Path
import jax
from maxmars import distributed
from maxmars.watchdog import Watchdog

distributed._JOINING_S, distributed._HEARTBEATS_S, distributed._LEAVING_S = 30, 10, 3
address, process, then = sys.argv[1:]
distributed._JOINING_S = 4 if then == "wait for the other" else 30
distributed.initialize(address, 2, int(process))
with Watchdog(None, Path("checkpoints")):
    print("joined", flush=True)
    if then == "fail":
        raise ValueError("an error of this process alone")
    time.sleep(300)
"""


def start_peers(folder, *then):
    address = f"127.0.0.1:{free_port()}"
    return [
        start_python(folder, "-c", PEER, address, process, action)
        for process, action in enumerate(then)
    ]


def wait_until_joined(process):
    assert any(line == "joined\n" for line in process.stdout)


def assert_lost_another(process, number):
    code, output = finish(process, timeout_s=60)
    assert code == EXIT_CODE, output
    assert f"process {number} of 2 has lost another one of its run" in output
    assert "continues from the last complete checkpoint" in output


def test_the_first_process_is_killed_outside_of_collectives(tmp_path):
    """JAX aborts the other in a thread of C++."""
    first, second = start_peers(tmp_path, "sleep", "sleep")
    wait_until_joined(second)
    started = time.monotonic()
    first.kill()
    assert_lost_another(second, 1)
    assert time.monotonic() - started < 5.5  # the abort goes on after six
    finish(first)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_one_stops_answering(tmp_path, stopped):
    processes = start_peers(tmp_path, "sleep", "sleep")
    for process in processes:
        wait_until_joined(process)
    processes[stopped].send_signal(signal.SIGSTOP)
    assert_lost_another(processes[1 - stopped], 1 - stopped)
    processes[stopped].kill()
    finish(processes[stopped])


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_one_fails_alone(tmp_path, failing):
    actions = ["fail" if process == failing else "sleep" for process in range(2)]
    processes = start_peers(tmp_path, *actions)
    wait_until_joined(processes[1 - failing])
    assert_lost_another(processes[1 - failing], 1 - failing)
    code, output = finish(processes[failing])
    assert code == 1, output
    assert "ValueError: an error of this process alone" in output
    assert f"process {failing} of 2 ended with the error above" in output


@pytest.mark.slow
def test_an_abort_from_outside_still_ends_a_process(tmp_path):
    first, second = start_peers(tmp_path, "sleep", "sleep")
    wait_until_joined(second)
    second.send_signal(signal.SIGABRT)
    code, output = finish(second, timeout_s=60)
    assert code == -signal.SIGABRT, output
    assert_lost_another(first, 0)
