"""What a process asks of the file system that all processes share: process 0 asks for all."""

import json
from pathlib import Path

import pytest
from running import finish_well, start_two, train_here

# Python tells the hook of every file and directory that it opens.
CONFIG = """
import atexit, json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from maxmars.config import CheckpointConfig, EvalConfig, MeshConfig
from tiny import tiny_config

FOLDER, OPENED = Path(__file__).parent, []

def note(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str):
        OPENED.append(arguments[0])

def write():
    name = sys.argv[sys.argv.index("--process-id") + 1]
    own = [path for path in OPENED if path.startswith(str(FOLDER / "run"))]
    (FOLDER / f"opened_{{name}}.json").write_text(json.dumps(own))

if "--process-id" in sys.argv:  # not in the process of the tests
    sys.addaudithook(note)
    atexit.register(write)

def get_config():
    return tiny_config(
        num_microbatches=1,
        mesh=MeshConfig(fsdp=2),
        eval=EvalConfig(every=None),
        checkpoint=CheckpointConfig(every=1, keep_last=5, keep_best=None),
    )
"""


@pytest.mark.slow
def test_the_second_process_reads_nothing_that_the_first_can_tell_it(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(tests=str(Path(__file__).parents[1])))
    train_here(tmp_path, "run", "--num-steps", 3)
    finish_well(start_two(tmp_path, "run", "--num-steps", 5))
    first, second = (  # relative to the working directory
        [str(Path(path).relative_to(tmp_path / "run")) for path in json.loads(file.read_text())]
        for file in (tmp_path / f"opened_{i}.json" for i in range(2))
    )
    assert "checkpoints/3/meta/data.json" in first
    assert [path for path in second if path.startswith("checkpoints/") and "meta/" in path] == []
    # Neither what the first process wrote of its own arrays, nor the older checkpoints.
    assert not any(path.endswith("array_metadatas/process_0") for path in second)
    assert not any(path.startswith(("checkpoints/1", "checkpoints/2")) for path in second)
    assert second.count("checkpoints") <= 3 < first.count("checkpoints")  # Orbax lists it
    assert {path for path in second if path.startswith("logs/")} == {"logs/host_001.log"}
