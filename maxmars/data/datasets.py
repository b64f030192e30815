"""Data as public Grain datasets: the windows or documents of a directory, the examples of a run.

These are the doors for users who map, pack or look at data in Grain's own words. `dataset` and
`documents` are in the order of the stream, and a run that trains on a map of them shuffles and
repeats it; `examples` is in the order of training, shuffled and mixed, and endless.
"""

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
from maxmars.distributed.files import read_json, reporting, resolve
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

    Each window shares its last token with the next one. A function for `GrainConfig` may return
    this dataset with a map; a run then shuffles and repeats the windows.

    Args:
      path: the directory, in any format that `maxmars train` reads, on a disk or `gs://`. A
        `TokenFilesConfig` may also name tokenizer and dtype, which other programs' files lack.
      split: `train` or `val`.
      length: tokens of a window that are predicted, `model.max_seq_len`.
      packing: `split` adds `segment_ids` and `positions`, by which attention stays within the
        documents that share a window.

    Returns:
      Dicts of int32 arrays [length + 1], `tokens` first. The dataset's attribute `tokenizer` is the
      tokenizer of the tokens.

    Raises:
      FileNotFoundError, ValueError, OSError, ImportError: see `formats.open_directory`; ValueError
        also if the split does not exist, or is too short for a window.
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
    """The documents of a directory of tokens in order, each with its end-of-text token.

    Concatenated, they are the stream. Directories of `maxmars data prepare` record where documents
    start; in those of other programs all tokens are searched for the end-of-text token.

    Args:
      path, split: see `dataset`.

    Returns:
      int32 arrays [tokens]. The dataset's attribute `lengths` has the sizes of these arrays, and
      `tokenizer` is the tokenizer of the tokens.

    Raises:
      See `dataset`; ValueError also where the end-of-text token is not known.
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
    """The examples of a run in training order: row r of a step is its `train/first_example` + r.

    Args:
      run: the working directory; the data must lie at the path that the run's config names.

    Returns:
      Endless dicts of arrays [max_seq_len + 1]: `tokens`, and those of `mask`, `segment_ids` and
      `positions` that the data has. The attribute `tokenizer` is the tokenizer of the tokens.

    Raises:
      FileNotFoundError: there is no run, or its data are gone.
      ValueError: the data differ from those that the run read.
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
    """First token of each document of a stream, and at the end the number of tokens."""
    directory = stream.directory
    metadata = directory.metadata
    of_split = None if metadata is None else metadata.splits[stream.split].documents
    if of_split is None:
        starts = _search_document_starts(stream, end_of_text(stream.vocabulary))
    else:
        path = directory.path / of_split.file
        with reporting(path):
            stored = path.read_bytes()
        if hashlib.sha256(stored).hexdigest() != of_split.sha256:
            raise ValueError(f"{path} does not match its checksum in meta.json; {AGAIN}.")
        starts = np.frombuffer(stored, "<u8").astype(np.int64)
    return np.append(starts, stream.num_tokens)


def _search_document_starts(stream: TokenStream, end: int) -> Int64[np.ndarray, " documents"]:
    ends = []
    # In blocks: a stream may be larger than the memory.
    with Progress(stderr=True) as status:
        for first in range(0, stream.num_tokens, _BLOCK_TOKENS):
            status.update("looking for the documents", first, stream.num_tokens)
            count = min(_BLOCK_TOKENS, stream.num_tokens - first)
            ends.append(np.flatnonzero(stream.read(first, count) == end) + first + 1)
    starts = np.concatenate([[0], *ends])
    return starts[starts < stream.num_tokens]
