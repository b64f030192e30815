"""The programs of a run, compiled ahead of time from shapes alone, and their memory and FLOPs.

Nothing is allocated: the steps are traced from abstract arrays with shardings. Sizes of parameters,
state and gradients come from these shardings, the peak from the compiler. FLOPs are counted in the
traced program (jaxpr), since a compiler's own analysis counts the body of a loop once.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import GetAttrKey

from maxmars.config import TrainConfig
from maxmars.config.chips import Chip
from maxmars.data.batches import batch_types, validation_rows
from maxmars.distributed.sharding import bytes_on_chip
from maxmars.eval.validation import make_eval_step
from maxmars.model.parameters import Parameters
from maxmars.optim import ScaleBySoapState
from maxmars.plan.clock import StepClock, step_clock
from maxmars.plan.collectives import SCOPES, Collective, collectives
from maxmars.plan.topology import Topology
from maxmars.train.auto import less_memory_hint
from maxmars.train.step import TrainState, TrainStep


class DoesNotFitError(ValueError):
    """The compiler refused a program that needs more memory than a chip has."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled program."""

    executable: jax.stages.Compiled
    memory: dict[str, int]
    """Result of `compiler_memory`."""
    peak_bytes: int
    """Most memory in use at one time on one chip."""
    collectives: tuple[Collective, ...]
    lower_s: float
    """Seconds of tracing and lowering."""
    compile_s: float


@dataclass(frozen=True, kw_only=True)
class CompiledTrainStep(Compiled):
    """The compiled train step."""

    parameters: Parameters
    state: TrainState
    batch: Mapping[str, jax.ShapeDtypeStruct]
    """Abstract arrays by name; `state` is abstract too."""
    flops: Counter[str]
    """Result of `matmul_flops`."""
    clock: StepClock | None
    """None for fake devices, and for TPUs whose cycles a second are not known."""


def compile_train_step(step: TrainStep, topology: Topology) -> CompiledTrainStep:
    """Compile the step that `train` runs.

    Raises:
      DoesNotFitError: the compiler refuses a program that the chip has no memory for.
    """
    start = time.perf_counter()
    mesh = step.mesh
    with jax.set_mesh(mesh):
        traced = step.trace()
        lowered = traced.lower()
    hint = less_memory_hint(step.config, step.parameters)
    compiled = _compile(lowered, mesh, topology, time.perf_counter() - start, hint)
    return CompiledTrainStep(
        parameters=step.parameters,
        state=step.abstract_state,
        batch=step.abstract_batch,
        flops=matmul_flops(traced.jaxpr),
        clock=_clock(compiled["executable"], mesh, topology),
        **compiled,
    )


def _clock(executable: jax.stages.Compiled, mesh: Mesh, topology: Topology) -> StepClock | None:
    if (chip := topology.chip) is None or mesh.devices.flat[0].platform == "cpu":
        return None
    if chip.is_tpu:  # the program for several slices numbers the devices of one slice
        return step_clock(executable, chip)
    return step_clock(executable, chip, mesh, lambda c: chip.bandwidth(topology.network(c, mesh)))


def compile_eval_step(config: TrainConfig, params: Any, mesh: Mesh, topology: Topology) -> Compiled:
    """Compile the evaluation of one batch from the abstract parameters.

    Raises:
      DoesNotFitError: see `compile_train_step`.
    """
    start = time.perf_counter()
    shape = (1, validation_rows(config.eval_batch_size, mesh), config.model.max_seq_len + 1)
    types = {"mask": jnp.bool, **batch_types(config.data, config.model)}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in types.items()}
    with jax.set_mesh(mesh):
        step = make_eval_step(config.model, mesh)
        lowered = step.lower(params, batch)
    hint = f"lower eval.batch_size={config.eval_batch_size}"
    return Compiled(**_compile(lowered, mesh, topology, time.perf_counter() - start, hint))


def _compile(
    lowered: jax.stages.Lowered, mesh: Mesh, topology: Topology, lower_s: float, hint: str
) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or topology.chip is None:
            raise
        match = re.search(r"Used (\S+) of (\S+) hbm", str(error))
        needs = f"needs {match[1]} of {match[2]}" if match else "needs more memory than it has"
        raise DoesNotFitError(
            f"the program does not fit on one {topology.chip.name}: it {needs}; {hint}."
        ) from error
    return {
        "executable": executable,
        "memory": compiler_memory(executable),
        "peak_bytes": peak_bytes(executable, tpu=mesh.devices.flat[0].platform == "tpu"),
        "collectives": collectives(executable, mesh, num_slices=topology.num_slices),
        "lower_s": lower_s,
        "compile_s": time.perf_counter() - start,
    }


