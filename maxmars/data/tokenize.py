"""Documents to tokens, in this process or in several others, always in the same order.

Documents are gathered into batches and long ones cut into pieces where the tokenizer allows, so
that memory is bounded and several processes can work on one long text. Neither shows in the tokens.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process

import numpy as np

from maxmars.data.corpus import Corpus, Document
from maxmars.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 1 << 19
"""Text that goes to a worker at once, about; a piece of a document is no longer than that."""
_BATCH_PIECES = 1 << 13
_BATCHES_IN_FLIGHT = 3
"""For each worker: what bounds the memory."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a corpus has been read: files, documents of the next file, characters of the next."""

    file: int = 0
    document: int = 0
    characters: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of a long one."""

    name: str
    text: str
    first: bool
    last: bool
    after: Position
    """Where reading goes on after this piece."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of several pieces, one after the other, each document with its end-of-text token.

    A document without tokens has no end-of-text token either.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    """Tokens of each piece."""
    first: np.ndarray
    """Whether each piece starts a document."""
    last: np.ndarray
    """Whether each piece ends a document."""
    validation: np.ndarray
    """Whether each piece belongs to the validation split, by its document's name."""
    num_bytes: int
    """Bytes of text."""


def pieces(
    corpus: Corpus,
    files: Sequence[int],
    tokenizer: Tokenizer,
    *,
    start: Position,
    stride: tuple[int, int] = (0, 1),
) -> Iterator[Piece]:
    """The documents of some files from a position on, long ones cut.

    Args:
      corpus: the documents.
      files: indices of the files to read, ascending.
      tokenizer: says where it can be cut.
      start: where to start. Its file is an index into the corpus.
      stride: (i, n) takes the documents of each file whose number leaves i when divided by n.
    """
    for file in files:
        if file < start.file:
            continue
        resumed = file == start.file
        skip = start.document if resumed else 0
        for number, document in enumerate(corpus.read(file, skip), skip):
            if number % stride[1] == stride[0]:
                done = start.characters if resumed and number == skip else 0
                yield from _cut(document, tokenizer, Position(file, number, done))


def _cut(document: Document, tokenizer: Tokenizer, start: Position) -> Iterator[Piece]:
    """The pieces of a document from `start.characters` on."""
    text, done, to_skip = "", start.characters, start.characters
    first = done == 0
    waiting: list[str] = []
    size, wanted = 0, BATCH_CHARACTERS
    for block in document.blocks:
        skipped = min(to_skip, len(block))
        to_skip -= skipped
        waiting.append(block[skipped:])
        size += len(block) - skipped
        if size <= wanted:
            continue
        text = "".join(waiting)
        begin = 0
        for end in _cuts(text, tokenizer):
            done += end - begin
            after = Position(start.file, start.document, done)
            yield Piece(document.name, text[begin:end], first, False, after)
            begin, first = end, False
        waiting = [text[begin:]]
        size = len(text) - begin
        wanted = max(BATCH_CHARACTERS, 2 * size)  # what cannot be cut yet is not tried for long
    after = Position(start.file, start.document + 1)
    yield Piece(document.name, "".join(waiting), first, True, after)


def _cuts(text: str, tokenizer: Tokenizer) -> Iterator[int]:
    """Where to cut a text into pieces of about BATCH_CHARACTERS; the last is not one of them."""
    begin, size = 0, BATCH_CHARACTERS
    while len(text) - begin > size:
        cut = tokenizer.find_cut(text, begin, begin + size)
        if cut is None:
            size *= 2
        else:
            yield cut
            begin, size = cut, BATCH_CHARACTERS


def batches(stream: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces gathered for one call of a worker."""
    batch, size = [], 0
    for piece in stream:
        if batch and size + len(piece.text) > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece.text)
        if len(batch) == _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class BatchTokenizer:
    """Tokenises batches.

    Args:
      tokenizer: text to tokens.
      dtype: of the tokens.
      validation_fraction: part of the documents that goes to validation, by hash.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: str, validation_fraction: float) -> None:
        """Hold the arguments."""
        self._tokenizer = tokenizer
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._validation_fraction = validation_fraction

    def __call__(self, batch: Sequence[tuple[str, str, bool, bool]]) -> TokenBatch:
        """The tokens of pieces (name, text, first, last)."""
        eot = np.array([self._tokenizer.eot], self._dtype)
        tokens, lengths, num_bytes = [], [], 0
        for _, text, first, last in batch:
            found = self._tokenizer.encode(text)
            length = len(found)
            tokens.append(found.astype(self._dtype, copy=False))
            if last and (length or not first):
                tokens.append(eot)
                length += 1
            lengths.append(length)
            num_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        return TokenBatch(
            tokens=np.concatenate(tokens),
            lengths=np.array(lengths, np.int64),
            first=np.array([first for _, _, first, _ in batch], bool),
            last=np.array([last for _, _, _, last in batch], bool),
            validation=np.array([self._is_validation(name) for name, *_ in batch], bool),
            num_bytes=num_bytes,
        )

    def _is_validation(self, name: str) -> bool:
        digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()
        return int.from_bytes(digest[:8], "big") < self._validation_fraction * 2**64


def tokenize(
    stream: Iterable[list[Piece]], work: BatchTokenizer, *, workers: int
) -> Iterator[tuple[Position, TokenBatch]]:
    """The tokens of batches, in order, each with the position after it.

    Args:
      stream: see `batches`; read a bounded number of batches ahead.
      work: tokenises a batch.
      workers: processes to start, by `spawn`; 0 tokenises here.

    Raises:
      ChildProcessError: a worker has died.
    """
    if workers == 0:
        for batch in stream:
            yield batch[-1].after, work(_plain(batch))
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(work,)
    )
    in_flight: deque[tuple[Position, Future[TokenBatch]]] = deque()
    try:
        for batch in stream:
            in_flight.append((batch[-1].after, pool.submit(_work, _plain(batch))))
            if len(in_flight) == _BATCHES_IN_FLIGHT * workers:
                position, future = in_flight.popleft()
                yield position, future.result()
        while in_flight:
            position, future = in_flight.popleft()
            yield position, future.result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            f"one of the {workers} tokenising processes has died: it was killed, or memory ran "
            "out. Run the same command again to continue, with fewer --workers if memory is short."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _plain(batch: list[Piece]) -> list[tuple[str, str, bool, bool]]:
    return [(piece.name, piece.text, piece.first, piece.last) for piece in batch]


_worker: BatchTokenizer


def _start_worker(work: BatchTokenizer) -> None:
    global _worker
    _worker = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A worker waits for work on a pipe that its siblings hold open too; it would outlive us.
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _work(batch: list[tuple[str, str, bool, bool]]) -> TokenBatch:
    return _worker(batch)
