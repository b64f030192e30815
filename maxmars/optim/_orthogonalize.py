"""Orthogonalise a pytree of matrices by Newton-Schulz, on one device or on a mesh.

On a mesh whole matrices have owners, see `_exchange.py`; matrices of one shape are a batch.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from maxmars.optim._exchange import (
    AnyMesh,
    MatrixGroup,
    check_is_mesh,
    computed_by_owners,
    groups_of,
    mesh_of,
    placed_zeros,
    stacks_of,
)
from maxmars.optim._matrices import MatrixSpec, resolve_specs
from maxmars.optim._newton_schulz import Coefficients, check_ns_dtype, newton_schulz, triples_of
from maxmars.optim._rules import (
    Scalar,
    Tree,
    check_choice,
    check_numbers,
    per_matrix,
    wide_dtype,
)

DEFAULT_OWNERSHIP_AXES = ("fsdp", "tensor")
SCALES = ("spectral", "rms", None)


class RowNormalizationState(NamedTuple):
    """State of `scale_by_orthogonalization` with `row_normalization`."""

    row_moment: Tree
    """v, of the parameters' shapes with 1 in place of the input axes, and cut as these are along
    the others; in float32 at least. None for vectors."""


def scale_by_orthogonalization(
    matrix_specs: Any = None,
    *,
    steps: int | jax.Array = 5,
    coefficients: Coefficients = "keller",
    eps: Scalar = 1e-7,
    dtype: Any = "bfloat16",
    scale: str | None = "spectral",
    row_normalization: Scalar | None = None,
    mesh: AnyMesh | None = None,
    ownership_axes: Sequence[str] | None = None,
    max_batch_bytes: int = 2**30,
) -> optax.GradientTransformationExtraArgs:
    """Replace each matrix U Σ Vᵀ by about U Vᵀ, times a factor of its shape; vectors pass as they
    are.

    Args:
      matrix_specs: `MatrixSpec`s as a pytree prefix, see `resolve_specs`.
      steps, coefficients, eps: of the iteration, see `newton_schulz`.
      dtype: in which matrices travel and are iterated on, see `newton_schulz`.
      scale: "spectral" multiplies by sqrt(max(1, out/in)) (MARS-Shampoo, Muon), "rms" by
        0.2 sqrt(max(in, out)) (Moonlight, MARS-M), None by nothing; in and out are those of a block
        where `MatrixSpec.split` cuts the matrix.
      row_normalization: β₂ of NorMuon (arXiv 2510.05491), 0.95 there; None leaves it out. Each
        output row of the orthogonal U is divided by the root of its moving mean square,
        v ← β₂ v + (1 − β₂) mean(U²), U ← U / (√v + 1e-10), and U is then scaled back to its own
        norm, before `scale`; a block of `MatrixSpec.split` by itself.
      mesh: the mesh that the parameters lie on; None for one device, or for parameters on Explicit
        axes, whose types know the mesh. Updates are best left in the partition of the specs, and
        are brought there if not.
      ownership_axes: mesh axes over which matrices are distributed, besides those that cut some;
        default: those of "fsdp" and "tensor" that the mesh has. Along any other axis every slice
        repeats the work, which is right over a slow network; add "data" where gathering the updates
        over it takes less time than iterating on all of them.
      max_batch_bytes: bound on the temporaries of the iteration. What exceeds it is iterated on in
        several rounds, of one matrix at least.

    Raises:
      ValueError: an argument is unknown or out of range; in init or update, a partition is missing
        or does not divide its array, or the mesh lacks an axis.
    """
    check_choice("ns_scale", scale, SCALES)
    check_numbers("be positive", ns_steps=steps, ns_eps=eps, max_batch_bytes=max_batch_bytes)
    check_numbers("lie in [0, 1)", row_normalization=row_normalization)
    check_ns_dtype(dtype)
    check_is_mesh(mesh)
    triples_of(coefficients, steps)

    def iteration(x: Float[Array, "*count rows cols"]) -> Float[Array, "*count rows cols"]:
        return newton_schulz(x, steps=steps, coefficients=coefficients, eps=eps, dtype=dtype)

    def whole(x: Float[Array, "count rows cols"]) -> Float[Array, "count rows cols"]:
        return _in_rounds(x, iteration, max_batch_bytes, dtype)

    def scaled(x: jax.Array, y: jax.Array, spec: MatrixSpec) -> jax.Array:
        if not (spec.is_matrix and x.size):
            return x
        # The factor enters in float32 at least: in bfloat16 all of a matrix would be off by it.
        wide = y.astype(jnp.promote_types(x.dtype, jnp.float32))
        return (wide * _factor(spec, x.shape, scale)).astype(x.dtype)

    b2: Any = row_normalization

    def moment(y: jax.Array, v: jax.Array | None, spec: MatrixSpec) -> jax.Array | None:
        if v is None:
            return None
        square = jnp.mean(jnp.square(y.astype(v.dtype)), axis=spec.block_rows, keepdims=True)
        return b2 * v + (1 - b2) * square

    def normalized(y: jax.Array, v: jax.Array | None, spec: MatrixSpec) -> jax.Array:
        if v is None:
            return y
        wide, axes = y.astype(v.dtype), (*spec.block_rows, *spec.block_cols)
        even = wide / (jnp.sqrt(v) + 1e-10)
        before, after = (
            jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True)) for x in (wide, even)
        )
        return even * (before / (after + 1e-10))

    def make(specs: Tree) -> optax.GradientTransformation:
        def orthogonal(updates: Tree) -> Tree:
            narrow = jax.tree.map(
                lambda x, spec: x.astype(dtype) if spec.is_matrix else x, updates, specs
            )
            axes = _or_default(ownership_axes, updates, mesh)
            each = jax.tree.leaves(specs)
            return computed_by_owners(whole, narrow, each, mesh, axes, wide=True)

        def init_fn(params: Tree) -> RowNormalizationState:
            leaves, treedef = jax.tree.flatten(params)
            moments: list[jax.Array | None] = [None] * len(leaves)
            for i, stack in stacks_of(params, jax.tree.leaves(specs), mesh, blocks=True).items():
                shape, cuts = list(stack.shape), list(stack.partition)
                for axis in stack.rows:
                    shape[axis], cuts[axis] = 1, None
                partition, kind = PartitionSpec(*cuts), wide_dtype(leaves[i].dtype)
                moments[i] = placed_zeros(tuple(shape), kind, partition, stack.mesh)
            return RowNormalizationState(jax.tree.unflatten(treedef, moments))

        def update_fn(
            updates: Tree, state: Any, params: Tree = None
        ) -> tuple[Tree, RowNormalizationState]:
            del params
            results = orthogonal(updates)
            moments = jax.tree.map(moment, results, state.row_moment, specs)
            even = jax.tree.map(normalized, results, moments, specs)
            return jax.tree.map(scaled, updates, even, specs), RowNormalizationState(moments)

        if row_normalization is not None:
            return optax.GradientTransformation(init_fn, update_fn)
        return optax.stateless(
            lambda updates, _: jax.tree.map(scaled, updates, orthogonal(updates), specs)
        )

    return per_matrix(make, matrix_specs)


def orthogonalize(updates: Any, matrix_specs: Any = None, **options: Any) -> Any:
    """Replace each matrix of a tree as `scale_by_orthogonalization` does, whose options and errors
    these are, but for `row_normalization`, which has a state.

    Returns:
      A tree like `updates`: matrices in their own dtypes and the partition of the specs, anything
      else as it was.
    """
    if (decay := options.get("row_normalization")) is not None:
        raise ValueError(
            f"row_normalization={decay} averages over updates; take scale_by_orthogonalization, "
            "whose state keeps the average."
        )
    transformation = scale_by_orthogonalization(matrix_specs, **options)
    return transformation.update(updates, optax.EmptyState())[0]


def orthogonalization_groups(
    params: Any,
    matrix_specs: Any = None,
    *,
    mesh: AnyMesh | None = None,
    ownership_axes: Sequence[str] | None = None,
) -> tuple[MatrixGroup, ...]:
    """The groups in which `orthogonalize` exchanges matrices, the largest matrices first.

    Only shapes and shardings of `params` matter, which may be `jax.ShapeDtypeStruct`s. For the
    other arguments and the errors see `scale_by_orthogonalization`.
    """
    specs = jax.tree.leaves(resolve_specs(matrix_specs, params))
    axes = _or_default(ownership_axes, params, mesh)
    return groups_of(params, specs, mesh, axes, wide=True)


def _or_default(axes: Sequence[str] | None, tree: Any, mesh: AnyMesh | None) -> Sequence[str]:
    """The ownership axes, by default those of `DEFAULT_OWNERSHIP_AXES` that the mesh has."""
    mesh = mesh_of(jax.tree.leaves(tree)) if mesh is None else mesh
    names = () if mesh is None else mesh.axis_names
    return [axis for axis in DEFAULT_OWNERSHIP_AXES if axis in names] if axes is None else axes


def _factor(spec: MatrixSpec, shape: tuple[int, ...], scale: str | None) -> float:
    """What `scale` multiplies the orthogonal matrices of an array by."""
    inputs = math.prod(shape[axis] for axis in spec.block_rows)
    outputs = math.prod(shape[axis] for axis in spec.block_cols) - spec.padding
    if scale == "spectral":
        return math.sqrt(max(1.0, outputs / inputs))
    return 1.0 if scale is None else 0.2 * math.sqrt(max(inputs, outputs))


def _in_rounds(
    x: Float[Array, "count rows cols"], iteration: Any, max_batch_bytes: int, dtype: Any
) -> Float[Array, "count rows cols"]:
    """Iterate on as many matrices at a time as the bound on temporaries allows."""
    count, rows, cols = x.shape
    narrow = jnp.dtype(dtype).itemsize
    wide = jnp.promote_types(dtype, jnp.float32).itemsize
    short, long = sorted((rows, cols))
    # X, its next value and its narrow copy; A, A² and b A + c A², two of them narrow too.
    size = (2 * wide + narrow) * short * long + (2 * wide + 2 * narrow) * short**2
    rounds = -(-count // max(1, max_batch_bytes // size))
    if rounds <= 1:
        return iteration(x)
    return jax.lax.map(iteration, x, batch_size=-(-count // rounds))
