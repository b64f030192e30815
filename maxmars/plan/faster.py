"""Whether a step would take less time on another mesh, or with what `train` chooses by itself."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from maxmars.config import GPT2Config, MarsConfig, MeshConfig, MuonConfig, TrainConfig
from maxmars.model.parameters import Parameters
from maxmars.plan.compile import compile_prepared
from maxmars.plan.plan import Plan, make_plan
from maxmars.train.auto import choose_microbatches, make_estimate, with_remat
from maxmars.train.step import abstract_train_state

WORTH_NAMING = 0.05
"""Share of a step's time from which on a faster plan is named."""


@dataclass(frozen=True, kw_only=True)
class Faster:
    """Another plan of the same run, of a shorter step."""

    plan: Plan
    flags: tuple[str, ...]
    """What to add to the command line to train so."""
    saved: float
    """Share of the step's time."""

    def __str__(self) -> str:
        took, peak = _milliseconds(self.plan), self.plan.memory.peak_bytes / 1e9
        return f"{' '.join(self.flags)} ({took} a step, {self.saved:.0%} less, peak {peak:.2g} GB)"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values of what changes."""
        return {
            "overrides": list(self.flags),
            "step_time_s": self.plan.step_seconds,
            "saved": self.saved,
            "peak_bytes": self.plan.memory.peak_bytes,
        }


def find_faster(asked: TrainConfig, plan: Plan, *, log: Callable[[str], None]) -> Faster | None:
    """The fastest of a few other plans of a run, if its step is over 5 % shorter; else None.

    Two meshes are tried, that of an unset `--mesh` and `fsdp` over a whole fast network, each with
    the fewest microbatches; on the best, matrices that are owned over `data` too; and, if `remat`
    was set, the other policies that may fit.
    Times are the clock's or, where there is none, the bound's; fake devices have none.

    Args:
      asked: the config that was planned, before anything was chosen.
      plan: of it.
      log: gets a line for each program that is compiled.
    """
    if plan.topology.chip is None:
        return None
    # One thing after the other, each on the best so far: every combination would be a program to
    # compile.
    best, tried = plan, [_setting(plan.config, plan.mesh)]
    for mesh in _meshes(plan):
        config = dataclasses.replace(plan.config, mesh=mesh, num_microbatches=None)
        best = _faster_of(best, config, tried, log)
    replicas, optimizer = best.mesh.shape["data"], best.config.optimizer
    is_fast = replicas > 1 and plan.topology.num_slices == 1
    if is_fast and best.exchange is not None and isinstance(optimizer, MarsConfig | MuonConfig):
        optimizer = dataclasses.replace(optimizer, own_over_data=True)
        best = _faster_of(best, dataclasses.replace(best.config, optimizer=optimizer), tried, log)
    if asked.model.remat != "auto" and len(plan.train_step.parameters.remat_policies) > 1:
        config = dataclasses.replace(best.config, num_microbatches=None)
        best = _faster_of(best, with_remat(config, "auto"), tried, log)
    saved = 1 - best.step_seconds / plan.step_seconds
    if saved < WORTH_NAMING:
        return None
    return Faster(plan=best, flags=_flags(asked, plan, best), saved=saved)


def _meshes(plan: Plan) -> Iterator[MeshConfig]:
    yield MeshConfig()
    if isinstance(plan.config.model, GPT2Config):
        # `fsdp` within one fast network, as far as it divides the width: it gathers parameters in
        # every layer, while `data` sums gradients once a step.
        networks = Counter(plan.topology.networks(plan.topology.devices))
        yield MeshConfig(fsdp=math.gcd(*networks.values(), plan.config.model.embed_dim))


def _owns_over_data(config: TrainConfig) -> bool:
    optimizer = config.optimizer
    return isinstance(optimizer, MarsConfig | MuonConfig) and optimizer.own_over_data


def _setting(config: TrainConfig, mesh: Mesh) -> tuple[Any, ...]:
    """What tells the programs of a run apart."""
    return mesh.shape, config.microbatches, _owns_over_data(config), config.model.remat


def _faster_of(
    best: Plan, config: TrainConfig, tried: list[tuple[Any, ...]], log: Callable[[str], None]
) -> Plan:
    """The faster of a plan and that of `config`, if this is none of those `tried`, and possible."""
    topology, mesh = best.topology, best.topology.mesh(config)
    try:
        state = abstract_train_state(config, Parameters(config.model, mesh))
        estimate = make_estimate(config, mesh, state)
        config = choose_microbatches(config, mesh, estimate, topology.memory_bytes, lambda _: None)
        setting = _setting(config, mesh)
        if setting in tried:
            return best
        tried.append(setting)
        axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        owned = ", matrices owned over data" if _owns_over_data(config) else ""
        log(
            f"is it faster with {axes}, {config.microbatches} microbatches, "
            f"remat {config.model.remat}{owned}?"
        )
        known = [(best.config, best.train_step)]
        config, step = compile_prepared(config, topology, log=log, known=known)
    except ValueError:  # the mesh does not divide the model or the batch, or the step does not fit
        return best
    memory_bytes = topology.memory_bytes
    if memory_bytes is not None and not step.needs.fit(memory_bytes):  # refused for TPUs alone
        return best
    other = make_plan(config, topology, evaluate=False, train_step=step)
    log(f"{_milliseconds(other)} a step; the best before takes {_milliseconds(best)}")
    return min(best, other, key=lambda plan: plan.step_seconds)


def _milliseconds(plan: Plan) -> str:
    return f"{plan.step_seconds * 1e3:,.4g} ms"


def _flags(asked: TrainConfig, plan: Plan, best: Plan) -> tuple[str, ...]:
    """What makes `best` of the config that was asked for."""
    changed = {
        f"--mesh.{axis}": size
        for axis, size in best.mesh.shape.items()
        if size != plan.mesh.shape[axis]
    }
    if best.config.num_microbatches != asked.num_microbatches:  # which depends on the policy
        changed["--num-microbatches"] = best.config.microbatches
    if _owns_over_data(best.config) != _owns_over_data(plan.config):
        changed["--optimizer.own-over-data"] = True
    if best.config.model.remat != plan.config.model.remat:
        changed["--model.remat"] = best.config.model.remat
    return tuple(str(word) for item in changed.items() for word in item)
