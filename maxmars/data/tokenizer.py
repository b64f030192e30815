"""Tokenizers: plain bytes, GPT-2's byte-pair encoding, and any `tokenizer.json`.

Tokens, runs, exports and Hugging Face models keep their tokenizer in one form, Hugging Face's:
`tokenizer.json`, and `tokenizer_config.json`, which names the token that ends a document. `load`
reads a directory of any of these, and `save` writes one.

Plain bytes need no library. GPT-2's encoding is tiktoken's, and any other `tokenizer.json` is read
by the library tokenizers (both in the extra `hf`). Which of the three a file is, its vocabulary
tells: those of bytes and GPT-2 are known by their digest.
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
# Code, paths and, since it changes the tokens that the library gives, `add_prefix_space`.
_LEFT_OUT = ("auto_map", "name_or_path", "tokenizer_file", "vocab_file", "add_prefix_space")
_STRIDE = 250_000  # characters
_SAMPLE = "She reads 3 books:\n\n\tnaïve  café, don't  stop!"
_WHITE_SPACE = re.compile(r"[\s\u2581]")  # U+2581 is SentencePiece's blank
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_BYTE_DIGEST = "c8652c242d0cd3b98b3c82d4aa53d102c8ccae44dc16854240715e4e32d8b038"
_GPT2_DIGEST = "a5623714bcf19049eb0fd78df19b6daa1e61ac435b86a5deae767768e7fcdc3d"

Tokens = Integer[np.ndarray, " tokens"]
Pieces = Callable[[Tokens, bool], str]
"""From tokens, and whether they are the last, to the text that is certain now; see `pieces`."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a tokenizer does not keep of a text, counted."""

    characters: int
    """Of the text, as the tokenizer's own normaliser leaves it."""
    lost: int
    """Of these, what its tokens do not spell."""
    example: str = ""
    """A character that is lost."""

    @property
    def share(self) -> float:
        """How much of the characters is lost."""
        return self.lost / max(self.characters, 1)

    def __str__(self) -> str:
        example = f" (such as {self.example!r})" if self.example else ""
        return f"{self.share:.2%} of {self.characters:,} characters{example} are lost"


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What the files of a tokenizer say, which goes out as it came in."""

    content: bytes | None = None
    """The `tokenizer.json`; None is GPT-2's."""
    end: str | None = None
    """The token that ends a document."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `tokenizer_config.json`: padding, names of special tokens, a chat template."""
    template: str | None = None
    """The text of `chat_template.jinja`."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """`eos_token_id`, of the token or tokens at which the model ends a text, and `bos_token_id`, of
    the one that begins it, where a file names them."""

    @property
    def end_ids(self) -> list[int]:
        """Ids of the tokens at which the model ends a text."""
        ids = self.generation.get("eos_token_id", [])
        return ids if isinstance(ids, list) else [ids]


class Tokenizer(abc.ABC):
    """Text to token ids and back. Ids lie in [0, vocab_size)."""

    name: str
    """`byte`, `gpt2`, or `tokenizer.json` for any other."""
    vocab_size: int
    eot: int
    """Id of the token that ends a document; `encode` never returns it."""
    eot_token: str
    """The name of `eot`."""
    files = TokenizerFiles()
    """What files say of it; nothing of one that was made without."""

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """SHA-256 of all that decides the tokens, in hex."""

    @property
    def num_text_ids(self) -> int:
        """A model needs rows for the ids below this one: every token that a text becomes or that
        ends one. Special tokens after them, such as a `[PAD]`, stand in no text."""
        return self.vocab_size

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids of the tokens at which the model ends a text: `eot`, and what else its files name."""
        others = (i for i in self.files.end_ids if i in range(self.vocab_size))
        return tuple(dict.fromkeys([self.eot, *others]))

    @property
    def bos(self) -> int:
        """Id of the token that begins a text, if its files name one, or else `eot`."""
        named = self.id_of(_content(self.files.settings.get("bos_token")))
        if named is None:
            named = self.files.generation.get("bos_token_id")
        return named if isinstance(named, int) and named in range(self.vocab_size) else self.eot

    @abc.abstractmethod
    def id_of(self, token: str | None) -> int | None:
        """Id of a special token by its name; None where there is none of that name."""

    @abc.abstractmethod
    def to_json(self) -> bytes:
        """The `tokenizer.json` that means the same; that of GPT-2 takes 2 s."""

    @abc.abstractmethod
    def encode(self, text: str) -> Tokens:
        """Token ids of a text. A special token that the text spells out is ordinary text, and a
        lone surrogate becomes `?`."""

    @abc.abstractmethod
    def decode(self, tokens: Tokens) -> str:
        """Text of token ids. Invalid UTF-8 and ids beyond the vocabulary become U+FFFD."""

    @abc.abstractmethod
    def pieces(self) -> Pieces:
        """A function that decodes tokens as they come. What it returns, joined, is `decode` of all
        tokens; what may still change with the next tokens is held back, unless they are the last.
        """

    @abc.abstractmethod
    def bytes_of_tokens(self) -> Int32[np.ndarray, " vocab"]:
        """Length of each token's text in UTF-8, by id: what it adds between two others.
        0 of special tokens, which stand for no text, and of ids without a token."""


