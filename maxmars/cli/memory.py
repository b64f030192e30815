"""How this process holds the memory that XLA's CPU backend takes and gives back in every step."""

from __future__ import annotations

import importlib.util
import os
import sys

_ACCELERATORS = ("libtpu", "jax_plugins")  # the second has JAX's parts for GPUs
_OPTIONS = {  # of glibc's mallopt
    -8: 1,  # M_ARENA_MAX: one heap for all threads, as those of single threads are unmapped
    -4: 0,  # M_MMAP_MAX: no block is mapped by itself
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: the end of the heap stays
}


def keep_freed_memory() -> None:
    """Keep what is freed for what is taken next; it must come before JAX starts its threads.

    XLA's CPU backend takes the memory of a program when it starts and frees it at the end. glibc
    gives that back to Linux, which then clears 18,000 pages in a step of the quickstart: a quarter
    of its time. Nothing is done beside other devices, or another C library.
    """
    may_have_others = any(map(importlib.util.find_spec, _ACCELERATORS))
    if sys.platform != "linux" or (may_have_others and os.environ.get("JAX_PLATFORMS") != "cpu"):
        return
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _OPTIONS.items():
            mallopt(option, value)
