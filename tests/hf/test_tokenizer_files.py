import dataclasses
import json
import pickle

import numpy as np
import pytest
import tokenizers
from hf_models import BASE, BYTES

from maxmars import hf
from maxmars.data.tokenizer import (
    ByteTokenizer,
    GPT2Tokenizer,
    JsonTokenizer,
    saved_tokenizer,
    store_tokenizer,
)

TEXTS = ("To be, or  not\n\n to be: caf\u00e9 \u65e5\u672c \U0001f642 don't\t", "", " x")
GPT2 = dataclasses.replace(BASE, vocab_size=50257)


@pytest.fixture
def own():
    """A tokenizer of the user's own, trained on one sentence."""
    vocabulary = tokenizers.Tokenizer(tokenizers.models.BPE())
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    vocabulary.train_from_iterator(["To be, or not to be, that is the question. "], trainer)
    return vocabulary


@pytest.fixture
def gpt2(reference_dir, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(reference_dir / "data" / "tiktoken"))
    return GPT2Tokenizer()


def assert_same_tokens(directory, tokenizer):
    """The library `tokenizers`, which transformers uses, encodes and decodes as we do."""
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in TEXTS:
        encoded = theirs.encode(text).ids
        np.testing.assert_array_equal(encoded, tokenizer.encode(text))
        assert theirs.decode(encoded, skip_special_tokens=False) == text
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    assert theirs.token_to_id(settings["eos_token"]) == tokenizer.eot
    assert theirs.get_vocab_size() == tokenizer.vocab_size


def test_bytes(tmp_path):
    hf.write_hf_tokenizer(tmp_path, ByteTokenizer(), BYTES)
    assert_same_tokens(tmp_path, ByteTokenizer())
    found, is_its_own = hf.load_hf_tokenizer(tmp_path, BYTES)
    assert isinstance(found, ByteTokenizer)
    assert is_its_own


def test_gpt2(tmp_path, gpt2, reference_dir, monkeypatch):
    hf.write_hf_tokenizer(tmp_path, gpt2, GPT2)
    assert_same_tokens(tmp_path, gpt2)
    # Byte by byte the published files, up to JSON's white space.
    merges, vocabulary = sorted((reference_dir / "data" / "tiktoken").iterdir(), reverse=True)
    assert (tmp_path / "merges.txt").read_bytes() == merges.read_bytes()
    assert json.loads((tmp_path / "vocab.json").read_bytes()) == json.loads(vocabulary.read_bytes())
    found, _ = hf.load_hf_tokenizer(tmp_path, GPT2)
    assert isinstance(found, GPT2Tokenizer)
    # Without tiktoken's own files: tokenizer.json, or what vocab.json and merges.txt stand for.
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        found, _ = hf.load_hf_tokenizer(tmp_path, GPT2)
        assert isinstance(found, JsonTokenizer)
        assert found.eot == gpt2.eot
        for text in TEXTS:
            np.testing.assert_array_equal(found.encode(text), gpt2.encode(text))
        (tmp_path / file).unlink()
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"has vocab.json but no merges.txt"):
        hf.load_hf_tokenizer(tmp_path, GPT2)


def test_without_files_a_vocabulary_of_its_size_is_gpt2s(tmp_path, gpt2):
    found, is_its_own = hf.load_hf_tokenizer(tmp_path, GPT2)
    assert isinstance(found, GPT2Tokenizer)
    assert not is_its_own
    with pytest.raises(
        FileNotFoundError, match=r"61 tokens is not GPT-2's; copy the tokenizer.json"
    ):
        hf.load_hf_tokenizer(tmp_path, BASE)


def test_a_tokenizer_of_the_users_own(tmp_path, own):
    own.enable_truncation(3)
    own.enable_padding(length=9)
    own.save(str(tmp_path / "own.json"))
    tokenizer = JsonTokenizer(tmp_path / "own.json", "<end>")
    config = dataclasses.replace(BASE, vocab_size=300)
    (tmp_path / "hf").mkdir()
    hf.write_hf_tokenizer(tmp_path / "hf", tokenizer, config)
    found, _ = hf.load_hf_tokenizer(tmp_path / "hf", config)
    assert found.digest == tokenizer.digest
    assert found.eot == tokenizer.eot
    long = "To be, or not to be, that is the question."
    assert found.decode(found.encode(long)) == long  # not cut, not padded
    store_tokenizer(found, tmp_path / "saved")
    for copy in (saved_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(found))):
        assert copy.digest == tokenizer.digest
        np.testing.assert_array_equal(copy.encode(long), found.encode(long))
    with pytest.raises(ValueError, match=f"has {found.vocab_size} tokens, but the model only 61"):
        hf.load_hf_tokenizer(tmp_path / "hf", BASE)
    # The end of a text by the model's config.json where the tokenizer's settings are silent.
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": null}')
    with pytest.raises(ValueError, match=r"no token '<\|endoftext\|>'"):
        hf.load_hf_tokenizer(tmp_path / "hf", config)
    (tmp_path / "hf" / "config.json").write_text('{"eos_token_id": 0}')
    assert hf.load_hf_tokenizer(tmp_path / "hf", config)[0].eot == 0


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "is no tokenizer.json"),
        ({"tokenizer.json": '{"model": {"vocab": [1]}}'}, "is no tokenizer.json"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "["}, "is no valid JSON"),
        ({"vocab.json": "[]", "merges.txt": ""}, "must hold a JSON object"),
        ({"vocab.json": '{"a": 0}', "merges.txt": ""}, "has no token"),
    ],
)
def test_malformed_files(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        hf.load_hf_tokenizer(tmp_path, BYTES)
