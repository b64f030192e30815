"""What this machine's CPU can do, where programs for CPUs differ by it."""

import functools
from pathlib import Path


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for matrix products of bfloat16, as Linux says of x86.

    XLA's CPU backend uses them (YNNPACK) for bfloat16 x bfloat16 -> float32 alone, and only where
    both factors lie in rows and the first one's columns are contracted; it converts the factors of
    any other product to float32. A CPU without them is faster in float32.
    """
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:  # not Linux
        return False
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(words)
