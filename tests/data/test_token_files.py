"""Streams of tokens in every format, on a disk."""

import pickle
import shutil

import numpy as np
import pytest
from refusals import refused
from token_directories import write_llm_c, write_nanogpt, write_shards

from maxmars.config import TokenFilesConfig
from maxmars.data.formats import open_directory, vocab_size_of
from maxmars.data.token_files import TokenStream
from maxmars.data.tokenizer import (
    ByteTokenizer,
    copy_tokenizer,
    load,
    save,
    tokenizer_of_tokens,
)

STREAM = np.random.default_rng(0).integers(0, 50257, 1000)
VAL = np.random.default_rng(1).integers(0, 50257, 300)
LLAMA = {"magic": 20240801, "version": 7, "dtype": "<u4"}


def write_llm_c_shards(directory, stream=STREAM, val=VAL):
    for i, tokens in enumerate(np.split(stream, [400, 401])):
        write_llm_c(directory / f"fineweb_train_{i + 9:06d}.bin", tokens)
    write_llm_c(directory / "fineweb_val_000000.bin", val)


def write_numpy_shards(directory, stream=STREAM, val=VAL, dtype="uint16"):
    directory.mkdir(exist_ok=True)
    for i, tokens in enumerate(np.split(stream, [400, 401])):
        np.save(directory / f"edufineweb_train_{i + 1:06d}.npy", tokens.astype(dtype))
    np.save(directory / "edufineweb_val_000000.npy", val.astype(dtype))


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A directory of each kind with the streams above."""
    root = tmp_path_factory.mktemp("formats")
    write_shards(root / "shards", STREAM, VAL, tokenizer="gpt2", vocab_size=50257)
    one_each = {"sizes": (1,) * 150 + (850,), "dtype": "uint32"}
    write_shards(root / "tiny", STREAM, VAL, tokenizer="gpt2", vocab_size=50257, **one_each)
    write_nanogpt(root / "nanogpt", STREAM, VAL)
    write_llm_c_shards(root / "llm.c")
    write_numpy_shards(root / "numpy")
    write_llm_c(root / "llama" / "tiny_train.bin", STREAM, **LLAMA)
    write_llm_c(root / "llama" / "tiny_val.bin", VAL, **LLAMA)
    return {name: root / name for name in NAMES}


NAMES = ("shards", "tiny", "nanogpt", "llm.c", "numpy", "llama")


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_stream(directories, name):
    directory = directories[name]
    tokenizer = "llama-3" if name == "llama" else "gpt2"
    for split, expected in (("train", STREAM), ("val", VAL)):
        stream = open_directory(directory).stream(split)
        assert isinstance(stream, TokenStream)
        assert stream.split == split
        assert (stream.vocabulary.tokenizer, stream.num_tokens) == (tokenizer, len(expected))
        assert stream.vocabulary.size == (128256 if tokenizer == "llama-3" else 50257)
        assert str(directory) in repr(stream)
        for length in (0, 1, 65, len(expected)):
            starts = np.append(np.arange(0, len(expected) - length, 29), len(expected) - length)
            starts = np.random.default_rng(2).permutation(starts)
            windows = stream.read_windows(starts, length)
            assert windows.dtype == np.int32
            assert np.array_equal(windows, expected[starts[:, None] + np.arange(length)])
        assert np.array_equal(stream.read(7, 90), expected[7:97])
        for start, length in ((-1, 5), (len(expected) - 3, 4), (len(expected), 1), (0, -1)):
            with refused(ValueError, f"the {len(expected)} tokens"):
                stream.read(start, length)
    stream = open_directory(directory).stream("train")  # it travels to a process as its paths
    assert np.array_equal(pickle.loads(pickle.dumps(stream)).read(0, 1000), STREAM)
    size = len(pickle.dumps(stream))
    stream.read(0, 1000)
    assert len(pickle.dumps(stream)) == size


def test_the_digest_is_of_the_data_and_not_of_the_path(directories, tmp_path):
    digests = {name: open_directory(path).digest() for name, path in directories.items()}
    assert len(set(digests.values())) == len(directories)
    for name in ("shards", "llm.c"):
        shutil.copytree(directories[name], tmp_path / name)
        assert open_directory(tmp_path / name).digest() == digests[name]


@pytest.mark.parametrize("write", [write_nanogpt, write_shards])
def test_other_data_of_the_same_sizes_have_another_digest(tmp_path, write):
    vocabulary = {"vocab_size": 50257} if write is write_shards else {}
    for name, stream in (("a", STREAM), ("b", np.append(STREAM[1:], 0))):
        write(tmp_path / name, stream, VAL, **vocabulary)
    assert len({open_directory(tmp_path / name).digest() for name in "ab"}) == 2


def test_ids_outside_the_vocabulary_are_named(tmp_path):
    stream = STREAM.copy()
    stream[777] = 60000
    write_nanogpt(tmp_path / "nanogpt", stream, VAL)
    with refused(ValueError, "id 60000", "'gpt2'", "--data.vocab-size"):
        open_directory(tmp_path / "nanogpt").stream("train")
    large = np.array([1, 65_536, 2**31 - 1, 2**32 - 1])
    options = {"sizes": (3, 1), "dtype": "uint32", "vocab_size": 2**31}
    write_shards(tmp_path / "tokens", large, **options)
    tokens = open_directory(tmp_path / "tokens").stream("train")
    assert tokens.read(0, 3).tolist() == large[:3].tolist()
    with refused(ValueError, f"id {2**32 - 1}"):  # not taken for -1
        tokens.read(0, 4)
    path = write_raw(tmp_path / "wide", "int64", np.array([1, 2**32 + 1]))
    with refused(ValueError, f"id {2**32 + 1}"):  # not cut to 32 bits
        open_directory(TokenFilesConfig(path=path, dtype="int64")).stream("train")


# --- other programs' files that are not GPT-2's ---------------------------------------------------

LETTERS = np.random.default_rng(2).integers(0, 65, 4000)
TEXT = np.frombuffer(b"Many a byte of a text, and then \xc3\xa9 and so on. " * 80, np.uint8)
SPREAD = np.random.default_rng(3).integers(0, 50257, 4000)


def write_raw(directory, dtype, train, val=VAL):
    directory.mkdir()
    for name, stream in (("train", train), ("val", val)):
        (directory / f"{name}.bin").write_bytes(stream.astype(dtype).tobytes())
    return str(directory)


@pytest.mark.parametrize("name", ["meta.pkl", "tokenizer.model"])
def test_a_tokenizer_beside_nanogpts_files_is_not_gpt2s_unless_it_is_named(tmp_path, name):
    path = write_raw(tmp_path / "tokens", "<u2", LETTERS, LETTERS)
    loaded = b"cos\nsystem\n(S'exit 1'\ntR."  # is never loaded
    (tmp_path / "tokens" / name).write_bytes(loaded)
    with refused(ValueError, name, "--data.tokenizer", "--data.vocab-size"):
        open_directory(path).stream("train")
    stream = open_directory(TokenFilesConfig(path=path, vocab_size=65)).stream("val")
    assert (stream.vocabulary.tokenizer, stream.vocabulary.size) == ("unknown", 65)
    assert np.array_equal(stream.read(0, 4000), LETTERS)
    assert open_directory(TokenFilesConfig(path=path, tokenizer="gpt2")).vocabulary.size == 50257
    save(ByteTokenizer(), tmp_path / "tokens")
    stream = open_directory(path).stream("train")
    assert (stream.vocabulary.tokenizer, stream.vocabulary.size, vocab_size_of(path)) == (
        "byte",
        257,
        257,
    )


@pytest.mark.parametrize(
    ("dtype", "ids", "named"),
    [
        ("uint8", TEXT, {"tokenizer": "byte"}),
        ("uint8", TEXT[:-1], {"tokenizer": "byte"}),
        ("int64", SPREAD, {}),
        ("uint32", SPREAD + 60_000, {"vocab_size": 128_256}),
        (None, LETTERS, {"vocab_size": 65}),
        (None, SPREAD + 10_000, {"vocab_size": 64_000}),
    ],
)
def test_what_cannot_be_gpt2s_is_refused_until_it_is_named(tmp_path, dtype, ids, named):
    path = write_raw(tmp_path / "tokens", dtype or "uint16", ids, ids)
    with refused(ValueError, path, "--data.dtype"):
        open_directory(path).stream("train")
    stream = open_directory(TokenFilesConfig(path=path, dtype=dtype, **named)).stream("train")
    assert np.array_equal(stream.read(0, len(ids)), ids)


def test_a_tokenizer_of_foreign_tokens_may_lie_anywhere(tmp_path):
    save(ByteTokenizer(), tmp_path / "tokenizer")
    path = write_raw(tmp_path / "tokens", "<u2", TEXT, TEXT)
    saved = tmp_path / "tokenizer"
    for number, place in enumerate((saved, saved / "tokenizer.json")):
        stream = open_directory(TokenFilesConfig(path=path, tokenizer=str(place))).stream("train")
        assert stream.vocabulary.size == 257
        assert tokenizer_of_tokens(stream.vocabulary).decode(stream.read(0, 11)) == "Many a byte"
        copy_tokenizer(stream.vocabulary, tmp_path / f"copy {number}")
        assert load(tmp_path / f"copy {number}").decode(stream.read(0, 4)) == "Many"
    with refused(FileNotFoundError, "no_such"):
        open_directory(TokenFilesConfig(path=path, tokenizer="no_such")).stream("train")


def test_what_a_directory_says_itself_is_not_named_again(directories):
    for name, field in (("shards", {"vocab_size": 50257}), ("llm.c", {"dtype": "uint16"})):
        path = str(directories[name])
        with refused(ValueError, path, next(iter(field))):
            open_directory(TokenFilesConfig(path=path, **field)).stream("train")
    path = str(directories["llama"])
    assert (
        open_directory(TokenFilesConfig(path=path, vocab_size=200_000)).vocabulary.tokenizer
        == "unknown"
    )


def test_numpys_arrays_say_their_type(tmp_path):
    write_numpy_shards(tmp_path, dtype="int64")
    assert np.array_equal(open_directory(tmp_path).stream("train").read(0, 1000), STREAM)
    for array in (np.zeros(4), np.zeros((2, 2), int), np.zeros(4, ">u2"), np.array([None])):
        np.save(tmp_path / "edufineweb_train_000001.npy", array)
        with refused(ValueError, "edufineweb_train_000001.npy"):
            open_directory(tmp_path).stream("train")


@pytest.mark.parametrize(
    ("write", "missing"),
    [
        (write_llm_c_shards, "fineweb_train_000010.bin"),
        (write_numpy_shards, "edufineweb_train_000002.npy"),
    ],
)
def test_a_missing_shard_in_the_middle_is_named(tmp_path, caplog, write, missing):
    write(tmp_path)
    open_directory(tmp_path).stream("train")
    assert not caplog.records
    (tmp_path / missing).unlink()
    assert open_directory(tmp_path).stream("train").num_tokens == 999
    assert missing in caplog.text


def shorten(path, by=1):
    path.write_bytes(path.read_bytes()[:-by])


ONE = STREAM[:1]
TRAIN_10 = "fineweb_train_000010.bin"
ERRORS = [  # format, what happens to the directory, split, what is named
    ("none", lambda d: None, "train", "`maxmars data prepare"),
    ("empty", lambda d: (d / "train_0.bin").touch(), "train", "from_tfds"),
    ("shards", lambda d: (d / "meta.json").write_bytes(b"\xff"), "train", "meta.json"),
    ("shards", lambda d: (d / "train_00001.bin").unlink(), "train", "train_00001.bin"),
    ("shards", lambda d: shorten(d / "train_00002.bin", 3), "train", "train_00002.bin", "897"),
    ("nanogpt", lambda d: (d / "val.bin").unlink(), "val", "'val'", "--eval.every None"),
    ("nanogpt", lambda d: shorten(d / "train.bin"), "train", "train.bin", "1999"),
    ("llm.c", lambda d: (d / "fineweb_val_000000.bin").unlink(), "val", "'val'"),
    ("llm.c", lambda d: shorten(d / TRAIN_10, 2), "train", TRAIN_10, "1024"),
    ("llm.c", lambda d: write_llm_c(d / TRAIN_10, ONE, version=2), "train", TRAIN_10, "version 2"),
    ("llm.c", lambda d: write_llm_c(d / TRAIN_10, ONE, **LLAMA), "train", "tokenizer"),
    ("llm.c", lambda d: write_llm_c(d / "books_train.bin", ONE), "train", "(books, fineweb)"),
]


@pytest.mark.parametrize(
    ("kind", "damage", "split", "named"), [(*row[:3], row[3:]) for row in ERRORS]
)
def test_a_directory_that_cannot_be_read_says_why(tmp_path, kind, damage, split, named):
    directory = tmp_path / "tokens"
    match kind:
        case "empty":
            directory.mkdir()
        case "shards":
            write_shards(directory, STREAM, VAL, vocab_size=50257)
        case "nanogpt":
            write_nanogpt(directory, STREAM, VAL)
        case "llm.c":
            write_llm_c_shards(directory)
    damage(directory)
    with refused((ValueError, FileNotFoundError), directory, *named):
        open_directory(directory).stream(split)
