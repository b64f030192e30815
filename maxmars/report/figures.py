"""Figures as PNG and SVG, readable in black and white: line styles and markers, not only colours.

Drawn with matplotlib (extra `report`), without its global state.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxmars.report.curves import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which the colour-blind can tell apart, from dark to light.
_COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)))
_MARKERS = "osD^vPX*<"  # nine, so that the ninth line is not the first again
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
    "svg.hashsalt": "maxmars",  # the same figure is the same file
}
_WARM_UP = 0.12  # share of the horizontal axis whose losses may lie above the figure


@dataclass(frozen=True, kw_only=True)
class RatePoint:
    """The runs at one learning rate."""

    learning_rate: float
    losses: tuple[float, ...]
    """Final losses of the seeds; infinite where a run diverged."""


@dataclass(frozen=True, kw_only=True)
class RateLine:
    """The final losses of one contender over its grid."""

    name: str
    points: tuple[RatePoint, ...]


def require_matplotlib() -> None:
    """Check that figures can be drawn.

    Raises:
      ImportError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "figures need matplotlib; install the extra `report`: pip install 'maxmars[report]'."
        )


def draw_losses(lines: Sequence[Line], path: Path, *, against: str) -> list[Path]:
    """Draw mean losses against tokens or time, with bands from the lowest to the highest seed.

    Args:
      lines: one for each contender or run.
      path: of the files, without suffix.
      against: `tokens` or `time`; lines without timed steps are left out of the latter.

    Returns:
      The files; none where there is nothing to draw.

    Raises:
      ImportError: matplotlib is not installed.
    """
    drawn = []
    for number, line in enumerate(lines):
        factor = 1.0 if against == "tokens" else line.seconds_per_token
        if factor is None:
            continue
        tokens, losses = line.points
        drawn.append((number, line, tokens * factor, losses))
    if not drawn:
        return []
    largest = max(float(x[-1]) for _, _, x, _ in drawn)
    divisor, unit = _scale(largest, against)
    with _figure(path) as (figure, axes, files):
        lows, tops = [], []
        for number, line, positions, losses in drawn:
            x = positions / divisor
            means = losses.mean(axis=0)
            style = _style(number)
            axes.plot(x, means, label=line.name, markevery=max(1, len(x) // 10), **style)
            if len(losses) > 1:
                low, high = losses.min(axis=0), losses.max(axis=0)
                axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
            late = means[x >= _WARM_UP * largest / divisor]
            finite = late[np.isfinite(late)].tolist()
            lows += [min(finite)] if finite else []
            tops += [max(finite)] if finite else []
        if lows and max(tops) > min(lows):
            margin = 0.05 * (max(tops) - min(lows))
            axes.set_ylim(min(lows) - margin, max(tops) + margin)
        names = {curve.loss_name for line in lines for curve in line.curves}
        axes.set_ylabel(f"{names.pop() if len(names) == 1 else 'loss'}, nats a token")
        axes.set_xlabel(f"{'tokens' if against == 'tokens' else 'time of the steps'}{unit}")
        axes.legend()
        _save(figure, path, files)
    return files


def draw_rates(lines: Sequence[RateLine], path: Path) -> list[Path]:
    """Draw final losses against learning rates: a mark a run, a line through the means, and an x
    on the upper edge where a run diverged.

    Raises:
      ImportError: matplotlib is not installed.
    """
    finite = [x for line in lines for p in line.points for x in p.losses if math.isfinite(x)]
    if not finite:
        return []
    bottom, top = min(finite), max(finite)
    middle = float(np.median(finite))
    top = min(top, middle + 4 * (middle - bottom) + 0.05)  # a run far above would flatten the rest
    margin = 0.06 * (top - bottom) or 0.01
    with _figure(path) as (figure, axes, files):
        for number, line in enumerate(lines):
            style = _style(number)
            rates = [p.learning_rate for p in line.points]
            means = [float(np.mean(p.losses)) if p.losses else math.nan for p in line.points]
            means = [m if math.isfinite(m) else math.nan for m in means]
            axes.plot(rates, means, label=line.name, **style)
            for point in line.points:
                each = [(point.learning_rate, x) for x in point.losses if math.isfinite(x)]
                if len(each) > 1:
                    mark = {k: style[k] for k in ("color", "marker")}
                    axes.plot(*zip(*each, strict=True), ls="", alpha=0.5, ms=3, **mark)
                if len(each) < len(point.losses):
                    axes.plot(
                        point.learning_rate, top + margin, "x", color=style["color"], clip_on=False
                    )
        axes.set_xscale("log")
        rates = sorted({p.learning_rate for line in lines for p in line.points})
        axes.set_xticks(rates if len(rates) <= 8 else _sparse(rates))
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
        axes.tick_params(axis="x", labelrotation=30)
        axes.set_ylim(bottom - margin, top + margin)
        axes.set_xlabel("peak learning rate")
        axes.set_ylabel("final validation loss, nats a token")
        axes.legend()
        _save(figure, path, files)
    return files


@contextlib.contextmanager
def _figure(path: Path) -> Generator[tuple[Figure, Axes, list[Path]], None, None]:
    """An empty figure in maxmars's style, and a list for the files that it is saved to."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        yield figure, figure.add_subplot(), []


def _save(figure: Figure, path: Path, files: list[Path]) -> None:
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
        files.append(path.with_suffix(suffix))
        figure.savefig(files[-1], metadata=metadata)


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLORS[number % len(_COLORS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "markerfacecolor": "white" if number % 2 else _COLORS[number % len(_COLORS)],
    }


def _scale(largest: float, against: str) -> tuple[float, str]:
    """What to divide an axis by, and the unit to name."""
    if against == "time":
        for seconds, unit in ((3600.0, "hours"), (60.0, "minutes")):
            if largest >= 2 * seconds:
                return seconds, f", {unit}"
        return 1.0, ", seconds"
    for count, unit in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if largest >= count:
            return count, f", {unit}"
    return 1.0, ""


def _sparse(rates: Sequence[float]) -> list[float]:
    """Some of the rates, far enough apart for their labels."""
    kept: list[float] = []
    for rate in rates:
        if not kept or rate / kept[-1] > (rates[-1] / rates[0]) ** (1 / 8):
            kept.append(rate)
    return kept
