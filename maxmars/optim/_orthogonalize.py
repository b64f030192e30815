"""Orthogonalise a pytree of matrices by Newton-Schulz, on one device or on a mesh.

On a mesh whole matrices have owners, which iterate on a batch of equal ones (see `_exchange.py`).
`plan_orthogonalization` decides who owns what from shapes, `MatrixSpec`s and the mesh;
`orthogonalize` runs it. Newton-Schulz commutes with permutations of rows and of columns, so an
owner may put pieces together in any order that it can undo.

A mesh axis plays one of three roles for a leaf. It cuts its matrices into pieces (then the pieces
are exchanged over it), or it cuts the stack of matrices (each shard is then planned alike, and
nothing is exchanged over it), or it holds copies (each copy then takes its share of the stack, and
the results are gathered over it).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from maxmars.optim._exchange import (
    AnyMesh,
    Axes,
    Stack,
    check_is_mesh,
    entries_of,
    from_owners,
    known_partition,
    mesh_of,
    num_devices,
    on_mesh,
    pad_axis,
    stacks_of,
    to_owners,
)
from maxmars.optim._matrices import MatrixSpec, resolve_specs, warn_without_specs
from maxmars.optim._newton_schulz import Coefficients, check_ns_dtype, newton_schulz, triples_of
from maxmars.optim._rules import Scalar, Tree, check_choice, check_numbers

# --- the matrices of a leaf ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MatrixLeaf:
    """A leaf that holds matrices, the blocks of its `MatrixSpec`."""

    index: int
    """Its place among all leaves."""
    stack: Stack
    """Its matrices, turned over so that rows <= cols."""
    inputs: int
    outputs: int
    """Rows and columns of a matrix that is not turned over, padding left out."""

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of a matrix, turned over."""
        return self.stack.sizes(self.stack.shape)[1:]

    def factor(self, scale: str | None) -> float:
        """What `scale` multiplies an orthogonal matrix of this shape by."""
        if scale == "spectral":
            return math.sqrt(max(1.0, self.outputs / self.inputs))
        return 1.0 if scale is None else 0.2 * math.sqrt(max(self.inputs, self.outputs))


def _matrix_leaf(index: int, array: Any, spec: MatrixSpec, stack: Stack) -> MatrixLeaf:
    _, height, width = stack.sizes(stack.shape)
    if height > width or (height == width and _turn_square(spec, array)):
        stack = replace(stack, rows=stack.cols, cols=stack.rows)
    return MatrixLeaf(index=index, stack=stack, inputs=height, outputs=width - spec.padding)


def _turn_square(spec: MatrixSpec, array: Any) -> bool:
    """Whether to turn a square matrix over, so that its cuts are those of other matrices: an
    attention output [heads, embed] then is cut like an MLP input [embed, mlp].

    It does not depend on the mesh, which therefore changes no rounding.
    """
    partition = known_partition(array) if spec.partition is None else spec.partition
    entries = entries_of(partition or PartitionSpec(), spec)
    rows, cols = (
        sorted(name for axis in axes for name in entries[axis])
        for axes in (spec.block_rows, spec.block_cols)
    )
    return bool(cols) and (not rows or cols < rows)


# --- which device orthogonalises which matrix: a static assignment -------------------------------


