import hashlib
import json
import pickle

import numpy as np
import pytest

from maxmars.data.sources import (
    LateStatus,
    Metadata,
    Shard,
    Split,
    TokenShards,
    TokenWindows,
    read_metadata,
    write_metadata,
)

STREAM = np.arange(1000, 1100)  # above 255, so that the order of bytes shows


def write_shards(directory, stream=STREAM, sizes=(30, 1, 45, 24), dtype="uint16"):
    """A split of shards of these sizes, written without `prepare`."""
    directory.mkdir()
    parts = np.split(stream, np.cumsum(sizes)[:-1])
    shards = []
    for i, part in enumerate(parts):
        data = part.astype("<u2" if dtype == "uint16" else "<u4").tobytes()
        (directory / f"train_{i:05d}.bin").write_bytes(data)
        shards.append(
            Shard(
                file=f"train_{i:05d}.bin",
                num_tokens=len(part),
                sha256=hashlib.sha256(data).hexdigest(),
            )
        )
    split = Split(num_tokens=len(stream), num_documents=1, shards=tuple(shards))
    metadata = Metadata(
        tokenizer="byte",
        tokenizer_digest="0" * 64,
        vocab_size=2000,
        dtype=dtype,
        splits={"train": split},
        source="a test",
    )
    write_metadata(directory, metadata)
    return metadata


@pytest.fixture
def directory(tmp_path):
    write_shards(tmp_path / "tokens")
    return tmp_path / "tokens"


def test_metadata_round_trip(tmp_path):
    metadata = write_shards(tmp_path / "tokens")
    assert read_metadata(tmp_path / "tokens") == metadata
    fields = json.loads((tmp_path / "tokens" / "meta.json").read_text())
    assert (fields["format"], fields["version"]) == ("maxmars-tokens", 2)
    assert "command" not in fields


@pytest.mark.parametrize("sizes", [(100,), (30, 1, 45, 24), (50, 50), (1,) * 100])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_read_crosses_shards(tmp_path, sizes, dtype):
    write_shards(tmp_path / "tokens", sizes=sizes, dtype=dtype)
    shards = TokenShards(tmp_path / "tokens", "train")
    assert (shards.num_tokens, shards.vocab_size, shards.tokenizer) == (100, 2000, "byte")
    for start in range(101):
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
    write_shards(tmp_path / "tokens", stream, (3, 1), "uint32")
    assert TokenShards(tmp_path / "tokens", "train").read(0, 4).tolist() == stream.tolist()


def test_pickle_carries_no_maps(directory):
    shards = TokenShards(directory, "train")
    before = len(pickle.dumps(shards))
    shards.read(0, 100)
    assert len(pickle.dumps(shards)) == before
    copy = pickle.loads(pickle.dumps(shards))
    assert np.array_equal(copy.read(0, 100), STREAM)


def test_missing_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing does not exist; run `maxmars data prep"):
        TokenShards(tmp_path / "nothing", "train")
    with pytest.raises(FileNotFoundError, match=r"has no meta\.json; run `maxmars data prepare"):
        TokenShards(tmp_path, "train")


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is of format 'other' version 2, but this maxmars reads"),
        ({"version": 1}, "version 1, but this maxmars reads 'maxmars-tokens' version 2"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"splits": 3}, "is damaged"),
        ({"splits": {"train": {}}}, "is damaged"),
        ({"unheard_of": 1}, "is damaged"),
    ],
)
def test_damaged_fields(directory, change, message):
    path = directory / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        read_metadata(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 31}, "do not add up"),
        ({"file": "../train_00000.bin"}, "outside the directory"),
    ],
)
def test_damaged_shard_list(directory, change, message):
    path = directory / "meta.json"
    fields = json.loads(path.read_text())
    fields["splits"]["train"]["shards"][0] |= change
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        read_metadata(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "maxmars-tokens"}'])
def test_damaged_file(directory, text):
    (directory / "meta.json").write_text(text)
    with pytest.raises(ValueError, match="no description of token shards"):
        read_metadata(directory)


@pytest.mark.parametrize("length", [1, 7, 33, 98, 99])
def test_windows(directory, length):
    windows = TokenWindows(TokenShards(directory, "train"), length)
    expected = [STREAM[i : i + length + 1] for i in range(0, 100 - length, length)]
    assert len(windows) == len(expected)
    for i, window in enumerate(expected):
        assert np.array_equal(windows[i], window)
    targets = np.concatenate([windows[i][1:] for i in range(len(windows))])
    assert len(np.unique(targets)) == len(targets)  # each token is predicted once


def test_too_few_tokens_for_a_window(directory):
    with pytest.raises(ValueError, match=r"has 100 tokens, too few for one window of 100 \+ 1"):
        TokenWindows(TokenShards(directory, "train"), 100)


def test_late_status_is_silent_when_quick(capfd):
    with LateStatus() as status:
        status.update("quick")
    assert capfd.readouterr() == ("", "")


def test_late_status_writes_to_stderr(monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with LateStatus(delay_s=0.0) as status:
        status.update("tokenised 12 MB")
        status.update("tokenised 13 MB")
    out, err = capfd.readouterr()
    assert out == ""
    assert "tokenised" in err
