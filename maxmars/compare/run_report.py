"""The reports of single runs, and the parts that reports of comparisons share with them: figures of
lines, `curves.csv`, and the check that a report replaces only one of the same runs (`check_out`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from etils import epath

from maxmars.checkpoint.journal import read_journal
from maxmars.compare.curves import (
    BITS_PER_BYTE,
    LOGGED,
    NAMES,
    TRAINING_LOSS,
    VALIDATION_LOSS,
    Line,
    Recorded,
    norms_by_component,
    norms_by_layer,
    shown_names,
)
from maxmars.compare.figures import draw_lines, why_no_figures
from maxmars.compare.tables import (
    NONE,
    csv_table,
    escape_markdown,
    fold,
    markdown_table,
    print_table,
)
from maxmars.config.numbers import duration
from maxmars.distributed.files import read_text, write_text
from maxmars.train.journal import ACTIVITIES, run_seconds, sessions_of, shares

Format = Literal["png", "pdf", "svg"]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Directory, format and note of a report's figures."""

    out: Path
    """Directory of the report."""
    format: Format
    folder: str = ""
    """Folder below `figures`."""
    note: str = ""
    """Text above each figure."""

    def path(self, name: str) -> Path:
        return self.out / "figures" / self.folder / f"{name}.{self.format}"

    def image(self, name: str, caption: str) -> str:
        """A figure in the Markdown of the report, with a caption."""
        shown = "" if self.format == "pdf" else "!"  # Markdown shows no PDF
        link = self.path(name).relative_to(self.out).as_posix()
        return f"{shown}[{name.replace('_', ' ')}]({link})\n\n{caption}".strip()


def write_run_report(
    lines: Sequence[Line], out: Path, workdirs: Mapping[str, epath.Path], format: Format = "png"
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
        ({"run": line.name, "number": str(number)}, run)
        for line in lines
        for number, run in enumerate(line.runs, 1)
    )
    write_text(out / "curves.csv", curves_csv(recorded))
    write_markdown(out, blocks)


def origin_of(workdirs: Iterable[epath.Path]) -> str:
    """The sentence of a report's page on what it is of."""
    named = sorted({escape_markdown(str(workdir)) for workdir in workdirs})
    return f"Made by `maxmars report` of {', '.join(named)}."


def check_out(out: Path, origin: str) -> None:
    """Check that nothing is overwritten but an earlier report of the same runs.

    Args:
      out: the directory of the new report.
      origin: the sentence by which an earlier page says that it is of the same runs.

    Raises:
      FileExistsError: `out` holds something else by the name of a part of the report.
    """
    existing = [name for name in ("report.md", "figures") if (out / name).exists()]
    if existing and origin not in (read_text(out / "report.md") or "").splitlines():
        raise FileExistsError(
            f"{out} holds {' and '.join(existing)} already, not as a report of the same runs; move "
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
    several = any(line.runs[1:] for line in lines)
    thin = " Thin: each seed; thick: their mean." if several else ""
    # Losses are compared with losses of the same kind.
    losses = {line.loss for line in lines}
    loss = VALIDATION_LOSS if VALIDATION_LOSS in losses else TRAINING_LOSS
    validated = [line for line in lines if line.loss == loss]
    never = _names([line for line in lines if line.loss != loss])
    never = f" Without evaluations, so not drawn: {never}." if never else ""
    untimed = _names([line for line in validated if line.seconds_per_step is None])
    untimed = f" Not drawn, as no step was timed: {untimed}." if untimed else ""
    for against, ending in (
        ("tokens", f" against tokens.{thin}{never}"),
        ("time", f" against their number of steps times its median time.{thin}{never}{untimed}"),
    ):
        path = figures.path(f"loss_{against}")
        drawn = {loss: NAMES[loss]}
        if draw_lines(validated, path, drawn, against=against, note=figures.note):
            yield figures.image(path.stem, f"{NAMES[loss].capitalize()}{what}{ending}")
    for name, metrics, columns, text in (
        ("norms", LOGGED, 2, "Training losses, learning rates and norms"),
        ("norms_by_component", norms_by_component(lines), 4, "Norms by component of the model"),
    ):
        if draw_lines(lines, figures.path(name), metrics, columns=columns, note=figures.note):
            ending = (
                "Thin: every run as it was logged; thick: a mean over seeds and, of losses and "
            )
            ending += "gradient norms, a sixteenth of the run."
            yield figures.image(
                name, f"{text}{what}, of runs whose metrics.jsonl is there. {ending}"
            )
    over_layers, metrics = norms_by_layer(lines)
    path = figures.path("norms_by_layer")
    if draw_lines(over_layers, path, metrics, against="layers", columns=3, note=figures.note):
        ending = f"each the median over the steps that were logged.{thin}"
        yield figures.image(path.stem, f"Norms of each layer's matrices{what}, {ending}")


def _names(lines: Sequence[Line]) -> str:
    return escape_markdown(", ".join(line.name for line in lines))


_RUN_COLUMNS = ("run", "tokens", "training", "validation", "lowest", "step, ms", "bits/byte")


def _run_table(lines: Sequence[Line]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """`_RUN_COLUMNS`, and a row for each line; without bits per byte where no run has them."""
    rows, shown = [], shown_names(lines)
    for line in lines:
        _, tokens, means = line.mean(line.loss)
        final = lowest = training = bits = step = NONE
        if line.loss == VALIDATION_LOSS:
            final, lowest = f"{means[-1]:.4f}", f"{np.fmin.reduce(means):.4f}"
        if line.runs[0].step_time_s is not None:
            step = f"{1000 * line.runs[0].step_time_s:.1f}"
        # The loss of a single batch is noise, so a run's last twentieth is averaged.
        if losses := [values for *_, values in line.points(TRAINING_LOSS)]:
            late = [float(np.mean(each[-max(1, len(each) // 20) :])) for each in losses]
            training = f"{np.mean(late):.4f}"
        if last := [values[-1] for *_, values in line.points(BITS_PER_BYTE)]:
            bits = f"{np.mean(last):.4f}"
        rows.append((shown[line.name], f"{tokens[-1]:,.0f}", training, final, lowest, step, bits))
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


def curves_csv(runs: Iterable[tuple[Mapping[str, str], Recorded]]) -> str:
    """The records of runs as CSV, a line for each step, with the metrics' own names.

    Args:
      runs: for each run labels, which tell it from others, and its record.
    """
    rows: list[dict[str, Any]] = []
    for labels, run in runs:
        by_step: dict[int, dict[str, Any]] = {}
        for metric, points in run.points.items():
            for step, tokens, value in points:
                seconds = step * run.step_time_s if run.step_time_s else None
                start = {**labels, "step": step, "tokens": tokens, "seconds": seconds}
                by_step.setdefault(step, start)[metric] = value
        rows += [by_step[step] for step in sorted(by_step)]
    # Labels, step, tokens and seconds, then all metrics by name.
    first = [*rows[0]][: [*rows[0]].index("seconds") + 1] if rows else []
    columns = [*first, *sorted({name for row in rows for name in row} - set(first))]
    return csv_table(columns, [[row.get(name) for name in columns] for row in rows])


def write_markdown(directory: Path, blocks: Sequence[str]) -> None:
    write_text(directory / "report.md", "\n\n".join(blocks) + "\n")
