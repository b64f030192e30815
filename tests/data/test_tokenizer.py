import hashlib
import pickle
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from maxmars.data import gpt2_vocabulary
from maxmars.data.tokenizer import (
    ByteTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_in,
)

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


class Silent(BaseHTTPRequestHandler):
    """A server that takes a request and never answers."""

    def do_GET(self):
        self.server.stopped.wait(20)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """In the place of the network; it answers what the test makes it answer."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.stopped = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(gpt2_vocabulary, "_TIMEOUT_S", 0.3)
    monkeypatch.setattr(
        gpt2_vocabulary, "_URL", f"http://127.0.0.1:{server.server_port}/encodings/"
    )
    yield server
    server.stopped.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("network", ["silent", "refused"])
def test_gpt2_without_network(monkeypatch, tmp_path, server, network):
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    if network == "refused":
        monkeypatch.setattr(gpt2_vocabulary, "_URL", "http://127.0.0.1:1/encodings/")
    start = time.monotonic()
    with pytest.raises(FileNotFoundError, match="Without network") as raised:
        load_tokenizer("gpt2")
    assert time.monotonic() - start < 5
    message = str(raised.value)
    assert f"TIKTOKEN_CACHE_DIR={tmp_path}" in message
    for file in ("vocab.bpe", "encoder.json"):
        url = gpt2_vocabulary._URL + file
        assert f"{file} as {hashlib.sha1(url.encode()).hexdigest()}" in message
    assert list(tmp_path.iterdir()) == []


def test_gpt2_names_of_the_cache():
    names = [gpt2_vocabulary.cached_name(file) for file in ("vocab.bpe", "encoder.json")]
    assert names == [
        "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
    ]


def test_gpt2_is_downloaded_once(monkeypatch, tmp_path, server, reference_dir):
    pytest.importorskip("tiktoken")
    requests = []
    real = {
        "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
    }

    def answer(handler):
        name = handler.path.rpartition("/")[2]
        requests.append(name)
        data = (reference_dir / "data" / "tiktoken" / real[name]).read_bytes()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    monkeypatch.setattr(Silent, "do_GET", answer)
    monkeypatch.setattr(gpt2_vocabulary, "_TIMEOUT_S", 5)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    for _ in range(2):
        gpt2_vocabulary.download()
    assert requests == ["vocab.bpe", "encoder.json"]
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("size", [300, 5000, 1 << 16])
def test_gpt2_tokens_do_not_change_where_a_text_is_cut(gpt2, reference_dir, size):
    text = (reference_dir / "data" / "wikitext2_a.txt").read_text()[:200_000]
    assert join_cut(gpt2, text, size) == gpt2.encode(text).tolist()


def join_cut(tokenizer, text, size):
    tokens, start = [], 0
    while (cut := tokenizer.find_cut(text, start, start + size)) is not None:
        assert start < cut <= start + size
        tokens += tokenizer.encode(text[start:cut]).tolist()
        start = cut
        if len(text) - start <= size:
            break
    return tokens + tokenizer.encode(text[start:]).tolist()


def test_gpt2_tokens_of_odd_texts_do_not_change_either(gpt2):
    generator, cuts = random.Random(0), 0
    for _ in range(2000):
        text = "".join(generator.choices("ab1.'s \n\t\u00a0\u3000é—", k=40))
        cut = gpt2.find_cut(text, 0, 30)
        if cut is not None:
            cuts += 1
            parts = [*gpt2.encode(text[:cut]), *gpt2.encode(text[cut:])]
            assert parts == gpt2.encode(text).tolist(), text
    assert cuts > 1000
    assert gpt2.find_cut("x" * 100, 0, 50) is None
    assert gpt2.find_cut("x" * 30 + " " + "y" * 5000, 0, 4000) == 30


def test_byte_cuts():
    assert ByteTokenizer().find_cut("abc", 0, 2) == 2
    assert ByteTokenizer().find_cut("abc", 3, 5) is None


@pytest.fixture(scope="module")
def json_file(tmp_path_factory):
    """A byte-level BPE tokenizer.json, trained here."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the hat"] * 10, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "any name.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_json_round_trip(json_file, text):
    tokenizer = load_tokenizer(json_file)
    tokens = tokenizer.encode(text)
    assert tokenizer.eot not in tokens
    assert tokenizer.decode(tokens) == text


def test_json_vocabulary(json_file, tmp_path):
    tokenizer = load_tokenizer(str(json_file))
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.name, tokenizer.eot) == ("tokenizer.json", 1)
    assert 258 < tokenizer.vocab_size <= 400
    assert len(tokenizer.encode("the the the")) < 11
    assert tokenizer.decode(np.array([1, 5000, -1])) == "<|endoftext|>\ufffd\ufffd"
    assert tokenizer.encode("\ud800").tolist() == tokenizer.encode("?").tolist()
    other = load_tokenizer(json_file, eot_token="<s>")
    assert other.eot == 0
    assert other.digest != tokenizer.digest
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(json_file.read_bytes())
    found = tokenizer_in(tmp_path, "tokenizer.json", "<|endoftext|>")
    assert found.digest == tokenizer.digest
    travelled = pickle.loads(pickle.dumps(tokenizer))
    assert travelled.encode("the cat").tolist() == found.encode("the cat").tolist()


def test_json_errors(json_file, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"has no token '</s>' .* by --eot-token"):
        load_tokenizer(json_file, eot_token="</s>")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer file none\.json"):
        load_tokenizer("none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is no tokenizer\.json"):
        load_tokenizer(tmp_path / "bad.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'maxmars\[hf\]'"):
        load_tokenizer(json_file)
