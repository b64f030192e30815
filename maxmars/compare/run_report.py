"""The reports of single runs, and what those of comparisons share with them: figures of lines, and
`curves.csv`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from maxmars.checkpoint.journal import read_journal
from maxmars.compare.curves import (
    BITS_PER_BYTE,
    LOGGED,
    TRAINING_LOSS,
    VALIDATION_LOSS,
    Curve,
    Line,
    Logged,
    norms_by_component,
    shown_names,
)
from maxmars.compare.figures import draw_losses, draw_norms, why_no_figures
from maxmars.compare.tables import (
    NONE,
    csv_table,
    escape_markdown,
    fold,
    markdown_table,
    print_table,
)
from maxmars.config.numbers import duration
from maxmars.distributed.files import Workdir, read_text, write_text
from maxmars.train.journal import ACTIVITIES, run_seconds, sessions_of, shares

Format = Literal["png", "pdf", "svg"]

Recorded = tuple[Mapping[str, str], Curve | None, Logged]
"""What tells a run from others, its curve and what it logged."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Where figures of a report go, and what they are of."""

    out: Path
    """Directory of the report."""
    format: Format
    folder: str = ""
    """Below `figures`."""
    note: str = ""
    """What stands above each."""

    def path(self, name: str) -> Path:
        return self.out / "figures" / self.folder / f"{name}.{self.format}"

    def image(self, name: str, caption: str) -> str:
        """A figure in the Markdown of the report, with a caption."""
        shown = "" if self.format == "pdf" else "!"  # Markdown shows no PDF
        link = self.path(name).relative_to(self.out).as_posix()
        return f"{shown}[{name.replace('_', ' ')}]({link})\n\n{caption}".strip()


def write_run_report(
    lines: Sequence[Line], out: Path, workdirs: Mapping[str, Workdir], format: Format = "png"
) -> None:
    """Write the report of any runs into a directory.

    Args:
      lines: the runs' curves.
      out: the directory.
      workdirs: line's name -> working directory of its run, or of its comparison.
      format: of the figures.

    Raises:
      FileExistsError: `out` holds a report already, and not an earlier one of the same runs.
    """
    origin = origin_of(workdirs.values())
    check_out(out, origin)
    sessions = {name: sessions_of(read_journal(workdir)) for name, workdir in workdirs.items()}
    seconds = {name: run_seconds(of_run) for name, of_run in sessions.items() if of_run}
    names = ", ".join(escape_markdown(line.name) for line in lines)
    blocks = [
        f"# Runs: {names}",
        origin,
        "## Runs",
        markdown_table(*_run_table(lines)),
        "Losses in nats a token: the training loss is the mean over the last twentieth of what was "
        "logged, the validation losses are the last and the lowest, and bits a byte those of the "
        "last.",
    ]
    write_markdown(out, blocks)  # first: it says whose report this is
    if seconds:
        blocks += ["## Where the time went", _time_table(seconds)]
    why_none = why_no_figures()
    figures = Figures(out=out, format=format)
    blocks += ["## Figures", *([why_none] if why_none else line_figures(lines, figures, ""))]
    blocks.append("`curves.csv` has all of it by step, and evaluations by functions of one's own.")
    recorded = (
        ({"run": line.name, "number": str(number)}, curve, logged)
        for line in lines
        for number, (curve, logged) in enumerate(zip(line.curves, line.logged, strict=False), 1)
    )
    write_text(out / "curves.csv", curves_csv(recorded))
    write_markdown(out, blocks)


def origin_of(workdirs: Iterable[Workdir]) -> str:
    """What a report is of, in a sentence of its page."""
    named = sorted({escape_markdown(str(workdir)) for workdir in workdirs})
    return f"Made by `maxmars report` of {', '.join(named)}."


def check_out(out: Path, origin: str) -> None:
    """Check that nothing is overwritten but an earlier report of the same.

    Args:
      out: the directory of the new report.
      origin: the sentence by which the page of an earlier report says that it is of the same.

    Raises:
      FileExistsError: `out` holds something else by the name of a part of the report.
    """
    taken = [name for name in ("report.md", "figures") if (out / name).exists()]
    if taken and origin not in (read_text(out / "report.md") or "").splitlines():
        raise FileExistsError(
            f"{out} holds {' and '.join(taken)} already, not as a report of the same runs; move "
            "them away, or give single runs another directory by --out."
        )


def print_lines(lines: Sequence[Line]) -> None:
    """Print how runs ended, in 80 columns."""
    print_table(*_run_table(lines))


def print_where(out: Path) -> None:
    """Print where a report is, and why it has no figures if it has none."""
    if why_none := why_no_figures():
        print(fold(why_none))
    print(f"report: {out / 'report.md'}")


