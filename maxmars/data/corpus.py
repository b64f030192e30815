"""Corpora to prepare: text in memory, local files, and the sources of Python.

A corpus is a list of files, each a run of documents that can be read from any document on. So a
preparation that was interrupted goes on where it was, and machines can share the files.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

_BLOCK_BYTES = 1 << 20
_COMPRESSION = 3
"""Bytes of text in a byte of a compressed file, about; for estimates only."""
_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Document:
    """One text. Its name, which need not be unique, decides the split."""

    name: str
    blocks: Iterable[str]
    """The text, in one or several pieces."""


@runtime_checkable
class Corpus(Protocol):
    """Documents in files."""

    @property
    def files(self) -> Sequence[str]:
        """Names of the files, in order."""
        ...

    @property
    def weights(self) -> Sequence[float]:
        """Share of each file in the work, for the time left."""
        ...

    @property
    def num_bytes(self) -> int | None:
        """Bytes of text, about; None where nobody knows."""
        ...

    @property
    def progress(self) -> tuple[int, float]:
        """The file being read, and the part of it that has been, in [0, 1]."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the documents do, as far as can be told without reading them."""
        ...

    def read(self, file: int, skip: int) -> Iterator[Document]:
        """The documents of a file from number `skip` on.

        Raises:
          ValueError: the file is damaged, or lacks the field with the text.
        """
        ...


class Texts:
    """Texts in memory, as one file: pairs (name, text)."""

    files = ("",)
    weights = (1.0,)

    def __init__(self, documents: Iterable[tuple[str, str]]) -> None:
        """Hold these documents."""
        self._documents = list(documents)
        self.num_bytes = sum(len(text) for _, text in self._documents)
        self.progress = (0, 0.0)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of names and texts."""
        return _digest(f"{name}\0{text}" for name, text in self._documents)

    def read(self, file: int, skip: int) -> Iterator[Document]:
        """The documents from number `skip` on."""
        for number, (name, text) in enumerate(self._documents[skip:], skip):
            self.progress = file, number / len(self._documents)
            yield Document(name, (text,))


class LocalFiles:
    """Local files. A `.txt` is one document, each line of a `.jsonl` and row of a `.parquet` one.

    The name of a document is the path of its file relative to the directory that all files share,
    and its number in the file where that has several.

    Args:
      patterns: paths or globs (`~` and `**` work).
      text_field: where the text is in a line or row.

    Raises:
      FileNotFoundError: a pattern matches no file.
      ValueError: a file is of another kind than those named above.
      ImportError: a file needs a library of the extra `hf`.
    """

    def __init__(self, patterns: Sequence[str], *, text_field: str = "text") -> None:
        """Find the files."""
        self._paths = [Path(path) for path in _matches(patterns)]
        self._text_field = text_field
        for path in self._paths:
            _check_kind(path)
        root = os.path.commonpath([path.absolute().parent for path in self._paths])
        self.files = [
            Path(os.path.relpath(path.absolute(), root)).as_posix() for path in self._paths
        ]
        sizes = [path.stat().st_size for path in self._paths]
        self.weights = [float(max(size, 1)) for size in sizes]
        self.num_bytes = sum(map(_text_bytes, self._paths, sizes))
        self.progress = (0, 0.0)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of names, sizes and times of change of the files, and of the field."""
        states = [path.stat() for path in self._paths]
        listing = [
            f"{n} {s.st_size} {s.st_mtime_ns}" for n, s in zip(self.files, states, strict=True)
        ]
        return _digest([self._text_field, *listing])

    def read(self, file: int, skip: int) -> Iterator[Document]:
        """The documents of a file from number `skip` on; see `Corpus.read`."""
        name = self.files[file]
        self.progress = file, 0.0
        match self._paths[file].suffix:
            case ".txt":
                if skip == 0:
                    yield Document(name, self._read_text(file))
                return
            case ".parquet":
                rows = self._read_parquet(file)
            case _:
                rows = self._read_lines(file)
        for number, text in enumerate(rows):
            if number >= skip:
                yield Document(f"{name}:{number}", (text,))

    def _read_text(self, index: int) -> Iterator[str]:
        path = self._paths[index]
        decoder = codecs.getincrementaldecoder("utf-8")()
        size = max(path.stat().st_size, 1)
        with path.open("rb") as file:
            while True:
                block = file.read(_BLOCK_BYTES)
                self.progress = index, file.tell() / size
                try:
                    yield decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, file.tell() - len(error.object) + error.start) from error
                if not block:
                    return

    def _read_lines(self, index: int) -> Iterator[str]:
        path = self._paths[index]
        size = max(path.stat().st_size, 1)
        with path.open("rb", buffering=_BLOCK_BYTES) as raw, _decompressed(raw, path) as file:
            try:
                for number, line in enumerate(file):
                    self.progress = index, raw.tell() / size
                    if not line.isspace():
                        yield _text_of_line(line, self._text_field, f"{path}, line {number + 1}")
            except (EOFError, OSError, zlib.error) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # the disk's, not the decompressor's
                raise ValueError(
                    f"{path} is damaged or cut short ({error}); copy or download it again."
                ) from error

    def _read_parquet(self, index: int) -> Iterator[str]:
        path = self._paths[index]
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                if self._text_field not in file.schema_arrow.names:
                    raise _no_field(self._text_field, file.schema_arrow.names, str(path))
                rows, total = 0, max(file.metadata.num_rows, 1)
                for batch in file.iter_batches(1024, columns=[self._text_field]):
                    rows += batch.num_rows
                    self.progress = index, rows / total
                    yield from (
                        text_of(v, self._text_field, str(path)) for v in batch[0].to_pylist()
                    )
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is no Parquet file, or a damaged one ({error}).") from error


