"""The one rule for code that a record names.

A user's function runs only from the copy of its file in the run's `sources/`, and only if that copy
has the recorded SHA-256. Of installed packages only optax may be named (`Source.load`). The rule
covers the files that the record names, and what these import from their own folders.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

from etils import epath

from maxmars.config.own_modules import digest_of, files_of
from maxmars.config.user_code import Source, with_sources
from maxmars.distributed.files import cache_directory, is_remote, write_bytes

Part = TypeVar("Part")


def recorded_code(part: Part, run: epath.Path, folder: str) -> Part:
    """A part of a run's config in which each function comes from the run's copy of its file.

    Args:
      part: such as `config.model`; a part without functions is returned unchanged.
      run: the working directory.
      folder: the folder of this part's copies there, see `distributed.workdir.KEPT_SOURCES`.

    Raises:
      ValueError: a copy is missing, or has another SHA-256 than the recorded one.
    """
    way_out = (
        "put that file back there, or train with the file as it is now: `maxmars train CONFIG "
        f"--init-from {run}`"
    )
    return with_sources(part, lambda function: recorded_copy(function, run, folder, way_out))


def keep_code(function: Source, run: epath.PathLike, folder: str) -> None:
    """Copy the files of a function into `folder` of a run, for `recorded_copy`."""
    files = function.files()
    directory = epath.Path(run) / folder
    # Several files get a folder of their own, so that they can import only each other.
    directory = directory if len(files) == 1 else directory / _short(function)
    for name, text in files.items():
        write_bytes(directory / name, text)


def _short(function: Source) -> str:
    return (function.sha256 or "none")[:16]


def recorded_copy(function: Source, run: epath.PathLike, folder: str, way_out: str) -> Source:
    """A function from the copy of its file in `folder` of a run, which may run.

    Raises:
      ValueError: the copy is missing, lies outside of `run` by a link, or has another SHA-256 than
        `function`. The message ends with `way_out`.
    """
    directory, name = epath.Path(run) / folder, Path(function.file).name
    copy = directory / _short(function) / name
    copy = copy if copy.is_file() else directory / name
    is_inside = is_remote(copy) or Path(copy).resolve().is_relative_to(Path(run).resolve())
    files = files_of(copy) if is_inside and copy.is_file() else {}
    sha256 = digest_of(files)
    if sha256 != function.sha256:
        fault = f"has the SHA-256 {sha256[:16]}" if copy.is_file() else "is missing"
        fault = fault if is_inside else "is a link to elsewhere"
        raise ValueError(
            f"{copy} {fault}, and the record says {_short(function)}: code that a record names "
            f"runs only as it was recorded; {way_out}."
        )
    if is_remote(copy):  # Python imports from a disk alone
        copy = epath.Path(cache_directory()) / "sources" / sha256 / copy.name
        for name, text in files.items():
            write_bytes(copy.parent / name, text)
    return dataclasses.replace(function, file=str(copy), is_recorded=False)