class _BytesOfTokens(Tokenizer):
    """The half of a tokenizer whose text is the bytes of its tokens, one after another."""

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
    """One token for each UTF-8 byte, and one that ends a document."""

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
      ranks: the id of each token but the last. None takes them from the directory
        TIKTOKEN_CACHE_DIR or, failing that, from the network (1.5 MB).

    Raises:
      ImportError: tiktoken is not installed.
      OSError, ValueError: the vocabulary is not there and cannot be downloaded.
    """

    name = "gpt2"
    vocab_size = 50257
    eot = 50256
    digest = _GPT2_DIGEST
    # What tiktoken takes for white space, which is less than Python does.
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
        # GPT-2's pattern takes all of them but the last as one piece, so a cut there does not
        # change the tokens. Any run of twice the stride is met, and each is read once.
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
        return _REPLACEMENT.encode()  # a model with a padded vocabulary has ids without a token


class JsonTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, by the library tokenizers (extra `hf`).

    Args:
      content: of the file.
      eot_token: the token of its vocabulary that ends a document.

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
        """What `decode(encode(text))` lacks of a text; an unknown token spells nothing, unless the
        text spells its name. Where characters stand does not count: some decoders move blanks."""
        text = text.encode("utf-8", "replace").decode()
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        name, normalizer = self._tokenizer.id_to_token(self._unknown), self._tokenizer.normalizer
        known = [
            token
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if token != self._unknown or text[start:end].strip() == name
        ]
        wanted = text if normalizer is None else normalizer.normalize_str(text)
        wanted = _WHITE_SPACE.sub(" ", wanted).strip()  # some add a blank at its beginning
        lost = Counter(wanted) - Counter(_WHITE_SPACE.sub(" ", self._decode(known)))
        return Loss(characters=len(wanted), lost=lost.total(), example=next(iter(lost), ""))

    def bytes_of_tokens(self) -> Int32[np.ndarray, " vocab"]:
        added = self._tokenizer.get_added_tokens_decoder()
        special = {self.eot, *(i for i, token in added.items() if token.special)}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        texts = {i: token for token, i in vocabulary.items() if i not in special}
        lengths = np.zeros(self.vocab_size, np.int32)
        decoder = str(parse_json(self._content).get("decoder"))
        around = list(texts)[:1]  # decoders treat the blanks at both ends of a text otherwise
        without = len(self._decode(around * 2).encode())
        for i, token in texts.items():
            # A token may be a part of a character, which decoded alone is U+FFFD.
            if "ByteLevel" in decoder and set(token) <= set(_characters()):
                lengths[i] = len(token)
            elif "ByteFallback" in decoder and _BYTE_TOKEN.fullmatch(token):
                lengths[i] = 1
            else:
                lengths[i] = len(self._decode([*around, i, *around]).encode()) - without
        return lengths

    @functools.cached_property
    def _unknown(self) -> int:
        """The token of what is not in the vocabulary; beyond it where there is none."""
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
                # Of bytes like <0xE4> in a row, the last decides what the first mean.
                if not _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or ""):
                    text += stream.step(self._tokenizer, held) or ""
                    held.clear()
            if is_last:  # with what never became a whole character
                text = self._decode(tokens)
            return text[before:]

        return add

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


# --- directories ----------------------------------------------------------------------------------


def load(place: epath.PathLike, *, eot_token: str | None = None) -> Tokenizer:
    """The tokenizer `byte` or `gpt2`, or that of a directory: of tokens, a run's `tokenizer`, an
    export, a Hugging Face model's.

    Args:
      place: a name, a directory, or a file of any name that is a `tokenizer.json`. In a directory,
        `vocab.json` and `merges.txt` will do.
      eot_token: the token that ends a document; None takes the one that the files name.

    Raises:
      FileNotFoundError: there is none.
      ValueError: a file is malformed, or the vocabulary lacks the token that ends a document.
      ImportError: the library that it needs (extra `hf`) is not installed.
      OSError: the vocabulary of `gpt2` cannot be downloaded.
    """
    match place:
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
    path = epath.Path(place).expanduser()
    # A file never as bytes or GPT-2's: its name is in the plan of a preparation, which goes on.
    files = _read(path)
    with about(path):
        return _open(files, eot_token, built_in=path.suffix != ".json")


def save(
    tokenizer: Tokenizer, directory: epath.PathLike, *, max_seq_len: int | None = None
) -> None:
    """Write a tokenizer for `load`, and for `transformers.AutoTokenizer`, which gives the same
    tokens of a text that spells out no special token.

    Args:
      tokenizer: any.
      directory: is made if it is missing.
      max_seq_len: of the model whose directory it is, if it is one.
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
    """What the ids of tokens mean."""

    tokenizer: str
    """Name of the tokenizer."""
    size: int
    """Every token lies in [0, size)."""
    digest: str | None = None
    """SHA-256 over the tokenizer's vocabulary; None where no files of it are known."""
    place: epath.Path | None = None
    """The directory of these files, or their `tokenizer.json`, if they are known."""

    @classmethod
    def named(cls, name: str, size: int | None = None) -> Vocabulary:
        """What the ids of a tokenizer mean.

        Args:
          name: `byte`, `gpt2`, the path of a `tokenizer.json` or of its directory, or `unknown`.
          size: number of ids; None is the tokenizer's, which nobody knows of an unknown one.

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
            place=resolve(name),
        )


def tokenizer_of_tokens(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of tokens: of its files or, if none are known, by its name.

    Raises:
      ValueError: it is another one than made them, or they name none.
      ImportError, OSError: see `load`.
    """
    if vocabulary.place is None:  # of another program, or of a source of the user's
        return load(vocabulary.tokenizer)
    files = _read(vocabulary.place)
    with about(vocabulary.place):
        tokenizer = _open(files, built_in=vocabulary.tokenizer != JsonTokenizer.name)
    _check_digest(vocabulary, tokenizer.digest)
    return tokenizer