class PythonSources:
    """The standard library of the running interpreter, one document a file.

    Leaves out installed packages, tests, and files that are not UTF-8.
    """

    def __init__(self) -> None:
        """List the files."""
        self._root = python_root()
        self.files = _python_names(self._root)
        self.weights = [float(max((self._root / f).stat().st_size, 1)) for f in self.files]
        self.num_bytes = int(sum(self.weights))
        self.progress = (0, 0.0)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over names and sizes of the sources; cheaper than over their text."""
        sizes = [(self._root / name).stat().st_size for name in self.files]
        listing = [f"{name} {size}" for name, size in zip(self.files, sizes, strict=True)]
        return _digest([f"Python {platform.python_version()}", *listing])

    def read(self, file: int, skip: int) -> Iterator[Document]:
        """The text of a file, if it is UTF-8."""
        self.progress = file, 0.0
        name = self.files[file]
        with contextlib.suppress(UnicodeDecodeError, OSError):
            texts = [(self._root / name).read_bytes().decode()]
            yield from [Document(name, texts)][skip:]


def python_root() -> Path:
    """Directory of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def text_of(value: Any, field: str, where: str) -> str:
    """The text in a field's value; None is an empty text.

    Raises:
      ValueError: it is no text.
    """
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise ValueError(
            f"the field {field!r} of {where} holds a {type(value).__name__}, not text; name "
            "another field by --text-field."
        )
    return value


def _no_field(field: str, fields: Iterable[str], where: str) -> ValueError:
    return ValueError(
        f"{where} has no field {field!r}; name the one with the text by --text-field. It has "
        f"{', '.join(fields) or 'none'}."
    )


def _matches(patterns: Sequence[str]) -> list[str]:
    paths: set[str] = set()
    for pattern in map(os.path.expanduser, patterns):
        matches = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
        files = [match for match in matches if Path(match).is_file()]
        if not files:
            raise FileNotFoundError(f"no file matches {pattern!r}; check the path or the pattern.")
        paths.update(files)
    return sorted(paths)


def _check_kind(path: Path) -> None:
    if not path.name.endswith(_SUFFIXES):
        raise ValueError(
            f"{path} is no text to prepare: its name must end in {', '.join(_SUFFIXES)}."
        )
    if path.suffix in (".parquet", ".zst"):
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"{path} needs pyarrow; install it with `pip install 'maxmars[hf]'`."
            ) from error


def _text_bytes(path: Path, size: int) -> int:
    return size if path.suffix in (".txt", ".jsonl") else size * _COMPRESSION


def _decompressed(raw: BinaryIO, path: Path) -> io.BufferedIOBase | BinaryIO:
    match path.suffix:
        case ".gz":
            return io.BufferedReader(gzip.GzipFile(fileobj=raw), _BLOCK_BYTES)  # type: ignore
        case ".zst":
            import pyarrow

            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
            return io.BufferedReader(stream, _BLOCK_BYTES)  # type: ignore
    return raw


def _text_of_line(line: bytes, field: str, where: str) -> str:
    try:
        row = json.loads(line.decode())
    except ValueError as error:  # also UnicodeDecodeError
        raise ValueError(f"{where} is no JSON ({error}).") from error
    if not isinstance(row, dict) or field not in row:
        raise _no_field(field, row if isinstance(row, dict) else (), where)
    return text_of(row[field], field, where)


def _not_utf8(path: Path, byte: int) -> ValueError:
    return ValueError(f"{path} is not UTF-8 (byte {byte}); convert it, for example with iconv.")


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
