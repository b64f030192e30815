"""The token pipeline beside NumPy and Grain's DataLoader; `data prepare` beside bare tiktoken.

    python tools/bench_data.py [--pipeline] [--rounds 9] [--seconds 0.3] [--tokens 50000000]
    python tools/bench_data.py --prepare 'texts/*.txt' [--megabytes 400] [--workers 2] [--rounds 5]

`--pipeline`, which is also what happens without flags, reads batches of 32 sequences of 1,024
tokens on one core, from random tokens below GPT-2's 50,257 that it writes into a temporary
directory. The contenders take turns, and each turn's rate is divided by the NumPy loop's of the
same round, so what else the machine does falls on all. Printed are medians, and the lowest and
highest of the ratios. Files are in the page cache: this is the cost of the code, not of a disk.

The NumPy loop is nanoGPT's `get_batch` up to the tensor: it maps the file, draws 32 starts, and
converts inputs and targets to int64 each. The pipeline's rows are what a process reads for a step
(`TrainRows`), one int32 array, every id checked against the vocabulary.

`--prepare` tokenises with GPT-2's vocabulary, against processes that do nothing but run tiktoken.
The texts are cut into documents of a few thousand characters and repeated to the size wanted. Both
sides start their processes by `spawn`, load the vocabulary and tokenise the same documents.
Prepare's start counts in full; of the bare processes' only the loading of tiktoken does. Prepare
reads one JSON-lines file and writes shards with checksums; the bare processes have their documents
in memory and write nothing. They alternate.
"""

from __future__ import annotations

import argparse
import glob
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # processes that are spawned import this file: JAX would be a part of their start
    import numpy as np

    from maxmars.data.pipeline import TrainRows
    from maxmars.data.streams import TokenStream
    from maxmars.data_config import Order

BATCH, LENGTH, VOCAB_SIZE = 32, 1024, 50257
NUMPY = "NumPy get_batch"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipeline", action="store_true", help="the default")
    parser.add_argument("--prepare", metavar="GLOB", help="UTF-8 texts to tokenise, quoted")
    parser.add_argument("--megabytes", type=float, default=400, help="text to tokenise")
    parser.add_argument("--workers", type=int, default=2, help="processes that tokenise")
    parser.add_argument("--rounds", type=int, help="turns of each side: 9, or 5 with --prepare")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a turn")
    parser.add_argument("--tokens", type=int, default=50_000_000, help="tokens to read from")
    arguments = parser.parse_args()
    if arguments.prepare is not None:
        if arguments.pipeline:
            parser.error("give one of --pipeline and --prepare.")
        size, workers = arguments.megabytes, arguments.workers
        compare_prepare(arguments.prepare, size, workers, arguments.rounds or 5)
        return
    compare_pipelines(arguments.rounds or 9, arguments.seconds, arguments.tokens)


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
    import numpy as np

    from maxmars.data.formats import open_split
    from maxmars.data.pipeline import ReadAhead

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
    import numpy as np

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
    import numpy as np

    from maxmars.data.examples import training_examples
    from maxmars.data.pipeline import TrainRows

    examples = training_examples(streams, weights or [1.0], length=LENGTH, seed=0, order=order)
    return TrainRows(examples, np.arange(BATCH)[None], global_batch_size=BATCH)


def data_loader(stream: TokenStream) -> Iterator[Any]:
    """Shuffled windows in batches, read in this process (workers would take other cores)."""
    import grain

    from maxmars.data.examples import TokenWindows

    windows = TokenWindows(stream, LENGTH)
    sampler = grain.samplers.IndexSampler(len(windows), shuffle=True, seed=0)
    operations = [grain.transforms.Batch(BATCH, drop_remainder=True)]
    return iter(grain.DataLoader(data_source=windows, sampler=sampler, operations=operations))


def write_tfds(root: Path, num_tokens: int) -> Path:
    """A TFDS dataset of records of 1,024 tokens."""
    import numpy as np
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


DOCUMENT_CHARACTERS = 4000


def read_documents(pattern: str, megabytes: float) -> list[str]:
    text = "".join(Path(path).read_text() for path in sorted(glob.glob(pattern)))
    if not text:
        raise SystemExit(f"no text matches {pattern!r}")
    starts = range(0, len(text), DOCUMENT_CHARACTERS)
    documents = [text[start : start + DOCUMENT_CHARACTERS] for start in starts]
    return documents * max(round(megabytes * 1e6 / len(text)), 1)


def tokenise(path: str, first: int, stride: int, ready, go) -> None:
    documents = json.loads(Path(path).read_text())[first::stride]
    ready.release()
    go.wait()
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    for text in documents:
        encoding.encode_to_numpy(text, disallowed_special=())


def bare_seconds(path: Path, workers: int) -> float:
    """Loading the documents does not count, loading tiktoken does."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    processes = [
        context.Process(target=tokenise, args=(str(path), i, workers, ready, go))
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    start = time.perf_counter()
    go.set()
    for process in processes:
        process.join()
    return time.perf_counter() - start


def prepare_seconds(path: Path, directory: Path, workers: int) -> float:
    from maxmars.data.corpus import LocalFiles
    from maxmars.data.prepare import prepare
    from maxmars.data.tokenizer import GPT2Tokenizer

    start = time.perf_counter()
    prepare(
        LocalFiles([str(path)]),
        directory,
        tokenizer=GPT2Tokenizer(),
        source=str(path),
        workers=workers,
    )
    return time.perf_counter() - start


def compare_prepare(pattern: str, megabytes_wanted: float, workers: int, rounds: int) -> None:
    """Print MB a second and process of both sides, and their ratio."""
    documents = read_documents(pattern, megabytes_wanted)
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    rates: dict[str, list[float]] = {"bare": [], "prepare": []}
    with tempfile.TemporaryDirectory() as scratch:
        lines, whole = Path(scratch, "documents.jsonl"), Path(scratch, "documents.json")
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        whole.write_text(json.dumps(documents))
        for round_ in range(rounds):
            seconds = bare_seconds(whole, workers)
            rates["bare"].append(megabytes / seconds / workers)
            seconds = prepare_seconds(lines, Path(scratch, f"out{round_}"), workers)
            rates["prepare"].append(megabytes / seconds / workers)
    ratios = [p / b for p, b in zip(rates["prepare"], rates["bare"], strict=True)]
    print(f"{megabytes:.0f} MB, {workers} processes, load {os.getloadavg()[0]:.1f}")
    for name, values in rates.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"{name:8} {statistics.median(values):5.1f} MB/s a process ({spread})")
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"ratio    {statistics.median(ratios):.2f} ({spread})")


if __name__ == "__main__":
    main()
