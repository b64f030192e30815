"""Memory of programs that compute on CPUs: what a step frees is kept for the next one."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys

from maxmars.config import TrainConfig

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # from glibc's malloc.h
_NEVER = -1
_SMALL_BYTES = 2**29


def keep_freed_memory_if_small(config: TrainConfig) -> None:
    """`keep_freed_memory` where a run takes little.

    A heap that is never given back falls to pieces: the quickstart takes 0.9 GB for 0.6 and steps a
    fifth faster, but GPT-2 small 9.8 GB for 3.4, and an eighth.
    """
    if _rough_bytes(config) <= _SMALL_BYTES:
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, as allocators of accelerators do.

    XLA's CPU backend allocates the temporaries of a program each time that it runs. glibc gives
    them back to the system after each, and getting them again page by page took a fifth of a
    step's processor time in the quickstart. Call it before JAX starts its threads.

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


def _rough_bytes(config: TrainConfig) -> int:
    """What a step holds in float32: four arrays a parameter, activations, logits."""
    model = config.model
    parameters = model.num_layers * 12 * model.embed_dim**2 + model.vocab_size * model.embed_dim
    token = model.num_layers * (16 * model.embed_dim + model.num_heads * model.max_seq_len)
    token += model.vocab_size
    tokens = config.global_batch_size // config.num_microbatches * model.max_seq_len
    return 4 * (4 * parameters + tokens * token)
