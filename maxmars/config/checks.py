"""The rules that many fields of a config share, written as annotations.

`num_steps: Positive[int]` is an integer that must be greater than zero; the class checks it when it
is built, as every subclass of `CheckedConfig` does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from maxmars.config.errors import about

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
AtMostOne = Annotated[T, Rule(lambda value: value <= 1, "must be at most 1")]
NotEmpty = Annotated[str, Rule(bool, "must not be empty")]


_EVERY_FIELD = (
    Rule(
        lambda value: all(math.isfinite(n) for n in _items(value) if isinstance(n, float)),
        "must be a finite number",
    ),
    Rule(
        lambda value: all(-(2**63) <= n < 2**63 for n in _items(value) if isinstance(n, int)),
        "must lie in [-2**63, 2**63), the range of integers of 64 bits",
    ),
)


def _items(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class CheckedConfig:
    """A dataclass that checks the types and rules of its fields; subclasses add what ties fields
    together.

    Of every field, a number must be finite, and an integer must be one of 64 bits.
    """

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            value = getattr(self, name)
            if not fits(value, hint):
                each = "a tuple, each item " if typing.get_origin(hint) is tuple else ""
                raise RuleError(type(self), name, repr(value), f"must be {each}{expected(hint)}")
            for rule in (*_EVERY_FIELD, *_rules_in(hint)):
                if value is not None and not rule.holds(value):
                    raise RuleError(type(self), name, value, rule.words)


@functools.cache
def _hints(config_class: type) -> dict[str, Any]:
    return typing.get_type_hints(config_class, include_extras=True)


def _rules_in(hint: Any) -> list[Rule]:
    """The rules of `Positive[int]`, of `Positive[int] | None`, and of those with annotations."""
    own = [rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, Rule)]
    return own + [rule for argument in typing.get_args(hint) for rule in _rules_in(argument)]


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type: an integer is a number too, but True is neither."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return fits(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in arguments)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return isinstance(value, tuple) and all(fits(item, arguments[0]) for item in value)
    if hint in (int, float):
        kinds = (int, float) if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True


def kinds_of(hint: Any) -> list[Any]:
    """The types of a union, without their annotations."""
    if typing.get_origin(hint) is Annotated:
        return kinds_of(hint.__origin__)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for argument in typing.get_args(hint) for kind in kinds_of(argument)]
    return [hint]


def read_as(kind: Any, value: Any) -> Any:
    """What JSON holds as a type: its objects as dataclasses or dicts, its lists as tuples.

    The values of a dataclass are checked by the class, if that is a `CheckedConfig`.

    Raises:
      ValueError: it is not of that type; notes name the fields around it.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):  # `X | None`
        return None if value is None else read_as(arguments[0], value)
    if origin is Annotated:
        return read_as(arguments[0], value)
    if origin is tuple and isinstance(value, list):
        return tuple(read_as(arguments[0], item) for item in value)
    is_record = dataclasses.is_dataclass(kind)
    if origin is tuple or ((is_record or origin is dict) and not isinstance(value, dict)):
        wanted = "a list" if origin is tuple else "an object"
        raise ValueError(f"{json.dumps(value)[:60]} must be {wanted}")
    if not is_record and origin is not dict:
        if kind is not Any and not fits(value, kind):
            raise ValueError(f"{json.dumps(value)[:60]} must be {expected(kind)}")
        is_float = kind is float and isinstance(value, int)  # JSON may write 1 for 1.0
        return float(value) if is_float else value
    kinds = _hints(kind) if is_record else dict.fromkeys(value, arguments[1])
    if is_record:
        fields = dataclasses.fields(kind)
        required = {f.name for f in fields if f.default is f.default_factory is MISSING}
        if wrong := (value.keys() - kinds.keys()) or (required - value.keys()):
            verb = "has the unknown field" if wrong <= value.keys() else "lacks the field"
            raise ValueError(f"it {verb} {', '.join(sorted(wrong))}")
    values = {}
    for name, item in value.items():
        with about(name):
            values[name] = read_as(kinds[name], item)
    return kind(**values) if is_record else values


def expected(hint: Any) -> str:
    """What values of a type are, for an error."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return expected(arguments[0])
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is dict:
        return "a dict"
    if arguments:
        return " or ".join(expected(argument) for argument in arguments if argument is not Ellipsis)
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
