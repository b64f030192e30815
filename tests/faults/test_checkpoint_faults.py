"""Damaged files, full disks, two writers: in real processes where it counts.

`tests/checkpoint` has the same damage one kind at a time, with the reason that each gives.
"""

import json
import os
import re
from pathlib import Path

import pytest
from etils import epath
from running import environment, finish_well, free_port, run_python, start_python

from maxmars.checkpoint.lock import acquire

WORKER = Path(__file__).parent / "checkpoint_worker.py"


@pytest.fixture(scope="module")
def shortages(tmp_path_factory):
    """What one process reports of each shortage."""
    folder = tmp_path_factory.mktemp("shortages")
    done = run_python(WORKER, "run_out_of", folder, environment=environment(folder / "cache"))
    reports = map(json.loads, done.stdout.splitlines()[-2:])
    return dict(zip(("limit", "descriptors"), reports, strict=True))


@pytest.mark.seconds
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
def test_damage_that_one_process_sees_is_damage_to_all(tmp_path):
    owned = acquire(epath.Path(tmp_path / "owned"))
    words = [WORKER, "pair", tmp_path / "checkpoints", free_port()]
    outputs = finish_well([start_python(tmp_path, *words, i, devices=2) for i in range(2)])
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    owned.release()
    for result in results:
        assert f"owned is being written by process {os.getpid()} on" in result["refused"]
        assert result["due"] == [60, 120, 180]
        assert (result["step"], result["sound"], result["saved"]) == (1, True, [1, 3])
    assert "another process" in results[0]["skipped"][0][1]
    assert "state cannot be read" in results[1]["skipped"][0][1]
    assert results[0]["left"] == [".lock", "1", "2.damaged"]
