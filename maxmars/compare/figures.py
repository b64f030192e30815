"""Figures as PNG, PDF or SVG, by the ending of their path.

matplotlib (extra `report`) draws them, without its global state.

Every run is drawn: thin, and the mean over its seeds thick. An axis of losses or norms shows what
most runs do after their first steps; where a run leaves it, a triangle stands at the upper edge, an
x where its value is not a number. Lines differ in dashes and markers as well as in colour, so that
they can be told apart in black and white. The looks of a contender follow from its name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxmars.compare.curves import TRAINING_LOSS, Curve, Line, fixed_tokens_per_step
from maxmars.compare.grids import Number
from maxmars.compare.statistics import CONFIDENCE, Interval
from maxmars.config.errors import pip_install
from maxmars.config.numbers import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart, from dark to light.
_COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 2)))
_MARKERS = "osD^vPX*<"  # nine markers for eight colours: the ninth line differs from the first
_KNOWN = ("adamw", "nadamw", "mars", "mars_m", "muon", "soap", "lion", "mars_shampoo")
_SIZE = (6.4, 4.2)  # inches, without the legend
_PANEL = (4.2, 2.9)
_LEGEND_ROW = 0.24  # inches
_LEGEND_WIDTH = 66  # characters beside each other
_LEGEND_SAMPLE = 9  # of them, for a line's sample
_NAME_WIDTH = 52
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
_REACH = 1.5
_RATIO = 10.0
_FEWEST = 2  # points of a run after that share; with fewer it counts, too
_SMOOTHED = 16  # a running mean is over one of so many parts of a run
_MAX_TICKS = 10
_FACTORS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7, 10, 20, 30, 50, 100)


def require_matplotlib() -> None:
    """Check that figures can be drawn.

    Raises:
      ImportError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"figures need matplotlib: {pip_install('report')}.")


@dataclass(frozen=True, kw_only=True)
class _Strand:
    """The runs that share a colour."""

    number: int
    name: str
    runs: Sequence[tuple[np.ndarray, np.ndarray]]
    """Positions and values of each."""
    mean: tuple[np.ndarray, np.ndarray]
    """Drawn thick."""


def draw_losses(lines: Sequence[Line], path: Path, *, against: str, note: str = "") -> bool:
    """Draw the losses of every run, and their mean over the seeds.

    Args:
      lines: one for each contender or run.
      path: of the figure; its directory is made.
      against: `tokens`; `steps`; or `time`, which leaves out lines without timed steps.
      note: what the figure is of, above it.

    Returns:
      Whether there was anything to draw.

    Raises:
      ImportError: matplotlib is not installed.
    """
    strands, numbers = [], _numbers([line.name for line in lines])
    for line in lines:
        position = _axis(line, against)
        if position is not None:
            runs = [(position(c.steps, c.tokens), np.array(c.losses)) for c in line.curves]
            tokens, losses = line.points
            mean = runs[0][0][: len(tokens)], losses.mean(axis=0)
            strands.append(_Strand(number=numbers[line.name], name=line.name, runs=runs, mean=mean))
    names = {curve.loss_of for line in lines for curve in line.curves}
    label = f"{names.pop() if len(names) == 1 else 'loss'}, nats a token"
    return _draw_alone(strands, path, label, against, lines, note)


def draw_training_losses(
    lines: Sequence[Line], path: Path, *, against: str, note: str = ""
) -> bool:
    """Draw the training losses of every run as they were logged, and over them a running mean.

    Arguments, result and errors are those of `draw_losses`.
    """
    strands = _logged_strands(lines, TRAINING_LOSS, against)
    return _draw_alone(strands, path, "training loss, nats a token", against, lines, note)


