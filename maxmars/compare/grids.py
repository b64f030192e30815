"""The fields that a comparison tunes, and the values that it may try of each.

A field has its name in the optimizer's config (`learning_rate`, `b1`, `gamma`); `warmup` is
`schedule.warmup_steps`, and numbers among the options of an optimizer of the user's own, such as
keyword defaults of its function, are fields too. A contender whose optimizer lacks a field is tuned
over the others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxmars.config import TrainConfig
from maxmars.config.optimizer import OptaxConfig

LEARNING_RATE, WARMUP = "learning_rate", "warmup"

_RATE_FACTORS = (0.5, 1.0, 2.0, 4.0)
_NUM_BEYOND = 8  # values by which the search may leave each end of a grid
_NUM_ABOVE_ZERO = 2  # values below a grid that may end in 0: then 0 itself
_FACTORS = {"weight_decay": 3.0, "vector_weight_decay": 3.0, "eps": 10.0}
_DECAY_DISTANCES = tuple(m * 10.0**-k for k in range(1, 5) for m in (5, 2, 1))  # 1 - b
_DECAY_NAME = re.compile(r"(\w+_)?(b|beta_?)\d?|(\w+_)?momentum")

Number = int | float


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values that the search may try of one field of a contender."""

    field: str
    values: tuple[Number, ...]
    """Increasing: the grid, and what it is extended by at its ends."""
    scanned: tuple[Number, ...]
    """The values that are all tried before the search begins; else it begins at the first."""


def value_of(config: TrainConfig, field: str) -> Number | None:
    """The value of a field; None where the config lacks it, or it is no number there."""
    optimizer = config.optimizer
    if field == WARMUP:
        value = config.schedule.warmup_steps
    elif isinstance(optimizer, OptaxConfig) and field in optimizer.options:
        value = optimizer.options[field]
    else:
        value = getattr(optimizer, field, None)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def fields_of(config: TrainConfig) -> list[str]:
    """The fields of a contender that can be tuned."""
    optimizer = config.optimizer
    names = [field.name for field in dataclasses.fields(optimizer)]
    names += optimizer.options if isinstance(optimizer, OptaxConfig) else []
    return [name for name in [*names, WARMUP] if value_of(config, name) is not None]


def with_values(config: TrainConfig, values: Mapping[str, Number]) -> TrainConfig:
    """The config with other values of fields that it has.

    Raises:
      ValueError: the config refuses one, or two of them together.
    """
    optimizer, schedule = config.optimizer, config.schedule
    changes: dict[str, Any] = {f: value for f, value in values.items() if f != WARMUP}
    if isinstance(optimizer, OptaxConfig):
        own = {f: changes.pop(f) for f in list(changes) if f in optimizer.options}
        changes["options"] = optimizer.options | own
    if WARMUP in values:
        schedule = dataclasses.replace(schedule, warmup_steps=int(values[WARMUP]))
    optimizer = dataclasses.replace(optimizer, **changes)
    return dataclasses.replace(config, optimizer=optimizer, schedule=schedule)


