"""Saves, what they keep, what a restore sets aside, and when the clock says that one is due."""

import os
import re
import time
from types import SimpleNamespace

import jax
import pytest
from damage import halve
from refusals import refused
from states import (
    ADAMW,
    MESH,
    PARTITION,
    abstract,
    assert_same,
    config,
    data_files,
    make_state,
    mesh_of,
    place,
)

from maxmars.checkpoint import Checkpointer, list_steps, load, read
from maxmars.checkpoint.writer import Retention, SaveTimer
from maxmars.config import CheckpointConfig

pytestmark = pytest.mark.smoke

ROUND_TRIPS = [
    # Sizes of data, fsdp and tensor, and what cuts the last two axes, before and after.
    (PARTITION, (2, 2, 2), ("fsdp", "tensor"), (1, 8, 1), (None, ("data", "fsdp"))),
    (ADAMW, (1, 2, 4), ("tensor", "fsdp"), (4, 2, 1), ("data", None)),
]


@pytest.mark.seconds
@pytest.mark.parametrize(("tx", "sizes", "cuts", "other_sizes", "other_cuts"), ROUND_TRIPS)
def test_round_trip_onto_another_mesh_is_bit_exact(
    tmp_path, tx, sizes, cuts, other_sizes, other_cuts
):
    state, mesh, other_mesh = make_state(tx), mesh_of(*sizes), mesh_of(*other_sizes)
    with Checkpointer(tmp_path, config(), mesh=mesh) as checkpointer:
        assert checkpointer.latest_step() is None
        checkpointer.save(1, place(state, mesh, cuts), data_position=80)
        assert checkpointer.latest_step() == 1
    with Checkpointer(tmp_path, config(), mesh=other_mesh) as checkpointer:
        want = abstract(state, other_mesh, other_cuts)
        got = checkpointer.restore(want)
        checkpointer.save(2, got.state, data_position=160)
    assert (got.checkpoint.step, got.checkpoint.data_position, got.skipped) == (1, 80, ())
    assert_same(got.state, state)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, got.state, want))
    assert read(tmp_path, 1).digest == read(tmp_path, 2).digest


def test_saves_are_asynchronous_and_safe_from_donation(tmp_path):
    state, want = place(make_state()), make_state()
    update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpointer(tmp_path, config(), mesh=MESH) as checkpointer:
        checkpointer.save(1, state, data_position=8)
        for _ in range(5):
            state = update(state)
        assert_same(checkpointer.restore(abstract(want)).state, want)
        started = time.perf_counter()
        blocked_s = checkpointer.save(2, state, data_position=16, wait=True)
        assert 0 < blocked_s < time.perf_counter() - started


def test_saving_a_step_again(tmp_path):
    first, second = place(make_state(seed=1)), place(make_state(seed=2))
    with Checkpointer(tmp_path, config(), mesh=MESH) as checkpointer:
        checkpointer.save(1, first, data_position=8, wait=True)
        inode = (tmp_path / "1").stat().st_ino
        assert checkpointer.save(1, first, data_position=8, wait=True) is None
        assert (tmp_path / "1").stat().st_ino == inode  # the same state: not written again
    with Checkpointer(tmp_path, config(), mesh=MESH) as checkpointer:
        restored = checkpointer.restore(abstract(first)).state
        assert checkpointer.save(1, restored, data_position=8, wait=True) is None
        assert (tmp_path / "1").stat().st_ino == inode  # neither after a restart
        checkpointer.save(1, second, data_position=8)
        assert_same(checkpointer.restore(abstract(second)).state, second)


def test_keeps_the_newest_the_best_and_some_for_good_over_restarts(tmp_path):
    state, losses = place(make_state()), {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 6.0, 7: 9.0}
    keep = config(keep_last=1, keep_best=2, keep_every=4)
    for steps in ((1, 2, 3, 4), (5, 6, 7)):
        with Checkpointer(tmp_path, keep, mesh=MESH) as checkpointer:
            checkpointer.evaluated(losses)
            for step in steps:
                checkpointer.save(step, state, data_position=step)
    assert list_steps(tmp_path) == [2, 3, 4, 7]


