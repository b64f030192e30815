"""Data of the user's own: what a source may return, its stream, its digest and its errors."""

import dataclasses
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import running
from refusals import refused
from tiny import ADAMW, MODEL, tiny_config, validation_batches
from token_directories import write_shards, write_tfds

from maxmars.config import (
    GrainConfig,
    GrainPart,
    MeshConfig,
    MixtureConfig,
    MixturePart,
)
from maxmars.config.errors import in_words
from maxmars.data.batches import TrainBatches, batch_types, open_data
from maxmars.distributed.sharding import make_mesh
from maxmars.eval import load
from maxmars.eval.validation import make_eval_step, validation_loss
from maxmars.model import make_model, token_losses
from maxmars.model.parameters import Parameters
from maxmars.train.step import init_train_state, make_train_step

EXAMPLES = Path(__file__).parents[2] / "tools" / "examples" / "own_data.py"
LENGTH = MODEL.max_seq_len
COUNTING = """
import grain
import numpy as np

def windows(*, split, length, count=40, first=0):
    return grain.MapDataset.range(count).map(lambda i: np.arange(length + 1) % 7 + first + i)
"""


def batches_of(data, *, steps=3, mesh=(1, 1, 1), **options):
    config = tiny_config(data=data)
    tokens = open_data(data, "train", model=config.model)
    sizes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: np.prod(mesh)])
    batches = TrainBatches(tokens, config, mesh, **options)
    found = [jax.tree.map(np.asarray, batch) for batch in itertools.islice(batches, steps)]
    batches.close()
    return found


def rows_of(found, name="tokens"):
    return np.concatenate([batch[name].reshape(-1, LENGTH + 1) for batch in found])


@pytest.fixture
def counting(tmp_path):
    """A source whose window i begins with `first` + i."""
    (tmp_path / "counting.py").write_text(COUNTING)
    return f"{tmp_path / 'counting.py'}:windows"


def test_each_window_once_an_epoch_in_a_new_order(counting):
    firsts = rows_of(batches_of(GrainConfig(source=counting), steps=10))[:, 0]
    epochs = firsts.reshape(4, 40)
    assert np.array_equal(np.sort(epochs), np.tile(np.arange(40), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    in_order = GrainConfig(source=counting, order="sequential", options={"first": 50})
    assert np.array_equal(rows_of(batches_of(in_order))[:, 0], 50 + np.arange(48) % 40)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 1, 8)])
def test_it_is_the_same_on_every_mesh_and_from_every_position(counting, mesh):
    data = GrainConfig(source=counting)
    whole = rows_of(batches_of(data, steps=6))
    assert np.array_equal(rows_of(batches_of(data, steps=6, mesh=mesh)), whole)
    assert np.array_equal(rows_of(batches_of(data, mesh=mesh, position=40)), whole[40:88])


def test_a_mixture_with_tokens_fills_in_what_they_lack(tmp_path):
    write_shards(tmp_path / "tokens", np.arange(2000) % 40 + 100, vocab_size=257)
    source = f"{EXAMPLES}:additions"
    parts = (
        MixturePart(path=str(tmp_path / "tokens"), weight=0.5),
        GrainPart(source=source, weight=0.5, options={"count": 50}),
    )
    found = batches_of(MixtureConfig(parts=parts))
    assert {name: array.dtype for name, array in found[0].items()} == {
        "tokens": np.int32,
        "mask": bool,
        "segment_ids": np.int32,
    }
    tokens, mask, segments = (rows_of(found, n) for n in ("tokens", "mask", "segment_ids"))
    ours = tokens[:, 0] >= 100
    assert ours.sum() == 24
    assert mask[ours].all()
    assert not segments[ours].any()
    for row, counted in zip(tokens[~ours], mask[~ours], strict=True):
        text = bytes(row.tolist()).decode()
        answers = "".join(c if m else " " for c, m in zip(text, counted, strict=True)).split()
        problems = text.split(";")[:-1]
        assert [f"{problem.split('=')[1]};" for problem in problems] == answers[: len(problems)]
        for question, answer in (problem.split("=") for problem in problems):
            assert sum(map(int, question.split("+"))) == int(answer)


def test_records_of_tfds(tmp_path):
    records = [np.arange(LENGTH + 5) + i for i in range(30)]
    path = write_tfds(tmp_path, {"train": records, "val": records[:20]})
    source = f"{EXAMPLES}:from_tfds"
    data = GrainConfig(source=source, options={"path": str(path)}, order="sequential")
    assert np.array_equal(
        rows_of(batches_of(data, steps=1)), [r[: LENGTH + 1] for r in records[:16]]
    )
    config = tiny_config(data=data)
    val = open_data(data, "val", model=MODEL)
    mesh = make_mesh(MeshConfig())
    assert (val.sizes, val.origin.split) == ([20], "val")
    scored = [jax.tree.map(np.asarray, batch) for batch in validation_batches(val, config, mesh)]
    found = rows_of(scored)[rows_of(scored, "mask").all(1)]
    assert np.array_equal(found, [r[: LENGTH + 1] for r in records[:20]])


