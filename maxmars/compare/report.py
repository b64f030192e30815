"""The report of comparisons: `report.md`, the table of results also as `results.csv` and
`results.tex` and in 80 columns, `curves.csv` and, with matplotlib, `figures/*`.

All comes from `Summary`s, one for each size of the model. A table has a row for each contender of
each comparison, and what needs words beside it is a note: functions that yield sentences.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxmars.compare.curves import Line, Recorded
from maxmars.compare.figures import draw_speed_ups, draw_tuning, why_no_figures
from maxmars.compare.grids import LEARNING_RATE
from maxmars.compare.run_report import (
    Figures,
    Format,
    curves_csv,
    line_figures,
    print_where,
    write_markdown,
)
from maxmars.compare.search import Search
from maxmars.compare.statistics import CONFIDENCE, Interval
from maxmars.compare.summary import EFFECT, MARK_MEANS, Outcome, Summary, record_of
from maxmars.compare.tables import (
    NONE,
    csv_table,
    escape_markdown,
    fold,
    format_interval,
    latex_table,
    markdown_table,
    print_table,
)
from maxmars.compare.trials import Comparison, Rows, describe_setting
from maxmars.config.numbers import short
from maxmars.distributed.files import write_text

_SUFFIXES = {"mean": "", "low": "_low", "high": "_high"}  # of columns in results.csv
_NUM_NEXT = 3  # most settings that a note names of those that a search did not reach


Summaries = Mapping[str, Summary]
"""Name of each comparison -> its summary, smallest model first. The name of a single one may be
empty, and then no table has a column for it."""


def write_report(summaries: Summaries, out: Path, format: Format = "png", origin: str = "") -> None:
    """Write the report of comparisons, complete or not.

    Args:
      summaries: of each comparison.
      out: directory that gets the report.
      format: of the figures.
      origin: sentence on what the report is of, see `origin_of`.
    """
    every = [outcome for summary in summaries.values() for outcome in summary.outcomes]
    names = ", ".join(dict.fromkeys(outcome.contender.name for outcome in every))
    title = f"{names} at {', '.join(summaries)}" if any(summaries) else names
    one_device = {o.cost["num_devices"] for o in every if o.cost} == {1}
    columns = [name.format(baseline=_baseline(summaries)) for name in _COLUMNS.values()]
    results = _table(summaries, columns, _result_rows)
    blocks = [
        f"# Comparison of {title}",
        *([origin] if origin else []),
        "## Result",
        *(_labelled(size, _conditions(summary)) for size, summary in summaries.items()),
        "With the same seed all contenders start from the same weights and read the same tokens in "
        "the same order.",
        markdown_table(*results),
        *(_labelled(size, note) for size, summary in summaries.items() for note in _notes(summary)),
        *_general_notes(summaries),
        *_pair_blocks(summaries),
        "## Cost of a step",
        markdown_table(*_table(summaries, _COST_COLUMNS, _cost_rows)),
        "One device moves nothing; `maxmars plan` says what a step moves between several."
        if one_device
        else "State and collectives are bytes of one device.",
        "## Tuning",
        *(_labelled(size, _tuning_text(summary)) for size, summary in summaries.items()),
        markdown_table(*_table(summaries, _TUNING_COLUMNS, _tuning_rows)),
        "## Figures",
    ]
    if why_none := why_no_figures():
        blocks.append(why_none)
    else:
        blocks += _all_figures(summaries, Figures(out=out, format=format))
    blocks.append(
        "`curves.csv` has the losses of every run by step, and what the best ones logged."
    )
    write_text(out / "curves.csv", curves_csv(_recorded(summaries)))
    write_text(out / "results.csv", _results_csv(summaries))
    write_text(out / "results.tex", latex_table(*results))
    write_markdown(out, blocks)  # last, when all that the page names is there


def _all_figures(summaries: Summaries, figures: Figures) -> Iterator[str]:
    runs = "\n".join(_labelled(size, _runs_of(summary)) for size, summary in summaries.items())
    gains, path = _speed_ups(summaries), figures.path("speed_up")
    if draw_speed_ups(gains, path, _baseline(summaries), note=runs):
        yield figures.image("speed_up", "Data speed-up by the size of the model.")
    for size, summary in summaries.items():
        # A comparison that is named by its path has one folder too.
        note, folder = _labelled(size, _runs_of(summary)), size.replace("/", "-")
        if size:
            yield f"### {size}"
        own = dataclasses.replace(figures, folder=folder, note=note)
        yield from _comparison_figures(summary, own)


def _recorded(summaries: Summaries) -> Iterator[tuple[Mapping[str, str], Recorded]]:
    """The labels and the record of every run of comparisons."""
    for size, summary in summaries.items():
        for outcome in summary.outcomes:
            best = outcome.best
            # Of these runs all metrics were read, of the others the losses in their rows.
            lines = {} if best is None else dict(zip(best.losses, best.line.runs, strict=True))
            for row in outcome.rows:
                trial, own = row.trial, record_of(row, outcome.contender)
                is_best = best is not None and trial.setting == best.setting
                labels = {"comparison": size, "contender": trial.contender}
                labels |= {"setting": describe_setting(trial.setting), "seed": str(trial.seed)}
                labels |= {"best": str(is_best)}
                points = lines[trial.seed].points if is_best else own.points
                yield labels, Recorded(points=points, step_time_s=row.step_time_s)


def _table(
    summaries: Summaries,
    columns: Sequence[str],
    rows_of: Callable[[Summary], Iterable[Sequence[str]]],
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Columns and rows of a table of all comparisons."""
    if not any(summaries):
        return columns, [row for summary in summaries.values() for row in rows_of(summary)]
    rows = [(size, *row) for size, summary in summaries.items() for row in rows_of(summary)]
    return ("comparison", *columns), rows


