"""Orthogonalise a pytree of matrices by Newton-Schulz, on one device or on a mesh.

On a mesh a matrix is cut into pieces, and each iteration needs all of it. Gathering every matrix on
every device, which is what XLA does if left alone, moves tens of gigabytes a step. Here each device
becomes the owner of whole matrices instead:

1. the pieces go to the owners in one bfloat16 all-to-all over all axes that cut the matrices,
2. owners iterate on a batch of equal matrices,
3. the pieces go back in one all-to-all.

`plan_orthogonalization` decides all of it from shapes, `MatrixSpec`s and the mesh; `orthogonalize`
runs it in one `jax.shard_map`. Two facts keep it simple. Newton-Schulz commutes with permutations
of rows and of columns, so an owner may put pieces together in any order that it can undo. And it
keeps zero columns zero, so a smaller matrix may fill a free slot among wider ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmars.optim.matrix_layout import MatrixLeaf, from_stack, to_stack
from maxmars.optim.newton_schulz import Coefficients, newton_schulz
from maxmars.optim.orthogonalization_plan import Group, OrthogonalizationPlan

Iteration = Callable[[jax.Array], jax.Array]


def orthogonalize(
    updates: Any,
    plan: OrthogonalizationPlan,
    *,
    steps: int = 5,
    coefficients: Coefficients = "keller",
    eps: float | jax.Array = 1e-7,
    dtype: Any = jnp.bfloat16,
    scale: str | None = "spectral",
) -> Any:
    """Replace each matrix U Σ Vᵀ by about U Vᵀ, times a factor of its shape.

    Args:
      updates: a tree like the one that was planned for; on a mesh it is best left in the planned
        partition, and is brought there if not.
      plan: from `plan_orthogonalization`.
      steps: Newton-Schulz iterations.
      coefficients: see `newton_schulz`.
      eps: see `newton_schulz`.
      dtype: in which matrices travel and are iterated on, see `newton_schulz`.
      scale: "spectral" multiplies by sqrt(max(1, out/in)) (MARS-Shampoo, Muon), "rms" by
        0.2 sqrt(max(in, out)) (Moonlight, MARS-M), None by nothing; in and out are those of a block
        where `MatrixSpec.split` cuts the matrix.

    Returns:
      A tree like `updates`: matrices in their own dtypes and the planned partition, anything else
      as it was.

    Raises:
      ValueError: `updates` are not what was planned for, or an argument is unknown.
    """
    factors = [_factor(leaf, scale) for leaf in plan.leaves]
    leaves, treedef = jax.tree.flatten(updates)

    def iteration(x: jax.Array) -> jax.Array:
        return newton_schulz(x, steps=steps, coefficients=coefficients, eps=eps, dtype=dtype)

    matrices, results = _apply(leaves, plan, iteration, dtype)
    for leaf, matrix, result, factor in zip(plan.leaves, matrices, results, factors, strict=True):
        # The factor enters in float32 at least: in bfloat16 all of a matrix would be off by it.
        wide = result.astype(jnp.promote_types(matrix.dtype, jnp.float32))
        leaves[leaf.index] = (wide * factor).astype(matrix.dtype)
    return jax.tree.unflatten(treedef, leaves)


def orthogonality_error(
    directions: Any, plan: OrthogonalizationPlan, *, scale: str | None
) -> jax.Array:
    """How far the matrices of `orthogonalize`'s result are from semi-orthogonal ones.

    Of a matrix O with k rows or columns, whichever are fewer, it is ‖O Oᵀ − I‖_F / √k: 0 for
    orthonormal rows, about 0.3 after five steps of "keller", 1 for a zero matrix. It moves every
    matrix in float32, and so costs more than `orthogonalize`: measure now and then.

    Args:
      directions: what `orthogonalize` returned.
      plan: the plan it was given.
      scale: the scale it was given; it is divided out.

    Returns:
      The root mean square over all matrices, float32 []; zero if there are none.
    """

    def squared_error(x: Float[Array, "count rows cols"]) -> Float[Array, "count rows cols"]:
        # ‖O Oᵀ − I‖² − k, in the first entry of each matrix, so that it travels home with it.
        # Padding is zero and adds nothing; rows <= cols, and only columns are padded.
        gram = jnp.matmul(x, x.mT, precision=jax.lax.Precision.HIGHEST)
        error = jnp.sum(jnp.square(gram), axis=(1, 2)) - 2 * jnp.sum(jnp.square(x), axis=(1, 2))
        return jnp.zeros_like(x).at[:, 0, 0].set(error)

    leaves = jax.tree.leaves(directions)
    factors = [_factor(leaf, scale) for leaf in plan.leaves]
    unscaled = list(leaves)
    for leaf, factor in zip(plan.leaves, factors, strict=True):
        unscaled[leaf.index] = leaves[leaf.index].astype(jnp.float32) / factor
    total, count = jnp.zeros([]), 0
    _, results = _apply(unscaled, plan, squared_error, jnp.float32)
    for leaf, result in zip(plan.leaves, results, strict=True):
        num_matrices = math.prod(leaf.shape) // (leaf.inputs * leaf.outputs)
        total += jnp.sum(result) / min(leaf.matrix_shape) + num_matrices
        count += num_matrices
    return jnp.sqrt(jnp.maximum(total, 0) / max(count, 1))


def _apply(
    leaves: Sequence[Any], plan: OrthogonalizationPlan, function: Iteration, dtype: Any
) -> tuple[list[jax.Array], Sequence[jax.Array]]:
    """The matrices among the leaves, and `function` of each, where its owner is."""
    _check_leaves(leaves, plan)
    compute = _on_one_device if plan.mesh is None or plan.mesh.size == 1 else _on_mesh
    matrices = [jnp.asarray(leaves[leaf.index]) for leaf in plan.leaves]
    return matrices, compute(matrices, plan, function, dtype) if matrices else []


def _factor(leaf: MatrixLeaf, scale: str | None) -> float:
    if scale is None:
        return 1.0
    if scale == "spectral":
        return math.sqrt(max(1.0, leaf.outputs / leaf.inputs))
    if scale == "rms":
        return 0.2 * math.sqrt(max(leaf.inputs, leaf.outputs))
    raise ValueError(f"scale={scale!r} is unknown; take 'spectral', 'rms' or None.")


def _check_leaves(leaves: Sequence[Any], plan: OrthogonalizationPlan) -> None:
    if len(leaves) != plan.num_leaves:
        raise ValueError(
            f"the plan is for {plan.num_leaves} leaves, but the updates have {len(leaves)}; plan "
            "for this tree."
        )
    for leaf in plan.leaves:
        if leaves[leaf.index].shape != leaf.shape:
            raise ValueError(
                f"the plan is for {leaf.name} of shape {leaf.shape}, but its update has shape "
                f"{leaves[leaf.index].shape}; plan for this tree."
            )


def _on_one_device(
    matrices: Sequence[jax.Array], plan: OrthogonalizationPlan, iteration: Iteration, dtype: Any
) -> list[jax.Array]:
    # The cast comes first here too, so that a mesh changes no rounding.
    return [
        from_stack(
            _iterate(to_stack(x.astype(dtype), leaf), iteration, plan.max_batch_bytes, dtype), leaf
        )
        for x, leaf in zip(matrices, plan.leaves, strict=True)
    ]


def _on_mesh(
    matrices: Sequence[jax.Array], plan: OrthogonalizationPlan, iteration: Iteration, dtype: Any
) -> Sequence[jax.Array]:
    def local(*blocks: jax.Array) -> list[jax.Array]:
        pairs = zip(blocks, plan.leaves, strict=True)
        stacks = [to_stack(block.astype(dtype), leaf) for block, leaf in pairs]
        done: list[list[jax.Array]] = [[] for _ in stacks]
        for group in plan.groups:
            x = _gather_members(stacks, group)
            y = _as_owners(x, group, lambda x: _iterate(x, iteration, plan.max_batch_bytes, dtype))
            # A leaf's earlier matrices are in larger groups, so its parts come in order.
            for member, part in _split_members(y, stacks, group):
                done[member].append(part)
        return [
            from_stack(jnp.concatenate(parts), leaf)
            for parts, leaf in zip(done, plan.leaves, strict=True)
        ]

    partitions = [leaf.partition for leaf in plan.leaves]
    # Gathering over copies leaves them equal, which the check of varying axes cannot see.
    mapped = jax.shard_map(
        local, mesh=plan.mesh, in_specs=tuple(partitions), out_specs=partitions, check_vma=False
    )
    return mapped(*matrices)


def _gather_members(stacks: Sequence[jax.Array], group: Group) -> Float[Array, "slots rows cols"]:
    """This device's pieces of all matrices of a group, padded by zeros."""
    width = max(stacks[member.leaf].shape[2] for member in group.members)
    parts = [_pad(stacks[m.leaf][m.start : m.stop], axis=2, size=width) for m in group.members]
    return _pad(jnp.concatenate(parts), axis=0, size=group.slots)


