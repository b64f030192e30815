"""The journal of a run: what a kill leaves, what damage costs, and what follows from its lines."""

import dataclasses
import hashlib
import json
import shutil

import pytest
import tiny
from etils import epath
from refusals import refused, stopped
from tiny import audited

from maxmars.checkpoint import read
from maxmars.checkpoint.journal import Ended, PrefixHash, read_journal
from maxmars.checkpoint.reader import checksum
from maxmars.cli import main
from maxmars.train import train
from maxmars.train.clock import Clock
from maxmars.train.journal import Journal, run_seconds, sessions_of, shares


@pytest.fixture
def run(six_step_run, tmp_path):
    """The workdir of a run of 4 steps."""
    return shutil.copytree(six_step_run / "after_4", tmp_path / "run")


def go_on(six_step_run, run):
    """Continue to 6 steps, which are those of the sound run; what the audit says."""
    train(tiny.six_steps(six_step_run), run, quiet=True)
    digests = [read(workdir / "checkpoints").digest for workdir in (run, six_step_run / "run")]
    assert digests[0] == digests[1]
    return audited(run)


@pytest.mark.seconds
def test_a_repaired_journal_and_one_with_a_line_that_a_kill_cut_off_go_on(six_step_run, run):
    journal, kept = run / "journal.jsonl", run / "kept"
    journal.rename(kept)
    journal.symlink_to("/dev/zero")
    with refused(ValueError, journal):
        go_on(six_step_run, run)
    assert not list(run.glob("checkpoints/*.damaged"))
    kept.replace(journal)
    with journal.open("a") as file:
        file.write('{"kind": "saved", "step": 5, "dig')
    found = go_on(six_step_run, run)
    assert (found.verdict, found.last_step, found.sessions) == ("one trajectory", 6, 2)


@pytest.mark.seconds
def test_a_save_without_its_checkpoint_is_no_part_of_the_run(six_step_run, six_step_copy, caplog):
    shutil.rmtree(six_step_copy / "checkpoints" / "6")
    (six_step_copy / "summary.json").unlink()
    *lines, _ended = (six_step_copy / "journal.jsonl").read_text().splitlines(keepends=True)
    (six_step_copy / "journal.jsonl").write_text("".join(lines))  # the kill came during the save
    assert audited(six_step_copy).verdict == "one trajectory"
    found = go_on(six_step_run, six_step_copy)
    assert "the checkpoint of step 6, which" in caplog.text
    assert (found.verdict, found.last_step, found.sessions) == ("one trajectory", 6, 2)


@pytest.mark.seconds
def test_changed_records_are_told_and_stop_no_run(six_step_run, run, caplog):
    lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    (run / "journal.jsonl").write_text("".join([lines[0], *lines[2:]]))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    assert go_on(six_step_run, run).verdict == "broken"
    assert "journal.jsonl lacks lines of step 4 or before; the run goes on" in caplog.text
    assert "metrics.jsonl changed since step 0" in caplog.text


def test_what_another_version_wrote_is_refused_in_a_line_by_every_command(six_step_run, run):
    def times():
        paths = [path for path in run.rglob("*") if path.name != ".lock"]
        return {path: path.stat().st_mtime_ns for path in paths}

    for path in run.glob("checkpoints/*/meta/data.json"):
        meta = json.loads(path.read_text())
        meta |= {"format_version": 2, "environment": {"git_commit": "a" * 40}}
        path.write_text(json.dumps(meta | {"checksum": checksum(meta)}))
    before = times()
    train_here = ["train", f"quickstart:data={six_step_run / 'tokens'}", "--num-processes", "1"]
    for command in (
        [*train_here, "--workdir", run],
        [*train_here, "--workdir", run.parent / "new", "--init-from", run],
        ["audit", run],
        ["rewind", run, "--to", "2"],
        ["eval", run, "--tasks", "loss", "--num-processes", "1"],
        ["generate", run, "--prompt", "a"],
        ["export", run, run.parent / "out"],
    ):
        with stopped(1, run / "checkpoints", "format 2", f"git checkout {'a' * 40}") as errors:
            main([str(word) for word in command])
        assert errors.getvalue().count("error:") == 1
    assert times() == before


