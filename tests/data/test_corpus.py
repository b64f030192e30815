import gzip
import itertools

import numpy as np
import pytest
from corpora import documents_of, write_rows
from refusals import refused
from running import run_python

from maxmars.data.corpus import Corpus, FileRange, TextFiles, Texts


def test_files_of_several_kinds_are_one_corpus(tmp_path, monkeypatch):
    """The names of documents, which decide the split, do not depend on where the files are."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_bytes("zweite\r\nZeile ä".encode())
    (tmp_path / "deep" / "c[1].txt").write_text("third")
    write_rows(tmp_path / "a.jsonl", ["x", "y"])
    marked = b"\xef\xbb\xbf" + (tmp_path / "a.jsonl").read_bytes()  # as programs of Windows do
    (tmp_path / "a.jsonl").write_bytes(marked)
    corpus = TextFiles([str(tmp_path / "**" / "*"), str(tmp_path / "a.jsonl")])
    assert isinstance(corpus, Corpus)
    assert documents_of(corpus) == [
        ("a.jsonl:0", "x"),
        (f"a.jsonl:{marked.index(b'y') - 10}", "y"),
        ("b.txt", "zweite\r\nZeile ä"),
        ("deep/c[1].txt", "third"),
    ]
    assert [file.num_bytes for file in corpus.files] == [len(marked), 16, 5]
    only = TextFiles([str(tmp_path / "deep" / "c[1].txt")])
    assert documents_of(only) == [("c[1].txt", "third")]
    monkeypatch.chdir(tmp_path)
    assert TextFiles(["**/*"]).fingerprint == corpus.fingerprint


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
    assert documents_of(TextFiles([pattern])) == [("a.txt", "linked"), ("deep/b.txt", "deep")]
    assert documents_of(TextFiles([str(texts / "a.txt")])) == [("a.txt", "linked")]
    (texts / "again.txt").symlink_to(texts / "a.txt")
    (texts / "own.txt").write_text("own")
    (texts / "o.txt").symlink_to("own.txt")
    for names in ("*.txt", "[ao]*.txt"):  # a file counts once
        found = documents_of(TextFiles([f"{tmp_path}/texts [[]1]/{names}"]))
        assert found == [("a.txt", "linked"), ("own.txt", "own")]
    for name in ("again.txt", "own.txt", "o.txt"):
        (texts / name).unlink()
    with refused(IsADirectoryError, "texts [[]1]/**"):
        TextFiles([str(texts)])
    (store / "blob").unlink()
    with refused(FileNotFoundError, texts / "a.txt"):
        TextFiles([pattern])


@pytest.mark.parametrize("count", [1, 7, 100])
@pytest.mark.parametrize("share", [(0.0, 1.0), (0.9, 1.0)])
@pytest.mark.parametrize("line", ["ä€𝄞 words \n", "€"])
def test_the_runs_of_a_text_are_the_text(tmp_path, line, share, count):
    text = line * 100
    (tmp_path / "a.txt").write_text(text)
    corpus = TextFiles([str(tmp_path / "a.txt")])
    places = np.linspace(*share, count + 1).tolist()
    parts = [FileRange(0, start, end) for start, end in itertools.pairwise(places)]
    texts = ["".join(document.blocks) for part in parts for document in corpus.read(part)]
    first, after = round(100 * share[0]), round(100 * share[1])
    assert "".join(texts) == line * (after - first)
    assert max(map(len, texts)) <= (share[1] - share[0]) * len(text) / count + len(line)


def test_a_text_larger_than_a_block_is_read_in_blocks(tmp_path):
    (tmp_path / "a.txt").write_text("ä€𝄞" * 500_000)
    documents = TextFiles([str(tmp_path / "a.txt")]).read(FileRange(0))
    blocks = list(next(documents).blocks)
    assert "".join(blocks) == "ä€𝄞" * 500_000
    assert max(len(block.encode()) for block in blocks) <= 2 << 20


def test_fingerprints_follow_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    before = TextFiles([str(tmp_path / "*")]).fingerprint
    assert TextFiles([str(tmp_path / "*")], text_field="other").fingerprint != before
    (tmp_path / "a.txt").write_text("firsts")
    assert TextFiles([str(tmp_path / "*")]).fingerprint != before
    assert Texts([("a", "b")]).fingerprint != Texts([("a", "c")]).fingerprint


READ = """
import resource, sys
from maxmars.data.corpus import FileRange, TextFiles
resource.setrlimit(resource.RLIMIT_DATA, (550 << 20, 550 << 20))
list(TextFiles(sys.argv[1:]).read(FileRange(0)))
"""


@pytest.mark.slow
def test_a_line_longer_than_the_memory_in_a_small_file_is_named(tmp_path):
    """A process with 550 MB of memory for data, of which it needs 380, reads one of 600 MB."""
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(b'{"text": "a"}\n{"text": "')
        for _ in range(600):
            file.write(b"a" * 1_000_000)
    errors = run_python("-c", READ, tmp_path / "bomb.jsonl.gz", code=1).stderr
    assert "ValueError: " in errors
    assert "bomb.jsonl.gz, line 2" in errors


def test_patterns_that_match_no_file(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for missing in (tmp_path / "*.md", tmp_path / "none.txt"):
        with refused(FileNotFoundError, missing):
            TextFiles([str(missing)])
    for elsewhere in ("https://example.com/book.txt", "s3://bucket/*.txt"):
        with refused(ValueError, elsewhere):
            TextFiles([elsewhere])
    with refused(IsADirectoryError, texts, ".jsonl"):
        TextFiles([f"{texts}/"])
    (texts / "a.csv").touch()
    with refused(IsADirectoryError, texts / "**" / "*.csv"):
        TextFiles([f"{texts}/"])
