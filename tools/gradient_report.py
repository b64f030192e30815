"""The Markdown table and the figure of `gradient_variance.py`, of its JSON alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gradient_error import Errors, Moments, errors, lag, noise_gain

from maxmars.compare.statistics import Interval, mean_interval

PARTS = ("all", "embedding", "attention", "mlp")
KINDS = ("approximate", "exact")
SYMBOLS = ("c", "m")  # of `gradient_error.Estimates`
PLAIN = ("g", "m of g")  # the same with γ = 0
MIN_BLOCKS = 3

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


class Result:
    """What was measured, as arrays.

    Shape letters: S seeds, P windows of steps, W steps of a window, E estimators (kind and clip),
    Q `Estimates`, G gammas.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        """Read the content of the JSON."""
        self.found, self.seeds = found, found["seeds"]
        first = self.seeds[0]
        self.b1, self.gammas = found["b1"], found["gammas"]
        self.names, self.windows = first["estimators"], first["windows"]
        self._parts = np.array([matrix["part"] for matrix in first["matrices"]])
        self._held, self._moments, self._held_by_step, self._moments_by_step = (
            np.array([seed[key] for seed in self.seeds])
            for key in ("held", "moments", "held_by_step", "moments_by_step")
        )

    @property
    def chosen(self) -> int:
        """The index of the γ that trains, or of the smallest one besides 0."""
        gamma = self.seeds[0]["config"]["optimizer"].get("gamma")
        return self.gammas.index(gamma) if gamma in self.gammas[1:] else 1

    def held(self, part: str = "all") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """‖∇F‖², the noise of the held batch and that of g, each [S, P], of a part's matrices."""
        signal, floor, noise = np.moveaxis(self._of(part, self._held), 2, 0)
        return signal, floor, noise

    def errors(self, part: str = "all") -> Errors:
        """`Errors`, each [S, P, E, Q, G], over the steps of each window."""
        moments = Moments(*np.moveaxis(self._of(part, self._moments), -1, 0))
        signal, *_ = self.held(part)
        return errors(moments, signal[:, :, None, None, None])

    def _of(self, part: str, array: np.ndarray) -> np.ndarray:
        return array[..., (self._parts == part) | (part == "all")].sum(axis=-1)

    def ratios(
        self, kind: str, quantity: int, gamma: int, of: str = "total"
    ) -> list[Interval | None]:
        """An error over that of the same estimate with γ = 0, of all matrices, in each window.

        Args:
          kind: one of `KINDS`.
          quantity: 0 for c, 1 for m.
          gamma: index of γ.
          of: which of `Errors`.
        """
        signal = self._held_by_step[..., 0][..., None, None, None]
        by_step = errors(Moments(*np.moveaxis(self._moments_by_step, -1, 0)), signal)
        array = getattr(by_step, of)[:, :, :, :, quantity]  # [S, P, W, E, G]
        top, bottom = array[..., self.names.index(kind), gamma], array[..., 0, 0]
        memory = round(1 / (1 - self.b1)) if quantity else 2
        return [ratio_interval(top[:, p], bottom[:, p], memory) for p in range(len(self.windows))]


def ratio_interval(top: np.ndarray, bottom: np.ndarray, memory_steps: int) -> Interval | None:
    """The ratio of two means over steps, with an interval that their correlation does not narrow.

    With several seeds it is Student's over the logarithms of the seeds' ratios. With one seed it
    is over those of blocks of twice as many steps as an estimate remembers, where a window has
    `MIN_BLOCKS` of them; else there is none.

    Args:
      top: [seeds, steps].
      bottom: the same.
      memory_steps: over how many steps an estimate remembers batches.

    Returns:
      None where a mean is not positive, which is the held batch's noise.
    """
    seeds, steps = top.shape
    blocks = 1 if seeds > 1 else steps // (2 * memory_steps)
    if blocks < MIN_BLOCKS:
        blocks = 1
    tops, bottoms = (
        np.array([block.mean(axis=1) for block in np.array_split(x, blocks, axis=1)]).ravel()
        for x in (top, bottom)
    )
    if min(tops.min(), bottoms.min()) <= 0:
        return None
    found = mean_interval(np.log(tops / bottoms).tolist())
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Interval(mean=math.exp(found.mean), low=low, high=high)


