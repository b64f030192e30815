"""Which tokens are for training and which for validation, and writing both.

With `MIN_DOCUMENTS_TO_HASH` documents or more, a hash of a document's name decides; with fewer, the
end of each document is for validation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxmars.data.shard_writer import SplitWriter, WriterState
from maxmars.data.sources import Split
from maxmars.data.tokenize import TokenBatch

MIN_DOCUMENTS_TO_HASH = 100
"""With fewer documents, validation takes the end of each rather than whole ones."""

SPLITS = ("train", "val")


class Splitter:
    """Sends each document to its split, or both ends of it to theirs.

    Which rule holds is known only at the end, or at the hundredth document. Tokens that come before
    wait in a file, not in memory: there may be many.

    Args:
      directory: where the shards go.
      waiting: the file for tokens that wait.
      dtype: of the tokens.
      shard_tokens: tokens a shard.
      validation_fraction: part of each document that is for validation where there are few; where
        there are many, the batches say which document is.
      always_by_hash: whether few documents are dealt with as many are: this is a part of a corpus.
      state: what an earlier splitter's `flush` gave.
    """

    def __init__(
        self,
        directory: Path,
        waiting: Path,
        *,
        dtype: str,
        shard_tokens: int,
        validation_fraction: float,
        always_by_hash: bool,
        state: Mapping[str, Any] | None,
    ) -> None:
        """Go on from `state`."""
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._fraction = validation_fraction
        state = state or {"splits": {}, "waiting": None if always_by_hash else []}
        _remove_later_files(directory, state["splits"])
        self.writers = {
            split: SplitWriter(
                directory,
                split,
                dtype=dtype,
                shard_tokens=shard_tokens,
                state=WriterState.from_json(state["splits"].get(split) or WriterState().to_json()),
            )
            for split in SPLITS
        }
        self._waiting_path = waiting
        self._waiting = None
        if state["waiting"] is not None:
            self._waiting = [_batch_from_json(fields, self._dtype) for fields in state["waiting"]]
            waiting.touch()
            os.truncate(
                waiting, sum(_size(batch) for batch in self._waiting) * self._dtype.itemsize
            )
            self._waiting_file = waiting.open("ab")

    @property
    def num_shards(self) -> int:
        """Complete shards of both splits."""
        return sum(writer.num_shards for writer in self.writers.values())

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, but for what waits."""
        return sum(writer.num_bytes for writer in self.writers.values())

    def add(self, batch: TokenBatch) -> bool:
        """Write a batch; whether its state must be saved before the next `flush` is due."""
        if self._waiting is None:
            self._write(batch)
            return False
        self._waiting_file.write(batch.tokens.tobytes())
        self._waiting.append(_without_tokens(batch))
        if sum(_documents(batch) for batch in self._waiting) < MIN_DOCUMENTS_TO_HASH:
            return False
        self._waiting_file.close()
        tokens, done = self._waiting_tokens(), 0
        for waiting in self._waiting:
            self._write(_with_tokens(waiting, tokens[done : done + _size(waiting)]))
            done += _size(waiting)
        self._waiting = None
        return True

    def flush(self) -> dict[str, Any]:
        """Bring everything to the disk; what is there now, as plain values."""
        waiting = None
        if self._waiting is not None:
            self._waiting_file.flush()
            os.fsync(self._waiting_file.fileno())
            waiting = [_batch_to_json(batch) for batch in self._waiting]
        splits = {name: writer.flush().to_json() for name, writer in self.writers.items()}
        return {"splits": splits, "waiting": waiting}

    def finish(self) -> dict[str, Split]:
        """Write what waits, and complete the last shards; a split without tokens is left out."""
        if self._waiting:
            self._waiting_file.close()
            self._write_ends()
        splits = {name: writer.finish() for name, writer in self.writers.items()}
        return {name: split for name, split in splits.items() if split.num_tokens}

    def close(self) -> None:
        """Close all files."""
        if self._waiting is not None:
            self._waiting_file.close()
        for writer in self.writers.values():
            writer.close()

    def _write(self, batch: TokenBatch) -> None:
        """Write whole documents and pieces of them."""
        chosen_of = {"train": ~batch.validation, "val": batch.validation}
        ends = np.cumsum(batch.lengths)
        for split, chosen in chosen_of.items():
            if chosen.any():
                tokens = batch.tokens
                if not chosen.all():
                    found = zip((ends - batch.lengths)[chosen], ends[chosen], strict=True)
                    tokens = np.concatenate([tokens[start:end] for start, end in found])
                lengths, first = batch.lengths[chosen], batch.first[chosen]
                starts = np.cumsum(lengths) - lengths
                self.writers[split].append(tokens, starts[first & (lengths > 0)])

    def _write_ends(self) -> None:
        """Write what waits, cutting each document."""
        assert self._waiting is not None
        lengths = np.concatenate([batch.lengths for batch in self._waiting])
        first = np.concatenate([batch.first for batch in self._waiting])
        ends = np.cumsum(lengths)
        starts = (ends - lengths)[first]
        tokens = self._waiting_tokens()
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(tokens)], strict=True):
            length = max(end - start - 1, 0)  # without the end-of-text token
            cut = end - 1 - int(length * self._fraction)
            if start < cut:
                self.writers["train"].append(tokens[start:cut], np.array([0]))
                self.writers["train"].append(tokens[end - 1 : end], np.array([], np.int64))
            if cut < end - 1:
                self.writers["val"].append(tokens[cut:end], np.array([0]))

    def _waiting_tokens(self) -> np.ndarray:
        if not self._waiting_path.stat().st_size:
            return np.empty(0, self._dtype)
        return np.memmap(self._waiting_path, self._dtype, "r").view(np.ndarray)


def _documents(batch: TokenBatch) -> int:
    """Documents that end in a batch and are not empty."""
    return int(np.count_nonzero(batch.last & (batch.lengths > 0)))


def _size(batch: TokenBatch) -> int:
    return int(batch.lengths.sum())


def _with_tokens(batch: TokenBatch, tokens: np.ndarray) -> TokenBatch:
    return TokenBatch(tokens, batch.lengths, batch.first, batch.last, batch.validation, 0)


def _without_tokens(batch: TokenBatch) -> TokenBatch:
    return _with_tokens(batch, batch.tokens[:0].copy())


def _batch_to_json(batch: TokenBatch) -> list[list[int]]:
    """The lengths and flags; the tokens are in the file."""
    return [
        array.astype(int).tolist()
        for array in (batch.lengths, batch.first, batch.last, batch.validation)
    ]


def _batch_from_json(fields: list[list[int]], dtype: np.dtype) -> TokenBatch:
    lengths = np.array(fields[0], np.int64)
    first, last, validation = (np.array(flags, bool) for flags in fields[1:])
    return TokenBatch(np.empty(0, dtype), lengths, first, last, validation, 0)


def _remove_later_files(directory: Path, splits: Mapping[str, Any]) -> None:
    """Remove what was written after the state that is gone back to."""
    kept: set[str] = set()
    for split in SPLITS:
        state = splits.get(split)
        if state:
            kept.update(shard["file"] for shard in state["shards"])
            if state["open_tokens"]:
                kept.add(f"{split}_{len(state['shards']):05d}.bin")
            if state["num_documents"]:
                kept.add(f"{split}_documents.bin")
    for path in directory.iterdir():
        if path.name not in kept:
            path.unlink()
