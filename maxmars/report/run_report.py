"""The report of any runs: their curves, and where each ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maxmars.metrics import json_number
from maxmars.report.curves import Line
from maxmars.report.document import Document, Picture, Section, Table
from maxmars.report.figures import draw_losses


def write_run_report(lines: Sequence[Line], out: Path) -> None:
    """Write `report.md`, `report.html`, `report.json` and `figures/` into a directory.

    Raises:
      ImportError: matplotlib is not installed.
    """
    pictures = []
    for against, of in (("tokens", "tokens"), ("time", "time of the steps (number times median)")):
        path = out / "figures" / f"loss_{against}"
        if draw_losses(lines, path, against=against):
            caption = f"Loss against {of}; bands reach from the lowest to the highest seed."
            pictures.append(Picture(path=path, caption=caption))
    document = Document(
        title=f"Runs: {', '.join(line.name for line in lines)}",
        sections=(
            Section(title="Runs", parts=(_table(lines),)),
            Section(title="Figures", parts=tuple(pictures)),
        ),
    )
    document.write(out, [_json(line) for line in lines])


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


def _json(line: Line) -> dict:
    return {
        "name": line.name,
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
