"""Where the time of a run goes, also over kills and restarts."""

import json

import pytest

from maxmars import goodput
from maxmars.goodput import ACTIVITIES, Goodput, Session, read_sessions, run_seconds, shares

pytestmark = pytest.mark.smoke


class Time:
    """The time, both monotonic and of the day; the test sets it."""

    now = 1000.0

    def time(self):
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch):
    clock = Time()
    monkeypatch.setattr(goodput, "time", clock)
    return clock


def seconds_of(**spent):
    return dict.fromkeys(ACTIVITIES, 0.0) | spent


def session_of(clock, directory, first_step, last_step, *, kill=False):
    """10 s to start, 5 s to compile, 1 s a step, a tenth of that waiting, and 3 s a checkpoint."""
    book = Goodput(clock.time)
    book.record(directory, first_step)
    clock.now += 10
    book.begin("compile")
    clock.now += 5
    book.begin("steps")
    for step in range(first_step + 1, last_step + 1):
        clock.now += 1
        book.waited(0.1)
        book.reached(step)
        if step % 100 == 0:
            with book.during("checkpoint"):
                book.reached(step, write=True)
                clock.now += 3
    if kill:
        book._lines.close()
    else:
        book.reached(last_step, done=True)
        book.__exit__(None, None, None)
    return book


def test_all_time_is_accounted_for_over_a_kill_and_a_later_extension(tmp_path, clock):
    began = clock.now
    session_of(clock, tmp_path, 0, 165, kill=True)  # recorded last after step 163
    clock.now += 60
    session_of(clock, tmp_path, 100, 200)
    clock.now += 1e6  # it was complete
    book = session_of(clock, tmp_path, 200, 240)

    sessions = read_sessions(tmp_path)
    assert [(s.first_step, s.last_step, s.done) for s in sessions] == [
        (0, 163, False),
        (100, 200, True),
        (200, 240, True),
    ]
    found = run_seconds(book.sessions())
    assert sum(found.values()) == pytest.approx(clock.now - began - 1e6)
    assert found == pytest.approx(
        seconds_of(
            start=30.0,
            compile=15.0,
            steps=0.9 * (100 + 100 + 40),
            repeated=0.9 * 63,
            data_wait=0.1 * (163 + 100 + 40),
            checkpoint=3.0 + 3.0,
            restart=60.0 + 2,
        )
    )
    assert sum(shares(found).values()) == pytest.approx(1.0)
    # Each session is one line once the next has begun.
    lines = map(json.loads, (tmp_path / "sessions.jsonl").read_text().splitlines())
    starts = [line["start"] for line in lines]
    assert len(set(starts[:3])) == len(set(starts)) == 3


def session(first_step, last_step, start, steps_s):
    seconds = seconds_of(steps=float(steps_s))
    return Session(
        start=float(start),
        end=float(start + steps_s),
        first_step=first_step,
        last_step=last_step,
        seconds=seconds,
        done=False,
    )


def test_steps_are_lost_back_to_the_earliest_step_that_was_gone_on_from():
    # The third went back beyond the checkpoint that the second had gone on from.
    found = run_seconds([session(0, 10, 0, 10), session(8, 12, 10, 4), session(5, 9, 14, 4)])
    assert found == pytest.approx(seconds_of(steps=5 + 0 + 4, repeated=5 + 4))
    assert run_seconds([session(0, 0, 0, 0), session(0, 4, 0, 4)])["steps"] == 4


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path, clock):
    session_of(clock, tmp_path, 0, 10)
    with (tmp_path / "sessions.jsonl").open("a") as file:
        file.write('{"start": 5.0, "en')
    book = session_of(clock, tmp_path, 10, 20)
    assert len(book.sessions()) == len(read_sessions(tmp_path)) == 2
    for line in (tmp_path / "sessions.jsonl").read_text().splitlines():
        json.loads(line)
