import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from maxmars.data import prepare as prepare_module
from maxmars.data.prepare import (
    prepare,
    prepare_python_sources,
    python_documents,
    text_documents,
)
from maxmars.data.sources import Split, read_metadata
from maxmars.data.streams import TokenShards
from maxmars.data.tokenizer import ByteTokenizer, GPT2Tokenizer

EOT = ByteTokenizer.eot


def documents(count, length=20):
    return [(f"doc {i}", f"{i:03d} ".ljust(length, "x")) for i in range(count)]


def run(docs, out, **options):
    return prepare(docs, out, **({"tokenizer": ByteTokenizer(), "source": "a test"} | options))


def read(out, split):
    shards = TokenShards(out, split)
    shards.verify()
    return shards.read(0, shards.num_tokens)


def pieces(tokens):
    """The texts between the end-of-text tokens."""
    assert tokens[-1] == EOT
    return "".join(chr(t) if t != EOT else "\n" for t in tokens).split("\n")[:-1]


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def test_whole_documents_go_to_one_split(tmp_path):
    docs = documents(250)
    metadata = run(docs, tmp_path / "out", validation_fraction=0.3)
    val = [
        text
        for name, text in docs
        if int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) < 0.3 * 2**64
    ]
    assert 50 < len(val) < 100
    assert pieces(read(tmp_path / "out", "val")) == val
    assert pieces(read(tmp_path / "out", "train")) == [t for _, t in docs if t not in set(val)]
    assert metadata == read_metadata(tmp_path / "out")
    assert metadata.splits["val"].num_documents == len(val)
    assert metadata.splits["train"].num_documents == 250 - len(val)
    assert metadata.splits["val"].num_tokens == 21 * len(val)


def test_split_of_a_document_does_not_depend_on_the_others(tmp_path):
    docs = documents(400)
    run(docs[:200], tmp_path / "a")
    run(docs[100:], tmp_path / "b")
    a, b = (set(pieces(read(tmp_path / name, "val"))) for name in "ab")
    both = {text for _, text in docs[100:200]}
    assert a & both == b & both != set()


@pytest.mark.parametrize("count", [1, 2, 99])
def test_few_documents_give_their_ends(tmp_path, count):
    docs = documents(count, length=30)
    metadata = run(docs, tmp_path / "out")
    assert pieces(read(tmp_path / "out", "train")) == [text[:27] for _, text in docs]
    assert pieces(read(tmp_path / "out", "val")) == [text[27:] for _, text in docs]
    assert metadata.splits["val"].num_documents == count


def test_border_between_the_two_rules(tmp_path):
    run(documents(100), tmp_path / "out")
    assert {len(text) for text in pieces(read(tmp_path / "out", "val"))} == {20}


def test_no_validation(tmp_path):
    run(documents(3), tmp_path / "out", validation_fraction=0.0)
    assert pieces(read(tmp_path / "out", "train")) == [text for _, text in documents(3)]
    with pytest.raises(ValueError, match="no split 'val', only train"):
        TokenShards(tmp_path / "out", "val")


def test_empty_documents_are_left_out(tmp_path):
    metadata = run([("a", ""), ("b", "x" * 50), ("c", "")], tmp_path / "out")
    assert metadata.splits["train"].num_documents == 1
    assert pieces(read(tmp_path / "out", "train")) == ["x" * 45]


@pytest.mark.parametrize("shard_tokens", [1, 7, 21, 22, 1000])
def test_shards_are_one_stream(tmp_path, shard_tokens):
    run(documents(8), tmp_path / "whole")
    metadata = run(documents(8), tmp_path / "parts", shard_tokens=shard_tokens)
    for split in ("train", "val"):
        tokens = read(tmp_path / "parts", split)
        assert np.array_equal(tokens, read(tmp_path / "whole", split))
        sizes = [shard.num_tokens for shard in metadata.splits[split].shards]
        assert sizes[:-1] == [shard_tokens] * (len(sizes) - 1)
        assert 0 < sizes[-1] <= shard_tokens
        assert metadata.splits[split].shards[0].file == f"{split}_00000.bin"


def test_same_documents_same_bytes(tmp_path):
    run(documents(120), tmp_path / "a", command="maxmars data prepare")
    run(iter(documents(120)), tmp_path / "b", command="maxmars data prepare")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


class WideTokenizer(ByteTokenizer):
    vocab_size = 70_000
    eot = 69_999


@pytest.mark.parametrize("count", [3, 120])
def test_large_vocabulary_is_uint32(tmp_path, count):
    metadata = run(documents(count), tmp_path / "out", tokenizer=WideTokenizer())
    assert metadata.dtype == "uint32"
    assert read(tmp_path / "out", "train")[-1] == 69_999


def test_gpt2(tmp_path, reference_dir, monkeypatch):
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(reference_dir / "data" / "tiktoken"))
    tokenizer = GPT2Tokenizer()
    text = "The quick brown fox jumps over the lazy dog. " * 10
    metadata = run([("fox", text)], tmp_path / "out", tokenizer=tokenizer)
    train, val = read(tmp_path / "out", "train"), read(tmp_path / "out", "val")
    assert train[-1] == val[-1] == tokenizer.eot
    assert tokenizer.decode(np.concatenate([train[:-1], val[:-1]])) == text
    assert (metadata.tokenizer, metadata.vocab_size) == ("gpt2", 50257)
    assert metadata.tokenizer_digest == tokenizer.digest


