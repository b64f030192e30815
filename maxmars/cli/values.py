"""How words of a command line become a number, a choice, True, False, None, or several values.

tyro's own rules do so, too; these also take 1e3 for a whole number, say what a word must be by the
same words as the config's checks, and refuse an option of several values that has none.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from maxmars.config.checks import expected, fits, kinds_of
from maxmars.config.load import did_you_mean
from maxmars.config.user_code import Source


def _whole(word: str) -> int:
    """A whole number; 1e3 is one, and what is written in digits keeps them all."""
    with contextlib.suppress(ValueError):
        return int(word)
    number = float(word)
    if not number.is_integer():
        raise ValueError
    return int(number)


# How help writes a value of a type, and how its word is read.
_TYPES: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("N", _whole),
    float: ("X", float),
    str: ("TEXT", str),
    Path: ("PATH", Path),
}
_WORDS: dict[Any, dict[str, Any]] = {
    bool: {"True": True, "False": False},
    type(None): {"None": None},
}


@functools.cache  # a config has a hundred fields of twenty types, and tyro asks for each ten times
def _spec_of(hint: Any) -> PrimitiveConstructorSpec[Any] | None:
    """How words become a value of a type; None leaves it to tyro."""
    if hint is type(None):  # an option of the user's own, whose value does not say what else it is
        hint = int | float | bool | str | None
    kinds = kinds_of(hint)
    tuples = [kind for kind in kinds if (typing.get_origin(kind) or kind) is tuple]
    if tuples and set(kinds) == {*tuples[:1], type(None)}:
        return _several_or_none(tuples[0])
    if tuples == kinds:
        return _several_values(tuples[0])
    return _own_function(kinds) or _one_value(hint, kinds)


def _one_value(hint: Any, kinds: list[Any]) -> PrimitiveConstructorSpec[Any] | None:
    """A type of one word, such as `int`, `Literal["a", "b"]` or `float | None`."""
    named = _words_of(kinds)
    if not all(kind in _TYPES or _words_of([kind]) for kind in kinds):
        return None
    others = [_TYPES[kind] for kind in kinds if kind in _TYPES]

    def read(words: list[str]) -> Any:
        (word,) = words
        if word in named:
            return named[word]
        for _, meaning in others:
            with contextlib.suppress(ValueError):
                return meaning(word)
        raise ValueError(f"{word} must be {expected(hint)}{did_you_mean(word, named)}.")

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join([*(metavar for metavar, _ in others), *named]),
        instance_from_str=read,
        is_instance=lambda value: fits(value, hint),
        str_from_instance=lambda value: [str(value)],
    )


def _own_function(kinds: list[Any]) -> PrimitiveConstructorSpec[Any] | None:
    """A function of the user's own: a text, of which the config makes a `Source` here, so that its
    path is relative to where it is typed."""
    if Source not in kinds:
        return None
    optional = type(None) in kinds

    def read(words: list[str]) -> str | None:
        (word,) = words
        if optional and word == "None":
            return None
        with contextlib.suppress(ValueError):
            Source.parse(word)
            return word
        raise ValueError(f"{word} must be FILE.py:NAME{' or None' * optional}.")

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="FILE.py:NAME" + "|None" * optional,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, Source) or (optional and value is None),
        str_from_instance=lambda source: ["None" if source is None else source.written],
    )


def _several_values(hint: Any) -> PrimitiveConstructorSpec[Any] | None:
    """A tuple of such types, which for options of the user's own are those of the config file."""
    kinds = typing.get_args(hint)  # none where the config file gives ()
    varies = kinds[1:] == (Ellipsis,)
    each = [_spec_of(kind) for kind in kinds if kind is not Ellipsis]
    specs = [spec for spec in each if spec is not None and spec.nargs == 1]
    if len(specs) < len(each):
        return None  # parts of a mixture, of which each field is an option

    def read(words: list[str]) -> tuple[Any, ...]:
        if not words:
            raise ValueError("needs one or more values.")
        if len(words) != len(specs) and not varies:
            raise ValueError(
                f"{' '.join(words)} must be {len(specs)} values, as the config file gives them."
            )
        pairs = zip(itertools.cycle(specs), words, strict=False)
        return tuple(spec.instance_from_str([word]) for spec, word in pairs)

    def written(values: tuple[Any, ...]) -> list[str]:
        pairs = zip(itertools.cycle(specs), values, strict=False)
        return [word for spec, value in pairs for word in spec.str_from_instance(value)]

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{specs[0].metavar if specs else 'VALUE'} ...",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=written,
    )


def _several_or_none(hint: Any) -> PrimitiveConstructorSpec[Any] | None:
    """Such a tuple, or the word None."""
    spec = _several_values(hint)
    if spec is None:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"None|{spec.metavar}",
        instance_from_str=lambda words: (
            None if words == ["None"] else spec.instance_from_str(words)
        ),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: (
            ["None"] if value is None else spec.str_from_instance(value)
        ),
    )


def _words_of(kinds: list[Any]) -> dict[str, Any]:
    """The words that mean a value of such a type by themselves."""
    named: dict[str, Any] = {}
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            named |= {str(value): value for value in typing.get_args(kind)}
        else:
            named |= _WORDS.get(kind, {})
    return named


VALUES = ConstructorRegistry()


@VALUES.primitive_rule
def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    is_repeated = tyro.conf.UseAppendAction in info.markers and info.type_origin is tuple
    return None if is_repeated else _spec_of(info.type)