def _labelled(size: str, text: str) -> str:
    return f"{size}: {text}" if size else text


def _baseline(summaries: Summaries) -> str:
    """Name of the baseline, or names where comparisons differ in it."""
    return " or ".join(dict.fromkeys(each.comparison.baseline for each in summaries.values()))


def _speed_ups(summaries: Summaries) -> dict[str, list[tuple[int, Interval]]]:
    """Contender -> parameters of the model and speed-up; empty where all models have one size."""
    speed_ups: dict[str, list[tuple[int, Interval]]] = {}
    if len({summary.num_parameters for summary in summaries.values()}) > 1:
        for summary in summaries.values():
            for outcome in summary.outcomes:
                points = speed_ups.setdefault(outcome.contender.name, [])
                if outcome.best is not None and outcome.best.speed_up is not None:
                    points.append((summary.num_parameters, outcome.best.speed_up))
    return speed_ups


def print_plan(comparison: Comparison, rows: Rows) -> None:
    """Print what a comparison is about to do, in 80 columns."""
    contenders, seeds = comparison.contenders, len(comparison.seeds)
    for contender in contenders:
        begins = (
            " ".join([grid.field, *(f"{value:g}" for value in grid.scanned)])
            for grid in contender.grids
        )
        print(fold(f"{contender.name}: begins with {', '.join(begins) or 'its own values'}"))
    searches = [Search(contender, comparison, rows) for contender in contenders]
    num_left = sum(search.most_trials_left for search in searches)
    finished = f"; {len(rows):,} are finished" if rows else ""
    print(
        fold(
            f"At most {num_left:,} runs of {contenders[0].config.num_steps:,} steps{finished}: "
            f"each contender is tuned with at most {comparison.budget}, and its "
            f"{comparison.finalists} best settings run with {seeds} seed{'s' if seeds > 1 else ''}."
        )
    )
    if len(contenders) == 1:
        print(
            fold(
                f"{contenders[0].name} is alone, so it is tuned and compared with nothing: name "
                "contenders by --optimizers A B, or as further configs."
            )
        )


