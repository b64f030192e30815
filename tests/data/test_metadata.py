import json

import numpy as np
import pytest
from refusals import refused
from token_directories import write_shards

from maxmars.data.metadata import read_metadata

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
    path = tmp_path / "tokens" / "meta.json"
    fields = json.loads(path.read_text())
    assert (fields["format"], fields["version"]) == ("maxmars-tokens", 3)
    assert "command" not in fields
    loss = {"characters": 200, "lost": 3, "example": "C"}
    path.write_text(json.dumps(fields | {"loss": loss}))
    assert "1.50% of 200 characters (such as 'C')" in str(read_metadata(tmp_path / "tokens").loss)


@pytest.mark.parametrize("name", ["nothing", "", "file"])
def test_what_is_no_directory_of_tokens(tmp_path, name):
    (tmp_path / "file").write_text("text")
    with refused(FileNotFoundError, tmp_path / name, "maxmars data prepare SOURCE"):
        read_metadata(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (b"", ""),
        (b"[]", ""),
        (b"\xff\xfe", ""),
        ({"format": "other"}, "'other'"),
        ({"version": 2}, "version 2"),
        ({"version": 99}, "version 99"),
        ({"dtype": "float32"}, "float32"),
        ({"splits": {"train": {}}}, "splits: train: it lacks the field num_documents"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"loss": []}, "loss"),
        ({"vocab_size": "257"}, 'vocab_size: "257"'),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"splits": {"train": SPLIT | {"documents": 1}}}, "documents: 1"),
        ({"splits": {"train": SPLIT | {"shards": [SHARD | {"file": "../a"}]}}}, "../a"),
        ({"splits": {"train": SPLIT | {"shards": [SHARD | {"num_tokens": 31}]}}}, "add up"),
        ({"splits": {"train": SPLIT | {"shards": [SHARD | {"sha256": None}]}}}, "sha256: null"),
    ],
)
def test_a_damaged_description(directory, change, named):
    path, way_out = directory / "meta.json", "prepare it again"
    if isinstance(change, bytes):
        path.write_bytes(change)
        way_out = ""
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(ValueError, path, named, way_out):
        read_metadata(directory)
