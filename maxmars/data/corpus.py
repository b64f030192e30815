"""Text to prepare, in files on a disk or in a bucket, in memory, or the sources of Python.

A corpus is a list of files with documents in them. A `FileRange`, a file or a part of a large one,
can be read by itself, so that tasks can run in any order and on any machine. The bytes of a range
follow from its bounds alone: a range begins after the first separator or line break at or after its
start, and ends where the next range begins.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import functools
import glob
import hashlib
import io
import itertools
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from maxmars.config.data import ENDING, KINDS, LINES, TEXT
from maxmars.data.rows import BLOCK_BYTES, OnBad, decompressed, kind_of, reading, rows_of, texts_of
from maxmars.distributed.files import is_remote, reporting, require_access

_COMPRESSION = 3
"""Estimated bytes of text in a byte of a compressed file."""
_END_OF_TEXT = b"<|endoftext|>"
_FILES_LOOKED_INTO = 8
_MANY_NAMES = 10_000
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True)
class FileRange:
    """A file, or a part of it between two fractions of its bytes, rows or row groups: from 0.9 to
    1.0 is the last tenth."""

    file: int
    """Index of the file in the corpus."""
    start: float = 0.0
    end: float = 1.0

    @property
    def is_whole(self) -> bool:
        """Whether the range is the whole file."""
        return (self.start, self.end) == (0.0, 1.0)

    def of(self, count: int) -> tuple[int, int]:
        """The range among `count` bytes, rows or row groups: the first, and the first after it.

        Of two rows or more, a bound inside the file leaves at least one row on each side.
        """
        first, after = (
            count * int(share)
            if share in (0.0, 1.0)
            else max(min(int(count * share), count - 1), min(count, 1))
            for share in (self.start, self.end)
        )
        return first, after


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or the part of a text that lies in a range of its file."""

    name: str
    blocks: Iterable[str]
    """The text, in one or several pieces."""
    first: bool = True
    """Whether the document begins here."""
    last: bool = True
    """Whether the document ends here."""


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """A file of a corpus."""

    name: str
    num_bytes: int | None
    """Estimated size of the text; None if unknown."""
    is_document: bool = False
    """Whether the file is one document, whose end is held out for validation. Otherwise whole
    documents are held out."""
    is_divisible: bool = False
    """Whether a range of the file can be read by itself."""


class Corpus(abc.ABC):
    """Documents in files. A corpus can be pickled for other processes."""

    files: Sequence[CorpusFile]
    fingerprint: str
    """A text that changes with the documents, as far as sizes, times and names of files show."""
    validation_source: str | None = None
    """The SOURCE of the data set's own validation split; None if there is none, or if this corpus
    contains it."""

    @abc.abstractmethod
    def read(self, part: FileRange, on_bad: OnBad | None = None) -> Iterator[Document]:
        """The documents of a file, or of a range of a divisible file.

        Args:
          part: the range.
          on_bad: called with the error of each bad line or row, which is then left out. Without it
            the error is raised.

        Raises:
          ValueError: the file is damaged, or lacks the field with the text.
        """

    def hint(self) -> str | None:
        """A hint at what the user may have overlooked; None if there is nothing.

        Raises:
          ValueError: the text contradicts the arguments.
        """
        return None


class Texts(Corpus):
    """Texts in memory: pairs (name, text)."""

    def __init__(self, documents: Iterable[tuple[str, str]]) -> None:
        self._documents = list(documents)
        self.files = [
            CorpusFile(name=name, num_bytes=len(text.encode("utf-8", "replace")))
            for name, text in self._documents
        ]
        self.fingerprint = _digest(f"{name}\0{text}" for name, text in self._documents)

    def read(self, part: FileRange, on_bad: OnBad | None = None) -> Iterator[Document]:
        name, text = self._documents[part.file]
        yield Document(name, (text,))


