"""Streams of tokens over files of raw tokens.

A split is one stream, whatever its format: see `TokenStream`. Files on a disk are mapped; of files
in a bucket, only the ranges that a batch needs are read. `formats` tells the formats apart.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Int64, Integer

from maxmars.data.bucket import read_ranges
from maxmars.data.metadata import AGAIN, Metadata, NoSuchSplitError, read_metadata
from maxmars.data.tokenizer import Tokenized
from maxmars.distributed.files import Workdir, is_remote, resolve

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_MOST_OPEN = 1 << 14  # files; Linux maps 65,530 at most
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 14
NAME_THEM = (
    "say what these tokens are to `maxmars train` and `eval`: --data.tokenizer, or "
    "--data.vocab-size N alone, and --data.dtype for their type"
)


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One file of a directory of tokens."""

    path: Workdir
    num_bytes: int
    """Size that it must have."""
    header_bytes: int = 0
    """Bytes before the first token."""
    sha256: str | None = None
    """Checksum of the whole file, where one is recorded."""
    split: str | None = None
    """Which split's tokens it holds, where that is known."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What the ids of tokens mean."""

    tokenizer: str
    """Name of the tokenizer."""
    size: int
    """Every token lies in [0, size)."""
    digest: str | None = None
    """SHA-256 over the tokenizer's vocabulary; None where no files of it are known."""
    place: Workdir | None = None
    """Where these files are; None is beside the tokens."""


@runtime_checkable
class Origin(Tokenized, Protocol):
    """The split that tokens are of, and what they mean."""

    directory: Workdir
    """Where it is."""
    split: str
    """Name of the split there."""
    vocab_size: int
    """Every token lies in [0, vocab_size)."""


def digest_of(stream: TokenStream) -> str:
    """SHA-256 over the tokenizer and the files of a stream's directory, of all splits, in hex.

    A file counts with its name, size and recorded checksum. Of a file without one, samples of its
    bytes count, which tell other data but not every damage.

    Raises:
      OSError: a file cannot be read.
    """
    told = {
        "tokenizer": [stream.tokenizer, stream.tokenizer_digest, stream.vocab_size],
        "files": [[f.path.name, f.num_bytes, f.sha256 or _sampled(f)] for f in stream.files],
    }
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _sampled(file: TokenFile) -> str:
    """SHA-256 over evenly spaced pieces of a file, the first and the last among them, in hex."""
    sha = hashlib.sha256()
    with file.path.open("rb") as opened:
        for place in np.linspace(0, max(file.num_bytes - _SAMPLE_BYTES, 0), _SAMPLES, dtype=int):
            opened.seek(int(place))
            sha.update(opened.read(_SAMPLE_BYTES))
    return sha.hexdigest()


def check_range(
    stream: TokenStream,
    starts: Integer[np.ndarray, " windows"],
    lengths: int | Integer[np.ndarray, " windows"],
) -> None:
    """Check that [start, start + length) lies in a stream for each of `starts`.

    Raises:
      ValueError: one does not.
    """
    lengths = np.broadcast_to(lengths, starts.shape)
    outside = (starts < 0) | (lengths < 0) | (starts > stream.num_tokens - lengths)
    if outside.any():
        start, length = int(starts[outside][0]), int(lengths[outside][0])
        raise ValueError(
            f"tokens [{start}, {start + length}) lie outside the {stream.num_tokens} tokens "
            f"of split {stream.split!r} in {stream.directory}."
        )


def check_ids(stream: TokenStream, tokens: np.ndarray) -> None:
    """Check that tokens lie in the vocabulary of the stream that they were read from.

    Raises:
      ValueError: one does not.
    """
    largest = tokens.view(_UNSIGNED[tokens.itemsize]).max(initial=0)  # a negative one becomes large
    if largest >= stream.vocab_size:
        raise ValueError(
            f"{stream.directory} holds the token id {largest}, but the vocabulary of "
            f"{stream.tokenizer!r} has {stream.vocab_size} ids: it is damaged, or of another "
            f"tokenizer or type; {NAME_THEM if stream.metadata is None else AGAIN}."
        )


