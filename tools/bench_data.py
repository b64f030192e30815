"""Reading tokens beside other pipelines; `data prepare` beside bare tiktoken.

    python tools/bench_data.py [--rounds 9] [--seconds 0.3] [--tokens 50000000]
    python tools/bench_data.py --prepare 'texts/*.txt' [--megabytes 400] [--workers 2] [--rounds 5]

Without `--prepare`, it reads batches of 32 sequences of 1,024 and of 128 tokens from random tokens
below GPT-2's 50,257, which it writes into a temporary directory. The contenders take turns, and
each turn's tokens per second of processor time, of all threads, are divided by those of get_batch
in the same round, so what else the machine does falls on all. Printed are medians, and the lowest
and highest of the ratios. Files are in the page cache: this is the cost of the code, not of a disk.

* get_batch is nanoGPT's, up to the tensor: it maps the file, draws 32 starts, and converts inputs
  and targets to int64 each.
* maxmars is what a process reads for a step, one int32 array, every id checked against the
  vocabulary; also through the thread that reads ahead.
* Grain is the chain of its documentation over the same windows: source, shuffle, repeat, batch.
* DataLoader is PyTorch's, in this process, where PyTorch is installed.

Then it opens a sparse file of 9e9 tokens and takes the first batch, and that of step 10^6.

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
import importlib.util
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
    import grain
    import numpy as np

    from maxmars.config import Order
    from maxmars.data.token_files import TokenStream

BATCH, LENGTHS, VOCAB_SIZE = 32, (1024, 128), 50257
GET_BATCH = "nanoGPT's get_batch"
SPARSE_TOKENS, FAR_STEP = 9_000_000_000, 10**6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepare", metavar="GLOB", help="UTF-8 texts to tokenise, quoted")
    parser.add_argument("--megabytes", type=float, default=400, help="text to tokenise")
    parser.add_argument("--workers", type=int, default=2, help="processes that tokenise")
    parser.add_argument("--rounds", type=int, help="turns of each side: 9, or 5 with --prepare")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a turn")
    parser.add_argument("--tokens", type=int, default=50_000_000, help="tokens to read from")
    arguments = parser.parse_args()
    if arguments.prepare is not None:
        size, workers = arguments.megabytes, arguments.workers
        compare_prepare(arguments.prepare, size, workers, arguments.rounds or 5)
        return
    with tempfile.TemporaryDirectory() as name:
        write_tokens(Path(name), arguments.tokens)
        for length in LENGTHS:
            readers = make_readers(Path(name), length)
            compare_readers(readers, length, arguments.rounds or 9, arguments.seconds)
        time_first_batches(Path(name))


def write_tokens(root: Path, num_tokens: int) -> None:
    """Two nanoGPT directories, `a` and `b`."""
    import numpy as np

    rng = np.random.default_rng(0)
    for directory in ("a", "b"):
        (root / directory).mkdir()
        tokens = rng.integers(0, VOCAB_SIZE, num_tokens, np.uint16)
        tokens.tofile(root / directory / "train.bin")


def compare_readers(
    readers: dict[str, Callable[[], Any]], length: int, rounds: int, seconds: float
) -> None:
    """Print one line for each reader: tokens a CPU second, and ratios to get_batch's."""
    rates: dict[str, list[float]] = {reader: [] for reader in readers}
    for read in readers.values():
        tokens_per_cpu_s(read, length, seconds)  # maps the files, and fills the page cache
    for _ in range(rounds):
        for reader, read in readers.items():
            rates[reader].append(tokens_per_cpu_s(read, length, seconds))
    print(f"{rounds} rounds of {seconds} s, batches of {BATCH} x {length} tokens")
    print(f"{'':32}{'tokens/CPU s':>14}{'ratio: median':>15}{'min':>8}{'max':>8}")
    for reader, found in rates.items():
        ratios = [a / b for a, b in zip(found, rates[GET_BATCH], strict=True)]
        spread = f"{statistics.median(ratios):15.3f}{min(ratios):8.3f}{max(ratios):8.3f}"
        print(f"{reader:32}{statistics.median(found):14.2e}{spread}")


