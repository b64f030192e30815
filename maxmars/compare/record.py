"""`compare.json`: what a workdir compares, so that it continues with the same and no other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import maxmars
from maxmars.compare.cells import Contender, finished
from maxmars.config import TrainConfig, differences, from_dict, to_dict
from maxmars.metrics import write_json

RECORD = "compare.json"

# What neither the losses nor the times depend on.
_MAY_CHANGE = ("name", "data.verify", "data.cache_dir", "hang_timeout_s", "checkpoint.")

# In what contenders may differ: not in what their losses are measured on.
_OWN = (
    "name",
    "optimizer",
    "schedule.",
    "gradient_clip_norm",
    "gradient_multiplier",
    "num_microbatches",
    "guard.",
    "model.remat",
    "model.scan_unroll",
    "hang_timeout_s",
    "checkpoint.",
    "log.",
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared with what."""

    contenders: tuple[Contender, ...]
    baseline: str
    """Name of the contender that the others are tested against."""
    seeds: tuple[int, ...]
    """The first is that of the scan of the rates."""

    @property
    def own_fields(self) -> list[tuple[str, list[object]]]:
        """Fields other than the optimizer's in which contenders differ, with all their values."""
        first, *others = (c.config for c in self.contenders)
        names = dict.fromkeys(
            name
            for other in others
            for name, _, _ in differences(first, other)
            if not name.startswith(("optimizer", "name"))
        )
        return [(name, [_field(c.config, name) for c in self.contenders]) for name in names]


def _field(config: TrainConfig, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def check_comparable(contenders: Sequence[Contender]) -> None:
    """Check that contenders differ in how they train, and not in what they are measured on.

    Raises:
      ValueError: they do not.
    """
    first = contenders[0]
    for other in contenders[1:]:
        rows = [
            f"{name} is {old} there and {new} here"
            for name, old, new in differences(first.config, other.config)
            if not name.startswith(_OWN)
        ]
        if rows:
            raise ValueError(
                f"{first.name} and {other.name} cannot be compared: {', '.join(rows)}. Give both "
                "the same values."
            )


def open_record(comparison: Comparison, workdir: Path) -> Comparison:
    """Take up what a workdir compares, or begin it.

    Learning rates that finished cells have join the grids, so that a grid is extended by naming
    the new rates alone.

    Raises:
      ValueError: the workdir compares a contender of the same name and another config.
    """
    stored = _stored(workdir)
    for contender in comparison.contenders:
        if contender.name in stored:
            _check_same(contender, stored[contender.name], workdir)
    contenders = tuple(_with_finished_rates(c, workdir) for c in comparison.contenders)
    fields = {
        "maxmars": maxmars.__version__,
        "baseline": comparison.baseline,
        "seeds": list(comparison.seeds),
        "compared": {c.name: list(c.learning_rates) for c in contenders},
        "configs": {
            name: to_dict(config)
            for name, config in (stored | {c.name: c.config for c in contenders}).items()
        },
    }
    write_json(workdir / RECORD, fields)
    return dataclasses.replace(comparison, contenders=contenders)


def recorded_rates(workdir: Path) -> dict[str, tuple[float, ...]]:
    """The learning rates of each contender that a workdir compares; nothing if it compares none."""
    path = workdir / RECORD
    fields = json.loads(path.read_text()) if path.is_file() else {"compared": {}}
    return {name: tuple(rates) for name, rates in fields["compared"].items()}


def read_record(workdir: Path) -> Comparison:
    """What a workdir compares.

    Raises:
      FileNotFoundError: it compares nothing.
    """
    fields = json.loads((workdir / RECORD).read_text())
    contenders = tuple(
        Contender(
            name=name,
            config=from_dict(fields["configs"][name]),
            learning_rates=tuple(rates),
        )
        for name, rates in fields["compared"].items()
    )
    return Comparison(
        contenders=contenders, baseline=fields["baseline"], seeds=tuple(fields["seeds"])
    )


def _stored(workdir: Path) -> dict[str, TrainConfig]:
    path = workdir / RECORD
    if not path.is_file():
        return {}
    fields: Mapping[str, dict] = json.loads(path.read_text())["configs"]
    return {name: from_dict(config) for name, config in fields.items()}


def _check_same(contender: Contender, stored: TrainConfig, workdir: Path) -> None:
    own = ("optimizer.learning_rate", *_MAY_CHANGE)  # the cells say which rates they are of
    rows = [
        f"{name} ({old} there, {new} here)"
        for name, old, new in differences(stored, contender.config)
        if not name.startswith(own)
    ]
    if rows:
        raise ValueError(
            f"{workdir} holds another comparison: its {contender.name} differs in "
            f"{', '.join(rows)}. Continue it with its own values, or choose another --workdir."
        )


def _with_finished_rates(contender: Contender, workdir: Path) -> Contender:
    found = {result.cell.learning_rate for result in finished(workdir, contender.name)}
    rates = tuple(sorted(found | set(contender.learning_rates)))
    return dataclasses.replace(contender, learning_rates=rates)
