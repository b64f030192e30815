"""Tokenizers: plain bytes, GPT-2's byte-pair encoding, and any `tokenizer.json`.

Token directories, runs, exports and Hugging Face models hold their tokenizer in one form, Hugging
Face's: `tokenizer.json`, and `tokenizer_config.json`, which names the end-of-text token. `load`
reads a directory of any of these, and `save` writes one.

Plain bytes need no library. GPT-2's encoding is tiktoken's, and the library tokenizers reads any
other `tokenizer.json` (both in the extra `hf`). `load` recognises the vocabularies of bytes and
GPT-2 in a `tokenizer.json` by their digests, and takes the faster class for them.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Int32, Integer, UInt16

from maxmars.config.errors import about, needs_extra
from maxmars.distributed.files import (
    parse_json,
    read_json_object,
    read_text,
    reporting,
    require_file,
    resolve,
    write_bytes,
    write_json,
)

END_OF_TEXT = "<|endoftext|>"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_VOCABULARY, _MERGES = "vocab.json", "merges.txt"
_GENERATION, _TEMPLATE = "generation_config.json", "chat_template.jinja"
_GPT2_CLASS = "GPT2Tokenizer"
# Settings that are not written: code, paths, and `add_prefix_space`, which changes the tokens.
_LEFT_OUT = ("auto_map", "name_or_path", "tokenizer_file", "vocab_file", "add_prefix_space")
_STRIDE = 250_000  # characters
_SAMPLE = "She reads 3 books:\n\n\tnaïve  café, don't  stop!"
_WHITE_SPACE = re.compile(r"[\s\u2581]")  # U+2581 is SentencePiece's blank
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_BYTE_DIGEST = "c8652c242d0cd3b98b3c82d4aa53d102c8ccae44dc16854240715e4e32d8b038"
_GPT2_DIGEST = "a5623714bcf19049eb0fd78df19b6daa1e61ac435b86a5deae767768e7fcdc3d"

Tokens = Integer[np.ndarray, " tokens"]
Pieces = Callable[[Tokens, bool], str]
"""From new tokens, and whether they are the last, to the text that is final; see `pieces`."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Count of the characters that a tokenizer loses in a text."""

    characters: int
    """Characters of the text after the tokenizer's own normaliser."""
    lost: int
    """Characters that the decoded tokens lack."""
    example: str = ""
    """One of the lost characters."""

    @property
    def share(self) -> float:
        """Lost characters as a share of all."""
        return self.lost / max(self.characters, 1)

    def __str__(self) -> str:
        example = f" (such as {self.example!r})" if self.example else ""
        return f"{self.share:.2%} of {self.characters:,} characters{example} are lost"


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """Contents of a tokenizer's files, which are written as they were read."""

    content: bytes | None = None
    """The `tokenizer.json`; None for GPT-2's."""
    end: str | None = None
    """The end-of-text token."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `tokenizer_config.json`: padding, names of special tokens, a chat template."""
    template: str | None = None
    """The text of `chat_template.jinja`."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """`eos_token_id`, of the token or tokens that end a generated text, and `bos_token_id`, of the
    token that begins it; only those that a file names."""

    @property
    def end_ids(self) -> list[int]:
        """Ids of the tokens that end a generated text, as the files name them."""
        ids = self.generation.get("eos_token_id", [])
        return ids if isinstance(ids, list) else [ids]


class Tokenizer(abc.ABC):
    """Text to token ids and back. Ids lie in [0, vocab_size)."""

    name: str
    """`byte`, `gpt2`, or `tokenizer.json` for any other."""
    vocab_size: int
    eot: int
    """Id of the end-of-text token, which ends a document; `encode` never returns it."""
    eot_token: str
    """The name of `eot`."""
    files = TokenizerFiles()
    """Contents of the tokenizer's files; empty for a tokenizer made without files."""

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """SHA-256 over the vocabulary, in hex; equal digests give equal tokens."""

    @property
    def num_text_ids(self) -> int:
        """Number of ids that a model needs rows for: all up to the last token that a text contains
        or ends with. Special tokens with higher ids, such as a `[PAD]`, are in no text."""
        return self.vocab_size

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids of the tokens that end a generated text: `eot`, and others that the files name."""
        others = (i for i in self.files.end_ids if i in range(self.vocab_size))
        return tuple(dict.fromkeys([self.eot, *others]))

    @property
    def bos(self) -> int:
        """Id of the token that begins a generated text: the one that the files name, or `eot`."""
        named = self.id_of(_content(self.files.settings.get("bos_token")))
        if named is None:
            named = self.files.generation.get("bos_token_id")
        return named if isinstance(named, int) and named in range(self.vocab_size) else self.eot

    @abc.abstractmethod
    def id_of(self, token: str | None) -> int | None:
        """Id of the special token of this name; None if there is none."""

    @abc.abstractmethod
    def to_json(self) -> bytes:
        """The equivalent `tokenizer.json`; for GPT-2 this takes 2 s."""

    @abc.abstractmethod
    def encode(self, text: str) -> Tokens:
        """Token ids of a text. A special token that the text spells out is ordinary text, and a
        lone surrogate becomes `?`."""

    @abc.abstractmethod
    def decode(self, tokens: Tokens) -> str:
        """Text of token ids. Invalid UTF-8 and ids beyond the vocabulary become U+FFFD."""

    @abc.abstractmethod
    def pieces(self) -> Pieces:
        """A function that decodes a stream of tokens. Its results, joined, are `decode` of all
        tokens. Text that the next token may change is held back until the last token.
        """

    @abc.abstractmethod
    def bytes_of_tokens(self) -> Int32[np.ndarray, " vocab"]:
        """UTF-8 bytes that each token adds to a text, by id.
        0 for special tokens, which stand for no text, and for ids without a token."""


class _BytesOfTokens(Tokenizer):
    """Decoding for tokenizers in which a text is the bytes of its tokens, concatenated."""

    eot_token = END_OF_TEXT

    @abc.abstractmethod
    def _bytes_of(self, token: int) -> bytes: ...

    def id_of(self, token: str | None) -> int | None:
        return self.eot if token == self.eot_token else None

    def decode(self, tokens: Tokens) -> str:
        return b"".join(map(self._bytes_of, tokens.tolist())).decode("utf-8", "replace")

    def pieces(self) -> Pieces:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda tokens, is_last: decoder.decode(
            b"".join(map(self._bytes_of, tokens.tolist())), is_last
        )

    def bytes_of_tokens(self) -> Int32[np.ndarray, " vocab"]:
        tokens = range(self.vocab_size)
        return np.array([0 if i == self.eot else len(self._bytes_of(i)) for i in tokens], np.int32)


class ByteTokenizer(_BytesOfTokens):
    """One token for each UTF-8 byte, and the end-of-text token."""

    name = "byte"
    vocab_size = 257
    eot = 256
    digest = _BYTE_DIGEST

    def to_json(self) -> bytes:
        return _byte_level_json([*(bytes([byte]) for byte in range(256)), END_OF_TEXT.encode()], [])

    def encode(self, text: str) -> UInt16[np.ndarray, " tokens"]:
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint16)

    def _bytes_of(self, token: int) -> bytes:
        if token == self.eot:
            return END_OF_TEXT.encode()
        return bytes([token]) if 0 <= token < self.eot else _REPLACEMENT.encode()


class GPT2Tokenizer(_BytesOfTokens):
    """GPT-2's byte-pair encoding, by tiktoken (extra `hf`).

    Args:
      ranks: the id of each token but the last; None reads them from the directory
        TIKTOKEN_CACHE_DIR, or downloads them (1.5 MB).

    Raises:
      ImportError: tiktoken is not installed.
      OSError, ValueError: the vocabulary is not there and cannot be downloaded.
    """

    name = "gpt2"
    vocab_size = 50257
    eot = 50256
    digest = _GPT2_DIGEST
    # White space as tiktoken counts it, which is less than Python's.
    _white_space = re.compile(r"[^\S\x1c-\x1f]+")

    def __init__(self, ranks: dict[bytes, int] | None = None) -> None:
        with needs_extra("hf"):
            import tiktoken
            from tiktoken_ext.openai_public import r50k_pat_str
        self._ranks = ranks
        if ranks is not None:
            self._encoding = tiktoken.Encoding(
                self.name,
                pat_str=r50k_pat_str,
                mergeable_ranks=ranks,
                special_tokens={END_OF_TEXT: self.eot},
            )
            return
        with about(
            "the vocabulary of gpt2 cannot be downloaded; without network, fill a directory on "
            'another machine by `TIKTOKEN_CACHE_DIR=DIR python -c "import tiktoken; '
            "tiktoken.get_encoding('gpt2')\"` and set TIKTOKEN_CACHE_DIR to its copy here"
        ):
            self._encoding = tiktoken.get_encoding(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        # tiktoken's own objects cannot be pickled.
        return GPT2Tokenizer, (self._ranks,), {"files": self.files}

    def to_json(self) -> bytes:
        tokens = [self._encoding.decode_single_token_bytes(i) for i in range(self.eot)]
        ranks = {token: i for i, token in enumerate(tokens)}
        merges = [_last_merge(token, ranks) for token in tokens if len(token) > 1]
        return _byte_level_json([*tokens, END_OF_TEXT.encode()], merges)

    def encode(self, text: str) -> UInt16[np.ndarray, " tokens"]:
        # tiktoken fails where a million characters of white space come before another character.
        # GPT-2's pattern takes all of a run but its last character as one piece, so a cut there
        # does not change the tokens. Looking at every stride finds each run of twice the stride.
        cuts, end = [0], 0
        for start in range(_STRIDE, len(text), _STRIDE):
            if start >= end and (run := self._white_space.match(text, start)):
                end = run.end()
                if start + 1 < end < len(text):
                    cuts.append(end - 1)
        pieces = [self._encode(text[a:b]) for a, b in itertools.pairwise([*cuts, len(text)])]
        return np.concatenate(pieces).astype(np.uint16)

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            text = text.encode("utf-8", "replace").decode()
            return self._encoding.encode_to_numpy(text, disallowed_special=())

    def _bytes_of(self, token: int) -> bytes:
        if 0 <= token < self.vocab_size:
            return self._encoding.decode_single_token_bytes(token)
        return _REPLACEMENT.encode()  # models with a padded vocabulary have ids without a token


class JsonTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, by the library tokenizers (extra `hf`).

    Args:
      content: the bytes of the file.
      eot_token: name of the end-of-text token.

    Raises:
      ImportError: tokenizers is not installed.
      ValueError: the file is no tokenizer, or its vocabulary lacks `eot_token`.
    """

    name = _TOKENIZER

    def __init__(self, content: bytes, eot_token: str) -> None:
        self._content, self.eot_token = content, eot_token
        with _library() as tokenizers:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        # A special token that a text spells out is ordinary text; texts are never cut or padded.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if eot_token not in vocabulary:
            raise ValueError(
                f"the vocabulary has no token {eot_token!r} to end documents with; name the one "
                f"that it has by --eot-token of `maxmars data prepare`, or as eos_token in a "
                f"{_SETTINGS} beside it."
            )
        self.eot: int = vocabulary[eot_token]
        self.vocab_size: int = max(vocabulary.values()) + 1

    @property
    def num_text_ids(self) -> int:
        added = self._tokenizer.get_added_tokens_decoder()
        own = self._tokenizer.get_vocab(with_added_tokens=False).values()
        return max(*own, *self.ends, *(i for i, token in added.items() if not token.special)) + 1

    def id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def to_json(self) -> bytes:
        return self._content

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonTokenizer, (self._content, self.eot_token), {"files": self.files}

    @property
    def digest(self) -> str:
        """SHA-256 over the file and the end-of-text token, in hex."""
        return _digest([self._content, self.eot_token.encode()])

    def encode(self, text: str) -> Tokens:
        text = text.encode("utf-8", "replace").decode() if not text.isascii() else text
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, tokens: Tokens) -> str:
        runs = itertools.groupby(tokens.tolist(), lambda token: 0 <= token < self.vocab_size)
        return "".join(
            self._decode(list(run)) if known else _REPLACEMENT * len(list(run))
            for known, run in runs
        )

    def loss(self, text: str) -> Loss:
        """The characters of a text that `decode(encode(text))` lacks, whatever their order: some
        decoders move blanks. An unknown token counts as lost, unless the text has its name."""
        text = text.encode("utf-8", "replace").decode()
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        name, normalizer = self._tokenizer.id_to_token(self._unknown), self._tokenizer.normalizer
        known = [
            token
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if token != self._unknown or text[start:end].strip() == name
        ]
        wanted = text if normalizer is None else normalizer.normalize_str(text)
        wanted = _WHITE_SPACE.sub(" ", wanted).strip()  # some normalisers add a blank in front
        lost = Counter(wanted) - Counter(_WHITE_SPACE.sub(" ", self._decode(known)))
        return Loss(characters=len(wanted), lost=lost.total(), example=next(iter(lost), ""))

    def bytes_of_tokens(self) -> Int32[np.ndarray, " vocab"]:
        added = self._tokenizer.get_added_tokens_decoder()
        special = {self.eot, *(i for i, token in added.items() if token.special)}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        texts = {i: token for token, i in vocabulary.items() if i not in special}
        lengths = np.zeros(self.vocab_size, np.int32)
        decoder = str(parse_json(self._content).get("decoder"))
        # Decoders strip blanks at the ends of a text, so each token is decoded between two others.
        around = list(texts)[:1]
        without = len(self._decode(around * 2).encode())
        for i, token in texts.items():
            # A token may be a part of a character: decoded alone, it would be U+FFFD.
            if "ByteLevel" in decoder and set(token) <= set(_characters()):
                lengths[i] = len(token)
            elif "ByteFallback" in decoder and _BYTE_TOKEN.fullmatch(token):
                lengths[i] = 1
            else:
                lengths[i] = len(self._decode([*around, i, *around]).encode()) - without
        return lengths

    @functools.cached_property
    def _unknown(self) -> int:
        """Id of the token for unknown text; beyond the vocabulary if the model has none."""
        model = self._tokenizer.model
        if not hasattr(model, "unk_token"):  # Unigram
            number = parse_json(self._content)["model"].get("unk_id")
        else:
            number = model.unk_token and self._tokenizer.token_to_id(model.unk_token)
        return number if isinstance(number, int) else self.vocab_size

    def pieces(self) -> Pieces:
        from tokenizers.decoders import DecodeStream

        stream, tokens, held, text = DecodeStream(), [], [], ""

        def add(new: Tokens, is_last: bool) -> str:
            nonlocal text
            before = len(text)
            for token in new.tolist():
                tokens.append(token)
                held.append(token)
                # Byte tokens like <0xE4> become characters only when the last byte is known.
                if not _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or ""):
                    text += stream.step(self._tokenizer, held) or ""
                    held.clear()
            if is_last:  # `decode` also gives the bytes that never became a character
                text = self._decode(tokens)
            return text[before:]

        return add

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