WEIGHTED = """
import grain
import numpy as np

def windows(*, split, length, weights=(0.0, 0.25, 1.0), first=float):
    def window(i):
        mask = np.full(length + 1, weights[i % 3], first if i == 0 else float)
        return {"tokens": np.arange(length + 1) + i, "mask": mask}
    return grain.MapDataset.range(40).map(window)
"""


@pytest.mark.seconds
def test_a_mask_of_floats_weights_the_losses(tmp_path):
    (tmp_path / "own.py").write_text(WEIGHTED)
    source = f"{tmp_path / 'own.py'}:windows"
    data = GrainConfig(source=source, order="sequential")
    config = tiny_config(data=data, optimizer=ADAMW)
    tokens = open_data(config.data, "train", model=MODEL)
    mesh = make_mesh(MeshConfig())
    batch = next(TrainBatches(tokens, config, mesh, prefetch_steps=0))
    assert batch["mask"].dtype == np.float32
    step = make_train_step(config, Parameters(config.model, mesh), tokens.types)
    assert {n: (a.shape, a.dtype) for n, a in batch.items()} == {
        n: (a.shape, a.dtype) for n, a in step.abstract_batch.items()
    }
    assert batch_types(config.data, MODEL) == tokens.types
    state = init_train_state(config, Parameters(config.model, mesh))
    losses_of = jax.jit(lambda params, tokens: token_losses(make_model(MODEL, params), tokens))
    rows = {name: np.asarray(array).reshape(-1, LENGTH + 1) for name, array in batch.items()}
    losses = np.asarray(losses_of(state.params, rows["tokens"]))
    weights = rows["mask"][:, 1:]
    expected = (losses * weights).sum() / weights.sum()
    _, metrics = step(state, batch)
    assert float(metrics["train/loss"]) == pytest.approx(expected, abs=1e-5)
    scored = validation_batches(open_data(config.data, "val", model=MODEL), config, mesh)
    state = init_train_state(config, Parameters(config.model, mesh))
    found = validation_loss(make_eval_step(MODEL, mesh), mesh, state.params, scored)
    weights = np.tile([0.0, 0.25, 1.0], 7)[:20]  # of the windows scored
    rows = np.arange(LENGTH + 1) + np.arange(20)[:, None]
    losses = np.asarray(losses_of(state.params, rows))
    expected = (losses.mean(1) * weights).sum() / weights.sum()
    assert found.loss == pytest.approx(expected, abs=1e-5)
    assert found.num_tokens == round(weights.sum() * LENGTH)
    with refused(ValueError, "eval.num_windows"):
        validation_loss(lambda params, batch: (0.0, 0.0), mesh, state.params, [batch])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"weights": (0.0, 1.0, 2.5)},
            "mask of element 2 hold 2.5",
        ),
        ({"weights": (0.0, "nan", 1.0)}, "mask of element 1 hold nan"),
        ({"first": "bool"}, "that of element 0"),
    ],
)
def test_weights_outside_their_range_are_refused(tmp_path, options, named):
    (tmp_path / "own.py").write_text(WEIGHTED)
    source = f"{tmp_path / 'own.py'}:windows"
    with refused(ValueError, named):
        batches_of(GrainConfig(source=source, options=options, order="sequential"))


def test_a_plan_knows_the_arrays_of_own_data(tmp_path, caplog):
    additions = GrainPart(source=f"{EXAMPLES}:additions", weight=0.5, options={"count": 50})
    elsewhere = {"path": str(tmp_path / "none")}
    absent = GrainPart(source=f"{EXAMPLES}:from_hugging_face", weight=0.5, options=elsewhere)
    found = batch_types(MixtureConfig(parts=(additions, absent)), MODEL)
    assert found == {"tokens": np.int32, "mask": np.bool, "segment_ids": np.int32}
    assert "from_hugging_face'" in caplog.text


def test_texts_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = ["short", "a text that is longer than the window"] * 10
    splits = {"train": datasets.Dataset.from_dict({"text": texts})}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    options = {"path": str(tmp_path / "saved")}
    source = f"{EXAMPLES}:from_hugging_face"
    data = GrainConfig(source=source, options=options, order="sequential")
    found = batches_of(data, steps=1)
    tokens, mask = rows_of(found), rows_of(found, "mask")
    assert bytes(tokens[0, 1:6].tolist()) == b"short"
    assert mask[0].tolist() == [True] * 7 + [False] * (LENGTH - 6)
    assert bytes(tokens[1, 1:].tolist()) == b"a text that is longer"[:LENGTH]
    assert mask[1].all()


