"""Tables and numbers of reports, in Markdown, LaTeX, CSV and in 80 columns."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from maxmars.compare.statistics import Interval


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns after the first are aligned as numbers."""
    lines = [columns, ("---", *["---:"] * (len(columns) - 1)), *rows]
    return "\n".join(f"| {' | '.join(map(escape_markdown, line))} |" for line in lines)


def escape_markdown(text: str) -> str:
    """A name on one line of Markdown that shows it as it is: no table, link, code or HTML."""
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
    """Print a table in 80 columns: a long name in the first is folded, a number is not."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(columns[0], overflow="fold", min_width=8)
    for index, title in enumerate(columns[1:], 1):
        width = max(map(len, (*title.split(), *(row[index] for row in rows))))
        table.add_column(title, justify="right", min_width=width)
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=80).print(table)


def fold(text: str) -> str:
    """A sentence on lines of 80 columns."""
    return textwrap.fill(
        text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def interval(value: Interval, form: str, digits: int = 4) -> str:
    """The mean, and half the width of its interval if there is one."""
    mean = form.format(value.mean)
    if value.low is None or value.high is None:
        return mean
    return f"{mean} ± {(value.high - value.low) / 2:.{digits}f}"
