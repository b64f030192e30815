"""Table and figure of comparisons of `examples/continuum.py`: is MARS more than NAdamW, and when?

    python tools/continuum_report.py .github/results/continuum            # the table
    python tools/continuum_report.py runs/continuum --figure runs/continuum.png

Takes all comparisons in a directory together. Those of the same batch and number of steps are a
group, in which every choice is set against `nesterov-g2`, which is NAdamW, paired by seed: the same
first weights and the same tokens. Holm's method adjusts p over all rows that have one. A rate with
* is of a search that is not at its end: it is running, seeds are missing, or a larger --budget may
find a better one. These have no p, and the figure leaves them out.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maxmars.compare.cells import (
    COMPARISON,
    Contender,
    check_comparable,
    read_comparison,
    read_results,
)
from maxmars.compare.figures import require_matplotlib
from maxmars.compare.grids import value_of, with_values
from maxmars.compare.statistics import Interval, PairedTest, holm, mean_interval, paired_test
from maxmars.compare.summary import Outcome, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFERENCE = "nesterov-g2"
KNOWN = {
    "0": "AdamW",
    "0-clip": "AdamW, clipped",
    REFERENCE: "NAdamW",
    "nesterov-c2-clip": "NAdamW, v of c², clipped",
    "0.025-c2": "MARS, no clip",
    "0.025-c2-clip": "MARS-AdamW",
    "0.025-exact": "exact MARS, no clip",
    "1-exact": "STORM in Adam",
}
GAMMAS = {  # in the order of κ
    "0": "0\nAdamW",
    "0.025": "0.025\nMARS",
    "nesterov": "1 − β₁\ng²: NAdamW",
    "0.1": "0.1\n",
}
MOMENTS = {"c2": ("v of c²", "#D55E00", "o"), "g2": ("v of g²", "#0072B2", "s")}
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "legend.frameon": False,
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A choice at its best setting."""

    contender: Contender
    sequences: int
    """In a batch."""
    steps: int
    learning_rate: float
    b1: float
    b2: float
    losses: dict[int, float]
    """Seed -> final validation loss."""
    digests: dict[int, tuple[str, str]]
    """Seed -> those of first weights and tokens."""
    search_ended: bool
    """Whether all neighbours of the setting were tried, and it ran with all seeds."""
    minus_reference: PairedTest | None = None
    """None for the reference itself, and where seeds are missing."""
    p_adjusted: float | None = None
    """None also where a search is not at its end."""

    @property
    def choice(self) -> str:
        """Its value of `optimizer` in `examples/continuum.py`."""
        return self.contender.name

    @property
    def group(self) -> tuple[int, int]:
        """What it shares with the arms that it can be paired with."""
        return self.sequences, self.steps

    @property
    def gamma(self) -> float:
        """γ at the best b1."""
        gamma = self.choice.split("-")[0]
        return 1 - self.b1 if gamma == "nesterov" else float(gamma)

    @property
    def kappa(self) -> float:
        """The factor of the difference of two gradients in c."""
        return self.gamma * self.b1 / (1 - self.b1)

    @property
    def name(self) -> str:
        """What it is called, where it is known by a name."""
        return KNOWN.get(self.choice, "")

    @property
    def words(self) -> str:
        """Its γ, and what else it is, such as `γ = 0.1, v of g²`."""
        gamma, *rest = self.choice.split("-")
        parts = ["γ = 1 − β₁" if gamma == "nesterov" else f"γ = {gamma}"]
        parts += [MOMENTS[part][0] if part in MOMENTS else part for part in rest]
        return ", ".join(parts)


def read(root: Path) -> list[Arm]:
    """All arms of the comparisons in a directory, by group, the lowest mean loss first.

    Groups without a finished cell of the reference are left out.

    Raises:
      ValueError: two arms of a group are the same choice, were not trained and evaluated alike, or
        did not begin with the same weights or read the same tokens.
    """
    arms: list[Arm] = []
    for path in sorted(root.rglob(COMPARISON)):
        if not read_results(read_comparison(path.parent), path.parent):
            continue  # just begun
        summary = summarize(path.parent)
        arms += [
            _arm(outcome, summary.digests)
            for outcome in summary.outcomes
            if outcome.best is not None
        ]
    for group in dict.fromkeys(arm.group for arm in arms):
        contenders = [arm.contender for arm in arms if arm.group == group]
        check_comparable(contenders)
        for name, count in Counter(contender.name for contender in contenders).items():
            if count > 1:
                raise ValueError(f"{count} comparisons in {root} have {name} with {title(group)}.")
    references = {arm.group: arm for arm in arms if arm.choice == REFERENCE}
    arms = [_compared(arm, references[arm.group]) for arm in arms if arm.group in references]
    # Of two settings of which one is not the last word, no p says something about two optimizers.
    tested = [
        arm
        for arm in arms
        if arm.minus_reference and arm.search_ended and references[arm.group].search_ended
    ]
    p = holm([arm.minus_reference.p for arm in tested if arm.minus_reference])
    adjusted = {(arm.group, arm.choice): value for arm, value in zip(tested, p, strict=True)}
    arms = [
        dataclasses.replace(arm, p_adjusted=adjusted.get((arm.group, arm.choice))) for arm in arms
    ]
    sizes = [arm.group for arm in arms]
    return sorted(
        arms, key=lambda a: (-sizes.count(a.group), a.group, mean_interval(_values(a)).mean)
    )