def line_figures(lines: Sequence[Line], figures: Figures, what: str) -> Iterator[str]:
    """Figures of losses, rates and norms."""
    several = any(line.curves[1:] for line in lines)
    thin = " Thin: each seed; thick: their mean." if several else ""
    # Losses are compared with losses of the same kind.
    validated = [line for line in lines if line.curves[0].loss_of == VALIDATION_LOSS] or lines
    never = _names([line for line in lines if line not in validated])
    never = f" Without evaluations, so not drawn: {never}." if never else ""
    untimed = _names([line for line in validated if line.seconds_per_step is None])
    untimed = f" Not drawn, as no step was timed: {untimed}." if untimed else ""
    for against, ending in (
        ("tokens", f" against tokens.{thin}{never}"),
        ("time", f" against their number of steps times its median time.{thin}{never}{untimed}"),
    ):
        path = figures.path(f"loss_{against}")
        if validated and draw_losses(validated, path, against=against, note=figures.note):
            loss_of = validated[0].curves[0].loss_of.capitalize()
            yield figures.image(path.stem, f"{loss_of}{what}{ending}")
    for name, metrics, columns, text in (
        ("norms", LOGGED, 2, "Training losses, learning rates and norms"),
        ("norms_by_component", norms_by_component(lines), 4, "Norms by component of the model"),
    ):
        if draw_norms(lines, figures.path(name), metrics, columns=columns, note=figures.note):
            ending = (
                "Thin: every run as it was logged; thick: a mean over seeds and, of losses and "
            )
            ending += "gradient norms, a sixteenth of the run."
            yield figures.image(
                name, f"{text}{what}, of runs whose metrics.jsonl is there. {ending}"
            )


def _names(lines: Sequence[Line]) -> str:
    return escape_markdown(", ".join(line.name for line in lines))


_RUN_COLUMNS = ("run", "tokens", "training", "validation", "lowest", "step, ms", "bits/byte")


def _run_table(lines: Sequence[Line]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """`_RUN_COLUMNS`, and a row for each line; without bits per byte where no run has them."""
    rows, shown = [], shown_names(lines)
    for line in lines:
        tokens, losses = line.points
        means, curve = losses.mean(axis=0), line.curves[0]
        final = lowest = NONE
        if curve.loss_of == VALIDATION_LOSS:
            final, lowest = f"{means[-1]:.4f}", f"{np.fmin.reduce(means):.4f}"
        step = NONE if curve.step_time_s is None else f"{1000 * curve.step_time_s:.1f}"
        logged = {
            metric: [run[metric] for run in line.logged if metric in run]
            for metric in (TRAINING_LOSS, BITS_PER_BYTE)
        }
        late = [
            float(np.mean([loss for *_, loss in points[-max(1, len(points) // 20) :]]))
            for points in logged[TRAINING_LOSS]
        ]
        training = f"{np.mean(late):.4f}" if late else NONE
        last = [points[-1][-1] for points in logged[BITS_PER_BYTE]]
        bits = f"{np.mean(last):.4f}" if last else NONE
        rows.append((shown[line.name], f"{tokens[-1]:,}", training, final, lowest, step, bits))
    if all(bits == NONE for *_, bits in rows):
        return _RUN_COLUMNS[:-1], [row[:-1] for row in rows]
    return _RUN_COLUMNS, rows


def _time_table(seconds: Mapping[str, Mapping[str, float]]) -> str:
    """Shares of wall-clock time, a column a run."""
    shares_of = {name: shares(spent) for name, spent in seconds.items()}
    rows = [("time", *(duration(sum(spent.values())) for spent in seconds.values()))]
    rows += [
        (text, *(f"{of[activity]:.1%}" for of in shares_of.values()))
        for activity, text in ACTIVITIES.items()
        if any(of[activity] for of in shares_of.values())
    ]
    return markdown_table(("share of the time", *shares_of), rows)


def curves_csv(runs: Iterable[Recorded]) -> str:
    """What runs recorded, a line for each of their steps, with the metrics' own names."""
    rows: list[dict[str, Any]] = []
    for labels, curve, logged in runs:
        series = dict(logged)
        if curve is not None and curve.loss_of == VALIDATION_LOSS:
            series["eval/loss"] = list(zip(curve.steps, curve.tokens, curve.losses, strict=True))
        by_step: dict[int, dict[str, Any]] = {}
        for metric, points in series.items():
            for step, tokens, value in points:
                seconds = step * curve.step_time_s if curve and curve.step_time_s else None
                start = {**labels, "step": step, "tokens": tokens, "seconds": seconds}
                by_step.setdefault(step, start)[metric] = value
        rows += [by_step[step] for step in sorted(by_step)]
    first = [*rows[0]][: [*rows[0]].index("seconds") + 1] if rows else []
    columns = [*first, *sorted({name for row in rows for name in row} - set(first))]
    return csv_table(columns, [[row.get(name) for name in columns] for row in rows])


def write_markdown(directory: Path, blocks: Sequence[str]) -> None:
    write_text(directory / "report.md", "\n\n".join(blocks) + "\n")
