"""Documents in files of several: JSON Lines, JSON, CSV, Parquet, Arrow, a text with separators.

`rows_of` yields the rows of a file in bounded memory, whatever the size of the file. A row is
parsed only when its text is requested (`Row.text`), so that a bad row can be left out and the next
one read. Every row knows two positions: `offset` is part of the name of the document, which decides
its split; `describe` is for people, and costs a second pass over the file for the lines of a range.
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

from maxmars.config.checks import from_json
from maxmars.config.data import COMPRESSIONS, DELIMITED, JSON, KINDS, TABLES, TEXT
from maxmars.config.errors import about, needs_extra
from maxmars.distributed.files import is_remote

BLOCK_BYTES = 1 << 20
_MAX_ROW_BYTES = 1 << 26  # a longer row might not fit into the memory of a worker
_TABLE_ROWS = 32  # of Parquet in memory at once, beside their page
_FIRST_BAD = 3
_TOO_LONG = (
    f"it is longer than {_MAX_ROW_BYTES / 1e6:.0f} MB; make it several documents, or a .txt file "
    "of its own, which may have any size."
)
_TOO_DEEP = "it is nested too deeply to be read as JSON."
_JSON_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Row:
    """A document of a file, not yet parsed."""

    offset: int
    """Bytes of the file, or rows, before this one; part of the document's name."""
    describe: Callable[[], str]
    """The position for people, like "line 12"."""
    text: Callable[[], str]
    """The text of the row; raises ValueError if the row is bad."""


OnBad = Callable[[ValueError], None]
"""Gets the error of a bad row; raises the error, or returns to leave the row out."""


@dataclass(frozen=True)
class Skipped:
    """Count of bad lines and rows that were left out."""

    count: int = 0
    first: tuple[str, ...] = ()
    """Positions and errors of the first ones."""

    def __add__(self, other: Skipped) -> Skipped:
        return Skipped(self.count + other.count, (*self.first, *other.first)[:_FIRST_BAD])

    def __str__(self) -> str:
        more = ", ..." * (self.count > len(self.first))
        return f"{self.count:,} bad lines or rows ({'; '.join(self.first)}{more})"

    def check_limit(self, limit: int) -> None:
        """Raise ValueError if more rows are bad than the user allows."""
        if self.count > limit:
            raise ValueError(
                f"{self} are more than --skip-bad {limit:,} leaves out; correct them or give a "
                "larger number."
            )