LINES = [  # as a run wrote them, in a journal from before its lines had types
    '{"kind": "began", "time": "2026-11-28 20:00:00 +0000", "step": 0, "start": 1.5, '
    '"digest": "d0", "position": 0, "command": null, "config": {}, "data": "d", '
    '"environment": {}, "order": null, "init_from": null, "seconds": {"start": 2.0}, '
    '"before": null}',
    '{"kind": "saved", "time": "2026-11-28 20:00:03 +0000", "step": 2, "digest": "d2", '
    '"position": 32, "tokens": 512, "metrics": {"lines": 2, "sha256": "m"}, '
    '"seconds": {"start": 2.0, "steps": 1.0}, '
    '"before": "b"}',
    '{"kind": "ended", "time": "2026-11-28 20:00:04 +0000", "step": 2, "done": true, '
    '"metrics": {"lines": 3, "sha256": "n"}, "seconds": {"start": 2.0, "steps": 1.0}, '
    '"before": "0"}',
    '{"kind": "rewound", "time": "2026-11-28 20:01:00 +0000", "step": 2, "from": 4, '
    '"digest": "d2", "position": 37, "skip_examples": 5, "new_optimizer_state": false, '
    '"seconds": {}, "before": "1"}',
]


def test_lines_are_read_and_written_as_ever(tmp_path):
    (tmp_path / "journal.jsonl").write_text("".join(f"{line}\n" for line in LINES))
    lines = read_journal(tmp_path)
    assert [line.text for line in lines] == LINES
    for line, text in zip(lines, LINES, strict=True):
        assert line.hash == hashlib.sha256(text.encode()).hexdigest()
        anew = dataclasses.replace(line, as_read=None)
        assert anew.text == text.replace('"order": null, ', "")
    _, saved, ended, rewound = lines
    assert (saved.metrics.lines, ended.done, rewound.from_) == (2, True, 4)


# --- what follows from the lines ------------------------------------------------------------------


class Time:
    """The time, both monotonic and of the day; the test sets it."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Time()


def session_of(time, directory, first_step, last_step, *, kill=False):
    """10 s to start, 5 s to compile, 1 s a step, a tenth of that waiting, and 3 s a checkpoint
    every 50 steps."""
    clock = Clock(now=time)
    clock.start = time.now
    began = tiny.began_at(first_step, start=clock.start)
    with Journal(epath.Path(directory), clock, began) as journal:
        time.now += 10
        journal.begin([])
        for step in range(first_step, last_step + 1):
            with clock("data_wait"):
                time.now += 0.1 * (step > first_step)
            with clock("steps", kind="step"):
                time.now += 5 if step == first_step else 0.9
            if step % 50 == 0 and step > first_step:
                with clock("checkpoint"):
                    time.now += 3
                    journal.saved(step, "", 0, 0)
        if not kill:
            journal.ended(last_step, done=True)
    return journal.sessions(last_step)


def test_all_time_is_accounted_for_over_a_kill_and_a_later_extension(tmp_path, time):
    began = time.now
    session_of(time, tmp_path, 0, 165, kill=True)  # recorded last at step 150
    time.now += 60
    session_of(time, tmp_path, 100, 200)  # the checkpoint of 150 was damaged
    time.now += 1e6  # it was complete
    last = session_of(time, tmp_path, 200, 240)

    sessions = sessions_of(read_journal(tmp_path))
    assert [(s.first_step, s.last_step, s.done) for s in sessions] == [
        (0, 150, False),
        (100, 200, True),
        (200, 240, True),
    ]
    seconds = run_seconds(sessions)
    assert sum(seconds.values()) == pytest.approx(time.now - began - 1e6)
    expected = {
        "start": 30.0,
        "compile": 15.0,
        "steps": 0.9 * (100 + 100 + 40),
        "repeated": 0.9 * 50,
        "data_wait": 0.1 * (150 + 100 + 40),
        "checkpoint": 9.0 + 6.0,
        "restart": 60.0 + 15,  # with the steps after the last save
    }
    assert {name: spent for name, spent in seconds.items() if spent} == pytest.approx(expected)
    assert sum(shares(seconds).values()) == pytest.approx(1.0)
    assert run_seconds(last) == pytest.approx(seconds)


def test_steps_are_lost_back_to_the_earliest_step_that_was_gone_on_from():
    def session(first_step, last_step, start, steps_s):
        ended = Ended(step=last_step, seconds={"steps": steps_s}, done=False, metrics=PrefixHash())
        return [tiny.began_at(first_step, start=float(start)), ended]

    # The third went back beyond the checkpoint that the second had gone on from.
    lines = [*session(0, 10, 0, 10.0), *session(8, 12, 10, 4.0), *session(5, 9, 14, 4.0)]
    seconds = run_seconds(sessions_of(lines))
    assert (seconds["steps"], seconds["repeated"]) == pytest.approx((5 + 0 + 4, 5 + 4))
    lines = [*session(0, 0, 0, 0.0), *session(0, 4, 0, 4.0)]
    assert run_seconds(sessions_of(lines))["steps"] == 4


def test_a_run_that_begins_anew_keeps_the_sessions_of_before(tmp_path, time):
    session_of(time, tmp_path, 0, 40, kill=True)
    time.now -= 500  # somebody set the clock back
    session_of(time, tmp_path, 0, 60)
    assert [s.last_step for s in sessions_of(read_journal(tmp_path))] == [0, 60]
