"""Pieces of matrices to the owners of whole ones, a function there, and the pieces back.

On a mesh a matrix is cut into pieces, and Newton-Schulz and SOAP need all of it. Gathering every
matrix on every device, which is what XLA does if left alone, moves tens of gigabytes a step. Here
each device becomes the owner of some whole matrices instead: the pieces go to the owners in one
all-to-all over all axes that cut the matrices, and back in another.

`layouts_of` says how arrays lie on a mesh, `to_owners` and `from_owners` bring pieces to owners and
back, and `on_mesh` runs a function of each device's parts, which calls them. A `Stack` is all three
for an array of matrices, and `on_whole_matrices` for a tree of them.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard
from jaxtyping import Array, Float

from maxmars.optim._matrices import MatrixSpec, resolve_specs, unfolded

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
class Layout:
    """How an array lies on a mesh."""

    name: str
    """Its key path, for people."""
    array_shape: tuple[int, ...]
    shape: tuple[int, ...]
    """Of its view, as `MatrixSpec.unfold` has it; so are the others."""
    cuts: tuple[Axes, ...]
    """For each axis, the mesh axes of more than one device that cut it."""
    local_shape: tuple[int, ...]
    """Of the part on one device."""
    unfold: tuple[tuple[int, int], ...]

    @property
    def partition(self) -> PartitionSpec:
        """Of the array, without mesh axes of one device."""
        return partition_of(self.cuts, self.unfold)


def partition_of(cuts: Sequence[Axes], unfold: tuple[tuple[int, int], ...] = ()) -> PartitionSpec:
    """The PartitionSpec of an array whose view these mesh axes cut."""
    inside = {axis + 1 for axis, _ in unfold}  # blocks are whole
    return PartitionSpec(*(names or None for i, names in enumerate(cuts) if i not in inside))


def layouts_of(leaves: Iterable[tuple[Any, Any, MatrixSpec]], mesh: AnyMesh | None) -> list[Layout]:
    """The layouts of arrays that hold matrices.

    Args:
      leaves: key path, array (or tracer, or `jax.ShapeDtypeStruct`) and matrices of each; without a
        partition there, the array's sharding is asked.
      mesh: the mesh, or None for one device.

    Raises:
      ValueError: a partition is unknown, names another axis, or does not divide its array.
    """
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="."), array, spec)
        for path, array, spec in leaves
    ]
    all_cuts = [_cuts(name, array, spec, mesh) for name, array, spec in named]
    known = () if mesh is None else mesh.axis_names
    absent = {
        axis: name
        for (name, *_), cuts in zip(named, all_cuts, strict=True)
        for axis in itertools.chain(*cuts)
        if axis not in known
    }
    if absent:
        raise ValueError(
            f"the partition of {', '.join(dict.fromkeys(absent.values()))} names "
            f"{', '.join(map(repr, absent))}, which the mesh does not have; it has "
            f"{', '.join(map(str, known))}."
        )
    return [_layout(*leaf, cuts, mesh) for leaf, cuts in zip(named, all_cuts, strict=True)]


def viewed(x: jax.Array, spec: MatrixSpec) -> jax.Array:
    """The array with its axes unfolded, also over Explicit axes, where each part of it has whole
    blocks then."""
    if not spec.unfold:
        return x
    mesh = mesh_of([x])
    if mesh is None:
        return x.reshape(spec.view(x.shape))
    layout = _layout("", x, spec, entries_of(jax.typeof(x).sharding.spec, spec), mesh)
    sharding = NamedSharding(mesh, partition_of(layout.cuts))
    return jax.lax.reshape(x, layout.shape, out_sharding=sharding)


def folded(y: jax.Array, x: jax.Array) -> jax.Array:
    """The inverse of `viewed(x, spec)`."""
    if y.shape == x.shape:
        return y
    explicit = mesh_of([x]) is not None
    return jax.lax.reshape(y, x.shape, out_sharding=jax.typeof(x).sharding if explicit else None)


def _cuts(name: str, array: Any, spec: MatrixSpec, mesh: AnyMesh | None) -> list[Axes]:
    """What the partition names for each axis of the view."""
    if mesh is None:
        return [()] * (spec.ndim + len(spec.unfold))
    partition = known_partition(array) if spec.partition is None else spec.partition
    if partition is None:
        raise ValueError(
            f"{name} is a matrix on a mesh without a known partition; give its "
            "MatrixSpec(partition=...), PartitionSpec() for a copy on every device."
        )
    return entries_of(partition, spec)


def _layout(
    name: str, array: Any, spec: MatrixSpec, cuts: list[Axes], mesh: AnyMesh | None
) -> Layout:
    shape = spec.view(array.shape)
    cuts = [tuple(axis for axis in names if num_devices((axis,), mesh) > 1) for names in cuts]
    for axis, _ in spec.unfold:
        if shape[axis] % num_devices(cuts[axis], mesh):
            cuts[axis] = ()  # blocks are whole on a device: it gets all of them
    parts = tuple(num_devices(names, mesh) for names in cuts)
    if any(size % count for size, count in zip(shape, parts, strict=True)):
        raise ValueError(
            f"{name} of shape {shape} is partitioned into {parts} parts, which do not "
            "divide it; take a mesh or a partition that does."
        )
    return Layout(
        name=name,
        array_shape=tuple(array.shape),
        shape=shape,
        cuts=tuple(cuts),
        local_shape=tuple(size // count for size, count in zip(shape, parts, strict=True)),
        unfold=spec.unfold,
    )


def known_partition(array: Any) -> PartitionSpec | None:
    """That of an array's sharding, if it has one that is known."""
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
    """The mesh axes of each axis of an array's view; blocks are whole."""
    entries = [*partition, *[None] * (spec.ndim - len(partition))]
    for axis, _ in spec.unfold:
        entries.insert(axis + 1, None)
    return [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]


