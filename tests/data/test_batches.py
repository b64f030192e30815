import dataclasses
import hashlib
import itertools
import subprocess
import sys
import threading
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from refusals import refused
from tiny import tiny_config, validation_batches
from token_directories import write_nanogpt, write_shards

from maxmars.config import (
    EvalConfig,
    MeshConfig,
    MixtureConfig,
    MixturePart,
    PythonSourcesConfig,
    TokenShardsConfig,
)
from maxmars.data.batches import SplitTokens, TrainBatches, open_data
from maxmars.data.prepare import prepare
from maxmars.data.sampling import (
    Interleaving,
    process_batches,
    training_numbers,
    validation_numbers,
)
from maxmars.data.token_files import TokenShards
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.data.windows import TokenWindows
from maxmars.distributed.sharding import batch_sharding, make_mesh

LENGTH = 16  # the tiny config's max_seq_len
BATCH = 16  # and its global_batch_size
BYTE_DIGEST = ByteTokenizer().digest
# SHA-256 of the first 12 steps of seed 0, int32.
DIGEST = "24bff5c9e565c3f2452b2ccc90340c6e1f6d4b15eae85b97acbd70084cbbc39c"
ORDER = [
    668,
    84,
    161,
    433,
    186,
    373,
]  # what seed 7 makes of 1000 examples, at the starts of two epochs


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
    return TokenShards(directory, "train")


@pytest.fixture(scope="module")
def val(directory):
    return TokenShards(directory, "val")


def config_of(directory, *, order="shuffled", **changes):
    data = TokenShardsConfig(path=str(directory), order=order)
    return tiny_config(**({"data": data} | changes))


def mesh_of(data=1, fsdp=1, tensor=1):
    config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    return make_mesh(config, jax.devices()[: data * fsdp * tensor])


def split_of(stream, order="shuffled"):
    return SplitTokens(parts=(TokenWindows(stream, LENGTH),), order=order)


def windows_of(shards):
    tokens = shards.read(0, shards.num_tokens)
    count = (len(tokens) - 1) // LENGTH
    return np.stack([tokens[i * LENGTH : i * LENGTH + LENGTH + 1] for i in range(count)])


def take(batches, steps):
    """The global batches [B, T+1] of some steps, on the host."""
    found = [np.asarray(batch["tokens"]) for batch in itertools.islice(batches, steps)]
    batches.close()
    return np.stack(found).reshape(steps, -1, LENGTH + 1)


def stream(shards, config, steps=12, mesh=None, **options):
    tokens = split_of(shards, config.data.order)
    return take(TrainBatches(tokens, config, mesh or mesh_of(), **options), steps)


def order_of(stream, seed=0):
    """The numbers of the windows of a stream in a shuffled order."""
    sizes = [len(TokenWindows(stream, LENGTH))]
    return training_numbers(sizes, [1.0], seed=seed, order="shuffled")


def tokens_of(stream, numbers):
    """The tokens of some windows, [numbers, window]."""
    return TokenWindows(stream, LENGTH).read(np.array(list(numbers)))["tokens"]


def test_the_python_sources_are_prepared(monkeypatch, tmp_path):
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path))
    model = dataclasses.replace(tiny_config().model, document_end_id=256)
    tokens = open_data(PythonSourcesConfig(), "val", model=model)
    assert tokens.origin.directory.parent == tmp_path
    assert (tokens.origin.tokenizer, tokens.weights) == ("byte", (1.0,))


def test_vocabulary_must_fit(directory):
    config, model = TokenShardsConfig(path=str(directory)), tiny_config().model
    assert open_data(config, "train", model=model).origin.split == "train"
    small = dataclasses.replace(model, vocab_size=256)
    with refused(ValueError, "257 (byte)", "model.vocab_size=256"):
        open_data(config, "train", model=small)


def test_the_end_of_documents_must_be_the_tokenizers(directory):
    config = TokenShardsConfig(path=str(directory))
    model = dataclasses.replace(tiny_config().model, document_end_id=0)
    with refused(ValueError, "token 256", "model.document_end_id=0"):
        open_data(config, "train", model=model)


def mixture_of(*directories, weights=(0.7, 0.3), **fields):
    parts = zip(map(str, directories), weights, strict=True)
    parts = tuple(MixturePart(path=path, weight=weight) for path, weight in parts)
    return MixtureConfig(parts=parts, **fields)


def test_a_mixture_needs_one_tokenizer(directory, tmp_path):
    model = dataclasses.replace(tiny_config().model, vocab_size=50257)
    tokens = np.arange(2000) % 257
    write_nanogpt(tmp_path / "gpt2", tokens, tokens)
    write_shards(tmp_path / "bytes", tokens, vocab_size=257, digest="0" * 64)
    for other, found in (("gpt2", "(gpt2, None)"), ("bytes", f"(byte, {'0' * 64})")):
        config = mixture_of(directory, tmp_path / other)
        with refused(ValueError, directory, tmp_path / other, found):
            open_data(config, "train", model=model)
    write_shards(tmp_path / "known", tokens, tokenizer="gpt2", vocab_size=50257)
    config = mixture_of(tmp_path / "gpt2", tmp_path / "known")  # where no digest is known, the name
    assert open_data(config, "train", model=model).origin.tokenizer == "gpt2"


