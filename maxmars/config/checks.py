"""The rules that many fields of a config share, and groups of fields, written as annotations.

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


class UsageError(ValueError):
    """A command line or config that is wrong; the process exits with code 2."""


class RuleError(ValueError):
    """A value that breaks the rule of its field."""

    def __init__(self, config_class: type, field: str, value: Any, words: str) -> None:
        """`words` say the rule, such as "must not be negative"."""
        super().__init__(f"{config_class.__name__}.{field}={value} {words}.")
        self.config_class, self.field, self.words = config_class, field, words


@dataclass(frozen=True)
class Group:
    """A heading of `--help`. As an annotation of a field it puts the field's option there, in place
    of the group of the dataclass around it."""

    title: str
    about: str = ""


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
                raise RuleError(type(self), name, value, "must be a finite number")
        for name, rule in _rules(type(self)):
            value = getattr(self, name)
            if value is not None and not rule.holds(value):
                raise RuleError(type(self), name, value, rule.words)


@functools.cache
def _rules(config_class: type) -> list[tuple[str, Rule]]:
    hints = typing.get_type_hints(config_class, include_extras=True)
    return [(name, rule) for name, hint in hints.items() for rule in _rules_in(hint)]


def _rules_in(hint: Any) -> list[Rule]:
    """The rules of `Positive[int]`, of `Positive[int] | None`, and of those with annotations."""
    own = [rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, Rule)]
    return own + [rule for part in typing.get_args(hint) for rule in _rules_in(part)]


def require(condition: bool, message: str) -> None:
    """Raise ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)
