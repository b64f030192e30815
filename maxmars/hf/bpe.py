"""Byte-pair vocabularies as GPT-2's files hold them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence


def byte_characters() -> list[str]:
    """The character that stands for each byte: printable ones for themselves, the others for
    U+0100 and following, as in GPT-2's vocab.json."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]


_CHARACTERS = byte_characters()
_BYTES = {character: byte for byte, character in enumerate(_CHARACTERS)}


def as_characters(tokens: Iterable[bytes]) -> list[str]:
    """Tokens as vocab.json and merges.txt write them."""
    return ["".join([_CHARACTERS[byte] for byte in token]) for token in tokens]


def as_bytes(tokens: Iterable[str]) -> list[bytes]:
    """The inverse of `as_characters`; a token with other characters is its own text."""
    return [
        bytes([_BYTES[character] for character in token])
        if _BYTES.keys() >= set(token)
        else token.encode()
        for token in tokens
    ]


def merges_of(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pair from which each token of more than a byte is merged, in order of rank.

    Args:
      tokens: every token in order of ranks, single bytes first. Those of GPT-2 have the ranks as
        ids.

    Raises:
      ValueError: a token is not the merger of two of lower rank.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    pairs = []
    for token in tokens:
        parts = [bytes([byte]) for byte in token]
        # What the merges before the token's own make of its bytes: the two that it is merged from.
        while len(parts) > 2:
            candidates = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
            rank = min(candidates)
            if rank >= ranks[token]:
                raise ValueError(f"the token {token!r} does not come from two tokens before it.")
            i = candidates.index(rank)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            pairs.append((parts[0], parts[1]))
    return pairs


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
      vocabulary: token -> id, see `as_characters`.
      merges: pairs of tokens, with a space between, in order of rank.
      end_of_text: the token that ends a document.
      add_prefix_space: a text begins with a space even where it does not.
      split_words: merges do not cross the borders of words, as GPT-2's pattern finds them.
    """
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": split_words,
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = {"id": vocabulary[end_of_text], "content": end_of_text, "special": True} | flags
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
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    return json.dumps(fields, ensure_ascii=False).encode()
