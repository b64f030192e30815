"""The report of a comparison: `report.md`, `report.json`, `report.html` and `figures/`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxmars.compare.statistics import Interval
from maxmars.compare.summary import TOLERANCE, Outcome, Summary, summarize
from maxmars.config import to_dict
from maxmars.metrics import json_number
from maxmars.report.curves import Line
from maxmars.report.document import Document, Picture, Section, Table
from maxmars.report.figures import RateLine, draw_losses, draw_rates

_NONE = "–"


def write_report(workdir: Path) -> Summary:
    """Write the report of what is finished.

    Raises:
      FileNotFoundError: the workdir holds no comparison.
      ValueError: no cell is finished yet.
      ImportError: matplotlib is not installed.
    """
    summary = summarize(workdir)
    pictures = tuple(_draw(summary, workdir / "figures"))
    document = Document(
        title=f"Comparison of {', '.join(o.contender.name for o in summary.outcomes)}",
        sections=(
            Section(
                title="Result", parts=(_setting(summary), result_table(summary), *_notes(summary))
            ),
            Section(title="Cost of a step", parts=(cost_table(summary), *_cost_notes(summary))),
            Section(title="Learning rates", parts=(rate_table(summary), _rate_note())),
            Section(title="Figures", parts=pictures),
        ),
    )
    document.write(workdir, to_json(summary))
    return summary


def best_lines(summary: Summary) -> list[Line]:
    """The curves of each contender at its best rate."""
    return [o.line for o in summary.outcomes if o.line is not None]


def _draw(summary: Summary, directory: Path) -> Iterator[Picture]:
    lines = best_lines(summary)
    seeds = len(summary.comparison.seeds)
    band = f"; bands: lowest to highest of {seeds} seeds" if seeds > 1 else ""
    for against in ("tokens", "time"):
        path = directory / f"loss_{against}"
        if draw_losses(lines, path, against=against):
            of = "tokens" if against == "tokens" else "time of the steps (number times median)"
            caption = f"Validation loss against {of}, each at its best learning rate{band}."
            yield Picture(path=path, caption=caption)
    rates = [RateLine(name=o.contender.name, points=o.rates) for o in summary.outcomes]
    path = directory / "learning_rates"
    if draw_rates(rates, path):
        caption = "Final validation loss against learning rate; small marks are single seeds, an x "
        yield Picture(path=path, caption=f"{caption}at the upper edge is a run that diverged.")


def result_table(summary: Summary) -> Table:
    """The losses, and what they mean beside the baseline's."""
    baseline = summary.comparison.baseline
    columns = (
        "optimizer",
        "best rate",
        "validation loss (95 %)",
        f"minus {baseline} (95 %)",
        "p",
        f"tokens to {baseline}'s loss",
        "time to it",
        "diverged",
    )
    return Table(columns=columns, rows=tuple(_result_row(o, summary) for o in summary.outcomes))


def _result_row(outcome: Outcome, summary: Summary) -> tuple[str, ...]:
    base, test = summary.baseline, outcome.test
    return (
        outcome.contender.name,
        _rate(outcome),
        _NONE if outcome.loss is None else format_interval(outcome.loss, "{:.4f}"),
        _NONE if test is None else format_interval(test.difference, "{:+.4f}"),
        _NONE if outcome.p_adjusted is None else f"{outcome.p_adjusted:.2g}",
        _share(outcome.tokens_to_baseline, base.tokens_to_baseline, _count),
        _share(outcome.seconds_to_baseline, base.seconds_to_baseline, _time),
        f"{outcome.num_diverged} of {outcome.num_cells}",
    )


def cost_table(summary: Summary) -> Table:
    """What a step takes."""
    columns = (
        "optimizer",
        "step",
        "tokens/s",
        "optimizer state",
        "bytes a parameter",
        "collectives a step",
        "cells/hour, together over one by one",
    )
    return Table(columns=columns, rows=tuple(map(_cost_row, summary.outcomes)))


