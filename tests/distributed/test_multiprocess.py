"""Real processes over loopback, through the command line, against one process."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from hellaswag_questions import write_questions_file
from running import (
    assert_same_losses,
    finish_well,
    free_port,
    hashed_files,
    records,
    start_python,
    start_together,
    train_here,
    write_config,
)
from tiny import audited, values_of
from token_directories import write_shards

pytestmark = pytest.mark.multiprocess

CONFIG = """
    num_steps=4,
    optimizer=ADAMW,  # MARS: test_three_processes.py
    model=dataclasses.replace(MODEL, num_layers=2),
    mesh=MeshConfig(data=2, fsdp=4),
    data=TokenShardsConfig(path=str(TOKENS)),
    eval=EvalConfig(every=2, num_windows=20, batch_size=16),
"""

OWN = """
import jax
from maxmars.eval.generate import generate_texts

def guess(trained):
    logits = trained.logits(trained.tokenizer.encode("def f")[None])
    texts = generate_texts(trained, ["a", "b"], max_new_tokens=3)
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
    return {"texts": len(texts), "entropy": entropy}
"""
# Of each process: the digests of the global training stream, and of the validation windows, on
# several meshes; and HellaSwag's log-likelihoods by both protocols.
PROGRAM = """
import hashlib, json, sys
sys.path.insert(0, {tests!r})
import jax
import numpy as np
from jax.experimental import multihost_utils
from maxmars.config import EvalConfig, MeshConfig, MixtureConfig, MixturePart, TokenShardsConfig
from maxmars.data.batches import TrainBatches, open_data
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.distributed import processes
from maxmars.distributed.sharding import make_mesh
from maxmars.eval.hellaswag import HellaSwag, load_questions
from maxmars.model.parameters import Parameters, init_params
from tiny import MODEL, tiny_config, validation_batches

EVAL = EvalConfig(num_windows=11, batch_size=24)
MESHES = ((1, 1, 8), (2, 1, 4), (1, 4, 2), (2, 4, 1))
parts = tuple(MixturePart(path=f"{directory}/{{i}}", weight=w) for i, w in ((0, 0.7), (1, 0.3)))

def streams():
    digests = {{}}
    for sizes in MESHES:
        mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]))
        for name, data in (
            ("shards", TokenShardsConfig(path="{directory}/0")),
            ("mixture", MixtureConfig(parts=parts)),
            ("random windows", MixtureConfig(parts=parts, order="random_windows")),
        ):
            config = tiny_config(data=data, global_batch_size=48, eval=EVAL)
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
            digests[f"{{name}} on {{sizes}}"] = [sha.hexdigest(), val_sha.hexdigest()]
    return digests

def hellaswag():
    mesh = make_mesh(MeshConfig(fsdp=2))
    shardings = Parameters(MODEL, mesh).shardings
    params = jax.jit(lambda: init_params(MODEL, 0), out_shardings=shardings)()
    questions = load_questions("{directory}/questions.jsonl")
    scores = HellaSwag(MODEL, mesh, ByteTokenizer(), questions)(params)
    return {{name: s.log_likelihoods.tolist() for name, s in scores.items()}}

def find():
    return [jax.process_count(), streams(), hellaswag()]

if __name__ == "__main__":
    port, count, place = map(int, sys.argv[1:])
    processes.initialize(f"127.0.0.1:{{port}}", count, place)
    print("RETURNED " + json.dumps(find()), flush=True)
    processes.shutdown()
"""


@pytest.mark.seconds
def test_two_processes_train_as_one_and_one_continues_their_run(tmp_path, capsys):
    folder, two = write_config(tmp_path, CONFIG), tmp_path / "two"
    stream = np.random.default_rng(0).integers(0, 200, 2000)
    write_shards(folder / "tokens", stream, stream[:400], vocab_size=257)
    (folder / "own.py").write_text(OWN)
    words = ("--eval.data", f"mine={folder / 'tokens'}", "--eval.own", f"{folder}/own.py:guess")
    words += ("--schedule.decay-steps", "4")
    train_here(folder, "one", *words)
    outputs = finish_well(start_together(folder, "two", 2, *words, "--num-steps", 2, devices=4))
    assert "done: 2 steps" in outputs[0]
    assert "done:" not in outputs[1]  # only the primary speaks
    logs = [(two / "logs" / f"host_00{i}.log").read_text() for i in range(2)]
    for log in logs:  # and every one writes
        assert "done: 2 steps" in log
        assert log.count(" step 2/2  loss ") == 1
    environment = json.loads((two / "environment.json").read_text())
    assert environment["num_processes"] == 2
    assert environment["num_devices"] == 8
    first, second = hashed_files(two, 2)  # each file is hashed once, by one of them
    assert first | second == {path.name for path in (folder / "tokens").glob("*.bin")}
    assert first & second == set()

    train_here(folder, "two", *words)
    assert "continuing from step 2" in capsys.readouterr().out
    assert_same_losses(folder / "one", two)
    assert len(records(two)) == 4 + 3
    assert values_of(two, "eval/guess/texts") == {0: 2, 2: 2, 4: 2}
    entropies = values_of(folder / "one", "eval/guess/entropy")
    assert values_of(two, "eval/guess/entropy") == pytest.approx(entropies, rel=1e-3)
    found = audited(two)
    assert found.verdict == "one trajectory up to rounding"
    assert found.changes == ["at step 2: num_processes 2 -> 1"]


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """What the program returns here, and in each of two processes."""
    folder = tmp_path_factory.mktemp("streams")
    for i, num_tokens in enumerate((1000, 700)):  # an epoch ends within the four batches
        stream = np.random.default_rng(i).integers(0, 257, num_tokens)
        write_shards(folder / str(i), stream, stream[:300], vocab_size=257)
    write_questions_file(folder / "questions.jsonl")
    program = folder / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parents[1]), directory=folder))
    port = free_port()
    places = [(program, port, 2, i) for i in range(2)]
    outputs = finish_well([start_python(folder, *place, devices=4) for place in places])
    lines = [line for output in outputs for line in output.splitlines()]
    two = [json.loads(line[9:]) for line in lines if line.startswith("RETURNED ")]
    one = runpy.run_path(str(program))["find"]()
    assert [count for count, *_ in (one, *two)] == [1, 2, 2]
    return one, two


@pytest.mark.slow
def test_two_processes_see_the_stream_of_one(one_and_two):
    """With mesh (1, 1, 8) the batch axes do not split over the processes; with others they do.

    Three processes, of a mixture: test_three_processes.py."""
    (_, one, _), two = one_and_two
    assert len(one) == 12
    assert [streams for _, streams, _ in two] == [one, one]
    for name in ("shards", "mixture", "random windows"):
        digests = {tuple(value) for key, value in one.items() if key.startswith(f"{name} on")}
        assert len(digests) == 1, name  # the same on every mesh
    assert len({train for train, _ in one.values()}) == 3


@pytest.mark.slow
def test_two_processes_score_hellaswag_as_one(one_and_two):
    (*_, one), ((*_, first), (*_, second)) = one_and_two
    for name, expected in one.items():
        np.testing.assert_allclose(first[name], expected, rtol=1e-5)
    assert first == second