@pytest.mark.seconds
def test_a_second_writer_is_refused_and_what_a_killed_run_left_is_swept(tmp_path):
    state = place(make_state())
    with Checkpointer(tmp_path, config(), mesh=MESH) as checkpointer:
        checkpointer.save(1, state, data_position=8, wait=True)
        (tmp_path / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
        with refused(ValueError, tmp_path, f"process {os.getpid()}"):
            Checkpointer(tmp_path, config(), mesh=MESH)
        assert_same(load(tmp_path, abstract(state)).state, state)
        # A save of the first writer, for all that the second one and readers know.
        assert (tmp_path / "3.orbax-checkpoint-tmp").exists()
    (tmp_path / "4.damaged").mkdir()
    Checkpointer(tmp_path, config(), mesh=MESH).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "1", "4.damaged"]


@pytest.mark.seconds
def test_damaged_ones_are_set_aside_and_nonsense_of_orbaxs_own_stops_nothing(tmp_path, caplog):
    states = {step: place(make_state(seed=step)) for step in (1, 2, 3, 4)}
    with Checkpointer(tmp_path, config(keep_last=4), mesh=MESH) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, states[step], data_position=8 * step)
    for step, says in ((1, "[" * 100_000), (2, '{"commit_timestamp_nsecs": "soon"}')):
        (tmp_path / str(step) / "_CHECKPOINT_METADATA").write_text(says)
    halve(data_files(tmp_path / "3")[0])
    (tmp_path / "3.damaged").mkdir()
    with Checkpointer(tmp_path, config(keep_last=4), mesh=MESH) as checkpointer:
        got = checkpointer.restore(abstract(states[2]))
        assert got.checkpoint.step == 2
        assert_same(got.state, states[2])
        assert re.search(r"checkpoint 3 .*/3\.damaged-2\b", caplog.text)
        for step in (3, 4):
            checkpointer.save(step, states[step], data_position=8 * step)
    assert list_steps(tmp_path) == [1, 2, 3, 4]
    assert (tmp_path / "3.damaged-2" / "state").is_dir()


LOSSES = {10: 4.0, 20: 1.0, 35: 3.0, 41: 2.0, 50: float("nan"), 60: 2.0, 70: 5.0}


def kept(**config):
    retention = Retention(CheckpointConfig(**config), LOSSES)
    steps = list(LOSSES)
    checkpoints = [SimpleNamespace(step=step) for step in steps]
    flags = retention.should_preserve(checkpoints, context=None)
    return [step for step, keep in zip(steps, flags, strict=True) if keep]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"keep_last": 3}, [50, 60, 70]),
        ({"keep_last": 99}, list(LOSSES)),
        ({"keep_last": 1, "keep_best": 2}, [20, 60, 70]),  # of equals the newer
        ({"keep_last": 1, "keep_best": 6}, [10, 20, 35, 41, 60, 70]),  # NaN is never best
        ({"keep_last": 1, "keep_every": 20}, [20, 41, 60, 70]),  # the first from each multiple on
        ({"keep_last": 1, "keep_best": 1, "keep_every": 35}, [20, 35, 70]),
    ],
)
def test_what_is_kept(config, expected):
    assert kept(**config) == expected


class Clock:
    now, looks = 0.0, 0

    def __call__(self):
        self.looks += 1
        return self.now


@pytest.mark.parametrize("step_s", [0.01, 7.0, 100.0])
def test_due_soon_after_the_time_and_seldom_asked(step_s):
    clock = Clock()
    timer = SaveTimer(1.0, clock)
    for _ in range(3):
        since, step, clock.looks = clock.now, 0, 0
        while not timer.is_due(step):
            step += 1
            clock.now += step_s
        assert 60 <= clock.now - since < 60 + step_s + 1e-6
        assert clock.looks <= min(step + 1, 20)
        timer.restart()
    never = SaveTimer(None, clock)
    clock.now = 1e9
    assert not never.is_due(1)
