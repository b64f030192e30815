"""What `--help` prints: what a command does, examples, and the options to know first.

A command's dataclass says it: its docstring (lines that are indented stay as they are), `EXAMPLES`,
`FIRST` with the options that a newcomer needs, and the fields' own texts. tyro draws the options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import shutil
import textwrap
import typing
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from tyro.conf import FlagConversionOff, Positional

from maxmars.cli.values import call_tyro, defaults_of, text_of
from maxmars.config.checks import UsageError

HELP = ("-h", "--help", "--help-all")


def print_help(arguments: Any, argv: Sequence[str], *, prog: str, about: str) -> None:
    """Print the help of a command: the options in `FIRST`, or with `--help-all` all, or a group.

    Args:
      arguments: its dataclass, or an instance that holds the defaults.
      argv: the words of a command line with `--help`, which the name of a group may follow.
      prog: the command's name, with its CONFIG if it takes one.
      about: shown below the docstring.

    Raises:
      UsageError: there is no such group.
    """
    groups = _groups_of(arguments)
    start = next(index for index, word in enumerate(argv) if word in HELP)
    group = next(iter(argv[start + 1 :]), "")
    if group and not group.startswith("-"):
        if group not in groups:
            known = ", ".join(groups) or "none"
            raise UsageError(f"`{prog} --help {group}`: the groups of options are {known}.")
        _print_options(_only(arguments, [group]), prog)
        return
    what = inspect.cleandoc(arguments.__doc__ or "")
    examples = "\n".join(f"  {example}" for example in getattr(arguments, "EXAMPLES", ()))
    for text in filter(None, (what, examples, about)):
        print(_wrapped(text), end="\n\n")
    first = () if "--help-all" in argv else getattr(arguments, "FIRST", ())
    _print_options(_only(arguments, first) if first else arguments, prog)
    if first:
        others = f", `{prog} --help GROUP` those of {', '.join(groups)}" if groups else ""
        print(_wrapped(f"\n`{prog} --help-all` explains every option{others}."))


def has_option(arguments: Any, name: str) -> bool:
    """Whether a dataclass, or an instance, has an option such as `optimizer.learning-rate`."""
    found = _find(arguments, name)
    return found is not None and not dataclasses.is_dataclass(defaults_of(found[0])[found[1]])


def _find(arguments: Any, name: str) -> tuple[Any, str] | None:
    """The dataclass or instance that has the field of an option or a group of options, and the
    field's name; None if there is none."""
    *groups, leaf = name.replace("-", "_").split(".")
    holder, fields = arguments, defaults_of(arguments)
    if (groups or [leaf])[0] not in fields and dataclasses.is_dataclass(fields.get("config")):
        holder = fields["config"]
    for group in groups:
        holder = defaults_of(holder).get(group)
        if not dataclasses.is_dataclass(holder):
            return None
    return (holder, leaf) if leaf in defaults_of(holder) else None


def _groups_of(arguments: Any) -> dict[str, Any]:
    """The fields of a dataclass or instance whose options are a group, by name."""
    groups: dict[str, Any] = {}
    for name, value in defaults_of(arguments).items():
        if dataclasses.is_dataclass(value):
            groups |= _groups_of(value) if name == "config" else {name.replace("_", "-"): value}
    return groups


def _only(arguments: Any, names: Sequence[str]) -> type:
    """A dataclass of a command's positional arguments, and of these of its options or groups."""
    positional = [
        n
        for n, hint in _hints(arguments).items()
        if Positional in getattr(hint, "__metadata__", ())
    ]
    fields: list[Any] = []
    for name in [*positional, *names]:
        if (found := _find(arguments, name)) is None:
            continue
        holder, leaf = found
        text = text_of(_class(holder), leaf)
        marks = [tyro.conf.arg(name=name.replace("_", "-"), help=text)]
        marks += [FlagConversionOff] if holder is not arguments else []  # it is of the config
        kind: Any = _hints(holder)[leaf]
        option = f"option_{len(fields)}", Annotated[kind, *marks], defaults_of(holder)[leaf]
        fields.append(option)
    return dataclasses.make_dataclass("Options", fields, kw_only=True)


def _class(arguments: Any) -> type:
    return arguments if isinstance(arguments, type) else type(arguments)


def _hints(arguments: Any) -> dict[str, Any]:
    return typing.get_type_hints(_class(arguments), include_extras=True)


def _print_options(arguments: Any, prog: str) -> None:
    """Print the usage of a command and its options, as tyro draws them."""
    with contextlib.suppress(SystemExit):  # 0
        default = tyro.MISSING_NONPROP if isinstance(arguments, type) else arguments
        call_tyro(_class(arguments), args=["--help"], prog=prog, default=default)


def _wrapped(text: str) -> str:
    """Paragraphs, wrapped at words to the terminal's width; lines that are indented stay."""
    width = max(min(shutil.get_terminal_size().columns, 100), 60)
    lines: list[str] = []
    for stays, block in itertools.groupby(text.splitlines(), lambda line: line[:1] in ("", " ")):
        whole = list(block) if stays else [" ".join(block)]  # noqa: B031
        lines += [textwrap.fill(line, width, subsequent_indent=" " * 6 * stays) for line in whole]
    return "\n".join(lines)
