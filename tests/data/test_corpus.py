import gzip
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from refusals import refused

from maxmars.data.corpus import Corpus, PythonSources, Run, TextFiles, Texts


def documents(corpus, run):
    return [(d.name, "".join(d.blocks)) for d in corpus.read(run)]


def all_documents(corpus):
    return [pair for file in range(len(corpus.files)) for pair in documents(corpus, Run(file))]


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
    corpus = TextFiles([pattern, str(tmp_path / "a.txt")])
    assert isinstance(corpus, Corpus)
    texts = {"a.txt": "first", "b.txt": "zweite\r\nZeile ä", "deep/c[1].txt": "third"}
    assert all_documents(corpus) == list(texts.items())
    assert corpus.num_bytes == [len(text.encode()) for text in texts.values()]
    only = TextFiles([str(tmp_path / "deep" / "c[1].txt")])
    assert all_documents(only) == [("c[1].txt", "third")]


def test_a_byte_order_mark_of_lines_is_no_text(tmp_path):
    """Programs of Windows write one."""
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    before = all_documents(TextFiles([str(tmp_path / "a.jsonl")]))
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.jsonl").read_bytes())
    texts = [text for _, text in all_documents(TextFiles([str(tmp_path / "a.jsonl")]))]
    assert texts == [text for _, text in before] == ["one", "two"]


def test_links_are_read_like_files_and_directories(tmp_path):
    """As caches of the Hugging Face hub, DVC and git-annex have them."""
    store, texts = tmp_path / "store", tmp_path / "texts [1]"
    for folder in (store / "deep", texts):
        folder.mkdir(parents=True)
    (store / "blob").write_text("linked")
    (store / "deep" / "b.txt").write_text("deep")
    (texts / "a.txt").symlink_to(store / "blob")
    (texts / "deep").symlink_to(store / "deep")
    (texts / "above").symlink_to(texts)
    pattern = f"{tmp_path}/texts [[]1]/**/*.txt"
    assert all_documents(TextFiles([pattern])) == [("a.txt", "linked"), ("deep/b.txt", "deep")]
    assert all_documents(TextFiles([str(texts / "a.txt")])) == [("a.txt", "linked")]
    with refused(IsADirectoryError, "texts [[]1]/*.txt'"):
        TextFiles([str(texts)])
    (store / "blob").unlink()
    with refused(FileNotFoundError, texts / "a.txt"):
        TextFiles([pattern])


@pytest.mark.parametrize("parts", [1, 2, 7, 100])
@pytest.mark.parametrize("share", [(0.0, 1.0), (0.0, 0.9), (0.9, 1.0)])
@pytest.mark.parametrize("line", ["ä€𝄞 words \n", "\n", "€"])
def test_the_parts_of_a_text_are_the_text(tmp_path, line, share, parts):
    text = line * 100
    (tmp_path / "a.txt").write_text(text)
    corpus = TextFiles([str(tmp_path / "a.txt")])
    runs = [Run(0, part, parts, share) for part in range(parts)]
    found = [document for run in runs for document in corpus.read(run)]
    assert [d.first for d in found] == [True] + [False] * (parts - 1)
    assert [d.last for d in found] == [False] * (parts - 1) + [True]
    read = [text for run in runs for _, text in documents(corpus, run)]
    first, after = round(100 * share[0]), round(100 * share[1])
    assert "".join(read) == line * (after - first)
    assert max(map(len, read)) <= (share[1] - share[0]) * len(text) / parts + len(line)


def test_a_text_larger_than_a_block_is_read_in_blocks(tmp_path):
    (tmp_path / "a.txt").write_text("ä€𝄞" * 500_000)
    documents = TextFiles([str(tmp_path / "a.txt")]).read(Run(0))
    blocks = list(next(documents).blocks)
    assert "".join(blocks) == "ä€𝄞" * 500_000
    assert max(len(block.encode()) for block in blocks) <= 2 << 20


