"""Tokens in a TFDS dataset of ArrayRecord files, read without TensorFlow.

The dataset has a feature `tokens`: every record holds a run of token ids, and the records of a
split, one after the other, are its stream. Datasets that `maxmars data prepare --format tfds`
writes have a `meta.json` beside TFDS's own files that names the tokenizer; of any other, it is
taken to be GPT-2's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from maxmars.data.sources import TFDS_FORMAT, LateStatus
from maxmars.data.streams import check_ids, check_range
from maxmars.data.tokenizer import GPT2Tokenizer

FEATURE = "tokens"
_VALIDATION = ("val", "validation", "test")  # the first that a dataset has is the split `val`


class TfdsTokens:
    """One split of a TFDS dataset of tokens as a `TokenStream`.

    Where all records but the last have the same length, the record of a token is found by a
    division: known from the feature's shape, or from `meta.json`. Of other datasets every record is
    read once on opening to learn its length (8 bytes of memory a record).

    Args:
      directory: TFDS's directory of one version, with `dataset_info.json`.
      split: `train` or `val`; the latter is `validation` or `test` where there is no `val`, and the
        attribute `split` says which.

    Raises:
      ValueError: TFDS cannot read the directory, or it lacks the split or the feature.
    """

    def __init__(self, directory: str | Path, split: str) -> None:
        """Find the split, and where its records begin in the stream."""
        self.directory = Path(directory)
        metadata = _read_metadata(self.directory)
        self.tokenizer: str = metadata.get("tokenizer", GPT2Tokenizer.name)
        self.tokenizer_digest: str | None = metadata.get("tokenizer_digest")
        self.vocab_size: int = metadata.get("vocab_size", GPT2Tokenizer.vocab_size)
        builder = _builder(self.directory)
        self.split = _find_split(self.directory, list(builder.info.splits), split)
        length = _check_feature(self.directory, builder.info.features)
        self._records = _records(self.directory, builder, self.split)
        told = metadata.get("splits", {}).get(self.split, {}).get("num_tokens")
        self._index = self._make_index(length, told)
        if told is not None and told != self.num_tokens:
            raise ValueError(
                f"split {self.split!r} of {self.directory} has {self.num_tokens} tokens, but "
                f"meta.json says {told}: it is damaged; prepare it again."
            )

    def __repr__(self) -> str:
        """Directory and split, for messages."""
        return f"TfdsTokens({str(self.directory)!r}, {self.split!r})"

    @property
    def num_tokens(self) -> int:
        """Tokens of the split."""
        return self._index.num_tokens

    def read(self, start: int, length: int) -> Int32[np.ndarray, " length"]:
        """The tokens [start, start + length) of the stream, across the borders of records.

        Raises:
          ValueError: some of them lie outside the stream or the vocabulary, or a record is damaged.
        """
        check_range(self, start, length)
        tokens = np.empty(length, np.int32)
        done, index = 0, self._index.find(start)
        while done < length:
            record = self._record(index)
            offset = start + done - self._index.bounds(index)[0]
            part = record[offset : offset + length - done]
            tokens[done : done + len(part)] = part
            done += len(part)
            index += 1
        return tokens

    def locate(self, token: int) -> dict[str, str | int]:
        """The record that holds a token, and the token's number in it."""
        record = self._index.find(token)
        return {"record": record, "token_in_record": token - self._index.bounds(record)[0]}

    def _record(self, index: int) -> np.ndarray:
        record = self._read_record(index)
        start, end = self._index.bounds(index)
        if len(record) != end - start:
            raise ValueError(
                f"record {index} of split {self.split!r} of {self.directory} has {len(record)} "
                f"tokens, not {end - start}: the dataset is damaged or meta.json is of another."
            )
        check_ids(self, self.directory, record)
        return record

    def _read_record(self, index: int) -> np.ndarray:
        try:
            return np.asarray(self._records[index][FEATURE])
        except (RuntimeError, IndexError) as error:  # ArrayRecord's checksums, a lost end of a file
            raise ValueError(
                f"record {index} of split {self.split!r} of {self.directory} cannot be read "
                f"({error}): a file is damaged or was cut short; prepare or download it again."
            ) from error

    def verify(self) -> None:
        """Read every record, which checks ArrayRecord's own checksums, and check every token.

        Raises:
          ValueError: a record is damaged.
        """
        with LateStatus() as status:
            for index in range(len(self._records)):
                if index % 1000 == 0:
                    status.update(f"verifying record {index:,} of {len(self._records):,}")
                self._record(index)

    def _make_index(
        self, length: int | None, num_tokens: int | None
    ) -> _EqualRecords | _AnyRecords:
        """Where each record lies, from what the shape and `meta.json` say, or by reading all."""
        count = len(self._records)
        if length is not None:
            return _EqualRecords(length, count * length)
        if num_tokens is not None and count:
            # Our own writer cuts the stream into equal pieces; two records tell how long they are.
            first, last = len(self._read_record(0)), len(self._read_record(count - 1))
            if last <= first and first * (count - 1) + last == num_tokens:
                return _EqualRecords(first, num_tokens)
        starts = np.zeros(count + 1, np.int64)
        with LateStatus() as status:
            for i in range(count):
                starts[i + 1] = starts[i] + len(self._read_record(i))
                if i % 1000 == 0:
                    status.update(
                        f"{self.directory}: learning the length of record {i:,} / {count:,}"
                    )
        return _AnyRecords(starts)


