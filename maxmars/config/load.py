"""CONFIG, the word that names a config: `NAME[:choice=value,...]` or `path/to/file.py[:...]`.

A config file defines `get_config(...) -> TrainConfig`, and for `maxmars compare` may define
`get_comparison(...) -> ComparisonConfig`. Their parameters are the choices, each
annotated with the `Literal` of its values, or with `str` where any text is allowed. One with
`Literal["adamw", "mars"] | Source` may also be a function of the user's own, `FILE.py:NAME`.
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

from maxmars.config.checks import UsageError, kinds_of
from maxmars.config.comparison import ComparisonConfig
from maxmars.config.credentials import refuse_credentials
from maxmars.config.errors import in_words
from maxmars.config.optimizer import OptaxConfig
from maxmars.config.own_modules import files_of, run_files
from maxmars.config.train import TrainConfig, with_own_defaults
from maxmars.config.user_code import Source, relative_to, with_sources

_ROOM = Path(__file__).parent


def named_configs() -> dict[str, Path]:
    """The config files that a bare name means, by name.

    In a checkout they lie in `configs/` at its top; an installed wheel carries a copy.
    """
    in_wheel = _ROOM / "files"
    folder = in_wheel if in_wheel.is_dir() else _ROOM.parents[1] / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def find_config(spec: str) -> tuple[Path, str]:
    """Split CONFIG into the path of its file and the text of its choices, "" if it has none.

    A word with the ending `.py` is a path; any other word is one of `named_configs`.

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
      spec: CONFIG, as it is typed.
      choices: further choices, by name. The file of a function is relative to the working
        directory, here as in `spec`.
      make: function in place of that of the config's `OptaxConfig`, whose defaults are then the
        options that the config file does not give; None leaves it.

    Raises:
      UsageError: the file, its `get_config`, a choice or a value does not exist, the choices do not
        fit together, or the file's own code raises an exception.
    """
    path, text = find_config(spec)
    get_config = _get_config(path)
    config = _called(path, get_config, _chosen(path, text, choices, get_config), TrainConfig)
    if make is not None and isinstance(config.optimizer, OptaxConfig):
        optimizer = dataclasses.replace(config.optimizer, make=make)
        config = dataclasses.replace(config, optimizer=optimizer)
    return _with_present_code(config)


def load_comparison(
    spec: str, choices: Mapping[str, str] = MappingProxyType({})
) -> ComparisonConfig | None:
    """Load what `get_comparison` of the file of a CONFIG returns; None where it has none.

    Args and errors are those of `load_config`; choices are parameters of `get_comparison`.
    """
    path, text = find_config(spec)
    get_comparison = _function(path, "get_comparison")
    if get_comparison is None:
        return None
    arguments = _chosen(path, text, choices, get_comparison)
    comparison = _called(path, get_comparison, arguments, ComparisonConfig)
    configs = comparison.contenders.items()
    contenders = {name: _with_present_code(config) for name, config in configs}
    return dataclasses.replace(comparison, contenders=contenders)


def _with_present_code(config: TrainConfig) -> TrainConfig:
    """A config with the digests of the user's files as they are now, since a constant of a config
    file that did not run again has those of then; and with the defaults of an own optimizer."""
    return with_own_defaults(with_sources(config, Source.as_it_is))


def _called(path: Path, function: Callable[..., Any], arguments: dict[str, Any], kind: type) -> Any:
    with _in_config_file(path):
        config = function(**arguments)
    if not isinstance(config, kind):
        raise UsageError(
            f"{function.__name__} of {path} returned a {type(config).__name__}; it must return a "
            f"{kind.__name__}."
        )
    return config


def _function(path: Path, name: str) -> Callable[..., Any] | None:
    with _in_config_file(path):
        function = getattr(run_files(path, files_of(path)), name, None)
    return function if callable(function) else None


def _get_config(path: Path) -> Callable[..., Any]:
    get_config = _function(path, "get_config")
    if get_config is None:
        raise UsageError(
            f"{path} has no function get_config; a config file defines "
            "`def get_config() -> TrainConfig`."
        )
    return get_config


@contextlib.contextmanager
def _in_config_file(path: Path) -> Generator[None]:
    """What a config file names is relative to it, and each of its exceptions is told in one line,
    with its line there, as wrong usage.

    Also one that shows its trace elsewhere, such as NameError: who edits a config file for a run
    has a typing error there more often than a bug.
    """
    try:
        with relative_to(path.parent):
            yield
    except Exception as error:
        raise UsageError(in_words(error)) from error


def choices_of(spec: str) -> dict[str, list[str]]:
    """The values that each choice of a CONFIG takes, by name, as a user writes them; none where any
    text is allowed."""
    path, _ = find_config(spec)
    return {name: list(words) for name, words in _choices(path, _get_config(path)).items()}


_OWN = "FILE.py:NAME"
"""How a function of the user's own is written."""