@pytest.mark.parametrize("parts", [1, 2, 5, 99])
def test_the_parts_of_lines_are_the_lines(tmp_path, parts):
    texts = [f"{i} " * (i % 7) for i in range(60)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    corpus = TextFiles([str(tmp_path / "a.jsonl")])
    found = [pair for part in range(parts) for pair in documents(corpus, Run(0, part, parts))]
    assert found == all_documents(corpus)
    assert [text for _, text in found] == texts


READ = """
import re, sys
import pyarrow.parquet
from maxmars.data.corpus import Run, TextFiles

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])

corpus = TextFiles([sys.argv[1]])
before = peak()
size = sum(len(block) for document in corpus.read(Run(0)) for block in document.blocks)
print(size, peak() - before)
"""


@pytest.mark.seconds
def test_a_large_row_group_is_read_in_little_memory(tmp_path):
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    table = pyarrow.table({"text": [f"{i}" * 10**6 for i in range(10)] * 25})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, compression="zstd", use_dictionary=False, write_batch_size=1)
    command = [sys.executable, "-c", READ, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    size, grown = map(int, found.split())
    assert size == 250 * 10**6
    assert grown < size


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
    corpus = TextFiles([str(path)], text_field=field)
    if kind == "parquet":
        places = range(len(texts))
        parts = [pair for part in range(3) for pair in documents(corpus, Run(0, part, 3))]
        assert parts == all_documents(corpus)
    else:
        lines = [len(json.dumps({field: text, "n": 1})) + 1 for text in texts]
        places = [sum(lines[:i]) for i in range(len(lines))]
    expected = [(f"rows.{kind}:{i}", text) for i, text in zip(places, texts, strict=True)]
    assert all_documents(corpus) == expected
    with refused(ValueError, path, "'body'", "--text-field"):
        all_documents(TextFiles([str(path)], text_field="body"))
    with refused(ValueError, path, "int", "'n'"):
        all_documents(TextFiles([str(path)], text_field="n"))


def test_files_of_several_kinds_are_one_corpus(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ["x", "y"])
    (tmp_path / "a.txt").write_text("first")
    corpus = TextFiles([str(tmp_path / "*")])
    assert corpus.files == ["a.txt", "b.jsonl"]
    assert [text for _, text in all_documents(corpus)] == ["first", "x", "y"]


def test_names_do_not_depend_on_where_the_files_are(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / f"{name}.txt").write_text(name)
    monkeypatch.chdir(tmp_path)
    here, there = TextFiles(["text/*.txt"]), TextFiles([str(tmp_path / "text" / "*.txt")])
    assert all_documents(here) == all_documents(there) == [("a.txt", "a"), ("b.txt", "b")]
    assert here.fingerprint == there.fingerprint


def test_fingerprints_follow_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    before = TextFiles([str(tmp_path / "*")]).fingerprint
    assert TextFiles([str(tmp_path / "*")], text_field="other").fingerprint != before
    (tmp_path / "a.txt").write_text("firsts")
    assert TextFiles([str(tmp_path / "*")]).fingerprint != before
    assert Texts([("a", "b")]).fingerprint != Texts([("a", "c")]).fingerprint
    assert PythonSources().fingerprint == PythonSources().fingerprint


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("latin.txt", b"caf\xe9 ", "byte 3"),
        ("cut.txt", "ab€".encode()[:-1], "byte 2"),
        ("a.jsonl", b'{"text": "a"}\n{"te', "line 2"),
        ("a.jsonl", b"[1]\n", "line 1"),
        ("a.jsonl", b'{"t": 1}\n', "'text'"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], "cut short"),
        ("a.jsonl.gz", b"no gzip", "damaged"),
        ("a.jsonl.zst", b"no zstd", "damaged"),
        ("a.parquet", b"no parquet", "parquet"),
        ("a.doc", b"a,b", ".jsonl"),
        ("a.jsonl", b"[" * 200_000, "line 1"),
        ("a.jsonl", b'{"text": ' + b'{"a":' * 200_000, "line 1"),
    ],
)
def test_damaged_files(tmp_path, name, content, named):
    if name.endswith(("zst", "parquet")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with refused(ValueError, tmp_path / name, named):
        all_documents(TextFiles([str(tmp_path / name)]))


def test_zstd_that_is_cut_short(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compress_zstd(b'{"text": "a"}\n' * 1000)[:-5])
    with refused(ValueError, path):
        all_documents(TextFiles([str(path)]))


def test_the_byte_of_an_error_counts_from_the_start(tmp_path):
    (tmp_path / "a.txt").write_bytes("ä".encode() * 1_000_000 + b"\xff")
    with refused(ValueError, tmp_path / "a.txt", "byte 2000000"):
        all_documents(TextFiles([str(tmp_path / "a.txt")]))


@pytest.mark.parametrize("part", range(3))
def test_the_line_of_an_error_counts_from_the_start(tmp_path, part):
    lines = ['{"text": "a"}\n'] * 90
    lines[10 + 30 * part] = "no JSON at all\n"
    (tmp_path / "a.jsonl").write_text("".join(lines))
    corpus = TextFiles([str(tmp_path / "a.jsonl")])
    with refused(ValueError, f"a.jsonl, line {11 + 30 * part}"):
        documents(corpus, Run(0, part, 3))


@pytest.mark.slow
def test_a_line_of_gigabytes_in_a_small_file_is_named(tmp_path):
    """A process with 700 MB of memory for data reads it."""
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(b'{"text": "a"}\n{"text": "')
        for _ in range(1500):
            file.write(b"a" * 1_000_000)
    code = (
        "import resource, sys; from maxmars.data.corpus import Run, TextFiles;"
        "resource.setrlimit(resource.RLIMIT_DATA, (700 << 20, 700 << 20));"
        "list(TextFiles(sys.argv[1:]).read(Run(0)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "bomb.jsonl.gz")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "ValueError: " in result.stderr
    assert "bomb.jsonl.gz, line 2" in result.stderr


def test_no_such_file(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    with refused(FileNotFoundError, tmp_path / "*.md"):
        TextFiles([str(tmp_path / "a.txt"), str(tmp_path / "*.md")])
    for elsewhere in ("https://example.com/book.txt", "s3://bucket/*.txt"):
        with refused(ValueError, elsewhere):
            TextFiles([elsewhere])


def test_a_directory_is_no_file(tmp_path):
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    with refused(IsADirectoryError, tmp_path / "texts"):
        TextFiles([str(tmp_path / "texts")])
    (tmp_path / "texts" / "deep" / "a.jsonl").write_text("{}")
    with refused(IsADirectoryError, tmp_path / "texts/**/*.jsonl"):
        TextFiles([str(tmp_path / "texts")])
    for name in ("a.txt", "a.json", "b.json"):
        (tmp_path / "texts" / name).write_text("a")
    with refused(IsADirectoryError, tmp_path / "texts/*.txt"):
        TextFiles([f"{tmp_path / 'texts'}/"])


def test_python_sources_are_the_standard_library():
    corpus = PythonSources()
    ((name, text),) = documents(corpus, Run(corpus.files.index("abc.py")))
    assert name == "abc.py"
    assert text == Path(sysconfig.get_path("stdlib"), "abc.py").read_text()
    assert list(corpus.files) == sorted(corpus.files)
    assert not any("site-packages" in name or "/test/" in name for name in corpus.files)
