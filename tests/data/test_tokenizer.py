import sys

import numpy as np
import pytest

from maxmars.data.tokenizer import ByteTokenizer, GPT2Tokenizer, Tokenizer, load_tokenizer

TEXTS = ["", "Hello, world.", "naïve — 数学 🚀\r\n\t\x00", "a <|endoftext|> spelt out", " " * 300]


@pytest.fixture(scope="module")
def gpt2(reference_dir) -> GPT2Tokenizer:
    pytest.importorskip("tiktoken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(reference_dir / "data" / "tiktoken"))
        return GPT2Tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_byte_vocabulary():
    tokenizer = load_tokenizer("byte")
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot) == ("byte", 257, 256)
    # Shards on disk carry this digest, so it must never change.
    assert tokenizer.digest == "c8652c242d0cd3b98b3c82d4aa53d102c8ccae44dc16854240715e4e32d8b038"


def test_bytes_that_are_no_text():
    tokens = np.array([97, 256, 98, 0xFF, 99, 257, 60000], np.uint16)
    assert ByteTokenizer().decode(tokens) == "a<|endoftext|>b\ufffdc\ufffd\ufffd"
    assert ByteTokenizer().encode("a\ud800b").tolist() == [97, ord("?"), 98]


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_round_trip(gpt2, text):
    tokens = gpt2.encode(text)
    assert tokens.dtype == np.uint16
    assert gpt2.eot not in tokens
    assert gpt2.decode(tokens) == text


def test_gpt2_vocabulary(gpt2):
    assert isinstance(gpt2, Tokenizer)
    assert gpt2.encode("hello world").tolist() == [31373, 995]
    assert gpt2.decode(np.array([31373, 50256, 50257, -1])) == "hello<|endoftext|>\ufffd\ufffd"
    assert gpt2.encode("\ud800").tolist() == gpt2.encode("?").tolist()
    assert gpt2.digest == "a5623714bcf19049eb0fd78df19b6daa1e61ac435b86a5deae767768e7fcdc3d"


def test_gpt2_counts_tiny_shakespeare(gpt2, reference_dir):
    text = (reference_dir / "data" / "tinyshakespeare.txt").read_text()
    assert len(gpt2.encode(text)) == 338_025


def test_unknown_name():
    with pytest.raises(ValueError, match="no tokenizer 'gpt5'; choose byte, gpt2, or the path"):
        load_tokenizer("gpt5")


def test_gpt2_without_tiktoken(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ImportError, match=r"pip install 'maxmars\[hf\]'"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError("hash mismatch")])
def test_gpt2_without_network(monkeypatch, tmp_path, error):
    tiktoken = pytest.importorskip("tiktoken")

    def get_encoding(name):
        raise error

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="Without network") as raised:
        load_tokenizer("gpt2")
    message = str(raised.value)
    assert str(tmp_path) in message
    assert "6d1cbeee0f20b3d9449abfede4726ed8212e3aee" in message  # tiktoken's name of vocab.bpe
    assert "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6" in message  # and of encoder.json
