"""Text to prepare, in files on a disk or in a bucket, in memory, or the sources of Python.

A corpus is a list of files with documents in them. A `Stretch` of documents, which is a file or
one of several equal ones in a large file, can be read by itself, so that stretches can be prepared
in any order and on any machine. Where one begins depends on the file alone.
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
import re
import sysconfig
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from maxmars.data.rows import (
    BLOCK_BYTES,
    COMPRESSIONS,
    KINDS,
    LINES,
    TEXT,
    OnBad,
    decompressed,
    kind_of,
    reading,
    refuse,
    rows_of,
    texts_of,
)
from maxmars.distributed.files import is_remote, reporting, require_access

_COMPRESSION = 3
"""Bytes of text in a byte of a compressed file, about."""
_END_OF_TEXT = b"<|endoftext|>"
_FILES_LOOKED_INTO = 8
_MANY_NAMES = 10_000
_ENDING = re.compile(
    "({})({})?$".format(*("|".join(map(re.escape, names)) for names in (KINDS, COMPRESSIONS))), re.I
)
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True)
class Stretch:
    """Consecutive documents of a file, or consecutive text of a document that is a file."""

    file: int
    """Index of the file in the corpus."""
    number: int = 0
    count: int = 1
    """The stretch is number `number`, from 0, of so many equal ones."""
    share: tuple[float, float] = (0.0, 1.0)
    """Of what it is one: (0.9, 1.0) is the last tenth of a file."""

    @property
    def is_of_whole(self) -> bool:
        """Whether the stretches are of the whole file."""
        return self.share == (0.0, 1.0)

    def share_of(self, count: int) -> tuple[int, int]:
        """The first of `count` things that belongs to the share, and the first after it.

        Of two things or more, each share has one at least.
        """
        low, high = (
            count * int(share)
            if share in (0.0, 1.0)
            else max(min(int(count * share), count - 1), 1)
            for share in self.share
        )
        return low, high

    def of(self, count: int) -> tuple[int, int]:
        """The first of `count` things that belongs to the stretch, and the first after it."""
        low, high = self.share_of(count)
        first, last = (low + (high - low) * i // self.count for i in (self.number, self.number + 1))
        return first, last


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or one of several consecutive stretches of it."""

    name: str
    """Its hash decides the split."""
    blocks: Iterable[str]
    """The text, in one or several pieces."""
    first: bool = True
    """Whether the text begins here."""
    last: bool = True
    """Whether the text ends here."""


class Corpus(abc.ABC):
    """Documents in files. Other processes get a corpus by pickle."""

    files: Sequence[str]
    """Names of the files, in order."""
    num_bytes: Sequence[int | None]
    """Bytes of text in each file, about; None where nobody knows."""
    fingerprint: str
    """Changes when the documents do, as far as can be told without reading them."""

    def is_text(self, file: int) -> bool:
        """Whether a file is one document, of which any stretch can be read by itself."""
        del file
        return False

    def is_divisible(self, file: int) -> bool:
        """Whether a stretch of a file, or of the documents in it, can be read by itself."""
        return self.is_text(file)

    def has_tail(self, file: int) -> bool:
        """Whether the end of a file is for validation, and not documents by a hash of their names;
        then any `Stretch.share` of it can be read."""
        del file
        return False

    @abc.abstractmethod
    def read(self, stretch: Stretch, on_bad: OnBad = refuse) -> Iterator[Document]:
        """The documents of a stretch.

        Args:
          stretch: which; a share of a file needs `has_tail`.
          on_bad: is told of each bad line or row, and raises or leaves it out.

        Raises:
          ValueError: the file is damaged, or lacks the field with the text.
        """

    def hint(self) -> str | None:
        """What the user may have overlooked; None where nothing.

        Raises:
          ValueError: the text is not as the arguments say.
        """
        return None


class Texts(Corpus):
    """Texts in memory: pairs (name, text)."""

    def __init__(self, documents: Iterable[tuple[str, str]]) -> None:
        self._documents = list(documents)
        self.files = [name for name, _ in self._documents]
        self.num_bytes = [len(text.encode("utf-8", "replace")) for _, text in self._documents]
        self.fingerprint = _digest(f"{name}\0{text}" for name, text in self._documents)

    def read(self, stretch: Stretch, on_bad: OnBad = refuse) -> Iterator[Document]:
        name, text = self._documents[stretch.file]
        yield Document(name, (text,))


