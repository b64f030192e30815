"""The public datasets: windows and documents of a directory, the examples of a run; the segments of
a window, so that attention stays within a document."""

import shutil
from collections import Counter
from pathlib import Path

import grain
import numpy as np
import pytest
from refusals import refused
from test_own_data import COUNTING, batches_of
from tiny import MODEL
from token_directories import write_llm_c, write_nanogpt

from maxmars.config import GrainConfig, TokenFilesConfig, TokenShardsConfig
from maxmars.data import dataset, documents
from maxmars.data.batches import open_data
from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import ByteTokenizer, copy_tokenizer, load
from maxmars.data.windows import segments_and_positions

LENGTH, END = MODEL.max_seq_len, 256
BEST_FIT = Path(__file__).parents[2] / "tools" / "examples" / "best_fit.py"
TEXTS = [(str(i), chr(97 + i % 26) * (i * 7 % 60) + "." * (i % 2)) for i in range(300)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """300 documents, some longer than a window, in several shards."""
    path = tmp_path_factory.mktemp("datasets") / "tokens"
    options = {"tokenizer": ByteTokenizer(), "source": "a test", "task_bytes": 3000}
    prepare(TEXTS, path, shard_tokens=700, **options)
    return path


@pytest.mark.smoke
@pytest.mark.parametrize("packing", ["none", "split"])
def test_windows_are_those_of_a_run(directory, packing):
    config = TokenShardsConfig(path=str(directory), packing=packing, order="sequential")
    for split in ("train", "val"):
        ours = dataset(directory, split, LENGTH, packing)
        theirs = open_data(config, split, model=MODEL)
        assert isinstance(ours, grain.MapDataset)
        assert len(ours) == len(theirs)
        batch = theirs.read(np.arange(len(theirs)))
        for number, window in enumerate(ours):
            np.testing.assert_equal(window, {name: batch[name][number] for name in batch})
        assert ours.tokenizer.decode(ours[0]["tokens"][:3]) == ours.tokenizer.decode(
            batch["tokens"][0, :3]
        )


def test_segments_and_positions():
    arrays = segments_and_positions(np.array([[0, 0, 1, 1, 0], [1, 0, 0, 0, 1]], bool))
    assert arrays["segment_ids"].tolist() == [[0, 0, 1, 2, 2], [1, 1, 1, 1, 2]]
    assert arrays["positions"].tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 0]]
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}


def test_split_windows_tell_their_documents_apart(directory):
    split, plain = (
        open_data(TokenShardsConfig(path=str(directory), packing=packing), "train", model=MODEL)
        for packing in ("split", "none")
    )
    assert split.digest() == plain.digest()  # the tokens are the same
    batch = split.read(np.arange(len(split)))
    assert set(batch) == {"tokens", "segment_ids", "positions"}
    np.testing.assert_array_equal(batch["tokens"], plain.read(np.arange(len(split)))["tokens"])
    for tokens, ids, positions in zip(*map(batch.get, batch), strict=True):
        segments = np.split(tokens, np.flatnonzero(np.diff(ids)) + 1)
        assert all(END not in segment[1:] for segment in segments)
        assert all(segment[0] == END for segment in segments[1:])
        expected = np.concatenate([np.arange(len(segment)) for segment in segments])
        np.testing.assert_array_equal(positions, expected)
        assert len(segments) - (tokens[0] != END) == np.sum(tokens == END)


@pytest.mark.smoke
def test_documents_are_the_texts(directory):
    texts = {text for _, text in TEXTS if text}
    found = []
    for split in ("train", "val"):
        opened = documents(directory, split)
        assert opened.lengths.tolist() == [len(document) for document in opened]
        for document in opened:
            assert document[-1] == END
            assert END not in document[:-1]
            found.append(opened.tokenizer.decode(document[:-1]))
    assert len(found) == len([text for _, text in TEXTS if text])
    assert set(found) == texts


def test_documents_of_other_programs_are_found_by_the_token_that_ends_them(tmp_path):
    end, stream = 50256, np.arange(100, 400)
    stream[[50, 51, 299]] = end
    write_nanogpt(tmp_path / "nanogpt", stream, stream[:20])
    for split in ("train", "val"):
        write_llm_c(tmp_path / "llm.c" / f"a_{split}_0.bin", stream)
    for path, split, sizes in (
        ("nanogpt", "train", [51, 1, 248]),
        ("nanogpt", "val", [20]),
        ("llm.c", "train", [51, 1, 248]),
    ):
        opened = documents(tmp_path / path, split)
        assert opened.lengths.tolist() == sizes
        assert np.array_equal(np.concatenate(list(opened)), stream[: sum(sizes)])
    named = TokenFilesConfig(path=str(tmp_path / "nanogpt"), vocab_size=50257)
    with refused(ValueError, "--data.tokenizer"):
        documents(named, "train")


