"""Which type a run computes in when `model.compute_dtype` is `auto`.

A rule and not a measurement: two runs of one config on one machine, and a run and its resume, must
compute in the same type. A run keeps the type that it began with, wherever it continues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jaxlib.version
from jax.sharding import Mesh

from maxmars import distributed
from maxmars.config import TrainConfig

ComputeDtype = Literal["auto", "bfloat16", "float32", "float64"]

_CPU_INFO = Path("/proc/cpuinfo")
# Products of 1,024 x 768 x 3,072 on a processor with AMX, GFLOP/s in bfloat16 and float32: jaxlib
# 0.10.2 62 and 118, 0.11.0 128 and 141, 0.11.1 87 and 120, 0.11.2 608 and 138, 0.12.0 674 and 144,
# 0.12.0.1 695 and 156; there with AMX refused by the kernel 110 and 95 to 88 and 145.
_FIRST_FAST_JAXLIB = (0, 11, 2)


def choose_precision(
    config: TrainConfig, mesh: Mesh, say: Callable[[str], None] = lambda _: None
) -> TrainConfig:
    """The config with `model.compute_dtype` chosen, if it is `auto`; all processes choose the same.

    Args:
      config: what to train.
      mesh: its devices; fake CPU devices count as this machine.
      say: prints what was chosen, in one line.
    """
    if config.model.compute_dtype != "auto":
        return config
    platform = mesh.devices.flat[0].platform
    dtype, reason = fastest_dtype(platform)
    if not distributed.everywhere(dtype == "bfloat16"):
        if dtype == "bfloat16":
            reason = "another host has no fast bfloat16"
        dtype = "float32"
    say(f"model.compute_dtype=auto: {dtype}, as {reason}")
    return with_compute_dtype(config, dtype)


def with_compute_dtype(config: TrainConfig, dtype: ComputeDtype) -> TrainConfig:
    """The config with this type of matrix products."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype=dtype))


def fastest_dtype(platform: str) -> tuple[Literal["bfloat16", "float32"], str]:
    """The type in which matrix products are fast on a platform (`jax.Device.platform`), and why."""
    if platform != "cpu":
        return "bfloat16", "accelerators are made for it"
    if "amx_bf16" not in _processor_flags():
        return "float32", "this processor has no matrix unit for bfloat16 (amx_bf16)"
    if jaxlib.version.__version_info__ < _FIRST_FAST_JAXLIB:
        needed = ".".join(map(str, _FIRST_FAST_JAXLIB))
        return "float32", f"jaxlib {jaxlib.version.__version__} is before {needed}, slow at it"
    return "bfloat16", "this processor has a matrix unit for it (amx_bf16)"


def _processor_flags() -> set[str]:
    """What Linux says that this processor can do; nothing elsewhere."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())