def print_report(summaries: Summaries, out: Path) -> None:
    """Print the results of comparisons in 80 columns, and where their report is."""
    for size, summary in summaries.items():
        if size:
            print(f"comparison {size}")
        _print_summary(summary)
    if len(summaries) > 1:  # the sizes side by side: a row a contender
        best = {(o.contender.name, k): o.best for k, s in summaries.items() for o in s.outcomes}
        rows = []
        for name in dict.fromkeys(name for name, _ in best):
            row = [name]
            for each in (best.get((name, size)) for size in summaries):
                gain = None if each is None else each.speed_up
                row.append("" if each is None else f"{each.loss.mean:.4f}")
                row.append("" if gain is None else f"x{gain.mean:.2f}")
            rows.append(row)
        print_table(("", *(title for size in summaries for title in (size, ""))), rows)
        print(f"validation loss, and data speed-up over {_baseline(summaries)}")
    print_where(out)


def _print_summary(summary: Summary) -> None:
    results = [_result(outcome, summary) for outcome in summary.outcomes]
    rows = [[r["name"], *(r[key].replace(" ", "") for key in _PRINTED)] for r in results]
    print_table(("", *_PRINTED.values()), rows)
    baseline = summary.comparison.baseline
    texts = [
        f"tokens, time: how many times fewer tokens and seconds than {baseline}, to the higher of "
        f"the two final losses; ±: {CONFIDENCE:.0%}"
    ]
    if any(summary.mark(pair.first, pair.second) for pair in summary.pairs):
        texts.append(MARK_MEANS)
    if summary.num_missing:
        texts.append(f"unfinished: trials are missing, {summary.num_missing} at least")
    if len(_tuned(summary)) > 1:
        texts += [
            f"{o.contender.name}: {describe_setting(o.best.setting).replace(',', ', ')}"
            for o in summary.outcomes
            if o.best is not None
        ]
    seeds = len(summary.comparison.seeds)
    texts += [
        f"{o.contender.name}: {len(o.best.losses)} of {seeds} seeds"
        for o in summary.outcomes
        if o.best is not None and len(o.best.losses) < seeds
    ]
    texts += _search_notes(summary)
    print(*map(fold, texts), sep="\n")


def best_lines(summary: Summary) -> list[Line]:
    """The curves of each contender at its best setting."""
    return [o.best.line for o in summary.outcomes if o.best is not None]


def _conditions(summary: Summary) -> str:
    """Conditions that all trials share: model, steps, machine and, by seed, weights and tokens."""
    hardware, environment = "", summary.environment
    if environment:
        kinds = " and ".join(environment["device_kinds"])
        hardware = (
            f" on {environment['num_devices']} x {escape_markdown(kinds)}, JAX {environment['jax']}"
        )
    text = f"{_runs_of(summary)}{hardware}."
    digests = "; ".join(
        f"seed {seed}: weights `{weights[:12]}`, tokens `{tokens[:12]}`"
        for seed, (weights, tokens) in sorted(summary.digests.items())
    )
    if not digests:
        return text
    return (
        f"{text} Digests of the initial weights, and of the batches of the first and the last "
        f"step: {digests}."
    )


def _runs_of(summary: Summary) -> str:
    """Size of the model, length of a run and number of seeds."""
    config, seeds = summary.outcomes[0].contender.config, len(summary.comparison.seeds)
    return (
        f"{short(summary.num_parameters)} parameters, "
        f"{config.num_steps:,} steps of {config.tokens_per_step:,} tokens "
        f"({short(config.num_steps * config.tokens_per_step)} a run), "
        f"{seeds} seed{'s' if seeds > 1 else ''}"
    )


_COLUMNS = {
    "name": "optimizer",
    "setting": "best setting",
    "loss": f"validation loss ({CONFIDENCE:.0%})",
    "difference": f"minus {{baseline}} ({CONFIDENCE:.0%})",
    "p": "p",
    "speed_up": f"data speed-up ({CONFIDENCE:.0%})",
    "time_speed_up": "time speed-up",
    "diverged": "diverged",
}
_PRINTED = {
    "rate": "rate",
    "mean": "loss",
    "difference": "- baseline",
    "p": "p",
    "tokens": "tokens",
    "time": "time",
    "step_ms": "ms",
}


