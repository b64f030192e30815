"""Starts again and again, as by a launcher: `maxmars train` itself makes an end of them.

Data of the user's own make a process fail or abort in the middle of a step.
"""

import json
import signal

import pytest
from running import (
    finish,
    free_port,
    start,
    start_python,
    wait_until,
    write_config,
)

from maxmars.checkpoint import list_steps
from maxmars.distributed.exits import EXIT_CODE, OWN_ERROR

CONFIG = """
    num_steps=24,
    num_microbatches=1,
    model=dataclasses.replace(MODEL, num_layers=1),
    optimizer=ADAMW,
    data=GrainConfig(source="faulty.py:windows", options={"faults": FAULTS}),
    eval=EvalConfig(every=None),
    checkpoint=CheckpointConfig(every=None),
"""
FAULTY = """
import os
from pathlib import Path

import grain, jax
import numpy as np

read = 0

def window(faults, length, i):
    global read
    read += 1
    fault = Path(faults) / str(jax.process_index())
    if read > 160 and fault.exists():
        kind = fault.read_text()
        if kind == "abort":
            os.abort()
        raise OSError(f"{kind} in window {i}")
    return np.arange(length + 1) % 7 + i % 5

def windows(*, split, length, faults):
    return grain.MapDataset.range(400).map(lambda i: window(faults, length, i))
"""

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path):
    """With a config file, and `faults`, where a file named by the number of a process is its
    fault."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "faulty.py").write_text(FAULTY)
    return write_config(tmp_path, CONFIG.replace("FAULTS", repr(str(tmp_path / "faults"))))


def test_after_ten_starts_of_a_job_that_came_to_nothing_all_refuse_until_a_person_starts_it(folder):
    """Then an error of one process alone ends both, and is its exit code: launchers do not start a
    run again that ended with 78."""

    def end_of_job():
        job = {"JAX_COORDINATOR_PORT": str(free_port()), "SLURM_STEP_NODELIST": "127.0.0.1"}
        job |= {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
        words = ["-m", "maxmars", "train", folder / "config.py", "--workdir", folder / "run"]
        tasks = [job | {"SLURM_PROCID": str(i)} for i in range(2)]
        return map(finish, [start_python(folder, *words, variables=task) for task in tasks])

    (folder / "run").mkdir()
    before = {"job": "42", "step": 0, "count": 10, "stopped": True}
    (folder / "run" / "starts.json").write_text(json.dumps(before))
    for code, output in end_of_job():
        assert code == OWN_ERROR, output
        assert "10 starts in a row" in output
    (folder / "faults" / "1").write_text("no such disk")
    good, bad = end_of_job()
    assert bad[0] == OWN_ERROR, bad[1]
    assert "maxmars: error: " in bad[1].splitlines()[-1]
    assert "no such disk in window" in bad[1]
    assert good[0] == EXIT_CODE, good[1]
    assert "process 0 of 2 has lost another process of the run" in good[1]


def test_starts_that_were_stopped_while_starting_or_crash_after_a_checkpoint_do_not_wait(folder):
    notes = folder / "run" / "starts.json"
    for number in (signal.SIGTERM, signal.SIGINT):
        before = notes.read_bytes() if notes.exists() else b""
        process = start(folder, "run")
        wait_until(lambda b=before: notes.exists() and notes.read_bytes() != b, process)
        process.send_signal(number)
        ended, output = finish(process)
        assert ended in (EXIT_CODE, *([130] if number == signal.SIGINT else [])), output

    (folder / "faults" / "0").write_text("abort")
    often = ("--checkpoint.every", "4", "--num-steps", "100", "--global-batch-size", "8")
    reached = [0]
    for _ in range(2):
        code, output = finish(start(folder, "run", *often))
        assert code == -signal.SIGABRT, output
        assert "starts in a row" not in output
        reached.append(max(list_steps(folder / "run" / "checkpoints")))
    assert reached == sorted(set(reached))


def test_a_missing_peer_ends_the_start(folder):
    """JAX aborts, and only the note of this start is written."""
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    process = start(folder, "run", *place, "--process-id", "0", "--start-timeout-s", "3")
    code, output = finish(process, timeout_s=60)
    assert code == -signal.SIGABRT, output
    assert "DEADLINE_EXCEEDED" in output
    assert [path.name for path in (folder / "run").iterdir()] == ["starts.json"]
