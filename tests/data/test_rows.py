"""Files of every kind that people have, whole, cut, compressed, huge and in other encodings."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from corpora import documents_of, parquet, texts_of
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused, stopped

from maxmars.cli import main
from maxmars.data import documents
from maxmars.data.corpus import FileRange, TextFiles
from maxmars.data.metadata import read_metadata

TEXTS = ["one", 'zwei ä\nlines, "quoted";\tand more', "", "𝄞 four"] * 3
any_texts = st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=6)
settings = hypothesis.settings(max_examples=25, deadline=None, database=None, derandomize=True)


def lines(texts):
    return "".join(json.dumps({"n": 1, "text": text}) + "\n" for text in texts).encode()


def nested_lines(texts):
    return "".join(
        json.dumps({"a": {"b": text}}, ensure_ascii=False) + "\n" for text in texts
    ).encode()


def array(texts):
    return json.dumps([{"text": text} for text in texts], indent=1, ensure_ascii=False).encode()


def strings(texts):
    return json.dumps(texts).encode()


def objects(texts):
    return "\n".join(json.dumps({"text": text}, indent=2) for text in texts).encode()


def table(delimiter):
    def write(texts):
        out = io.StringIO(newline="")
        writer = csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writerows([["n", "text"], *(["1", text] for text in texts)])
        return codecs.BOM_UTF8 + out.getvalue().encode()

    return write


def small_groups(texts):
    return parquet(texts, row_group_size=3)


def arrow(kind):
    def write(texts):
        pyarrow = pytest.importorskip("pyarrow")
        rows = pyarrow.table(
            {"a": [{"b": text} for text in texts], "text": pyarrow.array(texts, "large_string")}
        )
        out = io.BytesIO()
        with getattr(pyarrow.ipc, kind)(out, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=5)
        return out.getvalue()

    return write


KINDS = {
    "jsonl": (lines, "text"),
    "ndjson": (nested_lines, "a.b"),
    "array.json": (array, "text"),
    "strings.json": (strings, "text"),
    "lines.json": (lines, "text"),
    "objects.json": (objects, "text"),
    "csv": (table(","), "text"),
    "semicolons.csv": (table(";"), "text"),
    "tsv": (table("\t"), "text"),
    "parquet": (small_groups, "text"),
    "nested.parquet": (small_groups, "a.b"),
    "file.arrow": (arrow("new_file"), "text"),
    "stream.arrow": (arrow("new_stream"), "a.b"),
    "feather": (arrow("new_file"), "text"),
}
COMPRESSIONS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def texts_of_file(path, count=1, **options):
    return texts_of(TextFiles([str(path)], **options), count)


def read(kind, data, field="text", **options):
    """The texts of bytes as a file of a kind; each example of a property has its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"rows.{kind}")
        path.write_bytes(data)
        return texts_of_file(path, text_field=field, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(tmp_path, kind):
    write, field = KINDS[kind]
    path, data = tmp_path / f"rows.{kind}", write(TEXTS)
    path.write_bytes(data)
    corpus = TextFiles([str(path)], text_field=field)
    places = range(len(TEXTS))  # of a row its number, of a line its first byte
    if write in (lines, nested_lines):
        places = np.cumsum([0, *(len(write([text])) for text in TEXTS)])[:-1]
    names = [f"rows.{kind}:{place}" for place in places]
    for count in (1, 2, 3, 99) if kind.endswith(("jsonl", "ndjson", "parquet")) else (1,):
        assert documents_of(corpus, count) == list(zip(names, TEXTS, strict=True))
    if kind != "strings.json":
        for name in ("body", "text.b"):
            with refused(ValueError, path, repr(name), "--text-field"):
                texts_of_file(path, text_field=name)
    for compression, compress in COMPRESSIONS.items():
        path = tmp_path / f"rows.{kind}.{compression}"
        path.write_bytes(compress(data))
        if kind.endswith(("parquet", "arrow", "feather")):
            with refused(ValueError, path):
                TextFiles([str(path)])
        else:
            assert texts_of_file(path, text_field=field) == TEXTS


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_empty_or_cut(kind):
    """Whatever remains of a file, its first texts come as they were, or it is refused."""
    write, field = KINDS[kind]

    @settings
    @given(any_texts.map(lambda texts: [*texts, "a"]), st.floats(0, 1))
    @hypothesis.example(["a"], 0.0)
    @hypothesis.example(["a\r\nb", '"', ""], 1.0)
    def check(texts, share):
        data = write(texts)
        assert read(kind, data, field) == texts
        try:
            begin = read(kind, data[: int(len(data) * share)], field)
        except ValueError:
            return
        if begin[-1:] == [""] and kind.endswith(("csv", "tsv")):
            begin.pop()  # a row that is cut where its last field begins is one with an empty field
        assert begin == texts[: len(begin)]

    check()


@settings
@given(any_texts, st.sampled_from(["\n", "<|endoftext|>", "aab", "%%"]), st.integers(1, 9))
def test_documents_between_separators(texts, separator, count):
    """However a text is cut into runs, the documents are those between its separators."""
    text = separator.join(texts)
    documents = [document.strip("\r\n") for document in text.split(separator)]
    mark = codecs.BOM_UTF8 if text else b""
    whole = read("txt", mark + text.encode(), separator=separator)
    assert [t for t in whole if t] == [t for t in documents if t]
    if len(set(separator)) > 1 or len(separator) == 1:
        assert whole == read("txt", mark + text.encode(), separator=separator, count=count)


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["jsonl", "array.json", "csv", "txt"])
def test_a_row_of_70_mb(tmp_path, kind):
    path, large = tmp_path / f"rows.{kind}", "abcdefg" * 10_000_000
    texts = ["one", large, "three"]
    path.write_bytes("|".join(texts).encode() if kind == "txt" else KINDS[kind][0](texts))
    separator = "|" if kind == "txt" else None
    corpus, bad = TextFiles([str(path)], separator=separator), []
    if kind not in ("jsonl", "txt"):
        with refused(ValueError, path):
            list(corpus.read(FileRange(0), bad.append))
        return
    (first,), (last,) = (document.blocks for document in corpus.read(FileRange(0), bad.append))
    assert (first, last, len(bad)) == ("one", "three", 1)
    begin = 0 if kind == "txt" else len('{"n": 1, "text": "')
    name = f"rows.{kind}:{path.read_bytes().rindex(b'three') - begin}"
    assert [document.name for document in corpus.read(FileRange(0), bad.append)][1] == name


