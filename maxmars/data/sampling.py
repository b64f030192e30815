"""Training and validation examples by index, as Grain datasets of places in token streams.

Every dataset here is a pure function of (seed, example index), in constant time: nothing is counted
up, so that a run may begin anywhere, and any process may read any row. An element stays a `Place`
until a whole batch is read at once.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Int32, Integer

from maxmars.config import Order
from maxmars.data.own_data import TYPES, Batch, OwnData, Types
from maxmars.data.packing import PackedStream
from maxmars.data.token_files import TokenStream

Stream = TokenStream | PackedStream | OwnData

ENDLESS = 1 << 60
"""Length of a dataset without end; Grain's `batch` overflows on the 2**63 - 1 of its `repeat`."""


class Place(NamedTuple):
    """Where an example is: `length` tokens from token `start` of a stream on, or window `start` of
    own data."""

    stream: Stream
    start: int
    length: int

    def read(self) -> Int32[np.ndarray, " length"]:
        """The tokens.

        Raises:
          ValueError: some of them lie outside the vocabulary.
        """
        return self.stream.read(self.start, self.length)


TOKENS_ALONE: Types = {"tokens": TYPES["tokens"]}


def read_places(places: Sequence[Place], types: Types = TOKENS_ALONE) -> Batch:
    """The examples of a batch, each array [places, length], with one read of every stream.

    Args:
      places: where they are.
      types: of the arrays to read. What a stream does not have is filled in: all tokens count as
        targets, a window is one segment, and positions count from 0.

    Raises:
      ValueError: some tokens lie outside the vocabulary, or own data are not as they should be.
    """
    streams, starts, (length, *_) = zip(*places, strict=True)
    if len(types) == 1 and streams.count(streams[0]) == len(streams):
        return _arrays(streams[0].read_windows(np.array(starts), length))
    batch = {name: np.zeros((len(places), length), dtype) for name, dtype in types.items()}
    if "mask" in batch:
        batch["mask"][:] = 1
    if "positions" in batch:
        batch["positions"][:] = np.arange(length)
    for stream in dict.fromkeys(streams):
        rows = [row for row, other in enumerate(streams) if other is stream]
        found = _arrays(stream.read_windows(np.array(starts)[rows], length))
        for name, array in found.items():
            batch[name][rows] = array
    return batch


def _arrays(found: Batch | np.ndarray) -> Batch:
    return found if isinstance(found, dict) else {"tokens": found}


# --- windows of one stream -----------------------------------------------------------------------


def num_windows(stream: Stream, length: int) -> int:
    """Number of non-overlapping windows of a stream.

    Window i is the `length` tokens of a stream from `i * length` on and the one after them: inputs
    are `window[:-1]`, targets `window[1:]`, so each token but the first is predicted once.

    Raises:
      ValueError: the stream is too short for one window.
    """
    if isinstance(stream, OwnData):
        return len(stream)
    count = (stream.num_tokens - 1) // length
    if count < 1:
        raise ValueError(
            f"split {stream.split!r} of {stream.directory} has {stream.num_tokens} tokens, too "
            f"few for one window of {length} + 1; prepare more text or lower model.max_seq_len."
        )
    return count


class Windows(grain.MapDataset[Place]):
    """The windows of a stream by number; after the last one, they begin anew.

    Why not `MapDataset.range(n).map(...)`: of the 10 us that Grain took for an element, 3.5 were of
    the two datasets more, and windows of 128 tokens were read slower than by a plain loop.
    """

    def __init__(self, stream: Stream, length: int) -> None:
        """Find out how many windows there are; see `num_windows`."""
        super().__init__()
        self._count = num_windows(stream, length)
        self._stream, self._length = stream, length
        self._stride = 1 if isinstance(stream, OwnData) else length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return Place(self._stream, index % self._count * self._stride, self._length + 1)


class RandomWindows(grain.MapDataset[Place]):
    """Endless windows that each start at a uniformly random token, as in nanoGPT.

    The start is the first 64 bits of Philox4x64 with key `seed` and the number as counter, scaled
    to the number of starts. NumPy guarantees that stream of bits, and 64 bits make the bias of the
    scaling less than one in 10^9 for up to 10^10 tokens.
    """

    def __init__(self, stream: TokenStream | PackedStream, length: int, seed: int) -> None:
        """Check that there are enough tokens; see `num_windows`."""
        super().__init__()
        num_windows(stream, length)
        self._stream, self._length, self._seed = stream, length, seed
        self._num_starts = stream.num_tokens - length

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        bits = np.random.Philox(key=self._seed, counter=index).random_raw()
        return Place(self._stream, bits * self._num_starts >> 64, self._length + 1)


def _windows(stream: Stream, length: int, seed: int, order: Order) -> grain.MapDataset[Place]:
    """The endless windows of one stream in an order; see `training_examples`."""
    match order:
        case "shuffled":
            # Not shuffle(seed=seed): epoch e of seed s would then be epoch 0 of seed s + e.
            return Windows(stream, length).seed(seed).shuffle().repeat()
        case "sequential":
            return Windows(stream, length).repeat()
        case "random_windows":
            assert not isinstance(stream, OwnData)  # the config refuses it
            return RandomWindows(stream, length, seed)


# --- mixtures, and the rows of a process ---------------------------------------------------------


