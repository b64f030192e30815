"""A cell of a comparison: one training run of a contender at one learning rate with one seed.

Its directory, `cells/CONTENDER/lr_RATE_seed_SEED`, looks like a run's. `result.json` is written in
one step when the cell is finished; without it the cell is run again from its beginning.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maxmars.config import TrainConfig
from maxmars.metrics import json_number, write_json
from maxmars.report.curves import Curve, read_config, read_curve

_RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One that takes part: a config, tuned over a grid of learning rates."""

    name: str
    config: TrainConfig
    learning_rates: tuple[float, ...]
    """The grid, increasing."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run."""

    contender: str
    learning_rate: float
    seed: int

    def directory(self, workdir: Path) -> Path:
        """Where it writes."""
        return workdir / "cells" / self.contender / f"lr_{self.learning_rate!r}_seed_{self.seed}"

    def config(self, contender: Contender) -> TrainConfig:
        """What it trains."""
        optimizer = dataclasses.replace(
            contender.config.optimizer, learning_rate=self.learning_rate
        )
        return dataclasses.replace(contender.config, optimizer=optimizer, seed=self.seed)

    def __str__(self) -> str:
        """For people."""
        return f"{self.contender}  rate {self.learning_rate:g}  seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """How a cell ended."""

    cell: Cell
    loss: float
    """Validation loss after the last step, nats a token; infinite if it diverged."""
    diverged: str | None
    """Why it counts as diverged, None if it does not."""
    step_time_s: float | None
    """Median time of a step of this cell alone; None where there were too few steps."""
    seconds: float
    """From its start to its end; of cells that ran together, its share."""
    batch_size: int
    """Cells that ran together with it, itself included."""

    def write(self, workdir: Path) -> None:
        """Write `result.json`: from now on the cell is finished."""
        fields = dataclasses.asdict(self) | {"loss": json_number(self.loss)}
        write_json(self.cell.directory(workdir) / _RESULT, fields)

    def curve(self, workdir: Path) -> Curve:
        """Its validation losses."""
        directory = self.cell.directory(workdir)
        return read_curve(directory, read_config(directory))


def read_result(cell: Cell, workdir: Path) -> CellResult | None:
    """The result of a cell; None if it is not finished."""
    path = cell.directory(workdir) / _RESULT
    return _read(path) if path.is_file() else None


def finished(workdir: Path, contender: str) -> Iterator[CellResult]:
    """The results that a workdir has of a contender, in any order."""
    for path in sorted((workdir / "cells" / contender).glob(f"*/{_RESULT}")):
        yield _read(path)


def _read(path: Path) -> CellResult:
    fields = json.loads(path.read_text())
    loss = float(fields.pop("loss"))
    assert not math.isnan(loss), "a loss that is no number is written as infinite"
    return CellResult(**fields | {"cell": Cell(**fields["cell"]), "loss": loss})