def draw_rates_and_norms(
    lines: Sequence[Line],
    path: Path,
    metrics: Mapping[str, str],
    *,
    columns: int = 2,
    note: str = "",
) -> bool:
    """Draw what every run logged of its steps against tokens, a panel a metric.

    Args:
      lines: one for each contender or run.
      path: of the figure; its directory is made.
      metrics: metric -> how it is called; those that no line has get no panel.
      columns: panels beside each other.
      note: what the figure is of, above it.

    Returns:
      Whether there was anything to draw.

    Raises:
      ImportError: matplotlib is not installed.
    """
    panels = {
        metric: strands
        for metric in metrics
        if (strands := _logged_strands(lines, metric, "tokens"))
    }
    if not panels:
        return False
    everything = [strand for strands in panels.values() for strand in strands]
    divisor, unit = _unit(_end(everything), "tokens")
    with _figure(path, len(panels), columns, note=note) as all_axes:
        for axes, (metric, strands) in zip(all_axes, panels.items(), strict=True):
            # Rates begin and end at 0, so of them the peaks count.
            spread = [y.max() if metric == "train/learning_rate" else y for _, y in _runs(strands)]
            spread = np.hstack(spread)
            spread = spread[np.isfinite(spread) & (spread > 0)]
            is_log = spread.size > 0 and spread.max() > 5 * spread.min()
            _draw(axes, strands, divisor, is_log=bool(is_log), warm_up=0.0, are_losses=False)
            axes.set_title(metrics[metric], parse_math=False)
            axes.set_xlabel(f"tokens{unit}")
    return True


def draw_every_run(
    cells: Mapping[str, Sequence[Curve]], best: Mapping[str, Line], path: Path, *, note: str = ""
) -> bool:
    """Draw the validation losses of all cells of a comparison, a panel a contender.

    Args:
      cells: contender -> curves of all its cells.
      best: contender -> curves at its best setting, whose mean is drawn thick.
      path: of the figure; its directory is made.
      note: what the figure is of, above it.

    Returns:
      Whether there was anything to draw.

    Raises:
      ImportError: matplotlib is not installed.
    """
    strands, numbers = [], _numbers(cells)
    for name, curves in cells.items():
        if curves:
            runs = [(np.array(c.tokens), np.array(c.losses)) for c in curves]
            mean = (np.array([]), np.array([]))
            if name in best:
                tokens, losses = best[name].points
                mean = tokens, losses.mean(axis=0)
            strands.append(_Strand(number=numbers[name], name=name, runs=runs, mean=mean))
    if not strands:
        return False
    divisor, unit = _unit(_end(strands), "tokens")
    with _figure(path, len(strands), 3, legend=False, note=note) as all_axes:
        for axes, strand in zip(all_axes, strands, strict=True):
            _draw(axes, [strand], divisor, like=strands)
            text = f"{strand.name}: {len(strand.runs)} run{'s'[: len(strand.runs) != 1]}"
            axes.set_title(_label(text, 36).strip())
        for axes in all_axes[-3:]:
            axes.set_xlabel(f"tokens{unit}")
        for axes in all_axes[::3]:
            axes.set_ylabel("validation loss")
    return True


