"""What `maxmars compare` and `maxmars report` print of a comparison."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from maxmars.compare.report_files import cost_table, extend_notes, result_table
from maxmars.compare.summary import summarize
from maxmars.report.document import Table


def print_summary(workdir: Path, console: Console | None = None) -> None:
    """Print the tables of a comparison, and where its report is.

    Raises:
      FileNotFoundError, ValueError: see `summarize`.
    """
    console = console or Console(highlight=False)
    summary = summarize(workdir)
    for table in (result_table(summary), cost_table(summary)):
        console.print(_rich(table))
    for note in extend_notes(summary):
        console.print(note, markup=False, soft_wrap=True)
    console.print(f"report: {workdir / 'report.html'}", markup=False, soft_wrap=True)


def _rich(table: Table) -> RichTable:
    found = RichTable()
    for index, column in enumerate(table.columns):
        found.add_column(column, justify="right" if index else "left")
    for row in table.rows:
        found.add_row(*row)
    return found