def num_devices(axes: Axes, mesh: AnyMesh | None) -> int:
    """Number of devices along some mesh axes."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """How an array of matrices lies on a mesh, and how whole ones get to their owners."""

    mesh: AnyMesh | None
    shape: tuple[int, ...]
    """Of the array."""
    unfold: tuple[tuple[int, int], ...] = ()
    """What makes the array's view, of whose axes the rest is said; see `MatrixSpec.unfold`."""
    cuts: tuple[Axes, ...]
    """For each axis, the mesh axes that cut it."""
    stack: tuple[int, ...]
    """The axes that stack matrices."""
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    copies: Axes = ()
    """Mesh axes along which devices hold the same and are owners nevertheless."""

    @property
    def pieces(self) -> tuple[Axes, ...]:
        """For each axis of a matrix, the mesh axes over which its pieces are exchanged."""
        return tuple(self.cuts[axis] for axis in (*self.rows, *self.cols))

    @property
    def owners(self) -> int:
        """Devices that divide the matrices among them; 1 where each has its own already."""
        return num_devices((*itertools.chain(*self.pieces), *self.copies), self.mesh)

    @property
    def partition(self) -> PartitionSpec:
        """Of the array."""
        return partition_of(self.cuts, self.unfold)

    def to_owners(self, x: jax.Array) -> Float[Array, "own rows cols"]:
        """From a device's part of the array to the whole matrices that it owns, padded by zeros."""
        x = x.reshape(unfolded(x.shape, self.unfold))
        x = x.transpose(*self.stack, *self.rows, *self.cols)
        x = x.reshape(-1, *x.shape[len(self.stack) :])
        x = pad_axis(x, 0, -(-len(x) // self.owners) * self.owners)
        x = to_owners(x, self.pieces, self.copies)
        rows = math.prod(x.shape[1 : 1 + len(self.rows)])
        return x.reshape(len(x), rows, -1)

    def from_owners(self, y: Float[Array, "own rows cols"], shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `to_owners`; `shape` is that of the device's part."""
        view, order = unfolded(shape, self.unfold), (*self.stack, *self.rows, *self.cols)
        ordered = tuple(view[axis] for axis in order)
        piece = ordered[len(self.stack) :]
        y = from_owners(y, self.pieces, piece, self.copies).reshape(-1, *piece)
        y = y[: math.prod(ordered[: len(self.stack)])]
        return y.reshape(ordered).transpose(np.argsort(order)).reshape(shape)


def on_whole_matrices(
    function: Callable[[jax.Array], jax.Array],
    updates: Any,
    matrix_specs: Any = None,
    mesh: AnyMesh | None = None,
) -> Any:
    """Replace each matrix of a tree by a function of it, on a mesh by its owner.

    What an optimizer of your own needs in order to decompose, invert or orthogonalise matrices that
    are sharded. The pieces of each parameter's matrices go to their owners in one all-to-all, and
    back in another; nothing is sent where no mesh axis cuts a matrix.

    Args:
      function: of some of the matrices of a parameter, [count, rows, cols], to as many of the same
        shape; of each by itself, as the mesh decides the count. Zero matrices may be among them,
        whose results are dropped.
      updates: a tree of arrays, which travel in their own dtypes.
      matrix_specs: `MatrixSpec`s, see `resolve_specs`; on a mesh with a `partition` each. A block
        of `split` is a matrix. Vectors pass as they are.
      mesh: the mesh of the updates; None for one device, or for Explicit axes, whose types know it.

    Returns:
      A tree like `updates`, in the same partition.

    Raises:
      ValueError: a spec or a partition does not fit.
    """
    check_is_mesh(mesh)
    flat, treedef = jax.tree.flatten_with_path(updates)
    specs = jax.tree.leaves(resolve_specs(matrix_specs, updates))
    found = {
        i: (path, x, spec)
        for i, ((path, x), spec) in enumerate(zip(flat, specs, strict=True))
        if spec.is_matrix and x.size
    }
    mesh = mesh_of(x for _, x in flat) if mesh is None else mesh
    stacks = [
        Stack(
            mesh=mesh,
            shape=layout.array_shape,
            unfold=spec.unfold,
            cuts=layout.cuts,
            stack=spec.stack,
            rows=spec.block_rows,
            cols=spec.block_cols,
        )
        for layout, (_, _, spec) in zip(
            layouts_of(found.values(), mesh), found.values(), strict=True
        )
    ]

    def local(parts: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            stack.from_owners(function(stack.to_owners(x)), x.shape)
            for x, stack in zip(parts, stacks, strict=True)
        ]

    results = [x for _, x in flat]
    arrays = [jnp.asarray(results[i]) for i in found]
    partitions = [stack.partition for stack in stacks]
    for i, y in zip(found, on_mesh(local, mesh, partitions, arrays), strict=True):
        results[i] = y
    return jax.tree.unflatten(treedef, results)


def to_owners(
    x: Float[Array, "slots ..."], cuts: Sequence[Axes], copies: Axes = ()
) -> Float[Array, "own ..."]:
    """A device's pieces of all matrices of a stack to whole matrices of its own, inside of
    `jax.shard_map`: the devices that cut the matrices divide the stack instead.

    Args:
      x: the pieces, [slots, *piece]; the number of owners divides that of the slots.
      cuts: for each axis of a matrix, the mesh axes that cut it.
      copies: mesh axes along which devices hold the same, and so divide the work.
    """
    if copies:
        share = len(x) // jax.lax.axis_size(copies)
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(copies) * share, share)
    if not any(cuts):
        return x
    # Eight matrices [6, 10], cut 2 x 2 over four devices, two for each owner: x is [8, 3, 5].
    # After the all-to-all, part j of x holds the pieces that device j had of our two matrices:
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
        y = y.reshape(-1, *itertools.chain(*zip(counts, piece, strict=True)))
        y = y.transpose(*range(1, 2 * ndim, 2), 0, *range(2, 2 * ndim + 1, 2))
        y = _all_to_all(y.reshape(-1, *piece), cuts)
    return jax.lax.all_gather(y, copies, tiled=True) if copies else y


def _counts(cuts: Sequence[Axes]) -> list[int]:
    """Number of pieces along each axis of a matrix."""
    return [jax.lax.axis_size(names) if names else 1 for names in cuts]


def _all_to_all(x: Float[Array, "slots ..."], cuts: Sequence[Axes]) -> Float[Array, "slots ..."]:
    """Part i goes to device i of the axes that cut; part j of the result is from device j."""
    # As integers: XLA's CPU backend sends a bfloat16 as a float32, and joins exchanges of
    # float32 pieces of different shapes into one that it then refuses (jaxlib 0.10.2).
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    axes = tuple(itertools.chain(*cuts))
    bits = jax.lax.all_to_all(bits, axes, split_axis=0, concat_axis=0, tiled=True)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def on_mesh(
    function: Callable[..., Sequence[jax.Array]],
    mesh: AnyMesh | None,
    partitions: Sequence[PartitionSpec],
    arrays: Sequence[jax.Array],
    *scalars: jax.Array,
) -> Sequence[jax.Array]:
    """`function(parts, *scalars)` of each device's parts of arrays.

    Args:
      function: returns as many parts, shaped like the given ones.
      mesh: the mesh, or None for one device, whose parts are the arrays.
      partitions: of the arrays, and so of the results.
      arrays: the arrays.
      scalars: what every device has whole.
    """
    if mesh is None or not arrays:
        return function(list(arrays), *scalars)
    partitions = list(partitions)
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


def pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros at the end of an axis that is shorter."""
    widths = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths) if size > x.shape[axis] else x


def _is_explicit(mesh: AnyMesh) -> bool:
    return all(axis_type == AxisType.Explicit for axis_type in mesh.axis_types)
