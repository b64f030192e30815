"""The options of a command, as the fields of its dataclass say them, and the words given for them.

`--help`, the errors of a wrong command line and the tests all read this one list; tyro turns the
words into values.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from maxmars.config.checks import Group, UsageError, expected

HELP = ("-h", "--help", "--help-all")


OPTIONS = Group("options")
RUN = Group("run", "The run as a whole.")
HOSTS = Group("hosts", "Several processes that work together, such as one on each host.")
_ORDER = (
    "model",
    "optimizer",
    "schedule",
    "data",
    "eval",
    "checkpoint",
    "log",
    "guard",
    "mesh",
    "hosts",
)


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option or positional argument of a command."""

    flag: str
    """Such as `--model.num-layers`; of a positional argument its name in help, such as TARGET."""
    owner: type
    """The dataclass whose field it is, or whose field is the dict that holds it."""
    field: str
    hint: Any
    """Type of the value, without annotations."""
    default: Any
    """`dataclasses.MISSING` where the option must be given."""
    group: Group
    metavar: str
    default_text: str | None
    is_positional: bool
    is_switch: bool
    """Whether it takes no value, such as `--spot`."""
    has_opposite: bool
    """Whether `--no-spot` is an option too."""
    takes_many: bool
    """Whether several values may follow."""
    is_repeated: bool
    """Whether the option may be given several times."""

    @property
    def doc(self) -> str:
        """The text below its field."""
        return _field_docs(self.owner).get(self.field, "")

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def words(self) -> str:
        """The option with its value, as help shows it."""
        if self.is_positional:
            return self.flag + " ..." * self.takes_many
        if self.is_switch and self.default is True:
            return f"--no-{self.flag[2:]}"
        return self.flag if self.is_switch else f"{self.flag} {self.metavar}"


def options_of(arguments: Any, *, switches: bool) -> list[Option]:
    """The options of a dataclass or, with the values of an instance as defaults, of the instance.

    Args:
      arguments: the dataclass or instance.
      switches: whether a boolean is an option without a value.
    """
    kind = arguments if isinstance(arguments, type) else type(arguments)
    found = _walk(arguments, "--", getattr(kind, "GROUP", OPTIONS), switches)
    place = {title: number for number, title in enumerate(_ORDER)}
    return sorted(found, key=lambda option: place.get(option.group.title, -1))


def _walk(arguments: Any, prefix: str, group: Group, switches: bool) -> list[Option]:
    found: list[Option] = []
    config: list[Option] = []
    kind = arguments if isinstance(arguments, type) else type(arguments)
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        default = getattr(arguments, field.name, field.default)
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        hint, extras = _without_extras(hints[field.name])
        if tyro.conf.Suppress in extras:
            continue
        if default is dataclasses.MISSING and dataclasses.is_dataclass(hint):
            default = hint
        flag = prefix + field.name.replace("_", "-")
        if any(getattr(extra, "name", None) == "" for extra in extras):  # `ConfigArguments.config`
            config = _walk(default, "--", RUN, switches)  # after the command's own
        elif dataclasses.is_dataclass(default):
            part = default if isinstance(default, type) else type(default)
            about = first_sentence(part.__doc__ or "")
            found += _walk(default, f"{flag}.", Group(flag[2:], about), switches)
        elif default and isinstance(default, tuple) and all(map(dataclasses.is_dataclass, default)):
            for i, part in enumerate(default):
                found += _walk(part, f"{flag}.{i}.", group, switches)
        else:
            own = next((extra for extra in extras if isinstance(extra, Group)), group)
            leaves = _leaves(flag, default) if isinstance(default, dict) else {flag: default}
            for name, value in leaves.items():
                its = type(value) if isinstance(default, dict) else hint
                made = _option(kind, field.name, name, its, extras, value, switches)
                found.append(dataclasses.replace(made, group=own))
    return found + config


