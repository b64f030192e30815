"""Tokenizers: plain bytes, GPT-2's byte-pair encoding, and any local `tokenizer.json`."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer, UInt16

from maxmars.data import gpt2_vocabulary
from maxmars.workdir import Workdir, reporting, write_bytes, write_text

_SAVED = "description.json"
END_OF_TEXT = "<|endoftext|>"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()
# GPT-2's pattern never joins a character that is no space to a space after it.
_BEFORE_SPACE = re.compile(r"[!-~](?=[ \n])")


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. Ids lie in [0, vocab_size)."""

    @property
    def name(self) -> str:
        """The name under which `load_tokenizer` finds it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def eot(self) -> int:
        """Id of the token that ends a document; `encode` never yields it."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the tokens, in hex."""
        ...

    def find_cut(self, text: str, start: int, end: int) -> int | None:
        """Where to cut a long text without changing its tokens: a place in (start, end].

        The tokens of `text[start:cut]` and of the rest are those of `text[start:]`, whatever
        follows. None if there is no such place.
        """
        ...

    def encode(self, text: str) -> Integer[np.ndarray, " tokens"]:
        """Token ids of a text. A special token spelt out in the text is ordinary text."""
        ...

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        """Text of token ids; what is no valid text becomes U+FFFD."""
        ...


class ByteTokenizer:
    """One token a UTF-8 byte, and one more that ends a document."""

    name = "byte"
    vocab_size = 257
    eot = 256

    @property
    def digest(self) -> str:
        """SHA-256 over the bytes of every token in order of ids, in hex."""
        return vocabulary_digest([*(bytes([b]) for b in range(256)), END_OF_TEXT.encode()])

    def find_cut(self, text: str, start: int, end: int) -> int | None:
        """Anywhere; see `Tokenizer.find_cut`."""
        return min(end, len(text)) if start < min(end, len(text)) else None

    def encode(self, text: str) -> UInt16[np.ndarray, " tokens"]:
        """The UTF-8 bytes of a text; a lone surrogate, which has none, becomes `?`."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint16)

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        """Text of bytes. Invalid UTF-8 and ids beyond the vocabulary become U+FFFD."""
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

    def __init__(self) -> None:
        """Load the vocabulary."""
        self._encoding = _load_gpt2_encoding()

    def __reduce__(self) -> tuple[type[GPT2Tokenizer], tuple[()]]:
        """Another process loads the vocabulary itself."""
        return GPT2Tokenizer, ()

    @property
    def digest(self) -> str:
        """SHA-256 over the bytes of every token in order of ids, in hex."""
        return vocabulary_digest([*self.token_bytes(), END_OF_TEXT.encode()])

    def token_bytes(self) -> list[bytes]:
        """The bytes of every token but the last, which ends a document, in order of ids."""
        return [self._encoding.decode_single_token_bytes(token) for token in range(self.eot)]

    def find_cut(self, text: str, start: int, end: int) -> int | None:
        """Before a space or line feed that follows a character; see `Tokenizer.find_cut`."""
        size = 256
        while True:  # the last such place is nearly always near the end
            first = max(start, end - size)
            places = [match.end() for match in _BEFORE_SPACE.finditer(text, first, end + 1)]
            if places:
                return places[-1]
            if first == start:
                return None
            size *= 16

    def encode(self, text: str) -> UInt16[np.ndarray, " tokens"]:
        """Token ids of a text; a lone surrogate becomes `?`."""
        try:
            tokens = self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            text = text.encode("utf-8", "replace").decode()
            tokens = self._encoding.encode_to_numpy(text, disallowed_special=())
        return tokens.astype(np.uint16)

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        """Text of tokens. A cut character and ids beyond the vocabulary become U+FFFD."""
        return b"".join(map(self._bytes_of, tokens.tolist())).decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        if 0 <= token < self.vocab_size:
            return self._encoding.decode_single_token_bytes(token)
        return _REPLACEMENT  # a model with a padded vocabulary has ids that stand for nothing


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`, by the library `tokenizers` (extra `hf`).

    Args:
      path: the file.
      eot_token: the token of its vocabulary that ends a document.
      content: that of the file, where there is none yet; `path` then only names it.

    Raises:
      ImportError: `tokenizers` is not installed.
      FileNotFoundError: there is no such file.
      ValueError: the file is no tokenizer, or its vocabulary lacks `eot_token`.
    """

    name = "tokenizer.json"

    def __init__(
        self, path: str | Path, eot_token: str = END_OF_TEXT, *, content: bytes | None = None
    ) -> None:
        """Load the file."""
        self.path, self.eot_token = Path(path), eot_token
        self.content = _read_tokenizer_json(self.path) if content is None else content
        self._tokenizer = _parse_tokenizer_json(self.path, self.content)
        # Special tokens that a text spells out are ordinary text, and every text is taken whole.
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
        """Another process parses the content itself."""
        make = functools.partial(JsonTokenizer, content=self.content)
        return make, (self.path, self.eot_token)

    @property
    def digest(self) -> str:
        """SHA-256 over the file and the end-of-text token, in hex."""
        return vocabulary_digest([self.content, self.eot_token.encode()])

    def find_cut(self, text: str, start: int, end: int) -> int | None:
        """Never: a tokenizer.json may look at any context; see `Tokenizer.find_cut`."""
        del text, start, end
        return None

    def encode(self, text: str) -> Integer[np.ndarray, " tokens"]:
        """Token ids of a text; a lone surrogate becomes `?`."""
        text = text.encode("utf-8", "replace").decode() if not text.isascii() else text
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        """Text of tokens. Ids beyond the vocabulary become U+FFFD."""
        runs = itertools.groupby(tokens.tolist(), lambda token: 0 <= token < self.vocab_size)
        return "".join(
            self._tokenizer.decode(list(run), skip_special_tokens=False)
            if known
            else "\N{REPLACEMENT CHARACTER}" * len(list(run))
            for known, run in runs
        )


