"""What makes programs on CPUs faster and is set before JAX starts.

Their steps allocate their temporaries each time anew. Getting them from the system page by page
takes a third of the quickstart's processor time and a tenth of GPT-2 small's. Two remedies: pages
of 2 MB, and to keep what a step frees. The third setting is one of XLA's compiler.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxmars.config import TrainConfig

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # from glibc's malloc.h
_NEVER = -1
_kept: list[bool] = []  # whether `keep_freed_memory` did
_AMPLE = 4

_XLA_FLAGS = "XLA_FLAGS"
_COMPILER_OPTIONS = "--xla_backend_extra_options="


def restart_with_huge_pages() -> None:
    """Start this process anew where its C library then asks Linux for pages of 2 MB.

    glibc (2.35 and later) reads that wish from the environment when a process starts, and only
    there. The process keeps its number, arguments and open files; call it before anything is done.

    Nothing happens where Linux gives such pages unasked or never, and where `keep_freed_memory`
    does nothing.
    """
    if not _is_wanted() or _TUNABLES in os.environ or not _may_ask_for_huge_pages():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    wish = {_TUNABLES: "glibc.malloc.hugetlb=1"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | wish)


def prepare(config: TrainConfig) -> None:
    """`fuse_outputs`, and where memory is ample for this run, `keep_freed_memory`.

    A heap that is never given back falls to pieces: the quickstart takes 0.9 GB for 0.6, GPT-2
    small (MARS, 512 tokens a step) 7.5 GB for 6.1, or 11.2 without `give_back_freed_memory`. In
    return a step takes nothing from the system.
    """
    fuse_outputs()
    if _AMPLE * _rough_bytes(config) <= _memory_bytes():
        keep_freed_memory()


def fuse_outputs() -> None:
    """Have XLA's CPU backend compute several arrays in one loop where they have inputs in common.

    jaxlib 0.10 can (a tenth of the quickstart's time); later ones know no such option and ignore
    it. Nothing happens where JAX may find an accelerator, and where the environment gives other
    such options.
    """
    flags = os.environ.get(_XLA_FLAGS, "")
    if not _may_find_accelerator() and _COMPILER_OPTIONS not in flags:
        option = f"{_COMPILER_OPTIONS}xla_cpu_use_multi_output_fusion=true"
        os.environ[_XLA_FLAGS] = f"{flags} {option}".strip()


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, as allocators of accelerators do.

    Call it before JAX starts its threads. Nothing happens where JAX may find an accelerator, whose
    host should have its memory back, where the environment sets MALLOC_... itself, and with other C
    libraries.
    """
    if not _is_wanted():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # One heap for all threads: those of further threads are too small for temporaries.
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, _NEVER)
    mallopt(_TOP_PAD, 2**26)
    _kept.append(True)


def give_back_freed_memory(computed: Any) -> None:
    """Give the system what was freed so far and is kept, once some arrays are computed.

    For the times between other things than steps: an evaluation or a checkpoint then finds no holes
    of the steps' sizes, nor do the steps find theirs. Nothing happens where nothing is kept.
    """
    if _kept:
        import jax

        jax.block_until_ready(computed)
        ctypes.CDLL(None).malloc_trim(0)


def _memory_bytes() -> int:
    """Memory of this machine, or of this container."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return found if limit == "max" else min(found, int(limit))


def _is_wanted() -> bool:
    if sys.platform != "linux" or _may_find_accelerator():
        return False
    return not any(name.startswith("MALLOC_") for name in os.environ)


def _may_ask_for_huge_pages() -> bool:
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) < (2, 35):
        return False
    return _HUGE_PAGES.is_file() and "[madvise]" in _HUGE_PAGES.read_text()


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
