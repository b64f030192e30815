import hashlib
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from corpora import is_held_out, write_rows
from refusals import refused

from maxmars.data.corpus import PythonSources, TextFiles, Texts
from maxmars.data.formats import open_directory
from maxmars.data.metadata import read_metadata
from maxmars.data.prepare import prepare, prepare_python_sources
from maxmars.data.tokenizer import ByteTokenizer, GPT2Tokenizer, load

EOT = ByteTokenizer.eot


def documents(count, length=20):
    return [(f"doc {i}", f"{i:03d} ".ljust(length, "x")) for i in range(count)]


def run(docs, out, **options):
    return prepare(docs, out, **({"tokenizer": ByteTokenizer(), "source": "a test"} | options))


def read(out, split):
    shards = open_directory(out).stream(split)
    for shard in shards.directory.metadata.splits[split].shards:
        assert hashlib.sha256((out / shard.file).read_bytes()).hexdigest() == shard.sha256
    return shards.read(0, shards.num_tokens)


def pieces(tokens):
    """The texts between the end-of-text tokens."""
    assert tokens[-1] == EOT
    return "".join(chr(t) if t != EOT else "\0" for t in tokens).split("\0")[:-1]


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


@pytest.mark.parametrize(
    "options",
    [{}, {"shard_tokens": 77}, {"task_bytes": 200}, {"shard_tokens": 500, "task_bytes": 1500}],
)
def test_a_split_is_a_stream_of_whole_documents(tmp_path, options):
    docs = [(name, text * (i % 7)) for i, (name, text) in enumerate(documents(60))]
    metadata = run(docs, tmp_path / "out", validation_fraction=0.3, **options)
    assert metadata == read_metadata(tmp_path / "out")
    for split, held_out in (("train", False), ("val", True)):
        tokens, described = read(tmp_path / "out", split), metadata.splits[split]
        texts = [text for name, text in docs if text and is_held_out(name, 0.3) == held_out]
        assert pieces(tokens) == texts
        assert (described.num_documents, described.num_tokens) == (len(texts), len(tokens))
        sizes = [shard.num_tokens for shard in described.shards]
        assert (len(sizes) > 1) == bool(options)
        assert max(sizes) <= options.get("shard_tokens", len(tokens))
        data = (tmp_path / "out" / described.documents.file).read_bytes()
        assert described.documents.count == len(texts)
        assert described.documents.sha256 == hashlib.sha256(data).hexdigest()
        starts = [0, *(np.flatnonzero(tokens == EOT)[:-1] + 1).tolist()]
        assert np.frombuffer(data, "<u8").tolist() == starts


class WideTokenizer(ByteTokenizer):
    vocab_size = 70_000
    eot = 69_999


def test_large_vocabulary_is_uint32(tmp_path):
    assert run(documents(30), tmp_path / "out", tokenizer=WideTokenizer()).dtype == "uint32"
    assert read(tmp_path / "out", "train")[-1] == 69_999


@pytest.mark.seconds
def test_real_texts_are_the_tokens_of_tiktoken(tmp_path, reference_dir, tiktoken_cache):
    """Token for token, although long texts are cut for tasks."""
    tiktoken, gpt2 = pytest.importorskip("tiktoken"), GPT2Tokenizer()
    corpus = TextFiles([str(reference_dir / "data" / "*.txt")])
    metadata = run(corpus, tmp_path / "out", workers=2, task_bytes=300_000, tokenizer=gpt2)
    assert (metadata.tokenizer, metadata.vocab_size) == ("gpt2", 50257)
    assert metadata.tokenizer_digest == gpt2.digest
    encoding = tiktoken.get_encoding("gpt2")
    streams = [read(tmp_path / "out", split) for split in ("train", "val")]
    splits = [np.split(stream, np.flatnonzero(stream == 50256) + 1) for stream in streams]
    paths = sorted((reference_dir / "data").glob("*.txt"))
    assert len(paths) >= 3
    for path, train, val in zip(paths, *(split[:-1] for split in splits), strict=True):
        text, tail = path.read_bytes().decode(), encoding.decode(val[:-1])
        assert 0.09 < len(tail) / len(text) < 0.11
        assert text.endswith(tail)
        assert train[:-1].tolist() == encoding.encode_ordinary(text[: -len(tail)])
        assert val[:-1].tolist() == encoding.encode_ordinary(tail)


