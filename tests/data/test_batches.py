import dataclasses
import hashlib
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from running import run_python
from tiny import tiny_config, validation_batches
from token_directories import write_nanogpt, write_shards
from trees import mesh_of

from maxmars.config import (
    EvalConfig,
    MixtureConfig,
    MixturePart,
    PythonSourcesConfig,
    TokenShardsConfig,
)
from maxmars.data.batches import DataSplit, TrainBatches, open_data
from maxmars.data.formats import open_directory
from maxmars.data.prepare import prepare
from maxmars.data.sampling import Interleaving, validation_numbers
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.data.windows import TokenWindows
from maxmars.distributed.sharding import batch_sharding

pytestmark = pytest.mark.smoke
LENGTH = 16  # the tiny config's max_seq_len
BATCH = 16  # and its global_batch_size
BYTE_DIGEST = ByteTokenizer().digest
# SHA-256 of the first 12 steps of seed 0, int32.
DIGEST = "24bff5c9e565c3f2452b2ccc90340c6e1f6d4b15eae85b97acbd70084cbbc39c"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """About 160 training and 40 validation windows, in shards that no window is aligned with."""
    out = tmp_path_factory.mktemp("data") / "tokens"
    rng = np.random.default_rng(0)
    text = "".join(map(chr, rng.integers(32, 127, 3200)))
    options = {"tokenizer": ByteTokenizer(), "source": "random", "shard_tokens": 777}
    prepare([("a", text)], out, validation_fraction=0.2, **options)
    return out


@pytest.fixture(scope="module")
def train(directory):
    return open_directory(directory).stream("train")


@pytest.fixture(scope="module")
def val(directory):
    return open_directory(directory).stream("val")


def config_of(directory, *, order="shuffled", **changes):
    data = TokenShardsConfig(path=str(directory), order=order)
    return tiny_config(**({"data": data} | changes))


def split_of(stream, order="shuffled"):
    return DataSplit(parts=(TokenWindows(stream, LENGTH),), order=order)


def batches_of(stream, *, mesh=None, position=0, prefetch_steps=2, order="shuffled", **changes):
    """The batches of a stream and of `config_of` with these changes."""
    config = config_of(stream.directory.path, order=order, **changes)
    options = {"position": position, "prefetch_steps": prefetch_steps}
    return TrainBatches(split_of(stream, order), config, mesh or mesh_of(), **options)


def windows_of(shards):
    tokens = shards.read(0, shards.num_tokens)
    count = (len(tokens) - 1) // LENGTH
    return np.stack([tokens[i * LENGTH : i * LENGTH + LENGTH + 1] for i in range(count)])


def take(batches, steps):
    """The global batches [B, T+1] of some steps, on the host."""
    taken = [np.asarray(batch["tokens"]) for batch in itertools.islice(batches, steps)]
    batches.close()
    return np.stack(taken).reshape(steps, -1, LENGTH + 1)


def test_the_python_sources_are_prepared(monkeypatch, tmp_path):
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path))
    tokens = open_data(PythonSourcesConfig(), "val", model=tiny_config().model)
    assert tokens.parts[0].path.parent == tmp_path
    assert (tokens.vocabulary.tokenizer, tokens.weights) == ("byte", (1.0,))


def mixture_of(*directories, **fields):
    parts = zip(map(str, directories), (0.7, 0.3), strict=True)
    parts = tuple(MixturePart(path=path, weight=weight) for path, weight in parts)
    return MixtureConfig(parts=parts, **fields)


def test_data_that_do_not_fit_the_model_are_refused(directory, train):
    config = config_of(directory)
    with refused(ValueError, "257 (byte)", "model.vocab_size=256"):
        open_data(config.data, "train", model=dataclasses.replace(config.model, vocab_size=256))
    with refused(ValueError, "global_batch_size=1024"):
        batches_of(train, global_batch_size=1024)


