"""Figures as PNG, PDF or SVG, by the ending of their path.

matplotlib (extra `report`) draws them, without its global state.

Every run is drawn: thin, and the mean over its seeds thick. An axis of losses or norms shows what
most runs do after their first steps; a run that diverges leaves it. Lines differ in dashes and
markers as well as in colour, so that they can be told apart in black and white. The looks of a
contender follow from its name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxmars.compare.curves import TRAINING_LOSS, VALIDATION_LOSS, Line, shown_names
from maxmars.compare.grids import Number
from maxmars.compare.statistics import CONFIDENCE, Interval
from maxmars.compare.summary import TriedSetting
from maxmars.compare.tables import fold_name
from maxmars.config.errors import pip_install
from maxmars.config.numbers import duration, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

# Okabe and Ito's palette, which colour-blind readers can tell apart, from dark to light.
_COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 2)))
_MARKERS = "osD^vPX*<"  # nine markers for eight colours: the ninth line differs from the first
_KNOWN = ("adamw", "nadamw", "mars", "mars_m", "muon", "soap", "lion", "mars_shampoo")
_SIZE = (6.4, 4.2)  # inches, without the legend
_PANEL = (4.2, 2.9)
_LEGEND = 1.8  # inches
_NAME_WIDTH = 22  # characters
_NOTE_WIDTH = 14  # characters of a note on an inch
_STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": "medium",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.dpi": 150,
    "svg.hashsalt": "maxmars",  # else each file has other names within
}
_THIN = 0.7  # points
_WARM_UP = 0.12  # values in this first share of the horizontal axis may lie above the figure
_MIN_POINTS = 2  # points of a run after that share; where no run has so many, the share counts too
_LOSS_RANGES = 1.5  # height of an axis of losses, in ranges of the lower half of the runs
_DECADES = 2  # of a logarithmic axis above the lower half of the runs
_SMOOTHED = 16  # a running mean is over one of so many parts of a run
_AXES = {"tokens": "tokens", "steps": "steps", "time": "time of the steps", "layers": "layer"}


def why_no_figures() -> str | None:
    """Why figures cannot be drawn, in a sentence; None if they can."""
    if importlib.util.find_spec("matplotlib") is not None:
        return None
    return f"Without figures, which need matplotlib: {pip_install('report')}."


@dataclass(frozen=True, kw_only=True)
class _Series:
    """The runs that share a colour."""

    number: int
    name: str
    runs: Sequence[tuple[np.ndarray, np.ndarray]]
    """Positions and values of each."""
    mean: tuple[np.ndarray, np.ndarray]
    """Drawn thick."""


def draw_lines(
    lines: Sequence[Line],
    path: Path,
    metrics: Mapping[str, str],
    *,
    against: str = "tokens",
    columns: int = 1,
    note: str = "",
) -> bool:
    """Draw losses, rates or norms of every run, and their mean over the seeds, a panel a metric.

    Args:
      lines: one for each contender or run.
      path: of the figure; its directory is made.
      metrics: metric -> how it is called; those that no line has get no panel.
      against: `tokens`, or `time`, which leaves out lines without timed steps, or `layers` of the
        lines of `norms_by_layer`.
      columns: panels beside each other.
      note: what the figure is of, above it.

    Returns:
      Whether there was anything to draw.
    """
    timed = [line for line in lines if against != "time" or line.seconds_per_step is not None]
    panels = {name: drawn for name in metrics if (drawn := _series(lines, timed, name, against))}
    if not panels:
        return False
    with _figure(path, len(panels), columns, note=note) as all_axes:
        for axes, (metric, drawn) in zip(all_axes, panels.items(), strict=True):
            _draw(axes, drawn, metric)
            _label_positions(axes, against)
            if columns > 1:
                axes.set_title(metrics[metric], parse_math=False)
                continue
            axes.set_ylabel(f"{metrics[metric]}, nats a token")
            points = np.hstack([each for line in timed for each in line.points(metric)])
            batches = {tokens / step for step, tokens, _ in points.T if step}
            if against == "tokens" and len(batches) == 1:  # of all steps of all runs
                scale = functools.partial(np.multiply, batches.pop())
                by_step = (functools.partial(np.multiply, 1 / scale(1.0)), scale)
                _label_positions(axes.secondary_xaxis("top", functions=by_step), "steps")
    return True


def draw_tuning(
    settings: Mapping[str, Sequence[TriedSetting]], path: Path, field: str, *, note: str = ""
) -> bool:
    """Draw final losses against the values of a field: a small mark a run, a line through the means
    of the settings that differ in this field alone, with large marks where several seeds make the
    mean, small crosses for the runs of other settings, and a thin line through the lowest means of
    all.

    Args:
      settings: of each contender, by their values.
      field: its name.

    Result and errors are those of `draw_lines`; there is nothing to draw where no contender has
    two values of the field.
    """
    every = [loss for tried in settings.values() for one in tried for loss in one.losses]
    finite = [loss for loss in every if math.isfinite(loss)]
    if not finite or all(len({one.value for one in tried}) < 2 for tried in settings.values()):
        return False
    bottom, middle = min(finite), float(np.median(finite))
    # A run far above the others would flatten their lines. It, and one that diverged, has its mark
    # on the upper edge.
    top = min(max(finite), middle + 4 * (middle - bottom) + 0.05)
    margin = 0.06 * (top - bottom) or 0.01
    with _figure(path, note=note) as (axes,):
        numbers = _numbers(settings)
        for name, tried in settings.items():
            if not tried:
                continue
            style = _style(numbers[name])
            color, marker = style["color"], style["marker"]
            line = [one for one in tried if one.on_slice]
            several = [i for i, one in enumerate(line) if len(one.losses) > 1]
            values, means = [one.value for one in line], [_mean(one.losses) for one in line]
            axes.plot(values, means, label=_label(name), markevery=several, **style)
            for one in tried:
                at, shown = [one.value] * len(one.losses), np.minimum(one.losses, top + margin)
                mark = marker if one.on_slice else "+"
                axes.plot(at, shown, mark, color=color, ms=3.5, alpha=0.5, clip_on=False)
            lowest: dict[Number, float] = {}
            for one in tried:
                mean = _mean(one.losses)
                lowest[one.value] = float(np.fmin(mean, lowest.get(one.value, mean)))
            axes.plot([*lowest], [*lowest.values()], color=color, lw=_THIN, alpha=0.6, zorder=1.5)
        _scale_of_values(axes, {one.value for tried in settings.values() for one in tried})
        axes.tick_params(axis="x", labelrotation=30)
        axes.set_ylim(bottom - margin, top + margin)
        axes.set_xlabel("peak learning rate" if field == "learning_rate" else field)
        axes.set_ylabel("final validation loss, nats a token")
    return True


def _mean(losses: Sequence[float]) -> float:
    """The mean of final losses; NaN, which leaves a gap in a line, where it is not finite."""
    mean = float(np.mean(losses)) if losses else math.nan
    return mean if math.isfinite(mean) else math.nan


def _scale_of_values(axes: Axes, values: Collection[Number]) -> None:
    """The horizontal axis of a field: decays such as b1 by their distance from 1, everything else
    by its logarithm, with a place for 0."""
    from matplotlib.ticker import SymmetricalLogLocator

    positive = sorted(value for value in values if value > 0)
    if len(positive) < len(values) and positive:
        axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
        locator = SymmetricalLogLocator(axes.xaxis.get_transform(), subs=(1.0, 3.0))
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    elif positive and positive[-1] < 1 < 2 * positive[0]:
        axes.set_xscale("function", functions=(_far_from_1, _near_1))
        ticks = [1 - m * 10.0**-k for k in range(1, 5) for m in (5, 2, 1)]
        axes.set_xticks([v for v in ticks if positive[0] <= v <= positive[-1]] or positive)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    elif positive:
        axes.set_xscale("log")
        _label_log(axes.xaxis, (1.0, 2.0, 5.0))


def draw_speed_ups(
    points: Mapping[str, Sequence[tuple[int, Interval]]],
    path: Path,
    baseline: str,
    *,
    note: str = "",
) -> bool:
    """Draw data speed-ups, with their intervals, against the size of the model.

    Args:
      points: contender -> (parameters of the model, speed-up), increasing in size.
      baseline: the contender whose speed-up is 1.

    Result and errors are those of `draw_lines`.
    """
    numbers, points = _numbers(points), {name: gains for name, gains in points.items() if gains}
    if not points:
        return False
    with _figure(path, note=note) as (axes,):
        for number, (name, gains) in enumerate(points.items()):
            aside = 1.02 ** (number - (len(points) - 1) / 2)  # not on top of each other
            sizes = [size * aside for size, _ in gains]
            means = np.array([gain.mean for _, gain in gains])
            ends = [(gain.low or gain.mean, gain.high or gain.mean) for _, gain in gains]
            reach = np.abs(np.transpose(ends) - means)  # below and above
            axes.errorbar(sizes, means, reach, label=_label(name), **_style(numbers[name]))
        axes.axhline(1.0, color="#7F7F7F", linewidth=1.0)
        axes.set_yscale("log")
        _label_log(axes.yaxis, (1.0, 1.5, 2.0, 3.0, 5.0))
        axes.set_xscale("log")
        ticks = sorted({size for gains in points.values() for size, _ in gains})
        axes.set_xticks(ticks, [short(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("parameters")
        axes.set_ylabel(f"data speed-up over {baseline} ({CONFIDENCE:.0%})")
    return True


def _runs(drawn: Sequence[_Series]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [run for series in drawn for run in series.runs]


def _series(
    lines: Sequence[Line], drawn: Sequence[Line], metric: str, against: str
) -> list[_Series]:
    """The series of a metric; the style of a line follows from the names of all lines."""
    series, numbers, shown = [], _numbers([line.name for line in lines]), shown_names(lines)
    for line in drawn:
        if not (runs := line.points(metric)):
            continue
        pairs = [
            (steps * line.seconds_per_step if against == "time" else tokens, values)
            for steps, tokens, values in (*runs, line.mean(metric))
        ]
        x, means = pairs.pop()
        if metric == TRAINING_LOSS or metric.startswith("train/grad_norm"):
            means = _smooth(means)
        number, name = numbers[line.name], shown[line.name]
        series.append(_Series(number=number, name=name, runs=pairs, mean=(x, means)))
    return series


def _smooth(values: np.ndarray) -> np.ndarray:
    """The running mean over a sixteenth of the values, of those that are finite."""
    window = np.ones(1 + 2 * (len(values) // _SMOOTHED // 2))
    is_sound = np.isfinite(values)
    sums = np.convolve(np.where(is_sound, values, 0.0), window, "same")
    counts = np.convolve(is_sound, window, "same")
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _label_positions(axes: Any, against: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    if against == "layers":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    is_time = against == "time"
    axes.xaxis.set_major_formatter(
        (lambda value, _: duration(value)) if is_time else EngFormatter(sep="")
    )
    axes.set_xlabel(_AXES[against])


def _label_log(axis: Axis, subs: tuple[float, ...]) -> None:
    """Label these multiples of the powers of ten on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def _draw(axes: Axes, drawn: Sequence[_Series], metric: str) -> None:
    is_loss = metric in (VALIDATION_LOSS, TRAINING_LOSS)
    # Rates begin and end at 0, so of them the peaks count.
    spread = [y.max() if metric == "train/learning_rate" else y for _, y in _runs(drawn)]
    spread = np.hstack(spread)
    spread = spread[np.isfinite(spread) & (spread > 0)]
    is_log = bool(not is_loss and spread.size and spread.max() > 5 * spread.min())
    limits = _limits(drawn, are_losses=is_loss, is_log=is_log)
    if is_log:
        is_wide = limits is not None and limits[1] > 1e3 * limits[0]
        axes.set_yscale("log", nonpositive="mask")
        _label_log(axes.yaxis, (1.0,) if is_wide else (1.0, 2.0, 5.0))
    if limits is not None:
        axes.set_ylim(*limits)
    alpha = float(np.clip(6 / len(_runs(drawn)), 0.15, 0.45))  # many lines hide each other
    for series in drawn:
        style = _style(series.number)
        x, means = series.mean
        if len(x):
            every = max(1, len(x) // 10)
            # Marks of lines that lie on each other stand beside each other.
            markers = (series.number % every, every)
            axes.plot(x, means, label=_label(series.name), markevery=markers, **style)
        for x, values in series.runs:
            if len(series.runs) > 1 or not np.array_equal(values, means):
                axes.plot(x, values, color=style["color"], lw=_THIN, alpha=alpha, zorder=1.5)


def _limits(
    drawn: Sequence[_Series], *, are_losses: bool, is_log: bool
) -> tuple[float, float] | None:
    """The vertical range of a panel, in which a run that diverged does not flatten the others: for
    losses after the warm-up, `_LOSS_RANGES` times the range of the lower half of the runs; for
    rates and norms on a logarithmic axis, which differ more, `_DECADES` above that half."""
    runs = _runs(drawn)
    settled = _WARM_UP * max(float(x[-1]) for x, _ in runs) if are_losses else 0.0
    if all(np.sum(x >= settled) < _MIN_POINTS for x, _ in runs):
        settled = 0.0  # else nothing but the ends would be seen
    late = [values[(x >= settled) & np.isfinite(values)] for x, values in runs]
    if is_log:
        late = [np.log10(values[values > 0]) for values in late]
    late = [values for values in late if len(values)]
    if not late:
        return None
    bottom, highs = min(map(np.min, late)), list(map(np.max, late))
    half, top = np.percentile(highs, 50, method="lower"), max(highs)
    if are_losses and half > bottom:
        top = min(top, bottom + _LOSS_RANGES * (half - bottom))
    elif is_log:
        top = min(top, half + _DECADES)
    margin = 0.05 * (top - bottom)
    if not margin:
        return None
    low, high = float(bottom - margin), float(top + margin)
    return (10**low, 10**high) if is_log else (low, high)


@contextlib.contextmanager
def _figure(
    path: Path, num_panels: int = 1, columns: int = 1, *, note: str = ""
) -> Iterator[list[Axes]]:
    """Empty axes in maxmars's style; at the end they get a note above and a legend beside them, and
    are saved."""
    import matplotlib
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    columns = min(columns, num_panels)
    rows = -(-num_panels // columns)
    width, height = _SIZE if num_panels == 1 else (columns * _PANEL[0], rows * _PANEL[1])
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        all_axes = [figure.add_subplot(rows, columns, i + 1) for i in range(num_panels)]
        yield all_axes
        named: dict[str, Any] = {}
        for axes in all_axes:
            handles, labels = axes.get_legend_handles_labels()
            named |= dict(zip(labels, handles, strict=True))
        if named:
            figure.set_size_inches(width + _LEGEND, height)
            figure.legend(list(named.values()), list(named), loc="outside right upper")
        if note:
            texts = [_label(line, int(_NOTE_WIDTH * width)) for line in note.splitlines()]
            figure.suptitle("\n".join(texts), fontsize="small")
        # Without matplotlib's version and the time, the same figure is the same file.
        varying = {".png": "Software", ".pdf": "CreationDate", ".svg": "Date"}[path.suffix]
        figure.savefig(path, metadata={varying: None})


def _numbers(names: Collection[str]) -> dict[str, int]:
    """The number of each line's style: its place in `_KNOWN`; others share the places that are
    left, by their names."""
    known = {name: number for number, name in enumerate(_KNOWN) if name in names}
    free = (number for number in itertools.count() if number not in known.values())
    return known | dict(zip(sorted(set(names) - known.keys()), free, strict=False))


def _style(number: int) -> dict[str, Any]:
    color = _COLORS[number % len(_COLORS)]
    return {
        "color": color,
        "linestyle": _DASHES[number % len(_DASHES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markerfacecolor": "white" if number % 2 else color,
    }


def _label(name: str, width: int = _NAME_WIDTH) -> str:
    """A name as matplotlib shows it: folded between words, not as a formula, in a legend also after
    a `_`."""
    name = "\n".join(fold_name(name, width)) or name
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _far_from_1(value: Any) -> Any:
    """Decays by the logarithm of their distance from 1."""
    return -np.log10(np.maximum(1 - np.asarray(value, float), 1e-9))


def _near_1(position: Any) -> Any:
    return 1 - 10.0 ** -np.asarray(position, float)
