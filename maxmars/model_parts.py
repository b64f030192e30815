"""The parts of the model whose norms and learning rates a run records.

They follow from the names of the parameters' axes, like their kinds (`optimizer_factory`):
`embedding`, `attention` and `mlp` (the kernels of these), and `vector` (norms and biases).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from maxmars.config import GPT2Config
from maxmars.model import logical_axes
from maxmars.optimizer_config import OptimizerConfig
from maxmars.optimizer_factory import parameter_groups, parameter_kinds

PARTS = ("embedding", "attention", "mlp", "vector")
_QUANTITIES = ("grad", "param", "update")


def parameter_parts(config: GPT2Config) -> Any:
    """The part of each parameter, as a nested dict of strings."""

    def part(kind: str, axes: tuple[str, ...]) -> str:
        if kind != "linear":
            return kind
        return "attention" if "heads" in axes else "mlp"

    return jax.tree.map(part, parameter_kinds(config), logical_axes(config))


def squared_norms(parts: Any, tree: Any) -> dict[str, Float[Array, ""]]:
    """The sum of squares of each part of a tree of the parameters' structure, by name."""
    sums: dict[str, Any] = dict.fromkeys(PARTS, jnp.zeros([], jnp.float32))
    for part, leaf in zip(jax.tree.leaves(parts), jax.tree.leaves(tree), strict=True):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        sums[part] += jnp.sum(jnp.square(wide))
    return sums


def norms_array(*squares: Mapping[str, jax.Array]) -> Float[Array, "quantities parts"]:
    """Norms from the squares of gradients, parameters and updates, as one array.

    One array rather than twelve scalars: each output of the step costs the host time.
    """
    rows = [jnp.stack([found[part] for part in PARTS]) for found in squares]
    return jnp.sqrt(jnp.stack(rows)).astype(jnp.float32)


def named_norms(norms: Num[np.ndarray, "quantities parts"]) -> dict[str, float]:
    """The array's numbers as metrics `train/QUANTITY_norm/PART`.

    Also `train/param_norm` and `train/update_norm` of all parts together; the gradient's is there
    without it.
    """
    found = {}
    for quantity, row in zip(_QUANTITIES, norms.astype(np.float64), strict=True):
        name = f"train/{quantity}_norm"
        if quantity != "grad":
            found[name] = float(np.linalg.norm(row))
        found |= {f"{name}/{part}": float(value) for part, value in zip(PARTS, row, strict=True)}
    return found


def learning_rate_scales(optimizer: OptimizerConfig, model: GPT2Config) -> dict[str, float]:
    """The learning rate of each part that has its own, as a multiple of the run's."""
    parts = jax.tree.leaves(parameter_parts(model))
    scales = [g.learning_rate_scale for g in jax.tree.leaves(parameter_groups(optimizer, model))]
    found = dict(zip(parts, scales, strict=True))
    return {part: found[part] for part in PARTS if found[part] != 1.0}
