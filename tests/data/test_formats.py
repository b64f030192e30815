import json

import numpy as np
import pytest
from token_directories import write_llm_c, write_nanogpt, write_shards, write_tfds

from maxmars.data.formats import files_of, format_of, open_split
from maxmars.data.streams import TokenStream
from maxmars.data.tfds_stream import TfdsTokens

STREAM = np.random.default_rng(0).integers(0, 50257, 1000)
VAL = np.random.default_rng(1).integers(0, 50257, 300)
OURS = {"format": "maxmars-tfds-tokens", "tokenizer": "gpt2", "tokenizer_digest": "ab"}
OURS |= {"vocab_size": 50257, "splits": {"train": {"num_tokens": 1000}}}


def write_llm_c_shards(directory):
    cuts = [400, 401]
    for i, part in enumerate(np.split(STREAM, cuts)):
        write_llm_c(directory / f"fineweb_train_{i + 9:06d}.bin", part)
    write_llm_c(directory / "fineweb_val_000000.bin", VAL)


def write_all(root):
    """A directory of each kind with the streams above."""
    write_shards(root / "shards", STREAM, VAL, tokenizer="gpt2", vocab_size=50257)
    write_nanogpt(root / "nanogpt", STREAM, VAL)
    write_llm_c_shards(root / "llm.c")
    llama = {"magic": 20240801, "version": 7, "dtype": "<u4"}
    write_llm_c(root / "llama" / "tiny_train.bin", STREAM, **llama)
    write_llm_c(root / "llama" / "tiny_val.bin", VAL, **llama)
    equal = [np.split(s, range(64, len(s), 64)) for s in (STREAM, VAL)]
    ours = {"train": equal[0], "val": equal[1]}
    write_tfds(root / "tfds-ours", ours, metadata=OURS)
    ragged = [np.split(s, [3, 3, 90, 91, 280]) for s in (STREAM, VAL)]
    write_tfds(root / "tfds-ragged", {"train": ragged[0], "validation": ragged[1]})
    fixed = {"train": np.split(STREAM, 10), "test": np.split(VAL, 3)}
    write_tfds(root / "tfds-fixed", fixed, shape=(100,))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("formats")
    write_all(path)
    return path


def directory_of(root, name):
    return root / name / "tokens" / "1.0.0" if name.startswith("tfds") else root / name