DEFAULT_OWNERSHIP_AXES = ("fsdp", "tensor")
_STEPS = 5  # of the FLOPs in the printed table
_ITEMSIZE = 2  # bytes of a bfloat16, in which the matrices travel


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal matrices, which travel together and are iterated on together."""

    rows: int
    cols: int
    """Shape of a matrix, rows <= cols."""
    cuts: tuple[Axes, Axes]
    """The mesh axes that cut rows and columns, over which pieces are exchanged."""
    copies: Axes
    """The mesh axes along which devices hold the same pieces, and share the work."""
    owners: int
    """Devices along `cuts` and `copies`."""
    num_copies: int
    """Devices along `copies`."""
    num_shards: int
    """Shards of the stack that mesh axes cut; the numbers of slots are those of one shard."""
    per_owner: int
    """Slots of an owner."""
    members: tuple[tuple[int, int], ...]
    """Leaves, as indices into `Assignment.leaves`, and how many of their matrices."""

    @property
    def slots(self) -> int:
        """Matrices of one shard of the stack, zero padding included."""
        return self.per_owner * self.owners

    @property
    def padded_elements(self) -> int:
        """Elements of all slots of all shards."""
        return self.slots * self.num_shards * self.rows * self.cols

    @property
    def transfer_elements(self) -> int:
        """Elements that both all-to-alls and the gathering over copies leave on a device."""
        exchanges = 2 if any(self.cuts) else 0
        gathered = self.slots * self.num_copies // self.owners if self.num_copies > 1 else 0
        return (exchanges * self.per_owner + gathered) * self.rows * self.cols

    def flops(self, steps: int = _STEPS) -> int:
        """Multiplications and additions on one device."""
        return steps * self.per_owner * 2 * self.rows**2 * (2 * self.cols + self.rows)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What `orthogonalize` does; hashable, and printable as a table."""

    num_leaves: int
    """Leaves of the tree, vectors included."""
    leaves: tuple[MatrixLeaf, ...]
    """Those that hold matrices."""
    groups: tuple[Group, ...]
    """Largest slots first."""
    mesh: AnyMesh | None
    max_batch_bytes: int

    @property
    def elements(self) -> int:
        """Elements of all matrices, P."""
        return sum(math.prod(leaf.stack.shape) for leaf in self.leaves)

    @property
    def padded_elements(self) -> int:
        """Elements of all slots, P_padded."""
        return sum(group.padded_elements for group in self.groups)

    def transfer_bytes(self, itemsize: int = _ITEMSIZE) -> int:
        """Bytes that the collectives of one step leave on a device."""
        return itemsize * sum(group.transfer_elements for group in self.groups)

    def __str__(self) -> str:
        """A table of the groups, with bytes in bfloat16 and FLOPs of five steps, per device."""
        header = ("group", "matrices", "owners", "slots", "exchange", "MB", "GFLOP", "members")
        rows: list[tuple[str, ...]] = [header]
        for g in self.groups:
            members = [f"{self.leaves[leaf].stack.name}[{count}]" for leaf, count in g.members]
            matrices = g.num_shards * sum(count for _, count in g.members)
            numbers = matrices, g.owners * g.num_shards, g.slots * g.num_shards
            exchange = " ".join(itertools.chain(*g.cuts)) or "-"
            costs = f"{_ITEMSIZE * g.transfer_elements / 1e6:.1f}", f"{g.flops() / 1e9:.1f}"
            shape = f"{g.rows} x {g.cols}"
            rows.append((shape, *map(str, numbers), exchange, *costs, ", ".join(members)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(header) - 1)] + [0]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
        padding = self.padded_elements / max(self.elements, 1)
        flops = sum(group.flops() for group in self.groups)
        return "\n".join(lines) + (
            f"\nP = {self.elements:,} elements, P_padded = {self.padded_elements:,} "
            f"({padding:.3f} P)\nper device and step: {self.transfer_bytes() / 1e6:,.1f} MB in "
            f"bfloat16, {flops:.3g} FLOPs in {_STEPS} iterations"
        )


def plan_orthogonalization(
    params: Any,
    matrix_specs: Any = None,
    *,
    mesh: AnyMesh | None = None,
    ownership_axes: Sequence[str] | None = None,
    max_batch_bytes: int = 2**30,
) -> Assignment:
    """Assign the matrices of `params` to owners.

    Args:
      params: arrays, tracers or `jax.ShapeDtypeStruct`s; only shapes matter, and the shardings of
        leaves whose spec has no `partition`.
      matrix_specs: `MatrixSpec`s as a pytree prefix, see `resolve_specs`.
      mesh: the mesh that the parameters lie on; None for one device, or for parameters on Explicit
        axes, whose types know the mesh.
      ownership_axes: mesh axes over which matrices are distributed, besides those that cut some;
        default: those of "fsdp" and "tensor" that the mesh has. Along any other axis every slice
        repeats the work, which is right over a slow network; add "data" where gathering the updates
        over it takes less time than iterating on all of them.
      max_batch_bytes: bound on the temporaries of the iteration. What exceeds it is iterated on in
        several rounds, of one matrix at least.

    Raises:
      ValueError: a partition is missing or does not divide its leaf, or the mesh lacks an axis.
    """
    check_numbers("be positive", max_batch_bytes=max_batch_bytes)
    arrays = jax.tree.leaves(params)
    specs = jax.tree.leaves(resolve_specs(matrix_specs, params))
    stacks = stacks_of(params, matrix_specs, mesh, blocks=True)
    mesh = mesh_of(arrays) if mesh is None else mesh
    owned = _ownership_axes(mesh, ownership_axes, stacks.values())
    leaves = tuple(_matrix_leaf(i, arrays[i], specs[i], stack) for i, stack in stacks.items())
    return Assignment(
        num_leaves=len(arrays),
        leaves=leaves,
        groups=_groups(leaves, mesh, owned),
        mesh=mesh,
        max_batch_bytes=max_batch_bytes,
    )


