"""Three processes of one run: an odd number, which divides no power of two.

One is killed, another one hangs; all together and fewer continue what they saved.
"""

import shutil
import signal

import pytest
from running import (
    assert_same_losses,
    finish,
    finish_well,
    records,
    start_together,
    train_here,
    wait_for_steps,
    wait_until,
    write_config,
)
from tiny import audited, first_difference

from maxmars.checkpoint import list_steps, read
from maxmars.distributed.exits import EXIT_CODE
from maxmars.train.rewind import rewind

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

CONFIG = """
    num_steps=24,
    global_batch_size=24,
    num_microbatches=1,
    model=dataclasses.replace(MODEL, num_layers=1, embed_dim=48),
    eval=EvalConfig(every=8, num_windows=20, batch_size=12),
    schedule=ScheduleConfig(warmup_steps=2, decay_steps=24),
    checkpoint=CheckpointConfig(every=4, keep_last=9),
    hang_timeout_s=10.0,
"""
LOST = " of 3 has lost another process of the run"
SHARDED = ("--mesh.fsdp", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("three"), CONFIG)


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The workdir of three processes that each hold a third of the state."""
    finish_well(start_together(folder, "undisturbed", 3, *SHARDED))
    return folder / "undisturbed"


def test_three_train_as_one(folder, undisturbed):
    train_here(folder, "one")
    assert_same_losses(undisturbed, folder / "one")
    assert len(records(undisturbed)) == 24 + 4
    ours, expected = (read(run / "checkpoints") for run in (undisturbed, folder / "one"))
    assert ours.data_position == expected.data_position == 24 * 24
    assert ours.data_digest == expected.data_digest
    assert ours.environment["num_processes"] == 3


def test_after_a_kill_and_a_hang_all_three_continue_bit_by_bit(folder, undisturbed):
    workdir = folder / "run"

    def start_three():
        return start_together(folder, "run", 3, *SHARDED)

    def ends(processes):
        """The last words of each process, and its whole output."""
        found = []
        for process in processes:
            code, output = finish(process)
            assert code == EXIT_CODE, output
            (line,) = [line for line in output.splitlines() if line.startswith("maxmars: ")]
            assert f"Exit code {EXIT_CODE}: the same command, in every process" in line
            found.append((line, output))
        return found

    *others, victim = start_three()
    wait_until(lambda: list_steps(workdir / "checkpoints"), victim)
    victim.kill()
    assert all(LOST in line for line, _ in ends(others))
    finish(victim)
    saved = max(list_steps(workdir / "checkpoints"))
    begun = (workdir / "metrics.jsonl").stat().st_ino  # each start writes the file anew
    *others, victim = start_three()
    wait_until(lambda: (workdir / "metrics.jsonl").stat().st_ino != begun, others[0])
    wait_for_steps(workdir, saved + 2, others[0])
    victim.send_signal(signal.SIGSTOP)
    found = ends(others)
    hanging = [output for line, output in found if " of 3 hangs: " in line]
    assert hanging
    assert all("reporter.py" in output for output in hanging)  # where it waits
    # On a busy machine the second one may see the first one leave before its own time is up.
    assert len(hanging) + sum(LOST in line for line, _ in found) == 2
    victim.kill()
    finish(victim)
    finish_well(start_three())
    assert first_difference(undisturbed, workdir) is None


def test_what_three_have_saved_two_continue(folder, undisturbed):
    run = folder / "by_two"
    shutil.copytree(undisturbed, run)
    rewind(run, 8)
    finish_well(start_together(folder, run.name, 2))
    assert_same_losses(undisturbed, run)
    found = audited(run)
    assert found.verdict == "one trajectory up to rounding"
    assert "num_processes 3 -> 2" in found.changes[0]
