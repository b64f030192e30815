import json
import os
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from maxmars.data.tokenizer import (
    ByteTokenizer,
    GPT2Tokenizer,
    JsonTokenizer,
    TextStream,
    Tokenizer,
    copy_tokenizer,
    load_hf_tokenizer,
    load_saved_tokenizer,
    load_tokenizer,
    save_tokenizer,
    tokenizer_of_tokens,
    write_hf_tokenizer,
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


def test_gpt2_without_network(tmp_path):
    """In a process of its own: tiktoken keeps a vocabulary that it has loaded."""
    pytest.importorskip("tiktoken")
    code = "from maxmars.data.tokenizer import GPT2Tokenizer as G\ntry: G()\n"
    code += "except FileNotFoundError as error: print(error)"
    network = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "https_proxy": "http://127.0.0.1:1"}
    text = subprocess.check_output(
        [sys.executable, "-c", code], env=os.environ | network, text=True
    )
    assert f"is not in {tmp_path} and could not be downloaded (ProxyError" in text
    assert "Without network, set TIKTOKEN_CACHE_DIR" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("size", [300, 5000, 1 << 16])
def test_gpt2_tokens_do_not_change_where_a_text_is_cut(gpt2, reference_dir, size):
    text = (reference_dir / "data" / "wikitext2_a.txt").read_text()[:200_000]
    assert join_cut(gpt2, text, size) == gpt2.encode(text).tolist()


def join_cut(tokenizer, text, size):
    tokens, start = [], 0
    while (match := tokenizer.cut_after.search(text, start + size)) is not None:
        tokens += tokenizer.encode(text[start : match.end()]).tolist()
        start = match.end()
    return tokens + tokenizer.encode(text[start:]).tolist()


def test_gpt2_tokens_of_odd_texts_do_not_change_either(gpt2):
    generator, cuts = random.Random(0), 0
    for _ in range(2000):
        text = "".join(generator.choices("ab1.'s \n\t\u00a0\u3000é—", k=40))
        for match in gpt2.cut_after.finditer(text):
            cuts += 1
            parts = [*gpt2.encode(text[: match.end()]), *gpt2.encode(text[match.end() :])]
            assert parts == gpt2.encode(text).tolist(), text
    assert cuts > 1000
    assert gpt2.cut_after.search("x" * 100) is None


@pytest.mark.parametrize("last", [" ", "\n"])
def test_gpt2_tokens_of_many_spaces(gpt2, last):
    """The library fails at a million of them before another character."""
    tiktoken = pytest.importorskip("tiktoken")
    text = "some" + " \n" * 300_000 + last + "words"
    assert gpt2.encode(text).tolist() == tiktoken.get_encoding("gpt2").encode(text)
    text = "é" + " " * 1_100_000 + last + "é"
    assert gpt2.decode(gpt2.encode(text)) == text


@pytest.fixture(scope="module")
def json_file(tmp_path_factory):
    """A byte-level BPE tokenizer.json, trained here."""
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


def test_json_vocabulary(json_file):
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


# Words, beginnings and ends of words, characters in parts, and bytes that are no text.
BYTES = [f"<0x{byte:02X}>" for byte in [*"中🚀A".encode(), 0xFF]]
PARTS = ["<|endoftext|>", "▁the", "▁", "a", "##b", "é", ".", "n't", "end</w>", "\ufffd", *BYTES]
DECODERS = {
    "llama": tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    ),
    "metaspace": tokenizers.decoders.Metaspace(),
    "wordpiece": tokenizers.decoders.WordPiece(),
    "bpe": tokenizers.decoders.BPEDecoder("</w>"),
    "none": None,
}


@pytest.mark.parametrize("kind", ["byte", "gpt2", "byte-level", *DECODERS])
def test_text_that_comes_in_pieces_is_the_text_of_all_tokens(kind, json_file, request, tmp_path):
    draw = np.random.default_rng(0)
    if kind in ("byte", "gpt2"):
        tokenizer = ByteTokenizer() if kind == "byte" else request.getfixturevalue("gpt2")
    elif kind == "byte-level":
        tokenizer = load_tokenizer(json_file)
    else:
        words = tokenizers.models.WordLevel({part: i for i, part in enumerate(PARTS)})
        theirs = tokenizers.Tokenizer(words)
        if DECODERS[kind] is not None:
            theirs.decoder = DECODERS[kind]
        theirs.save(str(tmp_path / "one.json"))
        tokenizer = load_tokenizer(tmp_path / "one.json")
    texts = [tokenizer.encode("naïve — 数学 🚀" * 3)] if kind not in DECODERS else []
    texts += [draw.integers(0, tokenizer.vocab_size + 2, draw.integers(60)) for _ in range(50)]
    for tokens in texts:
        stream, cuts = TextStream(tokenizer), np.sort(draw.integers(0, len(tokens) + 1, 9))
        pieces = [stream.add(part) for part in np.split(tokens, cuts)]
        pieces.append(stream.add(tokens[:0], is_last=True))
        assert "".join(pieces) == tokenizer.decode(tokens)


