"""Figures as PNG, drawn with matplotlib (extra `report`) without its global state.

Lines differ in dashes and markers as well as in colour, so that they can be told apart in black and
white.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxmars.compare.curves import Line
from maxmars.compare.grids import Number
from maxmars.compare.statistics import Interval
from maxmars.config.numbers import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart, from dark to light.
_COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)))
_MARKERS = "osD^vPX*<"  # nine markers for eight colours: the ninth line differs from the first
_SIZE = (6.4, 4.2)  # inches
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.dpi": 150,
}
_WARM_UP = 0.12  # losses in this first share of the horizontal axis may lie above the figure
_MAX_TICKS = 10
_FACTORS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7, 10, 20, 30, 50, 100)


def require_matplotlib() -> None:
    """Check that figures can be drawn.

    Raises:
      ImportError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "figures need matplotlib; install the extra `report`: pip install 'maxmars[report]'."
        )


def draw_losses(lines: Sequence[Line], path: Path, *, against: str) -> bool:
    """Draw mean losses against tokens or time, with bands from the lowest to the highest seed.

    Args:
      lines: one for each contender or run.
      path: of the PNG; its directory is made.
      against: `tokens`, or `time`, which leaves out lines without timed steps.

    Returns:
      Whether there was anything to draw.

    Raises:
      ImportError: matplotlib is not installed.
    """
    drawn = []
    for number, line in enumerate(lines):
        factor = 1.0 if against == "tokens" else line.seconds_per_token
        if factor is not None:
            tokens, losses = line.points
            drawn.append((number, line.name, tokens * factor, losses))
    if not drawn:
        return False
    largest = max(float(x[-1]) for _, _, x, _ in drawn)
    divisor, unit = _unit(largest, against)
    with _figure(path) as axes:
        settled: list[float] = []
        for number, name, positions, losses in drawn:
            x, means, style = positions / divisor, losses.mean(axis=0), _style(number)
            axes.plot(x, means, label=_label(name), markevery=max(1, len(x) // 10), **style)
            if len(losses) > 1:
                low, high = losses.min(axis=0), losses.max(axis=0)
                axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
            late = losses[:, positions >= _WARM_UP * largest]
            settled += late[np.isfinite(late)].tolist()
        if settled and max(settled) > min(settled):
            margin = 0.05 * (max(settled) - min(settled))
            axes.set_ylim(min(settled) - margin, max(settled) + margin)
        names = {curve.loss_of for line in lines for curve in line.curves}
        axes.set_ylabel(f"{names.pop() if len(names) == 1 else 'loss'}, nats a token")
        axes.set_xlabel(f"{'tokens' if against == 'tokens' else 'time of the steps'}{unit}")
    return True


def draw_tuning(
    grids: Mapping[str, Mapping[Number, Sequence[float]]], path: Path, field: str
) -> bool:
    """Draw final losses against the values of a field: a small mark a run, a line through the
    means, and an x on the upper edge where a run diverged.

    Args:
      grids: contender -> value of the field, increasing -> final losses of its runs in nats a
        token; infinite where a run diverged.
      path: of the PNG; its directory is made.
      field: its name.

    Returns:
      Whether there was anything to draw.

    Raises:
      ImportError: matplotlib is not installed.
    """
    every = [loss for grid in grids.values() for losses in grid.values() for loss in losses]
    finite = [loss for loss in every if math.isfinite(loss)]
    if not finite:
        return False
    bottom, middle = min(finite), float(np.median(finite))
    # A run far above the others would flatten their lines.
    top = min(max(finite), middle + 4 * (middle - bottom) + 0.05)
    margin = 0.06 * (top - bottom) or 0.01
    with _figure(path) as axes:
        for number, (name, grid) in enumerate(grids.items()):
            style = _style(number)
            means = [float(np.mean(losses)) if losses else math.nan for losses in grid.values()]
            means = [mean if math.isfinite(mean) else math.nan for mean in means]
            axes.plot(list(grid), means, label=_label(name), **style)
            for rate, losses in grid.items():
                sound = [loss for loss in losses if math.isfinite(loss)]
                mark = {key: style[key] for key in ("color", "marker")}
                if len(sound) > 1:
                    axes.plot([rate] * len(sound), sound, ls="", alpha=0.5, ms=3, **mark)
                if len(sound) < len(losses):
                    axes.plot(rate, top + margin, "x", color=style["color"], clip_on=False)
        values = sorted({value for grid in grids.values() for value in grid})
        positive = [value for value in values if value > 0]
        if len(positive) < len(values) and positive:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
        elif positive and positive[-1] < 1 < 2 * positive[0]:  # a decay such as b1
            axes.set_xscale("function", functions=(_far_from_1, _near_1))
        elif positive:
            axes.set_xscale("log")
        axes.set_xticks(_ticks(values, axes))
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.tick_params(axis="x", labelrotation=30)
        axes.set_ylim(bottom - margin, top + margin)
        axes.set_xlabel("peak learning rate" if field == "learning_rate" else field)
        axes.set_ylabel("final validation loss, nats a token")
    return True


def draw_speed_ups(
    points: Mapping[str, Sequence[tuple[int, Interval]]], path: Path, baseline: str
) -> bool:
    """Draw data speed-ups, with their intervals, against the size of the model.

    Args:
      points: contender -> (parameters of the model, speed-up), increasing in size.
      path: of the PNG; its directory is made.
      baseline: the contender whose speed-up is 1.

    Returns:
      Whether there was anything to draw.

    Raises:
      ImportError: matplotlib is not installed.
    """
    if not any(points.values()):
        return False
    with _figure(path) as axes:
        for number, (name, found) in enumerate(points.items()):
            if not found:
                continue
            sizes = [size * 1.02**number for size, _ in found]  # beside each other, not on top
            means = np.array([gain.mean for _, gain in found])
            ends = [(gain.low or gain.mean, gain.high or gain.mean) for _, gain in found]
            reach = np.abs(np.transpose(ends) - means)  # below and above
            axes.errorbar(sizes, means, reach, label=_label(name), **_style(number))
        axes.axhline(1.0, color="#7F7F7F", linewidth=1.0)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_yticks([tick for tick in _FACTORS if low <= tick <= high])
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xscale("log")
        ticks = sorted({size for found in points.values() for size, _ in found})
        axes.set_xticks(ticks, [short(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("parameters")
        axes.set_ylabel(f"data speed-up over {baseline}")
    return True


@contextlib.contextmanager
def _figure(path: Path) -> Iterator[Axes]:
    """Empty axes in maxmars's style; at the end they get a legend and are saved."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        yield axes
        axes.legend()
        # Without matplotlib's version, the same figure is the same file.
        figure.savefig(path, metadata={"Software": None})


def _style(number: int) -> dict[str, Any]:
    color = _COLORS[number % len(_COLORS)]
    return {
        "color": color,
        "linestyle": _DASHES[number % len(_DASHES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markerfacecolor": "white" if number % 2 else color,
    }


def _label(name: str) -> str:
    """A name as matplotlib shows it: not as a formula, and in the legend also after a `_`."""
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _unit(largest: float, against: str) -> tuple[float, str]:
    """The number to divide an axis by, and the unit to name."""
    if against == "time":
        units = [(3600.0, ", hours"), (60.0, ", minutes")]
        return next((u for u in units if largest >= 2 * u[0]), (1.0, ", seconds"))
    units = [(1e9, ", billions"), (1e6, ", millions"), (1e3, ", thousands")]
    return next((u for u in units if largest >= u[0]), (1.0, ""))


def _far_from_1(value: Any) -> Any:
    """Decays by the logarithm of their distance from 1."""
    return -np.log10(np.maximum(1 - np.asarray(value, float), 1e-9))


def _near_1(position: Any) -> Any:
    return 1 - 10.0 ** -np.asarray(position, float)


def _ticks(values: Sequence[Number], axes: Axes) -> list[Number]:
    """The values, without those whose labels have no room beside the one before."""
    positions = axes.transScale.transform([(value, 0.0) for value in values])[:, 0]
    room, kept = np.ptp(positions) / _MAX_TICKS / 2, [0]
    for index in range(1, len(values)):
        if positions[index] - positions[kept[-1]] > room:
            kept.append(index)
    return [values[index] for index in kept]