def test_a_mixture_needs_one_tokenizer(directory, tmp_path):
    model = dataclasses.replace(tiny_config().model, vocab_size=50257)
    tokens = np.arange(2000) % 257
    write_nanogpt(tmp_path / "gpt2", tokens, tokens)
    write_shards(tmp_path / "bytes", tokens, vocab_size=257, digest="0" * 64)
    for other, told in (("gpt2", "(gpt2, None)"), ("bytes", f"(byte, {'0' * 64})")):
        config = mixture_of(directory, tmp_path / other)
        with refused(ValueError, directory, tmp_path / other, told):
            open_data(config, "train", model=model)
    write_shards(tmp_path / "known", tokens, tokenizer="gpt2", vocab_size=50257)
    config = mixture_of(tmp_path / "gpt2", tmp_path / "known")  # where no digest is known, the name
    assert open_data(config, "train", model=model).vocabulary.tokenizer == "gpt2"


def test_a_mixture_through_the_mesh(directory, tmp_path):
    other = np.arange(1000) % 50  # the first directory's ids are at least 32, most above 50
    write_shards(tmp_path / "other", other, other, vocab_size=257)
    meta = tmp_path / "other" / "meta.json"
    meta.write_text(meta.read_text().replace(hashlib.sha256(b"byte").hexdigest(), BYTE_DIGEST))
    config = tiny_config(data=mixture_of(directory, tmp_path / "other", order="sequential"))
    tokens = open_data(config.data, "train", model=config.model)
    windows = take(TrainBatches(tokens, config, mesh_of(2, 2, 2)), 5).reshape(80, -1)
    parts = [part.read(np.arange(len(part)))["tokens"] for part in tokens.parts]
    interleaving = Interleaving([0.7, 0.3])
    for i, window in enumerate(windows):
        part, position = interleaving.locate(i)
        assert np.array_equal(window, parts[part][position % len(parts[part])])
    val = open_data(config.data, "val", model=config.model)
    scored_windows, _ = scored(validation_batches(val, config, mesh_of(2, 2, 2)))
    numbers = validation_numbers(val.sizes, val.weights)
    expected = val.read(np.array([numbers[i] for i in range(20)]))["tokens"]
    assert np.array_equal(scored_windows, expected)

    many = dataclasses.replace(config, global_batch_size=256, num_microbatches=1)
    with refused(ValueError, "=16 tokens", "179", "160"):
        TrainBatches(tokens, many, mesh_of())


@pytest.mark.parametrize("prefetch_steps", [0, 5])
def test_an_error_of_reading_comes_where_its_batch_is_taken(tmp_path, prefetch_steps):
    stream = np.arange(100 * LENGTH + 1) % 257
    stream[40 * LENGTH + 3] = 999
    write_shards(tmp_path / "tokens", stream, vocab_size=257)
    stream = open_directory(tmp_path / "tokens").stream("train")
    batches = batches_of(stream, order="sequential", prefetch_steps=prefetch_steps)
    for _ in range(2):
        next(batches)
    with refused(ValueError, "id 999"):
        next(batches)  # of windows 32 to 47
    assert batches.position == 2 * BATCH
    batches.close()


def test_batches_are_read_before_they_are_asked_for(train):
    """With three batches ahead, the thread reads until all are there, and no more."""
    threads = threading.active_count()
    batches = batches_of(train, prefetch_steps=3)
    assert threading.active_count() == threads + 1
    assert batches.position == 0
    for _ in range(5):
        next(batches)
    assert batches.position == 5 * BATCH
    batches.close()
    assert threading.active_count() == threads
    with refused(ValueError, "closed"):
        next(batches)
    batches.close()  # again


EXIT = """
import sys
sys.path.insert(0, {tests!r})
import jax
from maxmars.config import TokenShardsConfig
from maxmars.data.batches import TrainBatches, open_data
from maxmars.distributed.sharding import make_mesh
from tiny import tiny_config

config = tiny_config(data=TokenShardsConfig(path={path!r}))
tokens = open_data(config.data, "train", model=config.model)
batches = TrainBatches(tokens, config, make_mesh(config.mesh))
next(batches)
batches.close()
"""


