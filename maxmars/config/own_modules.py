"""Python files of the user's own as modules: a file, and what it imports from its folder.

These are hashed, copied and run together. They are found by reading the import statements, also
those within functions, before anything runs; what runs are the texts that were read, and never a
.pyc, which Python would trust by its second and a record could bring along.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePosixPath
from typing import Any

Files = Mapping[str, bytes]
"""Texts by their paths relative to the folder of the first, which imports the others."""


def files_of(path: Any) -> dict[str, bytes]:
    """A file and the files under its folder that it imports, and these import.

    Args:
      path: a `Path`, or one in a bucket.

    Raises:
      FileNotFoundError: there is no such file.
    """
    files = {path.name: path.read_bytes()}
    folders = {".": True}
    waiting = [*imported_paths(path.name, files[path.name])]
    while waiting:
        name = waiting.pop(0)
        folder = str(PurePosixPath(name).parent)
        if folder not in folders:  # asked once, as in a bucket each question takes its time
            folders[folder] = (path.parent / folder).is_dir()
        if folders[folder] and name not in files and (path.parent / name).is_file():
            files[name] = (path.parent / name).read_bytes()
            waiting += imported_paths(name, files[name])
    return files


def digest_of(files: Files) -> str:
    """SHA-256, in hex, of a file; of several that of the list of their digests and names."""
    digests = {name: hashlib.sha256(text).hexdigest() for name, text in files.items()}
    if len(digests) == 1:
        return digests.popitem()[1]
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


@functools.cache
def imported_paths(name: str, text: bytes) -> tuple[str, ...]:
    """The relative paths where the modules that a file imports would lie; most lie elsewhere. A
    file that is no Python imports none: whoever runs it says so."""
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError):
        return ()
    package = PurePosixPath(name).parent.parts
    modules: list[tuple[str, ...]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            start = (*above, *filter(None, (node.module or "").split(".")))
            modules += [start, *((*start, alias.name) for alias in node.names)]
    own = [m for m in modules if m and m[0] != "maxmars" and m[0] not in sys.stdlib_module_names]
    bases = dict.fromkeys("/".join(m[:end]) for m in own for end in range(1, len(m) + 1))
    return tuple(path for base in bases for path in (f"{base}.py", f"{base}/__init__.py"))


def run_files(path: Path, files: Files) -> types.ModuleType:
    """Run a file as a module. One that ran before, and none of whose files changed, does not again:
    so a class of it is one class wherever it is named. JAX takes pytrees of two for different ones.

    Args:
      path: of the first of the files, as errors show it.
      files: see `files_of`.

    Raises:
      ValueError: it is no Python, or two files of one name would be imported in this process. Any
        other exception was raised by the file's own code.
    """
    (first, text), *others = files.items()
    imported = {name for file, text in others for name in imported_paths(file, text)}
    _IMPORTS.add(path.parent, [*others, (first, text)] if first in imported else others)
    name = path.stem
    if first not in imported:  # a name of its own, so that a config called gpt2.py hides no module
        name = f"maxmars_user_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    return _run(name, str(path), tuple(files.items()))


@functools.cache
def _run(name: str, shown: str, files: tuple[tuple[str, bytes], ...]) -> types.ModuleType:
    module = types.ModuleType(name)  # registered, as dataclasses of the file look their module up
    module.__file__ = shown
    sys.modules[module.__name__] = module
    _execute(module, shown, files[0][1])
    return module


def _execute(module: types.ModuleType, shown: str, text: bytes) -> None:
    try:
        code = compile(text, shown, "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ValueError(f"{shown}:{error.lineno}: {error.msg}: {line}") from error
    exec(code, module.__dict__)


class _Imports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The modules that files of the user's own may import, by the names by which these do."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[Path, bytes]] = {}

    def add(self, folder: Path, files: Sequence[tuple[str, bytes]]) -> None:
        """Let files of a folder be imported from now on.

        Raises:
          ValueError: a name is that of another module in this process.
        """
        new: dict[str, tuple[Path, bytes]] = {}
        for relative, text in files:
            parts = PurePosixPath(relative).with_suffix("").parts
            for end in range(1, len(parts)):  # a folder needs no __init__.py
                init = folder.joinpath(*parts[:end], "__init__.py")
                new.setdefault(".".join(parts[:end]), (init, b""))
            name = parts[:-1] if parts[-1] == "__init__" else parts
            new[".".join(name)] = (folder / relative, text)
        changed = False
        for name, (file, text) in new.items():
            if name in self._files:
                known, known_text = self._files[name]
            else:
                present = getattr(sys.modules.get(name), "__file__", None)
                if present is None and "." not in name:  # a package that is imported later
                    present = getattr(PathFinder.find_spec(name), "origin", None)
                if present is None:
                    continue
                known = Path(present)
                known_text = known.read_bytes() if known.resolve() == file.resolve() else None
            if known_text == text:
                continue
            if known.resolve() != file.resolve():
                raise ValueError(
                    f"{file} would be imported as {name}, which is {known} already; "
                    "rename one of them."
                )
            changed = True
        if changed:
            for name in new:  # also what did not change, as it has imported what did
                sys.modules.pop(name, None)
        self._files = self._files | new if changed else new | self._files
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._files:
            return None
        file, _ = self._files[fullname]
        return importlib.util.spec_from_loader(
            fullname, self, origin=str(file), is_package=file.name == "__init__.py"
        )

    def exec_module(self, module: types.ModuleType) -> None:
        file, text = self._files[module.__name__]
        module.__file__ = str(file)
        _execute(module, str(file), text)


_IMPORTS = _Imports()
