"""CONFIG, the word that names a config: `NAME[:choice=value,...]` or `path/to/file.py[:...]`.

A config file defines `get_config(...) -> TrainConfig`, and for `maxmars compare` may define
`get_comparison(...) -> ComparisonConfig`. Their parameters are the choices, each annotated with the
`Literal` of its values, or with `str` for any text; `Literal["adamw"] | Source` also allows a
function of the user's own, `FILE.py:NAME`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import re
import typing
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from maxmars.config.checks import UsageError, union_types
from maxmars.config.comparison import ComparisonConfig
from maxmars.config.credentials import refuse_credentials
from maxmars.config.errors import in_words
from maxmars.config.optimizer import OptaxConfig
from maxmars.config.own_modules import files_of, run_files
from maxmars.config.train import TrainConfig, with_own_defaults
from maxmars.config.user_code import Source, relative_to, with_sources

_ROOM = Path(__file__).parent


def named_configs() -> dict[str, Path]:
    """Config files that a bare name means, by name: those of `configs/` at the top of a checkout,
    or the copies in an installed wheel."""
    in_wheel = _ROOM / "files"
    folder = in_wheel if in_wheel.is_dir() else _ROOM.parents[1] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def find_config(spec: str) -> tuple[Path, str]:
    """Split CONFIG into the path of its file and the text of its choices, which may be "".

    A word that ends in `.py` is a path; any other word is one of `named_configs`.

    Raises:
      UsageError: there is no such file or name.
    """
    # A path may hold colons before its `.py`, and a choice may be any text.
    match = re.fullmatch(r"([^:/]*|.*?\.py)(?::(.*))?", spec, re.DOTALL)
    name, choices = match.groups(default="") if match else (spec, "")
    known = named_configs()
    path = Path(name) if name.endswith(".py") else known.get(name)
    if path is None or not path.is_file():
        beside = map(str, Path(name).parent.glob("*.py"))
        raise UsageError(
            f"CONFIG={spec!r}: there is no config {name!r}{did_you_mean(name, [*known, *beside])}; "
            f"choose one of {', '.join(known)}, or give the path of a Python file (.py)."
        )
    return path, choices


def load_config(
    spec: str, choices: Mapping[str, str] = MappingProxyType({}), make: str | None = None
) -> TrainConfig:
    """Load the config that `NAME[:choice=value,...]` or `path/to/file.py[:...]` names.

    Args:
      spec: CONFIG as the user types it.
      choices: further choices, by name. Here and in `spec`, the file of a function is relative to
        the working directory.
      make: a function that replaces `make` of the config's `OptaxConfig`; the defaults of its
        arguments become options, except those that the config file sets. None changes nothing.

    Raises:
      UsageError: there is no such file, `get_config`, choice or value, or the code of the file
        raises an exception.
    """
    path, text = find_config(spec)
    get_config = _load_get_config(path)
    config = _call(path, get_config, _parse_choices(path, text, choices, get_config), TrainConfig)
    if make is not None and isinstance(config.optimizer, OptaxConfig):
        optimizer = dataclasses.replace(config.optimizer, make=make)
        config = dataclasses.replace(config, optimizer=optimizer)
    return _with_current_code(config)


def load_comparison(
    spec: str, choices: Mapping[str, str] = MappingProxyType({})
) -> ComparisonConfig | None:
    """Call `get_comparison` of the file of a CONFIG; None if the file has no such function.

    Arguments and errors are those of `load_config`; choices are parameters of `get_comparison`.
    """
    path, text = find_config(spec)
    get_comparison = _load_function(path, "get_comparison")
    if get_comparison is None:
        return None
    arguments = _parse_choices(path, text, choices, get_comparison)
    comparison = _call(path, get_comparison, arguments, ComparisonConfig)
    configs = comparison.contenders.items()
    contenders = {name: _with_current_code(config) for name, config in configs}
    return dataclasses.replace(comparison, contenders=contenders)


def _with_current_code(config: TrainConfig) -> TrainConfig:
    """A config with the digests of the user's files of this moment, and with the defaults of an own
    optimizer. A config file runs once in a process, so that its constants have older digests."""
    return with_own_defaults(with_sources(config, Source.with_current_digest))


def _call(
    path: Path, function: Callable[..., Any], arguments: dict[str, Any], returned_type: type
) -> Any:
    with _in_config_file(path):
        config = function(**arguments)
    if not isinstance(config, returned_type):
        raise UsageError(
            f"{function.__name__} of {path} returned a {type(config).__name__}; it must return a "
            f"{returned_type.__name__}."
        )
    return config


def _load_function(path: Path, name: str) -> Callable[..., Any] | None:
    with _in_config_file(path):
        function = getattr(run_files(path, files_of(path)), name, None)
    return function if callable(function) else None


def _load_get_config(path: Path) -> Callable[..., Any]:
    get_config = _load_function(path, "get_config")
    if get_config is None:
        raise UsageError(
            f"{path} has no function get_config; a config file defines "
            "`def get_config() -> TrainConfig`."
        )
    return get_config


@contextlib.contextmanager
def _in_config_file(path: Path) -> Generator[None]:
    """Run code of a config file: paths are relative to the file, and every exception becomes a
    UsageError, also one that elsewhere keeps its traceback, such as NameError: here a typing error
    is likelier than a bug of maxmars."""
    try:
        with relative_to(path.parent):
            yield
    except Exception as error:
        raise UsageError(in_words(error)) from error


def choices_of(spec: str) -> dict[str, list[str]]:
    """Values of each choice of a CONFIG, as a user types them; an empty list allows any text."""
    path, _ = find_config(spec)
    return {
        name: list(words) for name, words in _read_choices(path, _load_get_config(path)).items()
    }


_USER_FUNCTION = "FILE.py:NAME"
"""Stands in lists of values for a function of the user's own."""