@pytest.mark.slow
def test_closed_batches_leave_no_message_at_the_end_of_the_process(directory):
    tests = str(Path(__file__).parents[1])
    program = EXIT.format(tests=tests, path=str(directory))
    ended = run_python("-c", program)
    assert (ended.stdout, ended.stderr) == ("", "")


@pytest.mark.parametrize(
    ("num_microbatches", "prefetch_steps", "sizes"),
    [(1, 0, (1, 1, 1)), (2, 4, (8, 1, 1)), (2, 1, (2, 2, 2)), (4, 4, (1, 1, 4))],
)
def test_stream_is_the_same_on_every_mesh(train, num_microbatches, prefetch_steps, sizes):
    options = {"num_microbatches": num_microbatches, "prefetch_steps": prefetch_steps}
    mesh = mesh_of(*sizes)
    batches = batches_of(train, mesh=mesh, **options)
    batch = next(batches)
    assert list(batch) == ["tokens"]
    tokens = batch["tokens"]
    rows = BATCH // num_microbatches
    assert (tokens.shape, tokens.dtype) == ((num_microbatches, rows, LENGTH + 1), np.int32)
    assert tokens.sharding.is_equivalent_to(batch_sharding(mesh), 3)
    read = np.concatenate([np.asarray(tokens).reshape(1, BATCH, -1), take(batches, 11)])
    assert hashlib.sha256(read.tobytes()).hexdigest() == DIGEST


@pytest.mark.parametrize("step", [0, 5])
def test_resume_with_another_batch(train, step):
    """Another size of it, microbatching and mesh."""
    whole = take(batches_of(train), 12).reshape(-1, LENGTH + 1)
    batches = batches_of(train)
    for _ in range(step):
        next(batches)
    position = batches.position
    batches.close()
    assert position == step * BATCH
    other = {"num_microbatches": 1, "global_batch_size": 24, "mesh": mesh_of(data=4)}
    rest = take(batches_of(train, position=position, **other), 4).reshape(-1, LENGTH + 1)
    assert np.array_equal(rest, whole[position : position + 4 * 24])


def test_one_window_is_enough_for_a_batch_of_one(tmp_path):
    options = {"tokenizer": ByteTokenizer(), "source": "short", "validation_fraction": 0.0}
    prepare([("a", "0123456789abcdef")], tmp_path / "out", **options)
    shards = open_directory(tmp_path / "out").stream("train")
    taken = take(batches_of(shards, global_batch_size=1, num_microbatches=1), 3)
    assert np.array_equal(taken, np.tile(windows_of(shards), (3, 1, 1)))


def scored(batches):
    """The real rows of all batches, and the number of rows in all."""
    real, count = [], 0
    for batch in batches:
        tokens, mask = np.asarray(batch["tokens"]), np.asarray(batch["mask"])
        assert tokens.shape == mask.shape
        assert (tokens.dtype, mask.dtype) == (np.int32, bool)
        assert np.array_equal(mask.all(-1), mask.any(-1))
        real.append(tokens[mask.all(-1)])
        count += tokens.shape[1]
    return np.concatenate(real), count


@pytest.mark.parametrize(
    ("sizes", "batch_size", "num_windows"),
    [((1, 1, 1), 7, 20), ((8, 1, 1), 1, 20), ((2, 2, 2), 8, 10_000), ((3, 1, 1), 64, 20)],
)
def test_validation_is_the_same_on_every_mesh(val, sizes, batch_size, num_windows):
    """In order, and all that is there where that is less than is asked for."""
    evaluation = EvalConfig(num_windows=num_windows, batch_size=batch_size)
    config = config_of(val.directory.path, eval=evaluation, seed=5)
    batches = validation_batches(split_of(val), config, mesh_of(*sizes))
    expected = windows_of(val)[:num_windows]
    for _ in range(2):  # it can be iterated again
        windows, count = scored(batches)
        assert np.array_equal(windows, expected)
    devices = sizes[0] * sizes[1]
    rows = -(-batch_size // devices) * devices
    assert len(batches) == -(-len(expected) // rows)
    assert count == len(batches) * rows
    assert batches.num_windows == len(expected)
