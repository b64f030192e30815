import itertools

import numpy as np
import pytest
from refusals import refused
from token_directories import write_shards

from maxmars.data.sampling import (
    Interleaving,
    SharesByWeight,
    training_numbers,
    validation_numbers,
)
from maxmars.data.token_files import TokenShards
from maxmars.data.windows import TokenWindows

STREAM = np.arange(1000, 1100)


@pytest.fixture
def stream(tmp_path):
    write_shards(tmp_path / "tokens", STREAM)
    return TokenShards(tmp_path / "tokens", "train")


def first(dataset, count):
    """The first elements of a dataset."""
    return [dataset[i] for i in range(count)]


@pytest.mark.parametrize("length", [1, 7, 33, 98, 99])
def test_windows(stream, length):
    windows = TokenWindows(stream, length)
    expected = [STREAM[i : i + length + 1] for i in range(0, 100 - length, length)]
    assert len(windows) == len(expected)
    found = windows.read(np.arange(len(windows)))["tokens"]
    assert np.array_equal(found, expected)
    targets = found[:, 1:].ravel()
    assert len(np.unique(targets)) == len(targets)  # each token is predicted once
    at_every_token = TokenWindows(stream, length, at_every_token=True)
    assert len(at_every_token) == 100 - length
    (last,) = at_every_token.read(np.array([99 - length]))["tokens"]
    assert np.array_equal(last, STREAM[99 - length :])


@pytest.mark.parametrize("at_every_token", [True, False])
def test_too_few_tokens_for_a_window(stream, at_every_token):
    with refused(ValueError, "100 tokens", "100 + 1"):
        TokenWindows(stream, 100, at_every_token=at_every_token)


# The starts of seed 7's first windows of 9 tokens among 100, and of one far away.
STARTS = [79, 7, 1, 40, 11]

# The first two epochs of 11 windows, by seed.
SHUFFLED = {
    0: [1, 2, 4, 5, 9, 7, 10, 6, 0, 3, 8, 9, 10, 1, 8, 2, 0, 3, 5, 4, 7, 6],
    7: [7, 9, 0, 8, 4, 2, 5, 6, 10, 1, 3, 6, 0, 4, 2, 7, 9, 1, 10, 8, 3, 5],
}


def order_of(*sizes, weights=(1.0,), seed=0, order="random_windows"):
    return training_numbers(sizes, weights, seed=seed, order=order)


def test_random_windows_are_pinned():
    numbers = order_of(91, seed=7)
    assert [numbers[i] for i in (0, 1, 2, 3, 10**12)] == STARTS


def test_shuffled_windows_are_pinned():
    for seed, expected in SHUFFLED.items():
        numbers = first(order_of(11, seed=seed, order="shuffled"), 22)
        assert numbers == expected
        assert sorted(numbers[:11]) == sorted(numbers[11:]) == list(range(11))


def test_random_windows_are_uniform_over_every_start():
    counts = np.bincount(first(order_of(3), 3000))
    assert len(counts) == 3
    assert np.all(np.abs(counts - 1000) < 4 * np.sqrt(3000 * 2 / 9))  # four standard deviations
    assert first(order_of(1), 5) == [0] * 5


def test_random_windows_of_other_seeds_and_indices_differ():
    starts = [first(order_of(91, seed=seed), 50) for seed in range(4)]
    for a, b in itertools.combinations(starts, 2):
        assert sum(one == other for one, other in zip(a, b, strict=True)) < 6
        assert sum(one == other for one, other in itertools.pairwise(a)) < 6