def draw_tuning(
    grids: Mapping[str, Mapping[Number, Sequence[float]]],
    path: Path,
    field: str,
    others: Mapping[str, Sequence[tuple[Number, Sequence[float]]]] | None = None,
    *,
    note: str = "",
) -> bool:
    """Draw final losses against the values of a field: a mark a run, a line through the means of
    the settings that differ in this field alone, and a thin one through the lowest means of all.

    Args:
      grids: contender -> value of the field, increasing -> final losses of its runs in nats a
        token; infinite where a run diverged. The line goes through their means.
      path: of the figure; its directory is made.
      field: its name.
      others: contender -> value of the field and final losses by seed of each setting that is not
        on its line, drawn as small crosses.
      note: what the figure is of, above it.

    Returns:
      Whether there was anything to draw: some contender has two values of the field.

    Raises:
      ImportError: matplotlib is not installed.
    """
    others = others or {}
    settings = {name: [*grid.items(), *others.get(name, ())] for name, grid in grids.items()}
    every = [loss for tried in settings.values() for _, losses in tried for loss in losses]
    finite = [loss for loss in every if math.isfinite(loss)]
    if not finite or all(len({value for value, _ in tried}) < 2 for tried in settings.values()):
        return False
    bottom, middle = min(finite), float(np.median(finite))
    # A run far above the others would flatten their lines.
    top = min(max(finite), middle + 4 * (middle - bottom) + 0.05)
    margin = 0.06 * (top - bottom) or 0.01
    with _figure(path, note=note) as (axes,):
        edge: dict[str, Any] = {
            "transform": axes.get_xaxis_transform(),
            "linestyle": "",
            "clip_on": False,
        }
        numbers = _numbers(grids)
        for name, grid in grids.items():
            if not settings[name]:
                continue
            style = _style(numbers[name])
            color = style["color"]
            means = [float(np.mean(losses)) if losses else math.nan for losses in grid.values()]
            means = [mean if math.isfinite(mean) else math.nan for mean in means]
            axes.plot(list(grid), means, label=_label(name), **style)
            for value, losses in grid.items():
                if len(losses) > 1:
                    mark = {key: style[key] for key in ("color", "marker")}
                    axes.plot([value] * len(losses), losses, ls="", alpha=0.5, ms=3, **mark)
            for value, losses in others.get(name, ()):
                axes.plot([value] * len(losses), losses, "+", color=color, ms=4, mew=0.8, alpha=0.6)
            lowest: dict[Number, float] = {}
            for value, losses in settings[name]:
                lowest[value] = min(
                    float(np.mean(losses or [math.inf])), lowest.get(value, math.inf)
                )
                for loss in losses:
                    if not loss <= top + margin:
                        axes.plot(value, 1.0, color=color, marker="^x"[math.isinf(loss)], **edge)
            profile = sorted((v, loss) for v, loss in lowest.items() if math.isfinite(loss))
            if profile:
                axes.plot(*zip(*profile, strict=True), color=color, lw=_THIN, alpha=0.6, zorder=1.5)
        values = sorted({value for tried in settings.values() for value, _ in tried})
        positive = [value for value in values if value > 0]
        if len(positive) < len(values) and positive:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
        elif positive and positive[-1] < 1 < 2 * positive[0]:  # a decay such as b1
            axes.set_xscale("function", functions=(_far_from_1, _near_1))
        elif positive:
            axes.set_xscale("log")
        best = {
            min(means, key=lambda value: means[value])
            for grid in grids.values()
            if (means := {v: np.mean(losses) for v, losses in grid.items() if losses})
        }
        labelled = _ticks(values, axes, best)
        axes.set_xticks(labelled)
        axes.set_xticks([value for value in values if value not in labelled], minor=True)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.tick_params(axis="x", labelrotation=30)
        axes.set_ylim(bottom - margin, top + margin)
        axes.set_xlabel("peak learning rate" if field == "learning_rate" else field)
        axes.set_ylabel("final validation loss, nats a token")
    return True


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
      path: of the figure; its directory is made.
      baseline: the contender whose speed-up is 1.
      note: what the figure is of, above it.

    Returns:
      Whether there was anything to draw.

    Raises:
      ImportError: matplotlib is not installed.
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
        low, high = axes.get_ylim()
        axes.set_yticks([tick for tick in _FACTORS if low <= tick <= high])
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xscale("log")
        ticks = sorted({size for gains in points.values() for size, _ in gains})
        axes.set_xticks(ticks, [short(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("parameters")
        axes.set_ylabel(f"data speed-up over {baseline} ({CONFIDENCE:.0%})")
    return True


def _runs(strands: Sequence[_Strand]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [run for strand in strands for run in strand.runs]


def _axis(line: Line, against: str) -> Callable[[Sequence[int], Sequence[int]], np.ndarray] | None:
    """From steps and tokens to the place on the horizontal axis; None where that is unknown."""
    seconds = line.seconds_per_step
    if against == "time":
        return None if seconds is None else lambda steps, _: np.array(steps) * seconds
    return lambda steps, tokens: np.array(tokens if against == "tokens" else steps, float)


def _logged_strands(lines: Sequence[Line], metric: str, against: str) -> list[_Strand]:
    strands, numbers = [], _numbers([line.name for line in lines])
    for line in lines:
        position = _axis(line, against)
        with_metric = [logged for logged in line.logged if metric in logged.series]
        if position is None or not with_metric:
            continue
        runs, series = [], [dict(logged.series[metric]) for logged in with_metric]
        for logged, values in zip(with_metric, series, strict=True):
            positions = position(list(values), [logged.tokens[step] for step in values])
            runs.append((positions, np.array(list(values.values()))))
        steps = sorted(set.intersection(*map(set, series)))  # those that all seeds reached
        means = np.array([[values[step] for step in steps] for values in series]).mean(axis=0)
        if metric == TRAINING_LOSS or metric.startswith("train/grad_norm"):
            means = _smooth(means)
        positions = position(steps, [with_metric[0].tokens[step] for step in steps])
        mean = positions, means
        strands.append(_Strand(number=numbers[line.name], name=line.name, runs=runs, mean=mean))
    return strands


def _smooth(values: np.ndarray) -> np.ndarray:
    """The running mean over a sixteenth of the values, of those that are finite."""
    half = len(values) // _SMOOTHED // 2
    is_sound = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_sound, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_sound)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    count = counts[last] - counts[first]
    return np.where(count > 0, (sums[last] - sums[first]) / np.maximum(count, 1), np.nan)


def _draw_alone(
    strands: Sequence[_Strand],
    path: Path,
    label: str,
    against: str,
    lines: Sequence[Line],
    note: str,
) -> bool:
    """Draw losses on one pair of axes; those of tokens also get the steps, where all runs have the
    same batch."""
    if not strands:
        return False
    from matplotlib.ticker import MaxNLocator

    divisor, unit = _unit(_end(strands), against)
    with _figure(path, note=note) as (axes,):
        _draw(axes, strands, divisor)
        if against == "steps":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(label)
        name = {"tokens": "tokens", "steps": "steps", "time": "time of the steps"}[against]
        axes.set_xlabel(f"{name}{unit}")
        batch = fixed_tokens_per_step(lines)
        if against == "tokens" and batch is not None:
            steps = divisor / batch

            def to_steps(position: Any) -> Any:
                return position * steps

            def from_steps(step: Any) -> Any:
                return step / steps

            upper = axes.secondary_xaxis("top", functions=(to_steps, from_steps))
            upper.xaxis.set_major_locator(MaxNLocator(integer=True))
            upper.set_xlabel("steps")
    return True


def _draw(
    axes: Axes,
    strands: Sequence[_Strand],
    divisor: float,
    *,
    is_log: bool = False,
    warm_up: float = _WARM_UP,
    are_losses: bool = True,
    like: Sequence[_Strand] = (),
) -> None:
    """Draw strands, positions divided by `divisor`, on the range of themselves or of others."""
    from matplotlib.ticker import LogLocator, NullLocator

    settled = warm_up * _end(like or strands)
    if all(np.sum(x >= settled) < _FEWEST for x, _ in _runs(like or strands)):
        settled = 0.0  # else nothing but the ends would be seen
    limits = _limits(like or strands, settled, are_losses=are_losses, is_log=is_log)
    if is_log:
        is_wide = limits is not None and limits[1] > 1e3 * limits[0]
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if limits is not None:
        axes.set_ylim(*limits)
    alpha = float(np.clip(6 / len(_runs(strands)), 0.15, 0.45))  # many lines hide each other
    for strand in strands:
        style = _style(strand.number)
        x, means = strand.mean
        if len(x):
            every = max(1, len(x) // 10)
            # Marks of lines that lie on each other stand beside each other.
            markers = (strand.number % every, every)
            axes.plot(x / divisor, means, label=_label(strand.name), markevery=markers, **style)
        for x, values in strand.runs:
            if len(strand.runs) > 1 or not np.array_equal(values, means):
                axes.plot(
                    x / divisor, values, color=style["color"], lw=_THIN, alpha=alpha, zorder=1.5
                )
            if limits is not None:
                _mark_leaving(axes, x, values, settled, limits[1], divisor, style["color"])


def _mark_leaving(
    axes: Axes,
    x: np.ndarray,
    values: np.ndarray,
    settled: float,
    top: float,
    divisor: float,
    color: str,
) -> None:
    """Mark on the upper edge where a run leaves the figure."""
    x, values = x[x >= settled], values[x >= settled]
    is_above = ~(values <= top)
    starts = is_above & ~np.concatenate([[False], is_above[:-1]])
    for position, value in zip(x[starts], values[starts], strict=True):
        axes.plot(
            position / divisor,
            1.0,
            color=color,
            marker="^" if math.isfinite(value) else "x",
            linestyle="",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )


def _limits(
    strands: Sequence[_Strand], settled: float, *, are_losses: bool, is_log: bool
) -> tuple[float, float] | None:
    """The vertical range of what runs do once they have settled, as far as a run that diverged does
    not flatten the others: of losses `_REACH` times the range of the lower half of them; of rates
    and norms, which differ more between sound runs, `_RATIO` times the highest value of that half,
    on a logarithmic axis its square."""
    lows, highs = [], []
    for x, values in _runs(strands):
        late = values[(x >= settled) & np.isfinite(values)]
        late = np.log10(late[late > 0]) if is_log else late
        if len(late):
            lows.append(float(late.min()))
            highs.append(float(late.max()))
    if not lows or max(highs) == min(lows):
        return None
    bottom = min(lows)
    half = sorted(highs)[(len(highs) - 1) // 2]
    cap = half + 2 * math.log10(_RATIO) if is_log else half * _RATIO
    if are_losses:
        cap = bottom + _REACH * (half - bottom)
    top = min(max(highs), cap) if cap > bottom else max(highs)
    margin = 0.05 * (top - bottom)
    low, high = bottom - margin, top + margin
    return (10**low, 10**high) if is_log else (low, high)


def _end(strands: Sequence[_Strand]) -> float:
    return max(float(x[-1]) for x, _ in _runs(strands))


@contextlib.contextmanager
def _figure(
    path: Path, num_panels: int = 1, columns: int = 1, *, legend: bool = True, note: str = ""
) -> Iterator[list[Axes]]:
    """Empty axes in maxmars's style; at the end they get a note above and a legend below, and are
    saved."""
    require_matplotlib()
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
        for axes in all_axes if legend else ():
            handles, labels = axes.get_legend_handles_labels()
            named |= dict(zip(labels, handles, strict=True))
        if named:
            across, lines = _columns(list(named), int(_LEGEND_WIDTH * width / _SIZE[0]))
            figure.set_size_inches(width, height + _LEGEND_ROW * lines)
            figure.legend(
                list(named.values()), list(named), loc="outside lower center", ncols=across
            )
        if note:
            texts = [_label(line, int(_NOTE_WIDTH * width)) for line in note.splitlines()]
            figure.suptitle("\n".join(texts), fontsize="small")
        # Without matplotlib's version and the time, the same figure is the same file.
        varying = {".png": "Software", ".pdf": "CreationDate", ".svg": "Date"}[path.suffix]
        figure.savefig(path, metadata={varying: None})


def _columns(labels: Sequence[str], room: int) -> tuple[int, int]:
    """How many columns of a legend have room beside each other, and its number of lines."""
    for rows in range(1, len(labels)):
        across = -(-len(labels) // rows)
        columns = [list(column) for column in np.array_split(labels, across)]  # as matplotlib does
        widths = [max(len(line) for text in c for line in text.split("\n")) for c in columns]
        if sum(width + _LEGEND_SAMPLE for width in widths) <= room:
            return across, max(sum(text.count("\n") + 1 for text in c) for c in columns)
    return 1, sum(text.count("\n") + 1 for text in labels)


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
    """A name as matplotlib shows it: folded, not as a formula, in a legend also after a `_`."""
    name = "\n".join(textwrap.wrap(name, width, break_on_hyphens=False)) or name
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _unit(largest: float, against: str) -> tuple[float, str]:
    """The number to divide an axis by, and the unit to name."""
    if against == "time":
        units = [(3600.0, ", hours"), (60.0, ", minutes")]
        return next((u for u in units if largest >= 2 * u[0]), (1.0, ", seconds"))
    if against == "steps":
        return 1.0, ""
    units = [(1e9, ", billions"), (1e6, ", millions"), (1e3, ", thousands")]
    return next((u for u in units if largest >= u[0]), (1.0, ""))


def _far_from_1(value: Any) -> Any:
    """Decays by the logarithm of their distance from 1."""
    return -np.log10(np.maximum(1 - np.asarray(value, float), 1e-9))


def _near_1(position: Any) -> Any:
    return 1 - 10.0 ** -np.asarray(position, float)


def _ticks(values: Sequence[Number], axes: Axes, best: Collection[Number]) -> list[Number]:
    """The values whose labels have room: first the best ones, then both ends, then the others."""
    positions = axes.transScale.transform([(value, 0.0) for value in values])[:, 0]
    room, ends = 0.75 * np.ptp(positions) / _MAX_TICKS, (0, len(values) - 1)
    kept: list[int] = []
    for index in sorted(range(len(values)), key=lambda i: (values[i] not in best, i not in ends)):
        if all(abs(positions[index] - positions[other]) > room for other in kept):
            kept.append(index)
    return [values[index] for index in sorted(kept)]
