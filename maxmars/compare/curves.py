"""Records of runs: losses, rates and norms by step and tokens, read from their metrics.jsonl.

A `Recorded` is one run; a `Line` is the runs of several seeds, which figures draw with their mean.
A row of a comparison has only a `Curve`, the loss that shows the run.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from maxmars.config import TrainConfig, from_dict
from maxmars.distributed.files import read_json
from maxmars.distributed.workdir import CONFIG
from maxmars.train.metrics import own_metric, read_metrics

VALIDATION_LOSS, TRAINING_LOSS = "eval/loss", "train/loss"
BITS_PER_BYTE = "eval/bits_per_byte"

NORMS = {
    "train/grad_norm": "gradient norm",
    "train/update_norm": "update norm",
    "train/param_norm": "parameter norm",
}
LOGGED = {TRAINING_LOSS: "training loss", "train/learning_rate": "learning rate", **NORMS}
"""Metrics of steps that a report draws beside the validation losses, and how it calls them."""
LAYER_NORMS = {
    "layers/grad_norm": "gradient norm",
    "layers/update_rms": "update RMS",
    "layers/update_spectral_norm": "spectral norm of update",
}
NAMES = {VALIDATION_LOSS: "validation loss", **LOGGED}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The loss of one run, as a row of a comparison keeps it."""

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


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The record of one run."""

    points: Mapping[str, Sequence[Point]]
    """Metric -> points, steps increasing; the metrics of `NAMES`, `NORMS` by component of the
    model, `LAYER_NORMS` by matrix, bits per byte, and evaluations of the user's own, as far as the
    run has them."""
    step_time_s: float | None
    """Median time of a step; None where too few steps were timed."""

    @property
    def loss(self) -> str:
        """The metric that shows the run: the training loss where no more than its initial weights
        were evaluated."""
        return VALIDATION_LOSS if len(self.points.get(VALIDATION_LOSS, ())) > 1 else TRAINING_LOSS

    @property
    def curve(self) -> Curve | None:
        """The points of `loss`; None where there are none yet."""
        if self.loss not in self.points:
            return None
        steps, tokens, losses = zip(*self.points[self.loss], strict=True)
        of, time_s = NAMES[self.loss], self.step_time_s
        return Curve(loss_of=of, steps=steps, tokens=tokens, losses=losses, step_time_s=time_s)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a figure: a run, or the runs of several seeds."""

    name: str
    runs: tuple[Recorded, ...]
    """Records of at least one run, all with the same points, of which some end earlier."""

    @property
    def loss(self) -> str:
        """The metric that shows the runs, see `Recorded.loss`."""
        return self.runs[0].loss

    def points(self, metric: str) -> list[np.ndarray]:
        """Steps, tokens and values [3, points] of each run that has a metric."""
        return [np.array(run.points[metric], float).T for run in self.runs if metric in run.points]

    def mean(self, metric: str) -> np.ndarray:
        """Steps, tokens and mean values [3, points], at the steps that all runs reached."""
        # A run that diverged, or still trains, has fewer points than the others.
        runs = self.points(metric)
        steps = functools.reduce(np.intersect1d, [run[0] for run in runs])
        runs = [run[:, np.isin(run[0], steps)] for run in runs]
        return np.array([*runs[0][:2], np.mean([values for *_, values in runs], axis=0)])

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the runs of their median step's time; None where no run was timed.

        Steps times this are the time axis of a figure: compiling, evaluations and interruptions
        are left out, so that other work of the machine does not bend the curve.
        """
        times = [run.step_time_s for run in self.runs if run.step_time_s]
        return float(np.median(times)) if times else None


def shown_names(lines: Sequence[Line]) -> dict[str, str]:
    """Name of each line -> its text in tables and figures, which marks a single seed where other
    lines are means of several."""
    is_mixed = any(line.runs[1:] for line in lines)
    alone = {line.name for line in lines if is_mixed and not line.runs[1:]}
    return {line.name: f"{line.name}{' (1 seed)' * (line.name in alone)}" for line in lines}


def read_run(workdir: epath.PathLike, name: str) -> Line:
    """The run in a working directory of `maxmars train`, by this name.

    Raises:
      ValueError: there is no run, another version of maxmars wrote it, or it has no losses yet.
    """
    try:
        config = from_dict(read_json(epath.Path(workdir) / CONFIG))
    except TypeError:  # fields are missing, or of other types
        config = None
    if not isinstance(config, TrainConfig):
        raise ValueError(
            f"{workdir} holds no run, as it has no sound config.json. Name working directories of "
            "`maxmars train`, or of `maxmars compare` on a disk."
        )
    run = read_recorded(workdir, config)
    if run.curve is None:
        raise ValueError(f"the run in {workdir} has no losses yet; train it first.")
    return Line(name=name, runs=(run,))


def read_recorded(workdir: epath.PathLike, config: TrainConfig) -> Recorded:
    """The record of a run in its `metrics.jsonl`; empty without that file."""
    rows = read_metrics(workdir)
    keys = sorted({key for row in rows for key in row})
    more = [
        key
        for key in keys
        if key.rpartition("/")[0] in NORMS or key.startswith("layers/") or own_metric(key)
    ]
    points = {key: _points(rows, key, config) for key in (*NAMES, BITS_PER_BYTE, *more)}
    times = [row["perf/step_time"] for row in rows if "perf/step_time" in row]
    return Recorded(
        points={key: of_key for key, of_key in points.items() if of_key},
        step_time_s=float(np.median(times)) if times else None,
    )


def norms_by_component(lines: Sequence[Line]) -> dict[str, str]:
    """The norms by component of the model that lines have: metric -> how a report calls it."""
    return {
        metric: f"{name}, {metric.removeprefix(f'{norm}/')}"
        for norm, name in NORMS.items()
        for metric in sorted({name for line in lines for run in line.runs for name in run.points})
        if metric.startswith(f"{norm}/")
    }


def norms_by_layer(lines: Sequence[Line]) -> tuple[list[Line], dict[str, str]]:
    """The norms of matrices over the layers, each the median over the steps of a run.

    Returns:
      Lines whose points have a layer's number as steps and tokens; and metric -> how a report calls
      it, the quantities of one matrix after each other.
    """
    over_layers = [
        dataclasses.replace(line, runs=tuple(map(_over_layers, line.runs))) for line in lines
    ]
    metrics = {metric for line in over_layers for run in line.runs for metric in run.points}
    names = {}
    for matrix in sorted({metric.split("/", 2)[2] for metric in metrics}):
        names |= {f"{norm}/{matrix}": f"{matrix}\n{name}" for norm, name in LAYER_NORMS.items()}
    return over_layers, names


def _over_layers(run: Recorded) -> Recorded:
    points: dict[str, list[Point]] = {}
    for key, of_key in run.points.items():
        if key.startswith("layers/"):
            # `blocks.kernel/3` of a stack, `blocks.3.kernel` of separate layers.
            numbered = re.fullmatch(r"(.*?)[./](\d+)([./].*|)", key)
            before, number, after = numbered.groups() if numbered else (key, 0, "")
            if finite := [value for *_, value in of_key if np.isfinite(value)]:
                point = int(number), int(number), float(np.median(finite))
                points.setdefault(before + after, []).append(point)
    return Recorded(
        points={metric: sorted(of_metric) for metric, of_metric in points.items()}, step_time_s=None
    )


def _points(rows: Sequence[dict[str, Any]], key: str, config: TrainConfig) -> list[Point]:
    """The points of a metric, by step. Lines of old runs have no tokens: the config gives them."""
    # A resumed run repeats the steps after its checkpoint: the last line of a step counts.
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
