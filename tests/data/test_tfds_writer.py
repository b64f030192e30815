import json
import resource

import numpy as np
import pytest
import tensorflow_datasets as tfds

from maxmars.data.prepare import prepare
from maxmars.data.sources import TFDS_FORMAT, read_metadata
from maxmars.data.tfds_stream import TfdsTokens
from maxmars.data.token_files import TokenShards
from maxmars.data.tokenizer import ByteTokenizer

DOCUMENTS = [(f"{i}", f"{i:04d} ".ljust(20, "x")) for i in range(300)]


def run(out, **options):
    return prepare(
        DOCUMENTS, out, tokenizer=ByteTokenizer(), source="a test", task_bytes=2000, **options
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Named as TFDS wants it, beside the token shards of the same stream."""
    root = tmp_path_factory.mktemp("tokens")
    run(root / "shards")
    run(root / "token_stream" / "1.0.0", record_tokens=128)
    return root


@pytest.mark.parametrize("split", ["train", "val"])
def test_records_in_order_are_the_stream(directory, split):
    shards = TokenShards(directory / "shards", split)
    stream = shards.read(0, shards.num_tokens)
    by_directory = tfds.builder_from_directory(directory / "token_stream" / "1.0.0")
    for source in (
        by_directory.as_data_source(split=split),
        tfds.data_source("token_stream", split=split, data_dir=directory),
    ):
        records = [source[i]["tokens"] for i in range(len(source))]
        assert {len(record) for record in records[:-1]} == {128}
        assert records[0].dtype == np.uint16
        assert np.array_equal(np.concatenate(records), stream)
    assert by_directory.info.splits[split].num_shards == len(shards.metadata.splits[split].shards)


def test_description(directory):
    path = directory / "token_stream" / "1.0.0"
    assert json.loads((path / "meta.json").read_text())["format"] == "maxmars-tfds-tokens"
    ours, shards = read_metadata(path, format=TFDS_FORMAT), read_metadata(directory / "shards")
    assert ours.record_tokens == 128
    for split in ("train", "val"):
        assert ours.splits[split].num_tokens == shards.splits[split].num_tokens
        assert ours.splits[split].documents == shards.splits[split].documents
    with pytest.raises(ValueError, match="is of format 'maxmars-tfds-tokens' version 2, but"):
        TokenShards(path, "train")


def test_ranges(directory):
    tokens = TfdsTokens(directory / "token_stream" / "1.0.0", "train")
    stream = TokenShards(directory / "shards", "train").read(0, tokens.num_tokens)
    for start in (0, 1, 127, 128, 129, 1000, tokens.num_tokens):
        for length in (0, 1, 128, 300):
            if start + length <= tokens.num_tokens:
                expected = stream[start : start + length]
                assert np.array_equal(tokens.read(start, length), expected)


def test_same_bytes_every_time(tmp_path):
    run(tmp_path / "a", record_tokens=128)
    run(tmp_path / "b", record_tokens=128)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_file_that_cannot_be_written_is_an_error_that_leaves_no_part_of_it(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limit[1]))  # the token shards are smaller
    try:
        with pytest.raises(OSError, match=r"tokens-train\.array_record-00000-of-0000"):
            run(tmp_path / "out", record_tokens=128)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plan.json", "tasks"}
    run(tmp_path / "out", record_tokens=128)
    assert TfdsTokens(tmp_path / "out", "train").read(0, 4).tolist() == [48, 48, 48, 48]