def zstd(data):
    """In two frames, as some tools write them."""
    compress, half = pytest.importorskip("pyarrow").compress, len(data) // 2
    frames = (compress(some, "zstd", asbytes=True) for some in (data[:half], data[half:]))
    return b"".join(frames)


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_the_mark_and_the_encoding_of_a_text(tmp_path, ending):
    path = tmp_path / f"a.txt{ending}"
    compress = {"": bytes, ".zst": zstd}.get(ending) or COMPRESSIONS[ending[1:]]
    path.write_bytes(compress(codecs.BOM_UTF8 + b"one\ntwo"))
    assert texts_of_file(path) == ["one\ntwo"]
    path.write_bytes(compress("one\ntwo".encode("utf-16")))
    with refused(ValueError, path, "UTF-8"):
        texts_of_file(path)


ROWS = b'{"text": "a"}\n' * 1000


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("latin.txt", b"caf\xe9 ", "byte 3"),
        ("cut.txt", "ab€".encode()[:-1], "byte 2"),
        ("long.txt", "ä".encode() * 1_000_000 + b"\xff", "byte 2000000"),
        ("a.jsonl", b'{"text": "a"}\n{"te', "line 2"),
        ("a.jsonl", b"[1]\n", "line 1"),
        ("a.jsonl", b'{"text": 1}\n', "type int"),
        ("a.jsonl", b"[" * 200_000, "line 1"),
        ("a.jsonl.gz", gzip.compress(ROWS, mtime=0)[:-9], "cut short"),
        ("a.jsonl.gz", b"no gzip", "damaged"),
        ("a.jsonl.zst", b"no zstd", "damaged"),
        # Frames of a byte with windows of 2^28 and 2^31 bytes, as of zstd --long.
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x00\x90\x09\x00\x00a", "--long=27"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x00\xa8\x09\x00\x00a", "--long=27"),
        ("a.jsonl.zst", lambda: zstd(ROWS)[:-5], "cut short"),
        ("a.parquet", b"no parquet", "parquet"),
        ("a.doc", b"a,b", ".jsonl"),
    ],
)
def test_damaged_files(tmp_path, name, content, named):
    if name.endswith(("zst", "parquet")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content() if callable(content) else content)
    with refused(ValueError, tmp_path / name, named):
        texts_of_file(tmp_path / name)


def test_a_page_whose_checksum_is_wrong(tmp_path):
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    data = parquet(["a made up text"] * 9, write_statistics=False, **options)
    path = tmp_path / "a.parquet"
    path.write_bytes(data)
    assert texts_of_file(path, text_field="a.b") == ["a made up text"] * 9
    place = data.index(b"made up")
    path.write_bytes(data[:place] + b"M" + data[place + 1 :])
    with refused(ValueError, path):
        texts_of_file(path, text_field="a.b")


