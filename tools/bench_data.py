"""What the token pipeline delivers beside a plain NumPy loop and Grain's DataLoader.

    python tools/bench_data.py [--pipeline] [--rounds 9] [--seconds 0.3] [--tokens 50000000]

`--pipeline`, which is also what happens without flags, reads batches of 32 sequences of 1,024
tokens on one core, from random tokens below GPT-2's 50,257 that it writes into a temporary
directory. The contenders take turns, and each turn's rate is divided by the NumPy loop's of the
same round, so what else the machine does falls on all. Printed are medians, and the lowest and
highest of the ratios. Files are in the page cache: this is the cost of the code, not of a disk.

The NumPy loop is nanoGPT's `get_batch` up to the tensor: it maps the file, draws 32 starts, and
converts inputs and targets to int64 each. The pipeline's rows are what a process reads for a step
(`TrainRows`), one int32 array, every id checked against the vocabulary.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np

from maxmars.data.examples import TokenWindows, training_examples
from maxmars.data.formats import open_split
from maxmars.data.pipeline import ReadAhead, TrainRows
from maxmars.data.streams import TokenStream
from maxmars.data_config import Order

BATCH, LENGTH, VOCAB_SIZE = 32, 1024, 50257
NUMPY = "NumPy get_batch"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipeline", action="store_true", help="the default")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a turn")
    parser.add_argument("--tokens", type=int, default=50_000_000, help="tokens to read from")
    arguments = parser.parse_args()
    compare_pipelines(arguments.rounds, arguments.seconds, arguments.tokens)


def compare_pipelines(rounds: int, seconds: float, num_tokens: int) -> None:
    """Print one line for each way to read: tokens a second, and ratios to the NumPy loop's."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # all threads of it
    with tempfile.TemporaryDirectory() as name:
        readers = make_readers(Path(name), num_tokens)
        rates: dict[str, list[float]] = {reader: [] for reader in readers}
        for read in readers.values():
            tokens_per_s(read, seconds)  # maps the files, and fills the page cache
        for _ in range(rounds):
            for reader, read in readers.items():
                rates[reader].append(tokens_per_s(read, seconds))
    print(f"{rounds} rounds of {seconds} s on core {core}, batches of {BATCH} x {LENGTH} tokens")
    print(f"{'':32}{'tokens/s':>10}{'ratio: median':>15}{'min':>8}{'max':>8}")
    for reader, found in rates.items():
        ratios = [a / b for a, b in zip(found, rates[NUMPY], strict=True)]
        spread = f"{statistics.median(ratios):15.3f}{min(ratios):8.3f}{max(ratios):8.3f}"
        print(f"{reader:32}{statistics.median(found):10.2e}{spread}")


def tokens_per_s(read: Callable[[], Any], seconds: float) -> float:
    start, batches = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        read()
        batches += 1
    return batches * BATCH * LENGTH / elapsed


def make_readers(root: Path, num_tokens: int) -> dict[str, Callable[[], Any]]:
    """Functions that each read one batch, by name."""
    rng = np.random.default_rng(0)
    for directory in ("a", "b"):
        (root / directory).mkdir()
        tokens = rng.integers(0, VOCAB_SIZE, num_tokens, np.uint16)
        tokens.tofile(root / directory / "train.bin")
    a, b = (open_split(root / directory, "train") for directory in ("a", "b"))
    tfds = open_split(write_tfds(root, num_tokens // 50), "train")
    ahead = ReadAhead(rows([a]).__next__, 2)
    return {
        NUMPY: numpy_get_batch(root / "a" / "train.bin"),
        "maxmars shuffled": rows([a]).__next__,
        "maxmars shuffled, read ahead": ahead.__next__,
        "maxmars random_windows": rows([a], order="random_windows").__next__,
        "maxmars mixture 0.7 : 0.3": rows([a, b], [0.7, 0.3]).__next__,
        "maxmars shuffled, TFDS": rows([tfds]).__next__,
        "Grain DataLoader": data_loader(a).__next__,
    }


def numpy_get_batch(path: Path) -> Callable[[], Any]:
    rng = np.random.default_rng(0)

    def get_batch() -> tuple[np.ndarray, np.ndarray]:
        data = np.memmap(path, np.uint16, "r")
        starts = rng.integers(len(data) - LENGTH, size=BATCH)
        inputs = np.stack([data[i : i + LENGTH].astype(np.int64) for i in starts])
        targets = np.stack([data[i + 1 : i + 1 + LENGTH].astype(np.int64) for i in starts])
        return inputs, targets

    return get_batch


def rows(
    streams: list[TokenStream], weights: list[float] | None = None, order: Order = "shuffled"
) -> TrainRows:
    examples = training_examples(streams, weights or [1.0], length=LENGTH, seed=0, order=order)
    return TrainRows(examples, np.arange(BATCH)[None], global_batch_size=BATCH)


def data_loader(stream: TokenStream) -> Iterator[Any]:
    """Shuffled windows in batches, read in this process (workers would take other cores)."""
    windows = TokenWindows(stream, LENGTH)
    sampler = grain.samplers.IndexSampler(len(windows), shuffle=True, seed=0)
    operations = [grain.transforms.Batch(BATCH, drop_remainder=True)]
    return iter(grain.DataLoader(data_source=windows, sampler=sampler, operations=operations))


def write_tfds(root: Path, num_tokens: int) -> Path:
    """A TFDS dataset of records of 1,024 tokens."""
    import tensorflow_datasets as tfds

    class Tokens(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """Random tokens."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            feature = tfds.features.Tensor(shape=(LENGTH,), dtype=np.uint16)
            features = tfds.features.FeaturesDict({"tokens": feature})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Iterator[Any]:
            rng = np.random.default_rng(0)
            for i in range(num_tokens // LENGTH):
                yield i, {"tokens": rng.integers(0, VOCAB_SIZE, LENGTH, np.uint16)}

    tfds.disable_progress_bar()
    Tokens(data_dir=root, file_format="array_record").download_and_prepare()
    return root / "tokens" / "1.0.0"


if __name__ == "__main__":
    main()
