"""Rules added to tyro: integers such as 1e3, functions of the user's own, and fields as options.

A `ConstructorRegistry` asks the rules below before its own; a rule returns None for a type that it
leaves to tyro, such as tuples, `Literal` and `X | None`. `call_tyro` is `tyro.cli` with them.
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
# Without subcommands: the config file decides the class of the optimizer, not the command line.
call_tyro = functools.partial(
    tyro.cli, config=(tyro.conf.AvoidSubcommands,), registry=VALUES, description=""
)


def _parse_integer(words: list[str]) -> int:
    """Parse an integer. 1e3 is one; digits are not parsed as a float, which would round them."""
    (word,) = words
    with contextlib.suppress(ValueError):
        return int(word)
    with contextlib.suppress(ValueError):
        if (number := float(word)).is_integer():
            return int(number)
    raise ValueError(f"{word} must be an integer")


@VALUES.primitive_rule
def _integer(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    return None if info.type is not int else _one_word("INT", _parse_integer, int, str)


@VALUES.primitive_rule
def _by_name(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """A `ValidationSet`, or a function of the user's own. The latter stays a text until the config
    is built, which makes a `Source` with a path relative to the working directory."""
    if info.type is ValidationSet:
        parse, metavar = ValidationSet.parse, "NAME=PLACE"
    elif info.type is Source:
        parse, metavar = str, "FILE.py:NAME"
    else:
        return None
    return _one_word(metavar, lambda words: parse(*words), info.type, lambda value: value.spec)


def _one_word(
    metavar: str, parse: Callable[[list[str]], Any], kind: type, show: Callable[[Any], str]
) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda value: type(value) is kind,  # isinstance holds for True and int
        str_from_instance=lambda value: [show(value)],
    )


@VALUES.struct_rule
def _fields(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Fields of a dataclass, or the dict of options of a user's own function.

    The rules of tyro 1.0.17 for both do not suffice: they keep the line breaks of the source in the
    texts of fields, show `Rule`s within a union as Python's repr, and allow only None for an option
    with the default None.
    """
    if isinstance(info.default, dict):
        any_value = int | float | bool | str | None
        kinds = {n: any_value if v is None else type(v) for n, v in info.default.items()}
        specs = [StructFieldSpec(n, kinds[n], v) for n, v in info.default.items()]
        return StructConstructorSpec(dict, tuple(specs))
    if not dataclasses.is_dataclass(info.type):
        return None
    hints = typing.get_type_hints(info.type, include_extras=True)
    default = info.default if dataclasses.is_dataclass(info.default) else info.type
    # tyro's MISSING, unlike MISSING_NONPROP, holds for all fields of a group.
    defaults = dict.fromkeys(hints, MISSING) if info.default is MISSING else defaults_of(default)
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
    """A type without the annotations inside a union, as in `Positive[int] | None`, and without the
    `str` of `Source | str`."""
    if typing.get_origin(hint) is Annotated:
        kind: Any = _without_rules(hint.__origin__)
        return Annotated[kind, *hint.__metadata__]
    if typing.get_origin(hint) in (Union, types.UnionType):
        # Annotated types within an Annotated are flattened, so its first argument is the bare type.
        kinds = [typing.get_args(Annotated[kind, None])[0] for kind in typing.get_args(hint)]
        return functools.reduce(
            operator.or_, [k for k in kinds if k is not str or Source not in kinds]
        )
    return hint


def defaults_of(arguments: Any) -> dict[str, Any]:
    """Values of an instance's fields, or defaults of a dataclass's fields, where `MISSING_NONPROP`
    stands for none."""
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
    """The docstring of a field; None if it has none."""
    return _field_texts(kind).get(name)


@functools.cache
def _field_texts(kind: type) -> dict[str, str]:
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):  # a subclass may describe a field anew
        for field in docstring_parser.parse_from_object(base).params:
            paragraphs = (field.description or "").split("\n\n")
            texts[field.arg_name] = "\n\n".join(" ".join(part.split()) for part in paragraphs)
    return texts
