"""The stream is one function of (seed, index), however the work of reading it is dealt out."""

import hashlib
import itertools
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from token_directories import write_shards

from maxmars.config import MeshConfig
from maxmars.data.batches import DataSplit
from maxmars.data.formats import open_directory
from maxmars.data.sampling import process_batches, training_numbers
from maxmars.data.windows import TokenWindows
from maxmars.distributed.sharding import local_rows, make_mesh

LENGTH, SEED = 16, 5
WEIGHTS = (0.7, 0.3)
# SHA-256 of the first 1000 examples, int32.
DIGESTS = {
    "shuffled": "c936aa7d2f405f1e0c57a8c20960c2eb8258dbe2ed26620bce659fed99d99ab2",
    "random_windows": "5e7cffd3a7477efb1cf0c45f4dc561731f33d4e20adb86d3aedc9810da3e4eea",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Streams of 90 and 60 windows, in shards that no window is aligned with."""
    path = tmp_path_factory.mktemp("streams")
    for i, num_tokens in enumerate((1450, 970)):
        stream = np.random.default_rng(i).integers(0, 257, num_tokens)
        write_shards(path / str(i), stream, vocab_size=257)
    return path


def examples_of(directory, order="shuffled"):
    """The numbers of a mixture's windows and what reads them, opened anew, as each process does."""
    streams = [open_directory(directory / name).stream("train") for name in "01"]
    stride = 1 if order == "random_windows" else None
    windows = [TokenWindows(stream, LENGTH, stride=stride) for stream in streams]
    tokens = DataSplit(parts=tuple(windows), weights=WEIGHTS)
    return training_numbers(tokens.sizes, WEIGHTS, seed=SEED, order=order), tokens.read


def random_setting(rng):
    """Mesh, processes, batch, microbatches and prefetch until a run is stopped."""
    data = 2 ** int(rng.integers(4))
    fsdp = 2 ** int(rng.integers(4 - data.bit_length() + 1))
    mesh = MeshConfig(data=data, fsdp=fsdp, tensor=8 // (data * fsdp))
    num_microbatches = int(rng.integers(1, 4))
    rows = data * fsdp * int(rng.integers(1, 3))
    return {
        "mesh": mesh,
        "num_processes": 2 ** int(rng.integers(4)),
        "microbatches": (num_microbatches, rows),
        "prefetch": int(rng.integers(4)),
        "num_steps": int(rng.integers(1, 4)),
    }


def run(directory, position, *, mesh, num_processes, microbatches, prefetch, num_steps):
    """The rows [steps * batch, window] that the processes of a run from `position` on read."""
    mesh = make_mesh(mesh)
    batch_size = int(np.prod(microbatches))
    rows_of_steps = np.full((num_steps, batch_size, LENGTH + 1), -1, np.int32)
    for devices in np.split(np.array(jax.devices()), num_processes):
        rows = local_rows(mesh, microbatches, devices.tolist())
        batches = process_batches(
            *examples_of(directory), rows, batch_size, position
        ).to_iter_dataset(grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch))
        for step, batch in enumerate(itertools.islice(batches, num_steps)):
            read = batch["tokens"].reshape(rows.size, -1)
            before = rows_of_steps[step, rows.ravel()]
            assert np.all((before == -1) | (before == read))  # rows that two processes hold agree
            rows_of_steps[step, rows.ravel()] = read
    return rows_of_steps.reshape(-1, LENGTH + 1)


@pytest.mark.parametrize("order", DIGESTS)
def test_the_stream_is_pinned(directory, order):
    numbers, read = examples_of(directory, order)
    tokens = read(np.array([numbers[i] for i in range(1000)]))["tokens"]
    assert hashlib.sha256(tokens.tobytes()).hexdigest() == DIGESTS[order]


@pytest.mark.seconds
def test_random_settings_give_the_same_global_stream(directory):
    """A run that is stopped and goes on with other settings 15 times, over many epochs."""
    rng = np.random.default_rng(0)
    position, rows, seen = 0, [], set()
    for _ in range(15):
        setting = random_setting(rng)
        rows.append(run(directory, position, **setting))
        position += len(rows[-1])
        seen.add((setting["num_processes"], setting["microbatches"], setting["prefetch"]))
    numbers, read = examples_of(directory)
    expected = read(np.array([numbers[i] for i in range(position)]))["tokens"]
    assert np.array_equal(np.concatenate(rows), expected)
    assert position > 180  # the epochs of the parts have 90 and 60 windows
    assert len(seen) > 10
