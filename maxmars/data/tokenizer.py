"""Tokenizers: plain bytes, and GPT-2's byte-pair encoding."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer, UInt16

END_OF_TEXT = "<|endoftext|>"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()
_GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


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
        """SHA-256 over the bytes of every token in order of ids, in hex."""
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
        return _digest([*(bytes([b]) for b in range(256)), END_OF_TEXT.encode()])

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

    @property
    def digest(self) -> str:
        """SHA-256 over the bytes of every token in order of ids, in hex."""
        return _digest(map(self._encoding.decode_single_token_bytes, range(self.vocab_size)))

    def encode(self, text: str) -> UInt16[np.ndarray, " tokens"]:
        """Token ids of a text; a lone surrogate becomes `?`."""
        text = text.encode("utf-8", "replace").decode() if not text.isascii() else text
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        """Text of tokens. A cut character and ids beyond the vocabulary become U+FFFD."""
        return b"".join(map(self._bytes_of, tokens.tolist())).decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        if 0 <= token < self.vocab_size:
            return self._encoding.decode_single_token_bytes(token)
        return _REPLACEMENT  # a model with a padded vocabulary has ids that stand for nothing


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name, `byte` or `gpt2`.

    Raises:
      ValueError: there is none of this name.
      ImportError: tiktoken, which `gpt2` needs, is not installed.
      FileNotFoundError: the vocabulary of `gpt2` is not there and cannot be downloaded.
    """
    match name:
        case ByteTokenizer.name:
            return ByteTokenizer()
        case GPT2Tokenizer.name:
            return GPT2Tokenizer()
    raise ValueError(f"there is no tokenizer {name!r}; choose byte or gpt2.")


def _digest(vocabulary: Iterable[bytes]) -> str:
    sha = hashlib.sha256()
    for token in vocabulary:
        sha.update(len(token).to_bytes(4, "little") + token)
    return sha.hexdigest()


def _load_gpt2_encoding() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise ImportError(
            "the gpt2 tokenizer needs tiktoken; install it with `pip install 'maxmars[hf]'`."
        ) from error
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # OSError: every error of `requests` and of the disk
        raise FileNotFoundError(_no_vocabulary(error)) from error


def _no_vocabulary(error: Exception) -> str:
    cache = os.environ.get("TIKTOKEN_CACHE_DIR")
    place = f"in TIKTOKEN_CACHE_DIR={cache}" if cache else "on disk (TIKTOKEN_CACHE_DIR is not set)"
    names = " and ".join(
        f"{file} as {hashlib.sha1((_GPT2_URL + file).encode()).hexdigest()}"
        for file in ("vocab.bpe", "encoder.json")
    )
    return (
        f"the vocabulary of the gpt2 tokenizer is not {place} and could not be downloaded "
        f"({type(error).__name__}). Without network, download {names} from {_GPT2_URL} on another "
        "machine, copy both into a directory here and set TIKTOKEN_CACHE_DIR to it."
    )
