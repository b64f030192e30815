"""The report of any runs: their curves, and where each ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from maxmars.goodput import ACTIVITIES, Session, run_seconds, shares
from maxmars.metrics import duration, json_number
from maxmars.report.curves import Line
from maxmars.report.document import Document, Picture, Section, Table
from maxmars.report.figures import draw_losses


def write_run_report(
    lines: Sequence[Line], out: Path, sessions: Mapping[str, list[Session]] | None = None
) -> None:
    """Write `report.md`, `report.html`, `report.json` and `figures/` into a directory.

    Args:
      lines: what to draw.
      out: the directory.
      sessions: of the runs, by the names of their lines, whose time is shown in a table.

    Raises:
      ImportError: matplotlib is not installed.
    """
    pictures = []
    for against, of in (("tokens", "tokens"), ("time", "time of the steps (number times median)")):
        path = out / "figures" / f"loss_{against}"
        if draw_losses(lines, path, against=against):
            caption = f"Loss against {of}; bands reach from the lowest to the highest seed."
            pictures.append(Picture(path=path, caption=caption))
    times = {name: run_seconds(found) for name, found in (sessions or {}).items() if found}
    document = Document(
        title=f"Runs: {', '.join(line.name for line in lines)}",
        sections=(
            Section(title="Runs", parts=(_table(lines),)),
            *_where_the_time_went(times),
            Section(title="Figures", parts=tuple(pictures)),
        ),
    )
    document.write(out, [_json(line, times.get(line.name)) for line in lines])


def _where_the_time_went(times: Mapping[str, Mapping[str, float]]) -> Iterator[Section]:
    """A table of shares of wall-clock time, a column a run; none where nothing is known."""
    if not times:
        return
    known = {name: shares(seconds) for name, seconds in times.items()}
    rows = [("time", *(duration(sum(seconds.values())) for seconds in times.values()))]
    rows += [
        (text, *(f"{found[activity]:.1%}" for found in known.values()))
        for activity, text in ACTIVITIES.items()
        if any(found[activity] for found in known.values())
    ]
    table = Table(columns=("share of the time", *known), rows=tuple(rows))
    yield Section(title="Where the time went", parts=(table,))


def _table(lines: Sequence[Line]) -> Table:
    columns = ("run", "loss of", "tokens", "final loss", "lowest loss", "step")
    return Table(columns=columns, rows=tuple(map(_row, lines)))


def _row(line: Line) -> tuple[str, ...]:
    tokens, losses = line.points
    means = losses.mean(axis=0)
    first = line.curves[0]
    step = "–" if first.step_time_s is None else f"{1000 * first.step_time_s:.1f} ms"
    final, lowest = f"{means[-1]:.4f}", f"{means.min():.4f}"
    return line.name, first.loss_name, f"{tokens[-1]:,}", final, lowest, step


def _json(line: Line, seconds: Mapping[str, float] | None) -> dict:
    return {
        "name": line.name,
        "seconds": seconds,
        "curves": [
            {
                "loss_of": curve.loss_name,
                "tokens": curve.tokens,
                "losses": list(map(json_number, curve.losses)),
                "step_time_s": curve.step_time_s,
            }
            for curve in line.curves
        ],
    }
