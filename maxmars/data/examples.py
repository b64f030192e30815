"""Training examples by index: windows of a stream, in one of three orders, and mixtures of streams.

Everything here is a pure function of (seed, example index), in constant time: nothing is counted
up, so that a run may begin anywhere, and any process may read any row.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32

from maxmars.data.streams import TokenStream
from maxmars.data_config import Order


@dataclass(frozen=True)
class Place:
    """Where the tokens of an example are: `length` of them, from token `start` of a stream on."""

    stream: TokenStream
    start: int
    length: int

    def read(self) -> Int32[np.ndarray, " length"]:
        """The tokens.

        Raises:
          ValueError: some of them lie outside the vocabulary.
        """
        return self.stream.read(self.start, self.length)


class Examples(abc.ABC):
    """An endless sequence of windows."""

    @abc.abstractmethod
    def place(self, index: int) -> Place:
        """Where example `index`, from 0 on, is."""

    def __getitem__(self, index: int) -> Int32[np.ndarray, " window"]:
        """Example `index`."""
        return self.place(index).read()


class TokenWindows:
    """The non-overlapping windows of a stream, by index.

    Window i is the `length` tokens from `i * length` on and the one after them: inputs are
    `window[:-1]`, targets `window[1:]`, so each token but the first is predicted once.

    Raises:
      ValueError: the stream is too short for one window.
    """

    def __init__(self, stream: TokenStream, length: int) -> None:
        """Windows of `length` + 1 tokens over `stream`."""
        self._stream = stream
        self._length = length
        if len(self) < 1:
            raise ValueError(
                f"split {stream.split!r} of {stream.directory} has {stream.num_tokens} tokens, too "
                f"few for one window of {length} + 1; prepare more text or lower model.max_seq_len."
            )

    def __len__(self) -> int:
        """Number of windows."""
        return (self._stream.num_tokens - 1) // self._length

    def place(self, index: int) -> Place:
        """Where window `index`, which must lie in [0, len), is."""
        return Place(self._stream, index * self._length, self._length + 1)

    def __getitem__(self, index: int) -> Int32[np.ndarray, " window"]:
        """Window `index`, which must lie in [0, len)."""
        return self.place(index).read()


class OrderedWindows(Examples):
    """Each window once an epoch, in the order of the stream or in a new one each time."""

    def __init__(self, stream: TokenStream, length: int, *, shuffle_seed: int | None) -> None:
        """Windows of `length` + 1 tokens over `stream`; without a seed, in its order.

        Raises:
          ValueError: the stream is too short for one window.
        """
        self._windows = TokenWindows(stream, length)
        numbers = grain.MapDataset.range(len(self._windows))
        if shuffle_seed is not None:
            # Not shuffle(seed=seed): epoch e of seed s would then be epoch 0 of seed s + e.
            numbers = numbers.seed(shuffle_seed).shuffle()
        self._numbers: Any = numbers.repeat()

    def place(self, index: int) -> Place:
        """Where example `index` is."""
        return self._windows.place(int(self._numbers[index]))


class RandomWindows(Examples):
    """Windows that start at uniformly random tokens, with replacement, as in nanoGPT.

    The start of window i is the first 64 bits of Philox4x64 with key `seed` and counter i, scaled
    to the number of starts. NumPy guarantees that stream of bits, and 64 bits make the bias of the
    scaling less than one in 10^9 for up to 10^10 tokens.
    """

    def __init__(self, stream: TokenStream, length: int, seed: int) -> None:
        """Windows of `length` + 1 tokens over `stream`."""
        self._stream = stream
        self._length = length
        self._seed = seed

    def place(self, index: int) -> Place:
        """Where window `index`, any integer from 0 on, is."""
        bits = np.random.Philox(key=self._seed, counter=index).random_raw()
        start = bits * (self._stream.num_tokens - self._length) >> 64
        return Place(self._stream, start, self._length + 1)


class Interleaving:
    """Which part of a mixture each example comes from, in proportion to the weights.

    The first part is given example i when the rounded count `floor(i w / W + 1/2)` grows there; the
    parts after it share the rest by the same rule. So the first n examples hold `n w_k / W` of part
    k to within (K - 1) / 2 (K: number of parts), and any n in a row to within K - 1. Weights are
    taken as the decimal numbers that they are written as, and the arithmetic is exact.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Weights are positive; only their ratios count."""
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [w / sum(exact[k:]) for k, w in enumerate(exact[:-1])]
        self._shares = [(share.numerator, share.denominator) for share in shares]

    def locate(self, index: int) -> tuple[int, int]:
        """The part of example `index`, and how many examples before it are of the same part."""
        for part, (numerator, denominator) in enumerate(self._shares):
            count = _rounded(index, numerator, denominator)
            if _rounded(index + 1, numerator, denominator) > count:
                return part, count
            index -= count
        return len(self._shares), index

    def counts(self, num_examples: int) -> list[int]:
        """How many of the first examples are of each part."""
        counts = []
        for numerator, denominator in self._shares:
            counts.append(_rounded(num_examples, numerator, denominator))
            num_examples -= counts[-1]
        return [*counts, num_examples]


def _rounded(number: int, numerator: int, denominator: int) -> int:
    return (2 * number * numerator + denominator) // (2 * denominator)


class Mixture(Examples):
    """Examples of several sources, interleaved; each part's are its own examples 0, 1, 2, ..."""

    def __init__(self, parts: Sequence[Examples], weights: Sequence[float]) -> None:
        """As many weights as parts."""
        self._parts = parts
        self._interleaving = Interleaving(weights)

    def place(self, index: int) -> Place:
        """Where example `index` is."""
        part, position = self._interleaving.locate(index)
        return self._parts[part].place(position)


