"""One comparison at several sizes of the model: what grows or shrinks with the size.

Each size is a comparison of its own in a directory below; this report puts them side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxmars.compare.cells import describe_setting
from maxmars.compare.figures import draw_speed_ups
from maxmars.compare.report import interval, markdown_table
from maxmars.compare.statistics import CONFIDENCE, Interval, first_crossing, mean_interval
from maxmars.compare.summary import Outcome, Summary
from maxmars.config.numbers import short
from maxmars.distributed.files import write_json, write_text
from maxmars.model.language_model import num_parameters


def write_sizes_report(summaries: Mapping[str, Summary], directory: Path) -> dict[str, Any]:
    """Write `report.md`, `report.json` and `figures/speed_up.png` over all sizes.

    Args:
      summaries: by the name of the size, smallest first; all have the same contenders.
      directory: gets the report.

    Returns:
      What `report.json` holds.

    Raises:
      ImportError: matplotlib is not installed.
    """
    baseline = next(iter(summaries.values())).comparison.baseline
    names = [outcome.contender.name for outcome in next(iter(summaries.values())).outcomes]
    rows, points, fields = [], {name: [] for name in names}, []
    for name in names:
        for size, summary in summaries.items():
            outcome = next(o for o in summary.outcomes if o.contender.name == name)
            best, gain = outcome.best, speed_up(outcome, summary)
            parameters = num_parameters(outcome.contender.config.model)
            row = [name, size, "diverged", *[""] * 4]
            if best is not None:
                row[2] = describe_setting(best.setting).replace(",", ", ")
                row[3] = interval(best.loss, "{:.4f}")
                row[6] = "" if gain is None else interval(gain, "{:.2f}", 2)
            if best is not None and best.test is not None:
                row[4] = interval(best.test.difference, "{:+.4f}")
                row[5] = f"{summary.p_adjusted[name]:.2g}"
            if gain is not None:
                points[name].append((parameters, gain))
            rows.append(row)
            fields.append(
                {
                    "name": name,
                    "size": size,
                    "num_parameters": parameters,
                    "setting": None if best is None else dict(best.setting),
                    "loss": None if best is None else dataclasses.asdict(best.loss),
                    "difference": None
                    if best is None or best.test is None
                    else dataclasses.asdict(best.test.difference),
                    "p_adjusted": summary.p_adjusted.get(name),
                    "speed_up": None if gain is None else dataclasses.asdict(gain),
                }
            )
    columns = [
        "optimizer",
        "size",
        "best setting",
        f"validation loss ({CONFIDENCE:.0%})",
        f"minus {baseline} ({CONFIDENCE:.0%})",
        "p",
        f"data speed-up over {baseline} ({CONFIDENCE:.0%})",
    ]
    runs = "; ".join(
        f"{size}: {short(num_parameters(config.model))} parameters, "
        f"{short(config.num_steps * config.tokens_per_step)} tokens a run"
        for size, summary in summaries.items()
        for config in [summary.comparison.contenders[0].config]
    )
    own = ", ".join(f"[{size}]({size}/report.md)" for size in summaries)
    blocks = [
        f"# {' and '.join(summaries)}: {', '.join(names)}",
        f"{runs}. Each size has its own report: {own}.",
        markdown_table(columns, rows),
        "The data speed-up is the number of tokens of a run over those after which the curve of "
        f"the contender comes down to the final loss of {baseline}, seed by seed; nothing stands "
        "where a seed never does. p is Holm's over the contenders of a size.",
    ]
    if draw_speed_ups(points, directory / "figures" / "speed_up.png", baseline):
        blocks.append("![data speed-up by size](figures/speed_up.png)")
    write_text(directory / "report.md", "\n\n".join(blocks) + "\n")
    found = {"baseline": baseline, "sizes": list(summaries), "results": fields}
    write_json(directory / "report.json", found)
    return found


def speed_up(outcome: Outcome, summary: Summary) -> Interval | None:
    """How many times fewer tokens a contender needs for the baseline's final loss, over the seeds.

    None for the baseline itself, and where a seed never comes down to that loss.
    """
    base = next(o.best for o in summary.outcomes if o.contender.name == summary.comparison.baseline)
    if outcome.best is None or base is None or outcome.best is base:
        return None
    tokens, theirs = base.line.points
    positions, ours = outcome.best.line.points
    found = [
        first_crossing(positions.tolist(), curve.tolist(), float(target))
        for curve, target in zip(ours, theirs[:, -1], strict=False)
    ]
    if any(not crossing for crossing in found):
        return None
    return mean_interval((tokens[-1] / np.array(found, float)).tolist())
