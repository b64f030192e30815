"""Tokenizers: plain bytes, GPT-2's byte-pair encoding, and any `tokenizer.json`.

The tokens of a data set, a run and a Hugging Face model each come with their tokenizer:

* tokens on disk name it in `meta.json`, and have their `tokenizer.json` beside them if it is one;
* a run has `tokenizer/description.json`, `{"name": "gpt2"}` for example, and `tokenizer.json`
  beside it if the name is that;
* a Hugging Face directory has `tokenizer.json`, or only `vocab.json` and `merges.txt`.

Plain bytes need no library. GPT-2's encoding is tiktoken's, and a `tokenizer.json` is read by the
library tokenizers (both in the extra `hf`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer, UInt16

from maxmars.distributed.files import (
    Workdir,
    read_json_object,
    reporting,
    write_bytes,
    write_json,
    write_text,
)

END_OF_TEXT = "<|endoftext|>"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()
# GPT-2's published files, by the names under which tiktoken caches them (SHA-1 of their addresses).
_GPT2_CACHED = {
    "vocab.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
    "merges.txt": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
}
_DESCRIPTION = "description.json"
_TOKENIZER, _VOCABULARY, _MERGES = "tokenizer.json", "vocab.json", "merges.txt"
_COPY = "copy the one that they were prepared with there"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. Ids lie in [0, vocab_size)."""

    @property
    def name(self) -> str:
        """The name under which `load_tokenizer` finds it."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eot(self) -> int:
        """Id of the token that ends a document; `encode` never returns it."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides the tokens, in hex."""
        ...

    @property
    def cut_after(self) -> re.Pattern[str] | None:
        """Where a text may be cut without a change of its tokens: after any match of this pattern
        of ASCII characters, whatever comes before and after. None: nowhere."""
        ...

    def encode(self, text: str) -> Integer[np.ndarray, " tokens"]:
        """Token ids of a text. A special token that the text spells out is ordinary text, and a
        lone surrogate becomes `?`."""
        ...

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        """Text of token ids. Invalid UTF-8 and ids beyond the vocabulary become U+FFFD."""
        ...


