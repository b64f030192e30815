"""The loss of a run as a function of its tokens, read from the files of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxmars.checkpoint import read
from maxmars.config import TrainConfig, from_dict
from maxmars.distributed.files import read_json
from maxmars.train.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The loss of one run."""

    loss_of: str
    """`validation loss`, or `training loss` of a run that never evaluated."""
    tokens: tuple[int, ...]
    """Tokens trained on at each point, increasing."""
    losses: tuple[float, ...]
    """Nats a token."""
    tokens_per_step: int
    step_time_s: float | None
    """Median time of a step; None where too few steps were timed."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a figure: a run, or the runs of several seeds."""

    name: str
    curves: tuple[Curve, ...]
    """At least one. All have the same points, but some may end before others."""

    @property
    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [points] and losses [curves, points], up to the end of the shortest curve."""
        count = min(len(curve.tokens) for curve in self.curves)
        losses = np.array([curve.losses[:count] for curve in self.curves])
        return np.array(self.curves[0].tokens[:count]), losses

    @property
    def seconds_per_token(self) -> float | None:
        """Median over the runs of their median step's time; None where no run was timed.

        Tokens times this is the time axis of a figure: compiling, evaluations and interruptions
        are left out, so that other work of the machine does not bend the curve.
        """
        found = [c.step_time_s / c.tokens_per_step for c in self.curves if c.step_time_s]
        return float(np.median(found)) if found else None


def read_run(workdir: Path) -> Curve:
    """The curve of the run in a working directory of `maxmars train`.

    Where its `config.json` is missing or damaged, the newest checkpoint tells the config.

    Raises:
      ValueError: there is no run, another version of maxmars wrote it, or it has no losses yet.
    """
    try:
        config = from_dict(read_json(workdir / "config.json"))
    except TypeError:  # fields are missing, or of other types
        config = None
    if not isinstance(config, TrainConfig):
        try:
            config = read(workdir / "checkpoints").run_config()
        except FileNotFoundError:
            raise ValueError(
                f"{workdir} holds no run: there is no config.json in it, or a damaged one, and no "
                "checkpoint. Name working directories of `maxmars train` or `maxmars compare`, on "
                "a disk."
            ) from None
    return read_curve(workdir, config)


def read_curve(workdir: Path, config: TrainConfig) -> Curve:
    """The curve of a run from its `metrics.jsonl`.

    Raises:
      ValueError: it has no losses yet.
    """
    rows = read_metrics(workdir)
    for key, name in (("eval/loss", "validation loss"), ("train/loss", "training loss")):
        found = {row["step"]: float(row[key]) for row in rows if key in row}
        # A run that only evaluated its initial weights is better shown by its training loss.
        if len(found) > 1 or (found and key == "train/loss"):
            steps = sorted(found)
            return Curve(
                loss_of=name,
                tokens=tuple(step * config.tokens_per_step for step in steps),
                losses=tuple(found[step] for step in steps),
                tokens_per_step=config.tokens_per_step,
                step_time_s=median_step_time(rows),
            )
    raise ValueError(f"the run in {workdir} has no losses yet; train it first.")


def median_step_time(rows: Sequence[dict[str, Any]]) -> float | None:
    """Median of the step times in these lines of metrics, in seconds; None if they have none."""
    times = [row["perf/step_time"] for row in rows if "perf/step_time" in row]
    return float(np.median(times)) if times else None
