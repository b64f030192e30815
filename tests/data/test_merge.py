import json

import numpy as np
import pytest

from maxmars.data.corpus import LocalFiles
from maxmars.data.inspect import differences
from maxmars.data.merge import merge
from maxmars.data.prepare import prepare
from maxmars.data.sources import read_metadata
from maxmars.data.streams import TokenShards
from maxmars.data.tokenizer import ByteTokenizer


@pytest.fixture
def corpus(tmp_path):
    """Seven files of forty documents."""
    (tmp_path / "text").mkdir()
    for file in range(7):
        lines = [json.dumps({"text": f"{file} {i} " * (i % 7)}) + "\n" for i in range(40)]
        (tmp_path / "text" / f"{file}.jsonl").write_text("".join(lines))
    return LocalFiles([str(tmp_path / "text" / "*.jsonl")])


def run(corpus, out, **options):
    given = {"tokenizer": ByteTokenizer(), "source": "a test", "shard_tokens": 700}
    return prepare(corpus, out, **(given | options))


def make_parts(corpus, directory, count, **options):
    paths = [directory / f"part{i}" for i in range(count)]
    for i, path in enumerate(paths):
        run(corpus, path, part=(i, count), **options)
    return paths


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_merged_parts_are_the_whole(tmp_path, corpus, count):
    run(corpus, tmp_path / "whole")
    parts = make_parts(corpus, tmp_path, count)
    merged = merge(parts[::-1], tmp_path / "merged")
    assert merged == read_metadata(tmp_path / "whole")
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert not (tmp_path / "merged.partial").exists()


def test_more_parts_than_files_take_turns(tmp_path, corpus):
    run(corpus, tmp_path / "whole")
    merge(make_parts(corpus, tmp_path, 9), tmp_path / "merged")
    documents = {}
    for name in ("whole", "merged"):
        for split in ("train", "val"):
            shards = TokenShards(tmp_path / name, split)
            text = ByteTokenizer().decode(shards.read(0, shards.num_tokens))
            documents[name, split] = sorted(text.split("<|endoftext|>"))
    for split in ("train", "val"):
        assert documents["whole", split] == documents["merged", split]
    sizes = [read_metadata(tmp_path / f"part{i}").splits["train"].num_tokens for i in range(9)]
    assert max(sizes) < 2 * min(sizes)


def test_a_part_without_validation_is_no_error(tmp_path, corpus):
    parts = make_parts(corpus, tmp_path, 7, validation_fraction=0.01)
    counts = [len(read_metadata(part).splits) for part in parts]
    assert 1 in counts
    assert "val" in merge(parts, tmp_path / "merged").splits


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([0, 1], "all 3 parts are needed, each once: part 2 is missing"),
        ([0, 2, 2], "each once: part 1 is missing"),
        ([0, 1, 2, 2], "each once: one is given twice"),
    ],
)
def test_all_parts_are_needed(tmp_path, corpus, chosen, message):
    parts = make_parts(corpus, tmp_path, 3)
    with pytest.raises(ValueError, match=message):
        merge([parts[i] for i in chosen], tmp_path / "merged")


class Other(ByteTokenizer):
    digest = "another"


def test_parts_must_belong_together(tmp_path, corpus):
    first = make_parts(corpus, tmp_path, 2)[0]
    run(corpus, tmp_path / "whole")
    run(corpus, tmp_path / "tokenizer", part=(1, 2), tokenizer=Other())
    run(corpus, tmp_path / "shards", part=(1, 2), shard_tokens=300)
    run(corpus, tmp_path / "count", part=(1, 3))
    for name, message in {
        "whole": "whole is no part of a corpus",
        "tokenizer": "are not of one corpus: tokenizer_digest is 'another'",
        "shards": "shards is part 1 of 2 with shards of 300 tokens",
        "count": "count is part 1 of 3",
    }.items():
        with pytest.raises(ValueError, match=message):
            merge([first, tmp_path / name], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_damaged_part(tmp_path, corpus):
    parts = make_parts(corpus, tmp_path, 2)
    path = parts[1] / "train_00001.bin"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"part1/train_00001\.bin does not match the checksum"):
        merge(parts, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    data[5] ^= 1
    path.write_bytes(data)
    merge(parts, tmp_path / "merged")
    with pytest.raises(FileExistsError, match="merged exists"):
        merge(parts, tmp_path / "merged")


def test_parts_become_a_tfds_dataset(tmp_path, corpus):
    run(corpus, tmp_path / "whole", record_tokens=100)
    merge(make_parts(corpus, tmp_path, 2), tmp_path / "merged", record_tokens=100)
    assert contents(tmp_path / "merged").keys() == contents(tmp_path / "whole").keys()
    assert differences(tmp_path / "merged", tmp_path / "whole") == []
    starts = np.fromfile(tmp_path / "merged" / "train_documents.bin", "<u8")
    assert len(starts) == read_metadata(tmp_path / "part0").splits["train"].num_documents + (
        read_metadata(tmp_path / "part1").splits["train"].num_documents
    )
