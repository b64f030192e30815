"""The one rule for code that a record names: which text of a user's own function runs.

Only the copy that the run keeps in its `sources/`, and only if that copy has the SHA-256 that was
recorded; of installed packages only optax, which `Source.load` looks at. The rule covers the
files that the record names, and what these import from their own folders.
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
    """A part of a run's config, with each function in the copy of its file that the run keeps.

    Args:
      part: such as `config.model`; one that names no function stays as it is.
      run: the working directory.
      folder: where the run keeps the files of this part, see `distributed.workdir.KEPT_SOURCES`.

    Raises:
      ValueError: a copy is missing, or has another SHA-256 than the recorded one.
    """
    way_out = (
        "put that file back there, or train with the file as it is now: `maxmars train CONFIG "
        f"--init-from {run}`"
    )
    return with_sources(part, lambda source: recorded_copy(source, run, folder, way_out))


def keep_code(source: Source, run: epath.PathLike, folder: str) -> None:
    """Copy the files of a function to where `recorded_copy` finds them: one file into `folder`,
    several into a folder of their own there, where nothing else can be imported."""
    files = source.files()
    place = epath.Path(run) / folder
    place = place if len(files) == 1 else place / _short(source)
    for name, text in files.items():
        write_bytes(place / name, text)


def _short(source: Source) -> str:
    return (source.sha256 or "none")[:16]


def recorded_copy(source: Source, run: epath.PathLike, folder: str, way_out: str) -> Source:
    """A function in the copy of its file that `run` keeps in `folder`; for a bucket, in a copy of
    that on the disk.

    Raises:
      ValueError: the copy is missing, lies outside of `run` by a link, or has another SHA-256 than
        `source`. The message ends with `way_out`.
    """
    place, name = epath.Path(run) / folder, Path(source.file).name
    kept = place / _short(source) / name
    kept = kept if kept.is_file() else place / name
    is_inside = is_remote(kept) or Path(kept).resolve().is_relative_to(Path(run).resolve())
    files = files_of(kept) if is_inside and kept.is_file() else {}
    sha256 = digest_of(files)
    if sha256 != source.sha256:
        found = f"has the SHA-256 {sha256[:16]}" if kept.is_file() else "is missing"
        found = found if is_inside else "is a link to elsewhere"
        raise ValueError(
            f"{kept} {found}, and the record says {_short(source)}: code that a record names runs "
            f"only as it was recorded; {way_out}."
        )
    if is_remote(kept):
        kept = epath.Path(cache_directory()) / "sources" / sha256 / kept.name
        for name, text in files.items():
            write_bytes(kept.parent / name, text)
    return dataclasses.replace(source, file=str(kept), is_recorded=False)
