import gzip
import json
from pathlib import Path

import pytest

from maxmars.data import corpus as corpus_module
from maxmars.data.corpus import Corpus, LocalFiles, PythonSources, Texts


def documents(corpus, file, skip=0):
    return [(d.name, "".join(d.blocks)) for d in corpus.read(file, skip)]


def all_documents(corpus):
    return [pair for file in range(len(corpus.files)) for pair in documents(corpus, file)]


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text, "n": 1}) + "\n" for text in texts))


def write_parquet(path, texts, field="text"):
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    table = pyarrow.table({field: texts, "n": list(range(len(texts)))})
    parquet.write_table(table, path, row_group_size=3)


def compress_zstd(data):
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def test_text_files(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_bytes("zweite\r\nZeile ä".encode())
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "deep" / "c[1].txt").write_text("third")
    pattern = str(tmp_path / "**" / "*.txt")
    corpus = LocalFiles([pattern, str(tmp_path / "a.txt")])
    assert isinstance(corpus, Corpus)
    texts = {"a.txt": "first", "b.txt": "zweite\r\nZeile ä", "deep/c[1].txt": "third"}
    assert all_documents(corpus) == list(texts.items())
    assert corpus.num_bytes == sum(len(text.encode()) for text in texts.values())
    assert documents(corpus, 0, skip=1) == []
    only = LocalFiles([str(tmp_path / "deep" / "c[1].txt")])
    assert all_documents(only) == [("c[1].txt", "third")]


def test_a_text_file_is_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_BLOCK_BYTES", 7)
    (tmp_path / "a.txt").write_text("ä€𝄞" * 50)
    corpus = LocalFiles([str(tmp_path / "a.txt")])
    (document,) = corpus.read(0, 0)
    blocks = list(document.blocks)
    assert "".join(blocks) == "ä€𝄞" * 50
    assert max(map(len, blocks)) <= 7
    assert corpus.progress == (0, 1.0)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("field", ["text", "content"])
def test_files_with_many_documents(tmp_path, kind, field):
    texts = ["one", "zwei ä\n", "", "four"] * 3
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        write_parquet(path, texts, field)
    else:
        write_jsonl(path, texts, field)
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    if kind == "jsonl.zst":  # two frames, as some tools write them
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(compress_zstd(b"".join(part)) for part in (lines[:5], lines[5:])))
    corpus = LocalFiles([str(path)], text_field=field)
    expected = [(f"rows.{kind}:{i}", text) for i, text in enumerate(texts)]
    assert all_documents(corpus) == expected
    assert documents(corpus, 0, skip=5) == expected[5:]
    assert corpus.progress == (0, 1.0)
    with pytest.raises(ValueError, match=r"has no field 'body'.* by --text-field. It has .*n"):
        all_documents(LocalFiles([str(path)], text_field="body"))
    with pytest.raises(ValueError, match=r"field 'n' of .* holds a int, not text"):
        all_documents(LocalFiles([str(path)], text_field="n"))


def test_files_of_several_kinds_are_one_corpus(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ["x", "y"])
    (tmp_path / "a.txt").write_text("first")
    corpus = LocalFiles([str(tmp_path / "*")])
    assert corpus.files == ["a.txt", "b.jsonl"]
    assert [text for _, text in all_documents(corpus)] == ["first", "x", "y"]


def test_names_do_not_depend_on_where_the_files_are(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / f"{name}.txt").write_text(name)
    monkeypatch.chdir(tmp_path)
    here, there = LocalFiles(["text/*.txt"]), LocalFiles([str(tmp_path / "text" / "*.txt")])
    assert all_documents(here) == all_documents(there) == [("a.txt", "a"), ("b.txt", "b")]
    assert here.fingerprint == there.fingerprint


def test_fingerprints_follow_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    before = LocalFiles([str(tmp_path / "*")]).fingerprint
    assert LocalFiles([str(tmp_path / "*")], text_field="other").fingerprint != before
    (tmp_path / "a.txt").write_text("firsts")
    assert LocalFiles([str(tmp_path / "*")]).fingerprint != before
    assert Texts([("a", "b")]).fingerprint != Texts([("a", "c")]).fingerprint
    assert PythonSources().fingerprint == PythonSources().fingerprint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"caf\xe9 ", r"latin\.txt is not UTF-8 \(byte 3\)"),
        ("cut.txt", "ab€".encode()[:-1], r"cut\.txt is not UTF-8 \(byte 2\)"),
        ("a.jsonl", b'{"text": "a"}\n{"te', r"a\.jsonl, line 2 is no JSON"),
        ("a.jsonl", b"[1]\n", r"line 1 has no field 'text'"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9],
            "is damaged or cut short",
        ),
        ("a.jsonl.gz", b"no gzip", "is damaged or cut short"),
        ("a.jsonl.zst", b"no zstd", "is damaged or cut short"),
        ("a.parquet", b"no parquet", "is no Parquet file, or a damaged one"),
        ("a.csv", b"a,b", r"must end in \.txt, \.jsonl"),
    ],
)
def test_damaged_files(tmp_path, name, content, message):
    if name.endswith(("zst", "parquet")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        all_documents(LocalFiles([str(tmp_path / name)]))


def test_zstd_that_is_cut_short(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compress_zstd(b'{"text": "a"}\n' * 1000)[:-5])
    with pytest.raises(ValueError, match="is damaged or cut short"):
        all_documents(LocalFiles([str(path)]))


def test_the_byte_of_an_error_counts_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_BLOCK_BYTES", 4)
    (tmp_path / "a.txt").write_bytes("ä".encode() * 9 + b"\xff")
    with pytest.raises(ValueError, match="byte 18"):
        all_documents(LocalFiles([str(tmp_path / "a.txt")]))


def test_no_such_file(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    with pytest.raises(FileNotFoundError, match=r"no file matches '.*\*\.md'"):
        LocalFiles([str(tmp_path / "a.txt"), str(tmp_path / "*.md")])


def test_python_sources_are_the_standard_library():
    corpus = PythonSources()
    file = corpus.files.index("abc.py")
    ((name, text),) = documents(corpus, file)
    assert name == "abc.py"
    assert text == Path(corpus_module.python_root(), "abc.py").read_text()
    assert documents(corpus, file, skip=1) == []