def tokens_per_cpu_s(read: Callable[[], Any], length: int, seconds: float) -> float:
    start, begin, batches = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        read()
        batches += 1
    return batches * BATCH * length / (time.process_time() - start)


def make_readers(root: Path, length: int) -> dict[str, Callable[[], Any]]:
    """Functions that each read one batch, by name."""
    import grain

    from maxmars.data.formats import open_split

    a, b = (open_split(root / directory, "train") for directory in ("a", "b"))
    path = root / "a" / "train.bin"
    random_windows = our_batches([a], length, order="random_windows")
    shuffled = grain.MapDataset.source(Windows(path, length)).seed(0).shuffle()
    readers = {
        GET_BATCH: nanogpt_get_batch(path, length),
        "maxmars, shuffled": iterate(our_batches([a], length)),
        "maxmars, random windows": iterate(random_windows),
        "maxmars, mixture 0.7 : 0.3": iterate(our_batches([a, b], length, [0.7, 0.3])),
        "maxmars, shuffled, thread": iterate(our_batches([a], length), ahead=2),
        "Grain, textbook chain": iterate(shuffled.repeat(10**6).batch(BATCH)),
    }
    if importlib.util.find_spec("torch") is not None:
        readers["PyTorch DataLoader"] = data_loader(path, length)
    return readers


def nanogpt_get_batch(path: Path, length: int) -> Callable[[], Any]:
    import numpy as np

    rng = np.random.default_rng(0)

    def get_batch() -> tuple[np.ndarray, np.ndarray]:
        data = np.memmap(path, np.uint16, "r")
        starts = rng.integers(len(data) - length, size=BATCH)
        inputs = np.stack([data[i : i + length].astype(np.int64) for i in starts])
        targets = np.stack([data[i + 1 : i + 1 + length].astype(np.int64) for i in starts])
        return inputs, targets

    return get_batch


def our_batches(
    streams: list[TokenStream],
    length: int,
    weights: list[float] | None = None,
    order: Order = "shuffled",
    step: int = 0,
) -> grain.MapDataset[Any]:
    import numpy as np

    from maxmars.data.sampling import process_batches, training_examples

    examples = training_examples(streams, weights or [1.0], length=length, seed=0, order=order)
    return process_batches(examples, np.arange(BATCH)[None], BATCH, step * BATCH)


def iterate(batches: grain.MapDataset[Any], ahead: int = 0) -> Callable[[], Any]:
    import grain

    dataset = batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if ahead:
        dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=ahead)
    return iter(dataset).__next__


class Windows:
    """The windows of a file, one an item, as the documentation of Grain and PyTorch has it."""

    def __init__(self, path: Path, length: int) -> None:
        import numpy as np

        self.tokens, self.length = np.memmap(path, np.uint16, "r"), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self.length
        return self.tokens[start : start + self.length + 1].astype("int64")


def data_loader(path: Path, length: int) -> Callable[[], Any]:
    """PyTorch's, in this process (workers would take other cores)."""
    from torch.utils.data import DataLoader

    def batches() -> Iterator[Any]:
        while True:
            yield from DataLoader(Windows(path, length), BATCH, shuffle=True, drop_last=True)

    return batches().__next__


def time_first_batches(root: Path) -> None:
    """Print how long opening and the first batch take, of 9e9 tokens that take no space on disk."""
    from maxmars.data.formats import open_split

    (root / "sparse").mkdir()
    with (root / "sparse" / "train.bin").open("wb") as file:
        file.truncate(2 * SPARSE_TOKENS)
    for step in (0, FAR_STEP):
        start = time.perf_counter()
        stream = open_split(root / "sparse", "train")
        iterate(our_batches([stream], LENGTHS[0], step=step))()
        seconds = time.perf_counter() - start
        print(f"{SPARSE_TOKENS:.0e} tokens, open and read step {step:,}: {1e3 * seconds:.1f} ms")


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
    from maxmars.data.corpus import TextFiles
    from maxmars.data.prepare import prepare
    from maxmars.data.tokenizer import GPT2Tokenizer

    start = time.perf_counter()
    prepare(
        TextFiles([str(path)]),
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
