import pickle

import numpy as np
import pytest
from token_directories import write_shards

from maxmars.data.streams import TokenShards, TokenStream

STREAM = np.arange(1000, 1100)  # above 255, so that the order of bytes shows


@pytest.fixture
def directory(tmp_path):
    write_shards(tmp_path / "tokens", STREAM)
    return tmp_path / "tokens"


@pytest.mark.parametrize("sizes", [(100,), (30, 1, 45, 24), (50, 50), (1,) * 100])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_read_crosses_shards(tmp_path, sizes, dtype):
    write_shards(tmp_path / "tokens", STREAM, sizes=sizes, dtype=dtype)
    shards = TokenShards(tmp_path / "tokens", "train")
    assert isinstance(shards, TokenStream)
    assert (shards.num_tokens, shards.vocab_size, shards.tokenizer) == (100, 2000, "byte")
    for start in range(0, 101, 3):
        for length in range(101 - start):
            tokens = shards.read(start, length)
            assert tokens.dtype == np.int32
            assert np.array_equal(tokens, STREAM[start : start + length])


@pytest.mark.parametrize(("start", "length"), [(-1, 5), (96, 5), (100, 1), (0, -1)])
def test_read_outside(directory, start, length):
    with pytest.raises(ValueError, match="outside the 100 tokens of split 'train'"):
        TokenShards(directory, "train").read(start, length)


def test_large_ids(tmp_path):
    stream = np.array([0, 65_535, 65_536, 2**31 - 1])
    write_shards(tmp_path / "tokens", stream, sizes=(3, 1), dtype="uint32", vocab_size=2**31)
    assert TokenShards(tmp_path / "tokens", "train").read(0, 4).tolist() == stream.tolist()


def test_pickle_carries_no_maps(directory):
    shards = TokenShards(directory, "train")
    before = len(pickle.dumps(shards))
    shards.read(0, 100)
    assert len(pickle.dumps(shards)) == before
    copy = pickle.loads(pickle.dumps(shards))
    assert np.array_equal(copy.read(0, 100), STREAM)


def test_missing_split(directory):
    with pytest.raises(ValueError, match="has no split 'val', only train"):
        TokenShards(directory, "val")


def test_truncated_shard(directory):
    path = directory / "train_00002.bin"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"train_00002\.bin has 87 bytes, but meta\.json says 90"):
        TokenShards(directory, "train")


def test_missing_shard(directory):
    (directory / "train_00001.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"train_00001\.bin is missing"):
        TokenShards(directory, "train")


def test_verify(directory):
    shards = TokenShards(directory, "train")
    shards.verify()
    path = directory / "train_00002.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"train_00002\.bin does not match its checksum"):
        TokenShards(directory, "train").verify()


def test_an_id_outside_the_vocabulary_is_named(tmp_path):
    write_shards(tmp_path / "tokens", STREAM, vocab_size=1099)
    shards = TokenShards(tmp_path / "tokens", "train")
    assert shards.read(0, 99).tolist() == STREAM[:99].tolist()
    with pytest.raises(ValueError, match=r"holds the token id 1099, but .* 'byte' has 1099 ids"):
        shards.read(0, 100)


def test_an_id_of_32_bits_is_not_taken_for_a_small_one(tmp_path):
    stream = np.array([1, 2**32 - 1])
    write_shards(tmp_path / "tokens", stream, sizes=(2,), dtype="uint32")
    with pytest.raises(ValueError, match=f"holds the token id {2**32 - 1}"):
        TokenShards(tmp_path / "tokens", "train").read(0, 2)
