"""Tokenizer files of a Hugging Face directory, read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maxmars.config import GPT2Config
from maxmars.data import gpt2_vocabulary
from maxmars.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    GPT2Tokenizer,
    JsonTokenizer,
    Tokenizer,
    vocabulary_digest,
)
from maxmars.hf.bpe import as_bytes, as_characters, bpe_tokenizer_json, merges_of
from maxmars.hf.config_json import CONFIG, read_json_object, write_json_object

_TOKENIZER, _VOCABULARY, _MERGES = JsonTokenizer.name, "vocab.json", "merges.txt"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


def load_hf_tokenizer(directory: str | Path, config: GPT2Config) -> tuple[Tokenizer, bool]:
    """The tokenizer in a Hugging Face directory, and whether it has one.

    It is that of `tokenizer.json` or else of `vocab.json` and `merges.txt`; where these are our
    `byte` or `gpt2`, it is those. Without files, a vocabulary of GPT-2's size is taken for GPT-2's,
    and False is returned beside it.

    Args:
      directory: of the model.
      config: the model.

    Raises:
      FileNotFoundError: it has no tokenizer, and the vocabulary is not GPT-2's; or only one file of
        two.
      ImportError: the library that it needs (extra `hf`) is not installed.
      ValueError: its files are malformed, or it has tokens that the model has not.
    """
    directory = Path(directory)
    if (directory / _TOKENIZER).is_file():
        path = directory / _TOKENIZER
        content = path.read_bytes()
    elif (directory / _VOCABULARY).is_file() or (directory / _MERGES).is_file():
        path = directory / _VOCABULARY
        content = _from_vocabulary(directory)
    elif config.vocab_size == GPT2Tokenizer.vocab_size:
        return GPT2Tokenizer(), False
    else:
        raise FileNotFoundError(
            f"{directory} has no tokenizer (neither {_TOKENIZER} nor {_VOCABULARY} and {_MERGES}), "
            f"and its vocabulary of {config.vocab_size} tokens is not GPT-2's; copy the "
            f"{_TOKENIZER} that it was trained with into it."
        )
    found = _one_of_ours(content) or _json_tokenizer(directory, path, content)
    if found.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} has {found.vocab_size} tokens, but the model only "
            f"{config.vocab_size}; put the {_TOKENIZER} that it was trained with there."
        )
    return found, True


def write_hf_tokenizer(directory: Path, tokenizer: Tokenizer, config: GPT2Config) -> None:
    """Write the files by which `transformers.AutoTokenizer` gives the same tokens.

    Text that spells out the end-of-text token is ordinary text to us, and that token there.

    Raises:
      ValueError: it is a tokenizer of another kind.
    """
    match tokenizer:
        case JsonTokenizer(content=content, eot_token=end_of_text):
            kind = "PreTrainedTokenizerFast"
        case GPT2Tokenizer():
            content, end_of_text = _write_gpt2(directory, tokenizer), END_OF_TEXT
            kind = "GPT2Tokenizer"
        case ByteTokenizer():
            end_of_text, kind = END_OF_TEXT, "PreTrainedTokenizerFast"
            tokens = as_characters(bytes([byte]) for byte in range(tokenizer.eot))
            vocabulary = {token: i for i, token in enumerate([*tokens, end_of_text])}
            content = bpe_tokenizer_json(vocabulary, [], end_of_text, split_words=False)
        case _:
            raise ValueError(f"a tokenizer {tokenizer.name!r} has no form in a {_TOKENIZER}.")
    (directory / _TOKENIZER).write_bytes(content)
    settings = {
        "tokenizer_class": kind,
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "unk_token": end_of_text,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_seq_len,
    }
    write_json_object(directory / _SETTINGS[0], settings)


def _write_gpt2(directory: Path, tokenizer: GPT2Tokenizer) -> bytes:
    """Write `vocab.json` and `merges.txt`; returns the `tokenizer.json`."""
    tokens = tokenizer.token_bytes()
    vocabulary = {t: i for i, t in enumerate([*as_characters(tokens), END_OF_TEXT])}
    first, second = zip(*merges_of(tokens), strict=True)
    pairs = zip(as_characters(first), as_characters(second), strict=True)
    merges = [f"{a} {b}" for a, b in pairs]
    (directory / _VOCABULARY).write_text(json.dumps(vocabulary))
    lines = "\n".join(["#version: 0.2", *merges])
    (directory / _MERGES).write_text(lines + "\n", encoding="utf-8")
    return bpe_tokenizer_json(vocabulary, merges, END_OF_TEXT)


def _from_vocabulary(directory: Path) -> bytes:
    """The `tokenizer.json` that `vocab.json` and `merges.txt` stand for."""
    vocabulary = read_json_object(directory / _VOCABULARY)
    if not (directory / _MERGES).is_file():
        raise FileNotFoundError(f"{directory} has {_VOCABULARY} but no {_MERGES} beside it.")
    lines = (directory / _MERGES).read_text(encoding="utf-8").split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    end_of_text = _end_of_text(directory, vocabulary)
    if type(vocabulary.get(end_of_text)) is not int:
        raise ValueError(
            f"{directory / _VOCABULARY} has no token {end_of_text!r} to end documents with; name "
            "the one that it has as eos_token in tokenizer_config.json."
        )
    add_prefix_space = _settings(directory).get("add_prefix_space") is True
    return bpe_tokenizer_json(vocabulary, merges, end_of_text, add_prefix_space=add_prefix_space)


def _one_of_ours(content: bytes) -> Tokenizer | None:
    """Our `byte` or `gpt2`, where a `tokenizer.json` means the same (and `gpt2` can be had)."""
    try:
        fields = json.loads(content)
        plain = fields["normalizer"] is None and fields["pre_tokenizer"]["type"] == "ByteLevel"
        plain &= fields["pre_tokenizer"]["add_prefix_space"] is False
        numbers = _vocabulary(fields)
        tokens = as_bytes(sorted(numbers, key=lambda name: numbers[name]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not plain or sorted(numbers.values()) != list(range(len(numbers))):
        return None
    if len(tokens) == ByteTokenizer.vocab_size:
        ours: Tokenizer = ByteTokenizer()
    elif len(tokens) == GPT2Tokenizer.vocab_size and gpt2_vocabulary.is_on_disk():
        try:
            ours = GPT2Tokenizer()
        except ImportError:
            return None
    else:
        return None
    return ours if vocabulary_digest(tokens) == ours.digest else None


def _json_tokenizer(directory: Path, path: Path, content: bytes) -> JsonTokenizer:
    try:
        vocabulary = _vocabulary(json.loads(content))
    except (ValueError, TypeError, KeyError, RecursionError):
        vocabulary = {}  # the library says what is wrong, or knows another kind of model
    return JsonTokenizer(path, _end_of_text(directory, vocabulary), content=content)


def _vocabulary(fields: dict[str, Any]) -> dict[str, int]:
    """Token -> id, of the fields of a `tokenizer.json`."""
    added = {token["content"]: token["id"] for token in fields.get("added_tokens") or ()}
    return {**fields["model"]["vocab"]} | added


def _end_of_text(directory: Path, vocabulary: dict[str, int]) -> str:
    """The token that ends a document: the tokenizer's settings or the model's name it."""
    token = _settings(directory).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        return token
    config = directory / CONFIG
    number = read_json_object(config).get("eos_token_id") if config.is_file() else None
    return next((name for name, i in vocabulary.items() if i == number), END_OF_TEXT)


def _settings(directory: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        if (directory / name).is_file():
            settings = read_json_object(directory / name) | settings
    return settings