def difference(model: Tokenizer, vocabulary: Vocabulary) -> str | None:
    """The first difference between the tokenizer of a model and that of tokens, in words; None
    where the same ids are the same texts, and a sample becomes the same ids.

    Raises:
      ValueError, ImportError, OSError: see `tokenizer_of_tokens`.
    """
    built_in = {t.name: t.digest for t in (ByteTokenizer, GPT2Tokenizer)}
    if model.digest == built_in.get(vocabulary.tokenizer, vocabulary.digest):
        return None
    theirs = tokenizer_of_tokens(vocabulary)
    for number in range(min(model.num_text_ids, theirs.num_text_ids)):
        old, new = (one.decode(np.array([number])) for one in (model, theirs))
        if old != new:
            return f"the model reads token {number} as {old!r}, and there it is {new!r}"
    old, new = (one.encode(_SAMPLE).tolist() for one in (model, theirs))
    if old == new:
        return None
    first = next(i for i, (a, b) in enumerate(itertools.zip_longest(old, new)) if a != b)
    return f"{_SAMPLE!r} is to the model {old[: first + 1]}..., and there {new[: first + 1]}..."


def end_of_text(vocabulary: Vocabulary) -> int:
    """The id of the token that ends a document.

    Raises:
      ValueError, ImportError, OSError: see `tokenizer_of_tokens`, which bytes and GPT-2's tokens do
        not need.
    """
    known = {t.name: t.eot for t in (ByteTokenizer, GPT2Tokenizer)}.get(vocabulary.tokenizer)
    return tokenizer_of_tokens(vocabulary).eot if known is None else known


def copy_tokenizer(vocabulary: Vocabulary, directory: epath.PathLike) -> None:
    """Write the tokenizer of tokens for `load`; no library is needed. None where they name none."""
    if vocabulary.place is not None:
        files = _read(vocabulary.place)
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
            f"the tokenizer in {vocabulary.place} is not the one that made the tokens; copy "
            "that one there."
        )


def _write(
    directory: epath.Path, name: str, files: TokenizerFiles, max_seq_len: int | None = None
) -> None:
    """Write files for a tokenizer of this name."""
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