def _read_choices(path: Path, get_config: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """The choices of a file: of each, its values by how they are written, with `_USER_FUNCTION`
    among them where it may be a function of the user's own; none where it may be any text."""
    hints = typing.get_type_hints(get_config)
    choices: dict[str, dict[str, Any]] = {}
    for name in inspect.signature(get_config).parameters:
        kinds = union_types(hints.get(name))
        values = {str(value): value for kind in kinds for value in typing.get_args(kind)}
        # Either any text (`str`), or Literals, a function of the user's own, or both.
        if hints.get(name) is not str and not (
            values and all(k is Source or typing.get_origin(k) is Literal for k in kinds)
        ):
            raise UsageError(
                f"{path}: annotate {get_config.__name__}'s parameter `{name}` with its values, as "
                f"in `{name}: Literal['a', 'b'] = 'a'`, or with `str` to allow any text."
            )
        choices[name] = values | ({_USER_FUNCTION: Source} if Source in kinds else {})
    return choices


def _parse_choices(
    path: Path, text: str, extra: Mapping[str, str], get_config: Callable[..., Any]
) -> dict[str, Any]:
    """Arguments of `get_config` by the text of the choices, and by `extra` choices."""
    choices = _read_choices(path, get_config)
    arguments: dict[str, Any] = {}
    for name, word in [*_split_choices(text, choices), *extra.items()]:
        refuse_credentials(word, name)  # the journal records the command line
        value = None if name in arguments else _value_of_choice(name, word, choices.get(name))
        if value is None:
            known = [f"{n}={w}" for n, words in choices.items() for w in words or [""]]
            typed = f"{name}={word}"
            shown = ", ".join(f"{n}={'|'.join(words) or 'TEXT'}" for n, words in choices.items())
            raise UsageError(
                f"CONFIG {path}{':' if text else ''}{text}: {typed!r} is not a choice"
                f"{did_you_mean(typed, known)}; the choices are {shown or 'none'}, each "
                "at most once."
            )
        arguments[name] = value
    for name, parameter in inspect.signature(get_config).parameters.items():
        if name not in arguments and parameter.default is parameter.empty:
            words = "|".join(choices[name]) or "TEXT"
            raise UsageError(f"{path} needs the choice {name}={words}: {path}:{name}=....")
    return arguments


def _split_choices(text: str, choices: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names and words of the choices in a text."""
    # size=small,optimizer=mars        two choices
    # data=runs/a,b=c/tokens,size=xl   `b` is no choice, so data is "runs/a,b=c/tokens"
    pairs: list[tuple[str, str]] = []
    for item in filter(None, re.split(r",(?=\w+=)", text)):  # other commas belong to a word
        name, _, word = item.partition("=")
        if name not in choices and pairs and choices.get(pairs[-1][0]) == {}:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{item}")
        else:
            pairs.append((name, word))
    return pairs


def _value_of_choice(name: str, word: str, values: Mapping[str, Any] | None) -> Any:
    """The value that a word means for a choice with these values; None if it is not allowed."""
    if not values:  # any text, or no such choice
        return None if values is None else word or None
    # The placeholder is a key of `values`, but no word for a user to type.
    if _USER_FUNCTION in values and (word not in values or word == _USER_FUNCTION):
        return _parse_user_function(name, word)
    return values.get(word)


def _parse_user_function(name: str, word: str) -> Source | None:
    """The function of the user's own that the word of a choice names; None if it names none."""
    try:
        # For the choice `optimizer` this is optimizer.make, which alone may name a package.
        source = Source.parse(word, field=f"{name}.make")
    except ValueError:
        return None
    if source.file and source.sha256 is None:
        raise UsageError(f"{name}={word}: there is no file {source.file}.")
    return source


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the most similar known word; "" if there is none."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""
