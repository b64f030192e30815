import json

import numpy as np
import pytest
from token_directories import write_shards

from maxmars.data.sources import LateStatus, read_metadata

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
