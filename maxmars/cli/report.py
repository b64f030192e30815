"""`maxmars report`: the curves of runs, as figures and one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from maxmars.cli.config_file import UsageError

if TYPE_CHECKING:
    from maxmars.report.curves import Line


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Draw the losses of runs against tokens and time, as figures and one HTML page.

    A RUN is a working directory of `maxmars train`, or of `maxmars compare`, of which each
    contender is drawn at its best rate. One comparison alone gets its whole report again, also
    before it is finished.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """What to draw, such as runs/quickstart."""
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for report.html, report.md, report.json and figures; None is RUN/report, or
    the comparison itself."""


def run(argv: list[str]) -> int:
    """Run `maxmars report`."""
    arguments = tyro.cli(ReportArguments, args=argv, prog="maxmars report")
    from maxmars.compare.record import RECORD
    from maxmars.goodput import read_sessions
    from maxmars.report.run_report import write_run_report

    runs = [Path(name).expanduser().absolute() for name in arguments.runs]
    if not runs:
        raise UsageError("maxmars report needs a RUN: the working directory of one.")
    if len(runs) == 1 and (runs[0] / RECORD).is_file() and arguments.out is None:
        from maxmars.compare.report_files import write_report
        from maxmars.compare.terminal import print_summary

        write_report(runs[0])
        print_summary(runs[0])
        return 0
    if len(runs) > 1 and arguments.out is None:
        raise UsageError("maxmars report of several runs needs --out DIR: where to?")
    lines = [line for path in runs for line in _lines(path, several=len(runs) > 1)]
    out = runs[0] / "report" if arguments.out is None else Path(arguments.out).absolute()
    write_run_report(lines, out, {path.name: read_sessions(path) for path in runs})
    print(f"report: {out / 'report.html'}")
    return 0


def _lines(path: Path, *, several: bool) -> list[Line]:
    import dataclasses

    from maxmars.compare.record import RECORD
    from maxmars.compare.report_files import best_lines
    from maxmars.compare.summary import summarize
    from maxmars.report.curves import Line, read_run

    if not (path / RECORD).is_file():
        _, curve = read_run(path)
        return [Line(name=path.name, curves=(curve,))]
    found = best_lines(summarize(path))
    if not several:
        return found
    return [dataclasses.replace(line, name=f"{path.name}: {line.name}") for line in found]
