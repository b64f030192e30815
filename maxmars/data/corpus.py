"""Text to prepare, in files on a disk or in a bucket, in memory, or the sources of Python.

A corpus is a list of files with documents in them. A `Run` of documents, which is a file or one of
several equal parts of a large one, can be read without what comes before it, so that runs can be
prepared in any order and on any machine. Where a run begins depends on the file alone.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from maxmars.config.checks import read_as
from maxmars.config.errors import about, needs_extra
from maxmars.distributed.files import is_remote, reporting, require_access

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 26
"""Of a document in a .jsonl file; what is longer would not fit into the memory of some worker."""
_COMPRESSION = 3
"""Bytes of text in a byte of a compressed file, about."""
_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_ROWS = 32  # of Parquet that are in memory at once, beside the page that they are in
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_LINE_BREAK = re.compile(rb"\n")


@dataclass(frozen=True)
class Run:
    """Consecutive documents of a file, or consecutive text of a document that is a file."""

    file: int
    """Index of the file in the corpus."""
    part: int = 0
    parts: int = 1
    """The run is part number `part`, from 0, of so many equal parts."""
    share: tuple[float, float] = (0.0, 1.0)
    """Of what the parts are: (0.9, 1) is the last tenth of a text, from a line break on."""
    cut_after: re.Pattern[str] | None = None
    """Where a text can be cut into parts; see `Tokenizer.cut_after`."""

    def of(self, count: int) -> tuple[int, int]:
        """The first of `count` things that belongs to the run, and the first after it."""
        return count * self.part // self.parts, count * (self.part + 1) // self.parts


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or one of several consecutive parts of it."""

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
        """Whether a file is one document, which `Run.share` and `Run.cut_after` can cut."""
        del file
        return False

    def has_parts(self, file: int) -> bool:
        """Whether a part of the documents of a file can be read by itself."""
        del file
        return False

    @abc.abstractmethod
    def read(self, run: Run) -> Iterator[Document]:
        """The documents of a run.

        Raises:
          ValueError: the file is damaged, or lacks the field with the text.
        """


class Texts(Corpus):
    """Texts in memory, as one file: pairs (name, text)."""

    def __init__(self, documents: Iterable[tuple[str, str]]) -> None:
        self._documents = list(documents)
        self.files = [""]
        self.num_bytes = [sum(len(text) for _, text in self._documents)]
        self.fingerprint = _digest(f"{name}\0{text}" for name, text in self._documents)

    def has_parts(self, file: int) -> bool:
        return True

    def read(self, run: Run) -> Iterator[Document]:
        documents = self._documents[slice(*run.of(len(self._documents)))]
        return (Document(name, (text,)) for name, text in documents)


