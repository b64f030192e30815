"""What tyro learns here: whole numbers such as 1e3, functions of the user's own, and how the fields
of a config become options. All else, such as tuples, `Literal` and `X | None`, are its own rules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Union

import docstring_parser
import tyro
from tyro import MISSING, MISSING_NONPROP
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from maxmars.config.data import ValidationSet
from maxmars.config.user_code import Source

VALUES = ConstructorRegistry()
# The config file decides which optimizer it is, not a word of the command line.
call_tyro = functools.partial(
    tyro.cli, config=(tyro.conf.AvoidSubcommands,), registry=VALUES, description=""
)


def _whole(words: list[str]) -> int:
    """A whole number; 1e3 is one, and what is written in digits keeps them all."""
    (word,) = words
    with contextlib.suppress(ValueError):
        return int(word)
    with contextlib.suppress(ValueError):
        if (number := float(word)).is_integer():
            return int(number)
    raise ValueError(f"{word} must be an integer")


@VALUES.primitive_rule
def _integer(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    return None if info.type is not int else _one_word("INT", _whole, int, str)


@VALUES.primitive_rule
def _named(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Data by a name; or a function of the user's own: a text, of which the config makes a `Source`
    here, so that its path is relative to where it is typed."""
    if info.type is ValidationSet:
        parse, metavar = ValidationSet.parse, "NAME=PLACE"
    elif info.type is Source:
        parse, metavar = str, "FILE.py:NAME"
    else:
        return None
    return _one_word(metavar, lambda words: parse(*words), info.type, lambda named: named.spec)


def _one_word(
    metavar: str, read: Callable[[list[str]], Any], kind: type, write: Callable[[Any], str]
) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: type(value) is kind,
        str_from_instance=lambda value: [write(value)],
    )


@VALUES.struct_rule
def _fields(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The fields of a dataclass, or the options of a user's own function, which are a dict.

    tyro 1.0.17 has rules for both. It keeps the line breaks of our source in the fields' texts,
    shows the `Rule`s within a union as Python writes them, and takes nothing but None for an option
    of which the default is None.
    """
    if isinstance(info.default, dict):
        any_value = int | float | bool | str | None
        kinds = {n: any_value if v is None else type(v) for n, v in info.default.items()}
        specs = [StructFieldSpec(n, kinds[n], v) for n, v in info.default.items()]
        return StructConstructorSpec(dict, tuple(specs))
    if not dataclasses.is_dataclass(info.type):
        return None
    hints = typing.get_type_hints(info.type, include_extras=True)
    given = info.default if dataclasses.is_dataclass(info.default) else info.type
    defaults = dict.fromkeys(hints, MISSING) if info.default is MISSING else defaults_of(given)
    fields = [
        StructFieldSpec(
            field.name,
            _without_rules(hints[field.name]),
            defaults[field.name],
            functools.partial(text_of, info.type, field.name),
        )
        for field in dataclasses.fields(info.type)
        if field.init
    ]
    return StructConstructorSpec(info.type, tuple(fields))


def _without_rules(hint: Any) -> Any:
    """A type without the annotations within its union, as in `Positive[int] | None`, and without
    the text of `Source | str`."""
    if typing.get_origin(hint) is Annotated:
        kind: Any = _without_rules(hint.__origin__)
        return Annotated[kind, *hint.__metadata__]
    if typing.get_origin(hint) in (Union, types.UnionType):
        kinds = [typing.get_args(Annotated[kind, None])[0] for kind in typing.get_args(hint)]
        return functools.reduce(
            operator.or_, [k for k in kinds if k is not str or Source not in kinds]
        )
    return hint


def defaults_of(arguments: Any) -> dict[str, Any]:
    """The values of an instance's fields, or the defaults of a dataclass's; `MISSING_NONPROP` where
    there is none."""
    if not isinstance(arguments, type):
        return {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(arguments):
        if field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
        else:
            has_none = field.default is dataclasses.MISSING
            values[field.name] = MISSING_NONPROP if has_none else field.default
    return values


def text_of(kind: type, name: str) -> str | None:
    """The docstring of a field."""
    return _texts(kind).get(name)


@functools.cache
def _texts(kind: type) -> dict[str, str]:
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        for field in docstring_parser.parse_from_object(base).params:
            paragraphs = (field.description or "").split("\n\n")
            texts[field.arg_name] = "\n\n".join(" ".join(part.split()) for part in paragraphs)
    return texts
