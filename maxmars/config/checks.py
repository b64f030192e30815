"""The rules that many fields of a config share, written as annotations of the fields.

`num_steps: Positive[int]` is an integer that must be greater than zero; the class checks it when it
is built, as every subclass of `CheckedConfig` does.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A rule for the values of a field that are not None."""

    holds: Callable[[Any], bool]
    words: str


Positive = Annotated[T, Rule(lambda value: value > 0, "must be greater than zero")]
NotNegative = Annotated[T, Rule(lambda value: value >= 0, "must not be negative")]
Fraction = Annotated[float, Rule(lambda value: 0 <= value < 1, "must lie in [0, 1)")]


class CheckedConfig:
    """A dataclass that checks the rules of its fields; subclasses add what ties fields together.

    Of every field, a number must be finite.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{type(self).__name__}.{name}={value} must be a finite number.")
        for name, rule in _rules(type(self)):
            value = getattr(self, name)
            if value is not None and not rule.holds(value):
                raise ValueError(f"{type(self).__name__}.{name}={value} {rule.words}.")


@functools.cache
def _rules(config_class: type) -> list[tuple[str, Rule]]:
    hints = typing.get_type_hints(config_class, include_extras=True)
    return [
        (name, rule)
        for name, hint in hints.items()
        for part in (hint, *typing.get_args(hint))  # `Positive[int]`, or a part of it `| None`
        for rule in getattr(part, "__metadata__", ())
        if isinstance(rule, Rule)
    ]


def require(condition: bool, message: str) -> None:
    """Raise ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)
