"""One task of a preparation: a fixed stretch of documents, tokenised into shards of its own.

The corpus alone decides what the tasks are, and a task always writes the same bytes. So tasks may
run in any order, on any machine, and twice.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import math
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import fsspec
import numpy as np

from maxmars.config.errors import in_words
from maxmars.data.corpus import Corpus, Document, Stretch, part_of
from maxmars.data.metadata import Shard
from maxmars.data.rows import Skipped
from maxmars.data.tokenizer import JsonTokenizer, Loss, Tokenizer
from maxmars.distributed.files import Workdir, is_remote, reporting

try:
    import google_crc32c  # comes with the extra gcs
except ImportError:
    google_crc32c = None

SPLITS = ("train", "val")
SHARD_TOKENS = 100_000_000
_TASKS_WANTED = 256
_TASK_BYTES = (8_000_000, 256_000_000)
_PIECE_CHARACTERS = 1 << 19
_SAMPLED_CHARACTERS, _SAMPLED_FILES = 1 << 17, 3
_MOST_LOST = 0.01


@dataclass(frozen=True)
class Task:
    """What becomes shards of its own."""

    stretches: tuple[Stretch, ...]
    num_bytes: int | None
    """Of text, about; None where nobody knows."""
    is_validation: bool = False
    """Whether it is of the corpus that is all for validation."""


def divide(corpus: Corpus, *, task_bytes: int | None, validation_fraction: float) -> list[Task]:
    """The tasks of a corpus: files, stretches of large ones, and several small ones.

    Where the end of each file is for validation, it is a stretch of its own.

    Args:
      corpus: the documents; none is read.
      task_bytes: text of a task, about; None chooses by the size of the corpus.
      validation_fraction: how much is for validation, in [0, 1).
    """
    if task_bytes is None:
        total = sum(size or 0 for size in corpus.num_bytes)
        task_bytes = min(max(total // _TASKS_WANTED, _TASK_BYTES[0]), _TASK_BYTES[1])
    cut = 1 - validation_fraction
    tasks, stretches, size = [], [], 0
    for file, file_bytes in enumerate(corpus.num_bytes):
        has_tail = validation_fraction and corpus.has_tail(file)
        for share in [(0.0, cut), (cut, 1.0)] if has_tail else [(0.0, 1.0)]:
            num_bytes = (file_bytes or 0) * (share[1] - share[0])
            count = max(math.ceil(num_bytes / task_bytes), 1) if corpus.is_divisible(file) else 1
            for number in range(count):
                if stretches and (file_bytes is None or size + num_bytes / count > task_bytes):
                    tasks.append(Task(tuple(stretches), int(size)))
                    stretches, size = [], 0
                stretches.append(Stretch(file, number, count, share))
                size += num_bytes / count
                if file_bytes is None:
                    tasks.append(Task(tuple(stretches), None))
                    stretches, size = [], 0
    return [*tasks, Task(tuple(stretches), int(size))] if stretches else tasks


def split_of(document: Document, stretch: Stretch, validation_fraction: float) -> str:
    """The split of a document: that of its stretch, where the end of its file is held out, or that
    of a hash of its name."""
    if not stretch.is_of_whole:
        return SPLITS[stretch.share[0] > 0]
    digest = hashlib.sha256(document.name.encode("utf-8", "backslashreplace")).digest()
    return SPLITS[int.from_bytes(digest[:8], "big") < validation_fraction * 2**64]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to make a directory of tokens.

    Raises:
      ValueError: an argument lies outside its range.
    """

    corpus: Corpus
    out: Workdir
    tokenizer: Tokenizer
    source: str
    """Where the text is from, in words; recorded."""
    validation_fraction: float = 0.1
    """Share of each file that `Corpus.has_tail`, and of the other documents, for validation, in [0,
    1). Where it is not 0, both splits get something of two documents or of one of several lines."""
    validation: Corpus | None = None
    """Documents that are all for validation, with a `validation_fraction` of 0."""
    shard_tokens: int = SHARD_TOKENS
    """Tokens a file at most."""
    task_bytes: int | None = None
    """Text of a task, about; None chooses by the size of the corpus."""
    allow_lossy: bool = False
    """Whether the tokenizer may lose more than 1 % of a sample of the text."""
    skip_bad: int = 0
    """Lines and rows without a text that are left out, at most, of the whole corpus."""
    command: str | None = None
    """The command line, recorded."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction={self.validation_fraction} must lie in [0, 1).")
        if self.validation is not None and self.validation_fraction:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} must be 0 where validation has "
                "documents of its own."
            )
        for name in ("shard_tokens", "task_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be greater than zero.")

    @functools.cached_property
    def tasks(self) -> list[Task]:
        """The work; the number of a task is its place in this list."""
        fraction, size = self.validation_fraction, self.task_bytes
        tasks = divide(self.corpus, task_bytes=size, validation_fraction=fraction)
        if self.validation is not None:
            held_out = divide(self.validation, task_bytes=size, validation_fraction=0.0)
            tasks += [replace(task, is_validation=True) for task in held_out]
        return tasks

    def check_loss(self) -> Loss | None:
        """What the tokenizer loses of the beginnings of a few files; None where it loses nothing.

        Raises:
          ValueError: it is more than 1 %, which `allow_lossy` does not allow.
        """
        if not isinstance(self.tokenizer, JsonTokenizer):
            return None  # there is a token for each byte
        last, texts = len(self.corpus.files) - 1, list[str]()
        for file in sorted({last * i // (_SAMPLED_FILES - 1) for i in range(_SAMPLED_FILES)}):
            wanted = _SAMPLED_CHARACTERS // _SAMPLED_FILES
            documents = self.corpus.read(Stretch(file), lambda error: None)
            for text in (text for document in documents for text in document.blocks):
                texts.append(text[:wanted])
                wanted -= len(texts[-1])
                if not wanted:
                    break
        try:
            loss = self.tokenizer.loss("".join(texts))
        except Exception:  # the library's own; the task will name the document
            return None
        if loss.share > _MOST_LOST and not self.allow_lossy:
            raise ValueError(
                f"the tokenizer cannot spell the text of {self.source}: {loss}. Train one with the "
                "whole alphabet of bytes, choose another --tokenizer, or go on without what is "
                "lost by --allow-lossy."
            )
        return loss if loss.share else None

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """The type of the tokens on disk."""
        return "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True, kw_only=True)
class Fill:
    """A split that would stay empty, and gets the last document that a task has."""

    split: str
    is_only: bool
    """Whether this document is the only one of the corpus. The split then gets a part of it."""

    def parts(self, document: Document, fraction: float) -> Iterator[tuple[Document, str]]:
        """The document, whole or in two parts, and the split of each."""
        if not self.is_only:
            yield document, self.split
            return
        cut, text = 1 - fraction, "".join(document.blocks)
        for split, share in (("train", (0.0, cut)), ("val", (cut, 1.0))):
            yield part_of(document.name, text, Stretch(0, share=share)), split


def write_task(
    recipe: Recipe,
    number: int,
    *,
    check: Callable[[], None],
    report: Callable[[int], None],
    fill: Fill | None = None,
) -> dict[str, Any]:
    """Write the shards of a task under temporary names, and rename them at the end.

    Args:
      recipe: what to make.
      number: of the task.
      check: called before any file gets its name; may raise.
      report: called now and then with the bytes of text that have been tokenised since.
      fill: the split that gets the last document of the task.

    Returns:
      `skipped`, and for each split `num_tokens`, `num_documents`
      that end there, `shards`, and of each document that starts there (`starts`, an array of two
      columns) its place in the tokens and a hash of its tokens, which is 0 of a part of one.

    Raises:
      ValueError: a file of the corpus is damaged.
    """
    task, tokenizer = recipe.tasks[number], recipe.tokenizer
    corpus = (recipe.validation if task.is_validation else None) or recipe.corpus
    fraction = recipe.validation_fraction
    waiting: Document | None = None  # the last one so far, where one has to fill a split
    skipped = Skipped()

    def on_bad(error: ValueError) -> None:
        nonlocal skipped
        if not recipe.skip_bad:
            raise error
        skipped += Skipped(1, (in_words(error),))
        skipped.refuse_over(recipe.skip_bad)

    def add(document: Document, writer: _SplitWriter) -> None:
        """Tokenise a document or a piece of one; one of white space alone is left out."""
        has_begun, is_start = not document.first, document.first
        is_whole, sha = document.first and document.last, hashlib.blake2b(digest_size=8)
        pieces = _pieces(document.blocks)
        for text in _unless_blank(pieces) if is_whole else pieces:
            tokens = _encoded(text, tokenizer, document.name, is_start=is_start)
            is_start = False
            if len(tokens) and not has_begun:
                has_begun = True
                writer.starts.append((writer.num_tokens, 0))
            sha.update(tokens.tobytes())
            writer.append(tokens)
            report(len(text) if text.isascii() else len(text.encode("utf-8", "replace")))
        if document.last and has_begun:
            writer.append(np.array([tokenizer.eot], recipe.dtype))
            writer.num_documents += 1
            if is_whole:
                writer.starts[-1] = (writer.starts[-1][0], int.from_bytes(sha.digest(), "little"))

    with contextlib.ExitStack() as stack:
        scratch = os.fspath(recipe.out)
        if is_remote(recipe.out):
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
        writers = {
            split: stack.enter_context(
                _SplitWriter(
                    Path(scratch), f"{split}_{number:05d}", recipe.dtype, recipe.shard_tokens
                )
            )
            for split in SPLITS
        }
        for stretch in task.stretches:
            for document in corpus.read(stretch, on_bad):
                split = "val" if task.is_validation else split_of(document, stretch, fraction)
                is_whole = document.first and document.last
                if fill and is_whole and split != fill.split:
                    text = "".join(document.blocks)
                    if not text:
                        continue
                    if waiting is not None:
                        add(waiting, writers[split])
                    waiting = replace(document, blocks=(text,))
                else:
                    add(document, writers[split])
        if fill is not None and waiting is not None:
            for part, split in fill.parts(waiting, fraction):
                add(part, writers[split])
        for writer in writers.values():
            writer.complete_shard()
        check()
        splits = {split: writer.name_shards(recipe.out) for split, writer in writers.items()}
    return {"skipped": asdict(skipped), "splits": splits}


def _encoded(text: str, tokenizer: Tokenizer, document: str, *, is_start: bool) -> np.ndarray:
    """The tokens of a piece of a document."""
    try:
        if is_start:
            return tokenizer.encode(text)
        # Some tokenizers begin every text with a blank. What comes after a line break has none.
        line_break, tokens = tokenizer.encode("\n"), tokenizer.encode("\n" + text)
        begins = np.array_equal(tokens[: len(line_break)], line_break)
        return tokens[len(line_break) :] if begins else tokenizer.encode(text)
    except Exception as error:  # tiktoken and tokenizers raise plain ones
        raise ValueError(
            f"{document} cannot be tokenised with {tokenizer.name} ({type(error).__name__}: "
            f"{error}); correct or remove that text, or choose another --tokenizer."
        ) from error


def _unless_blank(pieces: Iterator[str]) -> Iterator[str]:
    """The pieces of a text; none where all are white space."""
    blank = []
    for piece in pieces:
        blank.append(piece)
        if not piece.isspace():
            yield from blank
            yield from pieces


def _pieces(blocks: Iterable[str]) -> Iterator[str]:
    """The text in pieces of bounded length, cut after line breaks."""
    waiting = ""
    for block in blocks:
        waiting += block
        while len(waiting) > 2 * _PIECE_CHARACTERS:
            end = waiting.find("\n", _PIECE_CHARACTERS, 2 * _PIECE_CHARACTERS) + 1
            end = end or _PIECE_CHARACTERS  # a line without an end is cut between two characters
            yield waiting[:end]
            waiting = waiting[end:]
    if waiting:
        yield waiting


class _SplitWriter:
    """Writes what a task has for one split; a context that removes files without a final name."""

    def __init__(self, directory: Path, name: str, dtype: str, shard_tokens: int) -> None:
        self._directory, self._name, self._shard_tokens = directory, name, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = self.num_documents = 0
        self.starts: list[tuple[int, int]] = []
        self._shards: dict[Path, Shard] = {}
        self._file: Any = None

    def __enter__(self) -> _SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)
        for path in self._shards:
            path.unlink(missing_ok=True)

    def append(self, tokens: np.ndarray) -> None:
        self.num_tokens += len(tokens)
        while len(tokens):
            file = self._file or self._begin_shard()
            fitting = tokens[: self._shard_tokens - self._in_shard]
            data = fitting.astype(self._dtype).tobytes()
            file.write(data)
            self._sha.update(data)
            if self._crc is not None:
                self._crc.update(data)
            self._in_shard += len(fitting)
            tokens = tokens[len(fitting) :]
            if self._in_shard == self._shard_tokens:
                self.complete_shard()

    def name_shards(self, target: Workdir) -> dict[str, Any]:
        """Give all shards their names, and describe them."""
        for path, shard in self._shards.items():
            if not is_remote(target):
                path.replace(Path(target) / shard.file)
                continue
            with reporting(target):
                store, name = fsspec.core.url_to_fs(os.fspath(target / shard.file))
                store.put_file(str(path), name)
        return {
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "shards": [asdict(shard) for shard in self._shards.values()],
            "starts": np.array(self.starts, "<u8").reshape(-1, 2),
        }

    def _begin_shard(self) -> Any:
        name = f".{self._name}.{secrets.token_hex(4)}.tmp"
        self._file, self._in_shard = (self._directory / name).open("wb"), 0
        self._sha = hashlib.sha256()
        self._crc = google_crc32c.Checksum() if google_crc32c else None
        return self._file

    def complete_shard(self) -> None:
        """Complete the shard that has been begun, if there is one."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())  # a name that survives a power cut must not lack its bytes
        self._file.close()
        suffix = f"_{len(self._shards)}" if self._shards else ""
        self._shards[Path(self._file.name)] = Shard(
            file=f"{self._name}{suffix}.bin",
            num_tokens=self._in_shard,
            sha256=self._sha.hexdigest(),
            crc32c=base64.b64encode(self._crc.digest()).decode() if self._crc else None,
        )
        self._file = None