CASES = {  # directory -> format, split that is `val`, tokenizer
    "shards": ("shards", "val", "gpt2"),
    "nanogpt": ("nanogpt", "val", "gpt2"),
    "llm.c": ("llm.c", "val", "gpt2"),
    "llama": ("llm.c", "val", "llama-3"),
    "tfds-ours": ("tfds", "val", "gpt2"),
    "tfds-ragged": ("tfds", "validation", "gpt2"),
    "tfds-fixed": ("tfds", "test", "gpt2"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_format_gives_the_same_stream(root, name):
    directory = directory_of(root, name)
    kind, val_split, tokenizer = CASES[name]
    assert format_of(directory) == kind
    for split, expected in (("train", STREAM), ("val", VAL)):
        stream = open_split(directory, split)
        assert isinstance(stream, TokenStream)
        assert stream.split == (val_split if split == "val" else split)
        assert (stream.tokenizer, stream.num_tokens) == (tokenizer, len(expected))
        assert stream.vocab_size == (128256 if tokenizer == "llama-3" else 50257)
        assert str(directory) in repr(stream)
        stream.verify()
        for start in range(0, len(expected) + 1, 7):
            rest = len(expected) - start
            for length in {min(length, rest) for length in (0, 1, 13, 65, 1000)}:
                tokens = stream.read(start, length)
                assert tokens.dtype == np.int32
                assert np.array_equal(tokens, expected[start : start + length])
        with pytest.raises(ValueError, match=f"outside the {len(expected)} tokens"):
            stream.read(len(expected) - 3, 4)


@pytest.mark.parametrize("name", CASES)
def test_every_token_is_found_on_disk(root, name):
    stream = open_split(directory_of(root, name), "train")
    width = "<u4" if name == "llama" else "<u2"
    for token in (0, 299, 300, 400, 401, 999):
        place = stream.locate(token)
        if "file" in place:
            (found,) = np.fromfile(place["file"], width, count=1, offset=place["byte_in_file"])
        else:
            found = stream._records[place["record"]]["tokens"][place["token_in_record"]]
        assert found == STREAM[token]


@pytest.mark.parametrize("name", CASES)
def test_the_files_are_all_that_reading_takes(root, name, tmp_path):
    directory = directory_of(root, name)
    files = files_of(directory)
    for file in files:
        (tmp_path / file).write_bytes((directory / file).read_bytes())
    assert np.array_equal(open_split(tmp_path, "train").read(0, 1000), STREAM)
    assert np.array_equal(open_split(tmp_path, "val").read(0, 300), VAL)
    assert any(files.values()) == (name == "shards")


def test_only_equal_records_are_found_without_reading_all(root):
    def reads(name):
        stream = TfdsTokens(directory_of(root, name), "train")
        return stream._index

    assert (
        type(reads("tfds-ours")).__name__ == type(reads("tfds-fixed")).__name__ == "_EqualRecords"
    )
    assert type(reads("tfds-ragged")).__name__ == "_AnyRecords"


def test_a_pickle_beside_nanogpt_tokens_is_left_alone(tmp_path):
    write_nanogpt(tmp_path / "tokens", STREAM, VAL)
    (tmp_path / "tokens" / "meta.pkl").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert open_split(tmp_path / "tokens", "train").num_tokens == 1000
    assert "meta.pkl" not in files_of(tmp_path / "tokens")


def test_what_cannot_be_read_lists_what_can(tmp_path):
    (tmp_path / "train_00000.bin").write_bytes(b"12")  # our own shards without their meta.json
    with pytest.raises(FileNotFoundError, match=r"no tokens that can be read.*meta\.json.*TFDS"):
        open_split(tmp_path, "train")
    with pytest.raises(FileNotFoundError, match="does not exist; run `maxmars data prepare"):
        open_split(tmp_path / "nothing", "train")


def shorten(path, by=1):
    path.write_bytes(path.read_bytes()[:-by])


def test_truncated_and_foreign_files_are_named(tmp_path):
    write_nanogpt(tmp_path / "nanogpt", STREAM, VAL)
    shorten(tmp_path / "nanogpt" / "train.bin")
    with pytest.raises(ValueError, match=r"train\.bin has 1999 bytes, but nanoGPT's tokens have 2"):
        open_split(tmp_path / "nanogpt", "train")

    write_llm_c_shards(tmp_path / "llm.c")
    shorten(tmp_path / "llm.c" / "fineweb_train_000010.bin", 2)
    with pytest.raises(ValueError, match=r"000010\.bin has 1024 bytes, but its header says 1026"):
        open_split(tmp_path / "llm.c", "train")
    write_llm_c(tmp_path / "llm.c" / "fineweb_train_000010.bin", STREAM[:1], version=2)
    with pytest.raises(ValueError, match=r"no token file of llm\.c: 20240520 version 2, not 2024"):
        open_split(tmp_path / "llm.c", "train")
    write_llm_c(tmp_path / "llm.c" / "fineweb_train_000010.bin", STREAM[:1], 20240801, 7, "<u4")
    with pytest.raises(ValueError, match="hold different tokenizers"):
        open_split(tmp_path / "llm.c", "train")
    write_llm_c(tmp_path / "llm.c" / "books_train.bin", STREAM)
    with pytest.raises(ValueError, match=r"several data sets \(books, fineweb\)"):
        open_split(tmp_path / "llm.c", "train")


@pytest.mark.parametrize("write", [write_nanogpt, lambda d, t, v: write_llm_c_shards(d)])
def test_a_missing_split_is_named(tmp_path, write):
    write(tmp_path / "tokens", STREAM, VAL)
    for path in tmp_path.glob("tokens/*val*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no .*val"):
        open_split(tmp_path / "tokens", "val")


def test_ids_beyond_gpt2s_are_found(tmp_path):
    stream = STREAM.copy()
    stream[777] = 60000
    write_nanogpt(tmp_path / "tokens", stream, VAL)
    tokens = open_split(tmp_path / "tokens", "train")
    tokens.read(0, 777)
    for read in (lambda: tokens.read(0, 778), tokens.verify):
        with pytest.raises(ValueError, match="holds the token id 60000, but the vocabulary of 'gp"):
            read()


def test_damaged_tfds_files_are_found(tmp_path):
    records = {"train": np.split(STREAM, 10)}
    directory = write_tfds(tmp_path / "a", records, shape=(100,), num_shards=1)
    path = next(directory.glob("*.array_record*"))
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    stream = open_split(directory, "train")
    with pytest.raises(ValueError, match=r"record \d of split 'train' of .* cannot be read .*hash"):
        stream.verify()


def test_tfds_datasets_that_do_not_fit_are_named(tmp_path):
    records = {"train": np.split(STREAM, 10)}
    directory = write_tfds(tmp_path / "a", records, metadata=OURS)
    with pytest.raises(ValueError, match="no split 'val' or 'validation' or 'test', only train"):
        open_split(directory, "val")
    meta = directory / "meta.json"
    meta.write_text(json.dumps(OURS | {"splits": {"train": {"num_tokens": 999}}}))
    with pytest.raises(ValueError, match=r"has 1000 tokens, but meta\.json says 999"):
        open_split(directory, "train")
    meta.write_text(json.dumps({"format": "maxmars-tfds-tokens"}))
    with pytest.raises(ValueError, match=r"meta\.json is damaged \('tokenizer'\)"):
        open_split(directory, "train")
    meta.unlink()
    info = directory / "features.json"
    info.write_text(info.read_text().replace('"tokens"', '"ids"'))
    with pytest.raises(ValueError, match=r"needs a feature 'tokens' .* has none .* features: ids"):
        open_split(directory, "train")
    (directory / "dataset_info.json").write_text("{")
    with pytest.raises(ValueError, match="TFDS cannot read"):
        open_split(directory, "train")
