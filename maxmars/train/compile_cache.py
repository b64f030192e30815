"""Directories of JAX's cache of compiled programs, so that a second start need not compile.

JAX's own settings take precedence: with JAX_COMPILATION_CACHE_DIR, or with
JAX_ENABLE_COMPILATION_CACHE=false, this file does nothing. Two things are notable: which CPUs may
share programs, and the removal of entries that a kill has damaged, which JAX would neither read nor
overwrite.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from maxmars.distributed.files import cache_directory, is_remote

_MIN_COMPILE_S = 0.1  # programs that compile faster are not worth a file


def keep_beside(workdir: epath.PathLike, platform: str) -> None:
    """Keep compiled programs in `.jax_cache` beside a run's directory, unless that is in a bucket.

    CPUs have no such cache: XLA does not distinguish all CPUs, and a program from another machine
    in a shared directory may use instructions that this one lacks (jax issue 38445).
    """
    if platform != "cpu" and not is_remote(workdir) and not _is_configured():
        _enable(Path(workdir).parent / ".jax_cache")


def keep_in_cache(platform: str) -> None:
    """Keep compiled programs in the user's cache directory, for CPUs in a folder of this kind of
    CPU; keep none if the directory cannot be written."""
    if _is_configured():
        return
    with contextlib.suppress(OSError):
        kind = _cpu_kind() if platform == "cpu" else platform
        directory = cache_directory() / "programs" / kind
        directory.mkdir(parents=True, exist_ok=True)
        _enable(directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)


def _is_configured() -> bool:
    config: Any = jax.config  # type checkers do not know its attributes
    return config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache


def _enable(directory: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(directory))
    compilation_cache.reset_cache()  # JAX reads the setting once, when it first compiles
    warnings.showwarning = functools.partial(_repair_or_show, directory, warnings.showwarning)


def _repair_or_show(
    directory: Path, show: Callable[..., None], message: Warning | str, *where: Any, **more: Any
) -> None:
    """Remove a damaged entry of which JAX warns; show other warnings.

    JAX (0.12) compiles the program anew, but does not overwrite the entry. The warning names the
    program, which has one entry for each set of shapes.
    """
    prefix = r"Error reading persistent compilation cache entry for '(.+?)'"
    if (damaged := re.match(prefix, str(message))) is None:
        show(message, *where, **more)
        return
    for entry in directory.glob(f"{glob.escape(damaged[1])}-*-cache"):
        with contextlib.suppress(OSError):
            entry.unlink()


def _cpu_kind() -> str:
    """A name shared by all CPUs of the same model and instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = r"(model name|flags|CPU (implementer|part|variant)|Features)\s*:"  # x86 and ARM
    kind = sorted({line for line in lines if re.match(names, line)})
    return f"cpu-{hashlib.sha256(chr(10).join(kind).encode()).hexdigest()[:12]}"
