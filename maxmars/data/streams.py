"""Streams of tokens: what any source of tokens can do, and the streams over mapped files.

A split is one stream, whatever its format: see `TokenStream`. Other projects' files are in
`formats`, TFDS, whose records are read and not mapped, in `tfds_stream`.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from maxmars.data.sources import AGAIN, LateStatus, read_metadata

_READ_TOKENS = 1 << 24  # tokens checked at once by `verify`
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@runtime_checkable
class TokenStream(Protocol):
    """The tokens of one split as one stream, which can be read anywhere at the same cost."""

    directory: Path
    """Where it is."""
    split: str
    """Name of the split there."""
    tokenizer: str
    """Name of the tokenizer."""
    tokenizer_digest: str | None
    """SHA-256 over its vocabulary; None where the format does not say."""
    vocab_size: int
    """Every token lies in [0, vocab_size)."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the split."""
        ...

    def read(self, start: int, length: int) -> Int32[np.ndarray, " length"]:
        """The tokens [start, start + length).

        Raises:
          ValueError: some of them lie outside the stream, or outside the vocabulary.
        """
        ...

    def locate(self, token: int) -> dict[str, str | int]:
        """Where a token is on disk, JSON-ready: the file or record, and the place in it."""
        ...

    def verify(self) -> None:
        """Read everything and compare it with its checksums; where there are none, check that every
        token is one of the vocabulary.

        Raises:
          ValueError: a file is damaged; the message names it.
        """
        ...


def check_range(stream: TokenStream, start: int, length: int) -> None:
    """Check that [start, start + length) lies in a stream.

    Raises:
      ValueError: it does not.
    """
    if start < 0 or length < 0 or start + length > stream.num_tokens:
        raise ValueError(
            f"tokens [{start}, {start + length}) lie outside the {stream.num_tokens} tokens "
            f"of split {stream.split!r} in {stream.directory}."
        )


