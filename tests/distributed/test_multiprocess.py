"""Real processes over loopback, through the command line, against one process."""

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hellaswag_questions import write_questions_file
from token_directories import write_shards
from xla_flags import xla_flags

from maxmars.cli import main
from maxmars.train.audit import audit

pytestmark = pytest.mark.multiprocess

CONFIG = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
from maxmars.config import EvalConfig, MeshConfig
from tiny import MODEL, tiny_config

def get_config():
    return tiny_config(
        num_steps=4,
        model=dataclasses.replace(MODEL, num_layers=2),
        mesh=MeshConfig(data=2, fsdp=4),
        eval=EvalConfig(every=2, num_windows=20, batch_size=16),
    )
"""


# `find` is called here, and printed by each of two processes.
PRINT = """
if __name__ == "__main__":
    import json
    processes.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
    print("FOUND " + json.dumps(find()), flush=True)
    processes.shutdown()
"""

# The digests of the global training stream, and of the validation windows, on several meshes.
STREAMS = """
import hashlib, sys
sys.path.insert(0, {tests!r})
import numpy as np
from jax.experimental import multihost_utils
from maxmars.config import EvalConfig, MeshConfig, MixtureConfig, MixturePart, TokenShardsConfig
from maxmars.data.batches import TrainBatches, open_data
from maxmars.distributed import processes
from maxmars.distributed.sharding import make_mesh
from tiny import tiny_config, validation_batches

parts = tuple(MixturePart(path=f"{directory}/{{i}}", weight=w) for i, w in ((0, 0.7), (1, 0.3)))

def find():
    found = {{}}
    for sizes in ((1, 1, 8), (2, 1, 4), (1, 4, 2), (2, 4, 1)):
        mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
        for name, data in (
            ("shards", TokenShardsConfig(path="{directory}/0")),
            ("mixture", MixtureConfig(parts=parts)),
            ("random windows", MixtureConfig(parts=parts, order="random_windows")),
        ):
            config = tiny_config(data=data, eval=EvalConfig(num_windows=11))
            tokens = open_data(data, "train", model=config.model)
            batches = TrainBatches(tokens, config, mesh, position=7)
            val = validation_batches(open_data(data, "val", model=config.model), config, mesh)
            sha, val_sha = hashlib.sha256(), hashlib.sha256()
            for _ in range(4):
                batch = multihost_utils.process_allgather(next(batches)["tokens"], tiled=True)
                sha.update(np.asarray(batch).tobytes())
            for batch in val:
                batch = multihost_utils.process_allgather(batch, tiled=True)
                val_sha.update(np.asarray(batch["tokens"])[np.asarray(batch["mask"])].tobytes())
            batches.close()
            found[f"{{name}} on {{sizes}}"] = [sha.hexdigest(), val_sha.hexdigest()]
    return found
"""


# The log-likelihoods of both protocols, and how many processes the devices belong to.
HELLASWAG = """
import sys
sys.path.insert(0, {tests!r})
import jax
from maxmars.config import MeshConfig
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.distributed import processes
from maxmars.distributed.sharding import make_mesh
from maxmars.eval.hellaswag import HellaSwag, load_questions
from maxmars.model.parameters import Parameters, init_params
from tiny import MODEL

def find():
    mesh = make_mesh(MeshConfig(fsdp=2))
    shardings = Parameters(MODEL, mesh).shardings
    params = jax.jit(lambda: init_params(MODEL, 0), out_shardings=shardings)()
    questions = load_questions({questions!r})
    scores = HellaSwag(MODEL, mesh, ByteTokenizer(), questions)(params)
    found = {{name: s.log_likelihoods.tolist() for name, s in scores.items()}}
    return [jax.process_count(), found]
