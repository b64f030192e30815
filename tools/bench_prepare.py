"""How fast `maxmars data prepare` tokenises, against processes that do nothing but run tiktoken.

    python tools/bench_prepare.py 'texts/*.txt' [--megabytes 400] [--workers 2] [--repeats 5]

The texts are cut into documents of a few thousand characters and repeated to the size wanted.
Both sides start their processes by `spawn`, load the vocabulary of GPT-2 and tokenise the same
documents; starting counts. Prepare reads them from one JSON-lines file and writes shards with
checksums; the bare processes have theirs in memory and write nothing. They alternate, so what else
the machine does hits both; the ratio is the median of the ratios of neighbours.
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
from pathlib import Path

from maxmars.data.corpus import LocalFiles
from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import GPT2Tokenizer

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
    start = time.perf_counter()
    prepare(
        LocalFiles([str(path)]),
        directory,
        tokenizer=GPT2Tokenizer(),
        source=str(path),
        workers=workers,
    )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("texts", help="path or glob of UTF-8 text")
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    documents = read_documents(arguments.texts, arguments.megabytes)
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    rates: dict[str, list[float]] = {"bare": [], "prepare": []}
    with tempfile.TemporaryDirectory() as scratch:
        lines, whole = Path(scratch, "documents.jsonl"), Path(scratch, "documents.json")
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        whole.write_text(json.dumps(documents))
        for repeat in range(arguments.repeats):
            seconds = bare_seconds(whole, arguments.workers)
            rates["bare"].append(megabytes / seconds / arguments.workers)
            seconds = prepare_seconds(lines, Path(scratch, f"out{repeat}"), arguments.workers)
            rates["prepare"].append(megabytes / seconds / arguments.workers)
    ratios = [p / b for p, b in zip(rates["prepare"], rates["bare"], strict=True)]
    print(f"{megabytes:.0f} MB, {arguments.workers} processes, load {os.getloadavg()[0]:.1f}")
    for name, values in rates.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"{name:8} {statistics.median(values):5.1f} MB/s a process ({spread})")
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"ratio    {statistics.median(ratios):.2f} ({spread})")


if __name__ == "__main__":
    main()
