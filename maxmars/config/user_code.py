"""Functions of the user's own, which a config names as `FILE.py:NAME`.

A `Source` has the digest of the file and of what it imports from its folder, so that a run never
trains with other code than its record says. A `Source` from a record runs no file: only its copy in
the run's sources/ does. Optimizers may also come from installed packages, as `module:NAME`.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxmars.config.errors import about
from maxmars.config.own_modules import digest_of, files_of, run_files


@dataclass(frozen=True, repr=False)
class Source:
    """A function in a Python file of the user's own, or in an installed package.

    Two are equal if name and digest are, wherever the files lie.
    """

    file: str = field(compare=False)
    """Path of the file; "" for a function of an installed package."""
    function: str
    """Name of the function; `module:NAME` for an installed package."""
    sha256: str | None
    """SHA-256 of the file and of what it imports from its folder (`digest_of`) when the config was
    made. None if there was no such file, and for an installed package."""
    is_recorded: bool = field(default=False, compare=False)
    """Whether the name comes from a record: `load` then runs no file, see `recorded_copy`."""

    @classmethod
    def parse(
        cls,
        source: Source | str,
        *,
        field: str = "optimizer.make",
        example: str = "my_optimizer.py:make",
    ) -> Source:
        """Parse `FILE.py:NAME`, with the digest of the files as they are now; for `optimizer.make`
        also `module:NAME` of an installed package. In a config file the path is relative to that
        file (`relative_to`), elsewhere to the working directory.

        Raises:
          ValueError: the text has another form, or stands in a record, which needs a digest. The
            message has the name `field` and the `example`.
        """
        if not isinstance(source, str):
            return source
        file, _, function = source.rpartition(":")
        is_package = not file.endswith(".py")
        parts = [*file.split("."), function] if is_package else [function]
        if not all(map(str.isidentifier, parts)) or (is_package and field != "optimizer.make"):
            raise ValueError(
                f"{field}={source!r} must name a file and a function in it, as {example}; "
                "optimizer.make may also name a function of an installed package."
            )
        if (folder := _FOLDER.get()) is None:
            raise ValueError(f"{field}={source!r}: a record has the SHA-256 of each file of code.")
        if is_package:
            return cls(file="", function=source, sha256=None)
        return cls(file=str(folder / file), function=function, sha256=None).with_current_digest()

    def with_current_digest(self) -> Source:
        """The same function with the digest of its files as they are now."""
        if not self.file:
            return self
        path = Path(self.file)
        digest = digest_of(files_of(path)) if path.is_file() else None
        return dataclasses.replace(self, sha256=digest)

    def load(self, *, field: str = "source") -> Callable[..., Any]:
        """Run the file and return the function. `field` names the option in errors.

        Raises:
          FileNotFoundError, ValueError: see `files`; there is no such function or package; or the
            name comes from a record, where only optax's functions and copies in sources/
            (`recorded_copy`) run. Any other exception comes from the code of the file.
        """
        # The record has optax's version, and so tells what ran; of most packages it has none.
        if self.is_recorded and not self.function.startswith(("optax:", "optax.")):
            raise ValueError(
                f"{field}={self!r} is named by a record, of which only copies in sources/ and "
                "functions of optax run; train again with a FILE.py:NAME that imports it."
            )
        module: Any
        with about(f"{field}={self!r}"):
            if self.file:
                path, name = Path(self.file), self.function
                module = run_files(path, self.files())
            else:
                package, _, name = self.function.partition(":")
                try:
                    module = importlib.import_module(package)
                except ModuleNotFoundError as error:
                    raise ValueError(
                        f"{error}; install its package, or name a file, FILE.py:NAME."
                    ) from error
        function = getattr(module, name, None)
        if not callable(function):
            raise ValueError(f"{field}={self!r}: there is no function {name!r} in it.")
        return function

    def files(self) -> dict[str, bytes]:
        """Contents of the file and of what it imports from its folder (`files_of`), as they were
        when the config was made. The process reads them once, so that files may be edited while a
        run goes on.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the files have changed since the config was made.
        """
        digest = self.sha256 or self.with_current_digest().sha256
        if digest is None:
            raise FileNotFoundError(
                f"there is no file {self.file}; a path in a config file is relative to the config "
                "file."
            )
        return _read_files(Path(self.file), digest)

    @property
    def spec(self) -> str:
        """The function as a user types it: `FILE.py:NAME` or `module:NAME`."""
        return f"{self.file}:{self.function}" if self.file else self.function

    @property
    def short(self) -> str:
        """A name for tables and directories: that of the file, with the function's unless it is
        `make`."""
        if not self.file:
            return self.function.rpartition(":")[2]
        stem = Path(self.file).stem
        return stem if self.function == "make" else f"{stem}.{self.function}"

    def __repr__(self) -> str:
        return repr(self.spec)

    def __str__(self) -> str:
        digest = f" (SHA-256 {(self.sha256 or 'unknown')[:16]})" if self.file else ""
        return f"{self.spec}{digest}"


@functools.cache
def _read_files(path: Path, sha256: str) -> dict[str, bytes]:
    files = files_of(path)
    if (digest := digest_of(files)) != sha256:
        raise ValueError(
            f"{' or '.join(files)} in {path.parent} has changed since the config was made: the "
            f"SHA-256 is {digest[:16]}, and was {sha256[:16]}. Undo the change, or start again."
        )
    return files


_FOLDER = contextvars.ContextVar[Path | None](
    "folder of the config file that is loaded",
    default=Path(),  # the working directory, for the command line
)


@contextlib.contextmanager
def relative_to(folder: Path | None) -> Generator[None]:
    """Make paths of user files relative to a folder within the block; None refuses paths without a
    digest, as in a record."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


