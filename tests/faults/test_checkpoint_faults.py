"""Damaged files, full disks, two writers: in real processes where it counts.

`tests/checkpoint` has the same damage one kind at a time, with the reason that each gives.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath
from running import environment, free_port, run_python

from maxmars.checkpoint.lock import acquire

WORKER = Path(__file__).parent / "checkpoint_worker.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def shortages(tmp_path_factory, cache):
    """What one process reports of each shortage."""
    words = [WORKER, "run_out_of", tmp_path_factory.mktemp("shortages")]
    done = run_python(*words, environment=environment(cache))
    reports = map(json.loads, done.stdout.splitlines()[-2:])
    return dict(zip(("limit", "descriptors"), reports, strict=True))


def test_a_full_disk_costs_no_checkpoint(shortages):
    result = shortages["limit"]
    assert len(result["errors"]) >= 2  # the save, and the next one
    for error in result["errors"]:
        assert re.search(r"File too large|FILE_SIZE|EFBIG", error)
    assert result["after"] == {"step": 1, "sound": True}
    assert result["again"] == [1, 2]  # once there is space
    assert result["left"] == [".lock", "1", "2"]


def test_a_reader_in_trouble_takes_no_older_checkpoint(shortages):
    result = shortages["descriptors"]
    assert result["limits"][-1] == 2
    assert any("Too many open files" in str(outcome) for outcome in result["limits"])
    assert 1 not in result["limits"]
    assert not any("no checkpoint in" in str(outcome) for outcome in result["limits"])
    assert result["left"] == [".lock", "1", "2"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_damage_that_one_process_sees_is_damage_to_all(tmp_path, cache):
    port = free_port()
    owned = acquire(epath.Path(tmp_path / "owned"))
    command = [sys.executable, str(WORKER), "pair"]
    processes = [
        subprocess.Popen(
            [*command, str(tmp_path / "checkpoints"), str(port), str(i)],
            env=environment(cache, devices=2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    results = []
    for process in processes:
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 0, errors
        results.append(json.loads(output.splitlines()[-1]))
    owned.release()
    for result in results:
        assert f"owned is being written by process {os.getpid()} on" in result["refused"]
    assert results[0]["due"] == results[1]["due"] == [60, 120, 180]
    assert [r["step"] for r in results] == [1, 1]
    assert [r["sound"] for r in results] == [True, True]
    assert "another process" in results[0]["skipped"][0][1]
    assert "state cannot be read" in results[1]["skipped"][0][1]
    assert results[0]["left"] == [".lock", "1", "2.damaged"]
    assert results[0]["saved"] == results[1]["saved"] == [1, 3]
