"""Directories of tokens, whatever program wrote them, and the stream of tokens of each split.

`formats.open_directory` makes a `TokenDirectory`, and its `stream(split)` reads tokens. Files on a
disk are mapped into memory; of files in a bucket, only the ranges that a batch needs are read.
Every token that is read is compared with the size of the vocabulary: a damaged shard, or the wrong
dtype, would otherwise train without an error.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from etils import epath
from jaxtyping import Int32, Int64, Integer

from maxmars.data.bucket import read_ranges
from maxmars.data.metadata import AGAIN, Metadata, NoSuchSplitError
from maxmars.data.tokenizer import Vocabulary
from maxmars.distributed.files import is_remote

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_MAX_OPEN = 1 << 14  # files; Linux allows a process 65,530 maps
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 14
NAME_THEM = (
    "say what these tokens are to `maxmars train` and `eval`: --data.tokenizer, or "
    "--data.vocab-size N alone, and --data.dtype for their type"
)


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One file of a directory of tokens."""

    path: epath.Path
    split: str
    """Name of the split that the tokens are of."""
    num_bytes: int
    """Expected size."""
    header_bytes: int = 0
    """Bytes before the first token."""
    sha256: str | None = None
    """Checksum of the whole file, where one is recorded."""


@dataclass(frozen=True, kw_only=True)
class TokenDirectory:
    """A directory of tokens: its files, and the meaning of the numbers in these files."""

    path: epath.Path
    files: tuple[TokenFile, ...]
    """Files of all splits, those of one split in the order of its stream."""
    dtype: np.dtype
    """Type of a token: little-endian integers."""
    vocabulary: Vocabulary
    metadata: Metadata | None = None
    """Contents of `meta.json`; None for files of other programs, which have none."""
    is_guess: bool = False
    """Whether the tokens are taken for GPT-2's without anything that says so."""

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return list(dict.fromkeys(file.split for file in self.files))

    def stream(self, split: str) -> TokenStream:
        """The stream of a split; reads no tokens yet.

        Raises:
          NoSuchSplitError: there is no such split.
        """
        return TokenStream(self, split)

    def digest(self) -> str:
        """SHA-256 over the tokenizer and the files of all splits, in hex.

        It covers name, size and recorded checksum of each file. For a file without a checksum it
        covers samples of the bytes: these identify the data, but miss some damage.

        Raises:
          OSError: a file cannot be read.
        """
        vocabulary = self.vocabulary
        payload = {
            "tokenizer": [vocabulary.tokenizer, vocabulary.digest, vocabulary.size],
            "files": [[f.path.name, f.num_bytes, f.sha256 or _sampled(f)] for f in self.files],
        }
        return hashlib.sha256(json.dumps(payload).encode()).hexdigest()


def _sampled(file: TokenFile) -> str:
    """SHA-256 over evenly spaced pieces of a file, the first and the last among them, in hex."""
    sha = hashlib.sha256()
    with file.path.open("rb") as opened:
        for start in np.linspace(0, max(file.num_bytes - _SAMPLE_BYTES, 0), _SAMPLES, dtype=int):
            opened.seek(int(start))
            sha.update(opened.read(_SAMPLE_BYTES))
    return sha.hexdigest()


def check_size(file: TokenFile) -> None:
    """Check that a file on a disk exists with its expected size.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: the file has another size.
    """
    if not file.path.is_file():
        raise FileNotFoundError(f"the token shard {file.path} is missing; {AGAIN}.")
    num_bytes = os.stat(file.path).st_size
    if num_bytes != file.num_bytes:
        says = "its header" if file.header_bytes else "meta.json"
        raise ValueError(
            f"the token shard {file.path} has {num_bytes} bytes, but {says} says {file.num_bytes}: "
            f"it was cut short or written over; {AGAIN}."
        )


