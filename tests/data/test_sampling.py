import itertools

import numpy as np
import pytest
from refusals import refused
from token_directories import write_shards

from maxmars.data.sampling import (
    Interleaving,
    SharesByWeight,
    num_windows,
    read_places,
    training_examples,
    validation_examples,
)
from maxmars.data.token_files import TokenShards

STREAM = np.arange(1000, 1100)


@pytest.fixture
def stream(tmp_path):
    write_shards(tmp_path / "tokens", STREAM)
    return TokenShards(tmp_path / "tokens", "train")


@pytest.fixture
def streams(tmp_path):
    """Streams of 13, 61 and 121 tokens whose ids tell them apart."""
    for i, num_tokens in enumerate((13, 61, 121)):
        write_shards(tmp_path / str(i), 1000 * i + np.arange(num_tokens), vocab_size=3000)
    return [TokenShards(tmp_path / str(i), "train") for i in range(3)]


def examples_of(stream, length, *, seed=0, order="shuffled"):
    return training_examples([stream], [1.0], length=length, seed=seed, order=order)


def tokens_of(examples, numbers):
    """The tokens of some examples, [numbers, window], read at once."""
    return read_places([examples[i] for i in numbers])["tokens"]


@pytest.mark.parametrize("length", [1, 7, 33, 98, 99])
def test_windows(stream, length):
    windows = validation_examples([stream], [1.0], length)
    expected = [STREAM[i : i + length + 1] for i in range(0, 100 - length, length)]
    assert len(windows) == num_windows(stream, length) == len(expected)
    found = tokens_of(windows, range(len(windows)))
    assert np.array_equal(found, expected)
    targets = found[:, 1:].ravel()
    assert len(np.unique(targets)) == len(targets)  # each token is predicted once


@pytest.mark.parametrize("order", ["shuffled", "sequential", "random_windows"])
def test_too_few_tokens_for_a_window(stream, order):
    with refused(ValueError, "100 tokens", "100 + 1"):
        examples_of(stream, 100, order=order)


# The starts of seed 7's first windows of 9 tokens among 100, and of one far away.
STARTS = [79, 7, 1, 40, 11]

# The first two epochs of 11 windows, by seed.
SHUFFLED = {
    0: [1, 2, 4, 5, 9, 7, 10, 6, 0, 3, 8, 9, 10, 1, 8, 2, 0, 3, 5, 4, 7, 6],
    7: [7, 9, 0, 8, 4, 2, 5, 6, 10, 1, 3, 6, 0, 4, 2, 7, 9, 1, 10, 8, 3, 5],
}


def test_random_windows_are_pinned(stream):
    windows = examples_of(stream, 9, seed=7, order="random_windows")
    assert [windows[i].start for i in (0, 1, 2, 3, 10**12)] == STARTS
    assert np.array_equal(windows[0].read(), STREAM[STARTS[0] : STARTS[0] + 10])


def test_shuffled_windows_are_pinned(stream):
    for seed, expected in SHUFFLED.items():
        examples = examples_of(stream, 9, seed=seed)
        numbers = [examples[i].start // 9 for i in range(22)]
        assert numbers == expected
        assert sorted(numbers[:11]) == sorted(numbers[11:]) == list(range(11))


def test_random_windows_are_uniform_over_every_start(stream):
    windows = examples_of(stream, 97, order="random_windows")  # starts 0, 1 and 2
    counts = np.bincount([windows[i].start for i in range(3000)])
    assert len(counts) == 3
    assert np.all(np.abs(counts - 1000) < 4 * np.sqrt(3000 * 2 / 9))  # four standard deviations
    only = examples_of(stream, 99, order="random_windows")
    assert [only[i].start for i in range(5)] == [0] * 5


def test_random_windows_of_other_seeds_and_indices_differ(stream):
    windows = [examples_of(stream, 9, seed=seed, order="random_windows") for seed in range(4)]
    starts = {(seed, i): windows[seed][i].start for seed in range(4) for i in range(50)}
    for a, b in itertools.combinations(range(4), 2):
        assert sum(starts[a, i] == starts[b, i] for i in range(50)) < 6
        assert sum(starts[a, i] == starts[a, i - 1] for i in range(1, 50)) < 6


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


def test_each_part_of_a_mixture_runs_through_its_own_epochs(streams):
    weights = [0.5, 0.3, 0.2]
    examples = training_examples(streams, weights, length=4, seed=3, order="shuffled")
    found = tokens_of(examples, range(300)).tolist()
    for part, count in enumerate((150, 90, 60)):
        windows = [w for w in found if w[0] // 1000 == part]
        assert len(windows) == count
        size = num_windows(streams[part], 4)
        epochs = [windows[i : i + size] for i in range(0, count - size + 1, size)]
        assert len(epochs) >= 2
        for epoch in epochs:
            assert len({w[0] for w in epoch}) == size  # each window once
        assert size < 10 or epochs[0] != epochs[1]


def test_parts_of_the_same_size_have_orders_of_their_own(streams):
    examples = training_examples(
        [streams[2], streams[2]], [1.0, 1.0], length=4, seed=3, order="shuffled"
    )
    firsts = [examples[i].start for i in range(60)]
    assert sorted(firsts[::2]) == sorted(firsts[1::2])
    assert firsts[::2] != firsts[1::2]


@pytest.mark.parametrize("order", ["shuffled", "sequential", "random_windows"])
def test_a_mixture_seeks(streams, order):
    options = {"length": 4, "seed": 1, "order": order}
    examples = training_examples(streams, [0.2, 0.3, 0.5], **options)
    forwards = [examples[i].read().tolist() for i in range(100)]
    examples = training_examples(streams, [0.2, 0.3, 0.5], **options)
    backwards = [examples[i].read().tolist() for i in reversed(range(100))]
    assert forwards == backwards[::-1]
    assert len(examples[10**12].read()) == 5


def test_validation_windows_of_a_mixture_end_before_a_part_repeats(streams):
    weights = [0.25, 0.5, 0.25]
    windows = validation_examples(streams, weights, 4)  # of 3, 15 and 30 windows
    firsts = tokens_of(windows, range(len(windows)))[:, 0].tolist()
    assert len(set(firsts)) == len(firsts)
    counts = np.bincount([first // 1000 for first in firsts])
    assert counts[0] == 3
    assert Interleaving(weights).counts(len(windows)) == counts.tolist()
    assert Interleaving(weights).counts(len(windows) + 1)[0] == 4
