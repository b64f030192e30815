"""When the watchdog ends a process, and when it does not; tests/faults has a real hang."""

import subprocess
import sys
import threading

import pytest

from maxmars.train.watchdog import Watchdog

PATIENT = """
import time
from maxmars.train.watchdog import Watchdog

with Watchdog(0.2) as dog:
    dog.begin("step 1", "step")  # the first of its kind may take 2 s
    time.sleep(0.4)
    dog.begin("step 2", "step")  # ten times the step before
    time.sleep(0.4)
    with dog.watching("reading"):  # of no kind
        time.sleep(0.4)
    time.sleep(0.4)  # nothing is begun
    for _ in dog.over(range(8), "batch"):  # a chain of short activities
        time.sleep(0.05)
print("patient", flush=True)
"""
HANGS = """
import time
from maxmars.train.watchdog import Watchdog

with Watchdog(0.1) as dog:
    for step in (1, 2):
        dog.begin(f"step {step}", "step")
    time.sleep(60)
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_step_that_takes_too_long_ends_the_process_and_shows_the_stacks():
    code, output = run(HANGS)
    assert code == 75
    assert 'File "<string>", line 8' in output  # where the main thread is
    last = output.splitlines()[-1]
    assert "process 0 of 1 hangs: step 2 has taken " in last
    assert "--hang-timeout-s (0.1). Exit code 75: the same command, in every process, " in last


@pytest.mark.slow
def test_it_is_patient():
    assert run(PATIENT) == (0, "patient\n")


def test_none_watches_nothing():
    with Watchdog(None) as dog:
        dog.begin("step 1", "step")
        assert "watchdog" not in {thread.name for thread in threading.enumerate()}
