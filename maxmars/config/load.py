"""CONFIG, the word that names a config: `NAME[:choice=value,...]` or `path/to/file.py[:...]`.

A config file defines `get_config(...) -> TrainConfig`. Its parameters are the choices, each
annotated with the `Literal` of its values, or with `str` where any text is allowed.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
import typing
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Literal

from maxmars.config.checks import UsageError
from maxmars.config.errors import in_words
from maxmars.config.train import TrainConfig
from maxmars.config.user_code import Source, import_file, relative_to, with_sources

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


def load_config(spec: str) -> TrainConfig:
    """Load the config that `NAME[:choice=value,...]` or `path/to/file.py[:...]` names.

    Raises:
      UsageError: the file, its `get_config`, a choice or a value does not exist, the choices do not
        fit together, or the file's own code raises an exception.
    """
    path, text = find_config(spec)
    get_config = _get_config(path)
    arguments = _chosen(path, text, get_config)
    with _in_config_file(path):
        config = get_config(**arguments)
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"get_config of {path} returned a {type(config).__name__}; "
            "it must return a TrainConfig."
        )
    # A constant of a file that did not run again has the digest of then.
    return with_sources(config, Source.as_it_is)


def _get_config(path: Path) -> Callable[..., Any]:
    with _in_config_file(path):
        get_config = getattr(import_file(path), "get_config", None)
    if not callable(get_config):
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
    """The values of each choice of a CONFIG, by name; none where any text is allowed."""
    path, _ = find_config(spec)
    return {name: list(words) for name, words in _choices(path, _get_config(path)).items()}


def _choices(path: Path, get_config: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """`choices_of` a file, each value by how it is written."""
    hints = typing.get_type_hints(get_config)
    values: dict[str, dict[str, Any]] = {}
    for name in inspect.signature(get_config).parameters:
        hint = hints.get(name)
        if hint is not str and typing.get_origin(hint) is not Literal:
            raise UsageError(
                f"{path}: annotate get_config's parameter `{name}` with its values, as in "
                f"`{name}: Literal['a', 'b'] = 'a'`, or with `str` to allow any text."
            )
        values[name] = {str(value): value for value in typing.get_args(hint)}
    return values


def _chosen(path: Path, text: str, get_config: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of `get_config` that the text of the choices says."""
    values = _choices(path, get_config)
    chosen: dict[str, Any] = {}
    for item in filter(None, re.split(r",(?=\w+=)", text)):  # other commas belong to a text
        name, _, word = item.partition("=")
        last = next(reversed(chosen), None)
        if last is not None and name not in values and not values[last]:
            chosen[last] += f",{item}"  # which may also hold `,b=`, as paths may
            continue
        words = values.get(name)
        if words is None or not word or name in chosen or (words and word not in words):
            known = [f"{name}={word}" for name, words in values.items() for word in words or [""]]
            all_choices = ", ".join(f"{name}={'|'.join(w) or 'TEXT'}" for name, w in values.items())
            raise UsageError(
                f"CONFIG {path}:{text}: {item!r} is not a choice{did_you_mean(item, known)}; the "
                f"choices are {all_choices or 'none'}, each at most once."
            )
        chosen[name] = words[word] if words else word
    for name, parameter in inspect.signature(get_config).parameters.items():
        if name not in chosen and parameter.default is parameter.empty:
            raise UsageError(
                f"{path} needs the choice {name}={'|'.join(values[name]) or 'TEXT'}: "
                f"{path}:{name}=...."
            )
    return chosen


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the most similar known word, "" if none is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""
