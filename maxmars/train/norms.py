"""Norms of gradients, parameters and updates: of the components of a model, and of each layer's
matrices. The train step computes them as a few arrays, which `named_norms` names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from maxmars.model.parameters import COMPONENTS, Parameters
from maxmars.optim import MatrixSpec

LAYER_NORMS = ("grad_norm", "update_rms", "update_spectral_norm")
"""What `log.norms=layers` measures of each matrix: the rows of `train/layer_norms`."""


def widened(x: jax.Array) -> jax.Array:
    """An array in float32 at least: 1e-4 squared is 0 in float16."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def global_norm(tree: Any) -> Float[Array, ""]:
    """The root of the sum of all squares."""
    return optax.tree.norm(jax.tree.map(widened, tree))


@jax.jit
def relative_distance(tree: Any, params: Any) -> Float[Array, ""]:
    """The norm of the difference from the parameters, over the norm of the parameters."""
    return global_norm(jax.tree.map(jnp.subtract, tree, params)) / global_norm(params)


def squared_norms(components: Any, tree: Any) -> dict[str, Float[Array, ""]]:
    """The sum of squares of each component of the model.

    Args:
      components: the component of each parameter; see `Parameters.components`.
      tree: a tree of the parameters' structure.
    """
    sums: dict[str, Any] = dict.fromkeys(COMPONENTS, jnp.zeros([], jnp.float32))
    for component, leaf in zip(jax.tree.leaves(components), jax.tree.leaves(tree), strict=True):
        sums[component] += jnp.sum(jnp.square(widened(leaf)))
    return sums


def of_matrices(
    measure: Callable[[jax.Array, MatrixSpec], jax.Array], specs: Any, tree: Any
) -> Float[Array, " matrices"]:
    """A measure of each matrix of the layers, embeddings aside, one parameter after the other.

    Args:
      measure: from a parameter and its spec to a number for each matrix of its stack.
      specs: see `Parameters.specs`.
      tree: a tree of the parameters' structure.
    """
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True)
    stacks = [measure(widened(x), spec).ravel() for x, spec in pairs if spec.kind == "matrix"]
    return jnp.concatenate([jnp.zeros(0), *stacks]).astype(jnp.float32)


def frobenius_norms(x: jax.Array, spec: MatrixSpec) -> jax.Array:
    """The root of the sum of squares of each matrix, 1 in place of its axes."""
    return jnp.sqrt(jnp.sum(jnp.square(x), spec.inner, keepdims=True))


def root_mean_squares(x: jax.Array, spec: MatrixSpec) -> jax.Array:
    """The root mean square of each matrix, 1 in place of its axes."""
    return jnp.sqrt(jnp.mean(jnp.square(x), spec.inner, keepdims=True))


def spectral_norms(x: jax.Array, spec: MatrixSpec) -> jax.Array:
    """The largest singular value of each matrix, from below, 1 in place of its axes.

    Eight power iterations from a fixed normal vector give 0.88 to 1 times the singular value that
    NumPy's SVD finds, for updates of AdamW and MARS; 0.94 to 1 times for Muon and MARS-M.

    Products are sums over axes, so a sharded matrix stays where it is: of a matrix [m, n] at most
    8 (m + n) numbers are summed over devices.
    """

    def unit(vector: jax.Array) -> jax.Array:
        return vector / jnp.maximum(frobenius_norms(vector, spec), jnp.finfo(x.dtype).tiny)

    def iterate(_: Any, right: jax.Array) -> jax.Array:
        left = jnp.sum(x * unit(right), spec.cols, keepdims=True)
        return jnp.sum(x * unit(left), spec.rows, keepdims=True)

    shape = [1 if axis in spec.rows else size for axis, size in enumerate(x.shape)]
    start = jax.random.normal(jax.random.key(0), shape, x.dtype)
    return frobenius_norms(jax.lax.fori_loop(0, 8, iterate, start), spec)


def named_norms(metrics: Mapping[str, np.ndarray], parameters: Parameters) -> dict[str, float]:
    """The arrays of norms among a step's metrics, as numbers by name.

    `train/norms` [3, components] are `train/QUANTITY_norm/PART`, for gradients, parameters and
    updates, with `train/param_norm` and `train/update_norm` of all components together; the step
    itself reports `train/grad_norm`. `train/layer_norms` [3, matrices] are
    `layers/QUANTITY/PARAMETER/NUMBER`, for `LAYER_NORMS` and each matrix of a stack; without
    `/NUMBER` of a parameter that is one matrix.
    """
    named = {}
    quantities = ("grad", "param", "update")
    for quantity, row in zip(quantities, metrics.get("train/norms", ()), strict=False):
        name = f"train/{quantity}_norm"
        if quantity != "grad":
            named[name] = float(np.linalg.norm(row.astype(np.float64)))
        named |= {f"{name}/{part}": float(x) for part, x in zip(COMPONENTS, row, strict=True)}
    for quantity, row in zip(LAYER_NORMS, metrics.get("train/layer_norms", ()), strict=False):
        pairs = zip(_matrix_names(parameters), row, strict=True)
        named |= {f"layers/{quantity}/{matrix}": float(x) for matrix, x in pairs}
    return named


def _matrix_names(parameters: Parameters) -> list[str]:
    names = []
    specs = jax.tree.leaves(parameters.specs)
    for (path, x), spec in zip(jax.tree.leaves_with_path(parameters.abstract), specs, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        numbers = range(math.prod(x.shape[axis] for axis in spec.batch))
        if spec.kind == "matrix":
            names += [f"{name}/{number}" for number in numbers] if spec.batch else [name]
    return names
