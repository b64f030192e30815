import hashlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from maxmars.data import corpus as corpus_module
from maxmars.data import prepare as prepare_module
from maxmars.data import tokenize as tokenize_module
from maxmars.data.corpus import Document, LocalFiles, PythonSources, Texts
from maxmars.data.partial_directory import PartialDirectory
from maxmars.data.prepare import prepare, prepare_python_sources
from maxmars.data.sources import Split, read_metadata
from maxmars.data.streams import TokenShards
from maxmars.data.tokenizer import ByteTokenizer, GPT2Tokenizer, load_tokenizer, tokenizer_in

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


@pytest.mark.parametrize("workers", [0, 2])
def test_real_texts_are_the_tokens_of_tiktoken(tmp_path, reference_dir, monkeypatch, workers):
    """Token for token, and back to the same text, although long documents are cut for workers."""
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(reference_dir / "data" / "tiktoken"))
    pattern = str(reference_dir / "data" / "*.txt")
    tokenizer = GPT2Tokenizer()
    metadata = run(LocalFiles([pattern]), tmp_path / "out", tokenizer=tokenizer, workers=workers)
    assert (metadata.tokenizer, metadata.vocab_size) == ("gpt2", 50257)
    assert metadata.tokenizer_digest == tokenizer.digest
    encoding = tiktoken.get_encoding("gpt2")
    streams = [read(tmp_path / "out", split) for split in ("train", "val")]
    splits = [np.split(stream, np.flatnonzero(stream == 50256) + 1) for stream in streams]
    paths = sorted((reference_dir / "data").glob("*.txt"))
    assert len(paths) >= 3
    for path, train, val in zip(paths, *(split[:-1] for split in splits), strict=True):
        text = path.read_text()
        found = np.concatenate([train[:-1], val[:-1]])
        assert found.tolist() == encoding.encode_ordinary(text)
        assert len(val) - 1 == int(len(found) * 0.1)
        assert encoding.decode(found.tolist()) == text
        assert text.startswith(tokenizer.decode(found[:5000]))


def test_json_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    ours = load_tokenizer(tmp_path / "words.json", eot_token="</s>")
    for workers in (0, 1):
        out = tmp_path / f"out{workers}"
        docs = [("x", "a b c " * 10), ("y", "  ")]
        metadata = run(docs, out, tokenizer=ours, workers=workers)
        assert read(out, "train").tolist() == [2, 3, 0] * 9 + [1]
        assert metadata.splits["train"].num_documents == 1  # a text without tokens is left out
        assert (metadata.tokenizer, metadata.eot_token) == ("tokenizer.json", "</s>")
        assert (out / "tokenizer.json").read_bytes() == (tmp_path / "words.json").read_bytes()
        found = tokenizer_in(out, metadata.tokenizer, metadata.eot_token)
        assert found.digest == metadata.tokenizer_digest


def test_refuses_an_existing_directory(tmp_path):
    (tmp_path / "out").mkdir()

    never = Failing(documents(3))
    never.stop = 0
    with pytest.raises(FileExistsError, match="out exists; delete it or choose another name"):
        run(never, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


class Failing(Texts):
    """Texts that cannot be read further than the document `stop`."""

    stop: int | None = None

    def read(self, file, skip):
        for number, document in enumerate(super().read(file, skip), skip):
            if number == self.stop:
                raise KeyboardInterrupt
            yield document


@pytest.fixture
def small_batches(monkeypatch):
    """A batch for every few documents, so that tests need little text."""
    monkeypatch.setattr(tokenize_module, "BATCH_CHARACTERS", 100)


def litter(partial):
    """What a run wrote after it had last saved its state may be anything."""
    finished = set()
    if (partial / "state.json").exists():
        splits = json.loads((partial / "state.json").read_text())["splitter"]["splits"]
        finished = {shard["file"] for split in splits.values() for shard in split["shards"]}
    for path in [*(partial / "content").iterdir(), partial / "content" / "train_09999.bin"]:
        if path.name not in finished:
            with path.open("ab") as file:
                file.write(b"junk")


@pytest.mark.parametrize("shard_tokens", [500, 10_000])
@pytest.mark.parametrize(("count", "stops"), [(250, [0, 40, 99, 130, 249]), (60, [7, 59])])
def test_an_interrupted_run_is_continued(
    tmp_path, monkeypatch, small_batches, shard_tokens, count, stops
):
    monkeypatch.setattr(prepare_module, "_SAVE_EVERY_S", 0)
    run(documents(count), tmp_path / "whole", shard_tokens=shard_tokens)
    for stop in stops:
        texts = Failing(documents(count))
        texts.stop = stop
        with pytest.raises(KeyboardInterrupt):
            run(texts, tmp_path / "out", shard_tokens=shard_tokens)
        assert not (tmp_path / "out").exists()
        litter(tmp_path / "out.partial")
    texts = Failing(documents(count))
    run(texts, tmp_path / "out", shard_tokens=shard_tokens)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}


