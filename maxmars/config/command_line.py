"""CONFIG on the command line, `NAME[:choice=value,...]` or `path/to/file.py[:...]`, and overrides.

A config file defines `get_config(...) -> TrainConfig`. Its parameters are the choices, each
annotated with the `Literal` of its values, or with `str` where any text is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import itertools
import re
import shlex
import sys
import traceback
import types
import typing
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from maxmars.config.checks import CheckedConfig, RuleError, UsageError
from maxmars.config.data import DataConfig, GrainSource, MixtureConfig, MixturePart
from maxmars.config.help import asks_for_help, show_help
from maxmars.config.model import ModuleConfig
from maxmars.config.optimizer import OptaxConfig
from maxmars.config.options import (
    HELP,
    Option,
    check_words,
    did_you_mean,
    options_of,
    refused,
    wrong_value,
)
from maxmars.config.train import TrainConfig
from maxmars.config.user_code import import_file

_CONFIG_ROOM = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class ConfigArguments(CheckedConfig):
    """The arguments of a command that takes a CONFIG. Subclasses add the command's own options."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """The config that CONFIG names, with the overrides of the command line."""


Arguments = TypeVar("Arguments", bound=ConfigArguments)
Options = TypeVar("Options")


def named_configs() -> dict[str, Path]:
    """The config files that a bare name means, by name.

    In a checkout they lie in `configs/` at its top; an installed wheel carries a copy.
    """
    in_wheel = _CONFIG_ROOM / "files"
    folder = in_wheel if in_wheel.is_dir() else _CONFIG_ROOM.parents[1] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def find_config(spec: str) -> tuple[Path, str]:
    """Split CONFIG into the path of its file and the text of its choices, "" if it has none.

    A word with a slash or the ending `.py` is a path; any other word is one of `named_configs`.

    Raises:
      UsageError: there is no such file or name.
    """
    match = re.fullmatch(r"([^:/]*|.*?\.py)(?::(.*))?", spec, re.DOTALL)
    name, choices = match.groups(default="") if match else (spec, "")
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            known = map(str, path.parent.glob("*.py"))
            raise UsageError(f"CONFIG={spec!r}: no file {path}{did_you_mean(name, known)}.")
        return path, choices
    known = named_configs()
    if name not in known:
        if "/" in name:
            raise UsageError(
                f"CONFIG={spec!r} must be a Python file with or without choices, such as "
                f"my_configs/tiny.py, or one of the names {', '.join(known)}."
            )
        raise UsageError(
            f"CONFIG={spec!r}: there is no config {name!r}{did_you_mean(name, known)}; choose one "
            f"of {', '.join(known)}, or give the path of a Python file."
        )
    return known[name], choices


def load_config(spec: str) -> TrainConfig:
    """Load the config that `NAME[:choice=value,...]` or `path/to/file.py[:...]` names.

    Raises:
      UsageError: the file, its `get_config`, a choice or a value does not exist, the choices do not
        fit together, or the file's own code raises an exception.
    """
    path, choices = find_config(spec)
    with _own_errors(path):
        get_config = getattr(import_file(path), "get_config", None)
    if not callable(get_config):
        raise UsageError(
            f"{path} has no function get_config; a config file defines "
            "`def get_config() -> TrainConfig`."
        )
    arguments = _choices(path, choices, get_config)
    with _own_errors(path):
        config = get_config(**arguments)
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"get_config of {path} returned a {type(config).__name__}; "
            "it must return a TrainConfig."
        )
    model, optimizer = config.model, config.optimizer
    if isinstance(model, ModuleConfig):
        model = dataclasses.replace(model, make=str(path.parent / model.make))
    if isinstance(optimizer, OptaxConfig):
        optimizer = dataclasses.replace(optimizer, make=str(path.parent / optimizer.make))
    data = _sources_in(config.data, path.parent)
    return dataclasses.replace(config, model=model, data=data, optimizer=optimizer)


