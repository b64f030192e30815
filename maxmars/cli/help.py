"""The text of `--help`: the purpose of a command, examples, and the options to know first.

All of it stands in the command's dataclass: its docstring (indented lines are not wrapped),
`EXAMPLES`, `FIRST` with the options that a newcomer needs, and the docstrings of fields. tyro draws
the options; to draw some of them, it gets a dataclass made of these fields alone.
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
    """Print the help of a command: the options in `FIRST`, all with `--help-all`, or a group.

    Args:
      arguments: the dataclass of the command, or an instance with the defaults.
      argv: a command line with `--help`, after which the name of a group may stand.
      prog: the command's name, with its CONFIG if it takes one.
      about: text below the docstring.

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
        _print_options(_options_class(arguments, [group]), prog)
        return
    description = inspect.cleandoc(arguments.__doc__ or "")
    examples = "\n".join(f"  {example}" for example in getattr(arguments, "EXAMPLES", ()))
    for text in filter(None, (description, examples, about)):
        print(_wrapped(text), end="\n\n")
    first = () if "--help-all" in argv else getattr(arguments, "FIRST", ())
    _print_options(_options_class(arguments, first) if first else arguments, prog)
    if first:
        others = f", `{prog} --help GROUP` those of {', '.join(groups)}" if groups else ""
        print(_wrapped(f"\n`{prog} --help-all` explains every option{others}."))


def has_option(arguments: Any, name: str) -> bool:
    """Whether a dataclass, or an instance, has an option such as `optimizer.learning-rate`."""
    if (field := _find_field(arguments, name)) is None:
        return False
    holder, leaf = field
    return not dataclasses.is_dataclass(defaults_of(holder)[leaf])


def _find_field(arguments: Any, name: str) -> tuple[Any, str] | None:
    """The dataclass or instance with the field of an option or of a group of options, and the name
    of the field; None if there is none."""
    *groups, leaf = name.replace("-", "_").split(".")
    holder, fields = arguments, defaults_of(arguments)
    # Options of the config have no prefix: --num-steps is the field config.num_steps.
    if (groups or [leaf])[0] not in fields and dataclasses.is_dataclass(fields.get("config")):
        holder = fields["config"]
    for group in groups:
        holder = defaults_of(holder).get(group)
        if not dataclasses.is_dataclass(holder):
            return None
    return (holder, leaf) if leaf in defaults_of(holder) else None


def _groups_of(arguments: Any) -> dict[str, Any]:
    """Groups of options by name: the fields that are dataclasses."""
    groups: dict[str, Any] = {}
    for name, value in defaults_of(arguments).items():
        if dataclasses.is_dataclass(value):
            groups |= _groups_of(value) if name == "config" else {name.replace("_", "-"): value}
    return groups


def _options_class(arguments: Any, names: Sequence[str]) -> type:
    """A dataclass with a command's positional arguments, and its options or groups in `names`."""
    positional = [
        n
        for n, hint in _hints(arguments).items()
        if Positional in getattr(hint, "__metadata__", ())
    ]
    fields: list[Any] = []
    for name in [*positional, *names]:
        if (field := _find_field(arguments, name)) is None:
            continue
        holder, leaf = field
        text = text_of(_class_of(holder), leaf)
        marks = [tyro.conf.arg(name=name.replace("_", "-"), help=text)]
        marks += [FlagConversionOff] if holder is not arguments else []  # a field of the config
        kind: Any = _hints(holder)[leaf]
        # `marks` have the option's name: it may have dots, as mesh.fsdp, which a field's may not.
        option = f"option_{len(fields)}", Annotated[kind, *marks], defaults_of(holder)[leaf]
        fields.append(option)
    return dataclasses.make_dataclass("Options", fields, kw_only=True)


def _class_of(arguments: Any) -> type:
    return arguments if isinstance(arguments, type) else type(arguments)


def _hints(arguments: Any) -> dict[str, Any]:
    return typing.get_type_hints(_class_of(arguments), include_extras=True)


def _print_options(arguments: Any, prog: str) -> None:
    """Print the usage of a command and its options, as tyro draws them."""
    with contextlib.suppress(SystemExit):  # tyro exits with 0
        default = tyro.MISSING_NONPROP if isinstance(arguments, type) else arguments
        call_tyro(_class_of(arguments), args=["--help"], prog=prog, default=default)


def _wrapped(text: str) -> str:
    """Wrap paragraphs to the width of the terminal; indented lines stay apart."""
    width = max(min(shutil.get_terminal_size().columns, 100), 60)
    lines: list[str] = []
    for stays, block in itertools.groupby(text.splitlines(), lambda line: line[:1] in ("", " ")):
        parts = list(block) if stays else [" ".join(block)]  # noqa: B031
        lines += [textwrap.fill(line, width, subsequent_indent=" " * 6 * stays) for line in parts]
    return "\n".join(lines)