def kind_of(path: str) -> tuple[str, str]:
    """The file name's ending without compression, and the ending of the compression or "".

    Raises:
      ValueError: no file of this ending can be read.
      ImportError: the ending needs the extra `hf`.
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
    """The offset and the text of each row of a file; `on_bad` as in `Corpus.read`."""
    for row in rows:
        try:
            text = row.text()
        except ValueError as error:
            error.add_note(f"{name}, {row.describe()}")
            if on_bad is None:
                raise
            on_bad(error)
        else:
            yield row.offset, text


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
      open_file: opens the file at its first byte.
      path: its ending is the kind of the file.
      bounds: from the number of bytes, or of Parquet's row groups, to the first of the range and
        the first after it; None reads all. See `FileRange.of`.
      field: the field of a row with the text. A dot leads into a field: `document.text`.
      separator: text between the documents of a `.txt`.

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
                # A record is of the range that has its first byte, also if it ends beyond.
                start = _first_after(raw, mark, start - len(mark), size)
            raw.seek(start)
        with decompressed(raw, compression) as file:
            if kind in DELIMITED:
                yield from _delimited_rows(file, field)
            elif kind in TEXT:
                for offset, record in _records(file, separator, start, end):
                    yield Row(offset, partial("byte {:,}".format, offset), partial(_text, record))
            elif kind in JSON and not _is_json_lines(file):
                yield from _json_rows(file, field)
            else:

                @cache  # the file is read up to `start` for this, once, and only for a bad row
                def lines_before() -> int:
                    with open_file() as again:
                        return _count_lines(again, start)

                for number, (offset, record) in enumerate(_records(file, b"\n", start, end), 1):
                    if record.strip():
                        describe = partial(_line, number, lines_before)
                        yield Row(offset, describe, partial(_text_of_line, record, field))


def _line(number: int, lines_before: Callable[[], int]) -> str:
    return f"line {number + lines_before():,}"


@contextlib.contextmanager
def reading(path: str) -> Generator[None]:
    """Name the file in errors; raise ValueError for those of decompressors and parsers."""
    with about(path):
        try:
            yield
        except (EOFError, OSError, csv.Error, zlib.error, lzma.LZMAError) as error:
            is_readers = not isinstance(error, OSError) or error.errno is None
            if (is_remote(path) and type(error) is OSError) or not is_readers:
                raise  # an error of the disk or the bucket
            what = "damaged or cut short"
            if "too much memory" in str(error):  # zstd's, of the frame's header
                what = (
                    "compressed with a window over 128 MB (zstd again with --long=27), or damaged"
                )
            raise ValueError(f"it is {what} ({error}); copy or download it again.") from error


def decompressed(raw: io.BufferedReader, compression: str) -> io.BufferedReader:
    """The decompressed bytes of a file; `compression` is the ending of its name, or ""."""
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
    """The byte after the first mark from `position` on, or `end` if there is none before it."""
    position = max(position, 0)
    file.seek(position)
    before = b""
    while position < end and (block := file.read(BLOCK_BYTES)):
        before += block
        position += len(block)
        index = before.find(mark)
        if index >= 0:
            return min(position - len(before) + index + len(mark), end)
        before = before[max(len(before) - len(mark) + 1, 0) :]
    return end


def _records(
    file: io.BufferedReader, separator: bytes, offset: int, end: int | None
) -> Iterator[tuple[int, bytes]]:
    """The records that begin before `end`, each with the offset of its first byte.

    A record over the size limit is cut just past it, so that `_decode` refuses the record.
    """
    rest, dropped = b"", 0  # the record that has no end yet, and its bytes that were dropped
    while end is None or offset < end:
        # Blocks grow with the rest: a long record is copied once for each doubling, not each block.
        block = file.read(max(BLOCK_BYTES, len(rest)))
        if not block:
            break
        *records, rest = (rest + block).split(separator)
        for record in records:
            if end is not None and offset >= end:
                return
            yield offset, record
            offset, dropped = offset + len(record) + dropped + len(separator), 0
        if len(rest) > _MAX_ROW_BYTES:
            # The last bytes stay: they may be the first half of a separator.
            cut = rest[: _MAX_ROW_BYTES + 1] + rest[len(rest) - len(separator) + 1 :]
            dropped, rest = dropped + len(rest) - len(cut), cut
    if rest and (end is None or offset < end):
        yield offset, rest


def _decode(record: bytes) -> str:
    """The characters of a record; ValueError if it is not UTF-8 or too long."""
    if len(record) > _MAX_ROW_BYTES:
        raise ValueError(_TOO_LONG)
    return record.removeprefix(codecs.BOM_UTF8).decode()


def _text(record: bytes) -> str:
    """The text of a record, without line breaks at its ends: a separator may be a line."""
    return _decode(record).strip("\r\n")


def _count_lines(file: io.BufferedReader, end: int) -> int:
    count = 0
    while end > 0 and (block := file.read(min(BLOCK_BYTES, end))):
        count, end = count + block.count(b"\n"), end - len(block)
    return count


# --- JSON ----------------------------------------------------------------------------------------


def _text_of_line(record: bytes, field: str) -> str:
    try:
        row = json.loads(_decode(record))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    return text_in(row, field)


def _is_json_lines(file: io.BufferedReader) -> bool:
    """Whether a .json file is JSON Lines in fact, as many are, and no array or single object."""
    line, newline, _ = file.peek(BLOCK_BYTES).lstrip(_JSON_SPACE.encode()).partition(b"\n")
    try:
        return isinstance(json.loads(_decode(line)), dict)
    except (ValueError, RecursionError):
        return line.startswith(b"{") and not newline  # one long line


def _json_rows(file: io.BufferedReader, field: str) -> Iterator[Row]:
    """The elements of an array, or values one after another, parsed block by block: a value that
    reaches the end of a block waits for the next one."""
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
                if after == len(waiting) and block:  # `1` may go on as `12` in the next block
                    break
                text_of = partial(text_in, value, field)
                yield Row(number, partial("element {:,}".format, number), text_of)
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
    """The rows of a CSV file; the first one names the columns."""
    csv.field_size_limit(_MAX_ROW_BYTES)  # by default 128 kB
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        first = text.readline()
        delimiter = max(",;\t|", key=first.count)
        reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
        names = next(reader, [])
        if field not in names:
            raise ValueError(f"it {no_field(field, names)}")
        column, number = names.index(field), 0

        def text_of(cells: list[str] | csv.Error) -> str:
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
                if "field limit" in str(error):  # the end of the row is unknown: none can follow
                    error.add_note(f"line {reader.line_num:,}")
                    raise ValueError(_TOO_LONG) from error
                cells = error
            if cells is None:
                return
            if cells:
                describe = partial("line {:,}".format, reader.line_num)
                yield Row(number, describe, partial(text_of, cells))
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
            if top not in batch.schema.names:  # Parquet's schema has `top`, but not `field` in it
                raise ValueError(f"it {no_field(field, names)}")
            for value in batch.column(top):
                text_of = partial(_text_of_cell, value, top, field)
                yield Row(row, partial("row {:,}".format, row), text_of)
                row += 1


def _text_of_cell(value: Any, top: str, field: str) -> str:
    return text_in({top: value.as_py()}, field)


# --- Fields --------------------------------------------------------------------------------------


def text_in(row: Any, field: str) -> str:
    """The text in a field of a row, or the row itself if it is a text; None counts as "".

    Raises:
      ValueError: the row lacks the field, or the field has no text.
    """
    if isinstance(row, str):
        return row
    value: Any = from_json(dict[str, Any], row) if not isinstance(row, Mapping) else row
    # A column may have a dot in its own name.
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
    """Words of an error for a row without the text's field."""
    names = ", ".join(fields) or "none"
    return f"has no field {field!r}; name the one with the text by --text-field. It has {names}."