class ByteTokenizer:
    """One token for each UTF-8 byte, and one that ends a document."""

    name = "byte"
    vocab_size = 257
    eot = 256
    cut_after = re.compile(r"[\x00-\x7f]")

    @property
    def digest(self) -> str:
        """SHA-256 over the bytes of every token in order of ids, in hex."""
        return _vocabulary_digest([*(bytes([b]) for b in range(256)), END_OF_TEXT.encode()])

    def encode(self, text: str) -> UInt16[np.ndarray, " tokens"]:
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint16)

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        return b"".join(map(self._bytes_of, tokens.tolist())).decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        if token == self.eot:
            return END_OF_TEXT.encode()
        return bytes([token]) if 0 <= token < self.eot else _REPLACEMENT


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, by tiktoken (extra `hf`).

    Its vocabulary (1.5 MB) comes from the directory TIKTOKEN_CACHE_DIR or, failing that, from the
    network.

    Raises:
      ImportError: tiktoken is not installed.
      FileNotFoundError: the vocabulary is not there and cannot be downloaded.
    """

    name = "gpt2"
    vocab_size = 50257
    eot = 50256
    # GPT-2's pattern never joins a character that is no space to a space after it.
    cut_after = re.compile(r"[!-~](?=[ \n])")
    # Its library fails where a million spaces come before another character. The pattern takes all
    # of them but the last as one piece, so a cut there does not change the tokens.
    _many_spaces = re.compile(r"[ \t\n\r]{500000,}(?=\S)")

    def __init__(self) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise ImportError(
                "the gpt2 tokenizer needs tiktoken; install it with `pip install 'maxmars[hf]'`."
            ) from error
        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # OSError: every error of the network and the disk
            cache = _gpt2_files()[_VOCABULARY].parent
            raise FileNotFoundError(
                f"the vocabulary of the gpt2 tokenizer is not in {cache} and could not be "
                f"downloaded ({type(error).__name__}: {error}). Without network, set "
                "TIKTOKEN_CACHE_DIR to a new directory on another machine, run `python -c 'import "
                'tiktoken; tiktoken.get_encoding("gpt2")\'` there, copy the directory here and set '
                "TIKTOKEN_CACHE_DIR to it."
            ) from error

    def __reduce__(self) -> tuple[type[GPT2Tokenizer], tuple[()]]:
        return GPT2Tokenizer, ()  # another process loads the vocabulary itself

    @property
    def digest(self) -> str:
        """SHA-256 over the bytes of every token in order of ids, in hex."""
        tokens = map(self._encoding.decode_single_token_bytes, range(self.eot))
        return _vocabulary_digest([*tokens, END_OF_TEXT.encode()])

    def encode(self, text: str) -> UInt16[np.ndarray, " tokens"]:
        cuts = [0, *(match.end() - 1 for match in self._many_spaces.finditer(text)), len(text)]
        parts = [self._encode(text[start:end]) for start, end in itertools.pairwise(cuts)]
        return np.concatenate(parts).astype(np.uint16)

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            text = text.encode("utf-8", "replace").decode()
            return self._encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        return b"".join(map(self._bytes_of, tokens.tolist())).decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        if 0 <= token < self.vocab_size:
            return self._encoding.decode_single_token_bytes(token)
        return _REPLACEMENT  # a model with a padded vocabulary has ids without a token


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`, by the library tokenizers (extra `hf`).

    Args:
      path: the file.
      eot_token: the token of its vocabulary that ends a document.
      content: content of the file, if it is in memory; `path` then only names it in errors.

    Raises:
      ImportError: tokenizers is not installed.
      FileNotFoundError: there is no such file.
      ValueError: the file is no tokenizer, or its vocabulary lacks `eot_token`.
    """

    name = _TOKENIZER
    cut_after = None  # a tokenizer.json may look at any context

    def __init__(
        self, path: str | Path, eot_token: str = END_OF_TEXT, *, content: bytes | None = None
    ) -> None:
        self.path, self.eot_token = Path(path), eot_token
        if content is None:
            if not self.path.is_file():
                raise FileNotFoundError(f"there is no tokenizer file {path}; check the path.")
            content = self.path.read_bytes()
        self.content = content
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                "a tokenizer.json needs the library tokenizers; install it with "
                "`pip install 'maxmars[hf]'`."
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is no tokenizer.json: {error}.") from error
        # A special token that a text spells out is ordinary text; texts are never cut or padded.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if eot_token not in vocabulary:
            raise ValueError(
                f"the vocabulary of {path} has no token {eot_token!r} to end documents with; name "
                "the one that it has by --eot-token."
            )
        self.eot: int = vocabulary[eot_token]
        self.vocab_size: int = max(vocabulary.values()) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(JsonTokenizer, content=self.content)
        return make, (self.path, self.eot_token)

    @property
    def digest(self) -> str:
        """SHA-256 over the file and the end-of-text token, in hex."""
        return _vocabulary_digest([self.content, self.eot_token.encode()])

    def encode(self, text: str) -> Integer[np.ndarray, " tokens"]:
        text = text.encode("utf-8", "replace").decode() if not text.isascii() else text
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        runs = itertools.groupby(tokens.tolist(), lambda token: 0 <= token < self.vocab_size)
        return "".join(
            self._tokenizer.decode(list(run), skip_special_tokens=False)
            if known
            else "\N{REPLACEMENT CHARACTER}" * len(list(run))
            for known, run in runs
        )

    @property
    def joins_bytes(self) -> bool:
        """Whether a text is the bytes of its tokens, one after another."""
        decoder = json.loads(self.content).get("decoder") or {}
        return decoder.get("type") == "ByteLevel"

    def is_byte(self, token: int) -> bool:
        """Whether a token is one byte of a character that has no token, such as `<0xE4>`."""
        name = self._tokenizer.id_to_token(token) if token >= 0 else None
        return re.fullmatch("<0x[0-9A-F]{2}>", name or "") is not None


