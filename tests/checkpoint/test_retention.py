"""Which of given steps are kept, and when the clock says that a checkpoint is due."""

from types import SimpleNamespace

import pytest

from maxmars import distributed
from maxmars.checkpoint.retention import Retention, SaveTimer
from maxmars.config import CheckpointConfig

LOSSES = {10: 4.0, 20: 1.0, 35: 3.0, 41: 2.0, 50: float("nan"), 60: 2.0, 70: 5.0}


def kept(outdated=(), **config):
    retention = Retention(CheckpointConfig(**config))
    for step, loss in LOSSES.items():
        retention.record(step, {"eval/loss": loss})
    retention.outdated = set(outdated)
    steps = list(LOSSES)
    checkpoints = [SimpleNamespace(step=step) for step in steps]
    flags = retention.should_preserve(checkpoints, context=None)
    return [step for step, keep in zip(steps, flags, strict=True) if keep]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"keep_last": 1}, [70]),
        ({"keep_last": 3}, [50, 60, 70]),
        ({"keep_last": 99}, list(LOSSES)),
        ({"keep_last": 1, "keep_best": 1}, [20, 70]),
        ({"keep_last": 1, "keep_best": 2}, [20, 60, 70]),  # of equals the newer
        ({"keep_last": 1, "keep_best": 6}, [10, 20, 35, 41, 60, 70]),  # NaN is never best
        ({"keep_last": 1, "keep_every": 20}, [20, 41, 60, 70]),  # the first from each multiple on
        ({"keep_last": 1, "keep_every": 100}, [70]),
        ({"keep_last": 1, "keep_best": 1, "keep_every": 35}, [20, 35, 70]),
    ],
)
def test_what_is_kept(config, expected):
    assert kept(**config) == expected


def test_outdated_steps_count_as_nothing_but_stay():
    assert kept(outdated=[60, 70], keep_last=1) == [50, 60, 70]
    assert kept(outdated=[20, 50, 60, 70], keep_last=1, keep_best=1) == [41, 50, 60, 70]
    assert kept(outdated=LOSSES, keep_last=1) == list(LOSSES)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("step_s", [0.01, 1.0, 7.0, 100.0])
def test_due_soon_after_the_time_and_seldom_asked(step_s, monkeypatch):
    asked = []
    from_primary = distributed.from_primary
    monkeypatch.setattr(distributed, "from_primary", lambda x: asked.append(x) or from_primary(x))
    clock = Clock()
    timer = SaveTimer(1.0, clock)
    for _ in range(3):
        since, step = clock.now, 0
        del asked[:]
        while not timer.is_due(step):
            step += 1
            clock.now += step_s
        assert 60 <= clock.now - since < 60 + step_s + 1e-6
        assert len(asked) <= min(step + 1, 20)
        timer.restart()


def test_never_due_without_a_time():
    clock = Clock()
    timer = SaveTimer(None, clock)
    clock.now = 1e9
    assert not timer.is_due(1)


def test_due_at_the_same_steps_in_every_process(monkeypatch):
    """The other process's clock runs fast, and its answer is the primary's."""
    clocks = [Clock(), Clock()]
    timers = [SaveTimer(1.0, clock) for clock in clocks]
    said = []
    monkeypatch.setattr(distributed, "from_primary", lambda x: said.append(x) or said[0])
    for step in range(200):
        del said[:]
        answers = [timer.is_due(step) for timer in timers]
        assert answers[0] == answers[1]
        assert len(said) in (0, 2)  # both ask or neither
        if answers[0]:
            assert clocks[0].now >= 60
            for timer in timers:
                timer.restart()
        clocks[0].now += 1
        clocks[1].now += 50