def _leaves(flag: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a dict by their flags."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{flag}.{key}".replace("_", "-")
        found |= _leaves(name, value) if isinstance(value, dict) else {name: value}
    return found


def _option(
    owner: type,
    field: str,
    flag: str,
    hint: Any,
    extras: Sequence[Any],
    default: Any,
    switches: bool,
) -> Option:
    positional = tyro.conf.Positional in extras
    own = next((e.metavar for e in extras if getattr(e, "metavar", None)), None)
    metavar = own or (field.upper() if positional else _metavar(hint))
    text = next((e.help_behavior_hint for e in extras if _hint_of(e)), None)
    if text is None and default is not dataclasses.MISSING and default != ():
        text = f"default: {default}"
    repeated = tyro.conf.UseAppendAction in extras
    return Option(
        flag=metavar if positional else flag,
        owner=owner,
        field=field,
        hint=hint,
        default=default,
        group=OPTIONS,
        metavar=metavar,
        default_text=text,
        is_positional=positional,
        is_switch=switches and hint is bool,
        has_opposite=switches and hint is bool and tyro.conf.FlagCreatePairsOff not in extras,
        takes_many=(typing.get_origin(hint) or hint) in (tuple, list) and not repeated,
        is_repeated=repeated,
    )


def _hint_of(extra: Any) -> str | None:
    return getattr(extra, "help_behavior_hint", None)


def _without_extras(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without annotations, also inside a union, and its annotations."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, inside = _without_extras(hint.__origin__)
        return inner, (*hint.__metadata__, *inside)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [_without_extras(part) for part in typing.get_args(hint)]
        union = functools.reduce(operator.or_, [part for part, _ in parts])
        return union, tuple(extra for _, extras in parts for extra in extras)
    return hint, ()


def _metavar(hint: Any) -> str:
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, parts))
    if parts:
        return "|".join(_metavar(part) for part in parts if part is not Ellipsis)
    words = {bool: "True|False", int: "N", float: "X", str: "TEXT", Path: "PATH"}
    return words.get(hint, "None" if hint is types.NoneType else "VALUE")