class Watched(ByteTokenizer):
    """Keeps what it tokenises."""

    def __init__(self):
        self.texts = []

    def encode(self, text):
        self.texts.append(text)
        return super().encode(text)


@pytest.mark.parametrize("line", ["words in a line of a text\n", "ä"])
def test_long_documents_are_tokenised_in_pieces(tmp_path, line):
    """Their length is bounded, and they end after line breaks if there are any."""
    text, tokenizer = line * (4_000_000 // len(line)), Watched()
    run([("a", text)], tmp_path / "out", tokenizer=tokenizer, validation_fraction=0.0)
    tokens = read(tmp_path / "out", "train")[:-1]
    assert np.array_equal(tokens, np.frombuffer(text.encode(), np.uint8))
    pieces_of_text = [text for text in tokenizer.texts if len(text) > 1]
    assert len(pieces_of_text) >= 4
    assert max(map(len, pieces_of_text)) < 1_200_000
    assert all(piece.endswith(line[-1]) for piece in pieces_of_text)


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_blank_before_a_text_is_not_before_each_piece(tmp_path, scheme):
    """As tokenizers of SentencePiece put it there."""
    vocabulary = {c: i for i, c in enumerate(["<unk>", "</s>", *"▁word\n0123456789"])}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    made.save(str(tmp_path / "own.json"))
    ours = load(tmp_path / "own.json", eot_token="</s>")
    text = "".join(f"word {i}\n" for i in range(9_000))
    (tmp_path / "a.txt").write_text(text)
    options = {"tokenizer": ours, "validation_fraction": 0.0, "task_bytes": 30_000}
    run(TextFiles([str(tmp_path / "a.txt")]), tmp_path / "out", **options)
    assert ours.decode(read(tmp_path / "out", "train")[:-1]) == text
    read_back = load(tmp_path / "out")
    assert (read_back.eot_token, read_back.digest) == ("</s>", ours.digest)


class Failing(ByteTokenizer):
    """Cannot tokenise one text."""

    def __init__(self, text):
        self.text = text

    def encode(self, text):
        if text == self.text:
            raise KeyboardInterrupt
        return super().encode(text)


def test_an_interrupted_run_is_continued(tmp_path, capfd):
    docs, out = documents(250), tmp_path / "out"
    options = {"task_bytes": 500}
    run(docs, tmp_path / "whole", **options)
    for stop in (0, 40, 249):
        with pytest.raises(KeyboardInterrupt):
            run(docs, out, tokenizer=Failing(docs[stop][1]), **options)
        with refused(FileNotFoundError, out, "unfinished", "maxmars data prepare"):
            read_metadata(out)
    # What a killed process was writing may be anything.
    (out / ".train_00009.bin.1234.tmp").write_bytes(b"junk")
    (out / "tasks" / "00002.json").write_text("{")
    run(docs, out, **options)
    assert "out: 9 of 10 tasks are done" in capfd.readouterr().err
    assert contents(out) == contents(tmp_path / "whole")


def begin(out, **options):
    """Leave an unfinished preparation of 250 documents."""
    docs = documents(250)
    with pytest.raises(KeyboardInterrupt):
        run(docs, out, tokenizer=Failing(docs[-1][1]), **options)


def test_other_arguments_do_not_continue(tmp_path):
    begin(tmp_path / "out", task_bytes=500)
    for name, earlier, now in (
        ("shard_tokens", 100_000_000, 77),
        ("validation_fraction", 0.1, 0.2),
        ("source", "a test", "another"),
        ("task_bytes", 500, 1000),
    ):
        with refused(ValueError, tmp_path / "out", name, repr(earlier), repr(now)):
            run(documents(250), tmp_path / "out", **({"task_bytes": 500} | {name: now}))
    plan = tmp_path / "out" / "plan.json"
    begun = plan.read_text()
    plan.write_text(begun.replace('"version": ', '"version": 1'))
    with refused(ValueError, tmp_path / "out", "version 1", "delete"):
        run(documents(250), tmp_path / "out", task_bytes=500)
    plan.write_text(begun)
    run(documents(250), tmp_path / "out", task_bytes=500)


def test_a_text_that_changes_meanwhile_is_told_as_that(tmp_path):
    out, options = tmp_path / "out", {"source": "*.jsonl", "task_bytes": 50}
    for name in ("a.jsonl", "b.jsonl"):
        write_rows(tmp_path / name, [f"row {i}" for i in range(20)])
    with pytest.raises(KeyboardInterrupt):
        run(TextFiles([str(tmp_path / "a.jsonl")]), out, tokenizer=Failing("row 19"), **options)
    before = sorted(out.rglob("*"))
    os.utime(tmp_path / "a.jsonl", (1, 1))
    for pattern in ("a.jsonl", "*.jsonl"):
        corpus = TextFiles([str(tmp_path / pattern)])
        with refused(ValueError, out, "another text", "*.jsonl") as raised:
            run(corpus, out, **options)
        assert corpus.fingerprint[:8] not in str(raised.value)
    assert sorted(out.rglob("*")) == before


def test_white_space_alone_is_no_document(tmp_path):
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "a.txt").write_text("\n\n a")
    (tmp_path / "rows.jsonl").write_text('{"text": " "}\n{"text": ""}\n{"text": "b"}\n')
    run(TextFiles([f"{tmp_path}/*.*"]), tmp_path / "out", validation_fraction=0.0)
    assert pieces(read(tmp_path / "out", "train")) == ["\n\n a", "b"]
    with refused(ValueError, tmp_path / "out", "'val'", "train"):
        open_directory(tmp_path / "out").stream("val")


