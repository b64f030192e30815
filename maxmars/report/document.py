"""A report of tables, figures and notes, as Markdown and as one HTML page that loads nothing."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from maxmars.metrics import write_json
from maxmars.workdir import write_text

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid #ccc; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; } img { max-width: 100%; } figcaption { color: #444; }
.scroll { overflow-x: auto; }
"""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a heading; the columns after the first are numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure, of which there is `NAME.png` and `NAME.svg`."""

    path: Path
    """Of the files, without suffix."""
    caption: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a document."""

    title: str
    parts: tuple[str | Table | Picture, ...]
    """Strings are paragraphs, with `code` in backticks."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A report."""

    title: str
    sections: tuple[Section, ...]

    def write(self, directory: Path, data: object) -> None:
        """Write `report.md`, `report.html` and, with `data`, `report.json`."""
        write_json(directory / "report.json", data)
        write_text(directory / "report.md", "\n".join(self._markdown(directory)) + "\n")
        write_text(directory / "report.html", "\n".join(self._html()) + "\n")

    def _markdown(self, directory: Path) -> Iterator[str]:
        yield f"# {self.title}"
        for section in self.sections:
            yield f"\n## {section.title}"
            for part in section.parts:
                yield ""
                if isinstance(part, Table):
                    yield from markdown_table(part)
                elif isinstance(part, Picture):
                    path = part.path.with_suffix(".png").relative_to(directory)
                    yield f"![{part.caption}]({path.as_posix()})"
                else:
                    yield part

    def _html(self) -> Iterator[str]:
        title = html.escape(self.title)
        yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
        yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
        yield f"<title>{title}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<h1>{title}</h1>"
        for section in self.sections:
            yield f"<h2>{html.escape(section.title)}</h2>"
            for part in section.parts:
                yield from _html_part(part)
        yield "</body>\n</html>"


def markdown_table(table: Table) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield _markdown_row(table.columns)
    yield f"|---|{'---:|' * (len(table.columns) - 1)}"
    for row in table.rows:
        yield _markdown_row(row)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _html_part(part: str | Table | Picture) -> Iterator[str]:
    if isinstance(part, Table):
        yield '<div class="scroll"><table>'
        yield _html_row(part.columns, "th")
        for row in part.rows:
            yield _html_row(row, "td")
        yield "</table></div>"
    elif isinstance(part, Picture):
        # As data rather than inline: elements of several inline SVGs share one set of names.
        data = base64.b64encode(part.path.with_suffix(".svg").read_bytes()).decode()
        caption = html.escape(part.caption)
        yield f'<figure><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
        yield f"<figcaption>{caption}</figcaption></figure>"
    else:
        code = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(part))
        yield f"<p>{code}</p>"


def _html_row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
