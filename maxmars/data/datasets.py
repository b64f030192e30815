"""Data as public Grain datasets: the windows or documents of a directory, the examples of a run."""

from __future__ import annotations

import hashlib
import os

import numpy as np
from jaxtyping import Int64

from maxmars.config import TokenFilesConfig, from_dict
from maxmars.config.checks import require
from maxmars.config.data import Packing
from maxmars.data.batches import open_data
from maxmars.data.formats import open_directory
from maxmars.data.metadata import AGAIN
from maxmars.data.sampling import IndexRange
from maxmars.data.token_datasets import DocumentDataset, TokenDataset
from maxmars.data.token_files import TokenStream
from maxmars.data.tokenizer import end_of_text
from maxmars.data.windows import Batch, TokenWindows
from maxmars.distributed.files import (
    read_json,
    reporting,
    resolve,
)
from maxmars.distributed.progress import Progress
from maxmars.distributed.recorded_code import recorded_code
from maxmars.distributed.workdir import CONFIG, DATA, SOURCES

_BLOCK_TOKENS = 1 << 24


def dataset(
    path: str | os.PathLike[str] | TokenFilesConfig,
    split: str,
    length: int,
    packing: Packing = "none",
) -> TokenDataset:
    """The windows of a directory of tokens in order, as a run with the same `packing` has them.

    Each shares its last token with the next one. A function for `GrainConfig` returns them with a
    map of its own; a run then shuffles and repeats them.

    Args:
      path: the directory, in any format that `maxmars train` reads, on a disk or `gs://`. A
        `TokenFilesConfig` also says what other programs' files do not.
      split: `train` or `val`.
      length: tokens of a window that are predicted, `model.max_seq_len`.
      packing: `split` adds `segment_ids` and `positions`, by which attention stays within the
        documents that share a window.

    Returns:
      Dicts of int32 arrays [length + 1], `tokens` first. Their attribute `tokenizer` is that of the
      tokens.

    Raises:
      FileNotFoundError, ValueError, OSError, ImportError: see `formats.open_directory`; or there
        is no such split, or it is too short for a window.
    """
    require(packing in ("none", "split"), f"packing={packing!r} must be 'none' or 'split'.")
    stream = open_directory(path).stream(split)
    windows = TokenWindows(stream, length, packing=packing)
    return TokenDataset(
        IndexRange(range(len(windows))),
        lambda numbers: _rows(windows.read(numbers)),
        vocabulary=windows.vocabulary,
        files=windows.files,
        digest=windows.digest(),
    )


def documents(path: str | os.PathLike[str] | TokenFilesConfig, split: str) -> DocumentDataset:
    """The documents of a directory of tokens in order, each with the token that ends it.

    Joined, they are the stream. Where they start stands in our own directories; in those of other
    programs all tokens are searched for the token that ends a document.

    Args:
      path, split: see `dataset`.

    Returns:
      int32 arrays [tokens]. The attribute `lengths` has their sizes, `tokenizer` is that of the
      tokens.

    Raises:
      See `dataset`; ValueError also where nothing says which token ends a document.
    """
    stream = open_directory(path).stream(split)
    starts = _document_starts(stream)

    def read(numbers: Int64[np.ndarray, " documents"]) -> list[np.ndarray]:
        lengths = starts[numbers + 1] - starts[numbers]
        return np.split(stream.read_pieces(starts[numbers], lengths), np.cumsum(lengths)[:-1])

    opened = DocumentDataset(
        IndexRange(range(len(starts) - 1)),
        read,
        vocabulary=stream.vocabulary,
        files=stream.directory.files,
        digest=stream.directory.digest(),
    )
    opened.lengths = np.diff(starts)
    return opened


def examples(run: str | os.PathLike[str]) -> TokenDataset:
    """What a run trains on, in order: row r of a step is its `train/first_example` + r.

    Args:
      run: the working directory; its data must be where they were.

    Returns:
      Endless dicts of arrays [max_seq_len + 1]: `tokens`, and what the data has of `mask`,
      `segment_ids` and `positions`. The attribute `tokenizer` is that of the tokens.

    Raises:
      FileNotFoundError: there is no run, or its data are gone.
      ValueError: they are other data than the run read.
      OSError, ImportError: see `batches.open_data`.
    """
    workdir = resolve(run)
    record = read_json(workdir / CONFIG)
    if record is None:
        raise FileNotFoundError(f"{workdir / CONFIG} is missing: name the directory of a run.")
    config = from_dict(record)
    data = recorded_code(config.data, workdir, SOURCES)
    tokens = open_data(data, "train", model=config.model)
    digest = tokens.digest()
    recorded = (read_json(workdir / DATA) or {}).get("digest", digest)
    if recorded != digest:
        raise ValueError(
            f"the data of {workdir} are others now, with the digest {digest[:16]} and not "
            f"{recorded[:16]}; put those there again that it was trained on."
        )
    return TokenDataset(
        tokens.training_numbers(config.seed),
        lambda numbers: _rows(tokens.read(numbers)),
        vocabulary=tokens.vocabulary,
        files=tokens.files,
        digest=digest,
    )


def _rows(batch: Batch) -> list[Batch]:
    return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]


def _document_starts(stream: TokenStream) -> Int64[np.ndarray, " starts"]:
    """Where each document starts in a stream, and where the last one ends."""
    directory = stream.directory
    metadata = directory.metadata
    of_split = None if metadata is None else metadata.splits[stream.split].documents
    if of_split is None:
        starts = _searched(stream, end_of_text(stream.vocabulary))
    else:
        path = directory.path / of_split.file
        with reporting(path):
            stored = path.read_bytes()
        if hashlib.sha256(stored).hexdigest() != of_split.sha256:
            raise ValueError(f"{path} does not match its checksum in meta.json; {AGAIN}.")
        starts = np.frombuffer(stored, "<u8").astype(np.int64)
    return np.append(starts, stream.num_tokens)


def _searched(stream: TokenStream, end: int) -> Int64[np.ndarray, " documents"]:
    ends = []
    with Progress(stderr=True) as status:
        for first in range(0, stream.num_tokens, _BLOCK_TOKENS):
            status.update("looking for the documents", first, stream.num_tokens)
            count = min(_BLOCK_TOKENS, stream.num_tokens - first)
            ends.append(np.flatnonzero(stream.read(first, count) == end) + first + 1)
    starts = np.concatenate([[0], *ends])
    return starts[starts < stream.num_tokens]
