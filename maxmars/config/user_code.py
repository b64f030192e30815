"""Python files of the user: config files, and functions that a config names as `FILE.py:NAME`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
import types
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast


def import_file(path: Path) -> types.ModuleType:
    """Run a Python file as a module; a file that ran before and did not change runs no second time.

    So a class of the file is one class, wherever the file is named: JAX takes pytrees of two for
    different ones.

    Raises:
      ValueError: it is no Python. Any other exception was raised by the file's own code.
    """
    return _run(path.resolve(), str(path), path.read_bytes())


@functools.cache
def _run(path: Path, shown: str, source: bytes) -> types.ModuleType:
    # A name of its own, so that a config called gpt2.py hides no module; registered because
    # dataclasses of the file look their module up.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    module = types.ModuleType(f"maxmars_user_{digest}")
    module.__file__ = shown
    sys.modules[module.__name__] = module
    # Compiled here rather than by importlib, which would trust a .pyc of the same second.
    try:
        code = compile(source, shown, "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ValueError(f"{shown}:{error.lineno}: {error.msg}: {line}") from error
    exec(code, module.__dict__)
    return module


def split_source(source: str) -> tuple[Path, str]:
    """The file and the function of `FILE.py:NAME`.

    Raises:
      ValueError: it is not written so.
    """
    file, colon, name = source.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ValueError(
            f"source={source!r} must name a file and a function in it, as my_data.py:windows."
        )
    return Path(file), name


def load_function(source: str) -> Callable[..., Any]:
    """The function that `FILE.py:NAME` names; its file is run.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it has no such function. Any other exception was raised by the file's own code.
    """
    path, name = split_source(source)
    if not path.is_file():
        raise FileNotFoundError(
            f"source={source!r}: there is no file {path}; a path in a config file is relative to "
            "the config file."
        )
    function = getattr(import_file(path), name, None)
    if not callable(function):
        raise ValueError(f"source={source!r}: {path} has no function {name!r}.")
    return function


def sources_in(config: Any) -> list[str]:
    """The functions of the user's own that a config or a part of one names, as `FILE.py:NAME`."""
    if isinstance(config, tuple):
        return [source for part in config for source in sources_in(part)]
    if not dataclasses.is_dataclass(config):
        return []
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    found = [value for name, value in values.items() if name in ("source", "make")]
    return [*found, *(source for value in values.values() for source in sources_in(value))]


def with_sources(config: Any, change: Callable[[str], str]) -> Any:
    """A config or a part of one with `change(source)` for each of `sources_in`."""
    if isinstance(config, tuple):
        return tuple(with_sources(part, change) for part in config)
    if not dataclasses.is_dataclass(config):
        return config
    values = {f.name: with_sources(getattr(config, f.name), change) for f in fields(config)}
    values |= {name: change(values[name]) for name in ("source", "make") if name in values}
    return dataclasses.replace(cast(Any, config), **values)


def with_tuples(options: Any) -> Any:
    """Options of the user's code as they come back from config.json: with tuples for lists."""
    if isinstance(options, dict):
        return {name: with_tuples(item) for name, item in options.items()}
    return tuple(map(with_tuples, options)) if isinstance(options, list | tuple) else options