def _cost_row(outcome: Outcome) -> tuple[str, ...]:
    step, found = outcome.step_time_s, outcome.programs
    timing = found.get("timing")
    ratio = None
    if timing is not None and timing["batched_s"] is not None:
        ratio = timing["num_cells"] * timing["single_s"] / timing["batched_s"]
    state = found.get("optimizer_state_bytes")
    whole = state is not None and found["num_devices"] == 1
    return (
        outcome.contender.name,
        _NONE if step is None else f"{1000 * step:.1f} ms",
        _NONE if step is None else f"{outcome.contender.config.tokens_per_step / step:,.0f}",
        _NONE if state is None else _bytes(state),
        f"{state / found['num_parameters']:.2f}" if whole else _NONE,
        _bytes(found["collective_bytes"]) if found else _NONE,
        _NONE if ratio is None else f"{ratio:.2f}",
    )


def rate_table(summary: Summary) -> Table:
    """Every rate of every grid."""
    rows = []
    for outcome in summary.outcomes:
        for rate in outcome.rates:
            best = rate.learning_rate == outcome.best_rate
            rows.append(
                (
                    outcome.contender.name,
                    f"{rate.learning_rate:g}{' (best)' if best else ''}",
                    ", ".join("diverged" if math.isinf(x) else f"{x:.4f}" for x in rate.losses)
                    or _NONE,
                )
            )
    return Table(columns=("optimizer", "learning rate", "loss by seed"), rows=tuple(rows))


def _rate_note() -> str:
    return (
        "The first seed scans the grid; the others are run at the best rate, and at a neighbour "
        "where the scan could not tell the two apart."
    )


def _setting(summary: Summary) -> str:
    config = summary.outcomes[0].contender.config
    parameters = summary.outcomes[0].programs.get("num_parameters")
    model = "" if parameters is None else f"{parameters / 1e6:.2f}M parameters, "
    seeds = len(summary.comparison.seeds)
    environment = summary.environment
    where = ""
    if environment:
        kinds = " and ".join(environment["device_kinds"])
        where = f" on {environment['num_devices']} x {kinds}, JAX {environment['jax']}"
    return (
        f"{model}{config.num_steps:,} steps of "
        f"{config.tokens_per_step:,} tokens ({_count(config.num_steps * config.tokens_per_step)} a "
        f"run), {seeds} seed{'s' if seeds > 1 else ''}{where}. Within a seed every optimizer "
        "starts from the same weights and reads the same tokens in the same order."
    )


def _notes(summary: Summary) -> Iterator[str]:
    if summary.num_missing:
        yield (
            f"UNFINISHED: at least {summary.num_missing} cells are missing; the same "
            "`maxmars compare` command continues."
        )
    yield from extend_notes(summary)
    for outcome in summary.outcomes:
        if outcome.best_rate is None:
            yield f"{outcome.contender.name} diverged at every rate: give it lower ones."
        found = outcome.basin
        if found is not None:
            ends = (
                f"{'at most ' if found.open_low else ''}{found.low:.2g}",
                f"{'at least ' if found.open_high else ''}{found.high:.2g}",
            )
            yield (
                f"{outcome.contender.name} is within {TOLERANCE} nats of its best from "
                f"{ends[0]} to {ends[1]}, a factor of "
                f"{'at least ' if found.open_low or found.open_high else ''}{found.factor:.1f}."
            )
    if len(summary.comparison.seeds) > 1:
        yield (
            "Intervals are Student's over seeds; the test is paired by seed, and p is adjusted for "
            "the number of contenders (Holm). The best rate is chosen by the same losses, which "
            "favours all optimizers alike."
        )
    yield (
        "Tokens and time to the baseline's loss are read off the mean curve of a run whose "
        "learning rate decays to the end; a run planned to be that short would be a little better."
    )
    for name, values in summary.comparison.own_fields:
        each = ", ".join(
            f"{value} ({o.contender.name})"
            for o, value in zip(summary.outcomes, values, strict=True)
        )
        yield f"The configs also differ in {name}: {each}."


