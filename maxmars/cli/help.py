"""What `--help` prints: what a command does, and the options to know first; tyro tells the rest.

A command's dataclass says it: its docstring (lines that are indented stay as they are), `EXAMPLES`,
`FIRST` with the options that a newcomer needs, and the fields' own texts.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import shutil
import textwrap
import typing
from collections.abc import Mapping
from typing import Any

import docstring_parser
from tyro.conf import Positional
from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

from maxmars.cli.values import VALUES

_WORD_WIDTH = 34


def groups_of(arguments: Any) -> dict[str, Any]:
    """The fields of a dataclass or instance whose options are a group, by name."""
    groups: dict[str, Any] = {}
    for name, value in _fields(arguments).items():
        if dataclasses.is_dataclass(value):
            groups |= groups_of(value) if name == "config" else {name.replace("_", "-"): value}
    return groups


def print_help(arguments: Any, options: str, *, prog: str, about: str, in_full: bool) -> None:
    """Print the help of a command.

    Args:
      arguments: its dataclass, or an instance that holds the defaults.
      options: what tyro says of all options.
      prog: the command's name, with its CONFIG if it takes one.
      about: told below the docstring.
      in_full: whether all options are shown, as they are of a command without `FIRST`.
    """
    usage, _, options = options.partition("\n\n")
    what, _, details = inspect.cleandoc(arguments.__doc__ or "").partition("\n\n")
    examples = "\n".join(f"  {example}" for example in getattr(arguments, "EXAMPLES", ()))
    lines = _wrap(usage.strip())
    first = {} if in_full else _first(arguments)
    positionals = "\n".join(rows_of(_positionals(arguments))) if first else ""
    for text in filter(None, (what, examples, details, about, positionals)):
        lines += ["", *_wrap(text)]
    if first:
        groups = ", ".join(groups_of(arguments))
        number = len(set(re.findall(r"^  (--\w[\w.-]*)", options, re.MULTILINE)))
        more = f"`{prog} --help-all` explains all {number} options"
        more += f", `{prog} --help GROUP` those of {groups}." if groups else "."
        lines += ["", "The options to know first:", *rows_of(first), "", *_wrap(more)]
    else:
        lines += ["", evened(options)]
    print("\n".join(lines))


def evened(options: str) -> str:
    """tyro's text without its blanks at the ends of lines and the line breaks of our source.

    tyro 1.0.17 keeps those of a field's text, as if each line began a list. Its two columns of
    options, on terminals of 130 characters, stay as they are.
    """
    options = re.sub(r" +$", "", options, flags=re.MULTILINE).rstrip()
    width = shutil.get_terminal_size().columns

    def even(block: re.Match[str]) -> str:
        return "\n".join(_wrap(" ".join(block[0].split()), len(block[1]), width))

    if width >= 130:
        return options
    return re.sub(r"^( {8,})\S.*(?:\n\1\S.*)+", even, options, flags=re.MULTILINE)


def _positionals(arguments: Any) -> dict[str, str]:
    """The positional arguments of a command, and what they are."""
    kind = arguments if isinstance(arguments, type) else type(arguments)
    hints = typing.get_type_hints(kind, include_extras=True)
    marked = [n for n, hint in hints.items() if Positional in getattr(hint, "__metadata__", ())]
    return {value: text for text, value in (_told(arguments, name) for name in marked)}


def _first(arguments: Any) -> dict[str, str]:
    """The options in `FIRST` that a command has, with their values, and what they are for."""
    entries: dict[str, str] = {}
    for name in getattr(arguments, "FIRST", ()):
        *groups, leaf = name.replace("-", "_").split(".")
        holder = arguments
        if (groups or [leaf])[0] not in _fields(holder):
            holder = holder.config
        for group in groups:
            holder = _fields(holder).get(group)
        if dataclasses.is_dataclass(holder) and leaf in _fields(holder):
            text, value = _told(holder, leaf)
            if value == "True|False" and holder is arguments:  # a switch without a value
                entries[f"--{name}"] = text.removesuffix(" (default: False)")
            else:
                entries[f"--{name} {value}"] = text
    return entries


def _told(holder: Any, name: str) -> tuple[str, str]:
    """What a field is for, in one sentence with its default; and what values it takes."""
    kind = holder if isinstance(holder, type) else type(holder)
    hint = typing.get_type_hints(kind, include_extras=True)[name]
    with VALUES:
        spec = VALUES.get_primitive_spec(PrimitiveTypeInfo.make(hint, set()))
    value = spec.metavar if isinstance(spec, PrimitiveConstructorSpec) else "VALUE"
    docs = [docstring_parser.parse_from_object(base).params for base in kind.__mro__[:-1]]
    doc = next(
        (each.description or "" for row in docs for each in row if each.arg_name == name), ""
    )
    default = _fields(holder)[name]
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    note = "" if default == "" else f"default: {default}"
    if default is dataclasses.MISSING:
        note = "required" if Positional not in getattr(hint, "__metadata__", ()) else ""
    elif default is None:
        meaning = re.search(r"(?:^|[.;]\s)None (.+?)(?:[.;]\s|\.?$)", doc, re.DOTALL)
        note = f"default: None, which {' '.join(meaning[1].split())}" if meaning else ""
    for extra in getattr(hint, "__metadata__", ()):  # `tyro.conf.arg`
        value = getattr(extra, "metavar", None) or value
        note = getattr(extra, "help_behavior_hint", None) or note
    sentence = re.split(r"[.;](?:\s|$)|\n\n", doc)[0]
    return " ".join([*sentence.split(), f"({note})" if note else ""]).rstrip(), value


def _fields(arguments: Any) -> dict[str, Any]:
    """The values of an instance's fields, or the defaults of a dataclass's; MISSING for none."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(arguments):
        if not isinstance(arguments, type):
            values[field.name] = getattr(arguments, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
        else:
            values[field.name] = field.default
    return values


def rows_of(rows: Mapping[str, str]) -> list[str]:
    """Words with their texts in a column beside them, or below a word that is too long."""
    width = max((len(word) for word in rows if len(word) <= _WORD_WIDTH), default=0)
    lines: list[str] = []
    for word, text in rows.items():
        beside = _wrap(text, indent=width + 4)
        if len(word) > width:
            lines += [f"  {word}", *beside]
        else:
            lines += [f"  {word:<{width}}  {beside[0].strip()}", *beside[1:]]
    return lines


def _wrap(text: str, indent: int = 0, most: int = 100) -> list[str]:
    """Wrap paragraphs at words to the terminal's width; lines that are indented stay."""
    width = max(min(shutil.get_terminal_size().columns, most), 60)
    margin, lines = " " * indent, []
    for stays, block in itertools.groupby(text.splitlines(), lambda line: line[:1] in ("", " ")):
        if stays:
            lines += block
        else:
            wrapper = textwrap.TextWrapper(
                width,
                initial_indent=margin,
                subsequent_indent=margin,
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines += wrapper.wrap(" ".join(block))
    return lines