class TextFiles(Corpus):
    """Files of text (`KINDS`), compressed or not.

    A `.txt` is one document, or with a separator several. In the other files each line (`.jsonl`,
    `.ndjson`), element or line (`.json`) or row is a document.

    The name of a document is the path of its file, relative to the directory that all files share.
    In a file of several documents the byte of the line or the number of the row follows.

    Args:
      patterns: paths or globs (`~` and `**` work), also of `gs://`.
      text_field: the field of a line or row with the text; a dot leads into a field.
      separator: text between the documents of a `.txt`.

    Raises:
      FileNotFoundError: a pattern matches no file.
      ValueError: a file is of another kind than those named above, or lies in another store,
        or a separator is given without a `.txt`.
      ImportError: a file needs a library of the extra `hf`, or a bucket needs the extra `gcs`.
      OSError: a bucket does not answer.
    """

    def __init__(
        self, patterns: Sequence[str], *, text_field: str = "text", separator: str | None = None
    ) -> None:
        files: dict[str, tuple[int, str]] = {}
        for pattern in patterns:
            files |= _matches(os.path.expanduser(pattern))
        self._paths = sorted(files)
        self._text_field = text_field
        self._separator = (separator or "").encode()
        self._kinds = [kind_of(path) for path in self._paths]
        if separator and not any(kind in TEXT for kind, _ in self._kinds):
            raise ValueError(
                f"the document separator {separator!r} stands between the documents of .txt files, "
                f"of which there is none in {', '.join(patterns)}; leave it out."
            )
        absolute = [path if is_remote(path) else os.path.abspath(path) for path in self._paths]
        # Relative names: moved together to another directory, files give the same splits.
        root = os.path.commonpath([os.path.dirname(path) for path in absolute])
        names = [Path(os.path.relpath(path, root)).as_posix() for path in absolute]
        self.files = [
            self._described(name, files[path][0], *kind)
            for name, path, kind in zip(names, self._paths, self._kinds, strict=True)
        ]
        versions = (" ".join(map(str, files[path])) for path in self._paths)
        listing = [" ".join(row) for row in zip(names, versions, strict=True)]
        how = [text_field, *([separator] if separator else [])]
        self.fingerprint = _digest([*how, *listing])

    def _described(self, name: str, size: int, kind: str, compression: str) -> CorpusFile:
        is_packed, mark = bool(compression) or kind == ".parquet", self._separator
        # In "aXaXa" a search finds "aXa" at other bytes from another start: ranges would disagree.
        overlaps = any(mark.startswith(mark[i:]) for i in range(1, len(mark)))
        return CorpusFile(
            name=name,
            num_bytes=size
            * (_COMPRESSION if is_packed else 1),  # an estimate, for tasks and progress
            is_document=kind in TEXT and not mark,
            is_divisible=kind == ".parquet"
            or (not compression and (kind in LINES or (kind in TEXT and not overlaps))),
        )

    def read(self, part: FileRange, on_bad: OnBad | None = None) -> Iterator[Document]:
        """The documents of a range of a file; see `Corpus.read`."""
        path, name = self._paths[part.file], self.files[part.file].name
        with _reporting(path):
            if self.files[part.file].is_document:
                with reading(path), _open(path) as raw:
                    file = decompressed(raw, self._kinds[part.file][1])
                    start, end = 0, None
                    if not part.is_whole:
                        start, end = bounds_in_text(raw, raw.seek(0, io.SEEK_END), part)
                        raw.seek(start)
                    yield Document(name, _decoded(file, path, start, end))
                return
            rows = rows_of(
                lambda: _open(path),
                path,
                None if part.is_whole else part.of,
                field=self._text_field,
                separator=self._separator,
            )
            for offset, text in texts_of(rows, path, on_bad):
                yield Document(f"{name}:{offset}", (text,))

    def _find_separator(self) -> None:
        """Refuse a separator that occurs in no text; reads up to the first one."""
        mark, carriage = self._separator, self._separator.replace(b"\n", b"\r\n")
        # A separator typed with LF does not match a text with CR LF: the error says so.
        advice, texts = "correct it or leave it out", []
        for path, (kind, compression) in zip(self._paths, self._kinds, strict=True):
            if kind not in TEXT:
                continue
            texts.append(path)
            with _reporting(path), reading(path), _open(path) as raw:
                file, text = decompressed(raw, compression), b""
                while block := file.read(BLOCK_BYTES):
                    # The end of the block before: a separator may stand across two blocks.
                    text = text[max(len(text) - len(carriage) + 1, 0) :] + block
                    if mark in text:
                        return
                    if carriage in text:
                        advice = f"lines end in CR LF there, so write {carriage.decode()!r}"
        where = texts[0] + f" and {len(texts) - 1:,} more" * (len(texts) > 1)
        raise ValueError(
            f"the document separator {mark.decode()!r} occurs nowhere in {where}; {advice}."
        )

    def hint(self) -> str | None:
        """A hint if a text contains `<|endoftext|>`, which a tokenizer takes for ordinary text.

        Raises:
          ValueError: the separator occurs nowhere.
        """
        if self._separator:
            self._find_separator()
        texts = (number for number, file in enumerate(self.files) if file.is_document)
        for number in itertools.islice(texts, _FILES_LOOKED_INTO):
            path, (_, compression) = self._paths[number], self._kinds[number]
            with _reporting(path), reading(path), _open(path) as raw:
                file = decompressed(raw, compression)
                if _END_OF_TEXT in file.read(BLOCK_BYTES):
                    mark = _END_OF_TEXT.decode()
                    return (
                        f"{path} spells {mark}, which becomes ordinary text of one long document; "
                        f"--document-separator '{mark}' makes documents of what is between."
                    )
        return None


