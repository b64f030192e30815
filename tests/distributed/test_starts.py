"""Which starts of a run count, and when the next one is refused; tests/faults has real ones."""

import json

import pytest
from refusals import refused

from maxmars.distributed.run_process import RunProcess


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def begin(workdir, newest_step=0):
    """A start that ends without a word, as one that is killed; and what it printed."""
    printed, process = [], RunProcess(pause_s=0.001)
    process.join(workdir, lambda: newest_step, num_processes=1, log=printed.append)
    return process, printed


def starts(workdir):
    return json.loads((workdir / "starts.json").read_text())


def write(workdir, count, *, step=0):
    (workdir / "starts.json").write_text(json.dumps({"job": None, "step": step, "count": count}))


def fail(process, error):
    with pytest.raises(type(error)), process:
        raise error


def test_a_start_that_ends_by_itself_leaves_nothing(workdir):
    for error in (None, OSError("no such disk"), KeyboardInterrupt()):
        process, _ = begin(workdir)
        assert starts(workdir)["count"] == 1
        if error is None:
            assert process.end(done=True) == 0
        else:
            fail(process, error)
        assert not list(workdir.iterdir())


def test_a_start_that_is_refused_leaves_no_directory(tmp_path):
    process, _ = begin(tmp_path / "new" / "run")
    assert process.end(done=False) == 75
    assert starts(tmp_path / "new" / "run")["stopped"]
    process, _ = begin(tmp_path / "other" / "run")
    fail(process, ValueError("no such field"))
    assert [path.name for path in tmp_path.iterdir() if path.name == "other"] == []


def test_starts_that_end_without_a_word_wait_and_the_tenth_is_the_last(workdir):
    printed = [begin(workdir)[1] for _ in range(10)]
    assert [len(lines) for lines in printed] == [0, 0, *[1] * 8]
    process = RunProcess(pause_s=0.001)
    with refused(ValueError, workdir, "10 starts", "step 0"), process:
        process.join(workdir, lambda: 0, num_processes=1, log=[].append)
    _, printed = begin(workdir)  # by a person
    assert printed == []


def test_the_start_after_one_that_would_have_refused_need_not_meet_the_others(workdir):
    write(workdir, 11)
    place = {"coordinator": "127.0.0.1:1", "num_processes": 2, "process_id": 0}
    with refused(ValueError, workdir, "10 starts", "step 0"), RunProcess() as process:
        process.join(workdir, lambda: 0, **place)
    assert not (workdir / "starts.json").exists()


def test_ten_new_steps_forget_them(workdir):
    write(workdir, 9, step=4)
    _, printed = begin(workdir, newest_step=13)
    assert len(printed) == 1
    assert (starts(workdir)["step"], starts(workdir)["count"]) == (13, 10)
    _, printed = begin(workdir, newest_step=23)
    assert printed == []
    assert (starts(workdir)["step"], starts(workdir)["count"]) == (23, 1)


def test_the_start_after_a_stop_on_request_does_not_wait(workdir):
    for _ in range(4):
        process, printed = begin(workdir)
        assert process.end(done=False) == 75
        assert printed == []
    assert starts(workdir)["count"] == 4


def test_ten_stops_in_a_row_after_hardly_any_steps_are_refused_once(workdir):
    step = 0
    for steps in [9] * 8 + [10] + [0, 9] * 5:
        begin(workdir, step)[0].end(done=False)
        step += steps
    process = RunProcess()
    with refused(ValueError, workdir, "10 starts", "10 steps"), process:
        process.join(workdir, lambda: step, num_processes=1)
    begin(workdir, step)


@pytest.mark.parametrize(
    "text", ["{", "[" * 10**6, '{"job": null, "other": 1}', '{"count": []}', '{"step": "x"}']
)
def test_damaged_notes_stop_nothing(workdir, text):
    (workdir / "starts.json").write_text(text)
    begin(workdir)
    assert starts(workdir)["count"] == 1


def test_starts_of_another_job_do_not_count(workdir, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    for _ in range(2):
        begin(workdir)
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    _, printed = begin(workdir)
    assert printed == []
    assert starts(workdir)["count"] == 1


def test_a_start_in_a_workdir_of_another_one_leaves_its_record(workdir):
    begin(workdir)
    before = (workdir / "starts.json").read_bytes()
    process, _ = begin(workdir, newest_step=None)  # another process owns the directory
    fail(process, ValueError("it is in use"))
    assert (workdir / "starts.json").read_bytes() == before


def test_a_start_that_another_one_forestalls_leaves_the_record_to_that(workdir):
    process, _ = begin(workdir)
    begin(workdir)
    before = (workdir / "starts.json").read_bytes()
    fail(process, ValueError("the other was faster"))
    assert (workdir / "starts.json").read_bytes() == before