# --- directories ----------------------------------------------------------------------------------


def load(name_or_path: epath.PathLike, *, eot_token: str | None = None) -> Tokenizer:
    """The tokenizer of a name, or of a directory: of tokens, a run's `tokenizer`, an export, or a
    Hugging Face model.

    Args:
      name_or_path: `byte`, `gpt2`, a directory, or a `tokenizer.json` under any name. A directory
        may have `vocab.json` and `merges.txt` instead of a `tokenizer.json`.
      eot_token: the end-of-text token; None takes the one that the files name.

    Raises:
      FileNotFoundError: there is no tokenizer.
      ValueError: a file is malformed, or the vocabulary lacks the end-of-text token.
      ImportError: the tokenizer's library (extra `hf`) is not installed.
      OSError: the vocabulary of `gpt2` cannot be downloaded.
    """
    match name_or_path:
        case ByteTokenizer.name:
            return ByteTokenizer()
        case GPT2Tokenizer.name:
            return GPT2Tokenizer()
        case "unknown":  # of GrainConfig
            raise ValueError(
                "nothing names the tokenizer of the tokens; train with --data.tokenizer, or with "
                "GrainConfig(tokenizer='byte') or 'gpt2' for a source of your own, to generate "
                "text and to score the model later."
            )
    path = epath.Path(name_or_path).expanduser()
    # A file never becomes `byte` or `gpt2`: its name is in the plan of unfinished preparations.
    files = _read(path)
    with about(path):
        return _make(files, eot_token, built_in=path.suffix != ".json")