class PythonSources(Corpus):
    """The standard library of the running interpreter, one document a file.

    Installed packages, tests, and files that are not UTF-8 are left out.

    Args:
      root: the directory of the library, by default the running interpreter's.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(sysconfig.get_path("stdlib"))
        self.files = [
            CorpusFile(name=name, num_bytes=(self._root / name).stat().st_size)
            for name in _python_names(self._root)
        ]
        # Names and sizes, as a release of Python does not change: cheaper than the text.
        listing = [f"{file.name} {file.num_bytes}" for file in self.files]
        self.fingerprint = _digest([f"Python {platform.python_version()}", *listing])

    def read(self, part: FileRange, on_bad: OnBad | None = None) -> Iterator[Document]:
        """The text of a file, if it is UTF-8."""
        name = self.files[part.file].name
        with contextlib.suppress(UnicodeDecodeError, OSError):
            yield Document(name, ((self._root / name).read_bytes().decode(),))


def _matches(pattern: str) -> dict[str, tuple[int, str]]:
    """Size and version of each file that matches a path or glob."""
    files = _matches_in_bucket(pattern) if is_remote(pattern) else _matches_on_disk(pattern)
    if not files:
        raise FileNotFoundError(f"no file matches {pattern!r}; check the path or the pattern.")
    return files


def _matches_in_bucket(pattern: str) -> dict[str, tuple[int, str]]:
    if not pattern.startswith("gs://"):
        raise ValueError(
            f"{pattern} must be files on a disk or gs://BUCKET/PATH; download them first."
        )
    require_access(pattern)
    with _reporting(pattern):
        store, path = fsspec.core.url_to_fs(pattern)
        if store.isdir(path):
            raise _no_directory(pattern, store.walk(path))
        objects = {path: store.info(path)} if store.isfile(path) else {}
        objects = objects or store.glob(path, detail=True)
    return {
        f"gs://{name}": (info["size"], str(info.get("generation")))
        for name, info in objects.items()
        if info["type"] == "file" and (name == path or not os.path.basename(name).startswith("."))
    }


def _matches_on_disk(pattern: str) -> dict[str, tuple[int, str]]:
    """`_matches` on a disk. Unlike the glob of fsspec it follows links; a file with several links
    counts once, by its own name or else by the shortest."""
    path = os.path.abspath(pattern)
    if os.path.isdir(path):
        raise _no_directory(glob.escape(pattern), os.walk(path))
    names = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    real, once = functools.cache(os.path.realpath), {}
    for name in sorted(names, key=lambda name: (os.path.islink(name), len(name), name)):
        folder, last = os.path.split(name)
        entry = os.path.join(real(folder), last)
        once.setdefault(real(entry) if os.path.islink(name) else entry, name)
    broken = [name for name in once.values() if not os.path.exists(name)]
    if broken:
        raise FileNotFoundError(
            f"{min(broken)} is a link to a file that is not there; restore the file or delete the "
            "link."
        )
    status = {name: os.stat(name) for name in once.values() if os.path.isfile(name)}
    return {name: (of_file.st_size, str(of_file.st_mtime)) for name, of_file in status.items()}


def _no_directory(
    pattern: str, walk: Iterable[tuple[Any, Any, Iterable[str]]]
) -> IsADirectoryError:
    """The error for a directory: it names a pattern of the most frequent kind of file there.

    Args:
      pattern: the path of the directory.
      walk: path, subdirectories and files of each directory below, like `os.walk`.
    """
    names = itertools.islice(
        itertools.chain.from_iterable(files for *_, files in walk), _MANY_NAMES
    )
    endings = Counter(match[0] for name in names if (match := ENDING.search(name)))
    if not endings:
        return IsADirectoryError(
            f"{pattern} is a directory without files of text ({', '.join(KINDS)}); name files of "
            "these kinds, or a pattern that matches them."
        )
    files = f"{pattern.rstrip('/')}/**/*{endings.most_common(1)[0][0]}"
    return IsADirectoryError(f"{pattern} is a directory; name its files: '{files}'.")


def _open(path: str) -> io.BufferedReader:
    if not is_remote(path):
        return io.BufferedReader(io.FileIO(path), BLOCK_BYTES)
    store, name = fsspec.core.url_to_fs(path)
    return io.BufferedReader(store.open(name, "rb"), BLOCK_BYTES)


@contextlib.contextmanager
def _reporting(path: str) -> Generator[None]:
    """Raise OSError, in one line, for the errors of libraries over a bucket."""
    try:
        yield
    except (ValueError, ImportError):
        raise
    except Exception:
        with reporting(path):
            raise


def bounds_in_text(file: io.BufferedIOBase, size: int, part: FileRange) -> tuple[int, int]:
    """The first byte of a range of a text, and the first after it."""
    start, end = (_cut(file, position, size) for position in part.of(size))
    return start, end


def _cut(file: io.BufferedIOBase, position: int, end: int) -> int:
    """The first byte, from `position` on, at which a text of `end` bytes can be cut: after a line
    break or, if a megabyte has none, between two characters."""
    if position == 0 or position >= end:
        return min(position, end)
    file.seek(position - 1)
    # One byte earlier, as a line break just before `position` is a cut there; the last byte of the
    # text is not read, as a cut after it would leave nothing.
    line_break = file.read(min(BLOCK_BYTES, end - position)).find(b"\n")
    if line_break >= 0:
        return position + line_break
    file.seek(position)
    start = file.read(min(4, end - position))
    return position + next((i for i, byte in enumerate(start) if byte & 0xC0 != 0x80), len(start))


def _decoded(file: io.BufferedReader, path: str, start: int, end: int | None) -> Iterator[str]:
    """The text of the bytes [start, end), in blocks; with `end=None` to the end of the file.

    The file's position is `start`. A byte-order mark at the start of the file is no text.
    """
    position = start
    decoder = codecs.getincrementaldecoder("utf-8" if position else "utf-8-sig")()
    while True:
        with reading(path):
            block = file.read(BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - position))
            position += len(block)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                # The decoder holds back a character that the block cuts, and prepends it here.
                byte = position - len(error.object) + error.start
                raise ValueError(
                    f"it is not UTF-8 (byte {byte}); convert it, for example with iconv."
                ) from error
        yield text
        if not block:
            return


def _python_names(root: Path) -> list[str]:
    names = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [
            d for d in subdirectories if d not in _NOT_SOURCES
        ]  # `os.walk` enters the rest
        relative = Path(directory).relative_to(root)
        names += [
            (relative / f).as_posix()
            for f in files
            if f.endswith(".py") and Path(directory, f).is_file()
        ]
    return sorted(names)


def _digest(lines: Iterable[str]) -> str:
    # File names may hold bytes that are not UTF-8, as surrogates.
    return hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()
