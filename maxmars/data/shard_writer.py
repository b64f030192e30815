"""Writing token shards, so that a writer that was killed can go on where it last was safe."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from maxmars.data.sources import DocumentStarts, Shard, Split

_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class WriterState:
    """What of a split is safely on disk."""

    shards: tuple[Shard, ...] = ()
    open_tokens: int = 0
    """Tokens in the shard after those, which is not complete."""
    num_documents: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WriterState:
        """From the values of `to_json`."""
        return cls(
            shards=tuple(Shard(**shard) for shard in fields["shards"]),
            open_tokens=fields["open_tokens"],
            num_documents=fields["num_documents"],
        )


class SplitWriter:
    """Writes one split: a new file every `shard_tokens` tokens, and where documents start.

    Args:
      directory: where the files go.
      split: `train` or `val`.
      dtype: of the tokens.
      shard_tokens: tokens a file, but for the last.
      state: what an earlier writer left; its files are cut to that length.

    Raises:
      ValueError: the files are shorter than `state` says.
    """

    def __init__(
        self, directory: Path, split: str, *, dtype: str, shard_tokens: int, state: WriterState
    ) -> None:
        """Go on from `state`."""
        self._directory, self._split = directory, split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._shards = list(state.shards)
        self._num_tokens = sum(s.num_tokens for s in state.shards) + state.open_tokens
        self._num_documents = state.num_documents
        self._in_shard = state.open_tokens
        self._sha = hashlib.sha256()
        self._file: BinaryIO | None = None
        self._starts: BinaryIO | None = None
        for shard in state.shards:
            path = directory / shard.file
            if not path.is_file() or path.stat().st_size != shard.num_tokens * self._dtype.itemsize:
                raise _lost(path)
        if state.open_tokens:
            size = state.open_tokens * self._dtype.itemsize
            self._file = _reopen(directory / self._shard_name(), size, self._sha)
        if state.num_documents:
            self._starts = _reopen(directory / self._starts_name, 8 * state.num_documents, None)

    @property
    def num_shards(self) -> int:
        """Complete shards."""
        return len(self._shards)

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self._num_tokens * self._dtype.itemsize + 8 * self._num_documents

    def append(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        """Append tokens, which may continue in the next file.

        Args:
          tokens: [n].
          starts: where in them documents start.
        """
        if len(starts):
            if self._starts is None:
                self._starts = (self._directory / self._starts_name).open("wb")
            self._starts.write((starts + self._num_tokens).astype("<u8").tobytes())
            self._num_documents += len(starts)
        self._num_tokens += len(tokens)
        while len(tokens):
            if self._file is None:
                self._file = (self._directory / self._shard_name()).open("wb")
            room = min(self._shard_tokens - self._in_shard, _CHUNK_TOKENS)
            part = tokens[:room].astype(self._dtype, copy=False).tobytes()
            self._file.write(part)
            self._sha.update(part)
            self._in_shard += len(tokens[:room])
            tokens = tokens[room:]
            if self._in_shard == self._shard_tokens:
                self._complete_shard()

    def flush(self) -> WriterState:
        """Bring everything to the disk itself; what is there now."""
        for file in (self._file, self._starts):
            if file is not None:
                _sync(file)
        return WriterState(
            shards=tuple(self._shards),
            open_tokens=self._in_shard,
            num_documents=self._num_documents,
        )

    def finish(self) -> Split:
        """Complete the last shard; the description of all."""
        self._complete_shard()
        starts = None
        if self._starts is not None:
            _sync(self._starts)
            with (self._directory / self._starts_name).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            starts = DocumentStarts(
                file=self._starts_name, count=self._num_documents, sha256=sha256
            )
        self.close()
        return Split(
            num_tokens=self._num_tokens,
            num_documents=self._num_documents,
            shards=tuple(self._shards),
            documents=starts,
        )

    def close(self) -> None:
        """Close the files, complete or not."""
        for file in (self._file, self._starts):
            if file is not None:
                file.close()
        self._file = self._starts = None

    def _complete_shard(self) -> None:
        if self._file is None:
            return
        _sync(self._file)  # a name that survives a power cut must not lack its bytes
        self._file.close()
        self._shards.append(
            Shard(file=self._shard_name(), num_tokens=self._in_shard, sha256=self._sha.hexdigest())
        )
        self._file, self._sha, self._in_shard = None, hashlib.sha256(), 0

    def _shard_name(self) -> str:
        return f"{self._split}_{len(self._shards):05d}.bin"

    @property
    def _starts_name(self) -> str:
        return f"{self._split}_documents.bin"


def _reopen(path: Path, size: int, sha: Any) -> BinaryIO:
    """A file cut to `size` bytes, at its end; what is in it goes into `sha`."""
    if not path.is_file() or path.stat().st_size < size:
        raise _lost(path)
    file = path.open("r+b")
    file.truncate(size)
    while block := file.read(1 << 20):
        if sha is not None:
            sha.update(block)
    return file


def _lost(path: Path) -> ValueError:
    return ValueError(
        f"{path} has lost what an earlier run wrote; delete the directory {path.parents[1]} and "
        "prepare again."
    )


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
