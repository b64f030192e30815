"""The loss of a run as a function of its tokens and of its time, read from what the run wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxmars.config import TrainConfig, from_dict
from maxmars.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The loss of one run."""

    loss_name: str
    """`validation loss`, or `training loss` of a run that never evaluated."""
    tokens: tuple[int, ...]
    """Tokens trained on at each point, increasing."""
    losses: tuple[float, ...]
    """Nats a token."""
    tokens_per_step: int
    step_time_s: float | None
    """Median time of a step; None where too few were timed."""

    @property
    def seconds(self) -> tuple[float, ...] | None:
        """Time of training at each point: steps times their median time. Compiling, evaluations
        and interruptions are left out, so that a busy machine does not bend the curve."""
        if self.step_time_s is None:
            return None
        return tuple(t / self.tokens_per_step * self.step_time_s for t in self.tokens)


@dataclass(frozen=True, kw_only=True)
class Line:
    """What a figure draws as one line: a run, or the runs of several seeds."""

    name: str
    curves: tuple[Curve, ...]
    """At least one; of the same tokens and with the same points, up to runs that ended early."""

    @property
    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [points] and losses [curves, points], as far as all curves go."""
        count = min(len(curve.tokens) for curve in self.curves)
        losses = np.array([curve.losses[:count] for curve in self.curves])
        return np.array(self.curves[0].tokens[:count]), losses

    @property
    def seconds_per_token(self) -> float | None:
        """Median over the runs; None where none was timed."""
        found = [c.step_time_s / c.tokens_per_step for c in self.curves if c.step_time_s]
        return float(np.median(found)) if found else None


def read_run(workdir: Path) -> tuple[str, Curve]:
    """Name and curve of the run in a working directory of `maxmars train`.

    Raises:
      ValueError: there is no run, or it has no losses yet.
    """
    config = read_config(workdir)
    return config.name, read_curve(workdir, config)


def read_config(workdir: Path) -> TrainConfig:
    """The config of the run in a working directory.

    Raises:
      ValueError: there is no run, or another version of maxmars wrote it.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{workdir} holds no run: there is no config.json in it. Name working directories of "
            "`maxmars train` or `maxmars compare`, on a disk."
        )
    return from_dict(json.loads(path.read_text()))


def read_curve(workdir: Path, config: TrainConfig) -> Curve:
    """The curve of a run from its `metrics.jsonl`.

    Raises:
      ValueError: it has no losses yet.
    """
    rows = read_metrics(workdir)
    for key, name in (("eval/loss", "validation loss"), ("train/loss", "training loss")):
        found = {row["step"]: float(row[key]) for row in rows if key in row}
        if len(found) > 1 or (found and key == "train/loss"):
            steps = sorted(found)
            return Curve(
                loss_name=name,
                tokens=tuple(step * config.tokens_per_step for step in steps),
                losses=tuple(found[step] for step in steps),
                tokens_per_step=config.tokens_per_step,
                step_time_s=median_step_time(rows),
            )
    raise ValueError(f"the run in {workdir} has no losses yet; train it first.")


def median_step_time(rows: Sequence[dict[str, Any]]) -> float | None:
    """Median over the lines that have one, in seconds."""
    times = [row["perf/step_time"] for row in rows if "perf/step_time" in row]
    return float(np.median(times)) if times else None
