"""The documents in a file of many: lines of JSON, JSON, CSV, Parquet, Arrow, a text in parts.

`rows_of` gives them one after the other, in bounded memory. A row is read only when its text is
asked for, so that a bad one can be left out and the next one read.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from maxmars.config.checks import read_as
from maxmars.config.errors import about, needs_extra
from maxmars.distributed.files import is_remote

BLOCK_BYTES = 1 << 20
_MAX_ROW_BYTES = 1 << 26  # what is longer would not fit into the memory of some worker
_TABLE_ROWS = 32  # of Parquet that are in memory at once, beside the page that they are in
_FIRST_BAD = 3
_TOO_LONG = (
    f"it is longer than {_MAX_ROW_BYTES / 1e6:.0f} MB; make it several documents, or a .txt file "
    "of its own, which may have any size."
)
_TOO_DEEP = "it is nested too deeply to be read as JSON."
_JSON_SPACE = " \t\r\n"

TEXT, LINES, JSON = (".txt",), (".jsonl", ".ndjson"), (".json",)
DELIMITED, TABLES = (".csv", ".tsv"), (".parquet", ".arrow", ".feather")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
KINDS = (*TEXT, *LINES, *JSON, *DELIMITED, *TABLES)


@dataclass(frozen=True, slots=True)
class Row:
    """A document of a file, not yet read."""

    place: int
    """Names the document: the byte of its line in the file, or its number, from 0."""
    where: Callable[[], str]
    """Says it to people: line 12."""
    read: Callable[[], str]
    """The text; raises ValueError where the row is bad."""


OnBad = Callable[[ValueError], None]
"""Is called with the error of a bad row; may raise it, or return to leave the row out."""


@dataclass(frozen=True)
class Skipped:
    """Lines and rows that were left out because they have no text."""

    count: int = 0
    first: tuple[str, ...] = ()
    """Where the first ones are, and why they are bad."""

    def __add__(self, other: Skipped) -> Skipped:
        return Skipped(self.count + other.count, (*self.first, *other.first)[:_FIRST_BAD])

    def __str__(self) -> str:
        more = ", ..." * (self.count > len(self.first))
        return f"{self.count:,} bad lines or rows ({'; '.join(self.first)}{more})"

    def refuse_over(self, most: int) -> None:
        """See that there are not more than the user allows.

        Raises:
          ValueError: there are.
        """
        if self.count > most:
            raise ValueError(
                f"{self} are more than --skip-bad {most:,} leaves out; correct them or give a "
                "larger number."
            )


def kind_of(path: str) -> tuple[str, str]:
    """The ending that says what a file holds, and that of its compression or "".

    Raises:
      ValueError: it is none that is read.
    """
    stem, kind = os.path.splitext(path.lower())
    compression = kind if kind in COMPRESSIONS else ""
    if compression:
        kind = os.path.splitext(stem)[1]
    if kind not in KINDS or (compression and kind in TABLES):
        raise ValueError(
            f"{path} is no text to prepare: its name must end in {', '.join(KINDS)}; all but the "
            f"last three may be compressed ({', '.join(COMPRESSIONS)})."
        )
    if kind in TABLES or compression == ".zst":
        with about(path), needs_extra("hf"):
            import pyarrow  # noqa: F401
    return kind, compression


def texts_of(rows: Iterable[Row], name: str, on_bad: OnBad | None) -> Iterator[tuple[int, str]]:
    """The place and the text of each row of a file; `on_bad` as in `Corpus.read`."""
    for row in rows:
        try:
            text = row.read()
        except ValueError as error:
            error.add_note(f"{name}, {row.where()}")
            if on_bad is None:
                raise
            on_bad(error)
        else:
            yield row.place, text


def rows_of(
    open_file: Callable[[], io.BufferedReader],
    path: str,
    bounds: Callable[[int], tuple[int, int]] | None,
    *,
    field: str,
    separator: bytes,
) -> Iterator[Row]:
    """The documents of a file.

    Args:
      open_file: opens it at its first byte.
      path: its name says what it is.
      bounds: of so many bytes, or groups of rows of Parquet, the first that is wanted, and the
        first after them; None wants all.
      field: where the text is in a row. A dot leads into a field: `document.text`.
      separator: what ends a document in a text.

    Raises:
      ValueError: the file is damaged, or lacks the field.
    """
    kind, compression = kind_of(path)
    with reading(path), open_file() as raw:
        if kind in TABLES:
            yield from _table_rows(raw, kind, bounds, field)
            return
        start, end = 0, None
        if bounds is not None:
            size = raw.seek(0, io.SEEK_END)
            start, end = bounds(size)
            if start:
                mark = separator if kind in TEXT else b"\n"
                start = _first_after(raw, mark, start - len(mark), size)
            raw.seek(start)
        with decompressed(raw, compression) as file:
            if kind in DELIMITED:
                yield from _delimited_rows(file, field)
            elif kind in TEXT:
                for place, record in _records(file, separator, start, end):
                    yield Row(place, partial("byte {:,}".format, place), partial(_text, record))
            elif kind in JSON and not _begins_with_a_line_of_json(file):
                yield from _json_rows(file, field)
            else:

                @cache
                def lines_before() -> int:
                    with open_file() as again:
                        return _count_lines(again, start)

                for number, (place, record) in enumerate(_records(file, b"\n", start, end), 1):
                    if record.strip():
                        where = partial(_line, number, lines_before)
                        yield Row(place, where, partial(_text_of_line, record, field))


def _line(number: int, lines_before: Callable[[], int]) -> str:
    return f"line {number + lines_before():,}"


@contextlib.contextmanager
def reading(path: str) -> Generator[None]:
    """Name the file in errors, and say of what decompressors and readers raise what it means."""
    with about(path):
        try:
            yield
        except (EOFError, OSError, csv.Error, zlib.error, lzma.LZMAError) as error:
            is_readers = not isinstance(error, OSError) or error.errno is None
            if (is_remote(path) and type(error) is OSError) or not is_readers:
                raise  # the disk's or the bucket's
            what = "damaged or cut short"
            if "too much memory" in str(error):  # zstd's, of the frame's header
                what = (
                    "compressed with a window over 128 MB (zstd again with --long=27), or damaged"
                )
            raise ValueError(f"it is {what} ({error}); copy or download it again.") from error


def decompressed(raw: io.BufferedReader, compression: str) -> io.BufferedReader:
    """The bytes that a file had before it was compressed; `compression` is its ending, or ""."""
    if not compression:
        return raw
    if compression == ".zst":
        with needs_extra("hf"):
            import pyarrow

        opened: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
    else:
        opened = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[compression](raw)
    return io.BufferedReader(opened, BLOCK_BYTES)


# --- Ranges of bytes --------------------------------------------------------------------------


def _first_after(file: io.BufferedReader, mark: bytes, position: int, end: int) -> int:
    """The end of the first mark from `position` on; `end` if it does not lie before that."""
    position = max(position, 0)
    file.seek(position)
    before = b""
    while position < end and (block := file.read(BLOCK_BYTES)):
        before += block
        position += len(block)
        at = before.find(mark)
        if at >= 0:
            return min(position - len(before) + at + len(mark), end)
        before = before[max(len(before) - len(mark) + 1, 0) :]
    return end


def _records(
    file: io.BufferedReader, separator: bytes, place: int, end: int | None
) -> Iterator[tuple[int, bytes]]:
    """What lies between separators, with the place of its first byte, which is before `end`.

    Of a record that is longer than a row may be, so much comes that one sees it.
    """
    rest, dropped = b"", 0
    while end is None or place < end:
        # As much as is waiting, so that a long record is not copied again and again.
        block = file.read(max(BLOCK_BYTES, len(rest)))
        if not block:
            break
        *records, rest = (rest + block).split(separator)
        for record in records:
            if end is not None and place >= end:
                return
            yield place, record
            place, dropped = place + len(record) + dropped + len(separator), 0
        if len(rest) > _MAX_ROW_BYTES:
            kept = rest[: _MAX_ROW_BYTES + 1] + rest[len(rest) - len(separator) + 1 :]
            dropped, rest = dropped + len(rest) - len(kept), kept
    if rest and (end is None or place < end):
        yield place, rest


def _checked(record: bytes) -> str:
    """The characters of a record; a byte-order mark at its start is none of them."""
    if len(record) > _MAX_ROW_BYTES:
        raise ValueError(_TOO_LONG)
    return record.removeprefix(codecs.BOM_UTF8).decode()


def _text(record: bytes) -> str:
    """The text of a record between separators, which may stand on lines of their own."""
    return _checked(record).strip("\r\n")


def _count_lines(file: io.BufferedReader, end: int) -> int:
    count = 0
    while end > 0 and (block := file.read(min(BLOCK_BYTES, end))):
        count, end = count + block.count(b"\n"), end - len(block)
    return count


# --- JSON ----------------------------------------------------------------------------------------


def _text_of_line(record: bytes, field: str) -> str:
    try:
        row = json.loads(_checked(record))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    return text_in(row, field)


def _begins_with_a_line_of_json(file: io.BufferedReader) -> bool:
    """Whether a .json file is one of lines, as many are, and no array or single object."""
    line, newline, _ = file.peek(BLOCK_BYTES).lstrip(_JSON_SPACE.encode()).partition(b"\n")
    try:
        return isinstance(json.loads(_checked(line)), dict)
    except (ValueError, RecursionError):
        return line.startswith(b"{") and not newline  # one long line


def _json_rows(file: io.BufferedReader, field: str) -> Iterator[Row]:
    """The elements of an array, or values that follow each other."""
    decoder, number, is_array = json.JSONDecoder(), 0, False
    with io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        waiting = text.read(BLOCK_BYTES).lstrip(_JSON_SPACE)
        if waiting.startswith("["):
            is_array, waiting = True, waiting[1:]
        block = waiting
        while True:
            position = 0
            while True:
                while position < len(waiting) and waiting[position] in _JSON_SPACE + ",":
                    position += 1
                if position == len(waiting) or (is_array and waiting[position] == "]"):
                    break
                with about(f"element {number:,}"):
                    try:
                        value, after = decoder.raw_decode(waiting, position)
                    except RecursionError as error:
                        raise ValueError(_TOO_DEEP) from error
                    except json.JSONDecodeError:  # cut by the end of the block, or bad
                        if not block:
                            raise
                        value, after = None, len(waiting)
                    if after - position > _MAX_ROW_BYTES:
                        raise ValueError(_TOO_LONG)
                if after == len(waiting) and block:  # whose end may be in the next block
                    break
                read = partial(text_in, value, field)
                yield Row(number, partial("element {:,}".format, number), read)
                position, number = after, number + 1
            waiting = waiting[position:]
            if is_array and waiting.startswith("]"):
                return
            if not block:
                break
            block = text.read(max(BLOCK_BYTES, len(waiting)))
            waiting += block
    if is_array:
        raise ValueError(f"the array is cut short after {number:,} elements.")


# --- Tables --------------------------------------------------------------------------------------


def _delimited_rows(file: io.BufferedReader, field: str) -> Iterator[Row]:
    """The rows of a table of which the first row names the columns."""
    csv.field_size_limit(_MAX_ROW_BYTES)
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        first = text.readline()
        delimiter = max(",;\t|", key=first.count)
        reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
        names = next(reader, [])
        if field not in names:
            raise ValueError(f"it {no_field(field, names)}")
        column, number = names.index(field), 0

        def read(cells: list[str] | csv.Error) -> str:
            if isinstance(cells, csv.Error):
                raise ValueError(str(cells)) from cells
            if len(cells) != len(names):
                raise ValueError(f"it has {len(cells)} fields, but the first row {len(names)}.")
            return cells[column]

        while True:
            cells: list[str] | csv.Error | None
            try:
                cells = next(reader, None)
            except csv.Error as error:
                if "field limit" in str(error):  # where the row ends is not known then
                    error.add_note(f"line {reader.line_num:,}")
                    raise ValueError(_TOO_LONG) from error
                cells = error
            if cells is None:
                return
            if cells:
                where = partial("line {:,}".format, reader.line_num)
                yield Row(number, where, partial(read, cells))
                number += 1


def _table_rows(
    file: io.BufferedReader,
    kind: str,
    bounds: Callable[[int], tuple[int, int]] | None,
    field: str,
) -> Iterator[Row]:
    """The rows of a Parquet or Arrow file."""
    row = 0
    with contextlib.ExitStack() as stack:
        if kind == ".parquet":
            import pyarrow.parquet

            table = pyarrow.parquet.ParquetFile(
                file, buffer_size=BLOCK_BYTES, page_checksum_verification=True
            )
            stack.enter_context(table)
            names = table.schema_arrow.names
            first, last = (bounds or (lambda count: (0, count)))(table.num_row_groups)
            row = sum(table.metadata.row_group(group).num_rows for group in range(first))
            groups = list(range(first, last))
            batches = table.iter_batches(_TABLE_ROWS, row_groups=groups, columns=[field])
        else:
            import pyarrow.ipc

            is_file = file.peek(6)[:6] == b"ARROW1"
            opened = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file)
            names = opened.schema.names
            numbers = range(opened.num_record_batches) if is_file else ()
            batches = map(opened.get_batch, numbers) if is_file else opened
        top = field if field in names else field.partition(".")[0]
        if top not in names:
            raise ValueError(f"it {no_field(field, names)}")
        for batch in batches:
            if top not in batch.schema.names:  # no such field within it
                raise ValueError(f"it {no_field(field, names)}")
            for value in batch.column(top):
                read = partial(_text_of_cell, value, top, field)
                yield Row(row, partial("row {:,}".format, row), read)
                row += 1


def _text_of_cell(value: Any, top: str, field: str) -> str:
    return text_in({top: value.as_py()}, field)


# --- Fields --------------------------------------------------------------------------------------


def text_in(row: Any, field: str) -> str:
    """The text in a field of a row, or in a row that is itself a text; None is an empty text.

    Raises:
      ValueError: there is no such field, or no text in it.
    """
    if isinstance(row, str):
        return row
    value: Any = read_as(dict[str, Any], row) if not isinstance(row, Mapping) else row
    for name in [field] if field in value else field.split("."):
        if value is None:
            return ""
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"it {no_field(field, row)}")
        value = value[name]
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