def _read(place: epath.Path) -> TokenizerFiles:
    """What a directory says, or a file in it that is a `tokenizer.json` of any name."""
    is_file = place.suffix == ".json"
    directory, file = (place.parent, place.name) if is_file else (place, _TOKENIZER)
    with reporting(directory):
        names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()

        def fields(name: str) -> dict[str, Any]:
            return read_json_object(directory / name) if name in names else {}

        settings = fields("special_tokens_map.json") | fields(_SETTINGS)
        end, kind = settings.get("eos_token"), settings.get("tokenizer_class", "")
        if not settings:  # earlier versions named it beside tokens
            kind, end = (fields("meta.json").get(name) for name in ("tokenizer", "eot_token"))
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
        of_model = fields("config.json") if file == _TOKENIZER else {}
        said = {key: value for key, value in of_model.items() if value is not None}
        said |= {key: value for key, value in fields(_GENERATION).items() if value is not None}
        files = TokenizerFiles(
            content=content,
            end=_content(end),
            settings=settings,
            template=read_text(directory / _TEMPLATE) if _TEMPLATE in names else None,
            generation={key: said[key] for key in ("bos_token_id", "eos_token_id") if key in said},
        )
        if content is not None and added:
            with about(directory):
                ends = {files.end, *files.end_ids}
                files = replace(files, content=_with_added(content, added, ends, str(settings)))
    return files


def _content(token: Any) -> Any:
    """The name of a token in settings, where it may stand with its flags."""
    return token["content"] if isinstance(token, dict) else token


def _open(files: TokenizerFiles, eot_token: str | None = None, *, built_in: bool) -> Tokenizer:
    """The tokenizer of files; with `built_in` that of bytes or GPT-2, if they mean the same."""
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
    """The token that ends a document: the first one that the files name and the vocabulary has."""
    token_of = {number: token for token, number in vocabulary.items()}
    named = [files.end, *map(token_of.get, files.end_ids)]
    return next((token for token in named if token in vocabulary), END_OF_TEXT)


def _vocabulary(fields: Any) -> dict[str, int]:
    """The id of each token in a `tokenizer.json`; none where the library shall say what is wrong
    with it."""
    try:
        tokens = fields["model"]["vocab"]  # Unigram's is a list of pairs, others' a dict
        vocabulary = (
            {t: i for i, (t, _) in enumerate(tokens)} if isinstance(tokens, list) else tokens
        )
        return vocabulary | {t["content"]: t["id"] for t in fields.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _plain_tokens(fields: dict[str, Any], vocabulary: dict[str, int]) -> list[bytes]:
    """The bytes of each token, in order of ids, where a text is cut as GPT-2's and no further
    changed; none of any other tokenizer."""
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
    """The `tokenizer.json` that `vocab.json` and `merges.txt` stand for."""
    with about(directory / _VOCABULARY), _library() as tokenizers:
        theirs = tokenizers.ByteLevelBPETokenizer.from_file(
            str(directory / _VOCABULARY),
            str(directory / _MERGES),
            add_prefix_space=is_prefixed is True,
        )
        return theirs.to_str().encode()


def _with_added(
    content: bytes, added: dict[int, dict[str, Any]], ends: set[Any], settings: str
) -> bytes:
    """A `tokenizer.json` with the tokens that other files add to it.

    Special ones that end nothing, such as a `[PAD]` that the model does not know, no text becomes;
    those after the last of the others are left out.

    Args:
      content: the file.
      added: each token by its id, `content` and perhaps flags.
      ends: names and ids of the tokens that end a text.
      settings: which, where the flags do not say so, tell whether a token is special.

    Raises:
      ValueError: the library, which counts on from the last id, would give one another id.
    """
    specials = {i: t.get("special", repr(t["content"]) in settings) for i, t in added.items()}
    needed = [i for i in added if not specials[i] or ends & {i, added[i]["content"]}]
    wanted = {added[i]["content"]: i for i in sorted(added) if i <= max(needed, default=-1)}
    if wanted.items() <= _vocabulary(parse_json(content)).items():
        return content
    with _library() as tokenizers:
        theirs = tokenizers.Tokenizer.from_str(content.decode())
        for token, number in wanted.items():
            flags = {"normalized": not specials[number], **added[number]}
            add = theirs.add_special_tokens if specials[number] else theirs.add_tokens
            add([tokenizers.AddedToken(**flags | {"special": specials[number]})])
            if theirs.token_to_id(token) != number:
                raise ValueError(
                    f"the added token {token!r} has the id {number}, where the library tokenizers "
                    f"gives it {theirs.token_to_id(token)}"
                )
        return theirs.to_str().encode()


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
    """A `tokenizer.json` of byte-level BPE; the last token ends documents. Without merges, no word
    needs to be cut out of a text."""
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
    """The character that stands for each byte in files of byte-level BPE: printable ones for
    themselves, the others for U+0100 and following."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that BPE joins last on its way from the bytes of a token to it."""
    rank = ranks[token]
    halves = [(token[:i], token[i:]) for i in range(1, len(token))]
    halves = [p for p in halves if max(ranks.get(p[0], rank), ranks.get(p[1], rank)) < rank]
    if len(halves) == 1:  # as of half of GPT-2's tokens
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
