"""Types and rules of fields, checked when a dataclass is built, and values of types from JSON.

`num_steps: Positive[int]` is an integer that must be greater than zero: `Positive` adds a `Rule` to
the annotation, and `CheckedConfig.__post_init__` checks it. So a field says its rule where it is
declared, and no class has a check of its own for one field. `from_json` reads records by the same
annotations, including dataclasses that are no configs.
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
    """An invalid command line or config; the process exits with code 2."""


@dataclass(frozen=True)
class Rule:
    """A rule for the values of a field, None excepted."""

    holds: Callable[[Any], bool]
    requirement: str
    """The rule for an error message, such as "must not be negative"."""


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
        lambda value: all(math.isfinite(n) for n in _elements(value) if isinstance(n, float)),
        "must be a finite number",
    ),
    Rule(
        lambda value: all(-(2**63) <= n < 2**63 for n in _elements(value) if isinstance(n, int)),
        "must lie in [-2**63, 2**63), the range of integers of 64 bits",
    ),
)


def _elements(value: Any) -> tuple[Any, ...]:
    # Not those of a dict: `normalize_options` checks the options of a user's function.
    return value if isinstance(value, tuple) else (value,)


class CheckedConfig:
    """A dataclass that checks the types and rules of its fields; subclasses check what relates
    several fields.

    In every field, numbers must be finite, and integers must fit in 64 bits.

    Raises:
      ValueError: a value has another type or breaks a rule; the message has class, field and value.
    """

    def __post_init__(self) -> None:
        for name, hint in _type_hints(type(self)).items():
            value, field = getattr(self, name), f"{type(self).__name__}.{name}"
            if not has_type(value, hint):
                each = "a tuple, each item " if typing.get_origin(hint) is tuple else ""
                raise ValueError(f"{field}={value!r} must be {each}{describe_type(hint)}.")
            for rule in (*_EVERY_FIELD, *_rules_in(hint)):
                if value is not None and not rule.holds(value):
                    raise ValueError(f"{field}={value} {rule.requirement}.")


@functools.cache
def _type_hints(config_class: type) -> dict[str, Any]:
    return typing.get_type_hints(config_class, include_extras=True)


def _rules_in(hint: Any) -> list[Rule]:
    """The rules in an annotation at any depth, as in `Positive[int]` or `Positive[int] | None`."""
    outer = [rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, Rule)]
    return outer + [rule for argument in typing.get_args(hint) for rule in _rules_in(argument)]


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value has a type: an integer is also a float, and True is neither."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return has_type(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, argument) for argument in arguments)
    if origin is Literal:
        # By type too, as 1 == True.
        return any(type(value) is type(word) and value == word for word in arguments)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return isinstance(value, tuple) and all(has_type(item, arguments[0]) for item in value)
    if hint in (int, float):
        kinds = (int, float) if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True


def union_types(hint: Any) -> list[Any]:
    """The types of a union, or the one type, without annotations."""
    if typing.get_origin(hint) is Annotated:
        return union_types(hint.__origin__)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for argument in typing.get_args(hint) for kind in union_types(argument)]
    return [hint]


def from_json(kind: Any, value: Any) -> Any:
    """Convert a JSON value to a type: objects to dataclasses or dicts, lists to tuples.

    A dataclass that is a `CheckedConfig` also checks its values.

    Raises:
      ValueError: the value is not of that type; notes of the error name the enclosing fields.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):  # `X | None`
        return None if value is None else from_json(arguments[0], value)
    if origin is Annotated:
        return from_json(arguments[0], value)
    if origin is tuple and isinstance(value, list):
        return tuple(from_json(arguments[0], item) for item in value)
    is_dataclass = dataclasses.is_dataclass(kind)
    if origin is tuple or ((is_dataclass or origin is dict) and not isinstance(value, dict)):
        wanted = "a list" if origin is tuple else "an object"
        raise ValueError(f"{json.dumps(value)[:60]} must be {wanted}")
    if not is_dataclass and origin is not dict:
        if kind is not Any and not has_type(value, kind):
            raise ValueError(f"{json.dumps(value)[:60]} must be {describe_type(kind)}")
        is_float = kind is float and isinstance(value, int)  # JSON may write 1 for 1.0
        return float(value) if is_float else value
    kinds = _type_hints(kind) if is_dataclass else dict.fromkeys(value, arguments[1])
    if is_dataclass:
        fields = dataclasses.fields(kind)
        required = {f.name for f in fields if f.default is f.default_factory is MISSING}
        # Unknown fields first: where one is misspelt, the right one is missing, too.
        if mismatched := (value.keys() - kinds.keys()) or (required - value.keys()):
            verb = "has the unknown field" if mismatched <= value.keys() else "lacks the field"
            raise ValueError(f"it {verb} {', '.join(sorted(mismatched))}")
    values = {}
    for name, item in value.items():
        with about(name):
            values[name] = from_json(kinds[name], item)
    return kind(**values) if is_dataclass else values


def describe_type(hint: Any) -> str:
    """A type in words, for an error message: "an integer or None"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return describe_type(arguments[0])
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is dict:
        return "a dict"
    if arguments:
        return " or ".join(describe_type(a) for a in arguments if a is not Ellipsis)
    names = {
        bool: "True or False",
        int: "an integer",
        float: "a number",
        str: "text",
        Path: "a path",
        tuple: "one or more values",
        types.NoneType: "None",
    }
    return names.get(hint) or f"{hint.__name__}(...)"


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)
