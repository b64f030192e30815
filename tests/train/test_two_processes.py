"""Two processes, stopped and started again, make bit by bit the steps of one that is left alone.

The run was rewound: past examples, and on with an optimizer that names the parameters to evaluate,
while steps with spikes of the gradient norm are skipped. Its data lie in a directory of each
process, at last in a bucket that fails now and then.
"""

import importlib.util
import json
import shutil
import signal

import fake_gcs
import numpy as np
import pytest
from running import (
    finish,
    finish_well,
    hashed_files,
    records,
    start_python,
    start_together,
    train_here,
    wait_until,
    write_config,
)
from tiny import first_difference, values_of
from token_directories import write_shards

from maxmars.checkpoint import list_steps, read
from maxmars.cli import main
from maxmars.distributed.exits import EXIT_CODE

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs (extra `gcs`)"
    ),
    pytest.mark.multiprocess,
    pytest.mark.slow,
]

BATCH, LENGTH, EVERY = 16, 16, 20
# No checkpoint is at a step with an evaluation.
CONFIG = """
    num_microbatches=1,
    model=dataclasses.replace(MODEL, num_layers=1),
    schedule=ScheduleConfig(warmup_steps=0, decay_steps=1000),
    eval=EvalConfig(every=99, num_windows=16, batch_size=16),
"""
FIRST = f"""{CONFIG}
    num_steps=6,
    checkpoint=CheckpointConfig(every=2, keep_last=9),
"""
NEXT = f"""{CONFIG}
    checkpoint=CheckpointConfig(every={EVERY}, keep_last=99),
    optimizer=OptaxConfig(make="own.py:free", learning_rate=1e-2),
    guard=GuardConfig(grad_norm_spike_threshold=1.0, history=3, max_consecutive_skips=10**6),
"""
FREE = """
import optax.contrib

def free(learning_rate):
    return optax.contrib.schedule_free_adamw(learning_rate), optax.contrib.schedule_free_eval_params
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

if "--process-id" in sys.argv:
    sys.addaudithook(note)
    atexit.register(write)
"""


@pytest.fixture
def rewound(tmp_path):
    """A folder with `alone`, six steps of a run that was then rewound to step 2, and the config of
    the steps to come."""
    draw = np.random.default_rng(0)
    stream = draw.integers(0, 200, 2000 * LENGTH)
    write_shards(tmp_path / "tokens", stream[:26_000], stream, vocab_size=257)
    write_config(tmp_path, FIRST, make="short_config")
    train_here(tmp_path, "alone", "--eval.every", None)
    words = ["--to=2", "--skip-examples=5", "--new-optimizer-state"]
    main(["rewind", str(tmp_path / "alone"), *words])
    (tmp_path / "own.py").write_text(FREE)
    write_config(tmp_path, NEXT, make="short_config")
    with (tmp_path / "config.py").open("a") as file:
        file.write(HOOK)
    return tmp_path


def test_two_processes_make_the_steps_of_one(rewound):
    folder, alone, two = rewound, rewound / "alone", rewound / "two"
    shutil.copytree(alone, two)
    copies = [shutil.copytree(folder / "tokens", folder / f"copy_{i}") for i in range(2)]
    overrides = ["--resume-overrides", "guard,optimizer"]

    def data_at(place, validation=None):
        return ["--data.path", place, "--eval.data", f"mine={validation or place}"]

    def stop(number, ready, *options):
        words = [*overrides, "--num-steps", 2000, *options]
        processes = start_together(folder, "two", 2, *words, of_each=map(data_at, copies))
        wait_until(ready, processes[1])
        processes[1].send_signal(number)
        results = [finish(process) for process in processes]
        assert [code for code, _ in results] == [EXIT_CODE] * 2, results
        return max(step for step, _ in records(two))

    # Many steps: JAX tells the other process within a second, and both agree on a step to come.
    last = stop(signal.SIGINT, lambda: (30, "train/loss") in records(two))
    assert max(list_steps(two / "checkpoints")) == last
    names = {path.name for path in copies[0].glob("*.bin")}
    assert hashed_files(two, 2) == [names, names]
    shutil.rmtree(two / "checkpoints" / str(last))  # as if it had been killed before it saved
    saved = list_steps(two / "checkpoints")

    # JAX has the signal once the process logs. Both leave a long evaluation, and save nothing.
    log = two / "logs" / "host_001.log"
    size = log.stat().st_size
    long = ["--eval.every", 1, "--eval.num-windows", 1900, "--eval.batch-size", 2]
    assert stop(signal.SIGTERM, lambda: log.stat().st_size > size, *long) == saved[-1]
    assert list_steps(two / "checkpoints") == saved

    end = (last // EVERY + 3) * EVERY
    words = [*overrides, "--num-steps", end]
    with fake_gcs.serve() as server:
        server.put_directory(folder / "tokens", "tokens")
        server.failing = lambda number, name: number % 50 == 20 and name.endswith(".bin")
        bucket = data_at("gs://bucket/tokens", folder / "tokens")
        finish_well(start_together(folder, "two", 2, *words, *bucket, variables=server.variables))
        reads = list(server.reads)
        here = ["train", folder / "config.py", "--workdir", alone, *words]
        here += data_at(folder / "tokens")
        program = f"""
from maxmars.cli import main
main({[*map(str, here)]})
main({["audit", str(two), "--replay", str(EVERY)]})
"""
        python = start_python(folder, "-c", program, devices=2, variables=server.variables)
        (output,) = finish_well([python])

    assert first_difference(two, alone) is None
    assert records(two) == records(alone)
    skipped = values_of(two, "train/skipped")
    assert skipped == values_of(alone, "train/skipped")
    assert max(skipped.values()) > 0
    distances = values_of(two, "eval/params_distance")
    assert distances == values_of(alone, "eval/params_distance")
    assert end in distances
    ends = [read(run / "checkpoints") for run in (two, alone)]
    assert ends[0].data_digest == ends[1].data_digest
    assert ends[0].data_position == ends[1].data_position == end * BATCH + 5
    assert {"4.rewound", "6.rewound"} <= {path.name for path in (two / "checkpoints").iterdir()}
    for told in (
        "to step 2 from step 6",
        "32 to 37",
        "a new state of the optimizer",
        "the same digest",
    ):
        assert told in output

    # From the bucket each row was read once, besides those that were ready and not trained on.
    needed = (end - saved[-1]) * BATCH * (LENGTH + 1) * 2  # bytes
    assert sum(count for name, count in reads if "/train_" in name) <= 1.2 * needed
    # Once for each split and once for the tokenizer, which no other file of this directory names.
    assert sum(name == "tokens/meta.json" for name, _ in reads) == 3

    # In the last start process 0 read for both.
    opened = [json.loads((folder / f"opened_{i}.json").read_text()) for i in range(2)]
    first, second = (
        [path.removeprefix(f"{two}/") for path in paths if path.startswith(f"{two}/")]
        for paths in opened
    )
    assert f"checkpoints/{saved[-1]}/meta/data.json" in first
    assert [path for path in second if path.startswith("checkpoints/") and "meta/" in path] == []
    # Neither what the first process wrote of its own arrays, nor the older checkpoints.
    assert not any(path.endswith("array_metadatas/process_0") for path in second)
    assert {*map(str, saved[:-1])} & {name for path in second for name in path.split("/")} == set()
    assert second.count("checkpoints") <= 3 < first.count("checkpoints")  # Orbax lists it
    assert {path for path in second if path.startswith("logs/")} == {"logs/host_001.log"}