class TextFiles(Corpus):
    """Files of text. A `.txt` is one document, each line of a `.jsonl` and row of a `.parquet` one.

    The name of a document is the path of its file relative to the directory that all files share
    and, where a file has several, its place there: the byte of its line or the number of its row.

    Args:
      patterns: paths or globs (`~` and `**` work), also of `gs://`.
      text_field: where the text is in a line or row.

    Raises:
      FileNotFoundError: a pattern matches no file.
      ValueError: a file is of another kind than those named above, or lies in another store.
      ImportError: a file needs a library of the extra `hf`, or a bucket needs the extra `gcs`.
      OSError: a bucket does not answer.
    """

    def __init__(self, patterns: Sequence[str], *, text_field: str = "text") -> None:
        found: dict[str, tuple[int, str]] = {}
        for pattern in patterns:
            found |= _matches(os.path.expanduser(pattern))
        self._paths = sorted(found)
        self._sizes = [found[path][0] for path in self._paths]
        self._text_field = text_field
        for path in self._paths:
            _check_kind(path)
        absolute = [path if is_remote(path) else os.path.abspath(path) for path in self._paths]
        root = os.path.commonpath([os.path.dirname(path) for path in absolute])
        self.files = [Path(os.path.relpath(path, root)).as_posix() for path in absolute]
        self.num_bytes = [
            size if path.endswith((".txt", ".jsonl")) else size * _COMPRESSION
            for path, size in zip(self._paths, self._sizes, strict=True)
        ]
        versions = (" ".join(map(str, found[path])) for path in self._paths)
        listing = zip(self.files, versions, strict=True)
        self.fingerprint = _digest([text_field, *(" ".join(row) for row in listing)])

    def is_text(self, file: int) -> bool:
        return self._paths[file].endswith(".txt")

    def has_parts(self, file: int) -> bool:
        return self._paths[file].endswith((".jsonl", ".parquet"))

    def read(self, run: Run) -> Iterator[Document]:
        """The documents of a run; see `Corpus.read`."""
        path, name = self._paths[run.file], self.files[run.file]
        with _reporting(path), _open(path) as file:
            if path.endswith(".txt"):
                start, end = _bounds_in_text(file, self._sizes[run.file], run)
                blocks = _decoded(file, path, start, end)
                yield Document(name, blocks, run.part == 0, run.part == run.parts - 1)
                return
            rows = self._rows(file, run) if path.endswith(".parquet") else self._lines(file, run)
            for place, text in rows:
                yield Document(f"{name}:{place}", (text,))

    def _lines(self, raw: io.BufferedReader, run: Run) -> Iterator[tuple[int, str]]:
        """The texts of the lines whose first byte lies in the run, each with that byte's number.

        Bytes of a compressed file are counted as they were before.
        """
        path, size = self._paths[run.file], self._sizes[run.file]
        start, end = 0, None
        if run.parts > 1:
            start, end = run.of(size)
            if start:
                start = _place_after(raw, _LINE_BREAK, start - 1, size) or size
        raw.seek(start)
        place, number = start, 0
        with _decompressed(raw, path) as file:
            try:
                while (end is None or place < end) and (line := file.readline(_MAX_LINE_BYTES + 1)):
                    number += 1
                    if not line.isspace():
                        row = line if place else line.removeprefix(codecs.BOM_UTF8)
                        try:
                            text = _text_of_line(row, self._text_field)
                        except ValueError as error:
                            number += _count_lines(raw, start) if start else 0
                            error.add_note(f"{path}, line {number:,}")
                            raise
                        yield place, text
                    place += len(line)
            except (EOFError, OSError, zlib.error) as error:
                is_decompressors = not isinstance(error, OSError) or error.errno is None
                if (is_remote(path) and type(error) is OSError) or not is_decompressors:
                    raise  # the disk's or the bucket's
                raise ValueError(
                    f"{path} is damaged or cut short ({error}); copy or download it again."
                ) from error

    def _rows(self, file: io.BufferedReader, run: Run) -> Iterator[tuple[int, str]]:
        """The texts in the row groups of the run, each with the number of its row in the file."""
        import pyarrow.parquet

        path, field = self._paths[run.file], self._text_field
        with about(path), pyarrow.parquet.ParquetFile(file, buffer_size=_BLOCK_BYTES) as table:
            if field not in table.schema_arrow.names:
                raise ValueError(f"it {no_field(field, table.schema_arrow.names)}")
            first, last = run.of(table.num_row_groups)
            row = sum(table.metadata.row_group(group).num_rows for group in range(first))
            groups = list(range(first, last))
            for batch in table.iter_batches(_ROWS, row_groups=groups, columns=[field]):
                for value in batch[0]:
                    with about(f"row {row:,}"):
                        text = text_of(value.as_py(), field)
                    yield row, text
                    row += 1


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

    def read(self, run: Run) -> Iterator[Document]:
        """The text of a file, if it is UTF-8."""
        name = self.files[run.file]
        with contextlib.suppress(UnicodeDecodeError, OSError):
            yield Document(name, ((self._root / name).read_bytes().decode(),))


def text_of(value: Any, field: str) -> str:
    """The text in a field's value; None is an empty text.

    Raises:
      ValueError: it is no text.
    """
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        kind = type(value).__name__
        raise ValueError(
            f"it has a value of type {kind} in the field {field!r}, not text; name another by "
            "--text-field."
        )
    return value


def no_field(field: str, fields: Iterable[str]) -> str:
    """What to say of a row without the field that has the text."""
    names = ", ".join(fields) or "none"
    return f"has no field {field!r}; name the one with the text by --text-field. It has {names}."


def _matches(pattern: str) -> dict[str, tuple[int, str]]:
    """Size and version of each file that a path or glob means."""
    if not is_remote(pattern):
        return _matches_on_disk(pattern)
    if not pattern.startswith("gs://"):
        raise ValueError(
            f"{pattern} must be files on a disk or gs://BUCKET/PATH; download them first."
        )
    require_access(pattern)
    with _reporting(pattern):
        store, path = fsspec.core.url_to_fs(pattern)
        is_directory = store.isdir(path)
        found = {path: store.info(path)} if store.isfile(path) else {}
        found = found or store.glob(f"{path}/**" if is_directory else path, detail=True)
    files = {
        f"gs://{name}": (info["size"], str(info.get("generation")))
        for name, info in found.items()
        if info["type"] == "file" and (name == path or not os.path.basename(name).startswith("."))
    }
    if is_directory:
        raise _no_directory(pattern, [name.removeprefix(f"gs://{path}/") for name in files])
    return _not_empty(files, pattern)


def _matches_on_disk(pattern: str) -> dict[str, tuple[int, str]]:
    """As `_matches`; links are followed, which the glob of fsspec leaves out."""
    path = os.path.abspath(pattern)
    if os.path.isdir(path):
        found = glob.glob("**", root_dir=path, recursive=True)
        inside = [name for name in found if os.path.isfile(os.path.join(path, name))]
        raise _no_directory(glob.escape(pattern), inside)
    names = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    if "**" in pattern:  # a link to a directory above leads to the same names again and again
        found = sorted(names, key=len, reverse=True)
        places = [(os.path.realpath(os.path.dirname(n)), os.path.basename(n)) for n in found]
        names = list(dict(zip(places, found, strict=True)).values())  # the shortest of each
    broken = [name for name in names if not os.path.exists(name)]
    if broken:
        raise FileNotFoundError(
            f"{min(broken)} is a link to a file that is not there; restore the file or delete the "
            "link."
        )
    names = [name for name in names if os.path.isfile(name)]
    status = {name: os.stat(name) for name in names}
    files = {name: (found.st_size, str(found.st_mtime)) for name, found in status.items()}
    return _not_empty(files, pattern)