class TextFiles(Corpus):
    """Files of text (`rows.KINDS`), compressed or not.

    A `.txt` is one document unless a separator ends its documents. A line of `.jsonl` or `.ndjson`,
    an element or a line of `.json`, and a row of any other file is one.

    The name of a document is the path of its file relative to the directory that all files share
    and, where a file has several, its place there: the byte of its line or the number of its row.

    Args:
      patterns: paths or globs (`~` and `**` work), also of `gs://`.
      text_field: where the text is in a line or row; a dot leads into a field.
      separator: what stands between the documents of a `.txt`.

    Raises:
      FileNotFoundError: a pattern matches no file.
      ValueError: a file is of another kind than those named above, or lies in another store,
        or there is no text to separate.
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
        self._sizes = [files[path][0] for path in self._paths]
        self._text_field = text_field
        self._separator = (separator or "").encode()
        self._kinds = [kind_of(path) for path in self._paths]
        if separator and not any(kind in TEXT for kind, _ in self._kinds):
            raise ValueError(
                f"the document separator {separator!r} stands between the documents of .txt files, "
                f"of which there is none in {', '.join(patterns)}; leave it out."
            )
        absolute = [path if is_remote(path) else os.path.abspath(path) for path in self._paths]
        root = os.path.commonpath([os.path.dirname(path) for path in absolute])
        self.files = [Path(os.path.relpath(path, root)).as_posix() for path in absolute]
        self.num_bytes = [
            size * (_COMPRESSION if compression or kind == ".parquet" else 1)
            for (kind, compression), size in zip(self._kinds, self._sizes, strict=True)
        ]
        versions = (" ".join(map(str, files[path])) for path in self._paths)
        listing = [" ".join(row) for row in zip(self.files, versions, strict=True)]
        how = [text_field, *([separator] if separator else [])]
        self.fingerprint = _digest([*how, *listing])

    def _is_one_text(self, file: int) -> bool:
        return self._kinds[file][0] in TEXT and not self._separator

    def is_text(self, file: int) -> bool:
        return self._is_one_text(file) and not self._kinds[file][1]

    def has_tail(self, file: int) -> bool:
        return self._is_one_text(file)

    def is_divisible(self, file: int) -> bool:
        kind, compression = self._kinds[file]
        if kind in TEXT:  # where the next separator is must not depend on where one looks from
            mark = self._separator
            overlaps = any(mark.startswith(mark[i:]) for i in range(1, len(mark)))
            return not compression and not overlaps
        return kind == ".parquet" or (kind in LINES and not compression)

    def read(self, stretch: Stretch, on_bad: OnBad = refuse) -> Iterator[Document]:
        """The documents of a stretch; see `Corpus.read`."""
        path, name = self._paths[stretch.file], self.files[stretch.file]
        with _reporting(path):
            if self._is_one_text(stretch.file):
                yield from self._read_text(path, name, stretch)
                return
            rows = rows_of(
                lambda: _open(path),
                path,
                stretch.of if stretch.count > 1 else None,
                field=self._text_field,
                separator=self._separator,
            )
            for place, text in texts_of(rows, path, on_bad):
                yield Document(f"{name}:{place}", (text,))

    def _read_text(self, path: str, name: str, stretch: Stretch) -> Iterator[Document]:
        """The text of a file that is one document."""
        with reading(path), _open(path) as raw:
            file, start, end = decompressed(raw, self._kinds[stretch.file][1]), 0, None
            if self.is_text(stretch.file):
                start, end = _bounds_in_text(raw, self._sizes[stretch.file], stretch)
                raw.seek(start)
            elif not stretch.is_of_whole:  # it is compressed: its end is known when all is read
                yield part_of(name, "".join(_decoded(file, path, 0, None)), stretch)
                return
            yield Document(name, _decoded(file, path, start, end), *_ends(stretch))

    def _find_separator(self) -> None:
        """Read the texts up to the first separator, and refuse one that occurs nowhere."""
        mark, carriage = self._separator, self._separator.replace(b"\n", b"\r\n")
        advice, texts = "correct it or leave it out", []
        for path, (kind, compression) in zip(self._paths, self._kinds, strict=True):
            if kind not in TEXT:
                continue
            texts.append(path)
            with _reporting(path), reading(path), _open(path) as raw:
                file, text = decompressed(raw, compression), b""
                while block := file.read(BLOCK_BYTES):
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
        """That a text spells the end of a document, which is ordinary text to a tokenizer.

        Raises:
          ValueError: the separator occurs nowhere.
        """
        if self._separator:
            self._find_separator()
        texts = filter(self._is_one_text, range(len(self._paths)))
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

    Leaves out installed packages, tests, and files that are not UTF-8.

    Args:
      root: the directory of the library; by default that of the running interpreter.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(sysconfig.get_path("stdlib"))
        self.files = _python_names(self._root)
        sizes = [(self._root / name).stat().st_size for name in self.files]
        self.num_bytes = sizes
        # Cheaper than a digest of the text.
        listing = [f"{name} {size}" for name, size in zip(self.files, sizes, strict=True)]
        self.fingerprint = _digest([f"Python {platform.python_version()}", *listing])

    def is_text(self, file: int) -> bool:
        return True

    def read(self, stretch: Stretch, on_bad: OnBad = refuse) -> Iterator[Document]:
        """The text of a file, if it is UTF-8."""
        name = self.files[stretch.file]
        with contextlib.suppress(UnicodeDecodeError, OSError):
            yield part_of(name, (self._root / name).read_bytes().decode(), stretch)


def _matches(pattern: str) -> dict[str, tuple[int, str]]:
    """Size and version of each file that a path or glob means."""
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
    """As `_matches`; links are followed, which the glob of fsspec leaves out. A file counts once,
    by its own name or else the shortest."""
    path = os.path.abspath(pattern)
    if os.path.isdir(path):
        raise _no_directory(glob.escape(pattern), os.walk(path))
    names = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    real, once = functools.cache(os.path.realpath), {}
    for name in sorted(names, key=lambda name: (os.path.islink(name), len(name), name)):
        folder, last = os.path.split(name)
        place = os.path.join(real(folder), last)
        once.setdefault(real(place) if os.path.islink(name) else place, name)
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
    """A refusal that names the pattern of those files in a directory of which it has most.

    Args:
      pattern: of the directory.
      walk: directory, subdirectories and files of each directory there, as `os.walk` gives them.
    """
    names = itertools.islice(
        itertools.chain.from_iterable(files for *_, files in walk), _MANY_NAMES
    )
    endings = Counter(found[0] for name in names if (found := _ENDING.search(name)))
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
    """Raise as OSError, in one line, what libraries raise over a bucket."""
    try:
        yield
    except (ValueError, ImportError):
        raise
    except Exception:
        with reporting(path):
            raise


def _ends(stretch: Stretch) -> tuple[bool, bool]:
    """Whether a stretch begins its share of a text, which is a document of its own, and ends it."""
    return stretch.number == 0, stretch.number == stretch.count - 1


def part_of(name: str, text: str, stretch: Stretch) -> Document:
    """What of a text belongs to a stretch."""
    if stretch.is_of_whole and stretch.count == 1:
        return Document(name, (text,))
    data = text.encode("utf-8", "replace")
    start, end = _bounds_in_text(io.BytesIO(data), len(data), stretch)
    return Document(name, (data[start:end].decode(),), *_ends(stretch))


def _bounds_in_text(file: io.BufferedIOBase, size: int, stretch: Stretch) -> tuple[int, int]:
    """The bytes of a text that belong to a stretch."""
    low, high = (_cut(file, position, size) for position in stretch.share_of(size))

    def bound(number: int) -> int:
        return _cut(file, low + (high - low) * number // stretch.count, high) if number else low

    return bound(stretch.number), bound(stretch.number + 1)


def _cut(file: io.BufferedIOBase, position: int, end: int) -> int:
    """Where a text that ends at a byte can be cut, from another byte on: after a line break or,
    where a megabyte has none, between two characters."""
    if position == 0 or position >= end:
        return min(position, end)
    file.seek(position - 1)
    line_break = file.read(min(BLOCK_BYTES, end - position)).find(b"\n")  # not that at the end
    if line_break >= 0:
        return position + line_break
    file.seek(position)
    start = file.read(min(4, end - position))
    return position + next((i for i, byte in enumerate(start) if byte & 0xC0 != 0x80), len(start))


def _decoded(file: io.BufferedReader, path: str, start: int, end: int | None) -> Iterator[str]:
    """The text from the byte `start`, where the file is, to the byte `end`, or its end, in blocks.

    A byte-order mark at the start of the file is no text.
    """
    place = start
    decoder = codecs.getincrementaldecoder("utf-8" if place else "utf-8-sig")()
    while True:
        with reading(path):
            block = file.read(BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - place))
            place += len(block)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                byte = place - len(error.object) + error.start
                raise ValueError(
                    f"it is not UTF-8 (byte {byte}); convert it, for example with iconv."
                ) from error
        yield text
        if not block:
            return


def _python_names(root: Path) -> list[str]:
    names = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [d for d in subdirectories if d not in _NOT_SOURCES]
        relative = Path(directory).relative_to(root)
        names += [
            (relative / f).as_posix()
            for f in files
            if f.endswith(".py") and Path(directory, f).is_file()
        ]
    return sorted(names)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()