def test_what_is_finished_is_not_read_again(tmp_path, monkeypatch, small_batches):
    texts, read = Failing(documents(250)), []
    texts.stop = 200
    with pytest.raises(KeyboardInterrupt):
        run(texts, tmp_path / "out", shard_tokens=100)
    real = Texts.read

    def counting(self, file, skip):
        read.append(skip)
        return real(self, file, skip)

    monkeypatch.setattr(Texts, "read", counting)
    run(Texts(documents(250)), tmp_path / "out", shard_tokens=100)
    assert 180 < read[0] < 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_tokens": 77}, "shard_tokens was 500, now 77"),
        ({"validation_fraction": 0.2}, r"validation_fraction was 0\.1, now 0\.2"),
        ({"source": "another"}, "source was 'a test', now 'another'"),
        ({"part": (0, 2)}, r"part was None, now \[0, 2\]"),
    ],
)
def test_other_arguments_do_not_continue(tmp_path, small_batches, options, message):
    texts = Failing(documents(250))
    texts.stop = 200
    with pytest.raises(KeyboardInterrupt):
        run(texts, tmp_path / "out", shard_tokens=500)
    with pytest.raises(ValueError, match=f"other arguments: .*{message}.*delete that directory"):
        run(documents(250), tmp_path / "out", **({"shard_tokens": 500} | options))
    with pytest.raises(ValueError, match="other arguments: corpus was"):
        run(documents(251), tmp_path / "out", shard_tokens=500)
    run(documents(250), tmp_path / "out", shard_tokens=500)


