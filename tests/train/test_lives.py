"""Which starts of a run count, and when the next one is refused; tests/faults has real ones."""

import json
import socket

import pytest

from maxmars.train.lives import Life


def begin(workdir):
    """A start that ends without a word, as one that is killed."""
    said = []
    life = Life(workdir, pause_s=0.01)
    life.begin(log=said.append)
    life.met()
    return life, said


def lives(workdir):
    return json.loads((workdir / "lives.json").read_text())


def write(workdir, lives, *, stops=0, step=0):
    workdir.mkdir(exist_ok=True)
    record = {"stops": stops, "step": step, "lives": lives}
    (workdir / "lives.json").write_text(json.dumps(record))


LOST = {"began": "some time", "met": True, "machines": "others"}
NEVER_MET = {"began": "some time", "met": False, "machines": None}


def test_a_start_that_ends_by_itself_leaves_nothing(tmp_path):
    for end in (Life.finished, Life.leave):
        life, _ = begin(tmp_path / "new" / "run")
        end(life)
        assert not (tmp_path / "new").exists()


def test_three_crashes_on_the_same_machine_are_refused_once(tmp_path):
    begin(tmp_path)
    machine = lives(tmp_path)["lives"][0]["machines"]
    write(tmp_path, [{**LOST, "machines": machine}] * 2 + [LOST])
    begin(tmp_path)
    assert len(lives(tmp_path)["lives"]) == 4
    write(tmp_path, [{**LOST, "machines": machine}] * 3)
    with pytest.raises(ValueError, match="3 starts on these machines crashed, hung or were kill"):
        begin(tmp_path)
    _, said = begin(tmp_path)  # by a person
    assert said == []


@pytest.mark.parametrize("life", [LOST, NEVER_MET])
def test_ten_lost_machines_or_processes_are_refused(tmp_path, life):
    write(tmp_path, [life] * 10)
    with pytest.raises(ValueError, match="10 starts lost a machine, or a process that never came"):
        begin(tmp_path)
    begin(tmp_path)


def test_a_new_checkpoint_forgets_them(tmp_path):
    write(tmp_path, [LOST] * 10, step=4)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    _, said = begin(tmp_path)
    assert said == []
    assert lives(tmp_path)["step"] == 5
    assert len(lives(tmp_path)["lives"]) == 1


def test_stops_on_request_do_not_count_as_crashes_but_have_an_end(tmp_path):
    for _ in range(4):
        life, said = begin(tmp_path)
        life.stopped()
    assert said == []
    assert lives(tmp_path) == {"stops": 4, "step": 0, "lives": []}
    write(tmp_path, [], stops=10_000)
    with pytest.raises(ValueError, match="the run was stopped 10,000 times"):
        begin(tmp_path)
    life, _ = begin(tmp_path)
    life.finished()
    assert not (tmp_path / "lives.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"lives": 3}', '{"lives": [[]], "stops": 1}'])
def test_damaged_notes_stop_nothing(tmp_path, text):
    (tmp_path / "lives.json").write_text(text)
    begin(tmp_path)
    assert len(lives(tmp_path)["lives"]) == 1


def test_the_error_of_another_process_is_found(tmp_path):
    life, _ = begin(tmp_path)
    told = {"host": socket.gethostname(), "error": "no such disk"}
    (tmp_path / "failed.json").write_text(json.dumps(told))
    assert life.lost() == f"{socket.gethostname()} says: no such disk"
    assert not (tmp_path / "lives.json").exists()  # a launcher ends by it
    life, _ = begin(tmp_path)  # the next start knows nothing of it
    assert life.lost() is None
    assert len(lives(tmp_path)["lives"]) == 1
