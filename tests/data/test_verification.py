"""Files of tokens, hashed in a thread once a working directory."""

import json
import os
import threading

import numpy as np
import pytest
from damage import flip
from etils import epath
from refusals import refused
from token_directories import write_nanogpt, write_shards

from maxmars.data.formats import open_directory
from maxmars.data.verification import Verification, hashed_by, own_share, verify_split

STREAM = np.random.default_rng(0).integers(0, 2000, 5000)


def verify(directory, record):
    """Hash the files of a directory; the names of those that were hashed now, and the error."""
    before = record.read_text().splitlines() if record.exists() else []
    damaged = threading.Event()
    files = open_directory(directory).files
    with Verification(own_share(files), epath.Path(record)) as verification:
        verification.start(on_damage=damaged.set)
        try:
            verification.check(timeout_s=60.0)
            error = None
        except ValueError as raised:
            error = str(raised)
    assert damaged.is_set() == (error is not None)
    lines = [line for line in record.read_text().splitlines() if line not in before]
    return [os.path.basename(json.loads(line)["file"]) for line in lines], error


@pytest.fixture
def directory(tmp_path):
    write_shards(tmp_path / "tokens", STREAM, STREAM[:400])
    return tmp_path / "tokens"


def other_tokens_with_size_and_time(path):
    """As `cp -p` from another preparation would leave them."""
    status = path.stat()
    flip(path, 3)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_file_is_hashed_once_and_again_when_its_time_or_content_has_changed(directory, tmp_path):
    record = tmp_path / "run" / "record.jsonl"
    names = sorted(path.name for path in directory.glob("*.bin"))
    assert len(names) == 8  # of both splits
    first, error = verify(directory, record)
    assert (sorted(first), error) == (names, None)
    assert verify(directory, record) == ([], None)
    os.utime(directory / "train_00001.bin", (1, 1))
    assert verify(directory, record) == (["train_00001.bin"], None)
    for name in ("train_00001.bin", "val_00000.bin"):
        other_tokens_with_size_and_time(directory / name)
        done, error = verify(directory, record)
        assert done == []
        assert name in error
        assert "\n" not in error
        other_tokens_with_size_and_time(directory / name)  # as it was
        assert verify(directory, record) == ([name], None)


def test_a_split_is_hashed_now_whatever_its_record_says(tmp_path):
    write_nanogpt(tmp_path / "tokens", STREAM, STREAM[:400])
    run = epath.Path(tmp_path) / "run [1]"
    assert hashed_by(run) == {}
    verify(tmp_path / "tokens", run / "verified" / "host_000.jsonl")
    files = open_directory(tmp_path / "tokens").files
    verify_split(files, "train", hashed_by(run))
    other_tokens_with_size_and_time(tmp_path / "tokens" / "train.bin")
    verify_split(files, "train")  # nobody knows their checksum
    with refused(ValueError, tmp_path / "tokens" / "train.bin", "SHA-256"):
        verify_split(files, "train", hashed_by(run))


def test_a_damaged_record_only_costs_time(directory, tmp_path):
    record = tmp_path / "record.jsonl"
    verify(directory, record)
    lines = record.read_text().splitlines()
    record.write_text("\n".join(["{", '{"file": 3}', "", *lines[:5]]) + "\n")
    names, error = verify(directory, record)
    assert (len(names), error) == (3, None)


def test_a_file_without_a_checksum_must_stay_as_it_was_first_read(tmp_path):
    write_nanogpt(tmp_path / "tokens", STREAM, STREAM[:400])
    record = tmp_path / "record.jsonl"
    assert verify(tmp_path / "tokens", record) == (["train.bin", "val.bin"], None)
    flip(tmp_path / "tokens" / "train.bin", 5001)
    assert str(tmp_path / "tokens" / "train.bin") in verify(tmp_path / "tokens", record)[1]