def _result(outcome: Outcome, summary: Summary) -> Mapping[str, str]:
    """The cells of a contender by the keys of `_COLUMNS` and `_PRINTED`; `NONE` without a value."""
    best, comparison, step_s = outcome.best, summary.comparison, outcome.step_time_s
    cells = defaultdict(lambda: NONE, name=outcome.contender.name)
    cells["diverged"] = f"{outcome.num_diverged} of {outcome.num_trials}"
    if step_s is not None:
        cells["step_ms"] = f"{1000 * step_s:.1f}"
    if best is None:
        cells["mean"] = "diverged" if outcome.has_diverged else NONE
        return cells
    setting = describe_setting(best.setting).replace(",", ", ")
    cells["setting"] = f"{setting}{' (not at its end)' if outcome.search.untried else ''}"
    cells["rate"] = f"{dict(best.setting)[LEARNING_RATE]:g}"
    cells["mean"] = cells["loss"] = format_interval(best.loss, "{:.4f}")
    if len(best.losses) < len(comparison.seeds):
        cells["loss"] += f" ({len(best.losses)} of {len(comparison.seeds)} seeds)"
    if best.test is not None:
        cells["difference"] = format_interval(best.test.difference, "{:+.4f}")
        mark = summary.mark(outcome.contender.name, comparison.baseline)
        cells["p"] = f"{summary.p_adjusted[outcome.contender.name]:.2g}{mark}"
    if best.speed_up is not None:
        cells["tokens"] = f"x{best.speed_up.mean:.2f}"
        cells["speed_up"] = _factor(best.speed_up)
        base = next(o for o in summary.outcomes if o.contender.name == comparison.baseline)
        if step_s and base.step_time_s:  # fewer tokens, each at the price of the contender's step
            cells["time_speed_up"] = f"{best.speed_up.mean * base.step_time_s / step_s:.2f}"
            cells["time"] = f"x{cells['time_speed_up']}"
    return cells


def _result_rows(summary: Summary) -> Sequence[Sequence[str]]:
    results = [_result(outcome, summary) for outcome in summary.outcomes]
    return [[cells[key] for key in _COLUMNS] for cells in results]


