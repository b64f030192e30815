"""Which rematerialisation a run takes when `model.remat` is `auto`.

The policies give the same loss and gradients but for rounding. What fits is read from the compiled
train step, so that a run neither recomputes what it has the memory to keep, nor ends out of memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
from jax.sharding import Mesh

from maxmars import distributed, hlo
from maxmars.config import TrainConfig
from maxmars.train_step import make_train_step

Remat = Literal["full", "attention", "dots"] | None
POLICIES: tuple[Remat, ...] = (None, "dots", "attention", "full")
"""Rematerialisation, from the least arithmetic to the least memory."""

USABLE = 0.95
"""Share of a device's memory for the step; the rest is for batches that are read ahead."""


def with_remat(config: TrainConfig, remat: Remat) -> TrainConfig:
    """The config with this policy."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))


def first_that_fits(fits: Callable[[Remat], bool]) -> tuple[Remat, bool]:
    """The policy with the least arithmetic for which `fits` is true, and whether there is one;
    `full` if not. Policies after it are not asked for."""
    for remat in POLICIES:
        if fits(remat):
            return remat, True
    return POLICIES[-1], False


def choose_remat(
    config: TrainConfig,
    mesh: Mesh,
    say: Callable[[str], None],
    *,
    memory_bytes: Callable[[jax.Device], int | None] | None = None,
) -> TrainConfig:
    """The config with `model.remat` chosen, if it is `auto`; all processes choose the same.

    Compiles the train step for each policy until one fits. Where a device's memory is not known, as
    on a CPU, nothing is compiled, and nothing is recomputed.

    Args:
      config: what to train; it fits the mesh.
      mesh: its devices.
      say: prints what was chosen, in one line.
      memory_bytes: memory of a device that programs may use; the default asks JAX.
    """
    if config.model.remat != "auto":
        return config
    device = mesh.local_devices[0]
    limit = (memory_bytes or _memory_bytes)(device)
    if not distributed.everywhere(limit is not None):
        say("model.remat=auto: None, as this device's memory is not known")
        return with_remat(config, None)
    assert limit is not None
    usable, found = int(USABLE * limit), dict[Remat, int | None]()

    def fits(remat: Remat) -> bool:
        peak = _peak_bytes(with_remat(config, remat), mesh, tpu=device.platform == "tpu")
        found[remat] = peak
        return distributed.everywhere(peak is not None and peak <= usable)

    remat, any_fits = first_that_fits(fits)
    peak = found[remat]
    needs = "is refused by the compiler" if peak is None else f"needs {peak / 1e9:.2f} GB"
    problem = "" if any_fits else ", and nothing fits; raise num_microbatches or mesh.fsdp"
    say(f"model.remat=auto: {remat} {needs} of {usable / 1e9:.2f} GB a device{problem}")
    return with_remat(config, remat)


def _memory_bytes(device: jax.Device) -> int | None:
    if device.platform == "cpu":
        return None
    return (device.memory_stats() or {}).get("bytes_limit")


def _peak_bytes(config: TrainConfig, mesh: Mesh, *, tpu: bool) -> int | None:
    """Most bytes in use on a device during a step; None where the compiler refuses the program."""
    try:
        compiled = make_train_step(config, mesh).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    return hlo.memory(compiled).most_bytes(tpu=tpu)