@dataclass(frozen=True)
class _EqualRecords:
    """Records of `length` tokens each, but for a shorter last one."""

    length: int
    num_tokens: int

    def find(self, token: int) -> int:
        """The record that holds a token."""
        return token // self.length

    def bounds(self, record: int) -> tuple[int, int]:
        """First token of a record, and the first one after it."""
        start = record * self.length
        return start, min(start + self.length, self.num_tokens)


@dataclass(frozen=True)
class _AnyRecords:
    """Records of any lengths; `starts` is the first token of each, and the number of tokens."""

    starts: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return int(self.starts[-1])

    def find(self, token: int) -> int:
        """The record that holds a token."""
        return int(np.searchsorted(self.starts, token, "right")) - 1

    def bounds(self, record: int) -> tuple[int, int]:
        """First token of a record, and the first one after it."""
        return int(self.starts[record]), int(self.starts[record + 1])


def _read_metadata(directory: Path) -> dict[str, Any]:
    """What our own writer adds; nothing for a dataset of anybody else."""
    path = directory / "meta.json"
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text())
        if fields["format"] == TFDS_FORMAT:
            needed = ("tokenizer", "tokenizer_digest", "vocab_size", "splits")
            return {name: fields[name] for name in needed}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); prepare the dataset again.") from error
    raise ValueError(f"{path} is not of format {TFDS_FORMAT!r}; prepare the dataset again.")


def _builder(directory: Path) -> Any:
    import tensorflow_datasets as tfds  # here: it takes a third of a second

    try:
        return tfds.builder_from_directory(str(directory))
    except Exception as error:  # whatever TFDS makes of a directory that is not one of its own
        raise ValueError(
            f"TFDS cannot read {directory} ({error}); give the directory of one version, which "
            "holds dataset_info.json and features.json."
        ) from error


def _records(directory: Path, builder: Any, split: str) -> Any:
    try:
        return builder.as_data_source(split=split)
    except Exception as error:  # NotImplementedError, FileNotFoundError and others
        raise ValueError(
            f"TFDS cannot read split {split!r} of {directory} by index ({error}); it must be "
            "written with file_format='array_record', and all its files must be there."
        ) from error


def _find_split(directory: Path, found: list[str], split: str) -> str:
    wanted = _VALIDATION if split == "val" else (split,)
    for name in wanted:
        if name in found:
            return name
    raise ValueError(
        f"the TFDS dataset {directory} has no split {' or '.join(map(repr, wanted))}, only "
        f"{', '.join(found) or 'none'}."
    )


def _check_feature(directory: Path, features: Any) -> int | None:
    """The length of every record's tokens where the feature's shape says it, else None."""
    feature = dict(features.items()).get(FEATURE)
    integers = feature is not None and np.issubdtype(feature.np_dtype, np.integer)
    if feature is None or not integers or len(feature.shape) != 1:
        found = "none of that name" if feature is None else f"{feature.np_dtype} {feature.shape}"
        raise ValueError(
            f"the TFDS dataset {directory} needs a feature {FEATURE!r} of integers in one "
            f"dimension; it has {found}. Its features: {', '.join(features)}."
        )
    return feature.shape[0]