def _split_members(
    y: Float[Array, "slots rows cols"], stacks: Sequence[jax.Array], group: Group
) -> list[tuple[int, jax.Array]]:
    """The inverse of `_gather_members`: places of leaves, and their parts."""
    parts, start = [], 0
    for member in group.members:
        width = stacks[member.leaf].shape[2]
        parts.append((member.leaf, y[start : start + member.count, :, :width]))
        start += member.count
    return parts


def _as_owners(
    x: Float[Array, "slots rows cols"], group: Group, iteration: Iteration
) -> Float[Array, "slots rows cols"]:
    """Apply `iteration` to whole matrices: each device to its own, then pieces back to all."""
    if group.copies > 1:
        share = group.slots // group.copies
        first = jax.lax.axis_index(group.roles.copy) * share
        x = jax.lax.dynamic_slice_in_dim(x, first, share)
    y = _exchange(x, group, iteration) if group.pieces > 1 else iteration(x)
    if group.copies > 1:
        y = jax.lax.all_gather(y, group.roles.copy, tiled=True)
    return y


def _exchange(
    x: Float[Array, "slots rows cols"], group: Group, iteration: Iteration
) -> Float[Array, "slots rows cols"]:
    """All-to-all to owners, iteration on whole matrices, all-to-all back."""
    rows, cols = x.shape[1:]
    height, width = group.rows // rows, group.cols // cols  # pieces down and across
    count = group.per_owner
    x = _all_to_all(x.reshape(group.pieces, count, rows, cols), group)
    x = x.reshape(height, width, count, rows, cols).transpose(2, 0, 3, 1, 4)
    y = iteration(x.reshape(count, group.rows, group.cols))
    y = y.reshape(count, height, rows, width, cols).transpose(1, 3, 0, 2, 4)
    y = _all_to_all(y.reshape(group.pieces, count, rows, cols), group)
    return y.reshape(group.pieces * count, rows, cols)


