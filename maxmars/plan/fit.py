"""The largest microbatch and the cheapest rematerialisation that fit in a chip's memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from jax.sharding import Mesh

from maxmars import sharding
from maxmars.config import TrainConfig
from maxmars.plan.compiled import CompiledTrainStep, DoesNotFitError, compile_train_step
from maxmars.plan.memory import peak_bytes
from maxmars.plan.topology import Topology
from maxmars.precision import choose_precision
from maxmars.remat import POLICIES, USABLE, Remat, first_that_fits, with_remat


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One program that was compiled."""

    remat: Remat
    num_microbatches: int
    peak_bytes: int | None
    """None where the compiler itself refused it."""
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What fits best."""

    config: TrainConfig
    tried: tuple[Tried, ...]
    overrides: tuple[str, ...]
    """Words for the command line that turn the given config into this one."""


def find_fit(
    config: TrainConfig,
    topology: Topology,
    max_bytes: int,
    report: Callable[[Tried], None] = lambda _: None,
) -> Fit:
    """Search for the cheapest policy under which some microbatch fits, and for the largest such.

    A policy that recomputes less is preferred, whatever its microbatch: each recomputed product
    costs arithmetic in every step, where a smaller microbatch costs only parameters gathered more
    often. Within a policy, memory falls as the number of microbatches grows.

    Args:
      config: what to train; the tokens of a step stay the same.
      topology: the chips.
      max_bytes: memory of one chip that may be used.
      report: called after each program that was compiled.

    Raises:
      ValueError: nothing fits.
    """
    mesh = sharding.make_mesh(config.mesh, topology.devices)
    config = choose_precision(config, mesh)
    shards, batch = sharding.batch_shards(mesh), config.global_batch_size
    counts = [n for n in range(1, batch + 1) if batch % n == 0 and batch // n % shards == 0]
    if not counts:
        raise ValueError(
            f"global_batch_size={batch} does not divide over {shards} devices (mesh data x fsdp); "
            f"make it a multiple of {shards}."
        )
    tried: list[Tried] = []

    def fits(remat: Remat, count: int) -> bool:
        trial = _with(config, remat, count)
        try:
            step: CompiledTrainStep | None = compile_train_step(trial, mesh, topology)
        except DoesNotFitError:
            step = None
        peak = None if step is None else peak_bytes(step.memory, topology.chip)
        result = Tried(
            remat=remat,
            num_microbatches=count,
            peak_bytes=peak,
            fits=peak is not None and peak <= max_bytes,
        )
        tried.append(result)
        report(result)
        return result.fits

    for remat in POLICIES:
        count = _first(counts, functools.partial(fits, remat))
        if count is not None:
            found = _with(config, remat, count)
            words = ("--num-microbatches", str(count), "--model.remat", str(remat))
            return Fit(config=found, tried=tuple(tried), overrides=words)
    raise ValueError(
        f"{config.name} does not fit in {max_bytes / 1e9:.2f} GB a chip on {topology.name}, not "
        f"even with {counts[-1]} microbatches and model.remat=full; raise mesh.fsdp, or take more "
        "or larger chips."
    )


def compile_chosen(
    config: TrainConfig, mesh: Mesh, topology: Topology
) -> tuple[TrainConfig, CompiledTrainStep]:
    """The compiled train step, and the config with the policy that `train` chooses for `auto`.

    Raises:
      ValueError: the mesh does not divide the model or the batch.
      DoesNotFitError: the compiler refuses even the last policy.
    """
    chip, steps = topology.chip, dict[Remat, CompiledTrainStep]()
    if config.model.remat != "auto":
        return config, compile_train_step(config, mesh, topology)
    if chip is None:
        config = with_remat(config, None)
        return config, compile_train_step(config, mesh, topology)

    def fits(remat: Remat) -> bool:
        try:
            steps[remat] = compile_train_step(with_remat(config, remat), mesh, topology)
        except DoesNotFitError:
            if remat == POLICIES[-1]:
                raise
            return False
        return peak_bytes(steps[remat].memory, chip) <= USABLE * chip.memory_bytes

    remat, _ = first_that_fits(fits)
    return with_remat(config, remat), steps[remat]


def _with(config: TrainConfig, remat: Remat, num_microbatches: int) -> TrainConfig:
    return dataclasses.replace(with_remat(config, remat), num_microbatches=num_microbatches)


def _first(counts: list[int], fits: Callable[[int], bool]) -> int | None:
    """The first count that fits, where all later ones do too; None if not even the last does."""
    if fits(counts[0]):
        return counts[0]
    low, high = 0, len(counts) - 1
    if low == high or not fits(counts[high]):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(counts[middle]) else (middle, high)
    return counts[high]