def test_text_comes_as_soon_as_its_characters_are_whole(json_file):
    for tokenizer in (ByteTokenizer(), load_tokenizer(json_file)):
        stream = TextStream(tokenizer)
        tokens = tokenizer.encode("aé🚀z")
        assert [stream.add(tokens[i : i + 1]) for i in range(len(tokens))] == (
            ["a", "", "é", "", "", "", "🚀", "z"]
        )


ERRORS = {
    "unknown": (lambda file: load_tokenizer("gpt5"), "no tokenizer 'gpt5'; choose byte, gpt2, or"),
    "no file": (lambda file: load_tokenizer("none.json"), r"no tokenizer file none\.json"),
    "end of text": (
        lambda file: load_tokenizer(file, eot_token="</s>"),
        r"has no token '</s>' .* by --eot-token",
    ),
    "no tokenizer": (
        lambda file: JsonTokenizer("bad.json", content=b"{}"),
        r"bad\.json is no tokenizer\.json",
    ),
    "no description": (lambda file: load_saved_tokenizer(file.parent), r"description\.json"),
    "another tokenizer beside tokens": (
        lambda file: tokenizer_of_tokens(write_meta(file), "tokenizer.json"),
        r"tokenizer\.json is not the tokenizer that made the tokens beside it; copy",
    ),
}


def write_meta(file):
    (file.parent / "tokenizer.json").write_bytes(file.read_bytes() + b"\n")
    fields = {"eot_token": "<|endoftext|>", "tokenizer_digest": load_tokenizer(file).digest}
    (file.parent / "meta.json").write_text(json.dumps(fields))
    return file.parent


@pytest.mark.parametrize("kind", ERRORS)
def test_errors(json_file, kind):
    load, message = ERRORS[kind]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(json_file)


@pytest.mark.parametrize("name", ["gpt2", "tokenizer.json"])
def test_without_the_library(json_file, monkeypatch, name):
    for library in ("tiktoken", "tokenizers"):
        monkeypatch.setitem(sys.modules, library, None)  # as where it is not installed
    with pytest.raises(ImportError, match=r"pip install 'maxmars\[hf\]'"):
        load_tokenizer(json_file if name.endswith("json") else name)


@pytest.mark.parametrize("name", ["byte", "gpt2", "tokenizer.json"])
def test_saved_and_copied_tokenizers(gpt2, json_file, tmp_path, name):
    tokenizer = {"byte": ByteTokenizer(), "gpt2": gpt2}.get(name) or load_tokenizer(json_file)
    save_tokenizer(tokenizer, tmp_path / "saved")
    # A directory of tokens.
    (tmp_path / "meta.json").write_text('{"eot_token": "<|endoftext|>"}')
    (tmp_path / "tokenizer.json").write_bytes(json_file.read_bytes())
    copy_tokenizer(tmp_path, name, tmp_path / "copied")
    text = TEXTS[2]
    for found in (
        load_saved_tokenizer(tmp_path / "saved"),
        load_saved_tokenizer(tmp_path / "copied"),
        tokenizer_of_tokens(tmp_path, name),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert (found.name, found.eot, found.digest) == (name, tokenizer.eot, tokenizer.digest)
        np.testing.assert_array_equal(found.encode(text), tokenizer.encode(text))


# --- Hugging Face directories --------------------------------------------------------------------


SPELT = ("To be, or  not\n\n to be: caf\u00e9 \u65e5\u672c \U0001f642 don't\t", "", " x")


@pytest.fixture
def vocabulary(reference_dir, monkeypatch):
    """The directory of GPT-2's vocabulary as tiktoken keeps it."""
    directory = reference_dir / "data" / "tiktoken"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(directory))
    return directory


def assert_same_tokens(directory, tokenizer):
    """The library tokenizers, which transformers uses, encodes and decodes as we do."""
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in SPELT:
        encoded = theirs.encode(text).ids
        np.testing.assert_array_equal(encoded, tokenizer.encode(text))
        assert theirs.decode(encoded, skip_special_tokens=False) == text
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    assert theirs.token_to_id(settings["eos_token"]) == tokenizer.eot
    assert theirs.get_vocab_size() == tokenizer.vocab_size


