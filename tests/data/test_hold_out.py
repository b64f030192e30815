"""What is held out for validation: the ends of texts, rows by a hash, or a source of its own."""

import json
import tempfile
from pathlib import Path

import hypothesis
import pytest
from corpora import documents_of, is_held_out, write_rows
from hypothesis import given
from hypothesis import strategies as st
from refusals import stopped

from maxmars.cli import main
from maxmars.data import documents
from maxmars.data.corpus import TextFiles
from maxmars.data.metadata import read_metadata
from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import ByteTokenizer


def splits_of(out):
    """The texts of each split of a directory."""
    opened = (documents(out, split) for split in read_metadata(out).splits)
    return tuple([ByteTokenizer().decode(tokens[:-1]) for tokens in split] for split in opened)


def prepared(pattern, out, *, separator=None, **options):
    """The texts of each split that files are prepared to."""
    corpus = TextFiles([str(pattern)], separator=separator)
    prepare(corpus, out, tokenizer=ByteTokenizer(), source="a test", **options)
    return splits_of(out)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a.csv.gz"])
def test_rows_are_held_out_by_a_hash_of_their_names(tmp_path, name):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / name, [f"{i} is a row" for i in range(70)])
    pattern, separator = tmp_path / "*" / name, "<|endoftext|>" if name == "a.txt" else None
    rows = documents_of(TextFiles([str(pattern)], separator=separator))
    expected = tuple(
        [text for name, text in rows if is_held_out(name, 0.1) == held_out]
        for held_out in (False, True)
    )
    assert all(expected)
    for task_bytes in (None, 300):
        options = {"separator": separator, "task_bytes": task_bytes}
        assert prepared(pattern, tmp_path / f"out{task_bytes}", **options) == expected


@pytest.mark.parametrize("task_bytes", [None, 10])
def test_a_split_that_would_be_empty_gets_the_last_row(tmp_path, task_bytes):
    for i in range(3):
        field = "body" if i == 1 else "text"
        (tmp_path / f"{i}.json").write_text(json.dumps({field: f"{i} " * 20}))
    out, options = tmp_path / "out", {"task_bytes": task_bytes, "skip_bad": 1}
    assert prepared(tmp_path / "*.json", out, **options) == (["0 " * 20], ["2 " * 20])
    assert read_metadata(out).skipped.count == 1
    shards = {s.file for split in read_metadata(out).splits.values() for s in split.shards}
    assert shards == {p.name for p in out.glob("*_0*.bin")}


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_no_split_stays_empty(tmp_path, fraction):
    for count in (2, 20):
        texts, path = [f"row {i}" for i in range(count)], tmp_path / f"{count}.jsonl"
        write_rows(path, [*texts, "", ""])
        train, val = prepared(path, tmp_path / f"out{count}", validation_fraction=fraction)
        assert train
        assert val
        assert sorted(train + val) == sorted(texts)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt.gz", "blank rows.jsonl"])
@pytest.mark.parametrize("task_bytes", [None, 100])
def test_a_file_of_one_document_gives_its_end(tmp_path, name, task_bytes):
    text, blank = "one row of words, " * 40, [" "] * name.startswith("blank")
    write_rows(tmp_path / name, [*blank, text, *blank])
    out = tmp_path / "out"
    assert prepared(tmp_path / name, out, task_bytes=task_bytes) == ([text[:648]], [text[648:]])


LINES = ["".join(f"wörd{i * k} {i}\n" for i in range(50)) for k in (1, 2, 3)]
AFTER_ITS_TASK = "a\n" * 440 + "b" * 69 + "\n" + "c" * 49 + "\n"  # nine tenths end within the b


@pytest.mark.parametrize(
    ("texts", "task_bytes", "ending"),
    [
        (LINES[:1], 37, "txt"),
        (LINES, None, "txt"),
        (LINES, 1000, "txt"),
        (LINES, None, "txt.gz"),
        ([AFTER_ITS_TASK], 25, "txt"),
    ],
)
def test_texts_give_their_ends_from_a_line_break_on(tmp_path, texts, task_bytes, ending):
    for i, text in enumerate(texts):
        write_rows(tmp_path / f"{i}.{ending}", [text])
    train, val = prepared(tmp_path / f"*.{ending}", tmp_path / "out", task_bytes=task_bytes)
    data = [text.encode() for text in texts]
    borders = [text.index(b"\n", int(len(text) * 0.9) - 1) + 1 for text in data]
    pairs = list(zip(data, borders, strict=True))
    assert train == [text[:border].decode() for text, border in pairs]
    assert val == [text[border:].decode() for text, border in pairs]