def test_refuses_an_existing_directory(tmp_path):
    (tmp_path / "out").mkdir()

    def never():
        raise AssertionError("must refuse before it reads")
        yield

    with pytest.raises(FileExistsError, match="out exists; delete it or choose another name"):
        run(never(), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("after", [0, 50, 150])
def test_failure_leaves_nothing(tmp_path, after):
    def failing():
        yield from documents(after)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(failing(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def fsync(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        run(documents(3), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_prepare_one_target_the_first_wins(tmp_path):
    def overtaken():
        yield "slow", "slow " * 10
        run([("fast", "fast " * 10)], tmp_path / "out")

    with pytest.raises(FileExistsError, match="out exists"):
        run(overtaken(), tmp_path / "out")
    assert pieces(read(tmp_path / "out", "train")) == ["fast " * 9]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_fraction": 1.0}, r"validation_fraction=1\.0 must lie in \[0, 1\)"),
        ({"validation_fraction": -0.1}, r"must lie in \[0, 1\)"),
        ({"shard_tokens": 0}, "shard_tokens=0 must be greater than zero"),
    ],
)
def test_bad_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(documents(3), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("docs", "split"), [([], "train"), ([("a", "")], "train"), ([("a", "12345")], "val")]
)
def test_empty_split(tmp_path, docs, split):
    with pytest.raises(ValueError, match=f"no text of a test has come into split '{split}'"):
        run(docs, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_text_documents(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_bytes("zweite\r\nZeile ä".encode())
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "deep" / "c[1].txt").write_text("third")
    pattern = str(tmp_path / "**" / "*.txt")
    found = list(text_documents([pattern, str(tmp_path / "a.txt")]))
    assert [Path(name).name for name, _ in found] == ["a.txt", "b.txt", "c[1].txt"]
    assert [text for _, text in found] == ["first", "zweite\r\nZeile ä", "third"]
    assert [t for _, t in text_documents([str(tmp_path / "deep" / "c[1].txt")])] == ["third"]


def test_text_documents_errors(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(FileNotFoundError, match=r"no file matches '.*\*\.md'"):
        text_documents([str(tmp_path / "a.txt"), str(tmp_path / "*.md")])
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 \(byte 3\)"):
        list(text_documents([str(tmp_path / "*.txt")]))


@pytest.fixture
def small_stdlib(tmp_path, monkeypatch):
    """A standard library of few files, and an empty cache beside it."""
    root = tmp_path / "stdlib"
    files = {
        "b.py": b"b = 1\n" * 40,
        "a/x.py": b"x = 2\n" * 40,
        "a/data.txt": b"no Python",
        "latin.py": b"# -*- coding: latin-1 -*-\n# caf\xe9\n",
        "test/test_b.py": b"test",
        "a/tests/test_x.py": b"test",
        "site-packages/numpy.py": b"package",
        "__pycache__/b.py": b"cache",
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    monkeypatch.setattr(prepare_module, "_python_root", lambda: root)
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path / "cache"))
    return root


def test_python_documents(small_stdlib):
    assert list(python_documents()) == [("a/x.py", "x = 2\n" * 40), ("b.py", "b = 1\n" * 40)]


def test_python_sources_are_prepared_once(small_stdlib, tmp_path, monkeypatch):
    path = prepare_python_sources()
    assert path.parent == tmp_path / "cache"
    tokens = read(path, "train")
    assert ByteTokenizer().decode(tokens[:6]) == "x = 2\n"
    monkeypatch.setattr(prepare_module, "prepare", None)  # must not be called again
    assert prepare_python_sources() == path


def test_python_sources_follow_the_files(small_stdlib):
    first = prepare_python_sources()
    (small_stdlib / "c.py").write_text("c = 3\n" * 40)
    second = prepare_python_sources()
    assert first != second
    assert read_metadata(second).splits["train"].num_documents == 3


def test_python_sources_by_several_at_once(small_stdlib, monkeypatch):
    real = prepare_module.prepare

    def overtaken(*args, **options):
        real(*args, **options)  # the other process
        return real(*args, **options)

    monkeypatch.setattr(prepare_module, "prepare", overtaken)
    path = prepare_python_sources()
    assert isinstance(TokenShards(path, "val").metadata.splits["val"], Split)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_damaged_python_sources(small_stdlib):
    path = prepare_python_sources()
    (path / "val_00000.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"val_00000\.bin has 0 bytes.*delete the directory"):
        prepare_python_sources()


@pytest.mark.smoke
def test_real_python_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path))
    path = prepare_python_sources()
    metadata = read_metadata(path)
    assert (metadata.tokenizer, metadata.vocab_size) == ("byte", 257)
    assert metadata.splits["train"].num_tokens > 5_000_000
    assert metadata.splits["val"].num_tokens > 512 * 1024 + 1  # the default of eval.num_windows
    names = [name for name, _ in python_documents()]
    assert names == sorted(names)
    assert "os.py" in names
    assert not any("site-packages" in name or "/test/" in name for name in names)
    # The text is the library itself: the whole of a module is found in one of the splits.
    text = Path(sysconfig.get_path("stdlib"), "abc.py").read_bytes()
    splits = [read(path, s).astype(np.uint16) for s in ("train", "val")]
    assert any(text in s[s < 256].astype(np.uint8).tobytes() for s in splits)


def test_light_imports():
    """Preparing text needs no accelerator library."""
    code = "import sys, maxmars.data.prepare; assert not {'jax', 'grain'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