def check_size(file: TokenFile) -> None:
    """Check that a file on a disk is there and has its size.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: it has another size.
    """
    path = Path(file.path)
    if not path.is_file():
        raise FileNotFoundError(f"the token shard {file.path} is missing; {AGAIN}.")
    num_bytes = path.stat().st_size
    if num_bytes != file.num_bytes:
        says = "its header" if file.header_bytes else "meta.json"
        raise ValueError(
            f"the token shard {file.path} has {num_bytes} bytes, but {says} says {file.num_bytes}: "
            f"it was cut short or written over; {AGAIN}."
        )


@functools.cache
def _maps() -> Callable[[TokenStream, int], np.ndarray]:
    """From a stream and the number of one of its files on a disk to the tokens in there.

    A mapped file counts as an open one. Of the files of all streams, the last used stay mapped:
    half as many as this process may have open, after that limit is raised as far as it may be.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return functools.lru_cache(max(soft, most) // 2)(TokenStream.map)


class TokenStream:
    """The tokens of one split, which can be read anywhere at the same cost: files of raw
    little-endian tokens, one after the other.

    Construction reads nothing. A file on a disk is mapped when it is first read, and its size is
    checked then, so that an object travels to another process as its paths.

    Args:
      directory: where the files are.
      split: name of the split.
      splits: the files of every split, in order.
      dtype: type of a token, an integer's.
      vocabulary: what the ids mean.

    Raises:
      NoSuchSplitError: there is no such split.
    """

    def __init__(
        self,
        directory: Workdir,
        split: str,
        splits: Mapping[str, Sequence[TokenFile]],
        *,
        dtype: str,
        vocabulary: Vocabulary,
    ) -> None:
        if split not in splits:
            raise NoSuchSplitError(
                f"the token directory {directory} has no split {split!r}, only "
                f"{', '.join(splits) or 'none'}; prepare it again with a validation fraction "
                "greater than 0, or name another directory."
            )
        self.directory: Workdir = directory
        self.split = split
        self.tokenizer, self.tokenizer_digest = vocabulary.tokenizer, vocabulary.digest
        self.tokenizer_place: Workdir = vocabulary.place or directory
        self.vocab_size = vocabulary.size
        self.files: Sequence[TokenFile] = [file for files in splits.values() for file in files]
        self._dtype = np.dtype(dtype).newbyteorder("<")
        counts = [(f.num_bytes - f.header_bytes) // self._dtype.itemsize for f in splits[split]]
        self._files = [file for file, count in zip(splits[split], counts, strict=True) if count]
        self._starts = [0, *itertools.accumulate(filter(None, counts))]

    @property
    def metadata(self) -> Metadata | None:
        """What `meta.json` says; None of other programs' files, which have none."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.directory)!r}, {self.split!r})"

    @property
    def num_tokens(self) -> int:
        """Tokens of the split."""
        return self._starts[-1]

    def read(self, start: int, length: int) -> Int32[np.ndarray, " length"]:
        """The tokens [start, start + length); see `read_pieces`."""
        return self.read_windows(np.array([start]), length)[0]

    def read_windows(
        self, starts: Int64[np.ndarray, " windows"], length: int
    ) -> Int32[np.ndarray, "windows length"]:
        """The tokens [start, start + length) of each of `starts`; see `read_pieces`."""
        return self.read_pieces(starts, np.full(len(starts), length)).reshape(len(starts), length)

    def read_pieces(
        self, starts: Int64[np.ndarray, " pieces"], lengths: Integer[np.ndarray, " pieces"]
    ) -> Int32[np.ndarray, " tokens"]:
        """The tokens [start, start + length) of each piece, one piece after the other.

        From a bucket, all pieces are read at the same time, and tokens that several pieces share
        are read once. The memory is that of the bytes and of the result.

        Raises:
          FileNotFoundError: a file is missing.
          ValueError: some tokens lie outside the stream or the vocabulary, or a file was cut short.
          OSError: a bucket does not answer; see `bucket.read_ranges`.
        """
        check_range(self, starts, lengths)
        # A number of 64 bits is compared with the vocabulary before it is cut to 32.
        tokens = np.empty(lengths.sum(), np.int64 if self._dtype.itemsize == 8 else np.int32)
        spans = self._spans(starts, lengths)
        if is_remote(self.directory):
            self._fill_from_bucket(tokens, list(spans))
        else:
            map_ = _maps()
            for at, index, first, count in spans:
                tokens[at : at + count] = map_(self, index)[first : first + count]
        check_ids(self, tokens)
        return tokens.astype(np.int32, copy=False)

    def _spans(
        self, starts: Int64[np.ndarray, " pieces"], lengths: Integer[np.ndarray, " pieces"]
    ) -> Iterator[tuple[int, int, int, int]]:
        """What of the pieces lies in one file: number of the first token in the result, number of
        the file, first token in there, and the number of tokens."""
        at = 0
        files = np.searchsorted(self._starts, starts, "right") - 1
        for start, length, index in zip(
            *map(np.ndarray.tolist, (starts, lengths, files)), strict=True
        ):
            end = start + length
            while start < end:
                count = min(end, self._starts[index + 1]) - start
                yield at, index, start - self._starts[index], count
                at, start, index = at + count, start + count, index + 1

    def map(self, index: int) -> np.ndarray:
        """The tokens in a file on a disk, by its number; see `_maps`."""
        file = self._files[index]
        check_size(file)
        # A plain array on the map: slicing np.memmap itself costs several microseconds.
        return np.memmap(file.path, self._dtype, "r", file.header_bytes).view(np.ndarray)

    def _fill_from_bucket(
        self, tokens: np.ndarray, spans: Sequence[tuple[int, int, int, int]]
    ) -> None:
        size = self._dtype.itemsize
        bytes_of = [
            (index, self._files[index].header_bytes + first * size, count * size)
            for _, index, first, count in spans
        ]
        merged = merge_ranges((index, byte, byte + length) for index, byte, length in bytes_of)
        contents = read_ranges([(self._files[i].path, start, end) for i, start, end in merged])
        for (at, _, _, count), (index, byte, _) in zip(spans, bytes_of, strict=True):
            range_ = bisect.bisect_right(merged, (index, byte, np.inf)) - 1
            content, offset = contents[range_], byte - merged[range_][1]
            tokens[at : at + count] = np.frombuffer(content, self._dtype, count, offset)