def load_tokenizer(name: str | Path, *, eot_token: str = END_OF_TEXT) -> Tokenizer:
    """The tokenizer `byte` or `gpt2`, or that of the path of a local `tokenizer.json`.

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
    raise ValueError(
        f"there is no tokenizer {str(name)!r}; choose byte, gpt2, or the path of a tokenizer.json."
    )


def tokenizer_in(directory: str | Path, name: str, eot_token: str | None) -> Tokenizer:
    """The tokenizer of tokens on disk, from what their description says.

    Args:
      directory: where the tokens are, with their `tokenizer.json` if they have one.
      name: name of the tokenizer.
      eot_token: the token that ends a document, of a `tokenizer.json` only.

    Raises:
      ValueError, ImportError, FileNotFoundError: see `load_tokenizer`.
    """
    if eot_token is None:
        return load_tokenizer(name)
    return load_tokenizer(Path(directory) / name, eot_token=eot_token)


def tokenizer_of(source: Path, name: str) -> Tokenizer:
    """The tokenizer of tokens on disk: what `saved_tokenizer` would load after `save_tokenizer`.

    Raises:
      ValueError, ImportError, FileNotFoundError: see `load_tokenizer`.
    """
    return tokenizer_in(source, name, _saved_fields(source, name).get("eot_token"))


def save_tokenizer(source: Path, name: str, target: Workdir) -> None:
    """Write into `target` what `saved_tokenizer` needs to load the tokenizer of tokens on disk.

    Args:
      source: the directory of tokens, with its `tokenizer.json` if it has one.
      name: name of the tokenizer.
      target: directory to make.
    """
    if name == JsonTokenizer.name:
        write_bytes(target / name, (source / name).read_bytes())
    write_text(target / _SAVED, json.dumps(_saved_fields(source, name)) + "\n")


def _saved_fields(source: Path, name: str) -> dict[str, str]:
    if name != JsonTokenizer.name:
        return {"name": name}
    eot_token = json.loads((source / "meta.json").read_text())["eot_token"]
    return {"name": name, "eot_token": eot_token}


def store_tokenizer(tokenizer: Tokenizer, target: Path) -> None:
    """Write a tokenizer that is open, as `save_tokenizer` does."""
    fields = {"name": tokenizer.name}
    target.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, JsonTokenizer):
        fields["eot_token"] = tokenizer.eot_token
        (target / tokenizer.name).write_bytes(tokenizer.content)
    (target / _SAVED).write_text(json.dumps(fields) + "\n")


def saved_tokenizer(directory: Workdir) -> Tokenizer:
    """The tokenizer that `save_tokenizer` wrote into a directory.

    Raises:
      ValueError, ImportError, FileNotFoundError: see `load_tokenizer`.
    """
    with reporting(directory):
        fields = json.loads((directory / _SAVED).read_text())
    name, eot_token = fields["name"], fields.get("eot_token")
    if isinstance(directory, Path):
        return tokenizer_in(directory, name, eot_token)
    if eot_token is None:
        return load_tokenizer(name)
    with reporting(directory):
        content = (directory / name).read_bytes()
    return JsonTokenizer(str(directory / name), eot_token, content=content)


def vocabulary_digest(vocabulary: Iterable[bytes]) -> str:
    """SHA-256 over the bytes of every token in order of ids, in hex."""
    sha = hashlib.sha256()
    for token in vocabulary:
        sha.update(len(token).to_bytes(4, "little") + token)
    return sha.hexdigest()


def _read_tokenizer_json(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"there is no tokenizer file {path}; check the path.")
    return path.read_bytes()


def _parse_tokenizer_json(path: Path, content: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "a tokenizer.json needs the library tokenizers; install it with "
            "`pip install 'maxmars[hf]'`."
        ) from error
    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is no tokenizer.json: {error}.") from error


def _load_gpt2_encoding() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise ImportError(
            "the gpt2 tokenizer needs tiktoken; install it with `pip install 'maxmars[hf]'`."
        ) from error
    try:
        gpt2_vocabulary.download()
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # OSError: every error of the network and of the disk
        raise FileNotFoundError(gpt2_vocabulary.missing(error)) from error
