"""Compiled programs kept beside a run's directory, so that the next start need not compile them.

This is JAX's persistent compilation cache with two additions. JAX trusts what it finds, and what is
loaded is executed: so the directory must belong to the user who runs, and each entry must have the
checksum that was taken when it was complete. An entry that a killed process cut short, or that the
disk damaged, is deleted, where JAX would complain at every start and never write it anew.

On CPUs there is none unless JAX is told by JAX_COMPILATION_CACHE_DIR: XLA does not tell all CPUs
apart, rejects its own programs with alarming messages on many Intel ones (jax issue 38445), and a
program of another machine in a shared directory may use instructions that this one lacks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from maxmars import distributed
from maxmars.workdir import Workdir, is_remote

_ENTRIES = "*-cache"
_SEAL = ".sha256"


def default_directory(workdir: Workdir, platform: str) -> Path | None:
    """Where the programs of a run go: `.jax_cache` beside its directory.

    None on CPUs, in buckets, and where JAX was told itself: by JAX_COMPILATION_CACHE_DIR to use
    another place, or by JAX_ENABLE_COMPILATION_CACHE=false to keep nothing.
    """
    config: Any = jax.config  # whose attributes type checkers do not see
    told = config.jax_compilation_cache_dir is not None
    if told or is_remote(workdir) or platform == "cpu" or not config.jax_enable_compilation_cache:
        return None
    return Path(workdir).parent / ".jax_cache"


class ProgramCache(contextlib.AbstractContextManager["ProgramCache"]):
    """Inside a `with` block, what JAX compiles comes from a directory and goes there.

    All processes of a run enter it. Where one of them cannot use the directory, none does: the
    compilers of several processes may wait for each other.
    """

    def __init__(self, directory: Path | None, say: Callable[[str], None]) -> None:
        """Use `directory`, made if need be; None leaves JAX as it is.

        Args:
          directory: where the programs are.
          say: is told why the directory cannot be used, which is no error.
        """
        self._directory = directory
        self._say = say
        self._active = False

    def __enter__(self) -> ProgramCache:
        """Delete what is damaged, and begin."""
        if self._directory is None:
            return self
        problem = _prepare(self._directory) if distributed.is_primary() else None
        distributed.barrier("program cache")
        if not distributed.is_primary():
            problem = _check(self._directory)
        self._active = distributed.everywhere(problem is None)
        if self._active:
            _tell_jax(self._directory)
        elif problem is not None:
            self._say(f"compiled programs are not kept: {problem}")
        return self

    def seal(self) -> None:
        """Take the checksums of entries that have none; to be called when nothing is compiling."""
        if self._active and self._directory is not None and distributed.is_primary():
            with contextlib.suppress(OSError):  # a full disk, for example: they will be deleted
                for entry in self._directory.glob(_ENTRIES):
                    if not _seal_of(entry).exists():
                        _seal_of(entry).write_text(_checksum(entry))

    def __exit__(self, *_: object) -> None:
        """Seal what has come, and leave JAX as it was."""
        if self._active:
            self.seal()
            _tell_jax(None)


def _tell_jax(directory: Path | None) -> None:
    jax.config.update("jax_compilation_cache_dir", None if directory is None else str(directory))
    compilation_cache.reset_cache()  # JAX looks at the setting once, when it first compiles


def _prepare(directory: Path) -> str | None:
    """Make the directory and delete what is damaged in it; why that is not possible."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        problem = _check(directory)
        if problem is None:
            for entry in directory.glob(_ENTRIES):
                seal = _seal_of(entry)
                if not seal.exists() or seal.read_text() != _checksum(entry):
                    entry.unlink(missing_ok=True)
                    seal.unlink(missing_ok=True)
    except OSError as error:
        return f"{directory}: {error.strerror}."
    return problem


def _check(directory: Path) -> str | None:
    """Why the programs in a directory cannot be trusted or added to."""
    try:
        status = directory.stat()
    except OSError as error:
        return f"{directory}: {error.strerror}."
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to {directory}, and what it holds would be executed."
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} cannot be written to."
    return None


def _seal_of(entry: Path) -> Path:
    return entry.with_name(entry.name + _SEAL)


def _checksum(entry: Path) -> str:
    with entry.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
