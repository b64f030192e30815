"""Functions of the user's own, which a config names as `FILE.py:NAME`; and optimizers of installed
packages, which it names as `module:NAME`."""

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

    Two are equal if function and text are; where the file lies does not count.
    """

    file: str = field(compare=False)
    """Empty for a function of an installed package."""
    function: str
    """Its name; of an installed package `module:NAME`."""
    sha256: str | None
    """Of the file, and of what it imports from its folder, when the config was made (`digest_of`).
    None if there was no such file."""
    is_recorded: bool = field(default=False, compare=False)
    """Whether a record names it: `load` then runs no file, only `recorded_copy` of it."""

    @classmethod
    def parse(
        cls,
        source: Source | str,
        *,
        field: str = "optimizer.make",
        example: str = "my_optimizer.py:make",
    ) -> Source:
        """The function that `FILE.py:NAME` names, with the present digest of its files; in
        `optimizer.make` also `module:NAME` of an installed package. In a config file the path is
        relative to that file (`relative_to`), elsewhere to the working directory.

        Raises:
          ValueError: it is not written so, or a record names it by its text. The message says field
            and example.
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
        return cls(file=str(folder / file), function=function, sha256=None).as_it_is()

    def as_it_is(self) -> Source:
        """The same function with the digest of the texts that its files have now."""
        if not self.file:
            return self
        path = Path(self.file)
        digest = digest_of(files_of(path)) if path.is_file() else None
        return dataclasses.replace(self, sha256=digest)

    def load(self, *, field: str = "source") -> Callable[..., Any]:
        """The function; its file is run. An error says `field`.

        Raises:
          FileNotFoundError, ValueError: see `files`; there is no such function or package; or a
            record names it, of which only copies in sources/ run (`recorded_copy`), and functions
            of optax. Any other exception was raised by the file's own code.
        """
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
        """The texts of the file, and of what it imports from its folder, when the config was made;
        see `files_of`. What was read once stays, so that a file may be edited while a run goes on.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the files have changed.
        """
        digest = self.sha256 or self.as_it_is().sha256
        if digest is None:
            raise FileNotFoundError(
                f"there is no file {self.file}; a path in a config file is relative to the config "
                "file."
            )
        return _read(Path(self.file), digest)

    @property
    def written(self) -> str:
        """`FILE.py:NAME` or `module:NAME`, as a user writes it."""
        return f"{self.file}:{self.function}" if self.file else self.function

    @property
    def short(self) -> str:
        """A name for tables and directories: that of the file, and the function's if it is not
        `make`."""
        if not self.file:
            return self.function.rpartition(":")[2]
        stem = Path(self.file).stem
        return stem if self.function == "make" else f"{stem}.{self.function}"

    def __repr__(self) -> str:
        return repr(self.written)

    def __str__(self) -> str:
        digest = f" (SHA-256 {(self.sha256 or 'unknown')[:16]})" if self.file else ""
        return f"{self.written}{digest}"


@functools.cache
def _read(path: Path, sha256: str) -> dict[str, bytes]:
    files = files_of(path)
    if (digest := digest_of(files)) != sha256:
        raise ValueError(
            f"{' or '.join(files)} in {path.parent} has changed since the config was made: the "
            f"SHA-256 is {digest[:16]}, and was {sha256[:16]}. Undo the change, or start again."
        )
    return files


_FOLDER = contextvars.ContextVar[Path | None](
    "folder of the config file that is loaded", default=Path()
)


@contextlib.contextmanager
def relative_to(folder: Path | None) -> Generator[None]:
    """Within it, what names a file of the user's own is relative to this folder; None for a record,
    which names none by its path alone."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


def sources_in(config: Any) -> list[Source]:
    """The functions in files of the user's own that a config, or a value in one, names."""
    if isinstance(config, Source):
        return [config] if config.file else []
    if dataclasses.is_dataclass(config):
        config = tuple(getattr(config, field.name) for field in dataclasses.fields(config))
    return [s for item in config for s in sources_in(item)] if isinstance(config, tuple) else []


def with_sources(config: Any, change: Callable[[Source], Source]) -> Any:
    """A config, or a value in one, with `change(source)` for each of `sources_in`."""
    if isinstance(config, Source):
        return change(config) if config.file else config
    if isinstance(config, tuple):
        return tuple(with_sources(item, change) for item in config)
    if not sources_in(config):
        return config
    names = [field.name for field in dataclasses.fields(config)]
    return dataclasses.replace(
        config, **{name: with_sources(getattr(config, name), change) for name in names}
    )


def keyword_defaults(source: Source, without: Collection[str] = ()) -> dict[str, Any]:
    """The keyword arguments of a function whose defaults its file writes as a number, a text, True
    or False, with these defaults; the first argument and those of `without` are left out. Of an
    installed package's function also those whose default is None, as SGD's momentum in optax.

    A file of the user's own is read and not run: what it computes on devices would come before the
    processes of a run have found each other. One that is missing or no Python has none; whoever
    runs it says so.

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
        if name not in without
        and isinstance(value, values)
        and (not isinstance(value, float) or math.isfinite(value))
    }


def _defaults_in_file(source: Source) -> dict[str, Any]:
    path = Path(source.file)
    try:
        tree = ast.parse(path.read_bytes() if path.is_file() else b"")
    except (SyntaxError, ValueError):
        return {}
    made = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == source.function]
    if not made:
        return {}
    signature = made[-1].args
    positional = [*signature.posonlyargs, *signature.args]
    pairs = list(zip(reversed(positional[1:]), reversed(signature.defaults), strict=False))
    pairs = [*reversed(pairs), *zip(signature.kwonlyargs, signature.kw_defaults, strict=True)]
    defaults: dict[str, Any] = {}
    for argument, node in pairs:
        try:
            value = ast.literal_eval(node) if node is not None else None
        except ValueError:  # an expression
            continue
        if isinstance(argument.annotation, ast.Name) and argument.annotation.id == "float":
            value = float(value) if type(value) is int else value
        defaults[argument.arg] = value
    return defaults


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