def test_a_mixture_through_the_mesh(directory, tmp_path):
    other = np.arange(1000) % 50  # the first directory's ids are at least 32, most above 50
    write_shards(tmp_path / "other", other, other, vocab_size=257)
    meta = tmp_path / "other" / "meta.json"
    meta.write_text(meta.read_text().replace(hashlib.sha256(b"byte").hexdigest(), BYTE_DIGEST))
    config = tiny_config(data=mixture_of(directory, tmp_path / "other", order="sequential"))
    tokens = open_data(config.data, "train", model=config.model)
    found = take(TrainBatches(tokens, config, mesh_of(2, 2, 2)), 5).reshape(80, -1)
    parts = [part.read(np.arange(len(part)))["tokens"] for part in tokens.parts]
    interleaving = Interleaving([0.7, 0.3])
    for i, window in enumerate(found):
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


def damaged(directory):
    """Tokens whose window 40 holds an id outside the vocabulary."""
    tokens = np.arange(100 * LENGTH + 1) % 257
    tokens[40 * LENGTH + 3] = 999
    write_shards(directory, tokens, vocab_size=257)
    return TokenShards(directory, "train")


@pytest.mark.parametrize("prefetch_steps", [0, 1, 5])
def test_an_error_of_reading_comes_where_its_batch_is_taken(tmp_path, prefetch_steps):
    shards = damaged(tmp_path / "tokens")
    config = config_of(shards.directory, order="sequential")
    tokens = split_of(shards, "sequential")
    batches = TrainBatches(tokens, config, mesh_of(), prefetch_steps=prefetch_steps)
    for _ in range(2):
        next(batches)
    with refused(ValueError, "id 999"):
        next(batches)  # of windows 32 to 47
    assert batches.position == 2 * BATCH
    batches.close()


def test_batches_are_read_before_they_are_asked_for(train):
    """With three batches ahead, the thread reads until all are there, and no more."""
    threads = threading.active_count()
    batches = TrainBatches(split_of(train), config_of(train.directory), mesh_of(), prefetch_steps=3)
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


@pytest.mark.seconds
def test_closed_batches_leave_no_message_at_the_end_of_the_process(directory):
    tests = str(Path(__file__).parents[1])
    program = EXIT.format(tests=tests, path=str(directory))
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_in_order_without_shuffle(train):
    windows = windows_of(train)
    found = stream(train, config_of(train.directory, order="sequential"), steps=25)
    expected = windows[np.arange(25 * BATCH) % len(windows)].reshape(25, BATCH, -1)
    assert np.array_equal(found, expected)


def test_epochs_are_permutations_without_replacement(train):
    index = {window.tobytes(): i for i, window in enumerate(windows_of(train))}
    count = len(index)
    numbers = order_of(train, seed=3)
    found = tokens_of(train, [numbers[i] for i in range(3 * count)])
    order = np.array([index[window.tobytes()] for window in found]).reshape(3, count)
    assert np.array_equal(np.sort(order), np.tile(np.arange(count), (3, 1)))
    for a, b in itertools.combinations([*order, np.arange(count)], 2):
        assert np.mean(a == b) < 0.1  # a new order each epoch, and never the text's


def test_seeds_do_not_share_epochs(train):
    """With one integer as the seed of an epoch, epoch 1 of seed 0 could be epoch 0 of seed 1."""
    count = len(windows_of(train))
    epochs = set()
    for seed in range(4):
        numbers = order_of(train, seed=seed)
        for epoch in range(4):
            epochs.add(tuple(numbers[i] for i in range(epoch * count, (epoch + 1) * count)))
    assert len(epochs) == 16


def test_order_is_pinned(train):
    """A change of Grain that reorders the stream would break every resume: it must show."""
    dataset = grain.MapDataset.source(range(1000)).seed(7).shuffle().repeat()
    order = [int(dataset[i]) for i in [0, 1, 2, 999, 1000, 1001]]
    assert order == ORDER
    numbers = order_of(train, seed=7)
    dataset = grain.MapDataset.source(range(len(windows_of(train)))).seed(7).shuffle().repeat()
    assert [numbers[i] for i in range(400)] == [int(dataset[i]) for i in range(400)]


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("prefetch_steps", [0, 1, 4])
def test_stream_is_the_same(train, num_microbatches, prefetch_steps):
    config = config_of(train.directory, num_microbatches=num_microbatches)
    found = stream(train, config, prefetch_steps=prefetch_steps)
    numbers = order_of(train)
    expected = tokens_of(train, [numbers[i] for i in range(12 * BATCH)])
    assert np.array_equal(found.reshape(12 * BATCH, -1), expected)
    assert hashlib.sha256(found.tobytes()).hexdigest() == DIGEST


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 4, 2), (1, 1, 4)])
def test_stream_is_the_same_on_every_mesh(train, sizes):
    mesh = mesh_of(*sizes)
    batches = TrainBatches(split_of(train), config_of(train.directory), mesh)
    batch = next(batches)
    assert list(batch) == ["tokens"]
    tokens = batch["tokens"]
    assert (tokens.shape, tokens.dtype) == ((2, 8, LENGTH + 1), np.int32)
    assert tokens.sharding.is_equivalent_to(batch_sharding(mesh), 3)
    found = np.concatenate([np.asarray(tokens).reshape(1, BATCH, -1), take(batches, 11)])
    assert hashlib.sha256(found.tobytes()).hexdigest() == DIGEST