def _all_to_all(
    x: Float[Array, "pieces count rows cols"], group: Group
) -> Float[Array, "pieces count rows cols"]:
    """Element i goes to device i of the exchange axes; element j of the result is from device j."""
    # As integers, since XLA's CPU backend sends a bfloat16 as a float32.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x
    bits = jax.lax.all_to_all(bits, group.exchange_axes, split_axis=0, concat_axis=0)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def _iterate(
    x: Float[Array, "count rows cols"], iteration: Iteration, max_batch_bytes: int, dtype: Any
) -> Float[Array, "count rows cols"]:
    """Iterate on as many matrices at a time as the bound on temporaries allows."""
    count, rows, cols = x.shape
    limit = max(1, max_batch_bytes // _temporary_bytes(rows, cols, dtype))
    rounds = -(-count // limit)
    return (
        iteration(x) if rounds <= 1 else jax.lax.map(iteration, x, batch_size=-(-count // rounds))
    )


def _temporary_bytes(rows: int, cols: int, dtype: Any) -> int:
    """Bytes of one matrix's X, its next value and its narrow copy, and of A, A² and b A + c A²."""
    short, long = sorted((rows, cols))
    narrow = jnp.dtype(dtype).itemsize
    wide = jnp.promote_types(dtype, jnp.float32).itemsize
    return (2 * wide + narrow) * short * long + (2 * wide + 2 * narrow) * short**2


def _pad(x: jax.Array, *, axis: int, size: int) -> jax.Array:
    widths = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths) if size > x.shape[axis] else x