@pytest.mark.usefixtures("own_checks_only")
def test_an_unknown_packing_is_named(directory):
    with refused(ValueError, "packing='best_fit'"):
        dataset(directory, "train", LENGTH, "best_fit")


def test_a_damaged_list_of_documents_is_named(directory, tmp_path):
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    starts = copy / "train_documents.bin"
    starts.write_bytes(starts.read_bytes()[::-1])
    with refused(ValueError, starts):
        documents(copy, "train")


# --- in a run -------------------------------------------------------------------------------------

MAPPED = """
import numpy as np
from maxmars.data import dataset

def windows(*, split, length, path):
    def without_x(window):
        return {**window, "mask": window["tokens"] != ord("x")}
    return dataset(path, split, length, packing="split").map(without_x)
"""


def own(tmp_path, directory):
    (tmp_path / "own.py").write_text(MAPPED)
    return GrainConfig(source=f"{tmp_path / 'own.py'}:windows", options={"path": str(directory)})


def test_a_map_changes_the_windows_of_a_run_and_keeps_its_stream(directory, tmp_path):
    plain = batches_of(TokenShardsConfig(path=str(directory), packing="split"))
    mapped = batches_of(own(tmp_path, directory), mesh=(2, 2, 2))
    np.testing.assert_equal(mapped, {**plain, "mask": plain["tokens"] != ord("x")})


def test_a_run_knows_the_tokens_below_a_map(directory, tmp_path):
    config = own(tmp_path, directory)
    opened = open_data(config, "train", model=MODEL)
    plain = open_data(TokenShardsConfig(path=str(directory)), "train", model=MODEL)
    assert opened.files == plain.files  # which a run compares with their checksums
    assert opened.vocabulary.digest == ByteTokenizer.digest
    # Other tokens under the same function are other data.
    other = tmp_path / "other"
    texts = [(name, text.replace("b", "c")) for name, text in TEXTS]
    prepare(texts, other, tokenizer=ByteTokenizer(), source="a test")
    digest = open_data(own(tmp_path, other), "train", model=MODEL).digest()
    assert digest != opened.digest()


def test_own_data_name_a_directory_that_has_their_tokenizer(directory, tmp_path):
    (tmp_path / "own.py").write_text(COUNTING)
    source = f"{tmp_path / 'own.py'}:windows"
    for named in (directory, directory / "tokenizer.json"):
        data = GrainConfig(source=source, tokenizer=str(named))
        vocabulary = open_data(data, "train", model=MODEL).vocabulary
        copy_tokenizer(vocabulary, tmp_path / "copy")
        assert load(tmp_path / "copy").encode("ab").tolist() == [97, 98]
    with refused(FileNotFoundError, tmp_path / "none"):
        data = GrainConfig(source=source, tokenizer=str(tmp_path / "none"))
        open_data(data, "train", model=MODEL)


def test_best_fit_predicts_every_token_once(directory):
    options = {"path": str(directory)}
    data = GrainConfig(source=f"{BEST_FIT}:windows", options=options, order="sequential")
    for split in ("train", "val"):
        opened = open_data(data, split, model=MODEL)
        assert opened.vocabulary.tokenizer == "byte"
        batch = opened.read(np.arange(*opened.sizes))
        tokens, mask, ids = (batch[name] for name in ("tokens", "mask", "segment_ids"))
        stream = np.concatenate(list(documents(directory, split)))
        predicted = np.bincount(tokens[mask], minlength=257)
        np.testing.assert_array_equal(predicted, np.bincount(stream, minlength=257))
        # Each from its own document, or from the token that ended the one before.
        assert np.all((ids[:, 1:] == ids[:, :-1]) | (tokens[:, 1:] == END) | ~mask[:, 1:])
        assert np.all(tokens[:, 0] == END)
        # Documents that fit into a window are whole.
        whole = Counter()
        for row, counted in zip(tokens, mask, strict=True):
            row = row[counted]
            whole.update(map(tuple, np.split(row, np.flatnonzero(row == END) + 1)))
        short = Counter(tuple(d) for d in documents(directory, split) if len(d) <= LENGTH)
        assert short
        assert short <= whole
        bound = -(-len(stream) // LENGTH)
        assert bound <= len(tokens) <= 1.1 * bound + 1
