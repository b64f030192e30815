"""Bytes on one chip: what the state's shapes say, and what the compiler makes of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from maxmars.hlo import Memory
from maxmars.plan.chips import Chip
from maxmars.train_step import TrainState


@dataclass(frozen=True, kw_only=True)
class ChipMemory:
    """Bytes on one chip while the train step runs.

    Parameters, state and gradients are counted from shapes and shardings; `padding_bytes` is what
    the program's arguments take beyond that, and the rest comes from the compiler as it is.
    """

    parameters_bytes: int
    optimizer_state_bytes: dict[str, int]
    """By field of the optimizer's states, such as `mu` and `nu`."""
    previous_parameters_bytes: int
    """Exact MARS's parameters of the step before."""
    other_arguments_bytes: int
    """Step, guard, learning rate, and the batch."""
    padding_bytes: int
    gradients_bytes: int
    """One gradient of all parameters; it lives among the temporaries."""
    temporaries_bytes: int
    """Activations and everything else beyond arguments and gradients at the peak."""
    peak_bytes: int
    """Most in use at one time."""
    capacity_bytes: int | None
    """Memory of the chip; None for fake devices."""
    compiler: Memory

    @property
    def headroom_bytes(self) -> int | None:
        """What the chip has beyond the peak; negative where the program does not fit."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.peak_bytes


def chip_memory(
    state: TrainState, tokens_bytes: int, memory: Memory, chip: Chip | None
) -> ChipMemory:
    """What lies on one chip.

    Args:
      state: abstract, with shardings.
      tokens_bytes: the batch's bytes on one chip.
      memory: of the compiled step.
      chip: None for fake devices.
    """
    parameters = bytes_on_chip(state.params)
    optimizer = optimizer_state_bytes(state.opt_state)
    previous = bytes_on_chip(state.prev_params)
    other = bytes_on_chip((state.step, state.hyperparams, state.guard)) + tokens_bytes
    counted = parameters + sum(optimizer.values()) + previous + other
    peak = peak_bytes(memory, chip)
    gradients = min(parameters, max(0, peak - memory.argument_bytes))
    return ChipMemory(
        parameters_bytes=parameters,
        optimizer_state_bytes=optimizer,
        previous_parameters_bytes=previous,
        other_arguments_bytes=other,
        padding_bytes=memory.argument_bytes - counted,
        gradients_bytes=gradients,
        temporaries_bytes=max(0, peak - memory.argument_bytes - gradients),
        peak_bytes=peak,
        capacity_bytes=None if chip is None else chip.memory_bytes,
        compiler=memory,
    )


def peak_bytes(memory: Memory, chip: Chip | None) -> int:
    """Most memory in use; see `hlo.Memory.most_bytes`."""
    return memory.most_bytes(tpu=chip is not None and chip.network == "ICI")


def bytes_on_chip(tree: Any) -> int:
    """Bytes that one device holds of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def optimizer_state_bytes(opt_state: Any) -> dict[str, int]:
    """Bytes on one device by field of the states, largest first."""
    found: Counter[str] = Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        fields = [key.name for key in path if isinstance(key, GetAttrKey)]
        found[fields[-1] if fields else "other"] += bytes_on_chip(leaf)
    return dict(found.most_common())