def save(
    tokenizer: Tokenizer, directory: epath.PathLike, *, max_seq_len: int | None = None
) -> None:
    """Write a tokenizer for `load`, and for `transformers.AutoTokenizer`, whose tokens are the same
    but for a text that spells out a special token.

    Args:
      tokenizer: any tokenizer.
      directory: made if it is missing.
      max_seq_len: of the model, if the directory is an export of one.
    """
    files, generation = tokenizer.files, {}
    if max_seq_len is not None or len(tokenizer.ends) > 1 or tokenizer.bos != tokenizer.eot:
        ends = list(tokenizer.ends) if len(tokenizer.ends) > 1 else tokenizer.eot
        generation = {"bos_token_id": tokenizer.bos, "eos_token_id": ends}
    content, end = tokenizer.to_json(), tokenizer.eot_token
    files = replace(files, content=content, end=end, generation=generation)
    _write(epath.Path(directory), tokenizer.name, files, max_seq_len)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The meaning of the ids of tokens: which tokenizer, and how many ids."""

    tokenizer: str
    """Name of the tokenizer."""
    size: int
    """Every token lies in [0, size)."""
    digest: str | None = None
    """SHA-256 over the tokenizer's vocabulary; None if the tokenizer has no known files."""
    path: epath.Path | None = None
    """The directory of the tokenizer's files, or a `tokenizer.json`; None if not known."""

    @classmethod
    def named(cls, name: str, size: int | None = None) -> Vocabulary:
        """The vocabulary of a tokenizer.

        Args:
          name: `byte`, `gpt2`, the path of a `tokenizer.json` or of its directory, or `unknown`.
          size: number of ids, which `unknown` needs; None takes the tokenizer's.

        Raises:
          ValueError, ImportError, OSError: see `load`.
        """
        sizes = {t.name: t.vocab_size for t in (ByteTokenizer, GPT2Tokenizer)}
        if name in sizes or (name == "unknown" and size is not None):
            return cls(tokenizer=name, size=size or sizes[name])
        own = load(name)
        return cls(
            tokenizer=own.name,
            size=size or own.vocab_size,
            digest=own.digest,
            path=resolve(name),
        )