@pytest.mark.parametrize("task_bytes", [60, 10_000])
def test_documents_of_both_splits_are_counted(tmp_path, task_bytes):
    unique = [f"{i} is said once" for i in range(50)]
    held_out = Texts([("v", "said twice"), ("w", "said twice"), ("x", "new"), ("y", unique[7])])
    metadata = run(
        [(text, text) for text in [*unique, "said twice", *unique]],
        tmp_path / "out",
        validation=held_out,
        validation_fraction=0.0,
        task_bytes=task_bytes,
    )
    assert metadata.repeated == read_metadata(tmp_path / "out").repeated == 3
    other = run(
        [("a", "said twice\n")], tmp_path / "new", validation=held_out, validation_fraction=0.0
    )
    assert other.repeated is None


def test_other_arguments_may_follow_where_nothing_was_done(tmp_path):
    begin(tmp_path / "out")
    run(documents(251), tmp_path / "out", shard_tokens=700)
    run(documents(251), tmp_path / "whole", shard_tokens=700)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("names", [["mine"], ["plan.json"], ["meta.json", "plan.json"]])
def test_a_directory_with_something_in_it_is_left_alone(tmp_path, names):
    (tmp_path / "out" / "tasks").mkdir(parents=True)
    for name in [*names, "tasks/mine"]:
        (tmp_path / "out" / name).write_text('{"resources": "mine"}')
    before = sorted(tmp_path.rglob("*"))
    with refused((FileExistsError, ValueError), tmp_path / "out"):
        run(documents(3), tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_text_that_the_tokenizer_refuses_is_named(tmp_path):
    """As a WordLevel vocabulary without a token for unknown words, which raises a plain error."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<|endoftext|>": 1}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "own.json"))
    (tmp_path / "text.jsonl").write_text('{"text": "a a"}\n{"text": "a b"}\n')
    corpus, own = TextFiles([str(tmp_path / "text.jsonl")]), load(tmp_path / "own.json")
    with refused(ValueError, "text.jsonl:16", "tokenizer.json"):
        run(corpus, tmp_path / "out", tokenizer=own)


def test_what_a_killed_last_step_left_is_removed(tmp_path):
    """It was killed when meta.json was there and the rest not yet gone."""
    out = tmp_path / "out"
    run(documents(3), out)
    before = contents(out)
    (out / "tasks").mkdir()
    for name in ("plan.json", "tasks/00000.json", ".train_00000.bin.12.tmp"):
        (out / name).write_text("{}")
    with refused(FileExistsError, out):
        run(documents(3), out)
    assert contents(out) == before


def test_another_process_may_complete_it_during_a_task(tmp_path):
    docs, out = documents(30), tmp_path / "out"

    class Overtaken(ByteTokenizer):
        def encode(self, text):
            if not (out / "meta.json").exists():
                run(docs, out, task_bytes=200)
            return super().encode(text)

    metadata = run(docs, out, tokenizer=Overtaken(), task_bytes=200)
    assert metadata == run(docs, tmp_path / "whole", task_bytes=200)
    assert contents(out) == contents(tmp_path / "whole")


class Dying(ByteTokenizer):
    def encode(self, text):
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_error_of_a_worker_is_one_error(tmp_path):
    with refused(ChildProcessError, "--workers"):
        run(documents(3), tmp_path / "out", tokenizer=Dying(), workers=2)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 99 + "no json\n")
    with refused(ValueError, "a.jsonl, line 100"):
        run(TextFiles([str(tmp_path / "*.jsonl")]), tmp_path / "out", workers=1, task_bytes=500)


@pytest.mark.parametrize(
    ("docs", "options", "named"),
    [
        (documents(3), {"validation_fraction": 1.5}, "validation_fraction=1.5"),
        (documents(3), {"shard_tokens": 0}, "shard_tokens=0"),
        (documents(3), {"workers": -1}, "workers=-1"),
        ([("a", "")], {}, "'train'"),
        ([("a", "1")], {}, "'val'"),
    ],
)
def test_what_is_refused_leaves_no_directory(tmp_path, docs, options, named):
    with refused(ValueError, named):
        run(docs, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_python_documents(tmp_path):
    library = tmp_path / "stdlib"
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
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(data)
    corpus = PythonSources(library)
    assert [file.name for file in corpus.files] == ["a/x.py", "b.py", "latin.py"]
    run(corpus, tmp_path / "out", validation_fraction=0.0)
    assert pieces(read(tmp_path / "out", "train")) == ["x = 2\n" * 40, "b = 1\n" * 40]
    assert PythonSources(library).fingerprint == corpus.fingerprint
    (library / "c.py").write_text("c = 3\n")
    assert PythonSources(library).fingerprint != corpus.fingerprint


PREPARE = "from maxmars.data.prepare import prepare_python_sources as p; print(p())"


@pytest.mark.slow
@pytest.mark.smoke
def test_python_sources_are_prepared_by_several_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path))
    command = [sys.executable, "-c", PREPARE]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (path,) = {Path(process.communicate()[0].strip()) for process in started}
    assert [process.returncode for process in started] == [0, 0]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    metadata = read_metadata(path)
    splits = metadata.splits.values()
    files = {file.file for split in splits for file in (*split.shards, split.documents)}
    files |= {"meta.json", "tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in path.iterdir()} == files
    before = path.stat().st_mtime_ns
    assert prepare_python_sources() == path
    assert path.stat().st_mtime_ns == before  # it is not made again
    assert metadata.splits["train"].num_tokens > 5_000_000
    assert metadata.splits["val"].num_tokens > 512 * 1024 + 1  # the default of eval.num_windows
    # The text is the library itself: the whole of a module is in one of the splits.
    text = Path(sysconfig.get_path("stdlib"), "abc.py").read_bytes()
    streams = [read(path, split).astype(np.uint16) for split in ("train", "val")]
    assert any(text in s[s < 256].astype(np.uint8).tobytes() for s in streams)
    shard = path / metadata.splits["val"].shards[0].file
    shard.write_bytes(b"")
    with refused(ValueError, shard, "0 bytes"):
        prepare_python_sources()