def test_hugging_face_files_of_bytes(tmp_path):
    write_hf_tokenizer(tmp_path, ByteTokenizer(), 12)
    assert_same_tokens(tmp_path, ByteTokenizer())
    found, is_its_own = load_hf_tokenizer(tmp_path, 257)
    assert isinstance(found, ByteTokenizer)
    assert is_its_own


def test_hugging_face_files_of_gpt2(tmp_path, gpt2, vocabulary, reference_dir, monkeypatch):
    write_hf_tokenizer(tmp_path, gpt2, 1024)
    assert_same_tokens(tmp_path, gpt2)
    published = sorted(path.read_bytes() for path in vocabulary.iterdir())
    assert published == sorted((tmp_path / n).read_bytes() for n in ("merges.txt", "vocab.json"))
    found, _ = load_hf_tokenizer(tmp_path, 50257)
    assert isinstance(found, GPT2Tokenizer)
    # Without tiktoken's own files: tokenizer.json, or what vocab.json and merges.txt stand for.
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    text = (reference_dir / "data" / "tinyshakespeare.txt").read_text()[:300_000]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        found, _ = load_hf_tokenizer(tmp_path, 50257)
        assert isinstance(found, JsonTokenizer)
        assert found.eot == gpt2.eot
        for example in (*SPELT, text):
            np.testing.assert_array_equal(found.encode(example), gpt2.encode(example))
        (tmp_path / file).unlink()
    with pytest.raises(FileNotFoundError, match=r"tiktoken keeps no .* set TIKTOKEN_CACHE_DIR"):
        write_hf_tokenizer(tmp_path, gpt2, 1024)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"has vocab\.json but no merges\.txt"):
        load_hf_tokenizer(tmp_path, 50257)


def test_without_files_a_vocabulary_of_its_size_is_gpt2s(tmp_path, gpt2):
    found, is_its_own = load_hf_tokenizer(tmp_path, 50257)
    assert isinstance(found, GPT2Tokenizer)
    assert not is_its_own
    with pytest.raises(
        FileNotFoundError, match=r"61 tokens is not GPT-2's; copy the tokenizer\.json"
    ):
        load_hf_tokenizer(tmp_path, 61)


def test_hugging_face_files_of_the_users_own_tokenizer(json_file, tmp_path):
    own = tokenizers.Tokenizer.from_file(str(json_file))
    own.enable_truncation(3)
    own.enable_padding(length=9)
    own.save(str(tmp_path / "own.json"))
    tokenizer = JsonTokenizer(tmp_path / "own.json", "<s>")
    (tmp_path / "hf").mkdir()
    write_hf_tokenizer(tmp_path / "hf", tokenizer, 12)
    found, is_its_own = load_hf_tokenizer(tmp_path / "hf", 400)
    assert is_its_own
    assert (found.digest, found.eot) == (tokenizer.digest, 0)
    long = "the cat sat on the mat, the hat"
    assert found.decode(found.encode(long)) == long  # not cut, not padded
    with pytest.raises(ValueError, match=f"has {found.vocab_size} tokens, but the model only 61"):
        load_hf_tokenizer(tmp_path / "hf", 61)
    # The model's config.json names the end of a text where the tokenizer's settings do not.
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert load_hf_tokenizer(tmp_path / "hf", 400)[0].eot == 1
    (tmp_path / "hf" / "config.json").write_text('{"eos_token_id": 0}')
    assert load_hf_tokenizer(tmp_path / "hf", 400)[0].eot == 0


def test_transformers_reads_the_files(gpt2, vocabulary, tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, tokenizer in {"byte": ByteTokenizer(), "gpt2": gpt2}.items():
        directory = tmp_path / name
        directory.mkdir()
        write_hf_tokenizer(directory, tokenizer, 12)
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        text = SPELT[0][:12]
        assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
        assert theirs.eos_token_id == tokenizer.eot


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "is no tokenizer.json"),
        ({"tokenizer.json": "[]"}, "is no tokenizer.json"),
        ({"tokenizer.json": '{"model": {"vocab": [1]}}'}, "is no tokenizer.json"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "["}, "tokenizer_config"),
        ({"vocab.json": "[]", "merges.txt": ""}, "vocab.json"),
        ({"vocab.json": '{"a": 0}', "merges.txt": ""}, "has no token"),
    ],
)
def test_malformed_files(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_hf_tokenizer(tmp_path, 257)