# Memory of a compiled program.


def peak_bytes(compiled: jax.stages.Compiled, *, tpu: bool) -> int:
    """Most bytes that a compiled program has in use on one device.

    For TPUs, the compiler's own figure, by which it decides whether a program fits. For GPUs and
    CPUs, the sum of arguments, temporaries and new outputs (those without an argument's buffer),
    since XLA's own peak of a CPU program leaves the outputs out.

    Raises:
      ValueError: the backend has no memory analysis.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend has no memory analysis of compiled programs.")
    if tpu and stats.peak_memory_in_bytes:
        return stats.peak_memory_in_bytes
    new_output_bytes = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + stats.temp_size_in_bytes + new_output_bytes


@dataclass(frozen=True, kw_only=True)
class ChipMemory:
    """Bytes on one chip while the train step runs."""

    parameters_bytes: int
    optimizer_state_bytes: dict[str, int]
    """By field of the optimizer's states, such as `mu` and `nu`, largest first; then the EMA of the
    parameters with `ema_decay`."""
    previous_parameters_bytes: int
    """Parameters of the step before, for exact MARS."""
    other_arguments_bytes: int
    """Step, guard, learning rate, and the batch."""
    padding_bytes: int
    """Bytes of the program's arguments beyond the fields above."""
    gradients_bytes: int
    """One gradient of all parameters, which is one of the temporaries."""
    temporaries_bytes: int
    """Activations and everything else beyond arguments and gradients at the peak."""
    peak_bytes: int
    """Most in use at one time."""
    capacity_bytes: int | None
    """Memory of the chip; None for fake devices."""
    headroom_bytes: int | None
    """Memory of the chip beyond the peak; negative if the program does not fit."""
    compiler: dict[str, int]
    """Result of `compiler_memory`."""


def compiler_memory(executable: jax.stages.Compiled) -> dict[str, int]:
    """The compiler's figures of a program's memory on one device, in bytes, by its own names; see
    `jax.stages.Compiled.memory_analysis`, and `peak_bytes` for their use."""
    stats = executable.memory_analysis()
    return {name: getattr(stats, name) for name in dir(stats) if name.endswith("_in_bytes")}


def chip_memory(step: CompiledTrainStep, chip: Chip | None) -> ChipMemory:
    """The memory of one chip, by contents.

    Args:
      step: the train step.
      chip: None for fake devices.
    """
    state, arguments = step.state, step.memory["argument_size_in_bytes"]
    parameters = bytes_on_chip(state.params)
    optimizer = optimizer_state_bytes(state.opt_state)
    if state.evaluation_params is not None:
        optimizer["average of the parameters"] = bytes_on_chip(state.evaluation_params)
    previous = bytes_on_chip(state.prev_params)
    other = bytes_on_chip((state.step, state.hyperparams, state.guard, step.batch))
    gradients = min(parameters, max(0, step.peak_bytes - arguments))
    capacity = None if chip is None else chip.memory_bytes
    return ChipMemory(
        parameters_bytes=parameters,
        optimizer_state_bytes=optimizer,
        previous_parameters_bytes=previous,
        other_arguments_bytes=other,
        padding_bytes=arguments - (parameters + sum(optimizer.values()) + previous + other),
        gradients_bytes=gradients,
        temporaries_bytes=max(0, step.peak_bytes - arguments - gradients),
        peak_bytes=step.peak_bytes,
        capacity_bytes=capacity,
        headroom_bytes=None if capacity is None else capacity - step.peak_bytes,
        compiler=step.memory,
    )


def optimizer_state_bytes(opt_state: Any) -> dict[str, int]:
    """Bytes on one device by field of the optimizer's states, largest first."""
    sizes: Counter[str] = Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        fields = [key.name for key in path if isinstance(key, GetAttrKey)]
        sizes[fields[-1] if fields else "other"] += bytes_on_chip(leaf)
    return dict(sizes.most_common())


