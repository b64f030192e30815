import json

import numpy as np
import pytest
from token_directories import write_shards

from maxmars.data.sources import read_metadata

STREAM = np.arange(1000, 1100)


@pytest.fixture
def directory(tmp_path):
    write_shards(tmp_path / "tokens", STREAM)
    return tmp_path / "tokens"


def test_metadata_round_trip(tmp_path):
    metadata = write_shards(tmp_path / "tokens", STREAM)
    assert read_metadata(tmp_path / "tokens") == metadata
    fields = json.loads((tmp_path / "tokens" / "meta.json").read_text())
    assert (fields["format"], fields["version"]) == ("maxmars-tokens", 2)
    assert "command" not in fields


def test_missing_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing does not exist; run `maxmars data prep"):
        read_metadata(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"has no meta\.json; run `maxmars data prepare"):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is of format 'other' version 2, but this maxmars reads"),
        ({"version": 1}, "version 1, but this maxmars reads 'maxmars-tokens' version 2"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"splits": 3}, "is damaged"),
        ({"splits": {"train": {}}}, "is damaged"),
        ({"unheard_of": 1}, "is damaged"),
        ({"vocab_size": "257"}, "vocab_size of the file is '257'"),
        ({"vocab_size": True}, "vocab_size of the file is 'True'"),
        ({"vocab_size": -1}, "vocab_size of the file is '-1'"),
        ({"vocab_size": 2.5}, "vocab_size of the file is"),
        ({"tokenizer": None}, "tokenizer of the file is 'None'"),
        ({"source": ["a"]}, "source of the file is"),
        ({"record_tokens": "9"}, "record_tokens of the file is '9'"),
        ({"splits": None}, "splits is no object"),
        ({"splits": []}, "splits is no object"),
        ({"splits": {"train": []}}, "train is no object"),
        ({"splits": {"train": {"shards": {}}}}, "the shards of train are no list"),
        ({"splits": {"train": {"shards": [1]}}}, "train is no object"),
        ({"splits": {"train": {"shards": [], "documents": 1}}}, "train is no object"),
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
        ({"file": 3}, "file of train is '3'"),
        ({"num_tokens": "30"}, "num_tokens of train is '30'"),
        ({"num_tokens": -30}, "num_tokens of train is '-30'"),
        ({"sha256": None}, "sha256 of train is 'None'"),
    ],
)
def test_damaged_shard_list(directory, change, message):
    path = directory / "meta.json"
    fields = json.loads(path.read_text())
    fields["splits"]["train"]["shards"][0] |= change
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        read_metadata(directory)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"null",
        b"3",
        b'"maxmars-tokens"',
        b'{"format": "maxmars-tokens"}',
        b"\xff\xfe",
        b"[" * 200_000,
    ],
)
def test_damaged_file(directory, content):
    (directory / "meta.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"meta\.json is no description of token shards; delete"):
        read_metadata(directory)


def test_a_directory_for_a_description(tmp_path):
    (tmp_path / "meta.json").mkdir()
    with pytest.raises(IsADirectoryError):
        read_metadata(tmp_path)


def test_a_file_for_a_directory(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(FileNotFoundError, match="file is no directory; run"):
        read_metadata(tmp_path / "file")
