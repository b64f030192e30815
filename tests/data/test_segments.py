"""Windows that know where their documents begin, so that attention stays within each."""

import numpy as np
import pytest
from tiny import MODEL
from token_directories import write_shards

from maxmars.config import TokenShardsConfig
from maxmars.data.batches import open_data
from maxmars.data.windows import segments_and_positions

END = 256


def test_segments_and_positions():
    arrays = segments_and_positions(np.array([[0, 0, 1, 1, 0], [1, 0, 0, 0, 1]], bool))
    assert arrays["segment_ids"].tolist() == [[0, 0, 1, 2, 2], [1, 1, 1, 1, 2]]
    assert arrays["positions"].tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 0]]
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}


@pytest.fixture
def opened(tmp_path):
    """Opens 300 documents of up to 40 tokens, by packing."""
    rng = np.random.default_rng(0)
    documents = [np.append(rng.integers(0, 256, n), END) for n in rng.integers(0, 40, 300)]
    write_shards(tmp_path / "tokens", np.concatenate(documents), vocab_size=257)

    def open_(packing):
        config = TokenShardsConfig(path=str(tmp_path / "tokens"), packing=packing)
        return open_data(config, "train", model=MODEL)

    return open_


def test_split_windows_tell_their_documents_apart(opened):
    split, plain = opened("split"), opened("none")
    assert split.digest() == plain.digest()  # the tokens are the same
    batch = split.read(np.arange(len(split)))
    assert set(batch) == {"tokens", "segment_ids", "positions"}
    np.testing.assert_array_equal(batch["tokens"], plain.read(np.arange(len(split)))["tokens"])
    for tokens, ids, positions in zip(*map(batch.get, batch), strict=True):
        segments = np.split(tokens, np.flatnonzero(np.diff(ids)) + 1)
        assert all(END not in segment[1:] for segment in segments)
        assert all(segment[0] == END for segment in segments[1:])
        expected = np.concatenate([np.arange(len(segment)) for segment in segments])
        np.testing.assert_array_equal(positions, expected)
        assert len(segments) - (tokens[0] != END) == np.sum(tokens == END)