class TextStream:
    """The text of tokens that come one after another.

    All pieces joined are `tokenizer.decode` of all tokens, in whole characters: what may still
    change with the next tokens is held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Each token of other tokenizers may depend on all that come before it.
        self._forgets = not isinstance(tokenizer, JsonTokenizer) or tokenizer.joins_bytes
        self._tokens: list[int] = []  # that decide the next text
        self._num_shown = 0  # characters of their text

    def add(self, tokens: Integer[np.ndarray, " tokens"], *, is_last: bool = False) -> str:
        """Returns the text that is certain now, and with `is_last` all that is left."""
        self._tokens += tokens.tolist()
        end = len(self._tokens)
        while not is_last and not self._forgets and end and self._is_byte(self._tokens[end - 1]):
            end -= 1
        text = self._tokenizer.decode(np.array(self._tokens[:end], np.int64))
        # An incomplete character at the end is replaced; perhaps it becomes complete.
        certain = text if is_last else text.rstrip(_REPLACEMENT.decode())
        new, self._num_shown = certain[self._num_shown :], max(self._num_shown, len(certain))
        if self._forgets and len(certain) == len(text):
            self._tokens, self._num_shown = [], 0
        return new

    def _is_byte(self, token: int) -> bool:
        return isinstance(self._tokenizer, JsonTokenizer) and self._tokenizer.is_byte(token)


_UNKNOWN = "unknown"  # of GrainConfig
_NAMES = (ByteTokenizer.name, GPT2Tokenizer.name, _UNKNOWN)


def load_tokenizer(name: str | Path, *, eot_token: str = END_OF_TEXT) -> Tokenizer:
    """The tokenizer `byte` or `gpt2`, or the one in a local `tokenizer.json`.

    Args:
      name: the name, or a path that ends in `.json`.
      eot_token: the token of a `tokenizer.json` that ends a document.

    Raises:
      ValueError: there is none of this name, or the file is no tokenizer.
      ImportError: the library that it needs (extra `hf`) is not installed.
      FileNotFoundError: there is no such file, or the vocabulary of `gpt2` is not there and cannot
        be downloaded.
    """
    match str(name):
        case ByteTokenizer.name:
            return ByteTokenizer()
        case GPT2Tokenizer.name:
            return GPT2Tokenizer()
        case path if path.endswith(".json"):
            return JsonTokenizer(Path(path).expanduser(), eot_token)
    if str(name) == _UNKNOWN:
        raise ValueError(
            "the tokens are those of a source of your own that names no tokenizer; train with "
            "GrainConfig(tokenizer='byte') or 'gpt2' to generate text and to score the model later."
        )
    raise ValueError(
        f"there is no tokenizer {str(name)!r}; choose byte, gpt2, or the path of a tokenizer.json."
    )


def tokenizer_of_tokens(directory: Workdir, name: str) -> Tokenizer:
    """The tokenizer of a directory of tokens, on a disk or in a bucket.

    Args:
      directory: where the tokens are, with `meta.json` and `tokenizer.json` if it is one.
      name: name of the tokenizer.

    Raises:
      ValueError, ImportError, FileNotFoundError: see `load_tokenizer`.
    """
    if name != JsonTokenizer.name:
        return load_tokenizer(name)
    content, eot_token = _tokenizer_of_tokens(directory)
    return JsonTokenizer(str(directory / name), eot_token, content=content)


def copy_tokenizer(source: Workdir, name: str, target: Workdir) -> None:
    """Write the tokenizer of tokens for `load_saved_tokenizer`; no library is needed.

    Args:
      source: the directory of the tokens; see `tokenizer_of_tokens`.
      name: name of the tokenizer.
      target: directory to make, usually `tokenizer` in a run.
    """
    if name == JsonTokenizer.name:
        content, eot_token = _tokenizer_of_tokens(source)
        _write_tokenizer(target, name, eot_token, content)
    else:
        _write_tokenizer(target, name)


def save_tokenizer(tokenizer: Tokenizer, target: Workdir) -> None:
    """Write a tokenizer for `load_saved_tokenizer`, into a directory to make."""
    if isinstance(tokenizer, JsonTokenizer):
        _write_tokenizer(target, tokenizer.name, tokenizer.eot_token, tokenizer.content)
    else:
        _write_tokenizer(target, tokenizer.name)


class DamagedTokenizerError(ValueError):
    """A saved tokenizer is not what was saved."""


def load_saved_tokenizer(directory: Workdir) -> Tokenizer:
    """The tokenizer that `save_tokenizer` or `copy_tokenizer` wrote into a directory.

    Raises:
      DamagedTokenizerError: it cannot be read, or is not what was written.
      ValueError, ImportError, FileNotFoundError: see `load_tokenizer`.
    """
    try:
        with reporting(directory):
            fields = read_json_object(directory / _DESCRIPTION)
            name: Any = fields.get("name")
            eot_token = fields.get("eot_token", END_OF_TEXT)
            content = (directory / name).read_bytes() if name == JsonTokenizer.name else b""
        if name not in (*_NAMES, JsonTokenizer.name) or not isinstance(eot_token, str):
            raise ValueError(f"{_DESCRIPTION} names no tokenizer, but {name!r}")
        # Earlier versions recorded no SHA-256.
        if content and fields.get("sha256") not in (None, hashlib.sha256(content).hexdigest()):
            raise ValueError(f"{name} does not have the SHA-256 in {_DESCRIPTION}")
        if name == JsonTokenizer.name:
            return JsonTokenizer(str(directory / name), eot_token, content=content)
    except (ValueError, FileNotFoundError, IsADirectoryError) as error:
        raise DamagedTokenizerError(str(error).rstrip(".")) from error
    return load_tokenizer(name)


def _write_tokenizer(
    target: Workdir, name: str, eot_token: str | None = None, content: bytes | None = None
) -> None:
    fields = {"name": name}
    if content is not None and eot_token is not None:
        write_bytes(target / name, content)
        fields |= {"eot_token": eot_token, "sha256": hashlib.sha256(content).hexdigest()}
    write_text(target / _DESCRIPTION, json.dumps(fields) + "\n")


def _tokenizer_of_tokens(directory: Workdir) -> tuple[bytes, str]:
    """The `tokenizer.json` beside tokens and its end-of-text token, compared with `meta.json`.

    Raises:
      ValueError: it is damaged, or another one.
    """
    with reporting(directory):
        fields = read_json_object(directory / "meta.json")
        path = directory / JsonTokenizer.name
        if not path.is_file():
            raise FileNotFoundError(f"there is no tokenizer file {path}; {_COPY}.")
        content = path.read_bytes()
    eot_token = fields.get("eot_token", END_OF_TEXT)
    digest = fields.get("tokenizer_digest")
    if digest is not None and digest != _vocabulary_digest([content, str(eot_token).encode()]):
        raise ValueError(f"{path} is not the tokenizer that made the tokens beside it; {_COPY}.")
    return content, eot_token


def _vocabulary_digest(vocabulary: Iterable[bytes]) -> str:
    """SHA-256 over the bytes of every token in order of ids, in hex."""
    sha = hashlib.sha256()
    for token in vocabulary:
        sha.update(len(token).to_bytes(4, "little") + token)
    return sha.hexdigest()


# --- Hugging Face directories --------------------------------------------------------------------


def load_hf_tokenizer(directory: str | Path, vocab_size: int) -> tuple[Tokenizer, bool]:
    """The tokenizer in a Hugging Face directory, and whether the directory has one.

    It is read from `tokenizer.json`, or from `vocab.json` and `merges.txt`. Files that mean our
    `byte` or `gpt2` give these. Without files, a vocabulary of GPT-2's size is taken for GPT-2's.

    Args:
      directory: of the model.
      vocab_size: number of tokens that the model knows.

    Raises:
      FileNotFoundError: there is no tokenizer, and the vocabulary is not GPT-2's; or one file of
        two is missing.
      ImportError: the library that it needs (extra `hf`) is not installed.
      ValueError: its files are malformed, or it has tokens that the model does not know.
    """
    directory = Path(directory)
    path = directory / _TOKENIZER
    if path.is_file():
        content = path.read_bytes()
    elif (directory / _VOCABULARY).is_file() or (directory / _MERGES).is_file():
        path = directory / _VOCABULARY
        content = _from_vocabulary(directory)
    elif vocab_size == GPT2Tokenizer.vocab_size:
        return GPT2Tokenizer(), False
    else:
        raise FileNotFoundError(
            f"{directory} has no tokenizer (neither {_TOKENIZER} nor {_VOCABULARY} and {_MERGES}), "
            f"and its vocabulary of {vocab_size} tokens is not GPT-2's; copy the {_TOKENIZER} that "
            "it was trained with into it."
        )
    try:
        fields = json.loads(content)
        added = {token["content"]: token["id"] for token in fields.get("added_tokens") or ()}
        vocabulary = {**fields["model"]["vocab"]} | added
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        fields, vocabulary = {}, {}  # the library says what is wrong, or knows this kind of model
    found: Tokenizer | None = _built_in(fields, vocabulary)
    if found is None:
        found = JsonTokenizer(path, _end_of_text(directory, vocabulary), content=content)
    if found.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} has {found.vocab_size} tokens, but the model only "
            f"{vocab_size}; put the {_TOKENIZER} that it was trained with there."
        )
    return found, True


def write_hf_tokenizer(directory: Path, tokenizer: Tokenizer, max_seq_len: int) -> None:
    """Write the files by which `transformers.AutoTokenizer` gives the same tokens.

    Text that spells out the end-of-text token is ordinary text to us, and that token there.

    Raises:
      FileNotFoundError: tiktoken keeps no files of GPT-2's vocabulary.
      ValueError: there are no such files for this kind of tokenizer.
    """
    end_of_text, kind = END_OF_TEXT, "PreTrainedTokenizerFast"
    match tokenizer:
        case JsonTokenizer(content=content, eot_token=end_of_text):
            pass
        case GPT2Tokenizer():
            for file, cached in _gpt2_files().items():
                if not cached.is_file():
                    raise FileNotFoundError(
                        f"tiktoken keeps no {cached}, which holds GPT-2's {file}; set "
                        "TIKTOKEN_CACHE_DIR to a directory for it."
                    )
                shutil.copyfile(cached, directory / file)
            content, kind = _from_vocabulary(directory), "GPT2Tokenizer"
        case ByteTokenizer():
            content = _byte_level_json(_byte_vocabulary(), [], END_OF_TEXT, split_words=False)
        case _:
            raise ValueError(f"a tokenizer {tokenizer.name!r} has no form in a {_TOKENIZER}.")
    write_bytes(directory / _TOKENIZER, content)
    settings = {
        "tokenizer_class": kind,
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "unk_token": end_of_text,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_seq_len,
    }
    write_json(directory / _SETTINGS[0], settings)


def _built_in(fields: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer | None:
    """`byte` or `gpt2`, if a `tokenizer.json` means the same (and `gpt2` is at hand)."""
    split = fields.get("pre_tokenizer")
    if fields.get("normalizer") is not None or not isinstance(split, dict):
        return None
    if split.get("type") != "ByteLevel" or split.get("add_prefix_space") is not False:
        return None
    if vocabulary == _byte_vocabulary():
        return ByteTokenizer()
    cached = _gpt2_files()[_VOCABULARY]
    if (
        len(vocabulary) == GPT2Tokenizer.vocab_size
        and cached.is_file()
        and vocabulary == read_json_object(cached)
    ):
        try:
            return GPT2Tokenizer()
        except ImportError:
            return None
    return None


def _gpt2_files() -> dict[str, Path]:
    """Where tiktoken caches GPT-2's files."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    directory = Path(cache) if cache else Path(tempfile.gettempdir()) / "data-gym-cache"
    return {file: directory / name for file, name in _GPT2_CACHED.items()}


