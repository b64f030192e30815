"""Windows from a function of the user's own that returns a Grain dataset.

A run must find its place in the data in constant time, and read the same windows again after a
resume. So the function returns a finite `MapDataset`; shuffling and repeating are the run's work.
Each example that is read is checked (`ExampleCheck`). The digest of the data covers the function's
file, options, and first and last window. See `GrainSource` for the config, and the README.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grain
import numpy as np
from etils import epath
from jaxtyping import Int64

from maxmars.config import GrainSource
from maxmars.config.user_code import Source
from maxmars.data.token_datasets import token_datasets
from maxmars.data.token_files import TokenFile
from maxmars.data.tokenizer import Vocabulary
from maxmars.data.windows import TYPES, Batch, Types

_MANY = 1 << 60  # more elements than any data; repeat() makes 2**63 - 1 of them


class ExampleCheck:
    """Checks the examples of a user's function, a batch at a time.

    Args:
      what: first words of every error: the field of the config, the function and the split.
      length: tokens that are predicted; an array has one element more.
      vocab_size: upper bound of the tokens, exclusive.

    Attributes:
      types: names and types of the arrays of the first example; all other examples need the same.
    """

    def __init__(self, what: str, length: int, vocab_size: int) -> None:
        self._what, self._length = what, length
        self._bounds = {
            "tokens": (vocab_size - 1, "below model.vocab_size"),
            "positions": (length - 1, "below model.max_seq_len"),
            "mask": (1, "which weights a token's loss"),
        }
        self.types: Types = {}

    def problem(self, problem: str) -> ValueError:
        """An error with this message."""
        return ValueError(f"{self._what}: {problem}.")

    def read(self, numbers: Sequence[int], examples: Iterable[Any]) -> Batch:
        """The arrays [examples, length + 1] of examples with these numbers.

        Raises:
          ValueError: an example breaks a rule, or has other arrays than the first example.
        """
        # A bare array is an example of tokens alone.
        rows = [e if isinstance(e, Mapping) else {"tokens": e} for e in examples]
        for number, row in zip(numbers, rows, strict=True):
            if "tokens" not in row or not row.keys() <= TYPES.keys():
                raise self.problem(
                    f"element {number} has {', '.join(map(str, row)) or 'nothing'}; it needs "
                    "tokens, and may have mask, segment_ids and positions"
                )
            if row.keys() != (self.types or rows[0]).keys():
                raise self.problem(
                    f"element {number} has {', '.join(row)}, and element 0 {', '.join(self.types)}"
                )
        arrays = {
            name: self._stacked(name, numbers, [np.asarray(row[name]) for row in rows])
            for name in TYPES
            if name in rows[0]
        }
        if not self.types:  # the first example decides for all: a batch has one dtype per array
            is_weighted = "mask" in arrays and arrays["mask"].dtype.kind == "f"
            mask = {"mask": np.float32} if is_weighted else {}
            self.types = {name: (TYPES | mask)[name] for name in arrays}
        return {name: array.astype(self.types[name]) for name, array in arrays.items()}

    def _stacked(self, name: str, numbers: Sequence[int], arrays: Sequence[np.ndarray]) -> Any:
        """The arrays of this name, checked and stacked [examples, length + 1]."""
        is_mask = name == "mask"
        for number, array in zip(numbers, arrays, strict=True):
            if array.shape != (self._length + 1,):
                raise self.problem(
                    f"{name} of element {number} has the shape {list(array.shape)}, not "
                    f"[{self._length + 1}] (model.max_seq_len + 1)"
                )
            if array.dtype.kind not in ("iubf" if is_mask else "iub"):
                wanted = "booleans or weights" if is_mask else "integers"
                raise self.problem(f"{name} of element {number} are {array.dtype}, not {wanted}")
            if is_mask and array.dtype.kind == "f" and self.types.get(name) is np.bool:
                raise self.problem(
                    f"the mask of element {number} are weights, and that of element 0 is not; "
                    "return float32 from all"
                )
        stacked, bound = np.stack(arrays), self._bounds.get(name)
        if bound is not None:
            last, rule = bound
            # The last token is only a target, whose position the model never embeds. The negation
            # finds NaN too, for which every comparison is False.
            values = stacked[:, : self._length] if name == "positions" else stacked
            outside = ~((values >= 0) & (values <= last))
            if outside.any():
                row, column = np.argwhere(outside)[0]
                raise self.problem(
                    f"{name} of element {numbers[row]} hold {values[row, column]}, which is not in "
                    f"[0, {last}], {rule}"
                )
        return stacked


class OwnWindows:
    """The windows of a user's own data, with the attributes and methods of `TokenWindows`.

    Pickling keeps the function alone, and another process opens the dataset again. Where the
    function maps `maxmars.data.dataset` or `documents`, the files and the tokenizer are those of
    the dataset below, unless the config names another tokenizer.

    Args:
      function: the user's function.
      split: `train` or `val`.
      length: tokens of a window that are predicted.
      vocab_size: of the model; every token must be below it.
      options: further arguments of the function.
      tokenizer: `byte`, `gpt2`, a directory of tokens, or a `tokenizer.json`.

    Raises:
      FileNotFoundError, ValueError: there is no such function, or it does not take the options, or
        it returns no finite `MapDataset` of examples. The function may raise anything else.
    """

    def __init__(
        self,
        function: Source,
        split: str,
        *,
        length: int,
        vocab_size: int,
        options: Mapping[str, Any],
        tokenizer: str,
    ) -> None:
        """Open the dataset, and read its first element."""
        self.split, self.length = split, length
        self.path = epath.Path(function.spec)
        self._function, self._options = function, options
        self._check = ExampleCheck(f"data.source={function!r}, split {split!r}", length, vocab_size)
        self._dataset: Any = self._open()
        below = token_datasets(self._dataset)
        self.files: Sequence[TokenFile] = [file for tokens in below for file in tokens.files]
        self._digests = [tokens.digest for tokens in below]
        if tokenizer != GrainSource.tokenizer or not below:
            self.vocabulary = Vocabulary.named(tokenizer, vocab_size)
        else:
            self.vocabulary = dataclasses.replace(below[0].vocabulary, size=vocab_size)
            if len({(b.vocabulary.tokenizer, b.vocabulary.digest) for b in below}) > 1:
                raise self._check.problem("its datasets have tokens of several tokenizers")
        self._count = len(self._dataset)
        self._check.read([0], [self._dataset[0]])  # finds faults at the start, and the types
        self.types = self._check.types

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}  # a dataset may hold open files

    def read(self, numbers: Int64[np.ndarray, " windows"]) -> Batch:
        if self._dataset is None:  # after pickling
            self._dataset = self._open()
        # `_getitems` reads several elements at once, as `TokenDataset` needs; Grain has no public
        # method for it.
        return self._check.read(numbers.tolist(), self._dataset._getitems(numbers.tolist()))

    def digest(self) -> str:
        """SHA-256 over the function's file and options, the length and number of the windows, and
        the first and the last window, in hex.

        Raises:
          ValueError: one of these two windows differs when it is read a second time.
        """
        name, options = self._function.function, self._options
        known = [name, options, self.split, self.length, len(self), self.vocabulary.tokenizer]
        payload = json.dumps([*known, *self._digests], sort_keys=True).encode()
        # The code is not enough: the files that it reads may change, which these windows may show.
        sha = hashlib.sha256(b"".join(self._function.files().values()) + payload)
        for number in (0, len(self) - 1):
            once, again = (self.read(np.array([number])) for _ in range(2))
            if any(not np.array_equal(once[name], again[name]) for name in once):
                raise self._check.problem(
                    "of the same window it makes one thing and then another, so that a run could "
                    "not be repeated; draw random numbers from a seed that follows from the "
                    "element's number"
                )
            for array_name, array in sorted(once.items()):
                sha.update(array_name.encode() + array.tobytes())
        return sha.hexdigest()

    def describe(self) -> dict[str, Any]:
        return {"num_tokens": len(self) * self.length, "num_documents": None, "source": None}

    def _open(self) -> grain.MapDataset[Any]:
        windows = self._function.load()
        arguments = {"split": self.split, "length": self.length, **self._options}
        try:
            # Checked apart: a TypeError of the call itself may come from inside of the function.
            inspect.signature(windows).bind(**arguments)
        except TypeError as error:
            raise self._check.problem(
                f"the function cannot be called with {', '.join(arguments)} ({error}); it is "
                "windows(*, split, length, **options) with the keys of data.options"
            ) from None
        dataset = windows(**arguments)
        if isinstance(dataset, grain.IterDataset):
            raise self._check.problem(
                "it returned a grain.IterDataset, in which a run cannot find its place again in "
                "constant time; return the MapDataset before to_iter_dataset()"
            )
        if not isinstance(dataset, grain.MapDataset):
            raise self._check.problem(
                f"it returned a {type(dataset).__name__}, not a grain.MapDataset; wrap anything "
                "that has a length and an index in grain.MapDataset.source(...)"
            )
        if not 0 < len(dataset) < _MANY:
            raise self._check.problem(
                "it has no elements"
                if len(dataset) == 0
                else "it has no end; leave out repeat(), since the run repeats and shuffles"
            )
        try:
            dataset.batch(1)  # Grain refuses it where elements may be missing
        except ValueError:
            raise self._check.problem(
                "it leaves elements out (filter or flat_map), so that their numbers say nothing; "
                "leave them out before, when you make the list of elements"
            ) from None
        return dataset
