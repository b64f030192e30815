"""Windows from a function of the user's own that returns a Grain dataset.

See `GrainSource`, and the README of this room for examples.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jaxtyping import Int64

from maxmars.config import GrainSource
from maxmars.config.user_code import Source, load_function
from maxmars.data.token_datasets import token_datasets
from maxmars.data.token_files import Origin, TokenFile
from maxmars.data.tokenizer import ByteTokenizer, GPT2Tokenizer, load
from maxmars.data.windows import TYPES, Batch, Types
from maxmars.distributed.files import Workdir, resolve

_MANY = 1 << 60  # more elements than any data; repeat() makes 2**63 - 1 of them


class ExampleCheck:
    """Checks what a user's function gives, one example after the other.

    Args:
      what: begins an error: the field of the config, the function and the split.
      length: an array holds one number more.
      vocab_size: bounds the tokens.

    Attributes:
      types: names and types of the arrays of the first example, which all others need too.
    """

    def __init__(self, what: str, length: int, vocab_size: int) -> None:
        self._what, self._length, self._vocab_size = what, length, vocab_size
        self.types: Types = {}

    def wrong(self, problem: str) -> ValueError:
        """An error that says a problem."""
        return ValueError(f"{self._what}: {problem}.")

    def read(self, numbers: Sequence[int], examples: Iterable[Any]) -> Batch:
        """The arrays [examples, length + 1] of examples with these numbers.

        Raises:
          ValueError: one is not as it should be, or unlike the first.
        """
        checked = [self(n, example) for n, example in zip(numbers, examples, strict=True)]
        return {name: np.stack([arrays[name] for arrays in checked]) for name in self.types}

    def __call__(self, number: int, example: Any) -> Batch:
        """The arrays of one example; see `read`."""
        arrays = example if isinstance(example, Mapping) else {"tokens": example}
        if "tokens" not in arrays or not arrays.keys() <= TYPES.keys():
            raise self.wrong(
                f"element {number} has {', '.join(map(str, arrays)) or 'nothing'}; it needs "
                "tokens, and may have mask, segment_ids and positions"
            )
        if self.types and arrays.keys() != self.types.keys():
            raise self.wrong(
                f"element {number} has {', '.join(arrays)}, and element 0 {', '.join(self.types)}"
            )
        checked = {name: np.asarray(arrays[name]) for name in TYPES if name in arrays}
        for name, array in checked.items():
            if array.shape != (self._length + 1,):
                raise self.wrong(
                    f"{name} of element {number} has the shape {list(array.shape)}, not "
                    f"[{self._length + 1}] (model.max_seq_len + 1)"
                )
            is_mask = name == "mask"
            if array.dtype.kind not in ("iubf" if is_mask else "iub"):
                wanted = "booleans or weights" if is_mask else "integers"
                raise self.wrong(f"{name} of element {number} are {array.dtype}, not {wanted}")
        for name, last, rule in (
            ("tokens", self._vocab_size - 1, "below model.vocab_size"),
            ("positions", self._length - 1, "below model.max_seq_len"),
            ("mask", 1, "which weights a token's loss"),
        ):
            values = checked.get(name, np.zeros(1, np.int32))
            if name == "positions":
                values = values[: self._length]  # the last one is that of a target alone
            outside = values[~((values >= 0) & (values <= last))]  # also NaN
            if outside.size:
                raise self.wrong(
                    f"{name} of element {number} hold {outside[0]}, which is not in [0, {last}], "
                    f"{rule}"
                )
        weighted = "mask" in checked and checked["mask"].dtype.kind == "f"
        if not self.types:
            mask = {"mask": np.float32} if weighted else {}
            self.types = {name: (TYPES | mask)[name] for name in checked}
        if weighted and self.types["mask"] is np.bool:
            raise self.wrong(
                f"the mask of element {number} are weights, and that of element 0 is not; "
                "return float32 from all"
            )
        return {name: array.astype(self.types[name]) for name, array in checked.items()}

    def check_same(self, once: Batch, again: Batch, seed: str) -> None:
        """Raise ValueError if the same windows, read twice, are not the same."""
        if any(not np.array_equal(once[name], again[name]) for name in once):
            raise self.wrong(
                "of the same window it makes one thing and then another, so that a run could not "
                f"be repeated; draw random numbers from a seed that follows {seed}"
            )


class OwnWindows:
    """The windows of a user's own data; see `Windows`. They are their own `origin`.

    They travel to another process as their function, and are opened again there. Where the function
    maps what `maxmars.data.dataset` or `documents` gives, the files below are theirs as well, and
    so is the tokenizer unless another one is named.

    Args:
      function: where it is.
      split: `train` or `val`.
      length: tokens of a window that are predicted.
      vocab_size: of the model; it bounds the tokens.
      options: further arguments of the function.
      tokenizer: name of that of the tokens, or a directory of tokens or a `tokenizer.json` that has
        it.

    Raises:
      FileNotFoundError, ValueError: there is no such function, it does not take the options, or it
        returns something else than it should. Any other exception was raised by the function.
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
        self.split = split
        self.directory: Workdir = Path(function.written)
        self.length, self.vocab_size = length, vocab_size
        self._function, self._options = function, options
        self._check = ExampleCheck(f"data.source={function!r}, split {split!r}", length, vocab_size)
        self._dataset: Any = self._open()
        below = token_datasets(self._dataset)
        self.files: Sequence[TokenFile] = [file for found in below for file in found.files]
        self._digests = [found.digest for found in below]
        self.tokenizer, self.tokenizer_digest, self.tokenizer_place = self._tokenizer(
            tokenizer, [found.origin for found in below]
        )
        self._count = len(self._dataset)
        self._check(0, self._dataset[0])
        self.types = self._check.types

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}

    @property
    def origin(self) -> Origin:
        return self

    def read(self, numbers: Int64[np.ndarray, " windows"]) -> Batch:
        if self._dataset is None:  # in another process
            self._dataset = self._open()
        # Grain's name for reading several elements at once, which a dataset of tokens does.
        return self._check.read(numbers.tolist(), self._dataset._getitems(numbers.tolist()))

    def digest(self) -> str:
        """SHA-256, in hex, over the text of the function, its options, the length and number of the
        windows, and the first and the last one.

        Raises:
          ValueError: these are other ones when they are read again.
        """
        name, options = self._function.function, self._options
        told = [name, options, self.split, self.length, len(self), self.tokenizer, *self._digests]
        sha = hashlib.sha256(self._function.text() + json.dumps(told, sort_keys=True).encode())
        for number in (0, len(self) - 1):
            once, again = (self.read(np.array([number])) for _ in range(2))
            self._check.check_same(once, again, "from the element's number")
            for array_name, array in sorted(once.items()):
                sha.update(array_name.encode() + array.tobytes())
        return sha.hexdigest()

    def describe(self) -> dict[str, Any]:
        return {"num_tokens": len(self) * self.length, "num_documents": None, "source": None}

    def _tokenizer(self, named: str, below: Sequence[Origin]) -> tuple[str, str | None, Workdir]:
        """Name, digest and place of the tokenizer."""
        if named in (ByteTokenizer.name, GPT2Tokenizer.name):
            return named, None, self.directory
        if named != GrainSource.tokenizer:
            own = load(named)
            return own.name, own.digest, resolve(named)
        if len({(origin.tokenizer, origin.tokenizer_digest) for origin in below}) > 1:
            raise self._check.wrong("its datasets have tokens of several tokenizers")
        for origin in below:
            return origin.tokenizer, origin.tokenizer_digest, origin.tokenizer_place
        return named, None, self.directory

    def _open(self) -> grain.MapDataset[Any]:
        windows = load_function(self._function)
        arguments = {"split": self.split, "length": self.length, **self._options}
        try:
            inspect.signature(windows).bind(**arguments)
        except TypeError as error:
            raise self._check.wrong(
                f"the function cannot be called with {', '.join(arguments)} ({error}); it is "
                "windows(*, split, length, **options) with the keys of data.options"
            ) from None
        dataset = windows(**arguments)
        if isinstance(dataset, grain.IterDataset):
            raise self._check.wrong(
                "it returned a grain.IterDataset, in which a run cannot find its place again in "
                "constant time; return the MapDataset before to_iter_dataset()"
            )
        if not isinstance(dataset, grain.MapDataset):
            raise self._check.wrong(
                f"it returned a {type(dataset).__name__}, not a grain.MapDataset; wrap anything "
                "that has a length and an index in grain.MapDataset.source(...)"
            )
        if not 0 < len(dataset) < _MANY:
            raise self._check.wrong(
                "it has no elements"
                if len(dataset) == 0
                else "it has no end; leave out repeat(), since the run repeats and shuffles"
            )
        try:
            dataset.batch(1)
        except ValueError:
            raise self._check.wrong(
                "it leaves elements out (filter or flat_map), so that their numbers say nothing; "
                "leave them out before, when you make the list of elements"
            ) from None
        return dataset
