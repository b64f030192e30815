import json

import numpy as np
import pytest
from refusals import refused
from token_directories import write_shards

from maxmars.data.sources import read_metadata

STREAM = np.arange(1000, 1100)
SHARD = {"file": "a.bin", "num_tokens": 30, "sha256": "0"}
SPLIT = {"num_tokens": 30, "num_documents": 1, "shards": [SHARD]}


@pytest.fixture
def directory(tmp_path):
    write_shards(tmp_path / "tokens", STREAM)
    return tmp_path / "tokens"


def test_metadata_round_trip(tmp_path):
    metadata = write_shards(tmp_path / "tokens", STREAM)
    assert read_metadata(tmp_path / "tokens") == metadata
    fields = json.loads((tmp_path / "tokens" / "meta.json").read_text())
    assert (fields["format"], fields["version"]) == ("maxmars-tokens", 3)
    assert "command" not in fields


@pytest.mark.parametrize(
    ("place", "named"), [("nothing", "nothing"), ("", "meta.json"), ("file", "file")]
)
def test_what_is_no_directory_of_tokens(tmp_path, place, named):
    (tmp_path / "file").write_text("text")
    with refused(FileNotFoundError, tmp_path / place, named, "maxmars data prepare SOURCE"):
        read_metadata(tmp_path / place)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "other"}, "'other'"),
        ({"version": 1}, "version 1"),
        ({"dtype": "float32"}, "float32"),
        ({"splits": 3}, "splits: 3"),
        ({"splits": {"train": {}}}, "splits: train: it lacks the field num_documents"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"vocab_size": "257"}, 'vocab_size: "257"'),
        ({"vocab_size": True}, "vocab_size: true"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"vocab_size": 2.5}, "vocab_size: 2.5"),
        ({"tokenizer": None}, "tokenizer: null"),
        ({"source": ["a"]}, 'source: ["a"]'),
        ({"splits": {"train": []}}, "train: []"),
        ({"splits": {"train": {"shards": {}}}}, "splits: "),
        ({"splits": {"train": SPLIT | {"shards": [1]}}}, "shards: 1"),
        ({"splits": {"train": SPLIT | {"documents": 1}}}, "documents: 1"),
        ({"splits": {"train": SPLIT | {"shards": [SHARD | {"file": "../a"}]}}}, "../a"),
        ({"splits": {"train": SPLIT | {"shards": [SHARD | {"num_tokens": 31}]}}}, "add up"),
        ({"splits": {"train": SPLIT | {"shards": [SHARD | {"num_tokens": -30}]}}}, "-30"),
        ({"splits": {"train": SPLIT | {"shards": [SHARD | {"sha256": None}]}}}, "sha256: null"),
    ],
)
def test_damaged_fields(directory, change, named):
    path = directory / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(ValueError, path, named):
        read_metadata(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b"3", b'"a"', b"\xff\xfe"])
def test_damaged_file(directory, content):
    (directory / "meta.json").write_bytes(content)
    with refused(ValueError, directory / "meta.json"):
        read_metadata(directory)


def test_a_directory_for_a_description(tmp_path):
    (tmp_path / "meta.json").mkdir()
    with pytest.raises(IsADirectoryError):
        read_metadata(tmp_path)
