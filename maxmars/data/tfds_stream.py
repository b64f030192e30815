"""Tokens in a TFDS dataset of ArrayRecord files, read without TensorFlow.

The dataset has a feature `tokens`: every record holds a run of token ids, and the records of a
split, one after the other, are its stream. The tokenizer is taken to be GPT-2's, unless a
`meta.json` lies beside TFDS's own files, as maxmars wrote it until 0.2, that names another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from maxmars.data.metadata import Metadata, NoSuchSplitError
from maxmars.data.token_files import TokenFile, Vocabulary, check_ids, check_range
from maxmars.distributed.files import Workdir
from maxmars.distributed.progress import Progress

FEATURE = "tokens"
_VALIDATION = ("val", "validation", "test")  # the first that a dataset has is the split `val`


class TfdsTokens:
    """One split of a TFDS dataset of tokens as a `TokenStream`.

    Where records begin is known from the feature's shape, or from `meta.json`. Of other datasets
    every record is read once on opening to learn its length. That takes 8 bytes of memory a record.

    Args:
      directory: TFDS's directory of one version, with `dataset_info.json`, on a disk.
      split: `train` or `val`; the latter is `validation` or `test` where there is no `val`, and the
        attribute `split` says which.
      vocabulary: what the ids mean where no `meta.json` says it.
      metadata: what `meta.json` says, of versions up to 0.2.

    Raises:
      ValueError: TFDS cannot read the directory, or it lacks the split or the feature.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        vocabulary: Vocabulary,
        metadata: Metadata | None = None,
    ) -> None:
        self.directory: Workdir = directory
        self.tokenizer, self.tokenizer_digest = vocabulary.tokenizer, vocabulary.digest
        self.tokenizer_place: Workdir = vocabulary.place or directory
        self.vocab_size = vocabulary.size
        if metadata is not None:
            self.tokenizer, self.tokenizer_digest = metadata.tokenizer, metadata.tokenizer_digest
            self.vocab_size = metadata.vocab_size
        self.metadata = metadata
        splits = {} if metadata is None else metadata.splits
        sha256 = {shard.file: shard.sha256 for s in splits.values() for shard in s.shards}
        split_of = {shard.file: name for name, s in splits.items() for shard in s.shards}
        self.files: Sequence[TokenFile] = [
            TokenFile(
                path=path,
                num_bytes=path.stat().st_size,
                sha256=sha256.get(path.name),
                split=split_of.get(path.name),
            )
            for path in sorted(directory.glob("*.array_record*"))
        ]
        self.split, length, self._records = _open(directory, split)
        count = len(self._records)
        if length is None and metadata is not None and metadata.record_tokens is not None:
            length, num_tokens = metadata.record_tokens, metadata.splits[self.split].num_tokens
            self._starts = np.minimum(np.arange(count + 1) * length, num_tokens)
        elif length is not None:
            self._starts = np.arange(count + 1) * length
        else:
            self._starts = self._learn_starts()
        self.num_tokens = int(self._starts[-1])

    def __repr__(self) -> str:
        return f"TfdsTokens({str(self.directory)!r}, {self.split!r})"

    def read(self, start: int, length: int) -> Int32[np.ndarray, " length"]:
        return self.read_windows(np.array([start]), length)[0]

    def read_windows(
        self, starts: Int64[np.ndarray, " windows"], length: int
    ) -> Int32[np.ndarray, "windows length"]:
        """The tokens [start, start + length) of each of `starts`, across the borders of records.

        Raises:
          ValueError: some of them lie outside the stream or the vocabulary, or a record is damaged.
        """
        check_range(self, starts, length)
        windows = np.empty((len(starts), length), np.int32)
        for window, start in zip(windows, starts.tolist(), strict=True):
            done = 0
            while done < length:
                index, first = self._find(start + done)
                tokens = self._record(index)[first : first + length - done]
                check_ids(self, tokens)  # before 64-bit ids are cut to 32
                window[done : done + len(tokens)] = tokens
                done += len(tokens)
        return windows

    def locate(self, token: int) -> dict[str, str | int]:
        """The record that holds a token, and the token's number in it."""
        record, number = self._find(token)
        return {"record": record, "token_in_record": number}

    def _find(self, token: int) -> tuple[int, int]:
        """The record that holds a token, and the token's number in it."""
        record = int(np.searchsorted(self._starts, token, "right")) - 1
        return record, token - int(self._starts[record])

    def _record(self, index: int) -> np.ndarray:
        record, expected = self._read_record(index), np.diff(self._starts[index : index + 2])[0]
        if len(record) != expected:
            raise ValueError(
                f"record {index} of split {self.split!r} of {self.directory} has {len(record)} "
                f"tokens, not {expected}: the dataset is damaged or meta.json is of another."
            )
        return record

    def _read_record(self, index: int) -> np.ndarray:
        try:
            return np.asarray(self._records[index][FEATURE])
        except (RuntimeError, IndexError) as error:  # ArrayRecord's checksums, a lost end of a file
            raise ValueError(
                f"record {index} of split {self.split!r} of {self.directory} cannot be read "
                f"({error}): a file is damaged or was cut short; prepare or download it again."
            ) from error

    def _learn_starts(self) -> np.ndarray:
        """The first token of each record, and the number of tokens, by reading all records."""
        count = len(self._records)
        starts = np.zeros(count + 1, np.int64)
        with Progress(stderr=True) as status:
            for i in range(count):
                starts[i + 1] = starts[i] + len(self._read_record(i))
                if i % 1000 == 0:
                    status.update(f"{self.directory}: reading the length of every record", i, count)
        return starts


def _open(directory: Path, split: str) -> tuple[str, int | None, Any]:
    """The name of a split there, the tokens of a record if the feature says it, and the records."""
    import tensorflow_datasets as tfds  # here: it takes a third of a second

    with _telling_of_tfds(directory, "give the directory of one version, with dataset_info.json"):
        builder = tfds.builder_from_directory(str(directory))
    name = _find_split(directory, list(builder.info.splits), split)
    length = _check_feature(directory, builder.info.features)
    with _telling_of_tfds(directory, "it must be written with file_format='array_record'"):
        return name, length, builder.as_data_source(split=name)


@contextlib.contextmanager
def _telling_of_tfds(directory: Path, wanted: str) -> Generator[None]:
    """Raise as ValueError what TFDS raises of many kinds."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"TFDS cannot read {directory} ({error}); {wanted}.") from error


def _find_split(directory: Path, names: list[str], split: str) -> str:
    wanted = _VALIDATION if split == "val" else (split,)
    for name in wanted:
        if name in names:
            return name
    raise NoSuchSplitError(
        f"the TFDS dataset {directory} has no split {' or '.join(map(repr, wanted))}, only "
        f"{', '.join(names) or 'none'}"
        + ("; train without validation by --eval.every None." if split == "val" else ".")
    )


def _check_feature(directory: Path, features: Any) -> int | None:
    """The length of every record's tokens where the feature's shape says it, else None."""
    feature = dict(features.items()).get(FEATURE)
    integers = feature is not None and np.issubdtype(feature.np_dtype, np.integer)
    if feature is None or not integers or len(feature.shape) != 1:
        actual = "none of that name" if feature is None else f"{feature.np_dtype} {feature.shape}"
        raise ValueError(
            f"the TFDS dataset {directory} needs a feature {FEATURE!r} of integers in one "
            f"dimension; it has {actual}. Its features: {', '.join(features)}."
        )
    return feature.shape[0]
