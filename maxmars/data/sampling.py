"""The order of training and validation examples, as Grain datasets of numbers of windows.

Every dataset here is a pure function of (seed, example index), computed in constant time without
any state. So a run may begin anywhere, and any process may read any row. An example is only a
number until `process_batches` reads all rows of a batch at once. The windows of a mixture are
numbered one part after the other.
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
    """The part of a mixture that each example comes from, in proportion to the weights.

    Example i is of the first part if the rounded count `floor(i w / W + 1/2)` grows from i to i + 1
    (w: weight of the part, W: sum of the weights); the other parts share the rest by the same rule.
    So the first n examples hold `n w_k / W` of part k to within (K - 1) / 2 (K: number of parts),
    and any n in a row to within K - 1. The arithmetic is exact: a weight counts as the decimal
    number that the config shows, not as its binary float.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Only the ratios of the weights count; none is negative, and one is positive."""
        exact = [Fraction(str(weight)) for weight in weights]
        # `or 1` where all parts from k on have weight 0: the parts before k take every example.
        shares = [w / (sum(exact[k:]) or 1) for k, w in enumerate(exact[:-1])]
        self._shares = [(share.numerator, share.denominator) for share in shares]

    def locate(self, index: int) -> tuple[int, int]:
        """The part of example `index`, and the number of earlier examples of the same part."""
        for part, (numerator, denominator) in enumerate(self._shares):
            count = _rounded(index, numerator, denominator)
            if _rounded(index + 1, numerator, denominator) > count:
                return part, count
            index -= count
        return len(self._shares), index

    def counts(self, num_examples: int) -> list[int]:
        """Number of examples of each part among the first `num_examples`."""
        counts = []
        for numerator, denominator in self._shares:
            counts.append(_rounded(num_examples, numerator, denominator))
            num_examples -= counts[-1]
        return [*counts, num_examples]


def _rounded(number: int, numerator: int, denominator: int) -> int:
    return (2 * number * numerator + denominator) // (2 * denominator)


ReadWindows = Callable[[np.ndarray], Batch]
"""From the numbers of windows to their arrays; see `DataSplit.read`."""

WeightChange = tuple[int, Sequence[float]]
"""The example from which a mixture has new weights, and these weights."""


class WeightedInterleave(grain.transforms.DatasetSelectionMap):
    """A mixture: from an example to its part, and its position in that part.

    At each change of weights the interleaving begins anew, and every part continues with the
    example after its last one.

    Why not `MapDataset.mix`: it scales the weights so that the smallest is 100, and rounds them, so
    that 0.7 : 0.3 becomes 233 : 100.
    """

    def __init__(
        self,
        weights: Sequence[float],
        changes: Sequence[WeightChange] = (),
        num_examples: int = ENDLESS,
    ) -> None:
        """Weights as in `Interleaving`; `changes` in the order of their examples."""
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
    """The numbers of a range in order; after the last, they begin again.

    Why not `MapDataset.range`: it takes 1.6 us more per example, where reading a window of 128
    tokens takes 10 us in all.
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
    """Endless draws from a range, uniform and with replacement.

    A draw scales the first 64 bits of Philox4x64 (key: `seed`, counter: index) to the range. NumPy
    guarantees these bits in every version. The scaling is biased by less than one in 10^9 for up to
    10^10 numbers.
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

    An epoch, except with `random_windows`, is N examples that hold each of a part's N windows once.
    Each part of a mixture has epochs of its own, each in another order.

    Args:
      sizes: number of windows of each part.
      weights: of each part; see `Interleaving`.
      seed: of the shuffling, or of the random windows.
      order: with `random_windows` the caller numbers a window at every token.
      changes: of the weights; see `WeightedInterleave`.
    """
    if len(sizes) == 1:
        return _epochs(range(sizes[0]), seed, order)
    seeds = [_seed_of_part(seed, part) for part in range(len(sizes))]
    parts = [_epochs(*pair, order) for pair in zip(_ranges(sizes), seeds, strict=True)]
    return grain.MapDataset.select_from_datasets(parts, WeightedInterleave(weights, changes))


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(*pair) for pair in itertools.pairwise([0, *itertools.accumulate(sizes)])]


def _epochs(numbers: range, seed: int, order: Order) -> grain.MapDataset[int]:
    if order == "random_windows":
        return RandomIndices(numbers, seed)
    if order == "sequential":
        return IndexRange(numbers).repeat()
    # Not shuffle(seed=seed): epoch e of seed s would then be epoch 0 of seed s + e.
    return IndexRange(numbers).seed(seed).shuffle().repeat()


def _seed_of_part(seed: int, part: int) -> int:
    return int(np.random.SeedSequence([seed, part]).generate_state(1)[0])


def validation_numbers(sizes: Sequence[int], weights: Sequence[float]) -> grain.MapDataset[int]:
    """The numbers of the validation windows in order; the parts of a mixture are interleaved.

    A mixture ends before the first example that would need more windows than a part has.
    """
    interleaving = Interleaving(weights)

    def too_many(num_examples: int) -> bool:
        counts = interleaving.counts(num_examples)
        return any(count > size for count, size in zip(counts, sizes, strict=True))

    # Counts grow with the number of examples: bisection finds the first number that is too many.
    count = bisect.bisect_left(range(sum(sizes) + 1), True, key=too_many) - 1
    return grain.MapDataset.select_from_datasets(
        [IndexRange(numbers) for numbers in _ranges(sizes)],
        WeightedInterleave(weights, num_examples=count),
    )


# --- the rows of a process ------------------------------------------------------------------------


class RowsOfProcess(grain.MapDataset[int]):
    """The examples that one process holds of each step, step after step.

    Why not `grain.experimental.ElasticIterator`, which gives process p of n the rows p, p + n, ...:
    the mesh decides which rows a process needs, and with `tensor` across hosts several processes
    need the same rows.
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
      examples: the number of each example's window; see `training_numbers`.
      read: reads windows.
      rows: row numbers in the global batch (see `sharding.local_rows`).
      batch_size: rows of the global batch.
      start: index of the example in row 0 of the first step.

    Returns:
      The batches by step, with arrays [microbatches, rows, length + 1].
    """
    of_process = RowsOfProcess(examples, rows.ravel().tolist(), batch_size, start)
    # Not batch(batch_fn=read): to a ValueError of that, Grain adds a hint about `filter`.
    numbers = of_process.batch(rows.size, batch_fn=np.array)
    return numbers.map(functools.partial(_read, read, rows.shape))


def _read(
    read: ReadWindows, shape: tuple[int, ...], numbers: Int64[np.ndarray, " windows"]
) -> Batch:
    return {name: array.reshape(*shape, -1) for name, array in read(numbers).items()}
