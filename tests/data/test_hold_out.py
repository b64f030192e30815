"""What is held out for validation: the ends of texts, rows by a hash, or a source of its own."""

import json

import pytest
from refusals import stopped

from maxmars.cli import main
from maxmars.data import documents
from maxmars.data.metadata import read_metadata


def texts_of(path, split):
    opened = documents(path, split)
    return [opened.tokenizer.decode(document[:-1]) for document in opened]


def prepare(source, out, *options):
    main(["data", "prepare", str(source), str(out), "--workers", "0", *map(str, options)])
    return texts_of(out, "train"), texts_of(out, "val")


def write_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.mark.parametrize("count", [3, 120])
@pytest.mark.parametrize("ending", [".txt", ".txt.gz"])
def test_the_end_of_each_text_is_held_out(tmp_path, count, ending):
    import gzip

    texts = [f"line {i}\n" * 40 for i in range(count)]
    for i, text in enumerate(texts):
        content = text.encode()
        content = gzip.compress(content) if ending == ".txt.gz" else content
        (tmp_path / f"{i:03d}{ending}").write_bytes(content)
    train, val = prepare(tmp_path / f"*{ending}", tmp_path / "out")
    assert [head + tail for head, tail in zip(train, val, strict=True)] == texts
    assert {len(tail) // len(head) for head, tail in zip(train, val, strict=True)} == {0}


def test_rows_are_held_out_by_a_hash_that_more_rows_do_not_change(tmp_path):
    texts = [f"row {i}" for i in range(2000)]
    write_rows(tmp_path / "rows.jsonl", texts)
    train, val = prepare(tmp_path / "rows.jsonl", tmp_path / "one")
    assert sorted(train + val) == sorted(texts)
    assert 140 < len(val) < 260
    write_rows(tmp_path / "rows.jsonl", [*texts, *texts])
    assert set(prepare(tmp_path / "rows.jsonl", tmp_path / "two")[1]) >= set(val)


def test_a_held_out_end_that_begins_after_the_range_of_its_task(tmp_path):
    head, tail = "a\n" * 440 + "b" * 69 + "\n", "c" * 49 + "\n"  # nine tenths end within the b
    (tmp_path / "a.txt").write_text(head + tail)
    assert prepare(tmp_path / "a.txt", tmp_path / "out", "--task-bytes", 10) == ([head], [tail])


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("count", [2, 3, 20])
def test_no_split_stays_empty(tmp_path, count, fraction):
    texts = [f"row {i}" for i in range(count)]
    write_rows(tmp_path / "rows.jsonl", [*texts, "", ""])
    train, val = prepare(
        tmp_path / "rows.jsonl", tmp_path / "out", "--validation-fraction", fraction
    )
    assert train
    assert val
    assert sorted(train + val) == sorted(texts)


@pytest.mark.parametrize("ending", [".txt", ".txt.gz"])
def test_a_text_whose_end_is_blank_is_in_one_split_or_the_other(tmp_path, ending):
    import gzip

    for i in range(2):
        content = (f"line {i}\n" * 40 + "\n" * 400).encode()
        content = gzip.compress(content) if ending == ".txt.gz" else content
        (tmp_path / f"{i}{ending}").write_bytes(content)
    train, val = prepare(tmp_path / f"*{ending}", tmp_path / "out")
    assert [text.strip()[:6] for text in (*train, *val)] == ["line 0", "line 1"]
    assert val


@pytest.mark.parametrize("blank", [[], [" \n"]])
def test_the_end_of_the_only_row_is_held_out(tmp_path, blank):
    text = "".join(f"line {i}\n" for i in range(100))
    write_rows(tmp_path / "rows.jsonl", [*blank, text, *blank])
    (train,), (val,) = prepare(tmp_path / "rows.jsonl", tmp_path / "out")
    assert train + val == text
    assert 0.08 < len(val) / len(text) < 0.11


def test_a_source_of_its_own_is_the_validation_split(tmp_path, capsys):
    write_rows(tmp_path / "rows.jsonl", [f"row {i}" for i in range(50)])
    (tmp_path / "held.txt").write_text("held\nout\n" * 20)
    words = ("--validation", tmp_path / "held.txt", "--task-bytes", 100)
    train, val = prepare(tmp_path / "rows.jsonl", tmp_path / "out", *words)
    assert train == [f"row {i}" for i in range(50)]
    assert val == ["held\nout\n" * 20]
    metadata = read_metadata(tmp_path / "out")
    assert f"--validation {tmp_path / 'held.txt'}" in metadata.command
    assert str(tmp_path / "held.txt") in metadata.source
    # In two jobs, to the same bytes.
    for job in ("0/2", "1/2"):
        given = (tmp_path / "rows.jsonl", tmp_path / "jobs", *words, "--workers", 0, "--tasks", job)
        main(["data", "prepare", *map(str, given)])
    for name in (shard.file for split in metadata.splits.values() for shard in split.shards):
        assert (tmp_path / "jobs" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    capsys.readouterr()
    (tmp_path / "empty.txt").write_text("")
    for source, options, code, named in (
        ("held.txt", ("--validation-fraction", 0.1), 2, "held.txt"),
        ("none.txt", (), 1, "none.txt"),
        ("empty.txt", (), 1, "'val'"),
    ):
        with stopped(code, named):
            words = ("--validation", tmp_path / source, *options)
            prepare(tmp_path / "rows.jsonl", tmp_path / "refused", *words)
        assert not (tmp_path / "refused").exists()
