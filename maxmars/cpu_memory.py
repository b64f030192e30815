"""Memory of programs that compute on CPUs: what a step frees is kept for the next one."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # from glibc's malloc.h
_NEVER = -1


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, as allocators of accelerators do.

    XLA's CPU backend allocates the temporaries of a program each time that it runs. glibc gives
    them back to the system after each, and getting them again page by page took a fifth of a
    step's processor time in the quickstart, and an eighth at GPT-2 small. Call it before
    JAX starts its threads.

    Nothing happens where JAX may find an accelerator, whose host should have its memory back, where
    the environment sets MALLOC_... itself, and with other C libraries.
    """
    if sys.platform != "linux" or _may_find_accelerator():
        return
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # One heap for all threads: those of further threads are too small for temporaries.
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, _NEVER)
    mallopt(_TOP_PAD, 2**26)


def _may_find_accelerator() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms != "cpu"
    return any(importlib.util.find_spec(name) for name in ("libtpu", "jax_plugins"))