def _choices(path: Path, get_config: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """The choices of a file: of each, its values by how they are written, with `_OWN` among them
    where it may be a function of the user's own; none where it may be any text."""
    hints = typing.get_type_hints(get_config)
    choices: dict[str, dict[str, Any]] = {}
    for name in inspect.signature(get_config).parameters:
        kinds = kinds_of(hints.get(name))
        values = {str(word): word for kind in kinds for word in typing.get_args(kind)}
        # Either any text (`str`), or Literals, a function of the user's own, or both.
        if hints.get(name) is not str and not (
            values and all(k is Source or typing.get_origin(k) is Literal for k in kinds)
        ):
            raise UsageError(
                f"{path}: annotate {get_config.__name__}'s parameter `{name}` with its values, as "
                f"in `{name}: Literal['a', 'b'] = 'a'`, or with `str` to allow any text."
            )
        choices[name] = values | ({_OWN: Source} if Source in kinds else {})
    return choices


def _chosen(
    path: Path, text: str, more: Mapping[str, str], get_config: Callable[..., Any]
) -> dict[str, Any]:
    """The arguments of `get_config` that the text of the choices says, and those in `more`."""
    choices = _choices(path, get_config)
    # size=small,optimizer=mars        two choices
    # data=runs/a,b=c/tokens,size=xl   `b` is no choice, so data is "runs/a,b=c/tokens"
    given: list[tuple[str, str]] = []
    for item in filter(None, re.split(r",(?=\w+=)", text)):  # other commas belong to a text
        name, _, word = item.partition("=")
        if name not in choices and given and choices.get(given[-1][0]) == {}:
            given[-1] = (given[-1][0], f"{given[-1][1]},{item}")  # paths may hold `,b=` too
        else:
            given.append((name, word))
    chosen: dict[str, Any] = {}
    for name, word in [*given, *more.items()]:
        refuse_credentials(word, name)  # the journal has the command line
        values = choices.get(name)
        if values is None or name in chosen:
            value = None
        elif values and word not in values and _OWN in values:
            value = _own_function(name, word)
        else:
            value = values.get(word) if values else word or None
        if value is None or value is Source:
            known = [f"{n}={w}" for n, words in choices.items() for w in words or [""]]
            written = f"{name}={word}"
            shown = ", ".join(f"{n}={'|'.join(words) or 'TEXT'}" for n, words in choices.items())
            raise UsageError(
                f"CONFIG {path}{':' if text else ''}{text}: {written!r} is not a choice"
                f"{did_you_mean(written, known)}; the choices are {shown or 'none'}, each "
                "at most once."
            )
        chosen[name] = value
    for name, parameter in inspect.signature(get_config).parameters.items():
        if name not in chosen and parameter.default is parameter.empty:
            words = "|".join(choices[name]) or "TEXT"
            raise UsageError(f"{path} needs the choice {name}={words}: {path}:{name}=....")
    return chosen


def _own_function(name: str, word: str) -> Source | None:
    """The function of the user's own that a word names; None if it names none."""
    try:
        source = Source.parse(word, field=f"{name}.make")
    except ValueError:
        return None
    if source.file and source.sha256 is None:
        raise UsageError(f"{name}={word}: there is no file {source.file}.")
    return source


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the most similar known word, "" if none is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""