def _not_empty(files: dict[str, tuple[int, str]], pattern: str) -> dict[str, tuple[int, str]]:
    if not files:
        raise FileNotFoundError(f"no file matches {pattern!r}; check the path or the pattern.")
    return files


def _no_directory(pattern: str, inside: Sequence[str]) -> IsADirectoryError:
    """What to say where a directory is given, with files of these names inside."""
    top = [name for name in inside if "/" not in name]
    kinds = [s for s in _SUFFIXES if any(name.endswith(s) for name in top or inside)]
    if not kinds:
        kinds = ", ".join(_SUFFIXES)
        return IsADirectoryError(f"{pattern} is a directory without files of text ({kinds}).")
    files = f"{pattern.rstrip('/')}/{'*' if top else '**/*'}{kinds[0]}"
    return IsADirectoryError(f"{pattern} is a directory; name its files: '{files}'.")


def _check_kind(path: str) -> None:
    if not path.endswith(_SUFFIXES):
        raise ValueError(
            f"{path} is no text to prepare: its name must end in {', '.join(_SUFFIXES)}."
        )
    if path.endswith((".parquet", ".zst")):
        with about(path), needs_extra("hf"):
            import pyarrow  # noqa: F401


def _open(path: str) -> io.BufferedReader:
    if not is_remote(path):
        return io.BufferedReader(io.FileIO(path), _BLOCK_BYTES)
    store, name = fsspec.core.url_to_fs(path)
    return io.BufferedReader(store.open(name, "rb"), _BLOCK_BYTES)


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


def _decompressed(raw: io.BufferedReader, path: str) -> io.BufferedReader:
    match Path(path).suffix:
        case ".gz":
            return io.BufferedReader(gzip.GzipFile(fileobj=raw), _BLOCK_BYTES)  # type: ignore
        case ".zst":
            import pyarrow

            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
            return io.BufferedReader(stream, _BLOCK_BYTES)  # type: ignore
    return raw


def _place_after(
    file: io.BufferedReader, pattern: re.Pattern[bytes], position: int, end: int
) -> int | None:
    """The end of the first match from `position` on; None if it does not lie before `end`.

    A match and what it looks ahead at have two bytes together, at most.
    """
    file.seek(position)
    before = b""
    while position < end and (block := file.read(_BLOCK_BYTES)):
        match = pattern.search(before + block)
        if match is not None:
            place = position - len(before) + match.end()
            return place if place < end else None
        before, position = block[-1:], position + len(block)
    return None


def _bounds_in_text(file: io.BufferedReader, size: int, run: Run) -> tuple[int, int]:
    """The bytes of a text that belong to a run."""
    low, high = (_border(file, size, share) for share in run.share)

    def bound(part: int) -> int:
        if part in (0, run.parts):
            return high if part else low
        assert run.cut_after is not None
        pattern = re.compile(run.cut_after.pattern.encode())
        return _place_after(file, pattern, low + (high - low) * part // run.parts, high) or high

    return bound(run.part), bound(run.part + 1)


def _border(file: io.BufferedReader, size: int, share: float) -> int:
    """The first line break after a share of a text; where there is none, the next character."""
    if share in (0.0, 1.0) or size < 2:
        return int(size * share)
    position = min(max(int(size * share), 1), size - 1)
    place = _place_after(file, _LINE_BREAK, position - 1, size)
    if place is None:
        file.seek(position)
        start = file.read(4)
        place = position + next((i for i, byte in enumerate(start) if byte & 0xC0 != 0x80), 4)
    return min(place, size)


def _decoded(file: io.BufferedReader, path: str, start: int, end: int) -> Iterator[str]:
    """The text between two bytes, in blocks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    file.seek(start)
    while True:
        block = file.read(min(_BLOCK_BYTES, end - start))
        start += len(block)
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            byte = start - len(error.object) + error.start
            raise ValueError(
                f"{path} is not UTF-8 (byte {byte}); convert it, for example with iconv."
            ) from error
        if not block:
            return


def _text_of_line(line: bytes, field: str) -> str:
    """The text in a line of JSON; an error says what the line is or has."""
    if len(line) > _MAX_LINE_BYTES:
        raise ValueError(
            f"it is longer than {_MAX_LINE_BYTES / 1e6:.0f} MB; make it several documents, or a "
            ".txt file, which may have any size."
        )
    try:
        row = read_as(dict[str, Any], json.loads(line.decode()))
    except RecursionError as error:
        raise ValueError("it is nested too deeply to be read as JSON.") from error
    if field not in row:
        raise ValueError(f"it {no_field(field, row)}")
    return text_of(row[field], field)


def _count_lines(file: io.BufferedReader, end: int) -> int:
    file.seek(0)
    count = 0
    while end > 0 and (block := file.read(min(_BLOCK_BYTES, end))):
        count, end = count + block.count(b"\n"), end - len(block)
    return count


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