@functools.cache
def _maps() -> Callable[[TokenStream, int], np.ndarray]:
    """A cached `TokenStream.map`: the most recently used files of all streams stay mapped.

    A mapped file counts against the process's limit of open files. So this raises the limit as far
    as it may, and keeps half as many files mapped.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_open = _MAX_OPEN if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN)
    if soft < max_open:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_open, hard))
    return functools.lru_cache(max(soft, max_open) // 2)(TokenStream.map)


class TokenStream:
    """The tokens of one split, its files one after the other, with random access.

    Construction reads nothing: a file on a disk is mapped, and its size checked, at its first read.
    So a stream can be pickled for another process.

    Args:
      directory: the directory that has the split.
      split: name of the split.

    Raises:
      NoSuchSplitError: there is no such split.
    """

    def __init__(self, directory: TokenDirectory, split: str) -> None:
        files = [file for file in directory.files if file.split == split]
        if not files:
            way_out = "prepare it again with a validation fraction greater than 0"
            if directory.metadata is None:
                way_out = f"put a file there whose name is like {directory.files[0].path.name}'s"
            if split == "val":
                way_out += ", or train without validation: --eval.every None"
            raise NoSuchSplitError(
                f"the token directory {directory.path} has no split {split!r}, only "
                f"{', '.join(directory.splits) or 'none'}; {way_out}."
            )
        self.directory, self.split = directory, split
        size = directory.dtype.itemsize
        counts = [(file.num_bytes - file.header_bytes) // size for file in files]
        # An empty file cannot be mapped.
        self._files = [file for file, count in zip(files, counts, strict=True) if count]
        self._starts = [0, *itertools.accumulate(filter(None, counts))]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.directory.path)!r}, {self.split!r})"

    @property
    def vocabulary(self) -> Vocabulary:
        """What the ids of the tokens mean."""
        return self.directory.vocabulary

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

        From a bucket, all pieces are read at the same time, and bytes that several pieces share are
        read once. The peak memory is that of these bytes and of the result.

        Raises:
          FileNotFoundError: a file is missing.
          ValueError: a piece lies outside the stream, a token outside the vocabulary, or a file was
            cut short.
          OSError: a bucket times out; see `bucket.read_ranges`.
        """
        self._check_range(starts, lengths)
        dtype = self.directory.dtype
        # 64-bit numbers stay so until `_check_ids`: cut to 32 bits, a bad one might look good.
        tokens = np.empty(lengths.sum(), np.int64 if dtype.itemsize == 8 else np.int32)
        spans = self._spans(starts, lengths)
        if is_remote(self.directory.path):
            self._fill_from_bucket(tokens, list(spans))
        else:
            map_ = _maps()
            for at, index, first, count in spans:
                tokens[at : at + count] = map_(self, index)[first : first + count]
        self._check_ids(tokens)
        return tokens.astype(np.int32, copy=False)

    def _check_range(
        self,
        starts: Integer[np.ndarray, " pieces"],
        lengths: Integer[np.ndarray, " pieces"],
    ) -> None:
        outside = (starts < 0) | (lengths < 0) | (starts > self.num_tokens - lengths)
        if outside.any():
            start, length = int(starts[outside][0]), int(lengths[outside][0])
            raise ValueError(
                f"tokens [{start}, {start + length}) lie outside the {self.num_tokens} tokens "
                f"of split {self.split!r} in {self.directory.path}."
            )

    def _check_ids(self, tokens: np.ndarray) -> None:
        vocabulary = self.vocabulary
        # Viewed as unsigned, a negative id is a large one, so one maximum finds both.
        largest = tokens.view(_UNSIGNED[tokens.itemsize]).max(initial=0)
        if largest >= vocabulary.size:
            raise ValueError(
                f"{self.directory.path} holds the token id {largest}, but the vocabulary of "
                f"{vocabulary.tokenizer!r} has {vocabulary.size} ids: it is damaged, or of another "
                f"tokenizer or type; {NAME_THEM if self.directory.metadata is None else AGAIN}."
            )

    def _spans(
        self, starts: Int64[np.ndarray, " pieces"], lengths: Integer[np.ndarray, " pieces"]
    ) -> Iterator[tuple[int, int, int, int]]:
        """The pieces, cut where files end. Yields, for each cut piece, its first index in the
        result, the number of its file, its first token in that file, and its number of tokens."""
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
        """The tokens in a file on a disk, by the file's number; see `_maps`."""
        file = self._files[index]
        check_size(file)
        # A plain array on the map: slicing np.memmap itself costs several microseconds.
        return np.memmap(file.path, self.directory.dtype, "r", file.header_bytes).view(np.ndarray)

    def _fill_from_bucket(
        self, tokens: np.ndarray, spans: Sequence[tuple[int, int, int, int]]
    ) -> None:
        dtype, size = self.directory.dtype, self.directory.dtype.itemsize
        bytes_of = [
            (index, self._files[index].header_bytes + first * size, count * size)
            for _, index, first, count in spans
        ]
        merged = merge_ranges((index, byte, byte + length) for index, byte, length in bytes_of)
        contents = read_ranges([(self._files[i].path, start, end) for i, start, end in merged])
        for (at, _, _, count), (index, byte, _) in zip(spans, bytes_of, strict=True):
            # The last merged range that begins at or before this byte.
            range_ = bisect.bisect_right(merged, (index, byte, np.inf)) - 1
            content, offset = contents[range_], byte - merged[range_][1]
            tokens[at : at + count] = np.frombuffer(content, dtype, count, offset)


def merge_ranges(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Sorted ranges (file, start, end); ranges that overlap or touch become one."""
    merged: list[tuple[int, int, int]] = []
    for file, start, end in sorted(ranges):
        if merged and merged[-1][0] == file and start <= merged[-1][2]:
            merged[-1] = (file, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((file, start, end))
    return merged