def closed_form(result: Result, quantity: int, gamma: int, of: str) -> float:
    """The ratio of `variance` or of `bias` of approximate MARS; g has no bias."""
    with_mars, without = (
        (noise_gain(result.b1, value), lag(result.b1, value))
        for value in (result.gammas[gamma], 0.0)
    )
    if of == "bias":
        return (with_mars[1][quantity] / without[1][quantity]) ** 2
    return with_mars[0][quantity] / without[0][quantity]


# --- the tables -----------------------------------------------------------------------------------


def markdown(result: Result, figure: str) -> str:
    """The report: what MARS changes on the whole, the figure, and tables along the run."""
    found, config = result.found, result.seeds[0]["config"]
    gamma = result.gammas[result.chosen]
    kappa = gamma * result.b1 / (1 - result.b1)
    seeds = ", ".join(str(seed["seed"]) for seed in result.seeds)
    return "\n".join(
        [
            "# Does MARS reduce variance?",
            "",
            "```sh",
            found["command"],
            "```",
            "",
            f"{config['name']}, {config['num_steps']:,} steps, seeds {seeds}. In "
            f"{len(result.windows)} windows of {found['window']} steps, estimates of the gradient "
            f"are compared with ∇F, the gradient of {found['held']:,} training windows that the "
            "run does not read, new ones in each step; their noise is subtracted. An estimate is "
            "off by a variance, which is the batches' doing, and by a bias, which would be the "
            "same on other batches, such as the lag of a momentum. All matrices count together "
            "unless a table says otherwise.",
            "",
            f"MARS with γ = {gamma:g} (κ = {kappa:.3g}) over the same without: mean over the "
            "windows, lowest and highest window.",
            "",
            *overall(result),
            "",
            *shares(result),
            "",
            f"![errors along the run]({figure})",
            "",
            "Approximate: c = g + κ (g − the gradient of the step before). Exact: c = g + κ (g − "
            "the gradient of the same batch at the parameters before). m: the moving average of c"
            ", in approximate MARS γ g + (1 − γ) (m of g) after the first steps. Closed form: of "
            "approximate MARS, if batches are independent, and the variance of g and the change of "
            "∇F stay. Brackets: 95 %, over seeds, or over blocks of one run.",
            "",
            *along(result),
            "",
            *errors_along(result, 0, "total"),
            "",
            *errors_along(result, 1, "total"),
            "",
            *errors_along(result, 1, "variance"),
            "",
            *splits(result),
            "",
            *directions(result),
            "",
            *by_part(result),
            "",
        ]
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def cells(values: np.ndarray) -> list[str]:
    """Means over seeds of an array [S, P]."""
    return [number(value) for value in values.mean(axis=0)]


def steps_of(result: Result) -> list[str]:
    return [f"{first}–{last}" for first, last in result.windows]


def shown(interval: Interval | None) -> str:
    """A ratio with its interval; a question mark where the held batch's noise hides it."""
    if interval is None:
        return "?"
    if interval.low is None or interval.high is None:
        return number(interval.mean)
    return f"{number(interval.mean)} ({number(interval.low)} to {number(interval.high)})"


def label(quantity: int, name: str, gamma: float) -> str:
    """An estimate in words, such as `m of g, clipped` or `c, exact, γ = 0.1`."""
    kind, _, clip = name.partition(", ")
    words = [PLAIN[quantity]] if gamma == 0 else [SYMBOLS[quantity], kind]
    return ", ".join([*words, *filter(None, [clip]), *([f"γ = {gamma:g}"] if gamma else [])])


class Estimate(NamedTuple):
    """The place of an estimate in arrays [..., E, Q, G], and its words."""

    place: tuple[Any, ...]
    words: str


def estimates(result: Result, quantity: int, names: Sequence[str] = KINDS) -> list[Estimate]:
    """Those of c or of m; the two kinds are one where γ = 0."""
    return [
        Estimate((..., result.names.index(name), quantity, index), label(quantity, name, gamma))
        for name, (index, gamma) in itertools.product(names, enumerate(result.gammas))
        if gamma or name.startswith(KINDS[0])
    ]


def overall(result: Result) -> list[str]:
    """Ratios of errors and variances with the γ that trains, over all windows."""

    def cell(kind: str, quantity: int, of: str) -> str:
        intervals = result.ratios(kind, quantity, result.chosen, of)
        values = [interval.mean for interval in intervals if interval is not None]
        if len(values) < len(intervals):
            return "?"
        mean = math.exp(float(np.mean(np.log(values))))
        return f"**{number(mean)}** ({number(min(values))} to {number(max(values))})"

    def closed(kind: str, quantity: int, of: str) -> str:
        if kind == KINDS[1]:
            return ""
        return number(closed_form(result, quantity, result.chosen, of))

    rows = []
    for quantity, kind in itertools.product(range(2), KINDS):
        row = [f"{SYMBOLS[quantity]}, {kind}, over {PLAIN[quantity]}"]
        row.append(cell(kind, quantity, "total"))
        for of in ("variance", "bias"):
            has_it = quantity == 1 or of == "variance"
            row += [f(kind, quantity, of) if has_it else "" for f in (cell, closed)]
        rows.append(row)
    head = ["", "E‖ĉ − ∇F‖²", "its variance", "closed form", "its bias²", "closed form"]
    return table(head, rows)


def shares(result: Result) -> list[str]:
    """How much of the error of the plain momentum is bias."""
    found = result.errors()
    share = (found.bias / (found.variance + found.bias))[..., 0, 1, 0].mean(axis=0)
    return [
        f"Of the error of m of g, bias² is {share.mean():.0%} "
        f"({share.min():.0%} to {share.max():.0%} in a window)."
    ]


def along(result: Result) -> list[str]:
    """The run, and what it is without MARS."""
    (signal, floor, noise), found = result.held(), result.errors()
    g, m = (..., 0, 0, 0), (..., 0, 1, 0)
    losses = [
        [np.mean(seed["losses"][first - 1 : last]) for first, last in result.windows]
        for seed in result.seeds
    ]
    rows = {
        "loss, nats a token": np.array(losses),
        "‖∇F‖²": signal,
        "E‖g − ∇F‖² over ‖∇F‖²": found.total[g] / signal,
        "its variance, by the twin": found.variance[g] / signal,
        "its variance, by the parts of the held batch": noise / signal,
        "its bias², which is none: what chance does here": found.bias[g] / signal,
        "E‖m of g − ∇F‖² over ‖∇F‖²": found.total[m] / signal,
        "the same of its twin": found.of_twin[m] / signal,
        "noise of the held batch over ‖∇F‖²": floor / signal,
    }
    head = ["along the run, steps", *steps_of(result)]
    return table(head, ([name, *cells(values)] for name, values in rows.items()))


def errors_along(result: Result, quantity: int, of: str) -> list[str]:
    """Ratios of errors in each window, of c or of m."""
    symbol, plain = SYMBOLS[quantity], PLAIN[quantity]
    title = f"E‖{symbol} − ∇F‖² over E‖{plain} − ∇F‖², steps"
    if of == "variance":
        title = f"variance of {symbol} over that of {plain}, steps"
    # The error of c is nearly all variance, that of m is not.
    is_of_variance, rows = quantity == 0 or of == "variance", []
    for kind, (index, gamma) in itertools.product(KINDS, enumerate(result.gammas)):
        row = [f"{kind}, γ = {gamma:g}", *map(shown, result.ratios(kind, quantity, index, of))]
        if is_of_variance:
            closed = number(closed_form(result, quantity, index, "variance"))
            row.insert(1, closed if kind == KINDS[0] else "")
        rows.append(row)
    head = [title, *(["variance, closed form"] if is_of_variance else []), *steps_of(result)]
    return table(head, rows)


def splits(result: Result) -> list[str]:
    """Variance and bias² of the momenta."""
    found, (signal, *_) = result.errors(), result.held()
    rows = []
    for place, words in estimates(result, 1):
        both = (cells(part[place] / signal) for part in (found.variance, found.bias))
        rows.append([words, *(f"{a} + {b}" for a, b in zip(*both, strict=True))])
    return table(["variance + bias², over ‖∇F‖², steps", *steps_of(result)], rows)


def directions(result: Result) -> list[str]:
    """1 − cos², which a clip that scaled all matrices alike would not change."""
    found = result.errors().direction
    rows = (
        [words, *cells(found[place])]
        for quantity in range(2)
        for place, words in estimates(result, quantity, result.names)
        if place[-1] in (0, result.chosen)
    )
    return table(["1 − cos² of the angle to ∇F, steps", *steps_of(result)], rows)


def by_part(result: Result) -> list[str]:
    """Ratios of errors by part of the model, over all windows."""
    found = {part: result.errors(part) for part in PARTS}

    def cell(part: str, kind: str, quantity: int) -> str:
        total = found[part].total[..., quantity, :]
        values = total[..., result.names.index(kind), result.chosen] / total[..., 0, 0]
        return number(math.exp(np.log(values).mean())) if (values > 0).all() else "?"

    gamma = f"γ = {result.gammas[result.chosen]:g}"
    rows = (
        [
            f"E‖{SYMBOLS[q]} − ∇F‖² over E‖{PLAIN[q]} − ∇F‖², {kind}, {gamma}",
            *(cell(part, kind, q) for part in PARTS),
        ]
        for q, kind in itertools.product(range(2), KINDS)
    )
    return table(["by part of the model, mean over the windows", *PARTS], rows)


# --- the figure -----------------------------------------------------------------------------------

PANELS = (
    (0, "total", "Error of the corrected gradient c", "E‖c − ∇F‖² over E‖g − ∇F‖²"),
    (1, "total", "Error of the momentum m: variance + bias²", "E‖m − ∇F‖² over that of m of g"),
    (1, "variance", "Variance of the momentum m", "variance of m over that of m of g"),
)
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.markersize": 3,
}


