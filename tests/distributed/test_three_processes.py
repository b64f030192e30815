"""Three processes of one run: an odd number, which divides no power of two.

One is killed, another one hangs; all together and fewer continue what they saved.
"""

import json
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

if "--process-id" in sys.argv and any(word.endswith("by_two") for word in sys.argv):
    sys.addaudithook(note)
    atexit.register(write)
"""
LOST = " of 3 has lost another process of the run"
SHARDED = ("--mesh.fsdp", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_config(tmp_path_factory.mktemp("three"), CONFIG)
    with (folder / "config.py").open("a") as file:
        file.write(HOOK)
    return folder


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


def test_what_three_have_saved_two_continue_and_process_0_reads_for_both(folder, undisturbed):
    run = folder / "by_two"
    shutil.copytree(undisturbed, run)
    rewind(run, 8)
    finish_well(start_together(folder, run.name, 2))
    assert_same_losses(undisturbed, run)
    found = audited(run)
    assert found.verdict == "one trajectory up to rounding"
    assert "num_processes 3 -> 2" in found.changes[0]

    first, second = (  # relative to the working directory
        [
            path[len(f"{run}/") :]
            for path in json.loads(file.read_text())
            if path.startswith(str(run))
        ]
        for file in (folder / f"opened_{i}.json" for i in range(2))
    )
    assert "checkpoints/8/meta/data.json" in first
    assert [path for path in second if path.startswith("checkpoints/") and "meta/" in path] == []
    # Neither what the first process wrote of its own arrays, nor the older checkpoints.
    assert not any(path.endswith("array_metadatas/process_0") for path in second)
    assert not any(path.startswith("checkpoints/4") for path in second)
    assert second.count("checkpoints") <= 3 < first.count("checkpoints")  # Orbax lists it
    assert {path for path in second if path.startswith("logs/")} == {"logs/host_001.log"}