# --- Through the command line --------------------------------------------------------------------


def prepare(*words):
    main(["data", "prepare", *map(str, words), "--workers", "0"])


def refusal(*words):
    with stopped(1) as errors:
        prepare(*words)
    return errors.lines[-1]


GOOD = [f'{{"text": "document {i}"}}\n'.encode() for i in range(60)]
BAD = [
    b"null\n",
    b'{"t": "no text"}\n',
    b'{"text": 3}\n',
    b'{"text": "cut\n',
    b'{"text": "\xff"}\n',
]


@pytest.mark.seconds
def test_bad_rows_of_all_tasks_are_counted_together(tmp_path, capsys):
    rows = GOOD.copy()
    for number, row in enumerate(BAD):
        rows.insert(12 * number + 5, row)
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    path.write_bytes(b"".join(rows))
    assert f"{path}, line 6" in refusal(path, out)
    assert not out.exists()
    for task in range(2):
        job = (path, out, "--task-bytes", 800, "--skip-bad", 4, "--tasks", f"{task}/2")
        if task == 0:
            prepare(*job)
    error = refusal(*job)
    for word in ("line 6", "5", "--skip-bad"):
        assert word in error
    prepare(path, out, "--task-bytes", 800, "--skip-bad", 5)
    assert "line 6" in capsys.readouterr().out
    metadata = read_metadata(out)
    assert metadata.skipped.count == len(BAD)
    assert sum(split.num_documents for split in metadata.splits.values()) == len(GOOD)
    main(["data", "inspect", str(out)])
    assert "line 6" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_bad_rows_of_other_kinds(tmp_path, kind):
    path = tmp_path / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps([{"text": "a"}, {}, None, {"text": "b"}, {"text": "c"}]))
    else:
        rows = [["n", "text"], ["1", "a"], ["1"], ["1", '"b" b'], ["1", "b"], ["1", "c"]]
        path.write_text("".join(",".join(row) + "\n" for row in rows))
    bad = []
    assert texts_of(TextFiles([str(path)]), on_bad=bad.append) == ["a", "b", "c"]
    assert len(bad) == 2


@pytest.mark.parametrize(("mark", "written"), [("<|endoftext|>", "<|endoftext|>"), ("\n", r"\n")])
def test_a_text_of_many_documents(tmp_path, capsys, mark, written):
    texts = [f"Story {i}, made up." for i in range(40)]
    (tmp_path / "a.txt").write_text(f"\n{mark}\n".join(texts))
    prepare(tmp_path / "*.txt", tmp_path / "one")
    assert ("--document-separator" in capsys.readouterr().err) == (mark != "\n")
    separated = ("--document-separator", written, "--validation-fraction", 0, "--task-bytes", 100)
    prepare(tmp_path / "*.txt", tmp_path / "many", *separated)
    assert "--document-separator" not in capsys.readouterr().err
    assert written in read_metadata(tmp_path / "many").command
    opened = documents(tmp_path / "many", "train")
    assert [opened.tokenizer.decode(tokens[:-1]) for tokens in opened] == texts


def test_a_separator_of_lines_that_end_in_crlf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dos.txt").write_bytes("\r\n\r\n".join("abcd").encode())
    Path("unix.txt").write_text("a|b")
    for separator in (r"\r\n", r"\n", r"\r\n\r\n"):
        options = ("--document-separator", separator, "--validation-fraction", 0)
        prepare("dos.txt", repr(separator), *options)
        assert read_metadata(repr(separator)).splits["train"].num_documents == 4
    error = refusal("*s.txt", "out", "--document-separator", r"\n\n")
    assert r"\r\n\r\n" in error
    Path("dos.txt.gz").write_bytes(gzip.compress(Path("dos.txt").read_bytes()))
    for source, mark in (("unix.txt", "@@"), ("dos.txt.gz", "|")):
        error = refusal(source, "out", "--document-separator", mark)
        assert source in error
        assert mark in error
    held_out = ("--document-separator", "|", "--validation", "dos.txt")
    assert "dos.txt" in refusal("unix.txt", "out", *held_out)
    assert not Path("out").exists()


def test_hints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "hf:roneneldan/TinyStories" in refusal("roneneldan/TinyStories", "out")
    Path("a.jsonl").write_text('{"text": "a"}')
    for source in ("python", "openwebtext", "a.jsonl"):
        assert "'|'" in refusal(source, "out", "--document-separator", "|")
    assert not Path("out").exists()