def _byte_vocabulary() -> dict[str, int]:
    """The id of each byte, under the character that stands for it in GPT-2's files: printable ones
    for themselves, the others for U+0100 and following."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    characters = [chr(byte if byte in printable else next(others)) for byte in range(0x100)]
    return {character: i for i, character in enumerate([*characters, END_OF_TEXT])}


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
    return _byte_level_json(vocabulary, merges, end_of_text, add_prefix_space=add_prefix_space)


def _byte_level_json(
    vocabulary: dict[str, int],
    merges: list[str],
    end_of_text: str,
    *,
    add_prefix_space: bool = False,
    split_words: bool = True,
) -> bytes:
    """A `tokenizer.json` of byte-level BPE. With `split_words`, no merge crosses the border of a
    word as GPT-2's pattern finds it."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": split_words,
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = {"id": vocabulary[end_of_text], "content": end_of_text, "special": True} | flags
    fields = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    return json.dumps(fields, ensure_ascii=False).encode()


def _end_of_text(directory: Path, vocabulary: dict[str, int]) -> str:
    """The token that ends a document, as the tokenizer's settings or the model's config say."""
    token = _settings(directory).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        return token
    config = directory / "config.json"
    number = read_json_object(config).get("eos_token_id") if config.is_file() else None
    return next((name for name, i in vocabulary.items() if i == number), END_OF_TEXT)


def _settings(directory: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        if (directory / name).is_file():
            settings = read_json_object(directory / name) | settings
    return settings