def training_examples(
    streams: Sequence[TokenStream],
    weights: Sequence[float],
    *,
    length: int,
    seed: int,
    order: Order,
) -> Examples:
    """The endless stream of training windows of `length` + 1 tokens, by example index.

    Of one stream, unless `order` is `random_windows`, every run of `len(TokenWindows)` examples
    from a multiple of it is one epoch: each window once. Each stream of a mixture goes through
    epochs of its own, in orders of its own.

    Raises:
      ValueError: a stream is too short for one window.
    """
    if len(streams) == 1:
        return _ordered(streams[0], length, seed, order)
    parts = [
        _ordered(stream, length, _seed_of_part(seed, k), order) for k, stream in enumerate(streams)
    ]
    return Mixture(parts, weights)


def _seed_of_part(seed: int, part: int) -> int:
    return int(np.random.SeedSequence([seed, part]).generate_state(1)[0])


def _ordered(stream: TokenStream, length: int, seed: int, order: Order) -> Examples:
    match order:
        case "random_windows":
            return RandomWindows(stream, length, seed)
        case "sequential":
            return OrderedWindows(stream, length, shuffle_seed=None)
        case "shuffled":
            return OrderedWindows(stream, length, shuffle_seed=seed)


class ValidationWindows:
    """The windows of validation splits in order; those of several streams interleaved.

    Of a mixture there are as many as the interleaving takes before it would need a window that a
    part does not have.

    Raises:
      ValueError: a stream is too short for one window.
    """

    def __init__(
        self, streams: Sequence[TokenStream], weights: Sequence[float], length: int
    ) -> None:
        """Windows of `length` + 1 tokens."""
        self._parts = [TokenWindows(stream, length) for stream in streams]
        self._interleaving = Interleaving(weights)
        self._len = self._count()

    def _count(self) -> int:
        sizes = [len(part) for part in self._parts]
        low, high = 0, sum(sizes)  # the counts grow with the number: bisect
        while low < high:
            middle = (low + high + 1) // 2
            counts = self._interleaving.counts(middle)
            if all(count <= size for count, size in zip(counts, sizes, strict=True)):
                low = middle
            else:
                high = middle - 1
        return low

    def __len__(self) -> int:
        """Number of windows."""
        return self._len

    def __getitem__(self, index: int) -> Int32[np.ndarray, " window"]:
        """Window `index`, which must lie in [0, len)."""
        part, position = self._interleaving.locate(index)
        return self._parts[part][position]
