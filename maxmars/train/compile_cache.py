"""Where compiled programs are kept, so that the next start of a command need not compile them.

JAX may be told itself: by JAX_COMPILATION_CACHE_DIR to use another place, or by
JAX_ENABLE_COMPILATION_CACHE=false to keep nothing.
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

_SHORTEST_S = 0.1  # what compiles faster is not worth a file


def keep_beside(workdir: epath.PathLike, platform: str) -> None:
    """Keep what JAX compiles in `.jax_cache` beside a run's directory.

    Not for a workdir in a bucket. Not on CPUs: XLA does not tell all CPUs apart, and a program from
    another machine in a shared directory may use instructions that this one lacks (jax issue
    38445).
    """
    if platform != "cpu" and not is_remote(workdir) and not _is_told():
        _keep_in(Path(workdir).parent / ".jax_cache")


def keep_in_cache(platform: str) -> None:
    """Keep what JAX compiles in the cache directory of the user, on CPUs in a folder for CPUs of
    this kind. Where the directory cannot be written, nothing is kept."""
    if _is_told():
        return
    with contextlib.suppress(OSError):
        directory = cache_directory() / "programs" / (_cpu() if platform == "cpu" else platform)
        directory.mkdir(parents=True, exist_ok=True)
        _keep_in(directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _SHORTEST_S)


def _is_told() -> bool:
    config: Any = jax.config  # whose attributes type checkers do not see
    return config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache


def _keep_in(directory: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(directory))
    compilation_cache.reset_cache()  # JAX reads the setting once, when it first compiles
    warnings.showwarning = functools.partial(_show, directory, warnings.showwarning)


def _show(
    directory: Path, show: Callable[..., None], message: Warning | str, *where: Any, **more: Any
) -> None:
    """Remove a damaged entry, as a kill may leave it, when JAX warns of it, or show the warning.

    JAX (0.12) compiles the program anew, but writes no entry that is there. It names the program,
    whose entries are one for each of its shapes.
    """
    told = re.match(r"Error reading persistent compilation cache entry for '(.+?)'", str(message))
    for entry in directory.glob(f"{glob.escape(told[1])}-*-cache") if told else ():
        with contextlib.suppress(OSError):
            entry.unlink()
    if told is None:
        show(message, *where, **more)


def _cpu() -> str:
    """A name for all CPUs of this model with the same instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = r"(model name|flags|CPU (implementer|part|variant)|Features)\s*:"  # of x86, of ARM
    kind = sorted({line for line in lines if re.match(names, line)})
    return f"cpu-{hashlib.sha256(chr(10).join(kind).encode()).hexdigest()[:12]}"
