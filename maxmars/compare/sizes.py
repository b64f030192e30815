"""One comparison at several sizes of the model: what grows or shrinks with the size.

Each size is a comparison of its own in a directory below; this report puts them side by side.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxmars.compare.cells import COMPARISON, describe_setting, read_comparison, read_results
from maxmars.compare.figures import draw_speed_ups
from maxmars.compare.report import Format, check_out, image, write_report
from maxmars.compare.statistics import CONFIDENCE, Interval, first_crossing, mean_interval
from maxmars.compare.summary import MARK_MEANS, Outcome, Summary, summarize
from maxmars.compare.tables import interval, markdown_table, print_table
from maxmars.config.numbers import short
from maxmars.distributed.files import write_json, write_text
from maxmars.model.parameters import Parameters


def write_reports_of_sizes(
    directory: Path, sizes: Sequence[Path], format: Format = "png"
) -> tuple[dict[str, Summary], dict[str, Any]]:
    """Write the report of each size, complete or not, and the one over all of them.

    Args:
      directory: gets the report over all sizes.
      sizes: the comparisons below it, smallest model first.
      format: of the figures.

    Returns:
      What was found, by the name of the size, and what `report.json` over all sizes holds. Sizes
      without any finished cell are left out.

    Raises:
      ValueError: no cell is finished yet, or the sizes have different baselines.
      FileExistsError: `directory` holds a report already, and not an earlier one of sizes.
      ImportError: matplotlib is not installed.
    """
    check_out(directory, is_report_of_sizes)
    summaries = {
        path.name: write_report(path, format)
        for path in sizes
        if read_results(read_comparison(path), path)
    }
    if not summaries:
        raise ValueError(f"no cell below {directory} is finished yet; start the comparison again.")
    return summaries, write_sizes_report(summaries, directory, format)


def is_report_of_sizes(earlier: Any) -> bool:
    """Whether what a `report.json` holds is of this module."""
    return isinstance(earlier, dict) and "sizes" in earlier


def with_other_sizes(summaries: Mapping[str, Summary], directory: Path) -> dict[str, Summary]:
    """These, and what other sizes in `directory` with their baseline found; smallest first."""
    found = dict(summaries)
    baselines = {summary.comparison.baseline for summary in summaries.values()}
    paths = size_directories(directory)
    for path in paths:
        other = read_comparison(path)
        if path.name not in found and other.baseline in baselines and read_results(other, path):
            found[path.name] = summarize(path)
    return {path.name: found[path.name] for path in paths if path.name in found}


def size_directories(directory: Path) -> list[Path]:
    """The comparisons right below the directory of a comparison of sizes, smallest model first.

    Raises:
      ValueError: another version of maxmars wrote one of them.
    """
    found = [path.parent for path in sorted(directory.glob(f"*/{COMPARISON}"))]

    def parameters(path: Path) -> int:
        return Parameters(read_comparison(path).contenders[0].config.model).count

    return sorted(found, key=parameters)


def write_sizes_report(
    summaries: Mapping[str, Summary], directory: Path, format: Format = "png"
) -> dict[str, Any]:
    """Write `report.md`, `report.json` and `figures/speed_up.png` over all sizes.

    Args:
      summaries: by the name of the size, smallest first. A contender may be missing at a size.
      directory: gets the report.
      format: of the figure.

    Returns:
      What `report.json` holds.

    Raises:
      ValueError: the sizes have different baselines.
      ImportError: matplotlib is not installed.
    """
    baselines = {size: summary.comparison.baseline for size, summary in summaries.items()}
    if len(set(baselines.values())) > 1:
        listed = ", ".join(f"{name} at {size}" for size, name in baselines.items())
        raise ValueError(
            f"{directory} has no report over all sizes: their baselines differ ({listed}). Repeat "
            "`maxmars compare` with one --baseline for all."
        )
    baseline = next(iter(baselines.values()))
    every = [outcome.contender.name for s in summaries.values() for outcome in s.outcomes]
    names = list(dict.fromkeys(every))
    rows, points, fields = [], {name: [] for name in names}, []
    for name in names:
        for size, summary in summaries.items():
            outcome = next((o for o in summary.outcomes if o.contender.name == name), None)
            if outcome is None:
                continue
            best, gain = outcome.best, speed_up(outcome, summary)
            parameters = Parameters(outcome.contender.config.model).count
            row = [name, size, "diverged" if outcome.has_diverged else "not finished", *[""] * 4]
            if best is not None:
                row[2] = describe_setting(best.setting).replace(",", ", ")
                row[2] += "" if outcome.search.is_at_its_end else " (not at its end)"
                row[3] = interval(best.loss, "{:.4f}")
                if len(best.losses) < len(summary.comparison.seeds):
                    row[3] += f" ({len(best.losses)} of {len(summary.comparison.seeds)} seeds)"
                row[6] = "" if gain is None else _factor(gain)
            if best is not None and best.test is not None:
                row[4] = interval(best.test.difference, "{:+.4f}")
                row[5] = f"{summary.p_adjusted[name]:.2g}{summary.mark(name, baseline)}"
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
        f"{size}: {short(Parameters(config.model).count)} parameters, "
        f"{short(config.num_steps * config.tokens_per_step)} tokens a run"
        for size, summary in summaries.items()
        for config in [summary.comparison.contenders[0].config]
    )
    own = ", ".join(f"[{size}]({size}/report.md)" for size in summaries)
    missing = _missing(summaries)
    blocks = [
        f"# {' and '.join(summaries)}: {', '.join(names)}",
        f"{runs}. Each size has its own report: {own}.",
        *([missing] if missing else []),
        markdown_table(columns, rows),
        f"The data speed-up says how many times fewer tokens a contender needs than {baseline}: "
        "of the two runs of a seed, the tokens of the better one, over those after which its "
        "curve comes down to the final loss of the other; the inverse of it where "
        f"{baseline} is the better one. The mean over the seeds is the geometric one. p is Holm's "
        f"over the contenders of a size. {MARK_MEANS}",
    ]
    path = directory / "figures" / f"speed_up.{format}"
    seeds = ", ".join(sorted({str(len(s.comparison.seeds)) for s in summaries.values()}))
    if draw_speed_ups(points, path, baseline, note=f"{seeds} seeds; {runs}"):
        blocks.append(image(path, ""))
    write_text(directory / "report.md", "\n\n".join(blocks) + "\n")
    found = {
        "baseline": baseline,
        "sizes": list(summaries),
        "num_missing": {size: summary.num_missing for size, summary in summaries.items()},
        "results": fields,
    }
    write_json(directory / "report.json", found)
    return found


def print_sizes(found: Mapping[str, Any], directory: Path) -> None:
    """Print what `write_sizes_report` found, in 80 columns, and where its report is."""
    rows: dict[str, dict[str, tuple[str, str]]] = {}
    for row in found["results"]:
        loss, gain = row["loss"], row["speed_up"]
        texts = "" if loss is None else f"{loss['mean']:.4f}", ""
        if gain is not None:
            texts = texts[0], f"x{gain['mean']:.2f}"
        rows.setdefault(row["name"], {})[row["size"]] = texts
    sizes = found["sizes"]
    print_table(
        ("", *(title for size in sizes for title in (size, ""))),
        [(name, *(t for s in sizes for t in by.get(s, ("", "")))) for name, by in rows.items()],
    )
    print(f"validation loss, and data speed-up over {found['baseline']}")
    lacking = [size for size, number in found["num_missing"].items() if number]
    if lacking:
        print(f"unfinished: {', '.join(lacking)}")
    print(f"report of all sizes: {directory / 'report.md'}")


def _missing(summaries: Mapping[str, Summary]) -> str:
    lacking = {size: s.num_missing for size, s in summaries.items() if s.num_missing}
    listed = ", ".join(f"{number} at least of {size}" for size, number in lacking.items())
    return f"UNFINISHED: cells are missing, {listed}." if lacking else ""


def speed_up(outcome: Outcome, summary: Summary) -> Interval | None:
    """How many times fewer tokens a contender needs than the baseline; below 1, it needs more.

    Of the two runs of a seed, the better one is read: the tokens of a whole run, over those after
    which its curve first comes down to the final loss of the other. This is the speed-up where the
    contender is the better one, and its inverse where the baseline is. The mean over the seeds is
    the geometric one, so that contender and baseline exchanged give the inverse.

    None for the baseline itself, where no seed has both runs, and where one ends above its first
    loss.
    """
    base = next(o.best for o in summary.outcomes if o.contender.name == summary.comparison.baseline)
    if outcome.best is None or base is None or outcome.best is base:
        return None
    (theirs_at, theirs), (ours_at, ours) = base.line.points, outcome.best.line.points
    by_seed = dict(zip(base.losses, theirs.tolist(), strict=True))
    pairs = [
        (our, by_seed[seed])
        for seed, our in zip(outcome.best.losses, ours.tolist(), strict=True)
        if seed in by_seed
    ]
    logs = []
    for our, their in pairs:
        if our[-1] <= their[-1]:
            sign, positions, losses, target = 1, ours_at.tolist(), our, their[-1]
        else:
            sign, positions, losses, target = -1, theirs_at.tolist(), their, our[-1]
        crossing = first_crossing(positions, losses, target)
        if not crossing:
            return None
        logs.append(sign * math.log(positions[-1] / crossing))
    if not logs:
        return None
    found = mean_interval(logs)
    return Interval(
        mean=math.exp(found.mean),
        low=None if found.low is None else math.exp(found.low),
        high=None if found.high is None else math.exp(found.high),
    )


def _factor(found: Interval) -> str:
    if found.low is None or found.high is None:
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"
