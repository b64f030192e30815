"""One task of a preparation: fixed ranges of files, tokenised into shards of its own.

The tasks follow from the corpus and `task_bytes` alone, and a task always writes the same bytes. So
tasks may run in any order, on any machine, and twice. A document's split follows from its name, or
for a file that is one document from the position in it; so no task needs to know of another.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import io
import itertools
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
from etils import epath

from maxmars.config.errors import in_words
from maxmars.data.corpus import Corpus, Document, FileRange, bounds_in_text
from maxmars.data.metadata import Shard
from maxmars.data.rows import OnBad, Skipped
from maxmars.data.tokenizer import JsonTokenizer, Loss, Tokenizer
from maxmars.distributed.files import is_remote, reporting

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
_MAX_LOST = 0.01


@dataclass(frozen=True)
class Task:
    """Ranges of files that become shards of their own."""

    corpus: Corpus
    held_out: float
    """Share of the corpus that is for validation."""
    ranges: tuple[FileRange, ...]

    @property
    def num_bytes(self) -> int | None:
        """Estimated size of the text; None if unknown."""
        sizes = [self.corpus.files[part.file].num_bytes for part in self.ranges]
        shares = (part.end - part.start for part in self.ranges)
        known = [
            size * share for size, share in zip(sizes, shares, strict=True) if size is not None
        ]
        return int(sum(known)) if len(known) == len(sizes) else None

    @property
    def cut(self) -> float:
        """The fraction of a file that is one document at which the held-out end begins."""
        return 1 - self.held_out


def divide(corpus: Corpus, *, task_bytes: int | None, held_out: float) -> list[Task]:
    """The tasks of a corpus: files, ranges of large ones, and several small ones.

    Args:
      corpus: the documents; none is read.
      task_bytes: approximate text of a task; None chooses by the size of the corpus.
      held_out: share for validation, in [0, 1].
    """
    if task_bytes is None:  # not by the number of workers: the tasks decide the bytes of shards
        total = sum(file.num_bytes or 0 for file in corpus.files)
        task_bytes = min(max(total // _TASKS_WANTED, _TASK_BYTES[0]), _TASK_BYTES[1])
    tasks: list[Task] = []
    ranges: list[FileRange] = []
    size = 0.0
    for number, file in enumerate(corpus.files):
        for part in _ranges_of(corpus, number, task_bytes, 1 - held_out):
            # A file of unknown size is a task of its own.
            of_file = task_bytes if file.num_bytes is None else file.num_bytes
            num_bytes = of_file * (part.end - part.start)
            if ranges and size + num_bytes > task_bytes:
                tasks.append(Task(corpus, held_out, tuple(ranges)))
                ranges, size = [], 0.0
            ranges.append(part)
            size += num_bytes
    if ranges:
        tasks.append(Task(corpus, held_out, tuple(ranges)))
    return tasks


def _ranges_of(corpus: Corpus, number: int, task_bytes: int, cut: float) -> Iterator[FileRange]:
    """The ranges of a file: equal ones of at most a task if it is divisible, else the file."""
    file = corpus.files[number]
    if not file.is_divisible:
        yield FileRange(number)
        return
    # A document is divided at `cut` first, so that no range has text of both splits.
    edges = [0.0, cut, 1.0] if file.is_document and 0 < cut < 1 else [0.0, 1.0]
    for low, high in itertools.pairwise(edges):
        count = max(math.ceil((file.num_bytes or 0) * (high - low) / task_bytes), 1)
        for start, end in itertools.pairwise(np.linspace(low, high, count + 1).tolist()):
            yield FileRange(number, start, end)


def split_of(name: str, held_out: float) -> str:
    """The split of a document, by a hash of its name."""
    digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()
    return SPLITS[int.from_bytes(digest[:8], "big") < held_out * 2**64]  # True is 1, "val"


def _by_split(task: Task, part: FileRange, document: Document) -> list[tuple[str, Document]]:
    """A document from a range, with its split; or its two parts, if the file is one document and
    its held-out end begins within the range."""
    cut = task.cut
    if not task.corpus.files[part.file].is_document:
        return [(split_of(document.name, task.held_out), document)]
    if part.start < cut < part.end:
        return _head_and_tail(document, cut)
    first, last = part.start in (0.0, cut), part.end in (cut, 1.0)
    return [(SPLITS[part.start >= cut], replace(document, first=first, last=last))]


def _head_and_tail(document: Document, cut: float) -> list[tuple[str, Document]]:
    """The text before the fraction `cut` and the text after it as documents, with their splits."""
    data = "".join(document.blocks).encode("utf-8", "replace")
    _, cut_byte = bounds_in_text(io.BytesIO(data), len(data), FileRange(0, 0.0, cut))
    texts = data[:cut_byte].decode(), data[cut_byte:].decode()
    return [
        (split, Document(document.name, (text,))) for split, text in zip(SPLITS, texts, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The arguments that decide the bytes of a directory of tokens.

    Raises:
      ValueError: an argument lies outside its range.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    source: str
    """Origin of the text, in words; recorded."""
    validation_fraction: float = 0.1
    """Share for validation, in [0, 1]: the end of each file that is one document, and of other
    documents those that a hash of their names says. Where it is neither 0 nor 1, both splits get
    something of two documents or of one of several lines."""
    validation: Corpus | None = None
    """Documents that are all for validation; then `validation_fraction` must be 0."""
    shard_tokens: int = SHARD_TOKENS
    """Maximum tokens of a shard."""
    task_bytes: int | None = None
    """Approximate text of a task; None chooses by the size of the corpus."""
    allow_lossy: bool = False
    """Whether the tokenizer may lose more than 1 % of a sample of the text."""
    skip_bad: int = 0
    """Maximum number of bad lines and rows, in the whole corpus, that are left out."""
    command: str | None = None
    """The command line, recorded."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction <= 1:
            raise ValueError(f"validation_fraction={self.validation_fraction} must lie in [0, 1].")
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
        """All tasks; the number of a task is its index in this list."""
        tasks = divide(self.corpus, task_bytes=self.task_bytes, held_out=self.validation_fraction)
        if self.validation is not None:
            tasks += divide(self.validation, task_bytes=self.task_bytes, held_out=1.0)
        return tasks

    def check_loss(self) -> Loss | None:
        """Characters that the tokenizer loses in the beginnings of three files; None if none.

        Raises:
          ValueError: more than 1 % is lost, and `allow_lossy` is False.
        """
        if not isinstance(self.tokenizer, JsonTokenizer) or not self.corpus.files:
            return None  # the other tokenizers have a token for each byte
        skip_silently: OnBad | None = (lambda error: None) if self.skip_bad else None
        last, texts = len(self.corpus.files) - 1, list[str]()
        for file in sorted({last * i // (_SAMPLED_FILES - 1) for i in range(_SAMPLED_FILES)}):
            wanted = _SAMPLED_CHARACTERS // _SAMPLED_FILES
            documents = self.corpus.read(FileRange(file), skip_silently)
            for text in (text for document in documents for text in document.blocks):
                texts.append(text[:wanted])
                wanted -= len(texts[-1])
                if not wanted:
                    break
        try:
            loss = self.tokenizer.loss("".join(texts))
        except Exception:  # the library's own; `write_task` will raise it with the document's name
            return None
        if loss.share > _MAX_LOST and not self.allow_lossy:
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
    """A split that would stay empty, and gets the last document of a task."""

    split: str
    number: int
    """Index of this document among the documents of the task."""
    is_only: bool
    """Whether the corpus has no other document; then only its end is held out."""


def write_task(
    recipe: Recipe,
    number: int,
    out: epath.Path,
    *,
    check: Callable[[], None],
    report: Callable[[int], None],
    fill: Fill | None = None,
) -> dict[str, Any]:
    """Write the shards of a task under temporary names, and rename them at the end.

    Args:
      recipe: the recipe of the whole directory.
      number: number of the task.
      out: the directory of the shards.
      check: called before any file gets its final name; may raise.
      report: called now and then with the bytes of text tokenised since its last call.
      fill: a document that goes to another split than the rule says.

    Returns:
      `skipped`, and for each split `num_tokens`, `num_documents` (documents that end in the task),
      `shards`, and `starts`: an array of two columns with, for each document that starts in the
      task, its first token and a hash of its tokens. The hash is 0 if the task has only a part.

    Raises:
      ValueError: a file of the corpus is damaged.
    """
    task, tokenizer = recipe.tasks[number], recipe.tokenizer
    skipped = Skipped()

    def on_bad(error: ValueError) -> None:
        nonlocal skipped
        if not recipe.skip_bad:
            raise error
        skipped += Skipped(1, (in_words(error),))
        skipped.check_limit(recipe.skip_bad)

    def add(document: Document, writer: _SplitWriter) -> None:
        """Tokenise a document or a part of one; a document of white space alone is left out."""
        start, is_whole = writer.num_tokens, document.first and document.last
        sha, is_start = hashlib.blake2b(digest_size=8), document.first
        pieces = _pieces(document.blocks)
        for text in _unless_blank(pieces) if is_whole else pieces:
            tokens = _encoded(text, tokenizer, document.name, is_start=is_start)
            is_start = False
            sha.update(tokens.tobytes())
            writer.append(tokens)
            report(len(text) if text.isascii() else len(text.encode("utf-8", "replace")))
        # A part without tokens is not left out: other parts of its document may have some.
        if is_whole and writer.num_tokens == start:
            return
        if document.first:
            digest = int.from_bytes(sha.digest(), "little") if is_whole else 0
            writer.starts.append((start, digest))
        if document.last:
            writer.append(np.array([tokenizer.eot], recipe.dtype))
            writer.num_documents += 1

    with contextlib.ExitStack() as stack:
        scratch = os.fspath(out)
        if is_remote(out):  # objects cannot be renamed: a shard is uploaded when it is complete
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
        writers = {
            split: stack.enter_context(
                _SplitWriter(
                    Path(scratch), f"{split}_{number:05d}", recipe.dtype, recipe.shard_tokens
                )
            )
            for split in SPLITS
        }
        for part in task.ranges:
            for document in task.corpus.read(part, on_bad):
                if fill:  # `_head_and_tail` reads a document again, and blocks are an iterator
                    document = replace(document, blocks=("".join(document.blocks),))
                by_split = _by_split(task, part, document)
                # The document to move: the last of its split, counted by the ends written so far.
                split, first = by_split[0]
                is_whole = first.first and first.last
                number_there = writers[split].num_documents
                if fill and is_whole and split != fill.split and number_there == fill.number:
                    by_split = [(fill.split, document)]
                    if fill.is_only:
                        by_split = _head_and_tail(document, task.cut)
                for split, piece in by_split:
                    add(piece, writers[split])
        for writer in writers.values():
            writer.complete_shard()
        check()
        splits = {split: writer.name_shards(out) for split, writer in writers.items()}
    return {"skipped": asdict(skipped), "splits": splits}


def _encoded(text: str, tokenizer: Tokenizer, document: str, *, is_start: bool) -> np.ndarray:
    """The tokens of a piece of a document."""
    try:
        if is_start:
            return tokenizer.encode(text)
        # Some tokenizers add a blank at the start of every text, which a later piece must not get.
        # After a line break there is none: so one is encoded in front, and its tokens are cut off.
        line_break, tokens = tokenizer.encode("\n"), tokenizer.encode("\n" + text)
        begins = np.array_equal(tokens[: len(line_break)], line_break)
        return tokens[len(line_break) :] if begins else tokenizer.encode(text)
    except Exception as error:  # tiktoken and tokenizers raise no class of their own
        raise ValueError(
            f"{document} cannot be tokenised with {tokenizer.name} ({type(error).__name__}: "
            f"{error}); correct or remove that text, or choose another --tokenizer."
        ) from error


def _unless_blank(pieces: Iterator[str]) -> Iterator[str]:
    """The pieces of a text, or none if all are white space."""
    blank = []
    for piece in pieces:
        blank.append(piece)
        if not piece.isspace():
            yield from blank
            yield from pieces


def _pieces(blocks: Iterable[str]) -> Iterator[str]:
    """The text in pieces of bounded length, cut after line breaks."""
    waiting = ""  # the cuts depend on the text alone, not on its blocks: so do the tokens
    for block in blocks:
        waiting += block
        while len(waiting) > 2 * _PIECE_CHARACTERS:
            end = waiting.find("\n", _PIECE_CHARACTERS, 2 * _PIECE_CHARACTERS) + 1
            end = end or _PIECE_CHARACTERS  # a long line is cut between two characters
            yield waiting[:end]
            waiting = waiting[end:]
    if waiting:
        yield waiting


class _SplitWriter:
    """Writes a task's shards of one split; a context that removes files without a final name."""

    def __init__(self, directory: Path, name: str, dtype: str, shard_tokens: int) -> None:
        self._directory, self._name, self._shard_tokens = directory, name, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = self.num_documents = 0
        self.starts: list[tuple[int, int]] = []  # first token and hash of each document
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

    def name_shards(self, target: epath.Path) -> dict[str, Any]:
        """Give all shards their final names; returns their description for the task's record."""
        for path, shard in self._shards.items():
            if not is_remote(target):
                path.replace(target / shard.file)
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
        """Complete the open shard, if there is one."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())  # else a power cut may leave the final name without the bytes
        self._file.close()
        suffix = f"_{len(self._shards)}" if self._shards else ""
        self._shards[Path(self._file.name)] = Shard(
            file=f"{self._name}{suffix}.bin",
            num_tokens=self._in_shard,
            sha256=self._sha.hexdigest(),
            crc32c=base64.b64encode(self._crc.digest()).decode() if self._crc else None,
        )
        self._file = None