def sources_in(config: Any) -> list[Source]:
    """Functions in the user's files that a config, or a value of a config, names."""
    if isinstance(config, Source):
        return [config] if config.file else []
    if dataclasses.is_dataclass(config):
        config = tuple(getattr(config, field.name) for field in dataclasses.fields(config))
    return [s for item in config for s in sources_in(item)] if isinstance(config, tuple) else []


def with_sources(config: Any, change: Callable[[Source], Source]) -> Any:
    """A config, or a value of a config, with each of its `sources_in` replaced by
    `change(source)`."""
    if isinstance(config, Source):
        return change(config) if config.file else config
    if isinstance(config, tuple):
        return tuple(with_sources(item, change) for item in config)
    if not sources_in(config):  # as it is: `replace` would check each part anew
        return config
    names = [field.name for field in dataclasses.fields(config)]
    return dataclasses.replace(
        config, **{name: with_sources(getattr(config, name), change) for name in names}
    )


def keyword_defaults(source: Source, excluded: Collection[str] = ()) -> dict[str, Any]:
    """Defaults of a function's keyword arguments that are a number, a text, True or False, without
    the first argument and those in `excluded`. For a function of an installed package also None,
    such as the momentum of optax's SGD.

    A user's file is parsed and not run: it might use devices, before the processes of a run have
    joined. A file that is missing or no Python has no defaults; running it raises the error.

    Raises:
      ValueError: an installed package has no such function.
    """
    values: Any = bool | int | float | str
    if source.file:
        defaults = _defaults_in_file(source)
    else:
        signature = inspect.signature(source.load(field="optimizer.make"))
        _, *others = signature.parameters.values()
        defaults, values = {p.name: p.default for p in others}, values | None
    return {
        name: value
        for name, value in defaults.items()
        if name not in excluded
        and isinstance(value, values)
        and (not isinstance(value, float) or math.isfinite(value))
    }


def _defaults_in_file(source: Source) -> dict[str, Any]:
    path = Path(source.file)
    try:
        tree = ast.parse(path.read_bytes() if path.is_file() else b"")
    except (SyntaxError, ValueError):
        return {}
    defs = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == source.function]
    if not defs:
        return {}
    signature = defs[-1].args  # as in Python, the last definition of a name counts
    positional = [*signature.posonlyargs, *signature.args]
    # Defaults belong to the last positional arguments; a keyword-only one without has None.
    pairs = list(zip(reversed(positional[1:]), reversed(signature.defaults), strict=False))
    pairs = [*reversed(pairs), *zip(signature.kwonlyargs, signature.kw_defaults, strict=True)]
    defaults: dict[str, Any] = {}
    for argument, node in pairs:
        try:
            value = ast.literal_eval(node) if node is not None else None
        except ValueError:  # an expression
            continue
        # `rate: float = 1` takes 0.5 on the command line, too.
        if isinstance(argument.annotation, ast.Name) and argument.annotation.id == "float":
            value = float(value) if type(value) is int else value
        defaults[argument.arg] = value
    return defaults


def normalize_options(options: Any, name: str) -> Any:
    """Options of a user's function as `from_dict` reads them from config.json: with tuples for
    lists. `name` is their name in errors, such as `OptaxConfig.options`.

    Raises:
      ValueError: config.json cannot hold a value, or the command line cannot name an option.
    """
    if isinstance(options, dict):
        _check_keys(list(options), name)
        return {key: normalize_options(item, f"{name}.{key}") for key, item in options.items()}
    if isinstance(options, list | tuple):
        return tuple(normalize_options(item, f"{name}.{i}") for i, item in enumerate(options))
    if options is not None and not isinstance(options, str | int | float):
        raise ValueError(
            f"{name} is a {type(options).__name__}, which config.json cannot hold; options are "
            "text, numbers, True, False, None, and lists and dicts of these."
        )
    if isinstance(options, float) and not math.isfinite(options):
        raise ValueError(f"{name}={options} must be a finite number.")
    return options


def parse_function(config: Any, name: str, **labels: str) -> None:
    """Convert a field `FILE.py:NAME` of a frozen config to its `Source` (`labels` as of `parse`),
    and normalise `options`: a run that continues compares both with those of config.json."""
    object.__setattr__(config, name, Source.parse(getattr(config, name), **labels))
    options = normalize_options(config.options, f"{type(config).__name__}.options")
    object.__setattr__(config, "options", options)


def _check_keys(keys: list[Any], name: str) -> None:
    for key in keys:
        if not isinstance(key, str):
            raise ValueError(f"{name} has the key {key!r}, which must be text, as config.json has.")
    if "type" in keys:  # the class of a dict in config.json
        raise ValueError(f"{name}: no option may be called 'type'.")
    flags = [key.replace("_", "-") for key in keys]
    if twice := [key for key, flag in zip(keys, flags, strict=True) if flags.count(flag) > 1]:
        raise ValueError(
            f"{name} has {' and '.join(twice)}, which are one option of the command line; rename "
            "one of them."
        )
