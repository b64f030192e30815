"""Streams of tokens in every format, on a disk."""

import pickle
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds
from refusals import refused
from token_directories import write_llm_c, write_nanogpt, write_shards, write_tfds

from maxmars.data.formats import open_split
from maxmars.data.token_files import TokenStream, digest_of, merge_ranges

STREAM = np.random.default_rng(0).integers(0, 50257, 1000)
VAL = np.random.default_rng(1).integers(0, 50257, 300)
LLAMA = {"magic": 20240801, "version": 7, "dtype": "<u4"}


def write_llm_c_shards(directory, stream=STREAM, val=VAL):
    for i, part in enumerate(np.split(stream, [400, 401])):
        write_llm_c(directory / f"fineweb_train_{i + 9:06d}.bin", part)
    write_llm_c(directory / "fineweb_val_000000.bin", val)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A directory of each kind with the streams above."""
    root = tmp_path_factory.mktemp("formats")
    write_shards(root / "shards", STREAM, VAL, tokenizer="gpt2", vocab_size=50257)
    one_each = {"sizes": (1,) * 1000, "dtype": "uint32"}
    write_shards(root / "tiny", STREAM, VAL, tokenizer="gpt2", vocab_size=50257, **one_each)
    write_nanogpt(root / "nanogpt", STREAM, VAL)
    (root / "nanogpt" / "meta.pkl").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")  # is never loaded
    write_llm_c_shards(root / "llm.c")
    write_llm_c(root / "llama" / "tiny_train.bin", STREAM, **LLAMA)
    write_llm_c(root / "llama" / "tiny_val.bin", VAL, **LLAMA)
    train, val = ([*np.split(s, range(64, len(s), 64))] for s in (STREAM, VAL))
    ours = write_tfds(root / "ours", {"train": train, "val": val}, tokenizer="gpt2")
    train, val = (np.split(s, [3, 3, 90, 91, 280]) for s in (STREAM, VAL))
    ragged = write_tfds(root / "ragged", {"train": train, "validation": val})
    train, val = np.split(STREAM, 10), np.split(VAL, 3)
    fixed = write_tfds(root / "fixed", {"train": train, "test": val}, shape=(100,))
    names = ("shards", "tiny", "nanogpt", "llm.c", "llama")
    records = {"tfds ours": ours, "tfds ragged": ragged, "tfds fixed": fixed}
    return {name: root / name for name in names} | records


CASES = {  # directory -> split that is `val`, tokenizer
    "shards": ("val", "gpt2"),
    "tiny": ("val", "gpt2"),
    "nanogpt": ("val", "gpt2"),
    "llm.c": ("val", "gpt2"),
    "llama": ("val", "llama-3"),
    "tfds ours": ("val", "gpt2"),
    "tfds ragged": ("validation", "gpt2"),
    "tfds fixed": ("test", "gpt2"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_format_gives_the_same_stream(directories, name):
    directory = directories[name]
    val_split, tokenizer = CASES[name]
    for split, expected in (("train", STREAM), ("val", VAL)):
        stream = open_split(directory, split)
        assert isinstance(stream, TokenStream)
        assert stream.split == (val_split if split == "val" else split)
        assert (stream.tokenizer, stream.num_tokens) == (tokenizer, len(expected))
        assert stream.vocab_size == (128256 if tokenizer == "llama-3" else 50257)
        assert str(directory) in repr(stream)
        for length in (0, 1, 13, 65, len(expected)):
            starts = np.append(np.arange(0, len(expected) - length, 29), len(expected) - length)
            starts = np.random.default_rng(2).permutation(starts)
            windows = stream.read_windows(starts, length)
            assert windows.dtype == np.int32
            assert np.array_equal(windows, expected[starts[:, None] + np.arange(length)])
        assert np.array_equal(stream.read(7, 90), expected[7:97])
        for start, length in ((-1, 5), (len(expected) - 3, 4), (len(expected), 1), (0, -1)):
            with refused(ValueError, f"the {len(expected)} tokens"):
                stream.read(start, length)


@pytest.mark.parametrize("name", CASES)
def test_every_token_is_found_on_disk(directories, name):
    stream = open_split(directories[name], "train")
    width = "<u4" if name in ("llama", "tiny") else "<u2"
    for token in (0, 299, 300, 400, 401, 999):
        place = stream.locate(token)
        if "file" in place:
            (found,) = np.fromfile(place["file"], width, count=1, offset=place["byte_in_file"])
        else:
            records = tfds.builder_from_directory(directories[name]).as_data_source(split="train")
            found = records[place["record"]]["tokens"][place["token_in_record"]]
        assert found == STREAM[token]


@pytest.mark.parametrize("name", ["shards", "nanogpt", "llm.c"])
def test_a_stream_travels_to_another_process_as_its_paths(directories, name):
    stream = open_split(directories[name], "train")
    size = len(pickle.dumps(stream))
    stream.read(0, 1000)
    assert len(pickle.dumps(stream)) == size
    assert np.array_equal(pickle.loads(pickle.dumps(stream)).read(0, 1000), STREAM)


@pytest.mark.parametrize("name", CASES)
def test_the_digest_is_of_the_data_and_not_of_the_path(directories, name, tmp_path):
    digest = digest_of(open_split(directories[name], "train"))
    shutil.copytree(directories[name], tmp_path / "copy")
    assert digest_of(open_split(tmp_path / "copy", "train")) == digest
    # Of the whole directory: the validation split counts too.
    assert digest_of(open_split(tmp_path / "copy", "val")) == digest
    others = {digest_of(open_split(path, "train")) for path in directories.values()}
    assert len(others) == len(directories)


@pytest.mark.parametrize("write", [write_nanogpt, write_llm_c_shards, write_shards])
def test_other_data_of_the_same_sizes_have_another_digest(tmp_path, write):
    vocabulary = {"vocab_size": 50257} if write is write_shards else {}
    for name, stream in (("a", STREAM), ("b", np.append(STREAM[1:], 0))):
        write(tmp_path / name, stream, VAL, **vocabulary)
    assert len({digest_of(open_split(tmp_path / name, "train")) for name in "ab"}) == 2


def test_large_ids(tmp_path):
    stream = np.array([0, 65_535, 65_536, 2**31 - 1])
    write_shards(tmp_path / "tokens", stream, sizes=(3, 1), dtype="uint32", vocab_size=2**31)
    assert open_split(tmp_path / "tokens", "train").read(0, 4).tolist() == stream.tolist()


def test_ids_outside_the_vocabulary_are_named(tmp_path):
    stream = STREAM.copy()
    stream[777] = 60000
    write_nanogpt(tmp_path / "nanogpt", stream, VAL)
    tokens = open_split(tmp_path / "nanogpt", "train")
    tokens.read(0, 777)
    with refused(ValueError, "id 60000", "'gpt2'"):
        tokens.read(0, 778)
    write_shards(tmp_path / "tokens", np.array([1, 2**32 - 1]), sizes=(2,), dtype="uint32")
    with refused(ValueError, f"id {2**32 - 1}"):  # not taken for -1
        open_split(tmp_path / "tokens", "train").read(0, 2)


def shorten(path, by=1):
    path.write_bytes(path.read_bytes()[:-by])


ONE = STREAM[:1]
TRAIN_10 = "fineweb_train_000010.bin"
ERRORS = [  # format, what happens to the directory, split, what is named
    ("none", lambda d: None, "train", "`maxmars data prepare"),
    ("empty", lambda d: (d / "train_0.bin").touch(), "train", "TFDS"),
    ("shards", lambda d: (d / "meta.json").write_bytes(b"\xff"), "train", "meta.json"),
    ("shards", lambda d: (d / "train_00001.bin").unlink(), "train", "train_00001.bin"),
    ("shards", lambda d: shorten(d / "train_00002.bin", 3), "train", "train_00002.bin", "897"),
    ("nanogpt", lambda d: (d / "val.bin").unlink(), "val", "'val'"),
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
        open_split(directory, split)


def replace_text(name, old, new):
    def damage(directory):
        path = directory / name
        path.write_text(path.read_text().replace(old, new))

    return damage


TFDS_ERRORS = [
    (lambda d: None, "val", "'val'"),
    (replace_text("meta.json", '"record_tokens": 100', '"record_tokens": 90'), "train", "1000"),
    (replace_text("meta.json", '"tokenizer"', '"tok"'), "train", "meta.json"),
    (replace_text("features.json", '"tokens"', '"ids"'), "train", "features: ids"),
    (lambda d: (d / "dataset_info.json").write_text("{"), "train", "TFDS"),
]


@pytest.mark.parametrize(("damage", "split", "named"), TFDS_ERRORS)
def test_a_tfds_dataset_that_does_not_fit_says_why(tmp_path, damage, split, named):
    directory = write_tfds(tmp_path, {"train": np.split(STREAM, 10)}, tokenizer="gpt2")
    damage(directory)
    with refused(ValueError, directory, named):
        open_split(directory, split)


def test_a_damaged_record_is_named(tmp_path):
    records = {"train": np.split(STREAM, 10)}
    directory = write_tfds(tmp_path, records, shape=(100,), num_shards=1)
    path = next(directory.glob("*.array_record*"))
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    with refused(ValueError, directory, "record", "'train'"):
        open_split(directory, "train").read(0, 1000)


def test_ranges_that_overlap_or_touch_are_read_once():
    ranges = [(1, 0, 4), (0, 10, 20), (0, 30, 40), (0, 18, 22), (0, 22, 25), (0, 31, 33)]
    assert merge_ranges(ranges) == [(0, 10, 25), (0, 30, 40), (1, 0, 4)]
