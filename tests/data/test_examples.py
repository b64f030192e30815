import itertools

import numpy as np
import pytest
from token_directories import write_shards

from maxmars.data.examples import (
    Interleaving,
    RandomWindows,
    TokenWindows,
    ValidationWindows,
    training_examples,
)
from maxmars.data.streams import TokenShards

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


@pytest.mark.parametrize("length", [1, 7, 33, 98, 99])
def test_windows(stream, length):
    windows = TokenWindows(stream, length)
    expected = [STREAM[i : i + length + 1] for i in range(0, 100 - length, length)]
    assert len(windows) == len(expected)
    for i, window in enumerate(expected):
        assert np.array_equal(windows[i], window)
    targets = np.concatenate([windows[i][1:] for i in range(len(windows))])
    assert len(np.unique(targets)) == len(targets)  # each token is predicted once


def test_too_few_tokens_for_a_window(stream):
    with pytest.raises(ValueError, match=r"has 100 tokens, too few for one window of 100 \+ 1"):
        TokenWindows(stream, 100)


# The starts of seed 7's first windows of 9 tokens among 100, and of one far away.
STARTS = [79, 7, 1, 40, 11]

# The first two epochs of 11 windows, by seed.
SHUFFLED = {
    0: [1, 2, 4, 5, 9, 7, 10, 6, 0, 3, 8, 9, 10, 1, 8, 2, 0, 3, 5, 4, 7, 6],
    7: [7, 9, 0, 8, 4, 2, 5, 6, 10, 1, 3, 6, 0, 4, 2, 7, 9, 1, 10, 8, 3, 5],
}


def test_random_windows_are_pinned(stream):
    windows = RandomWindows(stream, 9, seed=7)
    starts = [int(windows[i][0]) - 1000 for i in (0, 1, 2, 3, 10**12)]
    assert starts == STARTS
    assert np.array_equal(windows[0], STREAM[starts[0] : starts[0] + 10])


def test_shuffled_windows_are_pinned(stream):
    options = {"length": 9, "order": "shuffled"}
    for seed, expected in SHUFFLED.items():
        examples = training_examples([stream], [1.0], seed=seed, **options)
        numbers = [examples.place(i).start // 9 for i in range(22)]
        assert numbers == expected
        assert np.array_equal(examples[3], examples.place(3).read())
        assert sorted(numbers[:11]) == sorted(numbers[11:]) == list(range(11))


def test_random_windows_are_uniform_over_every_start(stream):
    windows = RandomWindows(stream, 97, seed=0)  # starts 0, 1 and 2
    counts = np.bincount([int(windows[i][0]) - 1000 for i in range(3000)])
    assert len(counts) == 3
    assert np.all(np.abs(counts - 1000) < 4 * np.sqrt(3000 * 2 / 9))  # four standard deviations
    assert [RandomWindows(stream, 99, seed=0)[i][0] for i in range(5)] == [1000] * 5


def test_random_windows_of_other_seeds_and_indices_differ(stream):
    starts = {
        (seed, i): int(RandomWindows(stream, 9, seed)[i][0]) for seed in range(4) for i in range(50)
    }
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


def test_each_part_of_a_mixture_runs_through_its_own_epochs(streams):
    weights = [0.5, 0.3, 0.2]
    examples = training_examples(streams, weights, length=4, seed=3, order="shuffled")
    found = [examples[i].tolist() for i in range(300)]
    for part, count in enumerate((150, 90, 60)):
        windows = [w for w in found if w[0] // 1000 == part]
        assert len(windows) == count
        size = len(TokenWindows(streams[part], 4))
        epochs = [windows[i : i + size] for i in range(0, count - size + 1, size)]
        assert len(epochs) >= 2
        for epoch in epochs:
            assert len({w[0] for w in epoch}) == size  # each window once
        assert size < 10 or epochs[0] != epochs[1]


def test_parts_of_the_same_size_have_orders_of_their_own(streams):
    examples = training_examples(
        [streams[2], streams[2]], [1.0, 1.0], length=4, seed=3, order="shuffled"
    )
    firsts = [int(examples[i][0]) for i in range(60)]
    assert sorted(firsts[::2]) == sorted(firsts[1::2])
    assert firsts[::2] != firsts[1::2]


@pytest.mark.parametrize("order", ["shuffled", "sequential", "random_windows"])
def test_a_mixture_seeks(streams, order):
    options = {"length": 4, "seed": 1, "order": order}
    examples = training_examples(streams, [0.2, 0.3, 0.5], **options)
    forwards = [examples[i].tolist() for i in range(100)]
    examples = training_examples(streams, [0.2, 0.3, 0.5], **options)
    backwards = [examples[i].tolist() for i in reversed(range(100))]
    assert forwards == backwards[::-1]
    assert len(examples[10**12]) == 5


def test_validation_windows_of_one_stream_are_its_windows(stream):
    windows = ValidationWindows([stream], [1.0], 7)
    expected = TokenWindows(stream, 7)
    assert len(windows) == len(expected)
    assert all(np.array_equal(windows[i], expected[i]) for i in range(len(expected)))


def test_validation_windows_of_a_mixture_end_before_a_part_repeats(streams):
    weights = [0.25, 0.5, 0.25]
    windows = ValidationWindows(streams, weights, 4)  # of 3, 15 and 30 windows
    firsts = [int(windows[i][0]) for i in range(len(windows))]
    assert len(set(firsts)) == len(firsts)
    counts = np.bincount([first // 1000 for first in firsts])
    assert counts[0] == 3
    assert Interleaving(weights).counts(len(windows)) == counts.tolist()
    assert Interleaving(weights).counts(len(windows) + 1)[0] == 4
