"""The rules that many fields of a config share, written as annotations.

`num_steps: Positive[int]` is an integer that must be greater than zero; the class checks it when it
is built, as every subclass of `CheckedConfig` does.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")


class UsageError(ValueError):
    """A command line or config that is wrong; the process exits with code 2."""


class RuleError(ValueError):
    """A value that breaks the rule of its field."""

    def __init__(self, config_class: type, field: str, value: Any, words: str) -> None:
        """`words` say the rule, such as "must not be negative"."""
        super().__init__(f"{config_class.__name__}.{field}={value} {words}.")
        self.field, self.value, self.words = field, value, words


@dataclass(frozen=True)
class Rule:
    """A rule for the values of a field that are not None."""

    holds: Callable[[Any], bool]
    words: str


Positive = Annotated[T, Rule(lambda value: value > 0, "must be greater than zero")]
NotNegative = Annotated[T, Rule(lambda value: value >= 0, "must not be negative")]
_IN_JAX = Rule(lambda value: value < 2**31, "must be less than 2**31: JAX counts with 32 bits")
Count = Annotated[Positive[T], _IN_JAX]
CountOrZero = Annotated[NotNegative[T], _IN_JAX]
Fraction = Annotated[float, Rule(lambda value: 0 <= value < 1, "must lie in [0, 1)")]


class CheckedConfig:
    """A dataclass that checks the types and rules of its fields; subclasses add what ties fields
    together.

    Of every field, a number must be finite, and an integer must be one of 64 bits.
    """

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for name, value in vars(self).items():
            if not fits(value, hints[name]):
                each = "a tuple, each item " if typing.get_origin(hints[name]) is tuple else ""
                words = f"must be {each}{expected(hints[name])}"
                raise RuleError(type(self), name, repr(value), words)
            if isinstance(value, float) and not math.isfinite(value):
                raise RuleError(type(self), name, value, "must be a finite number")
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, int) and not -(2**63) <= item < 2**63:
                    words = "must lie in [-2**63, 2**63), the range of integers of 64 bits"
                    raise RuleError(type(self), name, value, words)
        for name, rule in _rules(type(self)):
            value = getattr(self, name)
            if value is not None and not rule.holds(value):
                raise RuleError(type(self), name, value, rule.words)


@functools.cache
def _hints(config_class: type) -> dict[str, Any]:
    return typing.get_type_hints(config_class, include_extras=True)


@functools.cache
def _rules(config_class: type) -> list[tuple[str, Rule]]:
    return [(name, rule) for name, hint in _hints(config_class).items() for rule in _rules_in(hint)]


def _rules_in(hint: Any) -> list[Rule]:
    """The rules of `Positive[int]`, of `Positive[int] | None`, and of those with annotations."""
    own = [rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, Rule)]
    return own + [rule for part in typing.get_args(hint) for rule in _rules_in(part)]


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type: an integer is a number too, but True is neither."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return fits(value, parts[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in parts)
    if origin is tuple and parts[1:] == (Ellipsis,):
        return isinstance(value, tuple) and all(fits(item, parts[0]) for item in value)
    if hint in (int, float):
        kinds = (int, float) if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True


def expected(hint: Any) -> str:
    """What values of a type are, for an error."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return expected(parts[0])
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is dict:
        return "a dict"
    if parts:
        return " or ".join(expected(part) for part in parts if part is not Ellipsis)
    words = {
        bool: "True or False",
        int: "an integer",
        float: "a number",
        str: "text",
        Path: "a path",
        tuple: "one or more values",
        types.NoneType: "None",
    }
    return words.get(hint) or f"{hint.__name__}(...)"


def require(condition: bool, message: str) -> None:
    """Raise ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)
