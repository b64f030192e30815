"""Three processes of one run: an odd number, which divides no power of two."""

import shutil
from pathlib import Path

import pytest
from running import finish, finish_well, records, start_together, wait_until
from tiny import first_difference

from maxmars.checkpoint import list_steps, read
from maxmars.distributed.exits import EXIT_CODE
from maxmars.train.audit import audit

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

CONFIG = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
from maxmars.config import CheckpointConfig, EvalConfig, ScheduleConfig
from tiny import MODEL, tiny_config

def get_config():
    return tiny_config(
        num_steps=12,
        global_batch_size=24,
        num_microbatches=1,
        model=dataclasses.replace(MODEL, num_layers=1, embed_dim=48),
        eval=EvalConfig(every=4, num_windows=20, batch_size=12),
        schedule=ScheduleConfig(warmup_steps=2, decay_steps=12),
        checkpoint=CheckpointConfig(every=4, keep_last=9),
        hang_timeout_s=20.0,
    )
"""
SHARDED = ("--mesh.fsdp", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    (folder / "config.py").write_text(CONFIG.format(tests=str(Path(__file__).parents[1])))
    return folder


def train(folder, name, count, *arguments):
    finish_well(start_together(folder, name, count, *arguments))


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The workdir of three processes that each hold a third of the state."""
    train(folder, "undisturbed", 3, *SHARDED)
    return folder / "undisturbed"


def assert_same_losses(one, other):
    ours, theirs = records(one), records(other)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert ours[key] == pytest.approx(theirs[key], abs=1e-5), key


def test_three_train_as_one(folder, undisturbed):
    train(folder, "one", 1)
    assert_same_losses(undisturbed, folder / "one")
    assert len(records(undisturbed)) == 12 + 4
    ours, expected = (read(run / "checkpoints") for run in (undisturbed, folder / "one"))
    assert ours.data_position == expected.data_position == 12 * 24
    assert ours.data_digest == expected.data_digest
    assert ours.environment["num_processes"] == 3


def test_a_killed_one_and_all_three_continue_bit_by_bit(folder, undisturbed):
    others = start_together(folder, "run", 3, *SHARDED)
    victim = others.pop()
    wait_until(lambda: list_steps(folder / "run" / "checkpoints"), victim)
    victim.kill()
    for code, output in map(finish, others):
        assert code == EXIT_CODE, output
        assert "has lost another process of the run" in output
    finish(victim)
    train(folder, "run", 3, *SHARDED)
    assert first_difference(undisturbed, folder / "run") is None


@pytest.mark.parametrize("count", [1, 2])
def test_what_three_have_saved_fewer_continue(folder, undisturbed, count):
    run = folder / f"by_{count}"
    shutil.copytree(undisturbed, run)
    train(folder, run.name, count, "--rewind", "8")
    assert_same_losses(undisturbed, run)
    audited = audit(run, log=lambda text: None)
    assert audited.verdict == "one trajectory up to rounding"
    assert f"num_processes 3 -> {count}" in audited.changes[0]