def extend_notes(summary: Summary) -> Iterator[str]:
    """What to say of contenders whose best rate lies at an end of their grid."""
    for o in summary.outcomes:
        if o.edge is None or o.best_rate is None:
            continue
        if len(o.rates) == 1:
            yield f"{o.contender.name} was run at one rate only, so it is not tuned."
            continue
        end = "lowest" if o.edge == "low" else "highest"
        yield (
            f"Extend the grid: the best rate of {o.contender.name}, {o.best_rate:g}, is the {end} "
            f"of its grid. The same command with --learning-rates {o.contender.name}="
            f"{o.next_rate:g} adds a rate to the finished ones."
        )


def _cost_notes(summary: Summary) -> Iterator[str]:
    devices = {o.programs.get("num_devices") for o in summary.outcomes} - {None}
    if devices == {1}:
        yield (
            "One device moves nothing; `maxmars plan` says what a step moves between many. Bytes "
            "of state are those of the whole optimizer."
        )
    else:
        yield "State and collectives are those of one device."
    yield (
        "The last column is the speed of all cells of a scan in one program (vmap over the "
        "learning rate) over one after the other; where it is above 1.1, they were run so."
    )


def to_json(summary: Summary) -> dict[str, Any]:
    """The summary as JSON-ready values."""
    comparison = summary.comparison
    return {
        "baseline": comparison.baseline,
        "seeds": list(comparison.seeds),
        "num_missing": summary.num_missing,
        "environment": summary.environment,
        "outcomes": [_outcome_json(o) for o in summary.outcomes],
    }


def _outcome_json(o: Outcome) -> dict[str, Any]:
    test = o.test
    return {
        "name": o.contender.name,
        "config": to_dict(o.contender.config),
        "best_rate": o.best_rate,
        "best_rate_at_edge": o.edge,
        "next_rate": o.next_rate,
        "loss": None if o.loss is None else vars(o.loss),
        "test": None
        if test is None
        else {"difference": vars(test.difference), "p": test.p, "p_adjusted": o.p_adjusted},
        "tokens_to_baseline": o.tokens_to_baseline,
        "seconds_to_baseline": o.seconds_to_baseline,
        "step_time_s": o.step_time_s,
        "num_cells": o.num_cells,
        "num_diverged": o.num_diverged,
        "basin": None if o.basin is None else vars(o.basin) | {"tolerance": TOLERANCE},
        "rates": [
            {"learning_rate": r.learning_rate, "losses": [json_number(x) for x in r.losses]}
            for r in o.rates
        ],
        "programs": o.programs,
        "curves": []
        if o.line is None
        else [
            {"tokens": c.tokens, "losses": list(map(json_number, c.losses))} for c in o.line.curves
        ],
    }


def _rate(outcome: Outcome) -> str:
    if outcome.best_rate is None:
        return _NONE
    edge = outcome.edge is not None and len(outcome.rates) > 1
    return f"{outcome.best_rate:g}{' (edge)' if edge else ''}"


def format_interval(found: Interval, form: str) -> str:
    """The mean, and half the width of its interval if there is one."""
    mean = form.format(found.mean)
    if found.low is None or found.high is None:
        return mean
    return f"{mean} ± {(found.high - found.low) / 2:.4f}"


def _share(value: float | None, whole: float | None, show: Any) -> str:
    if value is None or not whole:
        return "not reached"
    return f"{show(value)} ({value / whole:.0%})"


def _count(number: int | float) -> str:
    for divisor, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= divisor:
            return f"{number / divisor:.2f}{suffix}"
    return f"{number:.0f}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _bytes(number: int | float) -> str:
    for divisor, suffix in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= divisor:
            return f"{number / divisor:.2f} {suffix}"
    return f"{number:.0f} B"
