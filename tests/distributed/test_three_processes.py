"""Three processes of one run: an odd number, which divides no power of two.

One is killed; of two that go on another one hangs; one ends the run.
"""

import signal

import numpy as np
import pytest
from running import (
    assert_same_losses,
    finish,
    records,
    start_together,
    train_here,
    wait_until,
    write_config,
)
from tiny import audited
from token_directories import write_shards

from maxmars.checkpoint import list_steps, read
from maxmars.distributed.exits import EXIT_CODE

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

CONFIG = """
    num_steps=60,
    data=MixtureConfig(parts=(
        MixturePart(path="{folder}/0", weight=0.7), MixturePart(path="{folder}/1", weight=0.3),
    )),
    global_batch_size=24,
    num_microbatches=1,
    model=dataclasses.replace(MODEL, num_layers=1, embed_dim=48),
    eval=EvalConfig(every=60, num_windows=20, batch_size=12),
    schedule=ScheduleConfig(warmup_steps=2, decay_steps=60),
    checkpoint=CheckpointConfig(every=12, keep_last=9),
    hang_timeout_s=10.0,
"""


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


def test_after_a_kill_two_go_on_and_after_a_hang_one_ends_the_run(tmp_path):
    folder, workdir, undisturbed = tmp_path, tmp_path / "run", tmp_path / "undisturbed"
    for i in range(2):
        stream = np.random.default_rng(i).integers(0, 200, 6000)
        write_shards(folder / str(i), stream, stream[:400], vocab_size=257)
    write_config(folder, CONFIG.format(folder=folder))
    train_here(folder, "undisturbed")

    def newest():
        return max(list_steps(workdir / "checkpoints"), default=0)

    def is_past_a_checkpoint():
        return newest() and (newest() + 3, "train/loss") in records(workdir)

    *others, victim = start_together(folder, "run", 3, "--mesh.fsdp", 3)
    wait_until(is_past_a_checkpoint, victim)
    victim.kill()
    assert all(" of 3 has lost another process of the run" in line for line, _ in ends(others))
    finish(victim)
    assert read(workdir / "checkpoints").environment["num_processes"] == 3

    killed_after = newest()
    other, victim = start_together(folder, "run", 2)
    wait_until(lambda: newest() > killed_after, other)
    victim.send_signal(signal.SIGSTOP)
    ((line, output),) = ends([other])
    assert " of 2 hangs: " in line
    assert "reporter.py" in output  # where it waits
    victim.kill()
    finish(victim)

    train_here(folder, "run")
    assert_same_losses(undisturbed, workdir)
    assert len(records(workdir)) == 60 + 2
    ended, alone = (read(run / "checkpoints") for run in (workdir, undisturbed))
    assert ended.data_position == alone.data_position == 60 * 24
    assert ended.data_digest == alone.data_digest
    found = audited(workdir)
    assert found.verdict == "one trajectory up to rounding"
    for change in ("num_processes 3 -> 2", "num_processes 2 -> 1"):
        assert any(change in some for some in found.changes)
