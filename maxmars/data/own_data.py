"""Training windows from a function of the user's own, which returns a Grain dataset.

See `GrainSource` for the function, and the README of this room for examples.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32, Int64

from maxmars.config import GrainSource, ModelConfig
from maxmars.config.secrets import reveal
from maxmars.config.user_code import Source, load_function

Batch = dict[str, np.ndarray]
"""Arrays of one shape, by name: `tokens`, and any of `mask`, `segment_ids` and `positions`."""

Types = dict[str, type]
"""The types of a batch's arrays, by name."""

TYPES: Types = {
    "tokens": np.int32,
    "mask": np.bool,
    "segment_ids": np.int32,
    "positions": np.int32,
}
"""The arrays that a batch may have. A `mask` of own data that are weights is float32."""

_MANY = 1 << 60  # more elements than any data; repeat() makes 2**63 - 1 of them


class OwnData:
    """One split of a user's own data: finitely many windows, each read by its number.

    It travels to another process as its config, and is opened again there.

    Args:
      config: the function and its options.
      split: `train` or `val`.
      model: its max_seq_len is the length of a window, and its vocab_size bounds the tokens.

    Attributes:
      directory: the source, `FILE.py:NAME`.
      types: names and types of the arrays of every window.

    Raises:
      FileNotFoundError, ValueError: there is no such function, it does not take the options, or it
        returns something else than it should. Any other exception was raised by the function.
    """

    tokenizer_digest = None
    files = ()

    def __init__(self, config: GrainSource, split: str, model: ModelConfig) -> None:
        """Open the dataset, and read its first element."""
        self.source = Source.of(config.source)
        self.split, self.tokenizer = split, config.tokenizer
        self.directory = self.tokenizer_place = Path(self.source.written)
        self.length, self.vocab_size = model.max_seq_len, model.vocab_size
        self._options = reveal(config.options, "data.options")
        self._dataset: Any = self._open()
        self._count = len(self._dataset)
        self.types: Types = {}  # until the first element says which
        self.types = {name: array.dtype.type for name, array in self._element(0).items()}

    def __len__(self) -> int:
        """Number of windows."""
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}

    @property
    def num_tokens(self) -> int:
        """Tokens of all windows that are inputs."""
        return len(self) * self.length

    def read(self, number: int, length: int) -> Int32[np.ndarray, " length"]:
        """The tokens of window `number`; `length` is that of every window."""
        return self.read_windows(np.array([number]), length)["tokens"][0]

    def read_windows(self, numbers: Int64[np.ndarray, " windows"], length: int) -> Batch:
        """The arrays [windows, length] of the windows with these numbers.

        Raises:
          ValueError: an element is unlike the first one, or tokens lie outside the vocabulary.
        """
        elements = [self._element(number) for number in numbers.tolist()]
        return {name: np.stack([element[name] for element in elements]) for name in self.types}

    def locate(self, number: int) -> dict[str, str | int]:
        """Which element of the dataset a window is, JSON-ready."""
        return {"element": number}

    def digest(self) -> str:
        """SHA-256, in hex, over the text of the source, its options, the length and number of the
        windows, and the first and the last one."""
        name, options = self.source.function, self._options
        told = [name, options, self.split, self.length, len(self), self.tokenizer]
        sha = hashlib.sha256(self.source.text() + json.dumps(told, sort_keys=True).encode())
        for number in (0, len(self) - 1):
            for array_name, array in sorted(self._element(number).items()):
                sha.update(array_name.encode() + array.tobytes())
        return sha.hexdigest()

    def _wrong(self, problem: str) -> ValueError:
        return ValueError(f"data.source={self.source!r}, split {self.split!r}: {problem}.")

    def _open(self) -> grain.MapDataset[Any]:
        function = load_function(self.source)
        arguments = {"split": self.split, "length": self.length, **self._options}
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise self._wrong(
                f"the function cannot be called with {', '.join(arguments)} ({error}); it is "
                "windows(*, split, length, **options) with the keys of data.options"
            ) from None
        dataset = function(**arguments)
        if isinstance(dataset, grain.IterDataset):
            raise self._wrong(
                "it returned a grain.IterDataset, in which a run cannot find its place again in "
                "constant time; return the MapDataset before to_iter_dataset()"
            )
        if not isinstance(dataset, grain.MapDataset):
            raise self._wrong(
                f"it returned a {type(dataset).__name__}, not a grain.MapDataset; wrap anything "
                "that has a length and an index in grain.MapDataset.source(...)"
            )
        if not 0 < len(dataset) < _MANY:
            raise self._wrong(
                "it has no elements"
                if len(dataset) == 0
                else "it has no end; leave out repeat(), since the run repeats and shuffles"
            )
        try:
            dataset.batch(1)
        except ValueError:
            raise self._wrong(
                "it leaves elements out (filter or flat_map), so that their numbers say nothing; "
                "leave them out before, when you make the list of elements"
            ) from None
        return dataset

    def _element(self, number: int) -> Batch:
        """The arrays of one window, checked."""
        if self._dataset is None:  # in another process
            self._dataset = self._open()
        element = self._dataset[number]
        arrays = element if isinstance(element, Mapping) else {"tokens": element}
        if "tokens" not in arrays or not arrays.keys() <= TYPES.keys():
            raise self._wrong(
                f"element {number} has {', '.join(map(str, arrays)) or 'nothing'}; it needs "
                "tokens, and may have mask, segment_ids and positions"
            )
        if self.types and arrays.keys() != self.types.keys():
            raise self._wrong(
                f"element {number} has {', '.join(arrays)}, and element 0 {', '.join(self.types)}"
            )
        found = {name: np.asarray(arrays[name]) for name in TYPES if name in arrays}
        for name, array in found.items():
            if array.shape != (self.length + 1,):
                raise self._wrong(
                    f"{name} of element {number} has the shape {list(array.shape)}, not "
                    f"[{self.length + 1}] (model.max_seq_len + 1)"
                )
            is_mask = name == "mask"
            if array.dtype.kind not in ("iubf" if is_mask else "iub"):
                wanted = "booleans or weights" if is_mask else "integers"
                raise self._wrong(f"{name} of element {number} are {array.dtype}, not {wanted}")
        for name, last, rule in (
            ("tokens", self.vocab_size - 1, "below model.vocab_size"),
            ("positions", self.length - 1, "below model.max_seq_len"),
            ("mask", 1, "which weights a token's loss"),
        ):
            values = found.get(name, np.zeros(1, np.int32))
            if name == "positions":
                values = values[: self.length]  # the last one is that of a target alone
            outside = values[~((values >= 0) & (values <= last))]  # also NaN
            if outside.size:
                raise self._wrong(
                    f"{name} of element {number} hold {outside[0]}, which is not in [0, {last}], "
                    f"{rule}"
                )
        types = self.types or dict(TYPES)
        if "mask" in found and found["mask"].dtype.kind == "f":
            if types["mask"] is np.bool and self.types:
                raise self._wrong(
                    f"the mask of element {number} are weights, and that of element 0 is not; "
                    "return float32 from all"
                )
            types["mask"] = np.float32
        return {name: array.astype(types[name]) for name, array in found.items()}