"""


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start(arguments, devices, cache):
    return start_python(["-m", "maxmars", "train", *arguments], devices, cache)


def start_python(arguments, devices, cache):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(devices),
        "MAXMARS_CACHE": str(cache),
    }
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process):
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        (row["step"], key): row[key]
        for row in rows
        for key in ("train/loss", "eval/loss")
        if key in row
    }


def train_here(config, workdir, *arguments):
    """`maxmars train` in this process, which has eight devices."""
    main(["train", str(config), "--workdir", str(workdir), "--num-processes", "1", *arguments])


def test_two_processes_train_as_one_and_one_continues_their_run(tmp_path, monkeypatch, capsys):
    config = tmp_path / "tiny_config.py"
    config.write_text(CONFIG.format(tests=str(Path(__file__).parents[1])))
    one, two, cache = tmp_path / "one", tmp_path / "two", tmp_path / "cache"
    monkeypatch.setenv("MAXMARS_CACHE", str(cache))

    train_here(config, one)
    expected = losses(one)
    assert len(expected) == 4 + 3

    shared = [str(config), "--workdir", str(two), "--num-steps", "2", "--schedule.decay-steps", "4"]
    shared += ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    processes = [start([*shared, "--process-id", str(i)], 4, cache) for i in range(2)]
    outputs = [finish(process) for process in processes]
    assert "done: 2 steps" in outputs[0]
    assert "done:" not in outputs[1]  # only the primary speaks
    logs = [(two / "logs" / f"host_00{i}.log").read_text() for i in range(2)]
    for log in logs:  # and every one writes
        assert "done: 2 steps" in log
        assert log.count(" step 2/2  loss ") == 1
    environment = json.loads((two / "environment.json").read_text())
    assert environment["num_processes"] == 2
    assert environment["num_devices"] == 8

    train_here(config, two, "--schedule.decay-steps", "4")
    assert "continuing from step 2" in capsys.readouterr().out
    ours = losses(two)
    for key in expected:
        assert ours[key] == pytest.approx(expected[key], abs=1e-5), key
    audited = audit(two, log=lambda text: None)
    assert audited.verdict == "one trajectory up to rounding"
    assert audited.changes == ["at step 2: num_processes 2 -> 1"]


@pytest.mark.slow
def test_two_processes_train_as_one_where_only_tensor_splits(tmp_path, monkeypatch):
    """Neither process has rows of its own: both read the same."""
    config = tmp_path / "tiny_config.py"
    body = CONFIG.replace("MeshConfig(data=2, fsdp=4)", "MeshConfig(tensor=8)")
    body = body.replace("num_layers=2", "num_layers=2, num_heads=8")
    config.write_text(body.format(tests=str(Path(__file__).parents[1])))
    one, two, cache = tmp_path / "one", tmp_path / "two", tmp_path / "cache"
    monkeypatch.setenv("MAXMARS_CACHE", str(cache))
    train_here(config, one)
    shared = [str(config), "--workdir", str(two), "--num-processes", "2"]
    shared += ["--coordinator", f"127.0.0.1:{free_port()}"]
    processes = [start([*shared, "--process-id", str(i)], 4, cache) for i in range(2)]
    for process in processes:
        finish(process)
    ours, expected = losses(two), losses(one)
    assert len(expected) == 4 + 3
    assert ours.keys() == expected.keys()
    for key in expected:
        assert ours[key] == pytest.approx(expected[key], abs=1e-5), key


def found_by_one_process_and_by_two(program: Path, text: str) -> list[Any]:
    """What `find` of a program returns here, and in each of two processes together."""
    program.write_text(text + PRINT)
    found, port = [runpy.run_path(str(program))["find"]()], str(free_port())
    processes = [
        start_python([str(program), port, str(i)], 4, program.parent / "cache") for i in range(2)
    ]
    for output in [finish(process) for process in processes]:
        (line,) = (line for line in output.splitlines() if line.startswith("FOUND "))
        found.append(json.loads(line.removeprefix("FOUND ")))
    return found


@pytest.mark.slow
def test_two_processes_see_the_stream_of_one(tmp_path):
    """With mesh (1, 1, 8) the batch axes do not split over the processes; with others they do."""
    for i, num_tokens in enumerate((1000, 700)):  # an epoch ends within the four batches
        stream = np.random.default_rng(i).integers(0, 257, num_tokens)
        write_shards(tmp_path / str(i), stream, stream[:300], vocab_size=257)
    text = STREAMS.format(tests=str(Path(__file__).parents[1]), directory=tmp_path)
    found = found_by_one_process_and_by_two(tmp_path / "streams.py", text)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 12
    for name in ("shards", "mixture", "random windows"):
        digests = {tuple(v) for key, v in found[0].items() if key.startswith(f"{name} on")}
        assert len(digests) == 1, name  # the same on every mesh
    assert len({train for train, _ in found[0].values()}) == 3


@pytest.mark.slow
def test_two_processes_score_hellaswag_as_one(tmp_path):
    questions = write_questions_file(tmp_path / "questions.jsonl")
    tests = str(Path(__file__).parents[1])
    text = HELLASWAG.format(tests=tests, questions=str(questions))
    found = found_by_one_process_and_by_two(tmp_path / "score.py", text)
    assert [count for count, _ in found] == [1, 2, 2]
    for name, expected in found[0][1].items():
        for _, scores in found[1:]:
            np.testing.assert_allclose(scores[name], expected, rtol=1e-5)
    assert found[1] == found[2]