def make_grid(
    config: TrainConfig, field: str, given: Sequence[Number] = (), start: Number | None = None
) -> Grid | None:
    """The grid of a field of a contender.

    Learning rates are scanned, by default at 1/2, 1, 2 and 4 times the config's own. The search
    begins at the config's own value of any other field, or at the given one next to it. A grid
    goes on beyond its ends: decays such as b1 by their distance from 1, everything else by
    factors, and 0 is the lowest value of what may be 0.

    Args:
      config: of the contender.
      field: its name.
      given: values to try; none are those around the config's own.
      start: a value that was found to be good, in place of the config's own; of a learning rate
        only 1/2, 1 and 2 times it are scanned.

    Returns:
      The grid; None where the contender lacks the field.

    Raises:
      ValueError: the config refuses a given value.
    """
    own = value_of(config, field)
    if own is None:
        return None
    is_integer, factors = isinstance(own, int), _RATE_FACTORS
    if start is not None:
        own, factors = _number(start, is_integer), _RATE_FACTORS[:3]
    for value in given:
        if is_integer and value != round(value):
            raise ValueError(f"{field}={value:g} must be an integer.")
        if value < 0:
            raise ValueError(f"{field}={value:g} must not be negative.")
        with_values(config, {field: _number(value, is_integer)})  # raises if the config refuses it
    is_decay = not is_integer and field != LEARNING_RATE and _is_decay(config, field)
    if is_decay and not all(value < 1 for value in given):
        raise ValueError(f"{field}={max(given):g} must be below 1, as it is a decay.")
    if field == LEARNING_RATE:
        scanned = tuple(sorted(_number(v, is_integer) for v in given or (own * f for f in factors)))
        values = _extended(scanned, 2.0)
    elif is_decay:
        # What matters is the memory of 1 / (1 - b) steps: 10, 20, 50 for 0.9, 0.95, 0.98. So the
        # grid is one of distances from 1.
        distances = sorted(1 - v for v in given) or sorted({*_DECAY_DISTANCES, 1 - own})
        values = [1 - d for d in (_extended(distances, 2.0) if given else distances)]
        scanned = (min(given or values, key=lambda v: abs(v - own)),)
    else:
        # Factors lead nowhere from 0: the steps then begin at a usual warmup or decay.
        start = own or (max(1, config.num_steps // 50) if is_integer else 0.3)
        has_zero = 0 in given if given else _allows(config, field, _number(0, is_integer))
        positive = sorted(v for v in given if v > 0) or [start]
        values = _extended(
            positive, _FACTORS.get(field, 2.0), _NUM_ABOVE_ZERO if has_zero else _NUM_BEYOND
        )
        values = [0.0, *values] if has_zero else values
        scanned = (min(given or (own,), key=lambda v: abs(v - own)),)
    numbers = {_number(v, is_integer) for v in values}
    if is_decay:
        numbers = {v for v in numbers if 0 <= v < 1}
    allowed = [v for v in sorted(numbers) if v in scanned or _allows(config, field, v)]
    return Grid(
        field=field, values=tuple(allowed), scanned=tuple(_number(v, is_integer) for v in scanned)
    )


def _extended(
    values: Sequence[Number], factor: float, num_below: int = _NUM_BEYOND
) -> list[Number]:
    """Extend positive, increasing values beyond both ends, by the factors between the last two."""
    # 1, 2, 8 go on by the factors of their ends: ..., 0.25, 0.5 | 1, 2, 8 | 32, 128, ...
    low = values[1] / values[0] if len(values) > 1 else factor
    high = values[-1] / values[-2] if len(values) > 1 else factor
    below = [values[0] / low**k for k in range(num_below, 0, -1)]
    above = [values[-1] * high**k for k in range(1, _NUM_BEYOND + 1)]
    below, above = ([float(f"{value:.3g}") for value in side] for side in (below, above))
    return [*below, *values, *above]


def _is_decay(config: TrainConfig, field: str) -> bool:
    """Whether the config takes only values of the field below 1. The name decides for an optimizer
    of the user's own, which no config checks."""
    own, optimizer = value_of(config, field), config.optimizer
    if own is None or not 0 <= own < 1:
        return False
    if isinstance(optimizer, OptaxConfig) and field in optimizer.options:
        return _DECAY_NAME.fullmatch(field) is not None
    return not _allows(config, field, 1.0)


def _allows(config: TrainConfig, field: str, value: Number) -> bool:
    """Whether the config takes a value. A warmup of more than half of the run is left out."""
    try:
        with_values(config, {field: value})
    except ValueError:
        return False
    return field != WARMUP or 2 * value <= config.num_steps


def _number(value: Number, is_integer: bool) -> Number:
    return round(value) if is_integer else float(f"{value:.6g}")
