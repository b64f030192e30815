"""Tokens in a TFDS dataset of ArrayRecord files, read without TensorFlow.

The dataset has a feature `tokens`, of a fixed length: every record holds a run of so many token
ids, and the records of a split, one after the other, are its stream. A function of the user's own
reads any other dataset, such as `from_tfds` in tools/examples/own_data.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from maxmars.data.metadata import NoSuchSplitError
from maxmars.data.token_files import TokenFile, Vocabulary, check_ids, check_range
from maxmars.distributed.files import Workdir

FEATURE = "tokens"
_VALIDATION = ("val", "validation", "test")  # the first that a dataset has is the split `val`


class TfdsTokens:
    """One split of a TFDS dataset of tokens as a `TokenStream`.

    Args:
      directory: TFDS's directory of one version, with `dataset_info.json`, on a disk.
      split: `train` or `val`; the latter is `validation` or `test` where there is no `val`, and the
        attribute `split` says which.
      vocabulary: what the ids mean.

    Raises:
      ValueError: TFDS cannot read the directory, or it lacks the split or the feature.
    """

    def __init__(self, directory: Path, split: str, vocabulary: Vocabulary) -> None:
        self.directory: Workdir = directory
        self.tokenizer, self.tokenizer_digest = vocabulary.tokenizer, vocabulary.digest
        self.tokenizer_place: Workdir = vocabulary.place or directory
        self.vocab_size, self.metadata = vocabulary.size, None
        self.files: Sequence[TokenFile] = [
            TokenFile(path=path, num_bytes=path.stat().st_size)
            for path in sorted(directory.glob("*.array_record*"))
        ]
        self.split, self._length, self._records = _open(directory, split)
        self.num_tokens = len(self._records) * self._length

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
                index, first = divmod(start + done, self._length)
                tokens = self._record(index)[first : first + length - done]
                check_ids(self, tokens)  # before 64-bit ids are cut to 32
                window[done : done + len(tokens)] = tokens
                done += len(tokens)
        return windows

    def locate(self, token: int) -> dict[str, str | int]:
        """The record that holds a token, and the token's number in it."""
        record, number = divmod(token, self._length)
        return {"record": record, "token_in_record": number}

    def _record(self, index: int) -> np.ndarray:
        try:
            return np.asarray(self._records[index][FEATURE])
        except (RuntimeError, IndexError) as error:  # ArrayRecord's checksums, a lost end of a file
            raise ValueError(
                f"record {index} of split {self.split!r} of {self.directory} cannot be read "
                f"({error}): a file is damaged or was cut short; prepare or download it again."
            ) from error


def _open(directory: Path, split: str) -> tuple[str, int, Any]:
    """The name of a split there, the tokens of a record, and the records."""
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


def _check_feature(directory: Path, features: Any) -> int:
    """The length of every record's tokens, by the feature's shape."""
    feature = dict(features.items()).get(FEATURE)
    integers = feature is not None and np.issubdtype(feature.np_dtype, np.integer)
    if feature is None or not integers or len(feature.shape) != 1 or feature.shape[0] is None:
        actual = "none of that name" if feature is None else f"{feature.np_dtype} {feature.shape}"
        raise ValueError(
            f"the TFDS dataset {directory} needs a feature {FEATURE!r} of integers in one "
            f"dimension of a fixed length; it has {actual}. Its features: {', '.join(features)}. A "
            "function of your own reads any dataset, such as from_tfds in "
            "tools/examples/own_data.py."
        )
    return feature.shape[0]
