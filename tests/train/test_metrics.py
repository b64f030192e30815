"""metrics.jsonl and sessions.jsonl: every step once, all time accounted for, damage skipped."""

import json
import random

import pytest
from tiny import short_config

from maxmars.config import CheckpointConfig, GPT2Config
from maxmars.model.language_model import flops_per_token
from maxmars.train import train
from maxmars.train.clock import Clock
from maxmars.train.metrics import (
    ACTIVITIES,
    MetricsWriter,
    Session,
    Sessions,
    read_metrics,
    read_sessions,
    run_seconds,
    shares,
)
from maxmars.train.summary import best_evaluation


def read_lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def write_steps(workdir, steps, **kwargs):
    writer = MetricsWriter(workdir, **kwargs)
    for step in steps:
        writer.write(step, {"train/loss": float(step)})
    writer.close()


def test_a_line_is_readable_as_soon_as_it_is_written(tmp_path):
    writer = MetricsWriter(tmp_path / "new" / "workdir")
    writer.write(10, {"train/loss": 2.5, "perf/mfu": 0.4})
    assert read_lines(tmp_path / "new" / "workdir") == [
        {"step": 10, "train/loss": 2.5, "perf/mfu": 0.4}
    ]
    writer.close()


def test_a_resumed_run_has_every_step_once(tmp_path):
    write_steps(tmp_path, [0, 10, 20, 30, 40])
    write_steps(tmp_path, [30, 40, 50], resume_step=20)
    assert [line["step"] for line in read_lines(tmp_path)] == [0, 10, 20, 30, 40, 50]


def test_a_run_that_starts_again_has_every_step_once(tmp_path):
    write_steps(tmp_path, [0, 10])
    write_steps(tmp_path, [0, 10, 20])
    assert [line["step"] for line in read_lines(tmp_path)] == [0, 10, 20]


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path):
    write_steps(tmp_path, [10])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "train/lo')
    write_steps(tmp_path, [20], resume_step=10)
    assert [line["step"] for line in read_lines(tmp_path)] == [10, 20]


def test_values_that_are_not_finite_stay_valid_json(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 3})

    def reject(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=reject)
    assert line == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 3}
    assert float(line["c"]) == float("-inf")


class Time:
    """The time, both monotonic and of the day; the test sets it."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Time()


def seconds_of(**spent):
    return dict.fromkeys(ACTIVITIES, 0.0) | spent


def session_of(clock, directory, first_step, last_step, *, kill=False):
    """10 s to start, 5 s to compile, 1 s a step, a tenth of that waiting, and 3 s a checkpoint."""
    watch = Clock(now=clock)
    watch.start = clock.now
    book = Sessions(watch)
    book.record(directory, first_step)
    clock.now += 10
    for step in range(first_step, last_step + 1):
        with watch("data_wait"):
            clock.now += 0.1 * (step > first_step)
        with watch("steps", kind="step"):
            clock.now += 5 if step == first_step else 0.9
        book.reached(step)
        if step % 100 == 0 and step > first_step:
            with watch("checkpoint"):
                book.reached(step, write=True)
                clock.now += 3
    written = (directory / "sessions.jsonl").read_bytes()
    if not kill:
        book.reached(last_step, done=True)
    book.__exit__(None, None, None)
    if kill:
        (directory / "sessions.jsonl").write_bytes(written)
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
    found = run_seconds(book.all())
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


def test_sessions_are_in_their_order_though_the_clock_was_set_back(tmp_path, clock):
    session_of(clock, tmp_path, 0, 10)
    clock.now -= 500
    session_of(clock, tmp_path, 10, 20)
    assert [session.first_step for session in read_sessions(tmp_path)] == [0, 10]


def test_a_line_of_a_session_cut_short_by_a_kill_is_left_out(tmp_path, clock):
    session_of(clock, tmp_path, 0, 10)
    with (tmp_path / "sessions.jsonl").open("a") as file:
        file.write('{"start": 5.0, "en')
    book = session_of(clock, tmp_path, 10, 20)
    assert len(book.all()) == len(read_sessions(tmp_path)) == 2
    for line in (tmp_path / "sessions.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\xfd",
        b'{"step": 2, "train/loss": \xe2}',
        b'{"stfp": 2, "train/loss": 1.5}',
        b'{"step": "2", "train/loss": 1.5}',
        b'{"step": 2, "train/loss": [1.5]}',
        b'{"step": 2, "train/loss": "1.5"}',
        b"[2]",
        b"7",
        b"[" * 100_000,
    ],
)
def test_a_damaged_line_is_skipped_and_counted(tmp_path, caplog, line):
    good = {"step": 1, "train/loss": 1.5}
    text = json.dumps(good).encode() + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(text + line + b"\n" + text)
    (tmp_path / "sessions.jsonl").write_bytes(line + b"\n")
    assert read_metrics(tmp_path) == [good, good]
    assert "metrics.jsonl: 1 damaged of 3 lines skipped (line 2)" in caplog.text
    assert read_sessions(tmp_path) == []
    assert "sessions.jsonl: 1 damaged of 1 lines skipped (line 1)" in caplog.text


@pytest.mark.parametrize(
    ("losses", "best"),
    [(["NaN", 2.5, 3.0], {"eval/loss": 2.5, "step": 1}), (["NaN", "Infinity"], None)],
)
def test_the_best_of_the_evaluations_is_finite(losses, best):
    rows = [{"step": step, "eval/loss": loss} for step, loss in enumerate(losses)]
    assert best_evaluation([{"step": 0, "train/loss": 1.0}, *rows]) == best


def test_flipped_bits_never_stop_a_run(tmp_path):
    """Nor do they change what the run computes."""
    config = short_config(
        tmp_path / "tokens", num_steps=2, checkpoint=CheckpointConfig(every=1, keep_last=9)
    )
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    train(config, run)
    expected = {line["step"]: line.get("train/loss") for line in read_metrics(run)}
    (checkpoints / "2").rename(tmp_path / "lost")
    rng = random.Random(0)
    for name in ("metrics.jsonl", "sessions.jsonl"):
        content = bytearray((run / name).read_bytes())
        for _ in range(len(content) // 40):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (run / name).write_bytes(content)
    train(config, run)
    assert json.loads((run / "summary.json").read_text())["done"]
    found = {line["step"]: line.get("train/loss") for line in read_metrics(run)}
    assert found[2] == expected[2]


def test_flops_per_token_of_gpt2_small():
    # 6 * 124439808 + 12 * 12 * 768 * 1024
    assert flops_per_token(GPT2Config.small()) == 859_885_056
