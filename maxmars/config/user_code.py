"""Python files of the user: config files, and functions that a config names as `FILE.py:NAME`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
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


def split_source(
    source: str, *, field: str = "source", example: str = "my_data.py:windows"
) -> tuple[Path, str]:
    """The file and the function of `FILE.py:NAME`; an error names the field and the example.

    Raises:
      ValueError: it is not written so.
    """
    file, colon, name = source.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{field}={source!r} must name a file and a function in it, as {example}.")
    return Path(file), name


def load_function(source: str, *, field: str = "source") -> Callable[..., Any]:
    """The function that `FILE.py:NAME` names; its file is run. An error names the field.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it has no such function. Any other exception was raised by the file's own code.
    """
    path, name = split_source(source, field=field)
    if not path.is_file():
        raise FileNotFoundError(
            f"{field}={source!r}: there is no file {path}; a path in a config file is relative to "
            "the config file."
        )
    function = getattr(import_file(path), name, None)
    if not callable(function):
        raise ValueError(f"{field}={source!r}: {path} has no function {name!r}.")
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


def text_digests(config: Any) -> dict[str, str | None]:
    """SHA-256, in hex, of the file of each of `sources_in`, by `FILE.py:NAME` without its
    directory; None where there is no such file."""
    digests: dict[str, str | None] = {}
    for source in sources_in(config):
        path, name = split_source(source)
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        digests[f"{path.name}:{name}"] = digest
    return digests


def with_sources(config: Any, change: Callable[[str], str]) -> Any:
    """A config or a part of one with `change(source)` for each of `sources_in`."""
    if isinstance(config, tuple):
        return tuple(with_sources(part, change) for part in config)
    if not dataclasses.is_dataclass(config):
        return config
    values = {f.name: with_sources(getattr(config, f.name), change) for f in fields(config)}
    values |= {name: change(values[name]) for name in ("source", "make") if name in values}
    return dataclasses.replace(cast(Any, config), **values)


def with_tuples(options: Any, name: str) -> Any:
    """Options of the user's code as they come back from config.json: with tuples for lists.

    `name` is what errors call them, such as `OptaxConfig.options`.

    Raises:
      ValueError: config.json cannot hold one of them, or the command line cannot name it.
    """
    if isinstance(options, dict):
        _check_keys(list(options), name)
        return {key: with_tuples(item, f"{name}.{key}") for key, item in options.items()}
    if isinstance(options, list | tuple):
        return tuple(with_tuples(item, f"{name}.{i}") for i, item in enumerate(options))
    if options is not None and not isinstance(options, str | int | float):
        raise ValueError(
            f"{name} is a {type(options).__name__}, which config.json cannot hold; options are "
            "text, numbers, True, False, None, and lists and dicts of these."
        )
    if isinstance(options, float) and not math.isfinite(options):
        raise ValueError(f"{name}={options} must be a finite number.")
    return options


def _check_keys(keys: list[Any], name: str) -> None:
    for key in keys:
        if not isinstance(key, str):
            raise ValueError(f"{name} has the key {key!r}, which must be text, as config.json has.")
    if "type" in keys:  # which says the class of a dict in config.json
        raise ValueError(f"{name}: no option may be called 'type'.")
    flags = [key.replace("_", "-") for key in keys]
    if twice := [key for key, flag in zip(keys, flags, strict=True) if flags.count(flag) > 1]:
        raise ValueError(
            f"{name} has {' and '.join(twice)}, which are one option of the command line; rename "
            "one of them."
        )
