"""What `maxmars compare` and `maxmars report` print of a comparison, in 80 columns."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from maxmars.compare.report_files import extend_notes, format_interval
from maxmars.compare.statistics import Interval
from maxmars.compare.summary import Outcome, Summary, summarize

_COLUMNS = ("", "rate", "loss", "- baseline", "p", "tokens", "time", "ms")


def print_summary(workdir: Path, console: Console | None = None) -> None:
    """Print what a comparison found, and where its report is.

    Raises:
      FileNotFoundError, ValueError: see `summarize`.
    """
    console = console or Console(highlight=False)
    summary = summarize(workdir)
    rows = [_row(outcome, summary) for outcome in summary.outcomes]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, column in enumerate(_COLUMNS):
        width = max(map(len, (column, *(row[index] for row in rows))))
        if index == 0:  # a long name is cut before a number is
            table.add_column(column, no_wrap=True)
        else:
            table.add_column(column, justify="right", min_width=width)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    baseline = summary.comparison.baseline
    text = f"tokens and time: to the final loss of {baseline}, as shares of its own; ±: 95 %"
    console.print(text, markup=False, soft_wrap=True)
    if summary.num_missing:
        console.print(f"unfinished: {summary.num_missing} cells or more are missing")
    for note in extend_notes(summary):
        console.print(note, markup=False, soft_wrap=True)
    console.print(f"report: {workdir / 'report.html'}", markup=False, soft_wrap=True)


def _row(outcome: Outcome, summary: Summary) -> tuple[str, ...]:
    base, test, step = summary.baseline, outcome.test, outcome.step_time_s
    return (
        outcome.contender.name,
        "" if outcome.best_rate is None else f"{outcome.best_rate:g}",
        "diverged" if outcome.loss is None else _interval(outcome.loss, "{:.4f}"),
        "" if test is None else _interval(test.difference, "{:+.4f}"),
        "" if outcome.p_adjusted is None else f"{outcome.p_adjusted:.2g}",
        _share(outcome.tokens_to_baseline, base.tokens_to_baseline),
        _share(outcome.seconds_to_baseline, base.seconds_to_baseline),
        "" if step is None else f"{1000 * step:.1f}",
    )


def _interval(found: Interval, form: str) -> str:
    return format_interval(found, form).replace(" ", "")


def _share(value: float | None, whole: float | None) -> str:
    return "" if value is None or not whole else f"{value / whole:.0%}"