@pytest.mark.parametrize(
    "processes",
    [
        [range(8), range(8, 16)],
        [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]],
        [range(8), range(8), range(8, 16), range(8, 16)],  # `tensor` splits over processes
        [range(0, 16, 2), range(1, 16, 2)],
    ],
)
def test_stream_is_the_same_for_every_number_of_processes(train, processes):
    found = np.full((12, BATCH, LENGTH + 1), -1, np.int32)
    for rows in processes:
        read, of_process = split_of(train).read, np.array(rows).reshape(2, -1)
        batches = process_batches(order_of(train), read, of_process, BATCH)
        for step in range(12):
            found[step, np.array(rows)] = batches[step]["tokens"].reshape(len(rows), -1)
    assert hashlib.sha256(found.tobytes()).hexdigest() == DIGEST


@pytest.mark.parametrize("step", [0, 1, 5, 11])
def test_resume(train, step):
    config = config_of(train.directory)
    whole = stream(train, config)
    batches = TrainBatches(split_of(train), config, mesh_of())
    for _ in range(step):
        next(batches)
    position = batches.position
    batches.close()
    assert position == step * BATCH
    other = dataclasses.replace(config, num_microbatches=1)
    rest = stream(train, other, 12 - step, mesh_of(data=4), position=position)
    assert np.array_equal(rest, whole[step:])


def test_resume_with_another_batch_size(train):
    config = config_of(train.directory)
    whole = stream(train, config).reshape(-1, LENGTH + 1)
    larger = dataclasses.replace(config, global_batch_size=24)
    rest = stream(train, larger, 4, position=3 * BATCH).reshape(-1, LENGTH + 1)
    assert np.array_equal(rest, whole[3 * BATCH : 3 * BATCH + 4 * 24])


def test_seed_changes_the_stream(train):
    config = config_of(train.directory)
    other = dataclasses.replace(config, seed=1)
    assert not np.array_equal(stream(train, config, 1), stream(train, other, 1))


def test_one_window_is_enough_for_a_batch_of_one(tmp_path):
    options = {"tokenizer": ByteTokenizer(), "source": "short", "validation_fraction": 0.0}
    prepare([("a", "0123456789abcdef")], tmp_path / "out", **options)
    shards = TokenShards(tmp_path / "out", "train")
    config = config_of(tmp_path, global_batch_size=1, num_microbatches=1)
    found = stream(shards, config, 3)
    assert np.array_equal(found, np.tile(windows_of(shards), (3, 1, 1)))


def test_too_few_tokens_for_a_batch(train):
    config = config_of(train.directory, global_batch_size=1024)
    with refused(ValueError, "global_batch_size=1024"):
        TrainBatches(split_of(train), config, mesh_of())


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


@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 1, 1), (2, 2, 2), (3, 1, 1)])
@pytest.mark.parametrize("batch_size", [1, 7, 8, 64])
def test_validation_is_the_same_on_every_mesh(val, sizes, batch_size):
    evaluation = EvalConfig(num_windows=20, batch_size=batch_size)
    batches = validation_batches(
        split_of(val), config_of(val.directory, eval=evaluation), mesh_of(*sizes)
    )
    expected = windows_of(val)[:20]
    for _ in range(2):  # it can be iterated again
        found, count = scored(batches)
        assert np.array_equal(found, expected)
    parts = sizes[0] * sizes[1]
    rows = -(-batch_size // parts) * parts
    assert len(batches) == -(-20 // rows)
    assert count == len(batches) * rows
    assert batches.num_windows == 20


def test_validation_takes_what_is_there(val):
    config = config_of(val.directory, eval=EvalConfig(num_windows=10_000))
    batches = validation_batches(split_of(val), config, mesh_of())
    assert batches.num_windows == len(windows_of(val)) < 10_000
    assert np.array_equal(scored(batches)[0], windows_of(val))


def test_validation_in_order_whatever_the_shuffle(val):
    config = config_of(val.directory, seed=5)
    assert np.array_equal(
        scored(validation_batches(split_of(val), config, mesh_of()))[0], windows_of(val)[:20]
    )
