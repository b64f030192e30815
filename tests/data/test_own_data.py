"""Data of the user's own: what a source and a map may return, their stream, digest and errors."""

import dataclasses
import itertools
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
from trees import mesh_of

from maxmars.config import (
    GrainConfig,
    GrainPart,
    MixtureConfig,
    MixturePart,
)
from maxmars.config.errors import in_words
from maxmars.data.batches import TrainBatches, batch_types, open_data
from maxmars.distributed.sharding import make_mesh
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
    """The arrays [examples, length + 1] of some steps, by name."""
    config = tiny_config(data=data)
    mesh = mesh_of(*mesh)
    tokens = open_data(data, "train", model=config.model)
    batches = TrainBatches(tokens, config, mesh, **options)
    taken = [jax.tree.map(np.asarray, batch) for batch in itertools.islice(batches, steps)]
    batches.close()
    return {
        name: np.concatenate([batch[name].reshape(-1, LENGTH + 1) for batch in taken])
        for name in taken[0]
    }


@pytest.fixture
def counting(tmp_path):
    """A source whose window i begins with `first` + i."""
    (tmp_path / "counting.py").write_text(COUNTING)
    return f"{tmp_path / 'counting.py'}:windows"


@pytest.mark.smoke
def test_each_window_once_an_epoch_in_a_new_order(counting):
    firsts = batches_of(GrainConfig(source=counting), steps=10)["tokens"][:, 0]
    epochs = firsts.reshape(4, 40)
    assert np.array_equal(np.sort(epochs), np.tile(np.arange(40), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    in_order = GrainConfig(source=counting, order="sequential", options={"first": 50})
    assert np.array_equal(batches_of(in_order)["tokens"][:, 0], 50 + np.arange(48) % 40)


@pytest.mark.seconds
def test_it_is_the_same_on_every_mesh_from_every_position_and_by_workers(counting):
    data = GrainConfig(source=counting)
    whole = batches_of(data, steps=6)["tokens"]
    assert np.array_equal(batches_of(data, steps=6, mesh=(2, 2, 2))["tokens"], whole)
    workers = dataclasses.replace(data, num_workers=2)
    later = batches_of(workers, mesh=(1, 1, 8), position=40)["tokens"]
    assert np.array_equal(later, whole[40:88])


def test_a_mixture_with_tokens_fills_in_what_they_lack(tmp_path):
    write_shards(tmp_path / "tokens", np.arange(2000) % 40 + 100, vocab_size=257)
    source = f"{EXAMPLES}:additions"
    parts = (
        MixturePart(path=str(tmp_path / "tokens"), weight=0.5),
        GrainPart(source=source, weight=0.5, options={"count": 50}),
    )
    rows = batches_of(MixtureConfig(parts=parts))
    assert {name: array.dtype for name, array in rows.items()} == {
        "tokens": np.int32,
        "mask": bool,
        "segment_ids": np.int32,
    }
    tokens, mask, segments = (rows[name] for name in ("tokens", "mask", "segment_ids"))
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


def test_the_examples_read_tfds_and_hugging_face(tmp_path):
    import tensorflow_datasets as tfds

    stream = np.random.default_rng(0).integers(0, 257, 1 + 20 * LENGTH)
    even = {"train": np.split(stream[:-1], 10), "test": np.split(stream[:320], 10)}
    ragged = {"train": np.split(stream, [5, 6, 170]), "validation": np.split(stream, [99])}
    for number, (records, shape) in enumerate(((even, (2 * LENGTH,)), (ragged, (None,)))):
        examples = {
            split: [{"tokens": tokens.astype(np.uint16)} for tokens in some]
            for split, some in records.items()
        }
        feature = {"tokens": tfds.features.Tensor(shape=shape, dtype=np.uint16)}
        directory = write_tfds(tmp_path / str(number), examples, feature)
        options = {"path": str(directory)}
        data = GrainConfig(source=f"{EXAMPLES}:from_tfds", options=options, order="sequential")
        for split, tokens in records.items():
            windows = open_data(data, "train" if split == "train" else "val", model=MODEL)
            tokens = np.concatenate(tokens)
            assert len(windows) == (len(tokens) - 1) // LENGTH
            starts = np.arange(len(windows))[:, None] * LENGTH
            read = windows.read(np.arange(len(windows)))["tokens"]
            assert np.array_equal(read, tokens[starts + np.arange(LENGTH + 1)])
    datasets = pytest.importorskip("datasets")
    texts = ["short", "a text that is longer than the window"] * 10
    splits = {"train": datasets.Dataset.from_dict({"text": texts})}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    options = {"path": str(tmp_path / "saved")}
    data = GrainConfig(source=f"{EXAMPLES}:from_hugging_face", options=options, order="sequential")
    rows = batches_of(data, steps=1)
    assert bytes(rows["tokens"][0, 1:6].tolist()) == b"short"
    assert rows["mask"][0].tolist() == [True] * 7 + [False] * (LENGTH - 6)
    assert bytes(rows["tokens"][1, 1:].tolist()) == b"a text that is longer"[:LENGTH]
    assert rows["mask"][1].all()


WEIGHTED = """
import grain
import numpy as np

def windows(*, split, length):
    def window(i):
        mask = np.full(length + 1, (0.0, 0.25, 1.0)[i % 3])
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
    mesh = mesh_of(8)
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
    token_bytes = np.arange(MODEL.vocab_size, dtype=np.int32) % 4
    score = validation_loss(make_eval_step(MODEL, mesh, token_bytes), mesh, state.params, scored)
    weights = np.tile([0.0, 0.25, 1.0], 7)[:20]  # of the windows scored
    rows = np.arange(LENGTH + 1) + np.arange(20)[:, None]
    losses = np.asarray(losses_of(state.params, rows))
    expected = (losses.mean(1) * weights).sum() / weights.sum()
    assert score.loss == pytest.approx(expected, abs=1e-5)
    assert score.num_tokens == round(weights.sum() * LENGTH)
    num_bytes = token_bytes[rows[:, 1:]]
    bits = (losses * (num_bytes > 0) * weights[:, None]).sum() / np.log(2)
    assert score.bits_per_byte == pytest.approx(bits / (num_bytes * weights[:, None]).sum())
    assert validation_loss(make_eval_step(MODEL, mesh), mesh, state.params, scored) == (
        dataclasses.replace(score, bits_per_byte=None)
    )
    with refused(ValueError, "eval.num_windows"):
        validation_loss(lambda params, batch: {"weight": np.zeros(())}, mesh, state.params, [batch])


def test_a_plan_knows_the_arrays_of_own_data(tmp_path, caplog):
    additions = GrainPart(source=f"{EXAMPLES}:additions", weight=0.5, options={"count": 50})
    elsewhere = {"path": str(tmp_path / "none")}
    absent = GrainPart(source=f"{EXAMPLES}:from_hugging_face", weight=0.5, options=elsewhere)
    types = batch_types(MixtureConfig(parts=(additions, absent)), MODEL)
    assert types == {"tokens": np.int32, "mask": np.bool, "segment_ids": np.int32}
    assert "from_hugging_face'" in caplog.text


def test_the_digest_follows_the_text_the_options_and_the_data(counting):
    def windows(model=MODEL, **options):
        return open_data(GrainConfig(source=counting, options=options), "train", model=model)

    longer = dataclasses.replace(MODEL, max_seq_len=32)
    others = [windows(), windows(first=1), windows(count=41), windows(longer)]
    digests = {tokens.digest() for tokens in others}
    assert len(digests) == 4
    assert windows().digest() in digests
    copy, numbers = pickle.loads(pickle.dumps(others[0])), np.array([3, 1])  # as its config
    assert np.array_equal(copy.read(numbers)["tokens"], others[0].read(numbers)["tokens"])
    Path(counting.rpartition(":")[0]).write_text(f"{COUNTING}# longer\n")
    assert windows().digest() not in digests


WINDOW = "grain.MapDataset.range(40).map(lambda i: np.full(length + 1, i))"
NOT_THE_DATA = {  # what a source returns, and what its refusal names
    f"{WINDOW}.to_iter_dataset()": "grain.IterDataset",
    f"{WINDOW}.filter(lambda x: x[0] > 3)": "filter",
    f"{WINDOW}.repeat()": "repeat()",
    "grain.MapDataset.range(0)": "no elements",
    "[1, 2]": "list",
    f"{WINDOW}.map(lambda x: x[1:])": "[16], not [17]",
    f"{WINDOW}.map(lambda x: x / 2)": "float64",
    f"{WINDOW}.map(lambda x: x + 257)": "257, which is not in [0, 256]",
    f"{WINDOW}.map(lambda x: x - 1)": "-1, which is not in [0, 256]",
    f"{WINDOW}.map(lambda x: {{'ids': x}})": "ids",
    f"{WINDOW}.map(lambda x: {{'tokens': x, 'labels': x}})": "tokens, labels",
    f"{WINDOW}.map(lambda x: {{'tokens': x, 'positions': x + 16}})": "16, which is not in [0, 15]",
}
UNLIKE_THE_FIRST = {  # an element, and what the refusal of a later one names
    "np.full(length + 1, 300 if i == 20 else i)": "element 20 hold 300",
    "{'tokens': np.full(length + 1, i), 'mask': np.full(length + 1, 2.5 if i == 2 else 0.5)}": (
        "mask of element 2 hold 2.5"
    ),
    "{'tokens': np.full(length + 1, i), 'mask': np.full(length + 1, np.inf * (i == 1))}": (
        "mask of element 0 hold nan"
    ),
    "{'tokens': np.full(length + 1, i), 'mask': np.full(length + 1, 1.0 if i else True)}": (
        "that of element 0"
    ),
}


def own(path, returned):
    path.write_text(
        f"import grain\nimport numpy as np\ndef f(*, split, length):\n    return {returned}\n"
    )
    return f"{path}:f"


@pytest.mark.parametrize("returned", NOT_THE_DATA)
def test_a_source_that_returns_something_else_is_refused(tmp_path, returned):
    source = own(tmp_path / "own.py", returned)
    named = f"data.source='{source}', split 'train': ", NOT_THE_DATA[returned]
    with refused(ValueError, *named) as raised:
        open_data(GrainConfig(source=source), "train", model=MODEL)
    assert "\n" not in in_words(raised.value)


@pytest.mark.parametrize("element", UNLIKE_THE_FIRST)
def test_elements_unlike_the_first_are_refused_when_they_are_read(tmp_path, element):
    source = own(tmp_path / "own.py", f"grain.MapDataset.range(40).map(lambda i: {element})")
    with refused(ValueError, UNLIKE_THE_FIRST[element]):
        batches_of(GrainConfig(source=source, order="sequential"))


def test_a_source_that_is_another_each_time_is_refused(tmp_path):
    draw = "np.random.randint(0, 99, length + 1) if i == 39 else np.full(length + 1, i)"
    source = own(tmp_path / "own.py", f"grain.MapDataset.range(40).map(lambda i: {draw})")
    with refused(ValueError, source, "seed"):
        open_data(GrainConfig(source=source), "train", model=MODEL).digest()


def test_configs_that_cannot_be_opened_are_refused(counting, tmp_path):
    def opened(source, **options):
        return open_data(GrainConfig(source=source, options=options), "train", model=MODEL)

    config = tiny_config(data=GrainConfig(source=counting), global_batch_size=64)
    part = GrainPart(source="a.py:f", weight=1.0)
    for build, error, *named in (
        (lambda: opened(f"{tmp_path}/none.py:f"), FileNotFoundError, f"{tmp_path}/none.py"),
        (lambda: opened(counting.replace(":windows", ":nothing")), ValueError, "'nothing'"),
        (lambda: opened(counting, cuont=3), ValueError, "cuont"),
        (
            lambda: TrainBatches(opened(counting), config, make_mesh(config.mesh)),
            ValueError,
            "40 windows",
            "global_batch_size=64",
        ),
        (lambda: GrainConfig(source="a.txt:windows"), ValueError, "'a.txt:windows'"),
        (
            lambda: MixtureConfig(parts=(part,), order="random_windows"),
            ValueError,
            "random_windows",
        ),
        (lambda: GrainConfig(source="a.py:f", num_workers=-1), ValueError, "num_workers=-1"),
    ):
        with refused(error, *named):
            build()


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
        print("PRINTED", len(open_data(data, "train", model=MODEL)))
    except ValueError as error:
        print("PRINTED", error)
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
        assert code == 0
        first, second = [line for line in output.splitlines() if line.startswith("PRINTED")]
        assert first == "PRINTED 40"
        assert "split 'train': process 1 has other data than process 0" in second
