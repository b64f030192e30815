"""Pieces of matrices to the owners of whole ones, a function there, and the pieces back.

On a mesh a matrix is cut into pieces, and Newton-Schulz and SOAP need all of it. Gathering every
matrix on every device, which is what XLA does if left alone, moves tens of gigabytes a step. Here
each device becomes the owner of some whole matrices instead: the pieces go to the owners in one
all-to-all over all axes that cut the matrices, and back in another.

A mesh axis plays one of three roles for an array. It cuts its matrices (then their pieces are
exchanged over it), or it cuts the stack of matrices (each shard of the stack is then treated alike,
and nothing is exchanged over it), or it holds copies (each copy then takes its share of the stack,
and the results are gathered over it).

A `Stack` says how an array of matrices lies on a mesh and brings its pieces to owners and back,
inside of a function that `on_mesh` runs on each device's shards; `on_whole_matrices` does so for a
tree of them, in `MatrixGroup`s of equal matrices.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard
from jaxtyping import Array, Float

from maxmars.optim._matrices import MatrixSpec, named_leaves, resolve_specs

Axes = tuple[str, ...]
"""Mesh axes."""
AnyMesh = Mesh | AbstractMesh


def check_is_mesh(mesh: Any) -> None:
    """Raise ValueError unless it is a mesh or None."""
    if mesh is not None and not isinstance(mesh, AnyMesh):
        raise ValueError(
            f"mesh={mesh!r} is no mesh; optax.inject_hyperparams takes a mesh, which can be "
            "called, for a schedule: give it static_args=('mesh',)."
        )


@dataclass(frozen=True, kw_only=True)
class Stack:
    """How an array of matrices lies on a mesh, and how whole ones get to their owners."""

    # Example: queries, keys and values of a layer, kernel [D 768, 3, H 12, K 64], a matrix for each
    # of the three, on a mesh fsdp=4, tensor=2 in PartitionSpec("fsdp", None, "tensor"):
    #
    #   cuts        (("fsdp",), (), ("tensor",), ())
    #   stack (1,)  rows (0,)  cols (2, 3)            three matrices of 768 x 768
    #   local_shape [192, 3, 6, 64]                   of a device; to_stack: [3, 192, 6, 64]
    #   pieces      (("fsdp",), ("tensor",), ())      of rows, heads and head_dim
    #   owners      8, of which three get a matrix: to_owners: [1, 768, 768]
    name: str
    """Its key path, for people."""
    mesh: AnyMesh | None
    shape: tuple[int, ...]
    """Of the array."""
    cuts: tuple[Axes, ...]
    """For each axis, the mesh axes of more than one device that cut it."""
    stack: tuple[int, ...]
    """The axes that stack matrices."""
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    copies: Axes = ()
    """Mesh axes along which devices hold the same and are owners nevertheless."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a device's shard."""
        counts = [num_devices(names, self.mesh) for names in self.cuts]
        return tuple(size // count for size, count in zip(self.shape, counts, strict=True))

    @property
    def partition(self) -> PartitionSpec:
        """Of the array, without mesh axes of one device."""
        return PartitionSpec(*(names or None for names in self.cuts))

    @property
    def pieces(self) -> tuple[Axes, ...]:
        """For each axis of a matrix, the mesh axes over which its pieces are exchanged."""
        return tuple(self.cuts[axis] for axis in (*self.rows, *self.cols))

    @property
    def owners(self) -> int:
        """Devices that divide the matrices among them; 1 where each has its own already."""
        return num_devices((*itertools.chain(*self.pieces), *self.copies), self.mesh)

    @property
    def order(self) -> tuple[int, ...]:
        """The axes that stack, those of rows, those of columns."""
        return *self.stack, *self.rows, *self.cols

    def cut_by(self, axes: Sequence[int]) -> Axes:
        """The mesh axes that cut these axes, sorted."""
        return tuple(sorted(itertools.chain(*(self.cuts[axis] for axis in axes))))

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Number, rows and columns of the matrices in (a shard of) the array of this shape."""
        stack, rows, cols = (
            math.prod(shape[axis] for axis in axes) for axes in (self.stack, self.rows, self.cols)
        )
        return stack, rows, cols

    def to_stack(self, x: jax.Array) -> Float[Array, "stack ..."]:
        """The (pieces of) matrices of (a shard of) the array, with the axes of rows and columns."""
        x = x.transpose(self.order)
        return x.reshape(-1, *x.shape[len(self.stack) :])

    def from_stack(self, y: Float[Array, "stack ..."], shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `to_stack`; `shape` is that of the shard."""
        y = y.reshape([shape[axis] for axis in self.order])
        return y.transpose(np.argsort(self.order))

    def to_owners(self, x: jax.Array) -> Float[Array, "own rows cols"]:
        """From a device's shard of the array to the whole matrices that it owns, then zeros."""
        x = to_owners(self.to_stack(x), self.pieces, self.copies)
        return x.reshape(len(x), *self.sizes(self.shape)[1:])

    def from_owners(self, y: Float[Array, "own rows cols"], shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `to_owners`; `shape` is that of the device's shard."""
        piece = [shape[axis] for axis in (*self.rows, *self.cols)]
        y = from_owners(y, self.pieces, piece, self.copies)
        return self.from_stack(y[: self.sizes(shape)[0]], shape)


@dataclass(frozen=True, kw_only=True)
class MatrixGroup:
    """Equal matrices of some arrays, which travel together and are computed together."""

    stacks: dict[int, Stack]
    """By the numbers of the arrays among the leaves."""
    rows: int
    cols: int
    """Shape of a matrix."""
    slots: int
    """Matrices of one shard of the stack, zero padding included."""
    owners: int
    """Devices that divide the slots among them."""

    @property
    def stack(self) -> Stack:
        """Any: they lie alike."""
        return next(iter(self.stacks.values()))

    @property
    def elements(self) -> int:
        """Elements of all matrices."""
        return sum(math.prod(stack.shape) for stack in self.stacks.values())

    @property
    def padded_elements(self) -> int:
        """Elements of all slots of all shards."""
        stack = self.stack
        shards = num_devices(stack.cut_by(stack.stack), stack.mesh)
        return self.slots * shards * self.rows * self.cols

    @property
    def transfer_elements(self) -> int:
        """Elements that both all-to-alls and the gathering over copies leave on a device."""
        stack = self.stack
        copies = num_devices(stack.copies, stack.mesh)
        gathered = self.slots * copies if copies > 1 else 0
        exchanged = 2 * self.slots if any(stack.pieces) else 0
        return (exchanged + gathered) // self.owners * self.rows * self.cols


def groups_of(
    tree: Any,
    specs: Sequence[MatrixSpec],
    mesh: AnyMesh | None,
    ownership_axes: Sequence[str],
    *,
    wide: bool,
) -> tuple[MatrixGroup, ...]:
    """The groups of `computed_by_owners`, the largest matrices first; the arguments are its."""
    alike: dict[Any, dict[int, Stack]] = {}
    stacks = stacks_of(tree, specs, mesh, blocks=True)
    leaves = list(zip(jax.tree.leaves(tree), specs, strict=True))
    owned = _ownership_axes(ownership_axes, stacks.values())
    for index, stack in stacks.items():
        if wide and _is_tall(stack, *leaves[index]):
            stack = replace(stack, rows=stack.cols, cols=stack.rows)
        copies = owned - {*itertools.chain(*stack.cuts)}
        stack = replace(stack, copies=tuple(sorted(copies)))
        sizes = tuple((stack.shape[i], stack.local_shape[i]) for i in (*stack.rows, *stack.cols))
        # Where each device is its own owner, nothing is saved by doing several arrays at a time.
        alone = index if stack.owners == 1 else None
        key = sizes, len(stack.rows), stack.pieces, stack.cut_by(stack.stack), alone
        alike.setdefault(key, {})[index] = stack
    groups = []
    for members in alike.values():
        stack = next(iter(members.values()))
        _, rows, cols = stack.sizes(stack.shape)
        count = sum(stack.sizes(stack.local_shape)[0] for stack in members.values())
        slots = -(-count // stack.owners) * stack.owners
        groups.append(
            MatrixGroup(stacks=members, rows=rows, cols=cols, slots=slots, owners=stack.owners)
        )
    return tuple(sorted(groups, key=lambda group: group.rows * group.cols, reverse=True))


def _is_tall(stack: Stack, array: Any, spec: MatrixSpec) -> bool:
    """Whether a matrix has more rows than columns. A square one counts as tall where that makes its
    cuts those of others: an attention output [heads, embed] is cut like an MLP input [embed, mlp].

    The size of the mesh does not decide it, and so changes no rounding.
    """
    _, rows, cols = stack.sizes(stack.shape)
    entries = entries_of(_partition_of(array, spec) or PartitionSpec(), spec)
    of_rows, of_cols = (
        sorted(name for axis in axes for name in entries[axis]) for axes in (stack.rows, stack.cols)
    )
    return rows > cols or (rows == cols and bool(of_cols) and (not of_rows or of_cols < of_rows))


def _ownership_axes(axes: Sequence[str], stacks: Iterable[Stack]) -> set[str]:
    """The mesh axes of more than one device over which matrices are distributed."""
    stacks = list(stacks)
    mesh = stacks[0].mesh if stacks else None
    if mesh is not None and (absent := [axis for axis in axes if axis not in mesh.axis_names]):
        raise ValueError(
            f"ownership_axes={tuple(axes)} names {', '.join(map(repr, absent))}, which the "
            f"mesh does not have; it has {', '.join(map(str, mesh.axis_names))}."
        )
    cutting = {name for stack in stacks for names in stack.cuts for name in names}
    return {name for name in {*axes, *cutting} if num_devices((name,), mesh) > 1}


def stacks_of(
    tree: Any, specs: Sequence[MatrixSpec | None], mesh: AnyMesh | None, *, blocks: bool
) -> dict[int, Stack]:
    """The matrices of a tree, by the numbers of its leaves.

    Args:
      tree: arrays, tracers or `jax.ShapeDtypeStruct`s.
      specs: of each leaf, None to leave it out; one without a partition stands for the partition
        of its array.
      mesh: the mesh; None for one device or for Explicit axes, whose types know it.
      blocks: whether a block of `MatrixSpec.split` is a matrix.

    Raises:
      ValueError: a partition is unknown, names another axis, or does not divide its array.
    """
    flat = named_leaves(tree)
    mesh = mesh_of(x for _, x in flat) if mesh is None else mesh
    return {
        i: _stack_of(name, x, spec, mesh, blocks)
        for i, ((name, x), spec) in enumerate(zip(flat, specs, strict=True))
        if spec is not None and spec.is_matrix and math.prod(x.shape)
    }


def _stack_of(name: str, array: Any, spec: MatrixSpec, mesh: AnyMesh | None, blocks: bool) -> Stack:
    partition = _partition_of(array, spec)
    if mesh is None:
        partition = PartitionSpec()
    elif partition is None:
        raise ValueError(
            f"{name} is a matrix on a mesh without a known partition; give its "
            "MatrixSpec(partition=...), PartitionSpec() for a copy on every device."
        )
    cuts = entries_of(partition, spec)
    known = () if mesh is None else mesh.axis_names
    if absent := [axis for axis in itertools.chain(*cuts) if axis not in known]:
        raise ValueError(
            f"the partition of {name} names {', '.join(map(repr, absent))}, which the mesh does "
            f"not have; it has {', '.join(map(str, known))}."
        )
    shape = tuple(array.shape)
    cuts = [tuple(axis for axis in names if num_devices((axis,), mesh) > 1) for names in cuts]
    counts = tuple(num_devices(names, mesh) for names in cuts)
    if any(size % count for size, count in zip(shape, counts, strict=True)):
        raise ValueError(
            f"{name} of shape {shape} is partitioned into {counts} parts, which do not "
            "divide it; take a mesh or a partition that does."
        )
    return Stack(
        name=name,
        mesh=mesh,
        shape=shape,
        cuts=tuple(cuts),
        stack=spec.stack if blocks else spec.batch,
        rows=spec.block_rows if blocks else spec.rows,
        cols=spec.block_cols if blocks else spec.cols,
    )


def _partition_of(array: Any, spec: MatrixSpec) -> PartitionSpec | None:
    if spec.partition is not None:
        return spec.partition
    sharding = _sharding(array)
    return None if sharding is None else sharding.spec


def mesh_of(arrays: Iterable[Any]) -> AnyMesh | None:
    """The mesh of arrays on Explicit axes, as their types have it; else None."""
    meshes = (sharding.mesh for x in arrays if (sharding := _sharding(x)) is not None)
    return next((m for m in meshes if _is_explicit(m) and m.size > 1), None)


def _sharding(array: Any) -> NamedSharding | None:
    traced = isinstance(array, jax.core.Tracer)
    sharding = getattr(jax.typeof(array) if traced else array, "sharding", None)
    # The type of a traced array knows its partition over Explicit axes only.
    if not isinstance(sharding, NamedSharding) or (traced and not _is_explicit(sharding.mesh)):
        return None
    return sharding


def entries_of(partition: PartitionSpec, spec: MatrixSpec) -> list[Axes]:
    """The mesh axes of each axis of an array."""
    entries = [*partition, *[None] * (spec.ndim - len(partition))]
    return [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]


def num_devices(axes: Axes, mesh: AnyMesh | None) -> int:
    """Number of devices along some mesh axes."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def on_whole_matrices(
    function: Callable[[jax.Array], jax.Array],
    updates: Any,
    matrix_specs: Any = None,
    mesh: AnyMesh | None = None,
    ownership_axes: Sequence[str] = (),
    *,
    wide: bool = False,
) -> Any:
    """Replace each matrix of a tree by a function of it, on a mesh by its owner.

    What an optimizer of your own needs in order to decompose, invert or orthogonalise matrices that
    are sharded. The pieces of equal matrices go to their owners in one all-to-all, and back in
    another; nothing is sent where no mesh axis cuts a matrix.

    Args:
      function: of some of the matrices of a shape, [count, rows, cols], to as many of the same
        shape; of each by itself, as the mesh decides the count. Zero matrices may be among them,
        whose results are dropped.
      updates: a tree of arrays, which travel in their own dtypes.
      matrix_specs: `MatrixSpec`s, see `resolve_specs`; on a mesh with a `partition` each. A block
        of `split` is a matrix. Vectors pass as they are.
      mesh: the mesh of the updates; None for one device, or for Explicit axes, whose types know it.
      ownership_axes: mesh axes that cut no matrix and share the work nevertheless.
      wide: transpose matrices of more rows than columns for the function, and back.

    Returns:
      A tree like `updates`, in the same partition.

    Raises:
      ValueError: a spec or a partition does not fit.
    """
    check_is_mesh(mesh)
    specs = jax.tree.leaves(resolve_specs(matrix_specs, updates))
    return computed_by_owners(function, updates, specs, mesh, ownership_axes, wide=wide)


def computed_by_owners(
    function: Callable[[jax.Array], jax.Array],
    updates: Any,
    specs: Sequence[MatrixSpec],
    mesh: AnyMesh | None,
    ownership_axes: Sequence[str],
    *,
    wide: bool,
) -> Any:
    """`on_whole_matrices` with the spec of each leaf."""
    leaves, treedef = jax.tree.flatten(updates)
    groups = groups_of(updates, specs, mesh, ownership_axes, wide=wide)
    stack_of = {i: stack for group in groups for i, stack in group.stacks.items()}

    def local(shards: Sequence[jax.Array]) -> list[jax.Array]:
        shard_of, results = dict(zip(stack_of, shards, strict=True)), {}
        for group in groups:
            stack = group.stack
            xs = [stack.to_stack(shard_of[i]) for i, stack in group.stacks.items()]
            own = to_owners(jnp.concatenate(xs), stack.pieces, stack.copies)
            y = function(own.reshape(len(own), group.rows, group.cols))
            y = from_owners(y, stack.pieces, xs[0].shape[1:], stack.copies)
            ends = np.cumsum([len(x) for x in xs])
            for (i, stack), end, x in zip(group.stacks.items(), ends, xs, strict=True):
                results[i] = stack.from_stack(y[end - len(x) : end], shard_of[i].shape)
        return [results[i] for i in stack_of]

    results = on_mesh(local, list(stack_of.values()), [jnp.asarray(leaves[i]) for i in stack_of])
    for i, y in zip(stack_of, results, strict=True):
        leaves[i] = y
    return jax.tree.unflatten(treedef, leaves)


def to_owners(
    x: Float[Array, "slots ..."], cuts: Sequence[Axes], copies: Axes = ()
) -> Float[Array, "own ..."]:
    """A device's pieces of all matrices of a stack to whole matrices of its own, inside of
    `jax.shard_map`: the devices that cut the matrices divide the stack instead.

    Args:
      x: the pieces, [count, *piece]. Every owner gets as many: 3 over 8 owners are padded to 8.
      cuts: for each axis of a matrix, the mesh axes that cut it.
      copies: mesh axes along which devices hold the same, and so divide the work.
    """
    owners = jax.lax.axis_size(axes) if (axes := (*itertools.chain(*cuts), *copies)) else 1
    if padding := -len(x) % owners:
        x = jnp.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)])
    if copies:
        share = len(x) // jax.lax.axis_size(copies)
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(copies) * share, share)
    if not any(cuts):
        return x
    # Eight matrices [6, 10], cut 2 x 2 over four devices, two for each owner: x is [8, 3, 5].
    # After the all-to-all, row j of x holds the pieces that device j had of our two matrices:
    # [4 x 2, 3, 5], that is [2, 2, own 2, 3, 5]. The pieces of an axis go beside their counts,
    # [own 2, 2, 3, 2, 5], and join: [2, 6, 10].
    counts, ndim = _counts(cuts), len(cuts)
    x = _all_to_all(x, cuts).reshape(*counts, -1, *x.shape[1:])
    beside = [axis for i in range(ndim) for axis in (i, ndim + 1 + i)]
    matrix = [n * size for n, size in zip(counts, x.shape[ndim + 1 :], strict=True)]
    return x.transpose(ndim, *beside).reshape(-1, *matrix)


def from_owners(
    y: Float[Array, "own ..."], cuts: Sequence[Axes], piece: Sequence[int], copies: Axes = ()
) -> Float[Array, "slots ..."]:
    """The inverse of `to_owners`; `piece` is the shape of one."""
    if any(cuts):
        counts, ndim = _counts(cuts), len(cuts)
        # Back from [2, 6, 10]: split to [own 2, 2, 3, 2, 5], the counts go before the stack,
        # [2, 2, own 2, 3, 5], and [8, 3, 5] is exchanged.
        y = y.reshape(-1, *itertools.chain(*zip(counts, piece, strict=True)))
        y = y.transpose(*range(1, 2 * ndim, 2), 0, *range(2, 2 * ndim + 1, 2))
        y = _all_to_all(y.reshape(-1, *piece), cuts)
    return jax.lax.all_gather(y, copies, tiled=True) if copies else y


def _counts(cuts: Sequence[Axes]) -> list[int]:
    """Number of pieces along each axis of a matrix."""
    return [jax.lax.axis_size(names) if names else 1 for names in cuts]


def _all_to_all(x: Float[Array, "slots ..."], cuts: Sequence[Axes]) -> Float[Array, "slots ..."]:
    """Row i goes to device i of the axes that cut; row j of the result is from device j."""
    # As integers: XLA's CPU backend sends a bfloat16 as a float32, and joins exchanges of
    # float32 pieces of different shapes into one that it then refuses (jaxlib 0.10.2).
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    axes = tuple(itertools.chain(*cuts))
    bits = jax.lax.all_to_all(bits, axes, split_axis=0, concat_axis=0, tiled=True)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def on_mesh(
    function: Callable[..., Sequence[jax.Array]],
    stacks: Sequence[Stack],
    arrays: Sequence[jax.Array],
    *scalars: jax.Array,
) -> Sequence[jax.Array]:
    """`function(shards, *scalars)` of each device's shards of arrays.

    Args:
      function: returns as many shards, shaped like the given ones.
      stacks: how the arrays lie on the mesh, and so the results.
      arrays: the arrays.
      scalars: what every device has whole.
    """
    mesh = stacks[0].mesh if stacks else None
    if mesh is None:
        return function(list(arrays), *scalars)
    partitions = [stack.partition for stack in stacks]
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(partitions, *[PartitionSpec()] * len(scalars)),
        out_specs=partitions,
        check_vma=False,  # it cannot see that copies stay equal
    )
    if not _is_explicit(mesh):
        return mapped(list(arrays), *scalars)
    # There inputs must have these very partitions, and so must what is added to the results.
    placed = [reshard(x, NamedSharding(mesh, p)) for x, p in zip(arrays, partitions, strict=True)]
    results = mapped(placed, *scalars)
    return [reshard(y, jax.typeof(x).sharding) for y, x in zip(results, arrays, strict=True)]


def placed_zeros(
    shape: tuple[int, ...], dtype: Any, partition: PartitionSpec, mesh: AnyMesh | None
) -> jax.Array:
    """Zeros that lie where they belong."""
    if mesh is None or (isinstance(mesh, AbstractMesh) and not _is_explicit(mesh)):
        return jnp.zeros(shape, dtype)
    sharding = NamedSharding(mesh, partition)
    if _is_explicit(mesh):
        return reshard(jnp.zeros(shape, dtype), sharding)
    # Outside of jit the first places it, inside of jit the second.
    x = jnp.zeros(shape, dtype, device=sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def _is_explicit(mesh: AnyMesh) -> bool:
    return all(axis_type == AxisType.Explicit for axis_type in mesh.axis_types)
