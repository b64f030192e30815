"""Where compiled programs are kept, so that the next start of a run need not compile them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from maxmars.distributed.files import Workdir, is_remote


def keep_compiled_programs(workdir: Workdir, platform: str) -> None:
    """Keep what JAX compiles in `.jax_cache` beside a run's directory.

    Not for a workdir in a bucket, and not where JAX was told itself: by JAX_COMPILATION_CACHE_DIR
    to use another place, or by JAX_ENABLE_COMPILATION_CACHE=false to keep nothing. Not on CPUs:
    XLA does not tell all CPUs apart, and a program from another machine in a shared directory may
    use instructions that this one lacks (jax issue 38445).
    """
    config: Any = jax.config  # whose attributes type checkers do not see
    told = config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache
    if not told and platform != "cpu" and not is_remote(workdir):
        jax.config.update("jax_compilation_cache_dir", str(Path(workdir).parent / ".jax_cache"))
        compilation_cache.reset_cache()  # JAX reads the setting once, when it first compiles