@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
def test_a_text_whose_end_is_blank_is_in_one_split_or_the_other(tmp_path, ending):
    for i in range(2):
        write_rows(tmp_path / f"{i}.{ending}", [f"line {i}\n" * 40 + "\n" * 400])
    train, val = prepared(tmp_path / f"*.{ending}", tmp_path / "out")
    assert [text.strip()[:6] for text in (*train, *val)] == ["line 0", "line 1"]
    assert val


def test_a_source_of_its_own_is_the_validation_split(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"row {i}" for i in range(50)]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "held.txt").write_text("held\nout\n" * 20)

    def run(out, *words):
        main(["data", "prepare", "rows.jsonl", out, "--workers", "0", "--validation", *words])

    run("out", "held.txt", "--task-bytes", "100")
    assert splits_of("out") == (rows, ["held\nout\n" * 20])
    metadata = read_metadata("out")
    assert "--validation held.txt" in metadata.command
    assert "held.txt" in metadata.source
    for job in ("0/2", "1/2"):  # to the same bytes
        run("jobs", "held.txt", "--task-bytes", "100", "--tasks", job)
    for name in (shard.file for split in metadata.splits.values() for shard in split.shards):
        assert (tmp_path / "jobs" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    capsys.readouterr()
    (tmp_path / "empty.txt").touch()
    for words, code, named in (
        (["held.txt", "--validation-fraction", "0.1"], 2, "held.txt"),
        (["none.txt"], 1, "none.txt"),
        (["empty.txt"], 1, "'val'"),
    ):
        with stopped(code, named):
            run("refused", *words)
        assert not (tmp_path / "refused").exists()


# --- generated texts -----------------------------------------------------------------------------

settings = hypothesis.settings(max_examples=8, deadline=None, database=None, derandomize=True)
MORE = st.characters(codec="utf-8", exclude_characters="\ufeff")  # a mark that no text keeps
# Characters of one to four bytes, and those between which splits cut.
some_text = st.text(st.sampled_from("ab1.'s \n\r\t\u00a0\u3000é—𝄞") | MORE)
two_texts = st.lists(some_text, min_size=2, max_size=15).filter(
    lambda texts: texts[0].strip() and any(text.strip() for text in texts[1:])
)
long_text = st.lists(some_text, min_size=1, max_size=10).map(lambda texts: f"x{'x'.join(texts)}x")


def prepared_in_tasks(name, text, fraction, tasks=1):
    """The texts of each split of a file with this text, in about so many tasks."""
    data = text.encode()
    with tempfile.TemporaryDirectory() as folder:
        path, task_bytes = Path(folder, name), max(1, len(data) // tasks)
        path.write_bytes(data)
        options = {"validation_fraction": fraction, "task_bytes": task_bytes}
        return prepared(path, Path(folder, "out"), **options)


@pytest.mark.seconds
@settings
@given(long_text, st.integers(2, 5), st.sampled_from([0.0, 0.1, 0.5]))
def test_the_tasks_of_a_text_give_the_text(text, tasks, fraction):
    """Its end is held out, from the begin of a character on; a task is no document of its own."""
    splits = prepared_in_tasks("a.txt", text, fraction, tasks)
    assert [len(split) for split in splits] == [1] * len(splits)
    assert "".join(part for (part,) in splits) == text
    assert splits == prepared_in_tasks("a.txt", text, fraction)


@pytest.mark.seconds
@settings
@given(two_texts, st.integers(2, 5))
def test_the_tasks_of_lines_give_the_lines(texts, tasks):
    """Each in the split that it is in however the file is cut, in the order of the file."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    expected = [text for text in texts if text.strip()]
    assert prepared_in_tasks("a.jsonl", lines, 0.0, tasks) == (expected,)
    whole = prepared_in_tasks("a.jsonl", lines, 0.3)
    assert prepared_in_tasks("a.jsonl", lines, 0.3, tasks) == whole
    assert sorted([*whole[0], *whole[1]]) == sorted(expected)