def draw(result: Result, path: Path) -> None:
    """Draw along the run what MARS does to the errors of c and m, and to the variance of m.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from maxmars.compare.figures import require_matplotlib

    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 4.0), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            draw_panel(result, axes, *panel)
        handles = [
            Line2D([], [], color=color_of(i), label=f"γ = {gamma:g}")
            for i, gamma in enumerate(result.gammas)
            if gamma
        ]
        dashes: dict[str, Any] = {
            "approximate": "-",
            "exact": "--",
            "variance of approximate, closed form": ":",
        }
        handles += [
            Line2D([], [], color="#7F7F7F", linestyle=dash, label=name)
            for name, dash in dashes.items()
        ]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=len(handles), frameon=False
        )
        figure.savefig(path, dpi=150, format="png", metadata={"Software": None})


def draw_panel(result: Result, axes: Any, quantity: int, of: str, title: str, unit: str) -> None:
    """Draw one ratio along the run, by γ and kind."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    middles = [(first + last) / 2 for first, last in result.windows]
    everything = [1.0]
    for (index, gamma), kind in itertools.product(enumerate(result.gammas), KINDS):
        if gamma == 0:
            continue
        color, found = color_of(index), result.ratios(kind, quantity, index, of)
        means = [math.nan if r is None else r.mean for r in found]
        axes.plot(middles, means, "-" if kind == KINDS[0] else "--", color=color, marker="o")
        bounded = [r is not None and r.low is not None for r in found]
        low, high = ([getattr(r, end, None) or math.nan for r in found] for end in ("low", "high"))
        axes.fill_between(
            middles, low, high, where=bounded, color=color, alpha=0.15, linewidth=0
        )  # fmt: skip
        everything += means
        if kind == KINDS[0] and (quantity, of) != (1, "total"):
            axes.axhline(
                closed_form(result, quantity, index, "variance"), color=color, ls=":", lw=1.0
            )
    axes.axhline(1.0, color="#000000", linewidth=1.2)
    axes.set(title=title, xlabel="step", ylabel=unit, xscale="log")
    axes.set_xticks(middles, [f"{middle:.0f}" for middle in middles])
    axes.set_xticks([], minor=True)
    if np.nanmax(everything) > 4 * np.nanmin(everything):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for words, side in (("more", "bottom"), ("less", "top")):
        axes.annotate(
            *(words, (1.0, 1.0)),
            xycoords=axes.get_yaxis_transform(),
            xytext=(3, 3 if side == "bottom" else -3),
            textcoords="offset points",
            va=side,
            fontsize=8,
        )


def color_of(gamma: int) -> str:
    """The colour of a γ by its index."""
    return COLORS[(gamma - 1) % len(COLORS)]