@contextlib.contextmanager
def _own_errors(path: Path) -> Generator[None]:
    """Tell an exception of the code in a config file in one line, with its line there."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f":{frame.lineno}" for frame in frames if frame.filename == str(path)]
        is_ours = isinstance(error, ValueError) and _raised_by_config_module(error)
        if is_ours and not lines:  # no Python: the message names the line
            raise UsageError(str(error)) from error
        kind = "" if is_ours else f"{type(error).__name__}: "
        raise UsageError(f"{path}{''.join(lines[-1:])}: {kind}{error}") from error


def _sources_in(data: DataConfig | MixturePart | GrainSource, folder: Path) -> Any:
    """The data of a config file in `folder`, to which the sources of its own are relative."""
    if isinstance(data, MixtureConfig):
        parts = tuple(_sources_in(part, folder) for part in data.parts)
        return dataclasses.replace(data, parts=parts)
    if isinstance(data, GrainSource):
        return dataclasses.replace(data, source=str(folder / data.source))
    return data


def parse_config(spec: str, overrides: Sequence[str], prog: str) -> TrainConfig:
    """Load the config that `spec` names and apply overrides such as `--model.num-layers 3`.

    Raises:
      UsageError: an override is wrong; see also `load_config`.
      SystemExit: 0 after `--help`.
    """
    return parse_arguments(ConfigArguments, [spec, *overrides], prog=prog).config


def parse_arguments(
    arguments: type[Arguments], argv: Sequence[str], *, prog: str, example: str = "quickstart"
) -> Arguments:
    """Parse the command line of a command that takes a CONFIG, options and overrides of fields.

    Args:
      arguments: the command's dataclass; every field that it adds has a default.
      argv: the command line after the command's name. CONFIG is its first word that is neither an
        option nor the value of an option.
      prog: the command's name in help and errors.
      example: the CONFIG whose fields `--help` shows where none is given.

    Raises:
      UsageError: there is no CONFIG, an option is wrong, or `--help` is asked for a group that is
        not there; see also `load_config`.
      SystemExit: 0 after `--help`.
    """
    places = _places_of_words(argv)
    if asks_for_help(argv):
        words = [argv[place] for place in places]
        _show_help_with_config(arguments, argv, words, prog=prog, example=example)
        sys.exit(0)
    if not places:
        raise UsageError(
            f"{prog} needs a config: `{prog} quickstart`, for example. See `{prog} --help`."
        )
    spec = argv[places[0]]
    # The words after it stay where they are, as values of the option before them.
    rest = [word for place, word in enumerate(argv) if place != places[0]]

    def advise(group: str) -> str:  # which options a group has depends on the choice of its name
        written = [written for name, written, _ in _choices_of(spec) if name == group]
        return f"; other choices of {written[0]}... have others" if written else ""

    return parse_options(
        arguments,
        rest,
        prog=f"{prog} {shlex.quote(spec)}",
        default=arguments(config=load_config(spec)),
        switches=False,
        advise=advise,
    )


def _show_help_with_config(
    arguments: type[ConfigArguments],
    argv: Sequence[str],
    words: Sequence[str],
    *,
    prog: str,
    example: str,
) -> None:
    """Print the help of a command that takes a CONFIG, for the one given or for an example."""
    options = options_of(arguments(config=load_config(example)), switches=False)
    groups = {option.group.title for option in options}
    spec = next((word for word in words if word not in groups), None)
    if spec is not None and spec.isidentifier() and spec not in named_configs():
        follows = any(word in HELP and after == spec for word, after in itertools.pairwise(argv))
        if follows and did_you_mean(spec, groups):
            spec = None  # a misspelled group, as `show_help` then says
    if spec is None:
        about = (
            "CONFIG is the path of a Python file, or one of these names, with choices after a "
            f"colon: gpt2:size=small,optimizer=mars. The defaults shown are those of {example}."
        )
        rows = [row[1:] for name in named_configs() for row in _choices_of(name)]
        name = f"{prog} CONFIG"
    else:
        options = options_of(arguments(config=load_config(spec)), switches=False)
        rows = [row[1:] for row in _choices_of(spec)]
        about = f"The defaults shown are those of {spec}{', with the choices' if rows else '.'}"
        about += ":" if rows else ""
        name = f"{prog} {shlex.quote(spec)}"
    show_help(arguments, options, argv, prog=name, config=spec, about=about, rows=rows)


def _choices_of(spec: str) -> list[tuple[str, str, str]]:
    """The choices of a CONFIG: the name, how it is written, and its values."""
    path, _ = find_config(spec)
    hints = typing.get_type_hints(import_file(path).get_config)
    hints.pop("return", None)
    config = spec.partition(":")[0]
    values = {name: ", ".join(map(str, typing.get_args(hint))) for name, hint in hints.items()}
    return [(name, f"{config}:{name}=", words or "TEXT") for name, words in values.items()]


def parse_options(
    arguments: type[Options],
    argv: Sequence[str],
    *,
    prog: str,
    default: Options | None = None,
    switches: bool = True,
    advise: Callable[[str], str] = lambda group: "",
) -> Options:
    """Parse options by tyro into a dataclass, with errors of one line instead of tyro's frames.

    Args:
      arguments: the dataclass.
      argv: the options, and positional arguments if the dataclass has some.
      prog: the command's name in help and errors.
      default: the values of options that are not given; None takes the dataclass's own.
      switches: whether a boolean is an option without a value; else True or False follows it.
      advise: see `check_words`.

    Raises:
      UsageError: there is no such option, one that is needed is missing or given twice, or a value
        is missing, is of another type than the field's, or is refused by the dataclass.
      SystemExit: 0 after `--help`.
    """
    options = options_of(arguments if default is None else default, switches=switches)
    if asks_for_help(argv):
        show_help(arguments, options, argv, prog=prog)
        sys.exit(0)
    given = check_words(argv, options, prog, advise)
    by_flag = {option.flag: option for option in options}
    for flag, values in given.items():
        _check_types(by_flag[flag], values)
    markers = (tyro.conf.AvoidSubcommands, *([] if switches else [tyro.conf.FlagConversionOff]))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(
                arguments,
                default=tyro.MISSING_NONPROP if default is None else default,
                args=argv,
                prog=prog,
                config=markers,
            )
    except (ValueError, SystemExit) as error:
        raise UsageError(_problem(error, by_flag, given, prog)) from error


def _check_types(option: Option, values: Sequence[str]) -> None:
    """Let tyro read each value alone, whose own errors speak of more than the value."""
    if option.is_switch:
        return
    kinds = [option.hint]
    if option.hint in (tuple, types.NoneType):  # an option of the user's own
        kinds = [type(item) for item in option.default or ()]
        stays = option.default is None and values == ["None"]
        if not stays and not set(kinds) & {bool, int, float, str}:
            raise UsageError(
                f"{option.flag} {' '.join(values)}: the config file gives {option.default}, which "
                "does not say a type; give it a value of its type in the config file."
            )
    for value, kind in zip(values, itertools.cycle(kinds), strict=False):
        if {str, Path} & {kind, *typing.get_args(kind)}:
            continue
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                tyro.cli(kind, args=[value], config=(tyro.conf.FlagConversionOff,))
        except SystemExit as error:
            raise UsageError(wrong_value(dataclasses.replace(option, hint=kind), value)) from error


def _problem(
    error: BaseException, by_flag: dict[str, Option], given: dict[str, list[str]], prog: str
) -> str:
    """What is wrong with the values of a command line that a dataclass has refused."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuleError):
            for flag, values in given.items():
                option = by_flag[flag]
                if option.field == cause.field and issubclass(cause.config_class, option.owner):
                    return f"{flag} {' '.join(values)} {cause.words}."
            return str(cause)
        if isinstance(cause, ValueError) and _raised_by_config_module(cause):
            return refused(str(cause), given)
        cause = cause.__cause__ or cause.__context__
    words = shlex.join(word for flag, values in given.items() for word in (flag, *values))
    return f"`{prog}` cannot read {words}; see `{prog} --help`."


