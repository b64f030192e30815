"""Tokenizer files of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maxmars.config import GPT2Config
from maxmars.data.tokenizer import END_OF_TEXT, GPT2Tokenizer, JsonTokenizer, Tokenizer
from maxmars.hf.config_json import CONFIG, read_config_json

_TOKENIZER, _VOCABULARY, _MERGES = JsonTokenizer.name, "vocab.json", "merges.txt"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


def load_hf_tokenizer(directory: str | Path, config: GPT2Config) -> tuple[Tokenizer, bool]:
    """The tokenizer in a Hugging Face directory, and whether it is one.

    It is that of `tokenizer.json` or else of `vocab.json` and `merges.txt`. Where there are none
    and the vocabulary has GPT-2's size, it is GPT-2's, and False is returned beside it.

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
        content = (directory / _TOKENIZER).read_bytes()
        found: Tokenizer = _json_tokenizer(directory, directory / _TOKENIZER, content)
    elif (directory / _VOCABULARY).is_file() or (directory / _MERGES).is_file():
        content = _from_vocabulary(directory)
        found = _json_tokenizer(directory, directory / _VOCABULARY, content)
    elif config.vocab_size == GPT2Tokenizer.vocab_size:
        return GPT2Tokenizer(), False
    else:
        raise FileNotFoundError(
            f"{directory} has no tokenizer (neither {_TOKENIZER} nor {_VOCABULARY} and {_MERGES}), "
            f"and its vocabulary of {config.vocab_size} tokens is not GPT-2's; copy the "
            f"{_TOKENIZER} that it was trained with into it."
        )
    if found.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} has {found.vocab_size} tokens, but the model only "
            f"{config.vocab_size}; put the {_TOKENIZER} that it was trained with there."
        )
    return found, True


def bpe_tokenizer_json(
    vocabulary: dict[str, int],
    merges: list[str],
    end_of_text: str,
    *,
    add_prefix_space: bool = False,
    split_words: bool = True,
) -> bytes:
    """A `tokenizer.json` of byte-pair encoding as GPT-2 has it.

    Args:
      vocabulary: token -> id; each byte is written as one printable character.
      merges: pairs of tokens, with a space between, in order of rank.
      end_of_text: the token that ends a document.
      add_prefix_space: a text begins with a space even where it does not.
      split_words: merges do not cross the borders of words, as GPT-2's pattern finds them.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True}
    special = {"id": vocabulary[end_of_text], "content": end_of_text, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocabulary,
        "merges": merges,
    }
    fields = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special | flags],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": split_words},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": split_words},
        "model": model,
    }
    return json.dumps(fields, ensure_ascii=False).encode()


def _from_vocabulary(directory: Path) -> bytes:
    """The `tokenizer.json` that `vocab.json` and `merges.txt` stand for."""
    vocabulary = read_config_json(directory / _VOCABULARY)
    if not (directory / _MERGES).is_file():
        raise FileNotFoundError(f"{directory} has {_VOCABULARY} but no {_MERGES} beside it.")
    lines = (directory / _MERGES).read_text(encoding="utf-8").split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    end_of_text = _end_of_text(directory, vocabulary)
    if type(vocabulary.get(end_of_text)) is not int:
        raise _no_end_of_text(directory / _VOCABULARY, end_of_text)
    settings = _settings(directory)
    return bpe_tokenizer_json(
        vocabulary,
        merges,
        end_of_text,
        add_prefix_space=settings.get("add_prefix_space") is True,
    )


def _json_tokenizer(directory: Path, path: Path, content: bytes) -> JsonTokenizer:
    try:
        fields = json.loads(content)
        vocabulary = {**fields["model"]["vocab"]}
        vocabulary |= {token["content"]: token["id"] for token in fields.get("added_tokens") or ()}
    except (ValueError, TypeError, KeyError, RecursionError):
        vocabulary = {}  # the library says what is wrong, or knows another kind of model
    return JsonTokenizer(path, _end_of_text(directory, vocabulary), content=content)


def _end_of_text(directory: Path, vocabulary: dict[str, int]) -> str:
    """The token that ends a document: the tokenizer's settings or the model's name it."""
    token = _settings(directory).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        return token
    config = directory / CONFIG
    number = read_config_json(config).get("eos_token_id") if config.is_file() else None
    return next((name for name, i in vocabulary.items() if i == number), END_OF_TEXT)


def _settings(directory: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        if (directory / name).is_file():
            settings = read_config_json(directory / name) | settings
    return settings


def _no_end_of_text(path: Path, token: str) -> ValueError:
    return ValueError(
        f"the vocabulary of {path} has no token {token!r} to end documents with; name one as "
        "eos_token in tokenizer_config.json."
    )