def _ownership_axes(
    mesh: AnyMesh | None, axes: Sequence[str] | None, stacks: Iterable[Stack]
) -> Axes:
    names = () if mesh is None else mesh.axis_names
    axes = [name for name in DEFAULT_OWNERSHIP_AXES if name in names] if axes is None else axes
    if absent := [axis for axis in axes if axis not in names]:
        raise ValueError(
            f"ownership_axes={tuple(axes)} names {', '.join(map(repr, absent))}, which the "
            f"mesh does not have; it has {', '.join(map(str, names)) or 'no axes'}."
        )
    cutting = {name for stack in stacks for names in stack.cuts for name in names}
    return tuple(name for name in names if name in {*axes, *cutting})


def _groups(leaves: Sequence[MatrixLeaf], mesh: AnyMesh | None, owned: Axes) -> tuple[Group, ...]:
    """A group for each shape of matrices and each way in which they are cut."""
    alike: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        stack = leaf.stack
        cuts = tuple(map(stack.cut_by, (stack.stack, stack.rows, stack.cols)))
        copies = {name for name in owned if num_devices((name,), mesh) > 1}
        copies = tuple(sorted(copies - {*itertools.chain(*cuts)}))
        alike.setdefault((leaf.matrix_shape, cuts, copies), []).append(index)
    groups = []
    for ((rows, cols), (stacked, *cuts), copies), indices in alike.items():
        owners = num_devices((*itertools.chain(*cuts), *copies), mesh)
        stacks = [leaves[index].stack for index in indices]
        counts = [stack.sizes(stack.local_shape)[0] for stack in stacks]
        groups.append(
            Group(
                rows=rows,
                cols=cols,
                cuts=(cuts[0], cuts[1]),
                copies=copies,
                owners=owners,
                num_copies=num_devices(copies, mesh),
                num_shards=num_devices(stacked, mesh),
                per_owner=-(-sum(counts) // owners),
                members=tuple(zip(indices, counts, strict=True)),
            )
        )
    return tuple(sorted(groups, key=lambda group: group.rows * group.cols, reverse=True))


# --- the iterations ------------------------------------------------------------------------------


Iteration = Callable[[jax.Array], jax.Array]
SCALES = ("spectral", "rms", None)


def scale_by_orthogonalization(
    matrix_specs: Any = None,
    *,
    steps: int | jax.Array = 5,
    coefficients: Coefficients = "keller",
    eps: Scalar = 1e-7,
    dtype: Any = "bfloat16",
    scale: str | None = "spectral",
    mesh: AnyMesh | None = None,
    ownership_axes: Sequence[str] | None = None,
) -> optax.GradientTransformation:
    """`orthogonalize` as an optax transformation; vectors pass as they are.

    Args:
      matrix_specs: `MatrixSpec`s, see `resolve_specs`.
      steps, coefficients, eps, dtype, scale: see `orthogonalize`.
      mesh, ownership_axes: see `plan_orthogonalization`.

    Raises:
      ValueError: an argument is unknown or out of range, or a partition does not fit the mesh.
    """
    check_choice("ns_scale", scale, SCALES)
    check_numbers("be positive", ns_steps=steps, ns_eps=eps)
    check_ns_dtype(dtype)
    check_is_mesh(mesh)
    triples_of(coefficients, steps)

    def init_fn(params: Tree) -> Any:
        resolve_specs(matrix_specs, params)  # raises here rather than in the first step
        warn_without_specs(matrix_specs, params)
        return optax.EmptyState()

    def update_fn(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        del params
        assignment = plan_orthogonalization(
            updates, matrix_specs, mesh=mesh, ownership_axes=ownership_axes
        )
        directions = orthogonalize(
            updates,
            assignment,
            steps=steps,
            coefficients=coefficients,
            eps=eps,
            dtype=dtype,
            scale=scale,
        )
        return directions, state

    return optax.GradientTransformation(init_fn, update_fn)


def orthogonalize(
    updates: Any,
    assignment: Assignment,
    *,
    steps: int | jax.Array = 5,
    coefficients: Coefficients = "keller",
    eps: float | jax.Array = 1e-7,
    dtype: Any = jnp.bfloat16,
    scale: str | None = "spectral",
) -> Any:
    """Replace each matrix U Σ Vᵀ by about U Vᵀ, times a factor of its shape.

    Args:
      updates: a tree like the one that was planned for; on a mesh it is best left in the planned
        partition, and is brought there if not.
      assignment: from `plan_orthogonalization`.
      steps, coefficients, eps: of the iteration, see `newton_schulz`.
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
    check_choice("scale", scale, SCALES)
    factors = [leaf.factor(scale) for leaf in assignment.leaves]
    leaves, treedef = jax.tree.flatten(updates)

    def iteration(x: jax.Array) -> jax.Array:
        return newton_schulz(x, steps=steps, coefficients=coefficients, eps=eps, dtype=dtype)

    matrices, results = _apply(leaves, assignment, iteration, dtype)
    for leaf, matrix, result, factor in zip(
        assignment.leaves, matrices, results, factors, strict=True
    ):
        # The factor enters in float32 at least: in bfloat16 all of a matrix would be off by it.
        wide = result.astype(jnp.promote_types(matrix.dtype, jnp.float32))
        leaves[leaf.index] = (wide * factor).astype(matrix.dtype)
    return jax.tree.unflatten(treedef, leaves)


def _apply(
    leaves: Sequence[Any], assignment: Assignment, function: Iteration, dtype: Any
) -> tuple[list[jax.Array], Sequence[jax.Array]]:
    """The matrices among the leaves, and `function` of each, where its owner is."""
    _check_leaves(leaves, assignment)
    compute = _on_one_device if assignment.mesh is None or assignment.mesh.size == 1 else _on_mesh
    matrices = [jnp.asarray(leaves[leaf.index]) for leaf in assignment.leaves]
    return matrices, compute(matrices, assignment, function, dtype) if matrices else []


def _check_leaves(leaves: Sequence[Any], assignment: Assignment) -> None:
    if len(leaves) != assignment.num_leaves:
        raise ValueError(
            f"the assignment is for {assignment.num_leaves} leaves, but the updates have "
            f"{len(leaves)}; plan for this tree."
        )
    for leaf in assignment.leaves:
        planned, shape = leaf.stack, leaves[leaf.index].shape
        if shape != planned.shape:
            raise ValueError(
                f"the assignment is for {planned.name} of shape {planned.shape}, but its update "
                f"has shape {shape}; plan for this tree."
            )


def _on_one_device(
    matrices: Sequence[jax.Array], assignment: Assignment, iteration: Iteration, dtype: Any
) -> list[jax.Array]:
    # The cast comes first here too, so that a mesh changes no rounding.
    max_batch_bytes = assignment.max_batch_bytes
    return [
        leaf.stack.from_stack(
            _iterate(leaf.stack.to_stack(x.astype(dtype)), iteration, max_batch_bytes, dtype),
            x.shape,
        )
        for x, leaf in zip(matrices, assignment.leaves, strict=True)
    ]


def _on_mesh(
    matrices: Sequence[jax.Array], assignment: Assignment, iteration: Iteration, dtype: Any
) -> Sequence[jax.Array]:
    def local(blocks: Sequence[jax.Array]) -> list[jax.Array]:
        pairs = zip(blocks, assignment.leaves, strict=True)
        stacks = [leaf.stack.to_stack(block.astype(dtype)) for block, leaf in pairs]
        for group in assignment.groups:
            x = jnp.concatenate([stacks[leaf] for leaf, _ in group.members])
            x = pad_axis(x, 0, group.slots)
            own = to_owners(x, group.cuts, group.copies)
            y = _iterate(own, iteration, assignment.max_batch_bytes, dtype)
            y = from_owners(y, group.cuts, x.shape[1:], group.copies)
            for leaf, count in group.members:
                stacks[leaf], y = y[:count], y[count:]
        return [
            leaf.stack.from_stack(stack, block.shape)
            for stack, leaf, block in zip(stacks, assignment.leaves, blocks, strict=True)
        ]

    return on_mesh(local, [leaf.stack for leaf in assignment.leaves], matrices)


def _iterate(
    x: Float[Array, "count rows cols"], iteration: Iteration, max_batch_bytes: int, dtype: Any
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
