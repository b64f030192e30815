"""Loading config files, `path/to/file.py[:choice=value,...]`, and overriding their fields.

A config file defines `get_config(...) -> TrainConfig`. Its parameters are the named choices, each
annotated with the `Literal` of its values.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import shlex
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

import maxmars.config
import maxmars.config_checks
from maxmars.config import TrainConfig

_CONFIG_FILES = {maxmars.config.__file__, maxmars.config_checks.__file__}


class UsageError(ValueError):
    """A command line or config that cannot be meant; the process exits with code 2."""


@dataclass(frozen=True, kw_only=True)
class ConfigArguments:
    """What follows CONFIG on a command line; a command's own options are fields of a subclass."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """The config that CONFIG names, with the command line's overrides."""


Arguments = TypeVar("Arguments", bound=ConfigArguments)


def load_config(spec: str) -> TrainConfig:
    """The config that `path/to/file.py[:choice=value,...]` names.

    Raises:
      UsageError: no such file, no `get_config` in it, a choice or value that it does not have, or
        choices that do not fit together. Any other exception is one of the file's own.
    """
    path, choices = _split_spec(spec)
    module = _import_file(path, spec)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise UsageError(
            f"{path} has no function get_config; a config file defines "
            "`def get_config() -> TrainConfig`."
        )
    try:
        config = get_config(**_check_choices(path, get_config, choices))
    except ValueError as error:
        if isinstance(error, UsageError) or not _raised_by_config_module(error):
            raise
        raise UsageError(f"{_position_in(path, error)}: {error}") from error
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"get_config of {path} returned a {type(config).__name__}; "
            "it must return a TrainConfig."
        )
    return config


def parse_config(spec: str, overrides: Sequence[str], prog: str) -> TrainConfig:
    """The config that `spec` names, with command-line overrides such as `--model.num-layers 3`.

    Raises:
      UsageError: see `load_config`.
      SystemExit: 2 after printing what is wrong with an override, 0 after `--help`.
    """
    return parse_arguments(ConfigArguments, [spec, *overrides], prog=prog).config


def parse_arguments(
    arguments: type[Arguments], argv: Sequence[str], *, prog: str, usage: str = ""
) -> Arguments:
    """Parse the command line of a command that takes a CONFIG, its options and overrides.

    Args:
      arguments: the command's dataclass; every field that it adds has a default.
      argv: the command line after the command's name; CONFIG is its first word that is neither an
        option nor the value of one.
      prog: the command's name in help and errors.
      usage: printed for `--help` without a CONFIG, whose fields are not known then.

    Raises:
      UsageError: no CONFIG; see also `load_config`.
      SystemExit: 2 after printing what is wrong with an argument, 0 after `--help`.
    """
    index = _find_config(argv)
    if index is None:
        if {"-h", "--help"} & set(argv):
            print(usage)
            sys.exit(0)
        raise UsageError(f"{prog} needs a config file: `{prog} CONFIG`. See `{prog} --help`.")
    default = arguments(config=load_config(argv[index]))
    try:
        return tyro.cli(
            arguments,
            default=default,
            args=[*argv[:index], *argv[index + 1 :]],
            prog=f"{prog} {shlex.quote(argv[index])}",
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
        )
    except ValueError as error:
        # tyro reports what a nested config rejects; what TrainConfig itself rejects comes here.
        if not _raised_by_config_module(error):
            raise
        raise UsageError(str(error)) from error


def split_positionals(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are neither options nor values of one, and the rest; all options take one."""
    words, options, rest = [], [], list(argv)
    while (index := _find_config(rest)) is not None:
        options += rest[:index]
        words.append(rest[index])
        rest = rest[index + 1 :]
    return words, options + rest


def _find_config(argv: Sequence[str]) -> int | None:
    """Index of the first argument that is no option nor the value of one; all options take one."""
    index = 0
    while index < len(argv):
        word = argv[index]
        if not word.startswith("-"):
            return index
        takes_next = "=" not in word and word not in ("-h", "--help")
        index += 2 if takes_next else 1
    return None


def _split_spec(spec: str) -> tuple[Path, dict[str, str]]:
    name, _, rest = (spec, "", "") if spec.endswith(".py") else spec.rpartition(":")
    if not name.endswith(".py"):
        raise UsageError(
            f"CONFIG={spec!r} must be a Python file with choices or without, "
            "such as configs/gpt2.py:size=small,optimizer=mars."
        )
    choices: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not value or key in choices:
            raise UsageError(
                f"CONFIG={spec!r}: {item!r} is not a choice; write each as name=value, once."
            )
        choices[key] = value
    return Path(name), choices


def _import_file(path: Path, spec: str) -> types.ModuleType:
    if not path.is_file():
        known = map(str, path.parent.glob("*.py"))
        raise UsageError(f"CONFIG={spec!r}: no file {path}{_did_you_mean(str(path), known)}.")
    # A name of its own, so that a config called gpt2.py hides no module; registered because
    # dataclasses of the file look their module up.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    module = types.ModuleType(f"maxmars_config_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    # Compiled here rather than through importlib, which would trust a .pyc of the same second.
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module


def _check_choices(
    path: Path, get_config: Callable[..., Any], choices: dict[str, str]
) -> dict[str, Any]:
    """Arguments for `get_config`: the choices, as the values of its `Literal` annotations."""
    parameters = inspect.signature(get_config).parameters
    annotations = typing.get_type_hints(get_config)
    for name in choices.keys() - parameters.keys():
        known = ", ".join(parameters) or "none"
        raise UsageError(
            f"{path} has no choice `{name}`{_did_you_mean(name, parameters)}; its choices: {known}."
        )
    for name, parameter in parameters.items():
        if typing.get_origin(annotations.get(name)) is not Literal:
            raise UsageError(
                f"{path}: annotate get_config's parameter `{name}` with its values, "
                f"as in `{name}: Literal['a', 'b'] = 'a'`."
            )
        if name not in choices and parameter.default is inspect.Parameter.empty:
            values = "|".join(_values(annotations[name]))
            raise UsageError(f"{path} needs the choice {name}={values}: {path}:{name}=....")
    return {name: _choose(path, name, v, annotations[name]) for name, v in choices.items()}


def _choose(path: Path, name: str, value: str, annotation: Any) -> Any:
    known = _values(annotation)
    if value not in known:
        raise UsageError(
            f"{path}: {name}={value} is not a choice{_did_you_mean(value, known)}; "
            f"{name} is one of {', '.join(known)}."
        )
    return known[value]


def _values(annotation: Any) -> dict[str, Any]:
    return {str(value): value for value in typing.get_args(annotation)}


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _raised_by_config_module(error: ValueError) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename in _CONFIG_FILES


def _position_in(path: Path, error: ValueError) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
