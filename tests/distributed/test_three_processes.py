"""Three processes of one run: an odd number, which divides no power of two.

One is killed, another one hangs; all together, then two of them, continue what was saved.
"""

import json
import signal

import pytest
from running import (
    assert_same_losses,
    finish,
    finish_well,
    records,
    start_together,
    train_here,
    wait_until,
    write_config,
)
from tiny import audited, series

from maxmars.checkpoint import list_steps, read
from maxmars.distributed.exits import EXIT_CODE

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

CONFIG = """
    num_steps=48,
    global_batch_size=24,
    num_microbatches=1,
    model=dataclasses.replace(MODEL, num_layers=1, embed_dim=48),
    eval=EvalConfig(every=48, num_windows=20, batch_size=12),
    schedule=ScheduleConfig(warmup_steps=2, decay_steps=48),
    checkpoint=CheckpointConfig(every=12, keep_last=9),
    hang_timeout_s=10.0,
"""
# Python tells the hook of every file and directory that it opens.
HOOK = """
import atexit, json

OPENED = []

def note(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str):
        OPENED.append(arguments[0])

def write():
    index = sys.argv[sys.argv.index("--process-id") + 1]
    Path(__file__).with_name(f"opened_{index}.json").write_text(json.dumps(OPENED))

if "--num-processes 2" in " ".join(sys.argv):
    sys.addaudithook(note)
    atexit.register(write)
"""
LOST = " of 3 has lost another process of the run"
SHARDED = ("--mesh.fsdp", "3")


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


def test_after_a_kill_three_go_on_bit_by_bit_and_after_a_hang_two_end_the_run(tmp_path):
    folder, workdir, undisturbed = tmp_path, tmp_path / "run", tmp_path / "undisturbed"
    with (write_config(folder, CONFIG) / "config.py").open("a") as file:
        file.write(HOOK)
    train_here(folder, "undisturbed")

    def newest():
        return max(list_steps(workdir / "checkpoints"), default=0)

    def is_past_a_checkpoint():
        return newest() and (newest() + 3, "train/loss") in records(workdir)

    *others, victim = start_together(folder, "run", 3, *SHARDED)
    wait_until(is_past_a_checkpoint, victim)
    victim.kill()
    assert all(LOST in line for line, _ in ends(others))
    finish(victim)

    killed_after, before = newest(), series(workdir)
    last = max(step for step, _ in before)
    assert last > killed_after
    *others, victim = start_together(folder, "run", 3, *SHARDED)
    wait_until(
        lambda: newest() > killed_after and (last, "train/loss") in records(workdir), others[0]
    )
    victim.send_signal(signal.SIGSTOP)
    found = ends(others)
    hanging = [output for line, output in found if " of 3 hangs: " in line]
    assert hanging
    assert all("reporter.py" in output for output in hanging)  # where it waits
    # On a busy machine the second one may see the first one leave before its own time is up.
    assert len(hanging) + sum(LOST in line for line, _ in found) == 2
    victim.kill()
    finish(victim)
    # The steps after the checkpoint, made again, are the same.
    assert series(workdir).items() >= before.items()

    hung_after = newest()
    assert read(workdir / "checkpoints").environment["num_processes"] == 3
    finish_well(start_together(folder, "run", 2))
    assert_same_losses(undisturbed, workdir)
    assert len(records(workdir)) == 48 + 2
    by_two, alone = (read(run / "checkpoints") for run in (workdir, undisturbed))
    assert by_two.data_position == alone.data_position == 48 * 24
    assert by_two.data_digest == alone.data_digest
    found = audited(workdir)
    assert found.verdict == "one trajectory up to rounding"
    assert any("num_processes 3 -> 2" in change for change in found.changes)

    # Process 0 read for both.
    first, second = (  # relative to the working directory
        [
            path[len(f"{workdir}/") :]
            for path in json.loads(file.read_text())
            if path.startswith(str(workdir))
        ]
        for file in (folder / f"opened_{i}.json" for i in range(2))
    )
    assert f"checkpoints/{hung_after}/meta/data.json" in first
    assert [path for path in second if path.startswith("checkpoints/") and "meta/" in path] == []
    # Neither what the first process wrote of its own arrays, nor the older checkpoints.
    assert not any(path.endswith("array_metadatas/process_0") for path in second)
    assert not any(path.startswith(f"checkpoints/{killed_after}") for path in second)
    assert second.count("checkpoints") <= 3 < first.count("checkpoints")  # Orbax lists it
    assert {path for path in second if path.startswith("logs/")} == {"logs/host_001.log"}
