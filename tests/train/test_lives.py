"""Which starts of a run count, and when the next one is refused; tests/faults has real ones."""

import json
import os
import socket

import pytest
from etils import epath
from refusals import refused

from maxmars.checkpoint.lock import InUseError, acquire
from maxmars.train.lives import Life


def begin(workdir):
    """A start that ends without a word, as one that is killed."""
    said = []
    life = Life(workdir, pause_s=0.001)
    life.begin(log=said.append)
    life.met()
    return life, said


def lives(workdir):
    return json.loads((workdir / "lives.json").read_text())


def write(workdir, lives, *, step=0):
    record = {"job": None, "step": step, "lives": lives}
    (workdir / "lives.json").write_text(json.dumps(record))


def test_a_start_that_ends_by_itself_leaves_nothing(tmp_path):
    for end in (Life.finished, Life.leave):
        life, _ = begin(tmp_path / "new" / "run")
        end(life)
        assert not (tmp_path / "new").exists()


def test_starts_that_end_without_a_word_wait_and_the_tenth_is_the_last(tmp_path):
    said = [begin(tmp_path)[1] for _ in range(10)]
    assert [len(lines) for lines in said] == [0, 0, *[1] * 8]
    with refused(ValueError, tmp_path, "10 starts", "step 0"):
        begin(tmp_path)
    _, said = begin(tmp_path)  # by a person
    assert said == []


def test_the_start_after_one_that_would_have_refused_need_not_meet_the_others(tmp_path):
    write(tmp_path, 10)
    Life(tmp_path, pause_s=0.001).begin(log=[].append)
    with refused(ValueError, tmp_path, "10 starts", "step 0"):
        Life(tmp_path, pause_s=0.001).begin(log=[].append)


def test_ten_new_steps_forget_them(tmp_path):
    write(tmp_path, 9, step=4)
    (tmp_path / "checkpoints" / "13").mkdir(parents=True)
    _, said = begin(tmp_path)
    assert len(said) == 1
    assert lives(tmp_path) == {"job": None, "step": 13, "lives": 10, "stopped": False}
    (tmp_path / "checkpoints" / "23").mkdir(parents=True)
    _, said = begin(tmp_path)
    assert said == []
    assert lives(tmp_path) == {"job": None, "step": 23, "lives": 1, "stopped": False}


def test_the_start_after_a_stop_on_request_does_not_wait(tmp_path):
    for _ in range(4):
        life, said = begin(tmp_path)
        life.stopped()
        assert said == []
    assert lives(tmp_path)["lives"] == 4
    life, _ = begin(tmp_path)
    life.finished()
    assert not (tmp_path / "lives.json").exists()


@pytest.mark.parametrize("text", ["{", "[" * 10**6, '{"job": null, "vain_stops": 1, "lives": []}'])
def test_damaged_notes_stop_nothing(tmp_path, text):
    (tmp_path / "lives.json").write_text(text)
    begin(tmp_path)
    assert lives(tmp_path)["lives"] == 1


def test_the_error_of_another_process_of_the_job_is_found(tmp_path, in_job):
    in_job(1)
    life, _ = begin(tmp_path)
    told = {"job": "2", "host": socket.gethostname(), "error": "no such disk"}
    (tmp_path / "failed.json").write_text(json.dumps(told))
    assert life.lost() is None
    told["job"] = "1"
    (tmp_path / "failed.json").write_text(json.dumps(told))
    assert life.lost() == f"{socket.gethostname()} says: no such disk"
    assert not (tmp_path / "lives.json").exists()  # a launcher ends by it
    life, _ = begin(tmp_path)  # the next start knows nothing of it
    assert life.lost() is None
    assert lives(tmp_path)["lives"] == 1


@pytest.fixture
def in_job(monkeypatch):
    """Makes what follows a part of a job of SLURM."""
    return lambda number: monkeypatch.setenv("SLURM_JOB_ID", str(number))


def test_ten_stops_in_a_row_after_hardly_any_steps_are_refused_once(tmp_path):
    def stop_after(steps):
        life, _ = begin(tmp_path)
        step = lives(tmp_path)["step"] + steps
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
        life.stopped()

    for steps in [9] * 8 + [10] + [0, 9] * 5:
        stop_after(steps)
    with refused(ValueError, tmp_path, "10 starts", "10 steps"):
        begin(tmp_path)
    failed = tmp_path / "failed.json"  # for SLURM: the others wait for this process, and abort
    assert "10 starts in a row" in json.loads(failed.read_text())["error"]
    stop_after(1)
    assert not failed.exists()


def test_lives_of_another_job_do_not_count(tmp_path, in_job):
    in_job(1)
    for _ in range(2):
        begin(tmp_path)
    in_job(2)
    _, said = begin(tmp_path)
    assert said == []
    assert lives(tmp_path)["lives"] == 1


@pytest.mark.seconds
def test_a_start_in_a_workdir_of_another_run_touches_no_file_of_a_life(tmp_path, in_job):
    in_job(1)
    begin(tmp_path)
    (tmp_path / "failed.json").write_text('{"job": "1", "host": "n1", "error": "no such disk"}')
    lock = acquire(epath.Path(tmp_path) / "checkpoints")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    in_job(2)
    life, _ = begin(epath.Path(tmp_path))
    assert life.own_error() is None
    with refused(InUseError, tmp_path / "checkpoints", f"process {os.getpid()}"), life:
        acquire(epath.Path(tmp_path) / "checkpoints")
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json")} == before
    lock.release()


def test_a_start_that_another_one_forestalls_leaves_the_files_to_that(tmp_path):
    life, _ = begin(tmp_path)
    (tmp_path / "lives.json").write_text("of the other")
    with pytest.raises(InUseError), life:
        raise InUseError("the other was faster")
    assert (tmp_path / "lives.json").read_text() == "of the other"