def soap_exchanged_bytes(opt_state: Any) -> int:
    """Bytes of SOAP's state on one device that go to the owners of whole matrices and back in each
    step: the states of parameters whose matrices are split over devices between steps."""

    def is_soap(x: Any) -> bool:
        return isinstance(x, ScaleBySoapState)

    def shard_shape(x: Any) -> tuple[int, ...]:
        return x.sharding.shard_shape(x.shape)

    def exchanged(nu: Any, *others: Any) -> int:
        grams = [x for x in others[1:3] if x is not None]
        if not grams:
            return 0
        stack, local_stack = (x[:-2] for x in (grams[0].shape, shard_shape(grams[0])))
        # Example: v [12, 768, 3072] and Gram matrices [12, 768, 768]. A device with 3 of the 12 of
        # each, [3, 768, 3072] and [3, 768, 768], has whole matrices, and exchanges nothing. On a
        # device with [12, 192, 3072] and [12, 192, 768], the share of v is a quarter, but the share
        # of the stack is all of it: the matrices are split.
        is_split = math.prod(shard_shape(nu)) * math.prod(stack) != nu.size * math.prod(local_stack)
        return bytes_on_chip((nu, *others)) if is_split else 0

    states = [x for x in jax.tree.leaves(opt_state, is_leaf=is_soap) if is_soap(x)]
    # A momentum kernel's state is not exchanged; its result is, as gradients are.
    sizes = [jax.tree.map(exchanged, state.nu, state.mu, *state[3:7]) for state in states]
    return sum(jax.tree.leaves(sizes))


# FLOPs of a traced program.


def matmul_flops(jaxpr: Any) -> Counter[str]:
    """FLOPs of a program's matrix products, summed over all devices, by the scope around them.

    The program is counted as JAX traced it. Unlike a compiler's cost analysis, the count includes
    every iteration of a loop and does not depend on the device. Recomputation in the backward pass
    is included, as it is traced; elementwise arithmetic, which is bound by memory, is not.

    The scopes are `collectives.SCOPES`; products outside of them count under "". A conditional
    counts as its branch with the most FLOPs, a loop of unknown length as one iteration, and a
    Pallas kernel with a cost estimate as that estimate.

    Args:
      jaxpr: the `jaxpr` of a `jax.stages.Traced`.
    """
    return _count_flops(jaxpr, "", 1)


# Number of products, such as that of queries and keys, in JAX's calls of cuDNN. As in the plain
# formula, a causal mask spares none. The backward pass computes the logits again.
_CUDNN_PRODUCTS = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}


def _count_flops(jaxpr: Any, outer_scope: str, times: int) -> Counter[str]:
    flops: Counter[str] = Counter()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        path = str(eqn.source_info.name_stack).replace("(", "/").replace(")", "/").split("/")
        scope = next((name for name in path if name in SCOPES), outer_scope)
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lengths = [eqn.invars[0].aval.shape[i] for i in contracted]
            flops[scope] += times * 2 * math.prod((*eqn.outvars[0].aval.shape, *lengths))
        elif eqn.primitive.name in _CUDNN_PRODUCTS:
            (batch, length, heads, head_dim), keys = eqn.invars[0].aval.shape, eqn.invars[1].aval
            product = 2 * batch * heads * length * keys.shape[1] * head_dim
            flops[scope] += times * _CUDNN_PRODUCTS[eqn.primitive.name] * product
        elif eqn.primitive.name == "pallas_call" and eqn.params["cost_estimate"] is not None:
            flops[scope] += times * eqn.params["cost_estimate"].flops
        # The most expensive branch, as the plan must hold for each step.
        elif eqn.primitive.name == "cond":
            branches = [_count_flops(branch, scope, times) for branch in eqn.params["branches"]]
            flops += max(branches, key=Counter.total)
        else:
            repeats = times * _repeats(eqn)
            for inner in _jaxprs(eqn.params):
                flops += _count_flops(inner, scope, repeats)
    return flops


def _repeats(eqn: Any) -> int:
    """Number of times that an equation runs its inner programs, summed over all devices."""
    match eqn.primitive.name:
        case "scan":
            return eqn.params["length"]
        case "shard_map":  # whose inner shapes are those of one device along these axes
            sizes = eqn.params["mesh"].shape
            return math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])
        case "pallas_call":  # runs once for each point of the grid, skipped points included
            return math.prod(eqn.params["grid_mapping"].grid)
    return 1


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """The inner programs among the parameters of an equation."""
    for value in params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item
