"""Python files of the user's own as modules: a file, and what it imports from its folder.

They are hashed, copied and run together. `files_of` finds them before anything runs, by the import
statements, also those within functions. `run_files` then runs the very bytes that were hashed:
`_Imports`, in front of Python's own finders, serves the imports from memory, and never from a .pyc
file, which Python would trust by its date alone.
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
"""Contents by path, relative to the folder of the first file, which imports the others."""


def files_of(path: Any) -> dict[str, bytes]:
    """Read a file and the files under its folder that it imports, directly or not.

    Args:
      path: a `Path`, or an `epath.Path` in a bucket.

    Raises:
      FileNotFoundError: there is no such file.
    """
    files = {path.name: path.read_bytes()}
    folders = {".": True}
    queue = [*imported_paths(path.name, files[path.name])]
    while queue:
        name = queue.pop(0)
        folder = str(PurePosixPath(name).parent)
        if folder not in folders:  # looked up once, as a bucket takes long to answer
            folders[folder] = (path.parent / folder).is_dir()
        if folders[folder] and name not in files and (path.parent / name).is_file():
            files[name] = (path.parent / name).read_bytes()
            queue += imported_paths(name, files[name])
    return files


def digest_of(files: Files) -> str:
    """SHA-256, in hex, of one file, or of a list of the digests and names of several."""
    digests = {name: hashlib.sha256(text).hexdigest() for name, text in files.items()}
    if len(digests) == 1:
        return digests.popitem()[1]
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


@functools.cache
def imported_paths(name: str, text: bytes) -> tuple[str, ...]:
    """Paths, relative to the folder, where the modules that a file imports may lie; most of them do
    not exist. A file that is no Python has none; running it raises the error."""
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
            # `from a import b`: b is a module or a name in a.
            modules += [start, *((*start, alias.name) for alias in node.names)]
    own = [m for m in modules if m and m[0] != "maxmars" and m[0] not in sys.stdlib_module_names]
    # `import a.b` runs a/__init__.py first.
    bases = dict.fromkeys("/".join(m[:end]) for m in own for end in range(1, len(m) + 1))
    return tuple(path for base in bases for path in (f"{base}.py", f"{base}/__init__.py"))


def run_files(path: Path, files: Files) -> types.ModuleType:
    """Run a file as a module; unchanged files run once in a process, and then return the same
    module. A second run would define its classes anew, and JAX would take pytrees of the old and
    the new class for different ones.

    Args:
      path: path of the first file, as errors show it.
      files: see `files_of`.

    Raises:
      ValueError: the file is no Python, or the process would import two files under one name. Any
        other exception comes from the code of the file.
    """
    (main, text), *others = files.items()
    imported = {name for file, text in others for name in imported_paths(file, text)}
    _IMPORTS.add(path.parent, [*others, (main, text)] if main in imported else others)
    name = path.stem
    if main not in imported:  # a name of its own, so that a config called gpt2.py hides no module
        name = f"maxmars_user_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    return _run(name, str(path), tuple(files.items()))


@functools.cache
def _run(name: str, display_path: str, files: tuple[tuple[str, bytes], ...]) -> types.ModuleType:
    module = types.ModuleType(name)  # registered, as dataclasses of the file look their module up
    module.__file__ = display_path
    sys.modules[module.__name__] = module
    _execute(module, display_path, files[0][1])
    return module


def _execute(module: types.ModuleType, display_path: str, text: bytes) -> None:
    try:
        code = compile(text, display_path, "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ValueError(f"{display_path}:{error.lineno}: {error.msg}: {line}") from error
    exec(code, module.__dict__)


class _Imports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader of the modules that user files import, by the names in their imports."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[Path, bytes]] = {}

    def add(self, folder: Path, files: Sequence[tuple[str, bytes]]) -> None:
        """Make the files of a folder importable from now on.

        Raises:
          ValueError: a name is already that of another module in this process.
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
            known, known_text = self._files.get(name) or _find_module(name, file)
            if known is None or known_text == text:
                continue
            if known.resolve() != file.resolve():
                raise ValueError(
                    f"{file} would be imported as {name}, which is {known} already; "
                    "rename one of them."
                )
            changed = True
        if changed:
            for name in new:  # unchanged modules too, as they have imported the changed ones
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


def _find_module(name: str, file: Path) -> tuple[Path | None, bytes | None]:
    """The file that Python itself imports by a name, and its content if it is `file`."""
    origin = getattr(sys.modules.get(name), "__file__", None)
    if origin is None and "." not in name:  # a package that was not imported yet
        origin = getattr(PathFinder.find_spec(name), "origin", None)
    if origin is None:
        return None, None
    found = Path(origin)
    return found, found.read_bytes() if found.resolve() == file.resolve() else None


_IMPORTS = _Imports()
