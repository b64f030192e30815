import json
import os
import pickle
import random
import shutil
import sys

import hypothesis
import numpy as np
import pytest
import tokenizers
from etils import epath
from hypothesis import strategies
from refusals import refused
from running import run_python

from maxmars.data.tokenizer import (
    ByteTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    Vocabulary,
    copy_tokenizer,
    load,
    save,
    tokenizer_of_tokens,
)

PIECES = [
    "Hello, world.",
    "naïve — 数学 🚀\r\n\t\x00",
    "<|endoftext|>",
    " " * 300,
    " ",
    "don't",
    "\u00a0",
]
ANY_TEXT = strategies.text(strategies.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def gpt2(reference_dir) -> GPT2Tokenizer:
    pytest.importorskip("tiktoken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(reference_dir / "data" / "tiktoken"))
        return GPT2Tokenizer()


@pytest.fixture(scope="module")
def json_file(tmp_path_factory):
    """A byte-level BPE tokenizer.json, trained here."""
    return trained(
        ["the cat sat on the mat, the hat"] * 10,
        tmp_path_factory.mktemp("tokenizer") / "any name.json",
        vocab_size=400,
        special_tokens=["<s>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )


def trained(texts, path, **options):
    """A file of byte-level BPE, trained on texts."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return path


# Words, beginnings and ends of words, pieces of characters, and bytes that are no text.
BYTES = [f"<0x{byte:02X}>" for byte in [*"中🚀A".encode(), 0xFF]]
MADE_UP = ["<|endoftext|>", "▁the", "▁", "a", "##b", "é", ".", "n't", "end</w>", "\ufffd", *BYTES]
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
KINDS = ["byte", "gpt2", "tokenizer.json"]
with_every_decoder = pytest.mark.parametrize("tokenizer", [*KINDS, *DECODERS], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    """Each kind of tokenizer; `with_every_decoder` adds MADE_UP under each decoder."""
    kind = request.param
    if kind == "byte":
        return ByteTokenizer()
    if kind == "gpt2":
        return request.getfixturevalue("gpt2")
    if kind == "tokenizer.json":
        return load(request.getfixturevalue("json_file"))
    words = {token: i for i, token in enumerate(MADE_UP)}
    theirs = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    if DECODERS[kind] is not None:
        theirs.decoder = DECODERS[kind]
    path = tmp_path_factory.mktemp(kind) / "one.json"
    theirs.save(str(path))
    return load(path)


def test_every_text_comes_back(tokenizer):
    """And the tokens of `gpt2` are those of tiktoken."""
    is_gpt2 = tokenizer.name == "gpt2"
    reference = pytest.importorskip("tiktoken").get_encoding("gpt2") if is_gpt2 else None

    @hypothesis.settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @hypothesis.given(strategies.lists(strategies.sampled_from(PIECES) | ANY_TEXT).map("".join))
    def check(text):
        tokens = tokenizer.encode(text)
        assert (tokens.dtype == np.uint16) == (tokenizer.name != "tokenizer.json")
        assert tokenizer.eot not in tokens
        assert tokenizer.decode(tokens) == text
        if reference is not None:
            assert tokens.tolist() == reference.encode_ordinary(text)

    check()


VOCABULARIES = {  # size, end, and the digest, which directories of tokens record: it never changes
    "byte": (257, 256, "c8652c242d0cd3b98b3c82d4aa53d102c8ccae44dc16854240715e4e32d8b038"),
    "gpt2": (50257, 50256, "a5623714bcf19049eb0fd78df19b6daa1e61ac435b86a5deae767768e7fcdc3d"),
}


def test_vocabularies(tokenizer, json_file):
    assert isinstance(tokenizer, Tokenizer)
    size, end, digest = tokenizer.vocab_size, tokenizer.eot, tokenizer.digest
    if tokenizer.name in VOCABULARIES:
        assert (size, end, digest) == VOCABULARIES[tokenizer.name]
    else:
        assert end == 1
        assert 258 < size <= 400
        assert len(tokenizer.encode("the the the")) < 11
        other = load(json_file, eot_token="<s>")
        assert other.eot == 0
        assert other.digest != digest
    ids = [*tokenizer.encode("a"), end, size, -1, *tokenizer.encode("𝄞")[:1]]
    assert tokenizer.decode(np.array(ids)) == "a<|endoftext|>\ufffd\ufffd\ufffd"
    assert tokenizer.encode("a\ud800b").tolist() == tokenizer.encode("a?b").tolist()


def test_gpt2_without_network(tmp_path):
    """In a process of its own: tiktoken keeps a vocabulary that it has loaded."""
    pytest.importorskip("tiktoken")
    (tmp_path / "a.txt").write_text("some text")
    command = ["-m", "maxmars", "data", "prepare", tmp_path / "a.txt", tmp_path / "out"]
    network = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "https_proxy": "http://127.0.0.1:1"}
    done = run_python(*command, "--tokenizer", "gpt2", code=1, environment=os.environ | network)
    assert "set TIKTOKEN_CACHE_DIR" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.seconds
def test_gpt2_tokens_are_those_of_its_library(gpt2, reference_dir):
    """Of texts drawn at random, with runs of every kind of white space, and of runs so long that
    they are cut. (Each would take hours if every character looked back at those before it.)"""
    tiktoken = pytest.importorskip("tiktoken")
    reference, draw = tiktoken.get_encoding("gpt2"), random.Random(0)
    spaces = [c for c in map(chr, range(0x3100)) if c.isspace()]
    units = [*spaces, " \n", "\u00a0 ", "don't", "a", "7", "...", "é", "數", "🚀", "<|", "\0"]
    for longest in [5] * 300 + [2000] * 10:
        lengths = (int(longest ** draw.random()) for _ in range(12))
        text = "".join(draw.choice(units) * length for length in lengths)
        tokens = gpt2.encode(text)
        assert tokens.tolist() == reference.encode_ordinary(text)
        assert gpt2.decode(tokens) == text
    for run in (" ", "\u00a0", "\x1c", " \t\u3000\n"):
        run *= 600_000 // len(run)
        for text in (f"a{run}b\n", run):
            assert gpt2.encode(text).tolist() == reference.encode_ordinary(text)
    text = (reference_dir / "data" / "tinyshakespeare.txt").read_text()
    assert len(gpt2.encode(text)) == 338_025


def test_what_a_tokenizer_loses_is_counted(json_file, tmp_path):
    """Of texts drawn at random: nothing where there is a token for each byte, and else each
    character that was not in the text that the tokenizer was trained on."""
    options = {"special_tokens": ["<|endoftext|>"]}
    few = load(trained(["the cat sat"], tmp_path / "few.json", **options))
    whole, draw = load(json_file), random.Random(0)
    for _ in range(100):
        letters = draw.choices(["a", " cat", "B", "é", "數", "\n", "🚀", "\0"], k=9)
        text = "x".join(["", *letters, ""])
        assert whole.loss(text).share == 0
        loss, lost = few.loss(text), [c for c in text if c not in "the cats"]
        assert loss.lost == len(lost)
        assert loss.example in lost


@pytest.mark.parametrize("kind", ["words", "unigram"])
def test_what_unknown_tokens_stand_for_is_lost(tmp_path, kind):
    """But not where the text spells one out, as that of WikiText does."""
    words = {"<|endoftext|>": 0, "<unk>": 1, "a": 2, "b": 3}
    model = tokenizers.models.WordLevel(words, "<unk>")
    if kind == "unigram":
        model = tokenizers.models.Unigram([*((word, -1.0) for word in words), ("▁", -1.0)], 1)
    own = tokenizers.Tokenizer(model)
    own.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if kind == "unigram":
        own.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        own.decoder = tokenizers.decoders.Metaspace()
    own.save(str(tmp_path / "words.json"))
    tokenizer = load(tmp_path / "words.json")
    assert tokenizer.loss("a b <unk> a").share == 0
    assert tokenizer.loss("a c <unk> a").lost >= 1  # with the blank beside it where it has one


@with_every_decoder
def test_bytes_of_tokens_add_up_to_the_bytes_of_their_text(tokenizer):
    """Between two others, since some decoders leave out a blank before the first or after the
    last."""
    if tokenizer.vocab_size == len(MADE_UP):  # words and whole characters
        between = ["▁the", "##b", "é", "end</w>", *BYTES[:-1]]
        tokens = np.array([MADE_UP.index(token) for token in ["a", *between, "a"]])
    else:
        tokens = tokenizer.encode("naïve — 数学 🚀 <0x41>\n the cat")
    lengths = tokenizer.bytes_of_tokens()
    whole, ends = (len(tokenizer.decode(some).encode()) for some in (tokens, tokens[[0, -1]]))
    assert lengths[tokens[1:-1]].sum() == whole - ends
    assert lengths[tokenizer.eot] == 0


@with_every_decoder
def test_text_that_comes_in_pieces_is_the_text_of_all_tokens(tokenizer):
    draw, is_made_up = np.random.default_rng(0), tokenizer.vocab_size == len(MADE_UP)
    texts = [] if is_made_up else [tokenizer.encode("naïve — 数学 🚀" * 3)]
    texts += [draw.integers(0, tokenizer.vocab_size, draw.integers(60)) for _ in range(20)]
    for tokens in texts:
        add, cuts = tokenizer.pieces(), np.sort(draw.integers(0, len(tokens) + 1, 9))
        pieces = [add(some, False) for some in np.split(tokens, cuts)]
        pieces.append(add(tokens[:0], True))
        assert "".join(pieces) == tokenizer.decode(tokens)
    if not is_made_up and tokenizer.name != "gpt2":  # it comes as soon as its characters are whole
        add, tokens = tokenizer.pieces(), tokenizer.encode("aé🚀z")
        pieces = [add(tokens[i : i + 1], False) for i in range(len(tokens))]
        assert pieces == ["a", "", "é", "", "", "", "🚀", "z"]


# --- directories ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """A directory that the tokenizer was saved to; that of GPT-2 takes 2 s."""
    directory = tmp_path_factory.mktemp("saved")
    save(tokenizer, directory, max_seq_len=12)
    return directory


def tokens_in(directory, name, digest):
    """What the ids of tokens in a directory mean, where its digest is known."""
    path = None if digest is None else epath.Path(directory)
    return Vocabulary(tokenizer=name, size=257, digest=digest, path=path)


def write_files(directory, files):
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name).write_text(text)
    return directory


@pytest.mark.seconds
def test_one_form_in_every_directory(tokenizer, saved, json_file, tmp_path):
    name, places = tokenizer.name, (tmp_path / "tokens", tmp_path / "run")
    shutil.copytree(saved, places[0])
    tokens = tokens_in(places[0], name, tokenizer.digest)
    copy_tokenizer(tokens, places[1])
    assert {*os.listdir(places[1])} == {*os.listdir(saved)}
    for read in (tokenizer_of_tokens(tokens), pickle.loads(pickle.dumps(load(places[1])))):
        assert (read.name, read.eot, read.digest) == (name, tokenizer.eot, tokenizer.digest)
        assert tuple(read.ends) == (tokenizer.eot,)
        np.testing.assert_array_equal(read.encode(PIECES[1]), tokenizer.encode(PIECES[1]))
        if name != "gpt2":  # see test_gpt2_is_read_where_tiktoken_has_no_vocabulary
            assert read.to_json() == tokenizer.to_json()
    (places[0] / "tokenizer.json").write_bytes(load(json_file).to_json() + b" ")
    if name != "byte":
        with refused(ValueError, places[0]):
            tokenizer_of_tokens(tokens)
    if name == "tokenizer.json":
        with refused(ValueError, places[0]):
            copy_tokenizer(tokens, tmp_path / "again")


def test_what_earlier_versions_wrote(tokenizer, json_file, tmp_path):
    """A kind by its name, in `meta.json` beside tokens."""
    name = tokenizer.name
    own = {} if name != "tokenizer.json" else {name: json_file.read_text()}
    end = {"eot_token": "<|endoftext|>"} if own else {}
    write_files(tmp_path / "tokens", {"meta.json": {"tokenizer": name} | end} | own)
    tokens = tokens_in(tmp_path / "tokens", name, tokenizer.digest)
    copy_tokenizer(tokens, tmp_path / "copied")
    for directory in ("tokens", "copied"):
        read = load(tmp_path / directory)
        assert (read.name, read.digest) == (name, tokenizer.digest)
    assert tokenizer_of_tokens(tokens).digest == tokenizer.digest


def test_tokens_of_other_programs_have_no_files(gpt2, tmp_path):
    for name in ("byte", "gpt2"):
        tokens = tokens_in(tmp_path, name, None)
        copy_tokenizer(tokens, tmp_path / name)
        assert load(tmp_path / name).name == tokenizer_of_tokens(tokens).name == name
    tokens = tokens_in(tmp_path, "unknown", None)
    copy_tokenizer(tokens, tmp_path / "unknown")
    assert not (tmp_path / "unknown").exists()
    with refused(ValueError, "GrainConfig"):
        tokenizer_of_tokens(tokens)


only_gpt2 = pytest.mark.parametrize("tokenizer", ["gpt2"], indirect=True)


@pytest.mark.seconds
@only_gpt2
def test_gpt2_is_read_where_tiktoken_has_no_vocabulary(tokenizer, saved, tmp_path, reference_dir):
    """In a process of its own: tiktoken keeps a vocabulary that it has loaded."""
    names = {"vocab.json": "6c7ea1a7e38e", "merges.txt": "6d1cbeee0f20"}
    cache = reference_dir / "data" / "tiktoken"
    published = {file: next(cache.glob(f"{n}*")).read_text() for file, n in names.items()}
    write_files(tmp_path / "old", published)
    fields = json.loads((saved / "tokenizer.json").read_text())
    assert fields["model"]["vocab"] == json.loads(published["vocab.json"])
    assert fields["model"]["merges"] == published["merges.txt"].splitlines()[1:]
    code = "import pathlib, sys; from maxmars.data.tokenizer import load\n"
    code += "for path in sys.argv[2:]: t = load(pathlib.Path(path)); print(t.name, t.digest, "
    code += "t.encode(sys.argv[1]).tolist())"
    text = "don't  stop"
    network = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "none"), "https_proxy": "x:1"}
    words = ["-c", code, text, saved, tmp_path / "old"]
    done = run_python(*words, environment=os.environ | network)
    assert done.stdout == 2 * f"gpt2 {tokenizer.digest} {tokenizer.encode(text).tolist()}\n"


@pytest.mark.seconds
def test_other_libraries_read_the_files(tokenizer, saved):
    """tokenizers, and transformers, which uses it, encode and decode as we do."""
    theirs = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    for text in ("To be, or  not\n\n to be: café 日本 🙂 don't\t", "", " x"):
        encoded = theirs.encode(text).ids
        np.testing.assert_array_equal(encoded, tokenizer.encode(text))
        assert theirs.decode(encoded, skip_special_tokens=False) == text
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    assert theirs("To be, or  n")["input_ids"] == tokenizer.encode("To be, or  n").tolist()
    assert (theirs.eos_token_id, theirs.model_max_length) == (tokenizer.eot, 12)


WORDS = {"<|endoftext|>": 0, "</s>": 1, "<turn>": 2, "a": 3, "b": 4}
PLAIN = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, "a")).to_str()
UNIGRAM = tokenizers.Tokenizer(
    tokenizers.models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("<turn>", 0.0), ("a", -1.0)], 0)
).to_str()
BYTE_LEVEL = {"vocab.json": {"a": 0, "b": 1, "<|endoftext|>": 2}, "merges.txt": "#version: 0.2\n"}
TURN = {"content": "<turn>", "special": True, "lstrip": False}


def files_of(tokenizer, **fields):
    """A tokenizer's own file or files, and others by name with their fields."""
    own = {"tokenizer.json": tokenizer} if isinstance(tokenizer, str) else tokenizer
    return own | {f"{name}.json": value for name, value in fields.items()}


END, IDS = {"eos_token": "</s>"}, "eos_token_id"
ENDS = {
    "settings": (files_of(PLAIN, tokenizer_config=END), [1]),
    "an object": (files_of(PLAIN, special_tokens_map={"eos_token": {"content": "</s>"}}), [1]),
    "zero": (files_of(PLAIN, generation_config={IDS: 0}, config={IDS: 2}), [0]),
    "for generation": (
        files_of(PLAIN, tokenizer_config=END, generation_config={IDS: [1, 2, 77]}, config={IDS: 4}),
        [1, 2],
    ),
    "unigram, two": (
        files_of(UNIGRAM, tokenizer_config=END, generation_config={IDS: [2, 1]}),
        [1, 2],
    ),
    "vocabulary": (BYTE_LEVEL, [2]),
    "added": (
        files_of(
            BYTE_LEVEL,
            added_tokens={"<turn>": 4, "<pad>": 3},
            tokenizer_config={"eos_token": "<turn>"},
            config={IDS: 2},
        ),
        [4, 2],
    ),
    "a pad": (
        files_of(BYTE_LEVEL, added_tokens={"<pad>": 3}, special_tokens_map={"pad_token": "<pad>"}),
        [2],
    ),
    "added in the settings": (
        files_of(
            UNIGRAM.replace("<turn>", "turn"),
            tokenizer_config={"added_tokens_decoder": {"4": TURN}} | END,
            generation_config={IDS: [1, 4]},
        ),
        [1, 4],
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_every_end_that_the_files_name(tmp_path, case):
    files, ends = ENDS[case]
    theirs = load(write_files(tmp_path / "theirs", files))
    assert (theirs.eot, list(theirs.ends)) == (ends[0], ends)
    save(theirs, tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert (again.eot, list(again.ends), again.vocab_size) == (ends[0], ends, theirs.vocab_size)
    if case == "a pad":  # which a model without it could not use
        assert theirs.vocab_size == 3
    if case.startswith("added"):  # text that spells it out is text
        assert theirs.vocab_size - 1 not in theirs.encode("a<turn>b")


@pytest.mark.parametrize("bos", ["<turn>", {"content": "<turn>"}, None])
def test_settings_go_out_as_they_came_in(tmp_path, bos):
    said = {"chat_template": "{{ messages }}", "padding_side": "left", "bos_token": bos}
    files = files_of(
        UNIGRAM,
        tokenizer_config=said | END | {"name_or_path": "/home/me", "auto_map": {"a": "b.c"}},
        special_tokens_map={"pad_token": "<pad>"},
        config={"bos_token_id": 0},
    )
    theirs = pickle.loads(pickle.dumps(load(write_files(tmp_path / "theirs", files))))
    save(theirs, tmp_path / "saved")
    went = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert went.items() >= (said | {"pad_token": "<pad>"}).items()
    assert not went.keys() & {"name_or_path", "auto_map"}
    for read in (theirs, load(tmp_path / "saved")):
        assert read.bos == (theirs.eot + 1 if bos else 0)


@pytest.mark.seconds
@only_gpt2
def test_gpt2_may_end_at_other_tokens_too(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "gpt2")
    ends = {"generation_config.json": {"eos_token_id": [198, 50256]}}
    read = load(write_files(tmp_path / "gpt2", ends))
    assert (read.name, read.eot, read.ends) == ("gpt2", 50256, (50256, 198))
    assert pickle.loads(pickle.dumps(read)).ends == read.ends


def test_a_text_is_neither_cut_nor_padded(json_file, tmp_path):
    own = tokenizers.Tokenizer.from_file(str(json_file))
    own.enable_truncation(3)
    own.enable_padding(length=9)
    own.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = load(tmp_path), "the cat sat on the mat, the hat"
    assert tokenizer.decode(tokenizer.encode(text)) == text


REFUSED = {
    "no such name": ({}, "gpt5"),
    "no such file": ({}, "none.json"),
    "nothing": ({}, "neither tokenizer.json nor vocab.json"),
    "no end": ({"tokenizer.json": UNIGRAM}, "--eot-token"),
    "no JSON": ({"tokenizer.json": "{"}, "tokenizer"),
    "no object": ({"tokenizer.json": "[]"}, "tokenizer"),
    "no vocabulary": ({"tokenizer.json": '{"model": {"vocab": [1]}}'}, "tokenizer"),
    "settings": ({"tokenizer.json": PLAIN, "tokenizer_config.json": "["}, "tokenizer_config"),
    "no merges": ({"vocab.json": {"<|endoftext|>": 0}}, "vocab.json"),
    "vocab.json": ({"vocab.json": "[]", "merges.txt": ""}, "vocab.json"),
    "no end in it": ({"vocab.json": {"a": 0}, "merges.txt": ""}, "--eot-token"),
    "a gap": (BYTE_LEVEL | {"added_tokens.json": {"<turn>": 9}}, "'<turn>' has the id 9"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    files, value = REFUSED[case]
    place = value if case.startswith("no such") else write_files(tmp_path / "tokenizer", files)
    with refused((ValueError, FileNotFoundError), value):
        load(place)


@pytest.mark.parametrize("name", ["gpt2", "tokenizer.json"])
def test_without_the_library(json_file, monkeypatch, name):
    for library in ("tiktoken", "tokenizers"):
        monkeypatch.setitem(sys.modules, library, None)  # as where it is not installed
    with refused(ImportError, "[hf]'`"):
        load(json_file if name.endswith("json") else name)
