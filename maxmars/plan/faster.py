"""Whether a step would take less time on another mesh, or with what `train` chooses by itself."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxmars.config import GPT2Config, MeshConfig, TrainConfig
from maxmars.config.mesh import check_mesh
from maxmars.plan.compile import CompiledTrainStep, DoesNotFitError, compile_chosen
from maxmars.plan.plan import Plan, make_plan
from maxmars.train.auto import Remat, choose_microbatches, with_remat

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
    the fewest microbatches; and on the best, if `remat` was set, the other policies that may fit.
    Times are the compiler's clock or, where there is none, the roofline; fake devices have none.

    Args:
      asked: the config that was planned, before anything was chosen.
      plan: of it.
      log: gets a line for each program that is compiled.
    """
    topology, best = plan.topology, plan
    if topology.chip is None:
        return None
    tried = [(plan.mesh.shape, plan.config.microbatches)]
    for mesh_config in _meshes(plan):
        config = dataclasses.replace(plan.config, mesh=mesh_config, num_microbatches=None)
        mesh = topology.mesh(config)
        try:
            check_mesh(config, mesh.shape)
        except ValueError:  # the mesh does not divide the batch
            continue
        config = choose_microbatches(config, mesh, topology.memory_bytes, lambda _: None)
        if (mesh.shape, config.microbatches) not in tried:
            tried.append((mesh.shape, config.microbatches))
            best = _faster_of(best, config, {}, log)
    if isinstance(asked.model, GPT2Config) and asked.model.remat != "auto":
        assert isinstance(best.config.model, GPT2Config)
        assert best.config.model.remat != "auto"
        known: dict[Remat, CompiledTrainStep] = {best.config.model.remat: best.train_step}
        best = _faster_of(best, with_remat(best.config, "auto"), known, log)
    saved = 1 - best.step_seconds / plan.step_seconds
    if saved < WORTH_NAMING:
        return None
    return Faster(plan=best, flags=_flags(plan, best), saved=saved)


def _meshes(plan: Plan) -> Iterator[MeshConfig]:
    yield MeshConfig()
    if isinstance(plan.config.model, GPT2Config):
        networks = Counter(plan.topology.networks(plan.topology.devices))
        yield MeshConfig(fsdp=math.gcd(*networks.values(), plan.config.model.embed_dim))


def _faster_of(
    best: Plan,
    config: TrainConfig,
    known: Mapping[Remat, CompiledTrainStep],
    log: Callable[[str], None],
) -> Plan:
    """The faster of a plan and that of `config`, if it fits; `known` are steps of `config`."""
    mesh = best.topology.mesh(config)
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    log(
        f"is it faster with {axes}, {config.microbatches} microbatches, remat {config.model.remat}?"
    )
    try:
        config, step = compile_chosen(config, mesh, best.topology, log=log, known=known)
    except DoesNotFitError:
        return best
    other = make_plan(config, best.topology, evaluate=False, train_step=step)
    log(f"{_milliseconds(other)} a step; the best before takes {_milliseconds(best)}")
    return min(best, other, key=lambda plan: plan.step_seconds)


def _milliseconds(plan: Plan) -> str:
    return f"{plan.step_seconds * 1e3:,.4g} ms"


def _flags(plan: Plan, best: Plan) -> tuple[str, ...]:
    """Mesh, microbatches and policy of `best`, where they are others than those of `plan`."""
    shapes = plan.mesh.shape, best.mesh.shape
    sizes = {f"mesh.{axis}": tuple(shape[axis] for shape in shapes) for axis in plan.mesh.shape}
    sizes["num-microbatches"] = plan.config.microbatches, best.config.microbatches
    sizes["model.remat"] = plan.config.model.remat, best.config.model.remat
    changed = ((f"--{name}", str(new)) for name, (old, new) in sizes.items() if new != old)
    return tuple(itertools.chain.from_iterable(changed))