@functools.cache
def _docs_in(module: str) -> dict[str, dict[str, str]]:
    """The text below each field of each class of a module, which Python does not keep."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docs = found[node.name] = {}
        for statement, text in zip(node.body, node.body[1:], strict=False):
            match statement, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    docs[name] = inspect.cleandoc(doc)
    return found


@functools.cache
def _field_docs(kind: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _docs_in(base.__module__).get(base.__name__, {})
    return docs


def first_sentence(doc: str) -> str:
    """The text up to its first full stop, semicolon or empty line, on one line."""
    paragraph = " ".join(doc.split("\n\n")[0].split())
    match = re.match(r"(.*?)[.;](\s|$)", paragraph)
    return match[1] if match else paragraph


def check_words(
    argv: Sequence[str], options: Sequence[Option], prog: str, advise: Callable[[str], str]
) -> dict[str, list[str]]:
    """Check the words of a command line, except the types of values.

    `advise` is asked for a word on options of a group, of which one is unknown.

    Returns:
      The values given, by flag.

    Raises:
      UsageError: an option is unknown, has no value or two that differ, there are too many words,
        or one that is needed is missing.
    """
    known = {option.flag: option for option in options if not option.is_positional}
    switches = {f"--no-{flag[2:]}": flag for flag, option in known.items() if option.has_opposite}
    places = [option for option in options if option.is_positional]
    given: dict[str, list[str]] = {}
    num_words, i = 0, 0
    while i < len(argv):
        word, i = argv[i], i + 1
        if not _is_flag(word):
            num_words += 1
            if num_words > len(places) and not any(place.takes_many for place in places):
                raise UsageError(f"`{prog}` takes no argument {word!r}; see `{prog} --help`.")
            continue
        flag, equals, value = word.partition("=")
        name = flag.replace("_", "-")
        option = known.get(switches.get(name, name))
        if option is None:
            hint = _option_meant(name, [*known, *switches])
            hint += advise(flag.lstrip("-").partition(".")[0])
            raise UsageError(f"`{prog}` has no option {flag}{hint}; see `{prog} --help`.")
        if option.is_switch:
            if equals:
                raise UsageError(f"{word}: {flag} takes no value; write {option.flag} or nothing.")
            values = [name]
        elif equals:
            values = [value]
        else:
            values = []
            while i < len(argv) and not _is_flag(argv[i]) and (option.takes_many or not values):
                values.append(argv[i])
                i += 1
            if not values:
                problem = f"{flag} needs a value: {expected(option.hint)}"
                following = argv[i] if i < len(argv) else "--"
                if following.partition("=")[0].replace("_", "-") not in {*known, *switches, "--"}:
                    problem += f"; write {flag}={following} if that is it"
                raise UsageError(f"{problem}.")
        if given.get(option.flag, values) != values and not option.is_repeated:
            raise UsageError(
                f"{flag} is given twice, as {' '.join(given[option.flag])} and "
                f"{' '.join(values)}; give it once."
            )
        given[option.flag] = (given.get(option.flag, []) if option.is_repeated else []) + values
    missing = [place.flag for place in places[num_words:] if place.is_required]
    missing += [o.words for o in known.values() if o.is_required and o.flag not in given]
    if missing:
        raise UsageError(f"`{prog}` needs {', '.join(missing)}; see `{prog} --help`.")
    return given


def _is_flag(word: str) -> bool:
    """Whether a word is an option: -5 and -.5 are values, as is a lone dash."""
    return re.match(r"--?[A-Za-z]", word) is not None or word == "--"


def _literals(hint: Any) -> list[str]:
    """The words that a type lists, alone or in a union; none if it also takes any text."""
    parts = (hint, *typing.get_args(hint))
    lists = [part for part in parts if typing.get_origin(part) is Literal]
    return [] if str in parts else [str(word) for part in lists for word in typing.get_args(part)]


def wrong_value(option: Option, value: str) -> str:
    """The error of a value that is not of the option's type."""
    hint = did_you_mean(value, _literals(option.hint))
    if "an integer" in expected(option.hint) and re.fullmatch(r"[\d.]+[eE]\+?\d+", value):
        number = float(value)
        hint = f"; write {number:.0f}" if number.is_integer() else ""
    return f"{option.flag} {value} must be {expected(option.hint)}{hint}."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the most similar known word, "" if none is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""


_SHORT = {"lr": "learning-rate", "wd": "weight-decay"}


def _option_meant(name: str, flags: Sequence[str]) -> str:
    """A hint at the option that ends with the words of an unknown one, best in the same group, or
    at the most similar one."""
    group, _, leaf = name.lstrip("-").rpartition(".")
    leaf = _SHORT.get(leaf, leaf)
    same = [flag for flag in flags if re.search(rf"[.-]{re.escape(leaf)}$", flag)]
    if not same or any(flag.startswith(f"--{leaf}.") for flag in flags):  # a group
        return did_you_mean(name, flags)

    def distance(flag: str) -> tuple[bool, bool, int]:
        its = flag.lstrip("-").rpartition(".")[0]
        return its != group, bool(its), len(flag)

    return f" (did you mean `{min(same, key=distance)}`?)"


def refused(message: str, given: Mapping[str, Sequence[str]]) -> str:
    """The error of a config that fits no option alone, after the options that it speaks of."""

    def leaf(flag: str) -> str:
        return flag.lstrip("-").rpartition(".")[2].replace("-", "_")

    named = [flag for flag in given if re.search(rf"\b{leaf(flag)}", message)]
    words = " ".join(f"{flag} {' '.join(given[flag])}" for flag in named or list(given)[:1])
    return f"{words}: {message}" if words else message
