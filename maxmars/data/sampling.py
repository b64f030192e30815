"""The order of training and validation examples, as Grain datasets of numbers of windows.

Every dataset here is a pure function of (seed, example index), in constant time: nothing is counted
up, so that a run may begin anywhere, and any process may read any row. An example stays a number
until those of a whole batch are read at once. The windows of a mixture's parts are numbered one
part after the other.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import grain
import numpy as np
from jaxtyping import Int64, Integer

from maxmars.config import Order
from maxmars.data.windows import Batch

ENDLESS = 1 << 60
"""Length of a dataset without end; Grain's `batch` overflows on the 2**63 - 1 of its `repeat`."""

# --- mixtures -------------------------------------------------------------------------------------


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


ReadWindows = Callable[[np.ndarray], Batch]
"""The arrays of windows by their numbers; see `DataSplit.read`."""

WeightChange = tuple[int, Sequence[float]]
"""The first example with other weights of a mixture, and these weights."""


class WeightedInterleave(grain.transforms.DatasetSelectionMap):
    """A mixture: part and position there of each example, exactly in proportion to the weights.

    From each of `changes` on, the examples are interleaved anew, and every part goes on with the
    example after its last one.

    Why not `MapDataset.mix`: it makes whole numbers of the weights, of which the smallest is 100,
    so that 0.7 : 0.3 becomes 233 : 100.
    """

    def __init__(
        self,
        weights: Sequence[float],
        changes: Sequence[WeightChange] = (),
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


# --- training and validation ---------------------------------------------------------------------


class IndexRange(grain.MapDataset[int]):
    """The numbers of a range in order; after the last one, they begin anew.

    Why not `MapDataset.range`: it takes 1.6 us more of the 10 us of an example, which is a tenth of
    the time that windows of 128 tokens take.
    """

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self._numbers, self._count = numbers, len(numbers)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._numbers[index % self._count]


class RandomIndices(grain.MapDataset[int]):
    """Endless numbers of a range, each drawn uniformly and with replacement.

    A draw is the first 64 bits of Philox4x64 with key `seed` and the index as counter, scaled to
    the range. NumPy guarantees that stream of bits, and 64 bits make the bias of the scaling less
    than one in 10^9 for up to 10^10 numbers.
    """

    def __init__(self, numbers: range, seed: int) -> None:
        super().__init__()
        self._numbers, self._seed = numbers, seed

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        bits = np.random.Philox(key=self._seed, counter=index).random_raw()
        return self._numbers.start + (bits * len(self._numbers) >> 64)


def training_numbers(
    sizes: Sequence[int],
    weights: Sequence[float],
    *,
    seed: int,
    order: Order,
    changes: Sequence[WeightChange] = (),
) -> grain.MapDataset[int]:
    """The number of the window of each example of training, without end.

    Of one part, unless `order` is `random_windows`, every run of `sizes[0]` examples from a
    multiple of it is one epoch: each window once. Each part of a mixture goes through epochs of its
    own, in orders of its own.

    Args:
      sizes: number of windows of each part.
      weights: of each part; see `Interleaving`.
      seed: of the orders.
      order: `random_windows` takes for granted that a window begins at every token.
      changes: of the weights; see `WeightedInterleave`.
    """
    if len(sizes) == 1:
        return _in_order(range(sizes[0]), seed, order)
    seeds = [_seed_of_part(seed, part) for part in range(len(sizes))]
    parts = [_in_order(*pair, order) for pair in zip(_ranges(sizes), seeds, strict=True)]
    return grain.MapDataset.select_from_datasets(parts, WeightedInterleave(weights, changes))


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(*pair) for pair in itertools.pairwise([0, *itertools.accumulate(sizes)])]


def _in_order(numbers: range, seed: int, order: Order) -> grain.MapDataset[int]:
    if order == "random_windows":
        return RandomIndices(numbers, seed)
    if order == "sequential":
        return IndexRange(numbers).repeat()
    # Not shuffle(seed=seed): epoch e of seed s would then be epoch 0 of seed s + e.
    return IndexRange(numbers).seed(seed).shuffle().repeat()


def _seed_of_part(seed: int, part: int) -> int:
    return int(np.random.SeedSequence([seed, part]).generate_state(1)[0])


def validation_numbers(sizes: Sequence[int], weights: Sequence[float]) -> grain.MapDataset[int]:
    """The numbers of the windows of validation in order; those of several parts interleaved.

    Of a mixture there are as many as the interleaving takes before it would need a window that a
    part does not have.
    """
    interleaving = Interleaving(weights)

    def too_many(num_examples: int) -> bool:
        counts = interleaving.counts(num_examples)
        return any(count > size for count, size in zip(counts, sizes, strict=True))

    # The counts grow with the number of examples, so the first number that is too many is bisected.
    count = bisect.bisect_left(range(sum(sizes) + 1), True, key=too_many) - 1
    return grain.MapDataset.select_from_datasets(
        [IndexRange(numbers) for numbers in _ranges(sizes)],
        WeightedInterleave(weights, num_examples=count),
    )


# --- the rows of a process ------------------------------------------------------------------------


class RowsOfProcess(grain.MapDataset[int]):
    """Of each step the examples that one process holds, step after step.

    Why not `grain.experimental.ElasticIterator`, which deals process p of n the rows p, p + n, ...:
    which rows a process needs is up to the mesh, and where the batch axes do not split over
    processes (`tensor` across hosts) several need the same.
    """

    def __init__(
        self, examples: grain.MapDataset[int], rows: Sequence[int], batch_size: int, start: int
    ) -> None:
        """See `process_batches`."""
        super().__init__(examples)
        self._examples, self._rows = examples, rows
        self._batch_size, self._start = batch_size, start

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        step, row = divmod(index, len(self._rows))
        return self._examples[self._start + step * self._batch_size + self._rows[row]]


def process_batches(
    examples: grain.MapDataset[int],
    read: ReadWindows,
    rows: Integer[np.ndarray, "microbatches rows"],
    batch_size: int,
    start: int = 0,
) -> grain.MapDataset[Batch]:
    """The rows of each step that one process holds, read at once.

    Args:
      examples: the number of the window of each; see `training_numbers`.
      read: of the windows.
      rows: row numbers in the global batch (see `sharding.local_rows`).
      batch_size: rows of the global batch.
      start: index of the example in row 0 of the first step.

    Returns:
      The batches by step, whose arrays are [microbatches, rows, length + 1].
    """
    of_process = RowsOfProcess(examples, rows.ravel().tolist(), batch_size, start)
    # Not batch(batch_fn=read): to a ValueError of that, Grain adds a hint about `filter`.
    numbers = of_process.batch(rows.size, batch_fn=np.array)
    return numbers.map(functools.partial(_read, read, rows.shape))


def _read(
    read: ReadWindows, shape: tuple[int, ...], numbers: Int64[np.ndarray, " windows"]
) -> Batch:
    return {name: array.reshape(*shape, -1) for name, array in read(numbers).items()}