@pytest.mark.seconds
def test_workers_read_the_same_stream(counting):
    data = GrainConfig(source=counting)
    expected = rows_of(batches_of(data, steps=5, position=7))
    workers = dataclasses.replace(data, num_workers=2)
    assert np.array_equal(rows_of(batches_of(workers, steps=5, position=7)), expected)


def test_the_digest_follows_the_text_the_options_and_the_data(counting):
    def digest(model=MODEL, **options):
        config = GrainConfig(source=counting, options=options)
        return open_data(config, "train", model=model).digest()

    path = Path(counting.rpartition(":")[0])
    found = {digest(), digest(first=1), digest(count=41)}
    assert len(found) == 3
    assert digest() in found
    path.write_text(f"{COUNTING}# longer\n")
    assert digest() not in found
    longer = dataclasses.replace(MODEL, max_seq_len=32)
    assert digest(longer) != digest()


def test_it_travels_as_its_config(counting):
    own = open_data(GrainConfig(source=counting), "train", model=MODEL)
    copy, numbers = pickle.loads(pickle.dumps(own)), np.array([3, 1])
    assert np.array_equal(copy.read(numbers)["tokens"], own.read(numbers)["tokens"])


RANGE = "grain.MapDataset.range(40).map(lambda i: np.full(length + 1, i))"
NOT_THE_DATA = {  # what a source returns, and what its refusal names
    "iter dataset": (f"{RANGE}.to_iter_dataset()", "grain.IterDataset"),
    "filter": (f"{RANGE}.filter(lambda x: x[0] > 3)", "filter"),
    "endless": (f"{RANGE}.repeat()", "repeat()"),
    "empty": ("grain.MapDataset.range(0)", "no elements"),
    "list": ("[1, 2]", "list"),
    "short": (f"{RANGE}.map(lambda x: x[1:])", "[16], not [17]"),
    "floats": (f"{RANGE}.map(lambda x: x / 2)", "float64"),
    "large ids": (f"{RANGE}.map(lambda x: x + 257)", "257, which is not in [0, 256]"),
    "negative ids": (f"{RANGE}.map(lambda x: x - 1)", "-1, which is not in [0, 256]"),
    "no tokens": (f"{RANGE}.map(lambda x: {{'ids': x}})", "ids"),
    "other names": (f"{RANGE}.map(lambda x: {{'tokens': x, 'labels': x}})", "tokens, labels"),
    "positions": (
        f"{RANGE}.map(lambda x: {{'tokens': x, 'positions': x + 16}})",
        "16, which is not in [0, 15]",
    ),
}


@pytest.mark.parametrize("case", NOT_THE_DATA)
def test_a_source_that_returns_something_else_is_refused(tmp_path, case):
    returned, named = NOT_THE_DATA[case]
    path = tmp_path / "own.py"
    path.write_text(
        f"import grain\nimport numpy as np\ndef f(*, split, length):\n    return {returned}\n"
    )
    with refused(ValueError, f"data.source='{path}:f', split 'train': ", named) as raised:
        open_data(GrainConfig(source=f"{path}:f"), "train", model=MODEL)
    assert "\n" not in in_words(raised.value)


def test_elements_unlike_the_first_are_refused_when_they_are_read(tmp_path):
    path = tmp_path / "own.py"
    element = "np.full(length + 1, 300 if i == 20 else i)"
    path.write_text(
        "import grain\nimport numpy as np\ndef f(*, split, length):\n"
        f"    return grain.MapDataset.range(40).map(lambda i: {element})\n"
    )
    with refused(ValueError, "element 20 hold 300"):
        batches_of(GrainConfig(source=f"{path}:f", order="sequential"))


def test_a_source_that_is_not_there(counting, tmp_path):
    path = counting.removesuffix(":windows")
    for source, options, error, named in (
        (f"{tmp_path}/none.py:f", {}, FileNotFoundError, f"{tmp_path}/none.py"),
        (f"{path}:nothing", {}, ValueError, "'nothing'"),
        (counting, {"cuont": 3}, ValueError, "cuont"),
    ):
        with refused(error, named):
            open_data(GrainConfig(source=source, options=options), "train", model=MODEL)
    config = tiny_config(data=GrainConfig(source=counting), global_batch_size=64)
    tokens = open_data(config.data, "train", model=MODEL)
    with refused(ValueError, "40 windows", "global_batch_size=64"):
        TrainBatches(tokens, config, make_mesh(config.mesh))