def test_full_disk_while_writing_can_be_continued(tmp_path, monkeypatch):
    def fsync(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        run(documents(3), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    run(documents(3), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_too_small_a_disk_is_said_before_anything_is_read(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda path: usage)
    texts = Failing(documents(250))
    texts.stop = 0
    with pytest.raises(ValueError, match=r"need about .* GB in .*, which has 0\.0 GB free"):
        run(texts, tmp_path / "out")
    monkeypatch.undo()
    run(documents(250), tmp_path / "out", shard_tokens=5000)  # other arguments: nothing was saved


def test_two_cannot_prepare_one_target_at_once(tmp_path):
    class Overtaken(Texts):
        def read(self, file, skip):
            with pytest.raises(FileExistsError, match=rf"process {os.getpid()} is preparing"):
                run([("fast", "fast " * 10)], tmp_path / "out")
            return super().read(file, skip)

    run(Overtaken([("slow", "slow " * 10)]), tmp_path / "out")
    assert pieces(read(tmp_path / "out", "train")) == ["slow " * 9]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_that_waits_finds_the_result(tmp_path):
    partial = PartialDirectory(tmp_path / "out")
    with partial, ThreadPoolExecutor() as pool:
        waiting = pool.submit(run, documents(3), tmp_path / "out", wait=True)
        (partial.content / "file").write_text("the result")
        partial.publish(partial.content)
    with pytest.raises(FileExistsError, match="out exists"):
        waiting.result()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]


def test_a_foreign_directory_is_left_alone(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is no unfinished preparation"):
        run(documents(3), tmp_path / "out")
    assert (tmp_path / "out.partial" / "mine").read_text() == "mine"


def test_what_a_publisher_left_is_removed(tmp_path):
    """It was killed between the renaming and the removal."""
    (tmp_path / "out.partial").mkdir()
    for name in ("lock", "state.json", "waiting.bin"):
        (tmp_path / "out.partial" / name).write_text("{}")
    run(documents(3), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("count", [1, 7, 250])
def test_workers_and_batches_do_not_show(tmp_path, monkeypatch, small_batches, count):
    docs = [(f"doc {i}", f"{i} {'ä long text ' * (1 + i % 9 * 5)}") for i in range(count)]
    run(docs, tmp_path / "two", workers=2)
    monkeypatch.setattr(tokenize_module, "BATCH_CHARACTERS", 1 << 20)
    run(docs, tmp_path / "none", workers=0)
    assert contents(tmp_path / "two") == contents(tmp_path / "none")


class Dying(ByteTokenizer):
    def encode(self, text):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_one_error(tmp_path):
    with pytest.raises(ChildProcessError, match="one of the 2 tokenising processes has died"):
        run(documents(3), tmp_path / "out", tokenizer=Dying(), workers=2)


def test_reading_ahead_is_bounded(small_batches):
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield Document("a", ("x" * 90,))

    class Endless(Texts):
        def read(self, file, skip):
            return endless()

    stream = tokenize_module.pieces(
        Endless([]), [0], ByteTokenizer(), start=tokenize_module.Position()
    )
    work = tokenize_module.BatchTokenizer(ByteTokenizer(), "uint16", 0.1)
    tokens = tokenize_module.tokenize(tokenize_module.batches(stream), work, workers=1)
    for _ in range(20):
        next(tokens)
    tokens.close()
    assert read < 30


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("count", [5, 250])
def test_starts_of_documents(tmp_path, small_batches, split, count):
    docs = [(name, text * (i % 13)) for i, (name, text) in enumerate(documents(count))]
    metadata = run(docs, tmp_path / "out", shard_tokens=500)
    tokens, described = read(tmp_path / "out", split), metadata.splits[split].documents
    data = (tmp_path / "out" / described.file).read_bytes()
    starts = np.frombuffer(data, "<u8")
    assert described.count == len(starts) == metadata.splits[split].num_documents
    assert described.sha256 == hashlib.sha256(data).hexdigest()
    assert starts.tolist() == [0, *(np.flatnonzero(tokens == EOT)[:-1] + 1).tolist()]


def test_a_long_document_is_cut_and_continued(tmp_path, monkeypatch, small_batches):
    """A text file is one document; finished shards of it are kept as well."""
    monkeypatch.setattr(prepare_module, "_SAVE_EVERY_S", 0)
    monkeypatch.setattr(corpus_module, "_BLOCK_BYTES", 70)
    (tmp_path / "long.txt").write_text("".join(f"wörd{i} " for i in range(400)))
    run(LocalFiles([str(tmp_path / "long.txt")]), tmp_path / "whole")
    real, blocks = LocalFiles._read_text, 0

    def failing(self, file):
        nonlocal blocks
        for block in real(self, file):
            if (blocks := blocks + 1) == 30:
                raise KeyboardInterrupt
            yield block

    monkeypatch.setattr(LocalFiles, "_read_text", failing)
    with pytest.raises(KeyboardInterrupt):
        run(LocalFiles([str(tmp_path / "long.txt")]), tmp_path / "out")
    state = json.loads((tmp_path / "out.partial" / "state.json").read_text())
    assert state["position"]["document"] == 0
    assert state["position"]["characters"] > 1000
    run(LocalFiles([str(tmp_path / "long.txt")]), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_fraction": 1.0}, r"validation_fraction=1\.0 must lie in \[0, 1\)"),
        ({"validation_fraction": -0.1}, r"must lie in \[0, 1\)"),
        ({"shard_tokens": 0}, "shard_tokens=0 must be greater than zero"),
        ({"workers": -1}, "workers=-1 must not be negative"),
        ({"record_tokens": 0}, "record_tokens=0 must be greater than zero"),
        ({"part": (2, 2)}, "part=2/2 must be i/n with 0 <= i < n"),
        ({"part": (0, 2), "record_tokens": 9}, "a part cannot be a TFDS dataset"),
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
    monkeypatch.setattr(corpus_module, "python_root", lambda: root)
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path / "cache"))
    return root


def test_python_documents(small_stdlib):
    found = [
        (document.name, "".join(document.blocks))
        for file in range(3)
        for document in PythonSources().read(file, 0)
    ]
    assert found == [("a/x.py", "x = 2\n" * 40), ("b.py", "b = 1\n" * 40)]


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


def test_python_sources_by_several_at_once(small_stdlib):
    with ThreadPoolExecutor() as pool:
        paths = [future.result() for future in [pool.submit(prepare_python_sources) for _ in "abc"]]
    assert isinstance(TokenShards(paths[0], "val").metadata.splits["val"], Split)
    assert [p.name for p in paths[0].parent.iterdir()] == [paths[0].name]
    assert len(set(paths)) == 1


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
    names = list(PythonSources().files)
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