def check_ids(stream: TokenStream, path: Path, tokens: np.ndarray) -> None:
    """Check that tokens read from a file lie in the vocabulary of their stream.

    Raises:
      ValueError: one does not.
    """
    largest = tokens.view(_UNSIGNED[tokens.itemsize]).max(initial=0)  # a negative one becomes large
    if largest >= stream.vocab_size:
        raise ValueError(
            f"{path} holds the token id {largest}, but the vocabulary of {stream.tokenizer!r} has "
            f"{stream.vocab_size} ids: it is damaged or of another tokenizer (files without "
            "meta.json are taken to be GPT-2's); prepare the text again."
        )


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One file of little-endian tokens."""

    path: Path
    num_tokens: int
    header_bytes: int = 0
    """Bytes before the first token."""
    sha256: str | None = None
    """Checksum of the whole file, where one is known."""


class TokenFiles:
    """A `TokenStream` over files of raw tokens, one after the other.

    Files are mapped when they are first read, so that an object travels to another process as its
    path. Construction compares the sizes of the files with what is expected.

    Args:
      directory: where the files are.
      split: name of the split.
      files: the files, in order.
      dtype: type of a token, `uint16` or `uint32`.
      tokenizer: name of the tokenizer.
      tokenizer_digest: SHA-256 over its vocabulary, if known.
      vocab_size: number of its ids.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file has the wrong size.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        files: Sequence[TokenFile],
        *,
        dtype: str,
        tokenizer: str,
        tokenizer_digest: str | None,
        vocab_size: int,
    ) -> None:
        """Check the sizes of the files; map none."""
        self.directory, self.split = directory, split
        self.tokenizer, self.tokenizer_digest = tokenizer, tokenizer_digest
        self.vocab_size = vocab_size
        self._dtype = np.dtype(dtype).newbyteorder("<")
        for file in files:
            self._check_size(file)
        self._files = tuple(file for file in files if file.num_tokens)
        self._starts = [0, *itertools.accumulate(file.num_tokens for file in self._files)]
        self._maps: dict[int, np.ndarray] = {}

    def _check_size(self, file: TokenFile) -> None:
        expected = file.header_bytes + file.num_tokens * self._dtype.itemsize
        if not file.path.is_file():
            raise FileNotFoundError(f"the token shard {file.path} is missing; {AGAIN}.")
        found = file.path.stat().st_size
        if found != expected:
            says = "its header" if file.header_bytes else "meta.json"
            raise ValueError(
                f"the token shard {file.path} has {found} bytes, but {says} says {expected}: it "
                f"was cut short or written over; {AGAIN}."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the mapped files."""
        return {**self.__dict__, "_maps": {}}

    def __repr__(self) -> str:
        """Directory and split, for messages."""
        return f"{type(self).__name__}({str(self.directory)!r}, {self.split!r})"

    @property
    def num_tokens(self) -> int:
        """Tokens of the split."""
        return self._starts[-1]

    def read(self, start: int, length: int) -> Int32[np.ndarray, " length"]:
        """The tokens [start, start + length) of the stream, across the borders of files.

        Raises:
          ValueError: some of them lie outside the stream, or outside the vocabulary.
        """
        check_range(self, start, length)
        tokens = np.empty(length, np.int32)
        done, index = 0, bisect.bisect_right(self._starts, start) - 1
        while done < length:
            offset = start + done - self._starts[index]
            part = self._map(index)[offset : offset + length - done]
            tokens[done : done + len(part)] = part
            done += len(part)
            index += 1
        check_ids(self, self.directory, tokens)
        return tokens

    def locate(self, token: int) -> dict[str, str | int]:
        """The file that holds a token, and its first byte in there."""
        index = bisect.bisect_right(self._starts, token) - 1
        file, number = self._files[index], token - self._starts[index]
        byte = file.header_bytes + number * self._dtype.itemsize
        return {"file": str(file.path), "byte_in_file": byte}

    def _map(self, index: int) -> np.ndarray:
        tokens = self._maps.get(index)
        if tokens is None:
            file = self._files[index]
            # A plain array on the map: slicing np.memmap itself costs several microseconds.
            mapped = np.memmap(file.path, self._dtype, "r", file.header_bytes)
            tokens = self._maps[index] = mapped.view(np.ndarray)
        return tokens

    def verify(self) -> None:
        """Compare every file with its checksum; of one that has none, check every token.

        Raises:
          ValueError: a file is damaged; the message names it.
        """
        with LateStatus() as status:
            for index, file in enumerate(self._files):
                done = f"verifying {self.split} shard {index + 1} of {len(self._files)}"
                status.update(f"{done} of {self.directory}")
                if file.sha256 is None:
                    self._check_tokens(index)
                else:
                    _check_sha256(file.path, file.sha256)

    def _check_tokens(self, index: int) -> None:
        tokens = self._map(index)
        for start in range(0, len(tokens), _READ_TOKENS):
            check_ids(self, self._files[index].path, tokens[start : start + _READ_TOKENS])


def _check_sha256(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(
            f"the token shard {path} does not match its checksum: its SHA-256 is "
            f"{found}, but meta.json says {sha256}; {AGAIN}."
        )


class TokenShards(TokenFiles):
    """One split of a directory that `maxmars data prepare` wrote.

    Attributes:
      metadata: what `meta.json` says.

    Raises:
      FileNotFoundError: the directory, its `meta.json` or one of the shards is missing.
      ValueError: `meta.json` is damaged, has no such split, or a shard has the wrong size.
    """

    def __init__(self, directory: str | Path, split: str) -> None:
        """Check the files of a split; map none."""
        directory = Path(directory)
        self.metadata = read_metadata(directory)
        if split not in self.metadata.splits:
            raise ValueError(
                f"the token directory {directory} has no split {split!r}, only "
                f"{', '.join(self.metadata.splits) or 'none'}; prepare it again with a "
                "validation fraction greater than 0."
            )
        super().__init__(
            directory,
            split,
            [
                TokenFile(path=directory / s.file, num_tokens=s.num_tokens, sha256=s.sha256)
                for s in self.metadata.splits[split].shards
            ],
            dtype=self.metadata.dtype,
            tokenizer=self.metadata.tokenizer,
            tokenizer_digest=self.metadata.tokenizer_digest,
            vocab_size=self.metadata.vocab_size,
        )
