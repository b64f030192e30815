"""Where the seconds go, and when a hang ends the process; tests/faults has a real hang."""

import subprocess
import sys
import threading

import pytest

from maxmars.train.clock import Clock

PATIENT = """
import time
from maxmars.train.clock import Clock

with Clock(0.2) as clock:
    with clock("steps", "step 1", kind="step"):  # the first of its kind may take 2 s
        time.sleep(0.4)
    with clock("steps", "step 2", kind="step"):  # ten times the step before
        time.sleep(0.4)
    with clock("start", "reading"):  # of no kind
        time.sleep(0.4)
    time.sleep(0.4)  # nothing is begun
    with clock("evaluation", "validation"):
        for _ in range(30):  # a chain of short intervals, together longer than one may be
            clock.lap("batch")
            time.sleep(0.1)
print("patient", flush=True)
"""
HANGS_IN_A_BATCH = """
import time
from maxmars.train.clock import Clock

with Clock(0.1) as clock, clock("evaluation", "HellaSwag"):
    for batch in (1, 2):
        clock.lap("a batch")
        time.sleep(60 * (batch - 1))
"""
HANGS = """
import time
from maxmars.train.clock import Clock

with Clock(0.1) as clock:
    for step in (1, 2):
        with clock("steps", f"step {step}", kind="step"):
            time.sleep(60 * (step - 1))
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.seconds
def test_a_step_that_takes_too_long_ends_the_process_and_shows_the_stacks():
    code, output = run(HANGS)
    assert code == 75
    assert 'File "<string>", line 8' in output  # where the main thread is
    last = output.splitlines()[-1]
    assert "process 0 of 1 hangs: step 2 has taken " in last
    assert "--hang-timeout-s (0.1). Exit code 75: the same command, in every process, " in last


@pytest.mark.seconds
def test_a_batch_that_takes_too_long_ends_the_process():
    code, output = run(HANGS_IN_A_BATCH)
    assert code == 75
    assert " hangs: a batch has taken " in output.splitlines()[-1]


@pytest.mark.slow
def test_it_is_patient():
    assert run(PATIENT) == (0, "patient\n")


def test_none_watches_nothing():
    with Clock(None) as clock, clock("steps", "step 1", kind="step"):
        assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_each_second_is_of_one_activity():
    time = [0.0]
    clock = Clock(now=lambda: time[0])

    def pass_s(seconds):
        time[0] += seconds

    pass_s(1)
    with clock("start", "reading the checkpoint"):
        pass_s(2)
    for step in (1, 2, 3):
        with clock("data_wait", "tokens", kind="tokens"):
            pass_s(10)
        with clock("steps", f"step {step}", kind="step"):
            pass_s(100)
    pass_s(1000)
    with clock("evaluation", "validation"):
        pass_s(0.25)
        for _ in range(2):
            clock.lap("batch")
            pass_s(0.5)
    with pytest.raises(ZeroDivisionError), clock("checkpoint", "writing"):
        pass_s(5000 / 0)
    pass_s(5000)
    pass_s(1)  # what an error leaves open lasts until the end
    assert clock.seconds == {
        "start": 3, "data_wait": 30, "compile": 100, "steps": 200, "other": 1000,
        "evaluation": 1.25, "checkpoint": 5001,
    }  # fmt: skip