# Opens data that are the same in all processes, and data that are not.
PROCESSES = """
import sys
sys.path.insert(0, sys.argv[1])
import jax
import jax.numpy as jnp
from maxmars.config import GrainConfig
from maxmars.data.batches import open_data
from maxmars.distributed import processes
from tiny import MODEL

process, port = map(int, sys.argv[3:])
processes.initialize(f"127.0.0.1:{port}", 2, process)
for first in (5, process):
    try:
        data = GrainConfig(source=sys.argv[2], options={"first": first})
        print("FOUND", len(open_data(data, "train", model=MODEL)))
    except ValueError as error:
        print("FOUND", error)
processes.shutdown()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_with_other_data_are_refused(counting):
    arguments = [str(Path(__file__).parents[1]), counting]
    port = running.free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESSES, *arguments, str(process), str(port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    for process in started:
        code, output = running.finish(process)
        found = [line for line in output.splitlines() if line.startswith("FOUND")]
        assert code == 0
        assert found[0] == "FOUND 40"
        assert "split 'train': process 1 has other data than process 0" in found[1]


CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from maxmars.config import CheckpointConfig, EvalConfig, GrainConfig, MeshConfig
from tiny import ADAMW, tiny_config

def get_config():
    data = GrainConfig(source="own_data.py:additions", options={{"count": 50}})
    return tiny_config(
        data=data, optimizer=ADAMW, mesh=MeshConfig(), eval=EvalConfig(every=3, num_windows=8)
    )
"""


def train(config, workdir, *options):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "maxmars", "train", str(config), "--workdir", str(workdir)]
    return subprocess.run(
        [*command, *options], env=environment, cwd="/", capture_output=True, text=True
    )


def losses(workdir):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {(row["step"], key): row[key] for row in rows for key in row if key.endswith("/loss")}


@pytest.mark.slow
def test_a_run_on_own_data_resumes_bit_for_bit_and_refuses_other_data(tmp_path):
    config, source = tmp_path / "config.py", tmp_path / "own_data.py"
    config.write_text(CONFIG.format(tests=str(Path(__file__).parents[1])))
    source.write_text(EXAMPLES.read_text())
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(config, whole).returncode == 0
    assert train(config, parts, "--num-steps", "4", "--schedule.decay-steps", "6").returncode == 0
    found = train(config, parts, "--schedule.decay-steps", "6")
    assert "continuing from step 4" in found.stdout + found.stderr
    assert losses(whole).items() <= losses(parts).items()  # exactly; step 4 was scored once more
    assert found.stdout.splitlines()[-1] == f"next: maxmars report {parts}"  # it has no text
    with refused(FileNotFoundError, "GrainConfig(tokenizer='byte')"):
        load(parts)
    assert (parts / "sources" / "own_data.py").read_text() == EXAMPLES.read_text()
    source.write_text(EXAMPLES.read_text().replace("0, 100, 2", "0, 99, 2"))
    failed = train(config, parts, "--num-steps", "8")
    assert failed.returncode == 1
    assert "other data" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_options_are_changed_on_the_command_line_and_survive_json(tmp_path, counting):
    from maxmars.cli.parse import ConfigArguments, parse_arguments
    from maxmars.config import from_dict, to_dict

    config = tmp_path / "config.py"
    config.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from maxmars.config import GrainConfig\n"
        "from tiny import tiny_config\n"
        "def get_config():\n"
        "    options = {'count': 30, 'first': 0}\n"
        "    return tiny_config(data=GrainConfig(source='counting.py:windows', options=options))\n"
    )
    found = parse_arguments(
        ConfigArguments, [str(config), "--data.options.first", "5"], prog="maxmars train"
    ).config
    assert found.data == GrainConfig(source=counting, options={"count": 30, "first": 5})
    assert from_dict(json.loads(json.dumps(to_dict(found)))) == found
    listed = GrainConfig(source="a.py:f", options={"paths": ["a", "b"], "deep": {"x": [1]}})
    assert from_dict(json.loads(json.dumps(to_dict(listed)))) == listed


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: GrainConfig(source="a.txt:windows"), "'a.txt:windows'"),
        (lambda: GrainConfig(source="a.py:f", order="random_windows"), "random_windows"),
        (lambda: GrainConfig(source="a.py:f", num_workers=-1), "num_workers=-1"),
        (
            lambda: MixtureConfig(
                parts=(GrainPart(source="a.py:f", weight=1.0),), order="random_windows"
            ),
            "random_windows",
        ),
    ],
)
def test_configs_that_are_refused(build, named):
    with refused(ValueError, named):
        build()
