import itertools
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from token_directories import write_shards

from maxmars.data.formats import open_directory
from maxmars.data.sampling import (
    Interleaving,
    WeightedInterleave,
    training_numbers,
    validation_numbers,
)
from maxmars.data.windows import TokenWindows

STREAM = np.arange(1000, 1100)


@pytest.fixture
def stream(tmp_path):
    write_shards(tmp_path / "tokens", STREAM)
    return open_directory(tmp_path / "tokens").stream("train")


def first(dataset, count):
    """The first elements of a dataset."""
    return [dataset[i] for i in range(count)]


@pytest.mark.parametrize("length", [1, 7, 98])
def test_windows(stream, length):
    windows = TokenWindows(stream, length)
    expected = [STREAM[i : i + length + 1] for i in range(0, 100 - length, length)]
    assert len(windows) == len(expected)
    tokens = windows.read(np.arange(len(windows)))["tokens"]
    assert np.array_equal(tokens, expected)
    targets = tokens[:, 1:].ravel()
    assert len(np.unique(targets)) == len(targets)  # each token is predicted once
    at_every_token = TokenWindows(stream, length, stride=1)
    assert len(at_every_token) == 100 - length
    (last,) = at_every_token.read(np.array([99 - length]))["tokens"]
    assert np.array_equal(last, STREAM[99 - length :])
    for stride in (1, None):
        with refused(ValueError, "100 tokens", "100 + 1"):
            TokenWindows(stream, 100, stride=stride)


# The starts of seed 7's first windows of 9 tokens among 100, and of one far away.
STARTS = [79, 7, 1, 40, 11]

# The first two epochs of 11 windows, by seed.
SHUFFLED = {
    0: [1, 2, 4, 5, 9, 7, 10, 6, 0, 3, 8, 9, 10, 1, 8, 2, 0, 3, 5, 4, 7, 6],
    7: [7, 9, 0, 8, 4, 2, 5, 6, 10, 1, 3, 6, 0, 4, 2, 7, 9, 1, 10, 8, 3, 5],
}


def order_of(*sizes, weights=(1.0,), seed=0, order="random_windows"):
    return training_numbers(sizes, weights, seed=seed, order=order)


def test_orders_are_pinned():
    numbers = order_of(91, seed=7)
    assert [numbers[i] for i in (0, 1, 2, 3, 10**12)] == STARTS
    for seed, expected in SHUFFLED.items():
        numbers = first(order_of(11, seed=seed, order="shuffled"), 22)
        assert numbers == expected
        assert sorted(numbers[:11]) == sorted(numbers[11:]) == list(range(11))


def test_random_windows_are_uniform_over_every_start():
    counts = np.bincount(first(order_of(3), 3000))
    assert len(counts) == 3
    assert np.all(np.abs(counts - 1000) < 4 * np.sqrt(3000 * 2 / 9))  # four standard deviations
    assert first(order_of(1), 5) == [0] * 5


settings = hypothesis.settings(max_examples=50, deadline=None, database=None, derandomize=True)
some_weights = st.decimals(0, 10, places=9) | st.sampled_from([0, 1, 1 / 3, 0.7, 0.3, 0.1, 1e-9])


def weights_of(num_parts):
    """Weights of so many parts, not all of them 0."""
    return st.lists(some_weights.map(float), min_size=num_parts, max_size=num_parts).filter(any)


@settings
@hypothesis.example([1e-9, 1.0], 0)
@given(st.integers(1, 5).flatmap(weights_of), st.integers(0, 10**15))
def test_a_mixture_has_every_share_in_every_run(weights, begin):
    interleaving, exact = Interleaving(weights), [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    before = seen = interleaving.counts(begin)
    for i in range(begin, begin + 100):
        for count, first, share in zip(seen, before, shares, strict=True):
            assert abs(count - i * share) <= Fraction(len(weights) - 1, 2)
            assert abs(count - first - (i - begin) * share) <= len(weights) - 1
        part, position = interleaving.locate(i)
        assert position == seen[part]  # each part's examples in order, none left out
        seen = [count + (k == part) for k, count in enumerate(seen)]
        assert interleaving.counts(i + 1) == seen


def test_a_mixture_changes_exactly_at_its_examples():
    """Each part goes on after its last example, in the new shares, however far away one asks."""
    stages = [(0, (0.7, 0.3, 0.0)), (10**9 + 1, (0.0, 0.5, 0.5)), (10**12, (0.1, 0.0, 0.9))]
    shares = WeightedInterleave(stages[0][1], stages[1:])
    taken = np.zeros(3, np.int64)
    ends = [begin for begin, _ in stages[1:]] + [10**15]
    for (begin, weights), end in zip(stages, ends, strict=True):
        alone = Interleaving(weights)
        for index in [*range(begin, begin + 100), *range(end - 100, end)]:
            part, position = alone.locate(index - begin)
            assert weights[part] > 0
            assert shares[index] == (part, position + taken[part])
        taken += alone.counts(end - begin)
    assert taken.sum() == 10**15


some_sizes = st.lists(st.integers(1, 30), min_size=1, max_size=3)


@pytest.mark.seconds
@hypothesis.settings(settings, max_examples=8)  # Grain takes 1 ms to seek in a shuffled order
@given(
    some_sizes.flatmap(lambda sizes: st.tuples(st.just(sizes), weights_of(len(sizes)))),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["shuffled", "sequential"]),
)
def test_each_part_runs_through_its_own_epochs(mixture, seed, order):
    sizes, weights = mixture
    numbers = first(order_of(*sizes, weights=weights, seed=seed, order=order), 100)
    for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
        windows = [number for number in numbers if end - size <= number < end]
        for epoch in (windows[i : i + size] for i in range(0, len(windows), size)):
            assert len(set(epoch)) == len(epoch)  # each window once
            assert order == "shuffled" or epoch == sorted(epoch)


@settings
@given(some_sizes.flatmap(lambda sizes: st.tuples(st.just(sizes), weights_of(len(sizes)))))
def test_validation_windows_of_a_mixture_end_before_a_part_repeats(mixture):
    sizes, weights = mixture
    numbers = validation_numbers(sizes, weights)
    windows = first(numbers, len(numbers))
    assert len(set(windows)) == len(windows)
    parts = np.searchsorted(np.cumsum(sizes), windows, "right")
    counts = np.bincount(parts, minlength=len(sizes)).tolist()
    assert Interleaving(weights).counts(len(numbers)) == counts
    more = Interleaving(weights).counts(len(numbers) + 1)
    assert any(count > size for count, size in zip(more, sizes, strict=True))