def tokenizer_of_tokens(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer that made the tokens of a vocabulary, from its files or by its name.

    Raises:
      ValueError: the files are another tokenizer's, or the name is `unknown`.
      ImportError, OSError: see `load`.
    """
    if (
        vocabulary.path is None
    ):  # other programs' files and user's functions name the tokenizer alone
        return load(vocabulary.tokenizer)
    files = _read(vocabulary.path)
    with about(vocabulary.path):
        tokenizer = _make(files, built_in=vocabulary.tokenizer != JsonTokenizer.name)
    _check_digest(vocabulary, tokenizer.digest)
    return tokenizer


def difference(model: Tokenizer, vocabulary: Vocabulary) -> str | None:
    """The first difference between a model's tokenizer and that of tokens, in words.

    None if all ids decode to the same texts, and a sample encodes to the same ids.

    Raises:
      ValueError, ImportError, OSError: see `tokenizer_of_tokens`.
    """
    built_in = {t.name: t.digest for t in (ByteTokenizer, GPT2Tokenizer)}
    if model.digest == built_in.get(vocabulary.tokenizer, vocabulary.digest):
        return None
    other = tokenizer_of_tokens(vocabulary)
    for number in range(min(model.num_text_ids, other.num_text_ids)):
        old, new = (one.decode(np.array([number])) for one in (model, other))
        if old != new:
            return f"the model reads token {number} as {old!r}, and there it is {new!r}"
    old, new = (one.encode(_SAMPLE).tolist() for one in (model, other))
    if old == new:
        return None
    first = next(i for i, (a, b) in enumerate(itertools.zip_longest(old, new)) if a != b)
    return f"{_SAMPLE!r} is to the model {old[: first + 1]}..., and there {new[: first + 1]}..."


def end_of_text(vocabulary: Vocabulary) -> int:
    """The id of the end-of-text token; for bytes and GPT-2 it is known without loading a tokenizer.

    Raises:
      ValueError, ImportError, OSError: see `tokenizer_of_tokens`.
    """
    known = {t.name: t.eot for t in (ByteTokenizer, GPT2Tokenizer)}.get(vocabulary.tokenizer)
    return tokenizer_of_tokens(vocabulary).eot if known is None else known


def copy_tokenizer(vocabulary: Vocabulary, directory: epath.PathLike) -> None:
    """Write the tokenizer's files for `load`, without loading a library; `unknown` has none."""
    if vocabulary.path is not None:
        files = _read(vocabulary.path)
        known = {} if files.content is None else _vocabulary(parse_json(files.content))
        files = replace(files, end=_end_of(files, known))
        if vocabulary.tokenizer == JsonTokenizer.name:
            _check_digest(vocabulary, _digest([files.content or b"", str(files.end).encode()]))
    elif vocabulary.tokenizer == ByteTokenizer.name:
        files = TokenizerFiles(content=ByteTokenizer().to_json(), end=END_OF_TEXT)
    elif vocabulary.tokenizer == GPT2Tokenizer.name:
        files = TokenizerFiles(end=END_OF_TEXT)
    else:
        return
    _write(epath.Path(directory), vocabulary.tokenizer, files)


def _check_digest(vocabulary: Vocabulary, digest: str) -> None:
    if digest != vocabulary.digest:
        raise ValueError(
            f"the tokenizer in {vocabulary.path} is not the one that made the tokens; copy "
            "that one there."
        )


def _write(
    directory: epath.Path, name: str, files: TokenizerFiles, max_seq_len: int | None = None
) -> None:
    """Write the files of a tokenizer of this name."""
    if files.content is not None:
        write_bytes(directory / _TOKENIZER, files.content)
    if files.template is not None:
        write_bytes(directory / _TEMPLATE, files.template.encode())
    given = files.settings or dict.fromkeys(("bos_token", "unk_token"), files.end)
    settings: dict[str, Any] = {
        "clean_up_tokenization_spaces": False,
        **{key: value for key, value in given.items() if key not in _LEFT_OUT},
        "eos_token": files.end,
        "tokenizer_class": _GPT2_CLASS if name == GPT2Tokenizer.name else "PreTrainedTokenizerFast",
    }
    if max_seq_len is not None:
        settings["model_max_length"] = max_seq_len
    write_json(directory / _SETTINGS, settings)
    if files.generation:
        write_json(directory / _GENERATION, files.generation)


def _read(path: epath.Path) -> TokenizerFiles:
    """The files of a tokenizer in a directory.

    Args:
      path: the directory, or a file in it that is the `tokenizer.json` under any name.
    """
    is_file = path.suffix == ".json"
    directory, file = (path.parent, path.name) if is_file else (path, _TOKENIZER)
    with reporting(directory):
        names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()

        def fields(name: str) -> dict[str, Any]:
            return read_json_object(directory / name) if name in names else {}

        settings = fields("special_tokens_map.json") | fields(_SETTINGS)
        end = settings.get("eos_token")
        # Beside tokens without files of their tokenizer, `meta.json` names a built-in one.
        kind = settings.get("tokenizer_class") or fields("meta.json").get("tokenizer")
        if file in names:
            require_file(directory / file)
            content = (directory / file).read_bytes()
        elif _VOCABULARY in names:
            content = _from_vocabulary(directory, is_prefixed=settings.get("add_prefix_space"))
        elif kind == ByteTokenizer.name:
            content = ByteTokenizer().to_json()
        elif kind in (GPT2Tokenizer.name, _GPT2_CLASS, f"{_GPT2_CLASS}Fast"):
            content = None
        else:
            raise FileNotFoundError(
                f"{directory} has no tokenizer: neither {file} nor {_VOCABULARY} and {_MERGES}. "
                "Copy the one there that the tokens were made with, or name byte, gpt2, or the "
                "path of another."
            )
        added = {int(i): token for i, token in settings.get("added_tokens_decoder", {}).items()}
        for token, i in fields("added_tokens.json").items():
            added.setdefault(i, {"content": token})
        # Models of before `generation_config.json` name these ids in `config.json`.
        of_model = fields("config.json") if file == _TOKENIZER else {}
        ids = {key: value for key, value in of_model.items() if value is not None}
        ids |= {key: value for key, value in fields(_GENERATION).items() if value is not None}
        files = TokenizerFiles(
            content=content,
            end=_content(end),
            settings=settings,
            template=read_text(directory / _TEMPLATE) if _TEMPLATE in names else None,
            generation={key: ids[key] for key in ("bos_token_id", "eos_token_id") if key in ids},
        )
        if content is not None and added:
            with about(directory):
                ends = {files.end, *files.end_ids}
                files = replace(files, content=_with_added(content, added, ends, str(settings)))
    return files


def _content(token: Any) -> Any:
    """The name of a token in settings, which hold the name or a dict of name and flags."""
    return token["content"] if isinstance(token, dict) else token


def _make(files: TokenizerFiles, eot_token: str | None = None, *, built_in: bool) -> Tokenizer:
    """A tokenizer from its files; with `built_in` that of bytes or GPT-2, if it is equivalent."""
    if files.content is None:
        tokenizer: Tokenizer = GPT2Tokenizer()
    else:
        fields = parse_json(files.content)
        vocabulary = _vocabulary(fields)
        end = eot_token or _end_of(files, vocabulary)
        is_candidate = built_in and vocabulary and end == END_OF_TEXT
        tokens = _plain_tokens(fields, vocabulary) if is_candidate else []
        match _digest(tokens):
            case ByteTokenizer.digest:
                tokenizer = ByteTokenizer()
            case GPT2Tokenizer.digest:
                tokenizer = GPT2Tokenizer({token: i for i, token in enumerate(tokens[:-1])})
            case _:
                tokenizer = JsonTokenizer(files.content, end)
    tokenizer.files = files
    return tokenizer


def _end_of(files: TokenizerFiles, vocabulary: Mapping[str, int]) -> str:
    """The end-of-text token: the first that the files name and the vocabulary has."""
    token_of = {number: token for token, number in vocabulary.items()}
    named = [files.end, *map(token_of.get, files.end_ids)]
    return next((token for token in named if token in vocabulary), END_OF_TEXT)


def _vocabulary(fields: Any) -> dict[str, int]:
    """The id of each token in a `tokenizer.json`; empty for a malformed file, on which the library
    reports the fault."""
    try:
        tokens = fields["model"]["vocab"]  # Unigram's is a list of pairs, others' a dict
        vocabulary = (
            {t: i for i, (t, _) in enumerate(tokens)} if isinstance(tokens, list) else tokens
        )
        return vocabulary | {t["content"]: t["id"] for t in fields.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _plain_tokens(fields: dict[str, Any], vocabulary: dict[str, int]) -> list[bytes]:
    """The bytes of each token, by id, if the tokenizer splits texts as GPT-2's does and changes
    them no further; an empty list for any other."""
    split = fields.get("pre_tokenizer") or {}
    is_plain = split.get("type") == "ByteLevel" and split.get("add_prefix_space") is False
    if fields.get("normalizer") is not None or not is_plain:
        return []
    byte_of = {character: byte for byte, character in enumerate(_characters())}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    if vocabulary[tokens[-1]] != len(tokens) - 1 or not byte_of.keys() >= set("".join(tokens)):
        return []
    return [bytes(byte_of[character] for character in token) for token in tokens]


def _from_vocabulary(directory: epath.Path, *, is_prefixed: Any) -> bytes:
    """The `tokenizer.json` that is equivalent to `vocab.json` and `merges.txt`."""
    with about(directory / _VOCABULARY), _library() as tokenizers:
        other = tokenizers.ByteLevelBPETokenizer.from_file(
            str(directory / _VOCABULARY),
            str(directory / _MERGES),
            add_prefix_space=is_prefixed is True,
        )
        return other.to_str().encode()


def _with_added(
    content: bytes, added: dict[int, dict[str, Any]], ends: set[Any], settings: str
) -> bytes:
    """A `tokenizer.json` with the tokens that other files add.

    Left out are, after all others, the special tokens that end no text, such as a `[PAD]` that the
    model does not know.

    Args:
      content: the `tokenizer.json`.
      added: from id to `content` and flags of each token.
      ends: names and ids of the tokens that end a text.
      settings: text of the settings; a token without flags that they name is special.

    Raises:
      ValueError: the library, which numbers tokens in order, would give a token another id.
    """
    specials = {i: t.get("special", repr(t["content"]) in settings) for i, t in added.items()}
    needed = [i for i in added if not specials[i] or ends & {i, added[i]["content"]}]
    wanted = {added[i]["content"]: i for i in sorted(added) if i <= max(needed, default=-1)}
    if wanted.items() <= _vocabulary(parse_json(content)).items():
        return content
    with _library() as tokenizers:
        other = tokenizers.Tokenizer.from_str(content.decode())
        for token, number in wanted.items():
            flags = {"normalized": not specials[number], **added[number]}
            add = other.add_special_tokens if specials[number] else other.add_tokens
            add([tokenizers.AddedToken(**flags | {"special": specials[number]})])
            if other.token_to_id(token) != number:
                raise ValueError(
                    f"the added token {token!r} has the id {number}, where the library tokenizers "
                    f"gives it {other.token_to_id(token)}"
                )
        return other.to_str().encode()


@contextlib.contextmanager
def _library() -> Generator[Any]:
    """The library tokenizers, which raises plain `Exception`."""
    with needs_extra("hf"):
        import tokenizers
    try:
        yield tokenizers
    except Exception as error:
        raise ValueError(str(error)) from error


def _byte_level_json(tokens: Sequence[bytes], merges: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A `tokenizer.json` of byte-level BPE. The last token is the end-of-text token; without merges
    a text need not be split into words."""
    characters = _characters()

    def spelt(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    lines = [f"{spelt(left)} {spelt(right)}" for left, right in merges]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": bool(lines),
    }
    vocabulary = {spelt(token): i for i, token in enumerate(tokens)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = {"id": len(tokens) - 1, "content": spelt(tokens[-1]), "special": True} | flags
    fields = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": lines},
    }
    return json.dumps(fields, ensure_ascii=False).encode()


@functools.cache
def _characters() -> list[str]:
    """The character for each byte in files of byte-level BPE: printable bytes are themselves, the
    others U+0100 and following."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens of the last merge when BPE builds a token from its bytes."""
    rank = ranks[token]
    halves = [(token[:i], token[i:]) for i in range(1, len(token))]
    halves = [p for p in halves if max(ranks.get(p[0], rank), ranks.get(p[1], rank)) < rank]
    if len(halves) == 1:  # half of GPT-2's tokens; the others need BPE's own steps
        return halves[0]
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        pairs = [left + right for left, right in itertools.pairwise(pieces)]
        i = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
        pieces[i : i + 2] = [pairs[i]]
    return pieces[0], pieces[1]


def _digest(vocabulary: Iterable[bytes]) -> str:
    """SHA-256 over the bytes of every token in order of ids, in hex."""
    sha = hashlib.sha256()
    for token in vocabulary:
        sha.update(len(token).to_bytes(4, "little") + token)
    return sha.hexdigest()
