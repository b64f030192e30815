"""Norms of gradients, parameters and updates, by component of the model or by matrix.

The train step returns norms as two arrays rather than as hundreds of scalars, since each output of
a step costs the host time; `named_norms` names the elements. All sums are in float32 at least, and
are written over axes, so that sharded arrays stay where they are.
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
"""Quantities of each matrix with `log.norms=layers`: the rows of `train/layer_norms`."""


def at_least_float32(x: jax.Array) -> jax.Array:
    """Cast an array to float32 unless its dtype is wider: in float16, 1e-4 squared is 0."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def global_norm(tree: Any) -> Float[Array, ""]:
    """The root of the sum of squares of all elements of a tree."""
    return optax.tree.norm(jax.tree.map(at_least_float32, tree))


@jax.jit
def relative_distance(tree: Any, params: Any) -> Float[Array, ""]:
    """The norm of `tree - params` over the norm of `params`."""
    return global_norm(jax.tree.map(jnp.subtract, tree, params)) / global_norm(params)


def squared_norms(components: Any, tree: Any) -> dict[str, Float[Array, ""]]:
    """The sum of squares of each component of the model.

    Args:
      components: component of each parameter; see `Parameters.components`.
      tree: tree with the structure of the parameters.
    """
    sums: dict[str, Any] = dict.fromkeys(COMPONENTS, jnp.zeros([], jnp.float32))
    for component, leaf in zip(jax.tree.leaves(components), jax.tree.leaves(tree), strict=True):
        sums[component] += jnp.sum(jnp.square(at_least_float32(leaf)))
    return sums


def measure_matrices(
    measure: Callable[[jax.Array, MatrixSpec], jax.Array], specs: Any, tree: Any
) -> Float[Array, " matrices"]:
    """Measure each matrix of the layers, embeddings excepted, in the order of `_matrix_names`.

    Args:
      measure: function from a parameter and its spec to a number for each matrix of the stack.
      specs: see `Parameters.specs`.
      tree: tree with the structure of the parameters.
    """
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True)
    matrices = ((at_least_float32(x), spec) for x, spec in pairs if spec.kind == "matrix")
    stacks = [measure(x, spec).ravel() for x, spec in matrices]
    return jnp.concatenate([jnp.zeros(0), *stacks]).astype(jnp.float32)


def frobenius_norms(x: jax.Array, spec: MatrixSpec) -> jax.Array:
    """The root of the sum of squares of each matrix, whose axes become 1."""
    return jnp.sqrt(jnp.sum(jnp.square(x), spec.inner, keepdims=True))


def root_mean_squares(x: jax.Array, spec: MatrixSpec) -> jax.Array:
    """The root mean square of each matrix, whose axes become 1."""
    return jnp.sqrt(jnp.mean(jnp.square(x), spec.inner, keepdims=True))


def spectral_norms(x: jax.Array, spec: MatrixSpec) -> jax.Array:
    """A lower bound of the largest singular value of each matrix, whose axes become 1.

    Eight power iterations from a fixed normal vector give 0.88 to 1 times the value of NumPy's SVD
    for updates of AdamW and MARS, 0.94 to 1 times for Muon and MARS-M.

    Products are written as sums over axes, so that sharded matrices are not gathered: devices
    exchange at most 8 (m + n) numbers of a matrix [m, n].
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
    """Name the elements of the arrays of norms among a step's metrics.

    `train/norms` [3, components] becomes `train/QUANTITY_norm/COMPONENT` for gradients, parameters
    and updates, and `train/param_norm` and `train/update_norm` over all components; the step itself
    reports `train/grad_norm`. `train/layer_norms` [3, matrices] becomes
    `layers/QUANTITY/PARAMETER/NUMBER` for `LAYER_NORMS` and each matrix of a stack, without
    `/NUMBER` where a parameter is one matrix.
    """
    named = {}
    quantities = ("grad", "param", "update")
    for quantity, row in zip(quantities, metrics.get("train/norms", ()), strict=False):
        name = f"train/{quantity}_norm"
        if quantity != "grad":
            named[name] = float(np.linalg.norm(row.astype(np.float64)))
        named |= {f"{name}/{c}": float(x) for c, x in zip(COMPONENTS, row, strict=True)}
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
