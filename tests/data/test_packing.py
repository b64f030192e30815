"""Windows that know where their documents begin: segments, and the plan of best fit."""

import dataclasses
import hashlib

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from tiny import MODEL
from token_directories import write_shards

from maxmars.config import PythonSourcesConfig, TokenShardsConfig
from maxmars.data.batches import open_data
from maxmars.data.formats import open_split
from maxmars.data.metadata import DocumentStarts, read_metadata, write_metadata
from maxmars.data.packing import (
    best_fit,
    plan_best_fit,
    read_plan,
    segments_and_positions,
    write_plans,
)

END = 256


def test_segments_and_positions():
    arrays = segments_and_positions(np.array([[0, 0, 1, 1, 0], [1, 0, 0, 0, 1]], bool))
    assert arrays["segment_ids"].tolist() == [[0, 0, 1, 2, 2], [1, 1, 1, 1, 2]]
    assert arrays["positions"].tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 0]]
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}


def one_by_one(sizes, capacity):
    """Best fit decreasing as in a textbook: how full each bin is."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fits = [room for room in rooms if room >= size]
        if fits:
            rooms[rooms.index(min(fits))] -= size
        else:
            rooms.append(capacity - size)
    return sorted(capacity - room for room in rooms)


settings = hypothesis.settings(max_examples=60, deadline=None, database=None, derandomize=True)


@settings
@given(
    st.integers(2, 60).flatmap(
        lambda capacity: st.tuples(
            st.just(capacity), st.lists(st.integers(1, capacity), min_size=1, max_size=300)
        )
    )
)
def test_bins_are_as_full_as_those_of_best_fit_decreasing(items):
    capacity, sizes = items[0], np.array(items[1])
    bins, count = best_fit(sizes, capacity)
    loads = np.bincount(bins, weights=sizes, minlength=count)
    assert sorted(loads) == one_by_one(sizes, capacity)


@settings
@given(st.integers(2, 80), st.lists(st.integers(1, 60), min_size=1, max_size=100).map(np.array))
def test_every_token_is_predicted_once(length, sizes):
    """The sizes of the documents are with the token that ends each."""
    starts = np.cumsum(sizes) - sizes
    plan = plan_best_fit(starts, int(sizes.sum()), length)
    predicted = np.zeros(sizes.sum(), int)
    for window in range(len(plan)):
        pieces = slice(*plan.windows[window : window + 2])
        assert 0 < np.abs(plan.lengths[pieces]).sum() <= length
        for start, size in zip(plan.starts[pieces], plan.lengths[pieces], strict=True):
            predicted[start + (size < 0) : start + abs(size)] += 1
            document = np.searchsorted(starts, start, "right") - 1
            assert start + abs(size) <= starts[document] + sizes[document]
            assert (size > 0) == (start == starts[document])
            if sizes[document] <= length:
                assert size == sizes[document]
    assert np.all(predicted == 1)
    assert len(plan.starts) == plan.windows[-1]


def test_windows_of_many_documents_are_full():
    sizes = np.random.default_rng(0).lognormal(6, 1, 20_000).astype(int) + 1
    plan = plan_best_fit(np.cumsum(sizes) - sizes, int(sizes.sum()), 1024)
    assert plan.fill > 0.999
    first, last = (plan.starts[plan.windows[:-1]][ends] for ends in (slice(100), slice(-100, None)))
    assert abs(first.mean() / last.mean() - 1) < 0.5  # in random order, not from the longest on


# --- directories ---------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    """300 documents of up to 40 tokens, in token shards."""
    rng = np.random.default_rng(0)
    documents = [np.append(rng.integers(0, 256, n), END) for n in rng.integers(0, 40, 300)]
    stream = np.concatenate(documents)
    path = tmp_path / "tokens"
    metadata = write_shards(path, stream, vocab_size=257)
    sizes = np.array([len(document) for document in documents])
    starts = (np.cumsum(sizes) - sizes).astype("<u8").tobytes()
    (path / "train_documents.bin").write_bytes(starts)
    of_starts = DocumentStarts(
        file="train_documents.bin", count=300, sha256=hashlib.sha256(starts).hexdigest()
    )
    train = dataclasses.replace(metadata.splits["train"], documents=of_starts)
    write_metadata(path, dataclasses.replace(metadata, splits={"train": train}))
    return path


def windows(directory, packing):
    """All windows of a directory in order, as one batch."""
    config = TokenShardsConfig(path=str(directory), packing=packing, order="sequential")
    tokens = open_data(config, "train", model=MODEL)
    return tokens.read(np.arange(len(tokens)))


def documents_of(row):
    """The tokens of each segment of a row."""
    return np.split(row["tokens"], np.flatnonzero(np.diff(row["segment_ids"])) + 1)


def test_split_windows_tell_their_documents_apart(directory):
    batch = windows(directory, "split")
    plain = windows(directory, "none")
    assert set(batch) == {"tokens", "segment_ids", "positions"}
    np.testing.assert_array_equal(batch["tokens"], plain["tokens"])
    for i, tokens in enumerate(batch["tokens"]):
        segments = documents_of({name: array[i] for name, array in batch.items()})
        assert all(END not in segment[1:] for segment in segments)
        assert all(segment[0] == END for segment in segments[1:])
        positions = np.concatenate([np.arange(len(segment)) for segment in segments])
        np.testing.assert_array_equal(batch["positions"][i], positions)
        assert len(segments) - (tokens[0] != END) == np.sum(tokens == END)


def test_best_fit_windows_hold_whole_documents(directory):
    plan = write_plans(directory, MODEL.max_seq_len)["train"]
    batch = windows(directory, "best_fit")
    assert set(batch) == {"tokens", "segment_ids", "positions", "mask"}
    assert len(batch["tokens"]) == len(plan)
    stream = open_split(directory, "train")
    stream = stream.read(0, stream.num_tokens)
    # Every token is predicted once, each from the document that it is of.
    counts = np.bincount(batch["tokens"][batch["mask"]], minlength=257)
    np.testing.assert_array_equal(counts, np.bincount(stream, minlength=257))
    pairs = batch["segment_ids"][:, 1:] == batch["segment_ids"][:, :-1]
    pairs |= batch["tokens"][:, 1:] == END
    assert np.all(pairs | ~batch["mask"][:, 1:])
    # A window begins with the end-of-text token, as generated text does.
    assert np.all(batch["tokens"][:, 0] == END)
    assert not batch["mask"][:, 0].any()


def test_the_digest_of_the_data_tells_plans_apart(directory):
    write_plans(directory, MODEL.max_seq_len)
    digests = [
        open_data(
            TokenShardsConfig(path=str(directory), packing=packing), "train", model=MODEL
        ).digest()
        for packing in ("none", "split", "best_fit")
    ]
    assert digests[0] == digests[1] != digests[2]


def test_clear_errors(directory, tmp_path):
    stream = open_split(directory, "train")
    with refused(FileNotFoundError, directory, "--pack best_fit --pack-length 16"):
        read_plan(stream, 16)
    write_plans(directory, 16)
    file = directory / "train_best_fit_16.json"
    whole = file.read_bytes()
    for content in (b"", whole[:50], b"\xff", b"[]", whole.replace(b"num_w", b"num_v")):
        file.write_bytes(content)
        with refused(ValueError, file):
            read_plan(stream, 16)
    file.write_bytes(whole)
    pieces = file.with_suffix(".bin")
    whole = pieces.read_bytes()
    pieces.write_bytes(whole[:-1])
    with refused(ValueError, pieces, len(whole) - 1):
        windows(directory, "best_fit")
    size = len(whole)
    for content in (bytes(size), b"\xff" * size, np.random.default_rng(0).bytes(size)):
        pieces.write_bytes(content)
        with refused(ValueError, pieces):
            windows(directory, "best_fit")
    metadata = read_metadata(directory)
    sha256 = metadata.splits["train"].documents.sha256
    text = (directory / "meta.json").read_text()
    (directory / "meta.json").write_text(text.replace(sha256, "0" * 64))
    with refused(ValueError, file):
        read_plan(open_split(directory, "train"), 16)
    with refused(ValueError, directory / "train_documents.bin"):
        write_plans(directory, 16)
    write_shards(tmp_path / "old", np.arange(200))
    with refused(ValueError, tmp_path / "old"):
        write_plans(tmp_path / "old", 16)
    with refused(ValueError, "--pack-length 1"):
        write_plans(directory, 1)
    with refused(ValueError, "order=random_windows"):
        TokenShardsConfig(path="x", packing="best_fit", order="random_windows")
    with refused(ValueError, "--pack best_fit"):
        PythonSourcesConfig(packing="best_fit")
