"""The programs of a run, compiled from shapes alone, and what was read from them."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from maxmars import hlo
from maxmars.config import TrainConfig
from maxmars.data.pipeline import validation_rows
from maxmars.evaluate import make_eval_step
from maxmars.plan.flops import matmul_flops
from maxmars.plan.topology import Topology
from maxmars.train_step import TrainState, make_train_step


class DoesNotFitError(ValueError):
    """The compiler found that a program needs more memory than a chip has."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program, with what its text and its compiler say."""

    executable: jax.stages.Compiled
    memory: hlo.Memory
    collectives: tuple[hlo.Collective, ...]
    lower_s: float
    """Seconds of tracing and lowering."""
    compile_s: float


@dataclass(frozen=True, kw_only=True)
class CompiledTrainStep(Compiled):
    """The train step."""

    state: TrainState
    """Abstract."""
    flops: Counter[str]
    """See `matmul_flops`."""


def compile_train_step(config: TrainConfig, mesh: Mesh, topology: Topology) -> CompiledTrainStep:
    """Compile what `train` runs for this config and mesh.

    Raises:
      ValueError: the mesh does not divide the model or the batch.
      DoesNotFitError: the compiler refuses a program that the chip has no memory for.
    """
    start = time.perf_counter()
    step = make_train_step(config, mesh)
    with jax.set_mesh(mesh):
        traced = step.trace()
        lowered = traced.lower()
    return CompiledTrainStep(
        state=step.abstract_state,
        flops=matmul_flops(traced.jaxpr),
        **_compile(lowered, mesh, topology, time.perf_counter() - start),
    )


def compile_eval_step(config: TrainConfig, params: Any, mesh: Mesh, topology: Topology) -> Compiled:
    """Compile the evaluation of one batch, given the abstract parameters.

    Raises:
      DoesNotFitError: see `compile_train_step`.
    """
    start = time.perf_counter()
    step = make_eval_step(config.model, mesh)
    rows = validation_rows(config.eval_batch_size, mesh)
    lowered = step.lower(params, rows, config.model.max_seq_len + 1)
    return Compiled(**_compile(lowered, mesh, topology, time.perf_counter() - start))


def _compile(
    lowered: jax.stages.Lowered, mesh: Mesh, topology: Topology, lower_s: float
) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or topology.chip is None:
            raise
        found = re.search(r"Used (\S+) of (\S+) hbm", str(error))
        needs = f"needs {found[1]} of {found[2]}" if found else "needs more memory than it has"
        raise DoesNotFitError(
            f"the program does not fit on one {topology.chip.name}: it {needs}. Raise "
            "num_microbatches or mesh.fsdp, set model.remat=full, or let --max-memory search."
        ) from error
    return {
        "executable": executable,
        "memory": hlo.memory(executable),
        "collectives": hlo.collectives(executable, mesh, num_slices=topology.num_slices),
        "lower_s": lower_s,
        "compile_s": time.perf_counter() - start,
    }