@pytest.mark.parametrize(
    "weights",
    [(1.0,), (0.7, 0.3), (1.0, 1.0), (0.1, 0.2, 0.7), (5.0, 1e-3, 2.5, 1 / 3), (1e-9, 1.0)],
)
def test_a_mixture_has_every_share_in_every_run(weights):
    interleaving = Interleaving(weights)
    shares = np.array(weights) / sum(weights)
    seen = [0] * len(weights)
    history = []
    for i in range(2000):
        part, position = interleaving.locate(i)
        assert position == seen[part]  # each part's examples in order, none left out
        assert interleaving.counts(i) == seen
        seen[part] += 1
        history.append(list(seen))
    counts = np.array([[0] * len(weights), *history])
    assert np.abs(counts - np.arange(2001)[:, None] * shares).max() <= (len(weights) - 1) / 2 + 1e-9
    for run in (1, 10, 333):
        found = counts[run:] - counts[:-run]
        assert np.abs(found - run * shares).max() <= len(weights) - 1 + 1e-9


def test_shares_are_exact_far_away():
    interleaving = Interleaving([0.7, 0.3])
    assert interleaving.counts(10**18) == [7 * 10**17, 3 * 10**17]
    located = [interleaving.locate(10**18 + i) for i in range(10)]
    assert [part for part, _ in located] == [interleaving.locate(i)[0] for i in range(10)]
    assert sum(part == 0 for part, _ in located) == 7


def test_a_mixture_changes_exactly_at_its_examples():
    """Each part goes on after its last example, in the new shares, however far away one asks."""
    stages = [(0, (0.7, 0.3, 0.0)), (10**9 + 1, (0.0, 0.5, 0.5)), (10**12, (0.1, 0.0, 0.9))]
    shares = SharesByWeight(stages[0][1], stages[1:])
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


def test_a_mixture_whose_weights_change_misses_and_repeats_nothing():
    shares = SharesByWeight((1.0, 0.0), [(7, (0.5, 0.5)), (20, (0.0, 1.0)), (40, (0.3, 0.7))])
    seen = [0, 0]
    for index in range(200):
        part, position = shares[index]
        assert position == seen[part]
        seen[part] += 1
        if index in (6, 19, 39):
            assert seen == {6: [7, 0], 19: [14, 6], 39: [14, 26]}[index]


SIZES = (3, 15, 30)
ENDS = np.cumsum(SIZES)  # the windows of all parts are numbered one part after the other


def test_each_part_of_a_mixture_runs_through_its_own_epochs():
    numbers = first(order_of(*SIZES, weights=(0.5, 0.3, 0.2), seed=3, order="shuffled"), 300)
    for part, count in enumerate((150, 90, 60)):
        size, end = SIZES[part], ENDS[part]
        windows = [number for number in numbers if end - size <= number < end]
        assert len(windows) == count
        epochs = [windows[i : i + size] for i in range(0, count - size + 1, size)]
        assert len(epochs) >= 2
        for epoch in epochs:
            assert len(set(epoch)) == size  # each window once
        assert size < 10 or epochs[0] != epochs[1]


def test_parts_of_the_same_size_have_orders_of_their_own():
    numbers = first(order_of(30, 30, weights=(1.0, 1.0), seed=3, order="shuffled"), 60)
    ours, theirs = numbers[::2], [number - 30 for number in numbers[1::2]]
    assert sorted(ours) == sorted(theirs)
    assert ours != theirs


@pytest.mark.parametrize("order", ["shuffled", "sequential", "random_windows"])
def test_a_mixture_seeks(order):
    options = {"weights": (0.2, 0.3, 0.5), "seed": 1, "order": order}
    forwards = first(order_of(*SIZES, **options), 100)
    numbers = order_of(*SIZES, **options)
    assert [numbers[i] for i in reversed(range(100))] == forwards[::-1]
    assert 0 <= numbers[10**12] < sum(SIZES)


def test_validation_windows_of_a_mixture_end_before_a_part_repeats():
    weights = [0.25, 0.5, 0.25]
    numbers = validation_numbers(SIZES, weights)
    found = first(numbers, len(numbers))
    assert len(set(found)) == len(found)
    counts = np.bincount(np.searchsorted(ENDS, found, "right"))
    assert counts[0] == 3
    assert Interleaving(weights).counts(len(numbers)) == counts.tolist()
    assert Interleaving(weights).counts(len(numbers) + 1)[0] == 4
