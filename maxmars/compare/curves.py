"""What a run recorded, as functions of its tokens: losses, rates and norms, read from its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxmars.config import TrainConfig, from_dict
from maxmars.distributed.files import Workdir, read_json
from maxmars.distributed.workdir import CONFIG
from maxmars.train.metrics import own_metric, read_metrics

VALIDATION_LOSS = "validation loss"
BITS_PER_BYTE = "eval/bits_per_byte"

TRAINING_LOSS = "train/loss"
NORMS = {
    "train/grad_norm": "gradient norm",
    "train/update_norm": "update norm",
    "train/param_norm": "parameter norm",
}
LOGGED = {TRAINING_LOSS: "training loss", "train/learning_rate": "learning rate", **NORMS}
"""Metrics of steps that a report draws beside the validation losses, and how it calls them."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The loss of one run."""

    loss_of: str
    """`validation loss`, or `training loss` of a run that never evaluated."""
    steps: tuple[int, ...]
    """Steps taken at each point, increasing."""
    tokens: tuple[int, ...]
    """Tokens trained on at each point."""
    losses: tuple[float, ...]
    """Nats a token."""
    step_time_s: float | None
    """Median time of a step; None where too few steps were timed."""


Point = tuple[int, int, float]
"""Step, tokens trained on until then, and the value of a metric."""

Logged = Mapping[str, Sequence[Point]]
"""Metric -> points, steps increasing; the metrics of `LOGGED`, `NORMS` by component of the model,
bits per byte, and evaluations of the user's own, as far as a run has them."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a figure: a run, or the runs of several seeds."""

    name: str
    curves: tuple[Curve, ...]
    """At least one. All have the same points, but some may end before others."""
    logged: tuple[Logged, ...] = ()
    """One a run, where it is known."""

    @property
    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [points] and losses [curves, points], up to the end of the shortest curve."""
        count = min(len(curve.tokens) for curve in self.curves)
        losses = np.array([curve.losses[:count] for curve in self.curves])
        return np.array(self.curves[0].tokens[:count]), losses

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the runs of their median step's time; None where no run was timed.

        Steps times this are the time axis of a figure: compiling, evaluations and interruptions
        are left out, so that other work of the machine does not bend the curve.
        """
        times = [curve.step_time_s for curve in self.curves if curve.step_time_s]
        return float(np.median(times)) if times else None


def shown_names(lines: Sequence[Line]) -> dict[str, str]:
    """How tables and figures show the names of lines: that of a single seed says so where others
    are means of several."""
    is_mixed = any(line.curves[1:] for line in lines)
    alone = {line.name for line in lines if is_mixed and not line.curves[1:]}
    return {line.name: f"{line.name}{' (1 seed)' * (line.name in alone)}" for line in lines}


def fixed_tokens_per_step(lines: Sequence[Line]) -> float | None:
    """Tokens of a step, where they are the same in all steps of all runs; else None."""
    curves = [curve for line in lines for curve in line.curves]
    per_step = {t / s for c in curves for s, t in zip(c.steps, c.tokens, strict=True) if s}
    return per_step.pop() if len(per_step) == 1 else None


def read_run(workdir: Workdir, name: str) -> Line:
    """The run in a working directory of `maxmars train`, by this name.

    Raises:
      ValueError: there is no run, another version of maxmars wrote it, or it has no losses yet.
    """
    try:
        config = from_dict(read_json(workdir / CONFIG))
    except TypeError:  # fields are missing, or of other types
        config = None
    if not isinstance(config, TrainConfig):
        raise ValueError(
            f"{workdir} holds no run, as it has no sound config.json. Name working directories of "
            "`maxmars train`, or of `maxmars compare` on a disk."
        )
    curve, logged = read_curve(workdir, config), read_logged(workdir, config)
    return Line(name=name, curves=(curve,), logged=(logged,))


def read_curve(workdir: Workdir, config: TrainConfig) -> Curve:
    """The curve of a run from its `metrics.jsonl`.

    Raises:
      ValueError: it has no losses yet.
    """
    curve = _curve(read_metrics(workdir), config)
    if curve is None:
        raise ValueError(f"the run in {workdir} has no losses yet; train it first.")
    return curve


def _curve(rows: Sequence[dict[str, Any]], config: TrainConfig) -> Curve | None:
    for key, name in (("eval/loss", VALIDATION_LOSS), (TRAINING_LOSS, "training loss")):
        points = _points(rows, key, config)
        # A run that only evaluated its initial weights is better shown by its training loss.
        if len(points) > 1 or (points and key == TRAINING_LOSS):
            steps, tokens, losses = zip(*points, strict=True)
            time = median_step_time(rows)
            return Curve(loss_of=name, steps=steps, tokens=tokens, losses=losses, step_time_s=time)
    return None


def read_logged(workdir: Workdir, config: TrainConfig) -> Logged:
    """What is drawn beside the curve of a run from its `metrics.jsonl`, if it is there."""
    rows = read_metrics(workdir)
    keys = sorted({key for row in rows for key in row})
    more = [key for key in keys if key.rpartition("/")[0] in NORMS or own_metric(key)]
    points = {key: _points(rows, key, config) for key in (*LOGGED, BITS_PER_BYTE, *more)}
    return {key: of_key for key, of_key in points.items() if of_key}


def norms_by_component(lines: Sequence[Line]) -> dict[str, str]:
    """The norms by component of the model that lines have: metric -> how a report calls it."""
    return {
        metric: f"{name}, {metric.removeprefix(f'{norm}/')}"
        for norm, name in NORMS.items()
        for metric in _metrics(lines)
        if metric.startswith(f"{norm}/")
    }


def _metrics(lines: Sequence[Line]) -> list[str]:
    return sorted({name for line in lines for logged in line.logged for name in logged})


def _points(rows: Sequence[dict[str, Any]], key: str, config: TrainConfig) -> list[Point]:
    """The points of a metric, by step; of a step that is there twice, the last line counts.

    Lines of before do not tell the tokens, and count those of the config's steps.
    """
    points = {
        row["step"]: (
            row["step"],
            row.get("tokens", row["step"] * config.tokens_per_step),
            float(row[key]),
        )
        for row in rows
        if key in row
    }
    return [points[step] for step in sorted(points)]


def median_step_time(rows: Sequence[dict[str, Any]]) -> float | None:
    """Median of the step times in these lines of metrics, in seconds; None if they have none."""
    times = [row["perf/step_time"] for row in rows if "perf/step_time" in row]
    return float(np.median(times)) if times else None