def _arm(outcome: Outcome, digests: dict[int, tuple[str, str]]) -> Arm:
    assert outcome.best is not None
    config = with_values(outcome.contender.config, dict(outcome.best.setting))
    rate, b1, b2 = (float(value_of(config, f) or 0) for f in ("learning_rate", "b1", "b2"))
    return Arm(
        contender=outcome.contender,
        sequences=config.global_batch_size,
        steps=config.num_steps,
        learning_rate=rate,
        b1=b1,
        b2=b2,
        losses=outcome.best.losses,
        digests=digests,
        search_ended=outcome.search.is_at_its_end,
    )


def _compared(arm: Arm, reference: Arm) -> Arm:
    if reference is arm:
        return arm
    seeds = [seed for seed in arm.losses if seed in reference.losses]
    for seed in seeds:
        if arm.digests[seed] != reference.digests[seed]:
            raise ValueError(
                f"{arm.choice} and {REFERENCE} of {arm.steps:,} steps differ in their first "
                f"weights or tokens of seed {seed}, so their losses cannot be paired."
            )
    found = paired_test([arm.losses[s] for s in seeds], [reference.losses[s] for s in seeds])
    return dataclasses.replace(arm, minus_reference=found)


def _values(arm: Arm) -> list[float]:
    return list(arm.losses.values())


# --- the table ------------------------------------------------------------------------------------


def markdown(arms: Sequence[Arm]) -> str:
    """One row an arm."""
    head = ["", "", "rate, β₁, β₂", "κ", "loss", "minus NAdamW's", "p", "Holm"]
    lines, group = [], None
    for arm in arms:
        if arm.group != group:
            group = arm.group
            lines += ["", title(group), "", *map(_row, (head, ["---"] * len(head)))]
        test, mark = arm.minus_reference, "" if arm.search_ended else "*"
        rate = f"{arm.learning_rate:g}{mark}, {arm.b1:g}, {arm.b2:g}"
        row = [arm.words, arm.name, rate, f"{arm.kappa:.2g}", _bounds(mean_interval(_values(arm)))]
        if test is not None:
            row.append(_bounds(test.difference, "+").replace("-", "−"))
        if test is not None and arm.p_adjusted is not None:
            row += [f"{test.p:.2g}", f"{arm.p_adjusted:.2g}"]
        lines.append(_row([*row, *[""] * (len(head) - len(row))]))
    return "\n".join(lines[1:])


def title(group: tuple[int, int]) -> str:
    """What the arms of a group share."""
    sequences, steps = group
    return f"{sequences} sequences a step, {steps:,} steps"


def _bounds(found: Interval, sign: str = "") -> str:
    half = "" if found.high is None else f" ± {found.high - found.mean:.3f}"
    return f"{found.mean:{sign}.3f}{half}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- the figure -----------------------------------------------------------------------------------