class Interleaving:
    """Which part of a mixture each example comes from, in proportion to the weights.

    The first part is given example i when the rounded count `floor(i w / W + 1/2)` grows there; the
    parts after it share the rest by the same rule. So the first n examples hold `n w_k / W` of part
    k to within (K - 1) / 2 (K: number of parts), and any n in a row to within K - 1. Weights are
    taken as the decimal numbers that they are written as, and the arithmetic is exact.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Weights are not negative, and one is positive; only their ratios count."""
        exact = [Fraction(str(weight)) for weight in weights]
        # Where the last parts have no weight, the one before them has taken all examples.
        shares = [w / (sum(exact[k:]) or 1) for k, w in enumerate(exact[:-1])]
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


Change = tuple[int, Sequence[float]]
"""The first example with other weights of a mixture, and these weights."""


class SharesByWeight(grain.transforms.DatasetSelectionMap):
    """A mixture: part and position there of each example, exactly in proportion to the weights.

    From each of `changes` on, the examples are interleaved anew, and every part goes on with the
    example after its last one.

    Why not `MapDataset.mix`: it makes whole numbers of the weights, of which the smallest is 100,
    so that 0.7 : 0.3 becomes 233 : 100.
    """

    def __init__(
        self,
        weights: Sequence[float],
        changes: Sequence[Change] = (),
        num_examples: int = ENDLESS,
    ) -> None:
        """See `Interleaving` for the weights; the changes are in the order of their examples."""
        self._num_examples = num_examples
        self._begins = [0]
        self._stages = [Interleaving(weights)]
        self._taken = [[0] * len(weights)]  # examples of each part before a stage
        for begin, changed in changes:
            counts = self._stages[-1].counts(begin - self._begins[-1])
            self._taken.append([a + b for a, b in zip(self._taken[-1], counts, strict=True)])
            self._begins.append(begin)
            self._stages.append(Interleaving(changed))

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> tuple[int, int]:
        stage = bisect.bisect_right(self._begins, index) - 1
        part, position = self._stages[stage].locate(index - self._begins[stage])
        return part, self._taken[stage][part] + position


def process_batches(
    examples: grain.MapDataset[Place],
    rows: Integer[np.ndarray, "microbatches rows"],
    batch_size: int,
    start: int = 0,
    types: Types = TOKENS_ALONE,
) -> grain.MapDataset[Batch]:
    """The rows of each step that one process holds, read at once.

    Why not `batch` over the rows as a dataset of their own: Grain would then go through two more
    datasets for each example, a fifth of all the time that windows of 128 tokens take. Why not
    `grain.experimental.ElasticIterator`, which deals process p of n the rows p, p + n, ...: which
    rows a process needs is up to the mesh, and where the batch axes do not split over processes
    (`tensor` across hosts) several need the same.

    Args:
      examples: see `training_examples`.
      rows: row numbers in the global batch (see `sharding.local_rows`).
      batch_size: rows of the global batch.
      start: index of the example in row 0 of the first step.
      types: of the arrays to read; see `read_places`.

    Returns:
      The batches by step, whose arrays are [microbatches, rows, length].
    """
    read = functools.partial(_read_step, examples, rows, batch_size, start, types)
    return grain.MapDataset.range(ENDLESS).map(read)


def _read_step(
    examples: grain.MapDataset[Place],
    rows: Integer[np.ndarray, "microbatches rows"],
    batch_size: int,
    start: int,
    types: Types,
    step: int,
) -> Batch:
    numbers = (start + step * batch_size + rows.ravel()).tolist()
    batch = read_places([examples[number] for number in numbers], types)
    return {name: array.reshape(*rows.shape, -1) for name, array in batch.items()}


# --- training and validation ---------------------------------------------------------------------


def training_examples(
    streams: Sequence[Stream],
    weights: Sequence[float],
    *,
    length: int,
    seed: int,
    order: Order,
    changes: Sequence[Change] = (),
) -> grain.MapDataset[Place]:
    """The endless dataset of training windows of `length` + 1 tokens.

    Of one stream, unless `order` is `random_windows`, every run of `num_windows` examples from a
    multiple of it is one epoch: each window once. Each stream of a mixture goes through epochs of
    its own, in orders of its own.

    Raises:
      ValueError: a stream is too short for one window.
    """
    if len(streams) == 1:
        return _windows(streams[0], length, seed, order)
    parts = [
        _windows(stream, length, _seed_of_part(seed, k), order) for k, stream in enumerate(streams)
    ]
    return grain.MapDataset.select_from_datasets(parts, SharesByWeight(weights, changes))


def _seed_of_part(seed: int, part: int) -> int:
    return int(np.random.SeedSequence([seed, part]).generate_state(1)[0])


def validation_examples(
    streams: Sequence[Stream], weights: Sequence[float], length: int
) -> grain.MapDataset[Place]:
    """The windows of validation splits in order; those of several streams interleaved.

    Of a mixture there are as many as the interleaving takes before it would need a window that a
    part does not have.

    Raises:
      ValueError: a stream is too short for one window.
    """
    parts = [Windows(stream, length) for stream in streams]
    interleaving = Interleaving(weights)

    def too_many(num_examples: int) -> bool:
        counts = interleaving.counts(num_examples)
        return any(count > size for count, size in zip(counts, map(len, parts), strict=True))

    # The counts grow with the number of examples, so the first number that is too many is bisected.
    count = bisect.bisect_left(range(sum(map(len, parts)) + 1), True, key=too_many) - 1
    return grain.MapDataset.select_from_datasets(parts, SharesByWeight(weights, num_examples=count))
