"""Tables and numbers of reports, in Markdown, LaTeX, CSV and in 80 columns.

A table is its columns and rows of text that is formatted already; each function writes one form,
and escapes names for it, since a contender's name comes from a command line.
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from maxmars.compare.statistics import Interval

NONE = "–"
"""Text of a cell without a value, in tables for people."""


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns after the first are aligned as numbers."""
    lines = [columns, ("---", *["---:"] * (len(columns) - 1)), *rows]
    return "\n".join(f"| {' | '.join(map(escape_markdown, line))} |" for line in lines)


def escape_markdown(text: str) -> str:
    """A name as one line of Markdown without markup: no table, link, code or HTML."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return re.sub(r"[\\`*|<>&\[\]]|:(?=//)", lambda match: f"&#{ord(match[0])};", line)


def latex_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A LaTeX `tabular` that needs no package, its columns aligned as those of Markdown."""
    lines = [" & ".join(map(_escape_latex, line)) + r" \\" for line in (columns, *rows)]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}"
    return "\n".join([begin, lines[0], r"\hline", *lines[1:], r"\end{tabular}"]) + "\n"


def _escape_latex(text: str) -> str:
    signs = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    signs |= {"±": r"$\pm$", "–": "--", "†": r"$\dagger$"} | {
        sign: f"\\{sign}" for sign in "&%$#_{}"
    }
    return "".join(signs.get(sign, sign) for sign in text)


def csv_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as CSV; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *rows])
    return text.getvalue()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in 80 columns, without breaking words: a name in the first column stands above
    its numbers where it has no room beside them."""
    width_of = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    gap = 2 if sum(width_of) + 2 * (len(columns) - 1) <= 80 else 1  # blanks between columns
    name_width = min(width_of[0], max(8, 80 - sum(width + gap for width in width_of[1:])))
    for index, (name, *numbers) in enumerate((columns, *rows)):
        cells = "".join(f"{n:>{w + gap}}" for n, w in zip(numbers, width_of[1:], strict=True))
        name = "".join(c if c.isprintable() else " " for c in name)
        *above, last = fold_name(name, name_width) or [""]
        if len(last) > name_width:  # one long word, which is not broken
            above, last = [*above, last], ""
        print(*above, f"{last:<{name_width}}{cells}".rstrip(), sep="\n")
        if index == 0:
            print("─" * (name_width + len(cells)))


def fold_name(name: str, width: int) -> list[str]:
    """Fold a name into lines that end after a blank, a comma or `/`; a word without these may be
    longer than the width."""
    lines = [""]
    for piece in re.findall(r"[^ ,/]*[ ,/]*", name):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines if line.strip()]


def fold(text: str) -> str:
    """Fold a sentence into lines of 80 columns."""
    return textwrap.fill(
        text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def format_interval(value: Interval, form: str, digits: int = 4) -> str:
    """The mean, and half the width of its interval if there is one."""
    mean = form.format(value.mean)
    if value.low is None or value.high is None:
        return mean
    return f"{mean} ± {(value.high - value.low) / 2:.{digits}f}"