def draw(arms: Sequence[Arm], path: Path) -> None:
    """Draw the loss against γ for both v, and beside it every other arm; every seed is a dot.

    Arms whose search is not at its end, or that of their reference, are left out.

    Raises:
      ValueError: none is left.
      ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    ended = [arm for arm in arms if arm.search_ended]
    groups = {arm.group for arm in ended if arm.choice == REFERENCE}
    arms = [arm for arm in ended if arm.group in groups]
    if not arms:
        raise ValueError("there is no figure yet: no search is at its end.")
    import matplotlib
    from matplotlib.figure import Figure

    rows = list(others(arms))
    height = 1.6 + max(3.0, 0.3 * len(rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.5 if rows else 6.0, height), layout="constrained")
        left, *right = figure.subplots(1, 2 if rows else 1, squeeze=False)[0]
        draw_gammas(left, arms)
        for axes in right:
            draw_rows(axes, rows)
        figure.suptitle(
            "Final validation loss minus NAdamW's, nats; below 0 is better. Dots: seeds; bars: 95 %"
        )
        figure.savefig(path, dpi=150, format="png", metadata={"Software": None})


def draw_gammas(axes: Axes, arms: Sequence[Arm]) -> None:
    """Loss minus NAdamW's against γ, one line for each v."""
    found = {arm.choice: arm for arm in arms if arm.group == arms[0].group}
    for shift, (moment, (words, color, marker)) in zip((-0.06, 0.06), MOMENTS.items(), strict=True):
        chosen = [found.get("0" if gamma == "0" else f"{gamma}-{moment}") for gamma in GAMMAS]
        points = [(x + shift, arm) for x, arm in enumerate(chosen) if arm is not None]
        axes.plot(
            [x for x, _ in points],
            [_difference(arm).mean for _, arm in points],
            color=color,
            marker=marker,
            label=words,
        )
        for x, arm in points:
            low, high = _ends(arm)
            axes.plot([x, x], [low, high], color=color)
            dots = _dots(arm, found)
            axes.plot([x] * len(dots), dots, ".", color=color, alpha=0.4, markersize=5)
    axes.axhline(0, color="#000000", linewidth=0.8)
    ticks = [
        f"{name}\n{_kappas(found.get(gamma if gamma == '0' else f'{gamma}-{m}') for m in MOMENTS)}"
        for gamma, name in GAMMAS.items()
    ]
    axes.set_xticks(range(len(GAMMAS)), ticks)
    axes.set(
        title=f"Tuned, {title(arms[0].group)}", xlabel="γ, and κ = γ β₁ / (1 − β₁) at the best β₁"
    )
    axes.legend()


def _kappas(arms: Iterable[Arm | None]) -> str:
    """κ of two arms, of which one may be missing."""
    found = sorted({f"{arm.kappa:.2g}" for arm in arms if arm is not None})
    return f"κ = {' and '.join(found)}" if found else ""


def others(arms: Sequence[Arm]) -> Iterator[tuple[str, Arm | None, dict[str, Arm]]]:
    """Rows of the right panel: what is written beside them, the arm, and the arms of its group.

    A row without an arm is a headline.
    """
    group = None
    for arm in arms:
        is_left = arm.group == arms[0].group and arm.choice.split("-")[-1] in ("0", *MOMENTS)
        if is_left or arm.minus_reference is None:
            continue
        if arm.group != group:
            group = arm.group
            yield title(arm.group), None, {}
        yield arm.name or arm.words, arm, {a.choice: a for a in arms if a.group == group}


def draw_rows(axes: Axes, rows: Sequence[tuple[str, Arm | None, dict[str, Arm]]]) -> None:
    """Loss minus NAdamW's of each arm, one below the other."""
    for y, (_, arm, group) in enumerate(rows):
        if arm is not None:
            color = "#0072B2" if "g2" in arm.choice.split("-") else "#D55E00"
            axes.plot(_ends(arm), [y, y], color=color)
            axes.plot(_difference(arm).mean, y, "o", color=color, markersize=5)
            dots = _dots(arm, group)
            axes.plot(dots, [y] * len(dots), ".", color=color, alpha=0.4, markersize=5)
    axes.axvline(0, color="#000000", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [words for words, _, _ in rows])
    for label, (_, arm, _) in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if arm is None else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=6)
    axes.set_title("One part changed")


def _difference(arm: Arm) -> Interval:
    test = arm.minus_reference
    return Interval(mean=0.0, low=0.0, high=0.0) if test is None else test.difference


def _ends(arm: Arm) -> tuple[float, float]:
    found = _difference(arm)
    ends = (found.low, found.high)
    return tuple(found.mean if end is None else end for end in ends)  # pyrefly: ignore


def _dots(arm: Arm, group: dict[str, Arm]) -> list[float]:
    theirs = group[REFERENCE].losses
    return [loss - theirs[seed] for seed, loss in arm.losses.items() if seed in theirs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="with the comparisons")
    parser.add_argument("--figure", type=Path, help="the PNG to draw; none by default")
    arguments = parser.parse_args()
    try:
        arms = read(arguments.directory)
        if not arms:
            parser.error(f"no finished cell of {REFERENCE} is in {arguments.directory}.")
        print(markdown(arms))
        if arguments.figure is not None:
            draw(arms, arguments.figure)
            print(f"\nfigure: {arguments.figure}")
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