def split_positionals(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line, in which every option takes a value, into its words and its options."""
    places = _places_of_words(argv)
    options = [word for place, word in enumerate(argv) if place not in places]
    return [argv[place] for place in places], options


def _places_of_words(argv: Sequence[str]) -> list[int]:
    """The indices of the words that are neither an option nor the first value of one."""
    places: list[int] = []
    is_value = False
    for place, word in enumerate(argv):
        is_option = word.startswith("-")
        if not is_value and not is_option:
            places.append(place)
        is_value = not is_value and is_option and "=" not in word and word not in HELP
    return places


def _choices(path: Path, text: str, get_config: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of `get_config` in the text of the choices, by its annotations."""
    parameters = inspect.signature(get_config).parameters
    annotations = typing.get_type_hints(get_config)
    values: dict[str, dict[str, Any]] = {}  # none for a choice that takes any text
    for name in parameters:
        annotation = annotations.get(name)
        if annotation is not str and typing.get_origin(annotation) is not Literal:
            raise UsageError(
                f"{path}: annotate get_config's parameter `{name}` with its values, as in "
                f"`{name}: Literal['a', 'b'] = 'a'`, or with `str` to allow any text."
            )
        values[name] = {str(value): value for value in typing.get_args(annotation)}
    chosen: dict[str, Any] = {}
    for item in filter(None, re.split(r",(?=\w+=)", text)):  # other commas belong to a text
        name, equals, word = item.partition("=")
        last = next(reversed(chosen), None)
        if last is not None and name not in values and not values[last]:
            chosen[last] += f",{item}"  # which may also hold `,b=`, as paths may
            continue
        if not equals or not word or name in chosen:
            raise UsageError(
                f"CONFIG {path}:{text}: {item!r} is not a choice; write each as name=value, once."
            )
        if name not in values:
            raise UsageError(
                f"{path} has no choice `{name}`{did_you_mean(name, values)}; its choices: "
                f"{', '.join(values) or 'none'}."
            )
        if values[name] and word not in values[name]:
            raise UsageError(
                f"{path}: {name}={word} is not a choice{did_you_mean(word, values[name])}; "
                f"{name} is one of {', '.join(values[name])}."
            )
        chosen[name] = values[name][word] if values[name] else word
    for name, parameter in parameters.items():
        if name not in chosen and parameter.default is inspect.Parameter.empty:
            words = "|".join(values[name]) or "TEXT"
            raise UsageError(f"{path} needs the choice {name}={words}: {path}:{name}=....")
    return chosen


def _raised_by_config_module(error: ValueError) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).parent == _CONFIG_ROOM