def _factor(ratio: Interval) -> str:
    """A mean of factors with both ends of its interval, which is not symmetric."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.mean:.2f}"
    return f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _results_csv(summaries: Summaries) -> str:
    """The numbers of the table of results; times in seconds."""
    rows: list[dict[str, Any]] = []
    for size, summary in summaries.items():
        for outcome in summary.outcomes:
            # Without a best setting, or a test of it, the cells are None, which CSV leaves empty.
            best, name = outcome.best, outcome.contender.name
            test = None if best is None else best.test
            row: dict[str, Any] = {"name": name, "comparison": size}
            row |= {"num_parameters": summary.num_parameters}
            row |= {"setting": best and describe_setting(best.setting)}
            intervals = {
                "loss": best and best.loss,
                "difference": test and test.difference,
                "speed_up": best and best.speed_up,
            }
            for column, ends in intervals.items():
                row |= {column + s: ends and getattr(ends, end) for end, s in _SUFFIXES.items()}
            row |= {"p_adjusted": test and summary.p_adjusted[name]}
            row |= {"num_seeds": 0 if best is None else len(best.losses)}
            row |= {"search_ended": outcome.search.is_at_its_end}
            row |= {"step_time_s": outcome.step_time_s, "num_trials": outcome.num_trials}
            rows.append(row | {"num_diverged": outcome.num_diverged})
    return csv_table(list(rows[0]), [list(row.values()) for row in rows])


def _notes(summary: Summary) -> Iterator[str]:
    if summary.num_missing:
        yield (
            f"UNFINISHED: trials are missing, {summary.num_missing} at least; the same "
            "`maxmars compare` command continues."
        )
    yield from _search_notes(summary)
    for name, what in (("code", "of maxmars's code"), ("jax", "of JAX"), ("python", "of Python")):
        versions = {r.environment.get(name) for o in summary.outcomes for r in o.rows}
        if len(versions - {None}) > 1:
            yield f"The trials ran with {len(versions - {None})} versions {what}."
    devices: dict[str, dict[str, None]] = {}  # dicts as sets that keep the order
    for outcome in summary.outcomes:
        for environment in (r.environment for r in outcome.rows if r.environment):
            kinds = " and ".join(environment["device_kinds"])
            device = f"{environment['num_devices']} x {kinds}"
            devices.setdefault(device, {})[outcome.contender.name] = None
    if len(devices) > 1:
        listed = "; ".join(f"{device}: {', '.join(names)}" for device, names in devices.items())
        yield (
            "The trials ran on several devices, so their step times do not compare, and losses "
            f"differ by rounding: {listed}."
        )
    needed = {o.contender.name: o.best.seeds_needed for o in summary.outcomes if o.best}
    if counts := ", ".join(f"{count:,} ({name})" for name, count in needed.items() if count):
        yield (
            f"Seeds that would find a difference of {EFFECT} nats from "
            f"{summary.comparison.baseline} in four of five tries: {counts}."
        )
    for outcome in summary.outcomes:
        if outcome.has_diverged:
            yield f"{outcome.contender.name} diverged at every setting: give it lower rates."
    for field, values in summary.comparison.own_fields.items():
        each = ", ".join(
            f"{escape_markdown(str(value))} ({name})" for name, value in values.items()
        )
        yield f"The configs also differ in {field}: {each}."


def _general_notes(summaries: Summaries) -> Iterator[str]:
    """Notes on what the numbers mean, once for all comparisons."""
    every = list(summaries.values())
    if any(each.mark(pair.first, pair.second) for each in every for pair in each.pairs):
        yield MARK_MEANS
    if any(len(each.comparison.seeds) > 1 for each in every):
        yield (
            f"Intervals are Student's {CONFIDENCE:.0%} intervals over the seeds. The test is "
            "Student's t test, paired by seed, with p adjusted by Holm's method over the "
            "contenders: calling differences with p below alpha significant controls the "
            "family-wise error rate at alpha. It is a test of the settings that were found; how "
            "well each contender was tuned comes on top, above all where a search is not at its "
            "end."
        )
    yield (
        "The data speed-up says how many times fewer tokens a contender needs than the baseline: "
        "of the two runs of a seed, the tokens of the better one, over those after which its curve "
        "comes down to the final loss of the other; the inverse of it where the baseline is the "
        "better one. The mean over the seeds is the geometric one. The time speed-up is that mean "
        "times the baseline's step time over the contender's. Learning rates decay to the end of a "
        "run, so one planned to be shorter would get to that loss a little sooner."
    )


def _tuned(summary: Summary) -> list[str]:
    """The fields that some contender is tuned over, in the order of the search."""
    grids = [grid for outcome in summary.outcomes for grid in outcome.contender.grids]
    return list(dict.fromkeys(grid.field for grid in grids))


def _search_notes(summary: Summary) -> Iterator[str]:
    """Notes on how contenders were tuned: over which fields, and where a budget ended a search."""
    # A grid of one value tunes nothing, so its field would say something false.
    at_one = [o for o in summary.outcomes if len(o.losses) == 1 and not o.search.missing]
    tuned: dict[str, list[str]] = {}
    for outcome in summary.outcomes:
        if outcome not in at_one:
            fields = ", ".join(grid.field for grid in outcome.contender.grids)
            tuned.setdefault(fields, []).append(outcome.contender.name)
    for fields, names in tuned.items() if len(tuned) > 1 else ():
        listed = ", ".join(names)
        yield f"Tuned over {fields}: {listed}." if fields else f"Not tuned: {listed}."
    if at_one:
        listed = ", ".join(outcome.contender.name for outcome in at_one)
        yield f"Run at one setting only, so not tuned: {listed}."
    for outcome in summary.outcomes:
        name, progress = outcome.contender.name, outcome.search
        if progress.untried and outcome not in at_one:
            settings = "; ".join(map(describe_setting, progress.untried[:_NUM_NEXT]))
            more = len(progress.untried) - _NUM_NEXT
            settings += f" and {more} more" if more > 0 else ""
            yield (
                f"The budget of {name} ended before its search: {settings} would be next. The same "
                f"command with a --budget above {summary.comparison.budget} goes on."
            )


_COST_COLUMNS = (
    "optimizer",
    "step",
    "tokens/s",
    "optimizer state",
    "bytes a parameter",
    "collectives a step",
)


def _cost_rows(summary: Summary) -> Sequence[Sequence[str]]:
    rows = []
    for outcome in summary.outcomes:
        step, cost = outcome.step_time_s, outcome.cost
        speed, memory = [NONE] * 2, [NONE] * 3
        if step is not None:
            tokens_per_step = outcome.contender.config.tokens_per_step
            speed = [f"{1000 * step:.1f} ms", f"{tokens_per_step / step:,.0f}"]
        if cost:
            state = cost["optimizer_state_bytes"]
            ratio = f"{state / cost['num_parameters']:.2f}"
            # On several devices the bytes are one device's, and would be too few a parameter.
            ratio = ratio if cost["num_devices"] == 1 else NONE
            memory = [f"{short(state)}B", ratio, f"{short(cost['collective_bytes'])}B"]
        rows.append((outcome.contender.name, *speed, *memory))
    return rows


def _pair_blocks(summaries: Summaries) -> Iterator[str]:
    """The table of all pairs of contenders, unless there is one pair, which the results show."""

    def rows(summary: Summary) -> Iterable[Sequence[str]]:
        for pair in summary.pairs:
            difference = format_interval(pair.test.difference, "{:+.4f}")
            p = f"{pair.p_adjusted:.2g}{summary.mark(pair.first, pair.second)}"
            yield pair.first, pair.second, difference, p

    most = max(len(summary.pairs) for summary in summaries.values())
    if most > 1:
        columns = ("lower", "higher", f"difference ({CONFIDENCE:.0%})", "p")
        yield "## Every pair"
        yield markdown_table(*_table(summaries, columns, rows))
        where = " of a comparison" if any(summaries) else ""
        yield f"p is adjusted by Holm's method for all {most} pairs{where}."


def _tuning_text(summary: Summary) -> str:
    comparison = summary.comparison
    used = ", ".join(f"{o.num_trials} ({o.contender.name})" for o in summary.outcomes)
    confirmed = ""
    if comparison.confirm > 1:
        confirmed = (
            f"It moved only where the mean over {comparison.confirm} seeds was lower as well. "
        )
    return (
        f"Coordinate descent over {', '.join(_tuned(summary))}, with seed {comparison.seeds[0]} "
        f"and a budget of {comparison.budget} trials a contender. {confirmed}Then the best "
        f"settings of each, {comparison.finalists} at most, ran with all seeds. Trials in all: "
        f"{used}. A setting names the learning rate, and other fields where they are not as in the "
        "config."
    )


_TUNING_COLUMNS = ("optimizer", "setting", "loss by seed")


def _tuning_rows(summary: Summary) -> Sequence[Sequence[str]]:
    rows = []
    for outcome in summary.outcomes:
        best = outcome.best and outcome.best.setting
        for setting, losses in outcome.losses.items():
            texts = ["diverged" if math.isinf(loss) else f"{loss:.4f}" for loss in losses]
            mark = " (best)" if setting == best else ""
            name = describe_setting(setting).replace(",", ", ")
            rows.append((outcome.contender.name, f"{name}{mark}", ", ".join(texts) or NONE))
    return rows


def _comparison_figures(summary: Summary, figures: Figures) -> Iterator[str]:
    yield from line_figures(best_lines(summary), figures, " at the best setting")
    for field in _tuned(summary):
        name = f"tuning_{field}"
        settings = {o.contender.name: o.tried(field) for o in summary.outcomes}
        if draw_tuning(settings, figures.path(name), field, note=figures.note):
            caption = (
                f"Final validation loss against {field}, of every run. On the thick lines all else "
                "is as in the best setting: large marks are means of several seeds, small marks "
                "single runs. Crosses are all other runs, and thin lines join the lowest means. "
                "Marks on the upper edge are runs above it, or that diverged."
            )
            yield figures.image(name, caption)