def merge_ranges(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Ranges (file, start, end) in order, those joined that overlap or touch."""
    merged: list[tuple[int, int, int]] = []
    for file, start, end in sorted(ranges):
        if merged and merged[-1][0] == file and start <= merged[-1][2]:
            merged[-1] = (file, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((file, start, end))
    return merged


class TokenShards(TokenStream):
    """One split of a directory that `maxmars data prepare` wrote.

    Args:
      directory: on a disk or in a bucket.
      split: `train` or `val`.
      metadata: what `meta.json` says; read from the directory if it is None.

    Raises:
      FileNotFoundError: there is no directory, or no `meta.json` in it.
      ValueError: `meta.json` is damaged, or has no such split.
    """

    def __init__(
        self, directory: str | os.PathLike[str], split: str, metadata: Metadata | None = None
    ) -> None:
        directory = resolve(directory)
        metadata = read_metadata(directory) if metadata is None else metadata
        self._metadata = metadata
        super().__init__(
            directory,
            split,
            shards_of(directory, metadata),
            dtype=metadata.dtype,
            vocabulary=Vocabulary(
                tokenizer=metadata.tokenizer,
                digest=metadata.tokenizer_digest,
                size=metadata.vocab_size,
            ),
        )

    @property
    def metadata(self) -> Metadata:
        """What `meta.json` says."""
        return self._metadata


def shards_of(directory: Workdir, metadata: Metadata) -> dict[str, list[TokenFile]]:
    """The shards of every split of a directory that `maxmars data prepare` wrote."""
    itemsize = np.dtype(metadata.dtype).itemsize
    return {
        name: [
            TokenFile(
                path=directory / s.file,
                num_bytes=s.num_tokens * itemsize,
                sha256=s.sha256,
                split=name,
            )
            for s in split.shards
        ]
        for name, split in metadata.splits.items()
    }
