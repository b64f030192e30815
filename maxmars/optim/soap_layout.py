"""Who preconditions which matrix: SOAP's state on a mesh.

A matrix cannot be preconditioned in pieces, so whole matrices have owners. For each leaf, the mesh
axes that cut its matrices deal them out: every device sends its pieces of the gradients to the
owners in one joint all-to-all, owners do everything else for whole matrices, and the pieces of the
update go back in one all-to-all. Axes that cut the stack of matrices need no transfers, and along
axes that hold copies every slice repeats the work.

Where the owners divide the stack, the state stays with them: it is cut along the stack, and the two
all-to-alls are all there is. Where they do not, it is cut like the leaf (a Gram matrix along its
rows and columns) and travels too, as padding a checkpoint would tie it to the mesh. A Gram matrix
whose side the axes do not divide is copied.

A lone matrix with one preconditioned side, such as an embedding table, has no single owner: the
other side's rows are dealt out like matrices, and their Gram matrices summed up. That Gram matrix
and its basis are copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard
from jaxtyping import Array, Float

from maxmars.optim.eigenbasis import Moments
from maxmars.optim.matrix_layout import Axes, matrix_leaf
from maxmars.optim.matrix_spec import MatrixSpec

Sum = Callable[[jax.Array], jax.Array]
Step = Callable[[jax.Array, Moments, jax.Array, Sum], tuple[jax.Array, Moments]]


@dataclass(frozen=True, kw_only=True)
class Owners:
    """The devices among which the matrices of a leaf are dealt out."""

    axes: Axes
    """The mesh axes that cut the matrices."""
    sizes: tuple[int, ...]
    """Devices along each."""

    @property
    def count(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where an array lies between steps, and how it gets to the owners and back."""

    shape: tuple[int, ...]
    partition: PartitionSpec
    order: tuple[int, ...]
    """Its axes: those that stack matrices, then the others."""
    stacked: int
    """How many of them stack matrices."""
    cuts: tuple[Axes, ...] | None
    """The owners' axes that cut each axis of a matrix; None where owners hold theirs already."""
    matrix_shape: tuple[int, int]
    """Of a whole matrix."""
    dealt: int | None = None
    """0 or 1 where not matrices are stacked but rows or columns of one."""

    def to_owners(self, x: jax.Array, owners: Owners) -> Float[Array, "stack rows cols"]:
        """From a device's part of the array to the matrices that it owns."""
        x = x.transpose(self.order)
        x = x.reshape(-1, *x.shape[self.stacked :])
        if self.cuts is not None and owners.count > 1:
            count = -(-len(x) // owners.count)
            x = jnp.pad(x, [(0, count * owners.count - len(x))] + [(0, 0)] * (x.ndim - 1))
            x = self._collect(x, owners) if any(self.cuts) else _own(x, count, owners)
        rows, cols = self.matrix_shape
        if self.dealt is None:
            return x.reshape(-1, rows, cols)
        return x.reshape(1, -1, cols) if self.dealt == 0 else x.reshape(1, -1, rows).mT

    def from_owners(
        self, y: Float[Array, "stack rows cols"], owners: Owners, shape: tuple[int, ...]
    ) -> jax.Array:
        """The inverse of `to_owners`; `shape` is that of the device's part."""
        ordered = [shape[axis] for axis in self.order]
        stack, inner = ordered[: self.stacked], ordered[self.stacked :]
        y = y.mT if self.dealt == 1 else y
        if self.cuts is None or owners.count == 1:
            y = y.reshape(-1, *inner)
        elif any(self.cuts):
            y = self._distribute(y, owners, inner)
        else:
            y = jax.lax.all_gather(y.reshape(-1, *inner), owners.axes, tiled=True)
        return y[: math.prod(stack)].reshape(ordered).transpose(np.argsort(self.order))

    def _collect(self, x: jax.Array, owners: Owners) -> jax.Array:
        """Pieces of all matrices [owners * count, ...] to own matrices [count, ...]."""
        inner = x.shape[1:]
        x = x.reshape(owners.count, -1, *inner)
        x = jax.lax.all_to_all(x, owners.axes, split_axis=0, concat_axis=0)
        x = x.reshape(*owners.sizes, *x.shape[1:]).transpose(self._joined(owners))
        pieces = [math.prod(self._pieces(i, owners)) for i in range(len(inner))]
        return x.reshape(-1, *(n * size for n, size in zip(pieces, inner, strict=True)))

    def _distribute(self, y: jax.Array, owners: Owners, inner: list[int]) -> jax.Array:
        """The inverse of `_collect`; `inner` is the shape of a piece."""
        apart = [n for i, size in enumerate(inner) for n in (*self._pieces(i, owners), size)]
        y = y.reshape(-1, *apart).transpose(np.argsort(self._joined(owners)))
        y = y.reshape(owners.count, -1, *inner)
        y = jax.lax.all_to_all(y, owners.axes, split_axis=0, concat_axis=0)
        return y.reshape(-1, *inner)

    def _pieces(self, axis: int, owners: Owners) -> list[int]:
        """Numbers of pieces of an axis of a matrix, for each mesh axis that cuts it."""
        assert self.cuts is not None
        return [owners.sizes[owners.axes.index(name)] for name in self.cuts[axis]]

    def _joined(self, owners: Owners) -> list[int]:
        """Transposition of [*owners, count, *piece] that puts pieces side by side."""
        assert self.cuts is not None
        joined, first = [len(owners.axes)], len(owners.axes) + 1
        for i, names in enumerate(self.cuts):
            joined += [*(owners.axes.index(name) for name in names), first + i]
        return joined


def _is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    return all(axis_type == AxisType.Explicit for axis_type in mesh.axis_types)


def _own(x: jax.Array, count: int, owners: Owners) -> jax.Array:
    """Own matrices [count, ...] of copies of all of them."""
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(owners.axes) * count, count)


@dataclass(frozen=True, kw_only=True)
class SoapLayout:
    """A leaf of matrices and its state, on a mesh or (None) on one device."""

    mesh: Mesh | AbstractMesh | None
    owners: Owners
    grads: Home
    """Of gradients and updates."""
    moments: Moments
    """The `Home` of each array of the state; None as there."""
    sum_axes: Axes
    """Mesh axes over which Gram matrices are summed up."""

    @property
    def shardings(self) -> Moments:
        """The sharding of each array of the state; None as there, and without a mesh."""
        if self.mesh is None:
            return jax.tree.map(lambda _: None, self.moments)
        return jax.tree.map(lambda home: NamedSharding(self.mesh, home.partition), self.moments)

    def run(
        self, step: Step, grads: jax.Array, moments: Moments, count: jax.Array
    ) -> tuple[jax.Array, Moments]:
        """`step` on whole matrices [stack, rows, cols], each by its owner.

        Args:
          step: function of gradients, moments, count and of how to sum up Gram matrices.
          grads: the leaf's gradient.
          moments: its state.
          count: what `step` gets.

        Returns:
          The update and the new state, each in its partition.
        """
        homes = [self.grads, *jax.tree.leaves(self.moments)]
        arrays, treedef = jax.tree.flatten((grads, moments))

        def local(count: jax.Array, *parts: jax.Array) -> list[jax.Array]:
            owned = [h.to_owners(x, self.owners) for h, x in zip(homes, parts, strict=True)]
            own_grads, own_moments = jax.tree.unflatten(treedef, owned)
            result = step(own_grads, own_moments, count, self._sum)
            return [
                home.from_owners(y, self.owners, x.shape)
                for home, y, x in zip(homes, jax.tree.leaves(result), parts, strict=True)
            ]

        if self.mesh is None:
            return jax.tree.unflatten(treedef, local(count, *arrays))
        partitions = [home.partition for home in homes]
        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), *partitions),
            out_specs=partitions,
            check_vma=False,  # it cannot see that copies stay equal
        )
        if not _is_explicit(self.mesh):
            return jax.tree.unflatten(treedef, mapped(count, *arrays))
        # There inputs must have these very partitions, and so must what is added to the results.
        shardings = [NamedSharding(self.mesh, partition) for partition in partitions]
        placed = [reshard(x, sharding) for x, sharding in zip(arrays, shardings, strict=True)]
        results = zip(mapped(count, *placed), arrays, strict=True)
        return jax.tree.unflatten(treedef, [reshard(y, jax.typeof(x).sharding) for y, x in results])

    def zeros(self, home: Home, dtype: Any) -> jax.Array:
        """An array of the state, where it belongs."""
        if self.mesh is None:
            return jnp.zeros(home.shape, dtype)
        sharding = NamedSharding(self.mesh, home.partition)
        if _is_explicit(self.mesh):
            return reshard(jnp.zeros(home.shape, dtype), sharding)
        if isinstance(self.mesh, AbstractMesh):
            return jnp.zeros(home.shape, dtype)  # nothing is placed
        # Outside of jit the first places it, inside of jit the second.
        x = jnp.zeros(home.shape, dtype, device=sharding)
        return jax.lax.with_sharding_constraint(x, sharding)

    def _sum(self, gram: jax.Array) -> jax.Array:
        return jax.lax.psum(gram, self.sum_axes) if self.sum_axes else gram


def soap_layout(
    path: Any,
    leaf: Any,
    spec: MatrixSpec,
    sides: tuple[bool, bool],
    mesh: Mesh | AbstractMesh | None,
) -> SoapLayout:
    """The layout of one leaf.

    Args:
      path: its key path, for messages.
      leaf: an array, a tracer or a `jax.ShapeDtypeStruct`.
      spec: its matrices. Where it has no `partition`, that of the leaf's sharding is taken.
      sides: whether rows and columns are preconditioned; one of them at least.
      mesh: the mesh, or None for one device.

    Raises:
      ValueError: the partition is missing, names an axis that the mesh lacks, or does not divide
        the leaf.
    """
    spec = replace(spec, split=())
    sizes = {} if mesh is None else dict(mesh.shape)
    known = matrix_leaf(0, path, leaf, spec, mesh, tuple(sizes))
    entries = [*known.partition, *[None] * (spec.ndim - len(known.partition))]
    cuts = [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]
    # A lone matrix with one side: the other side's rows are independent.
    dealt = None if spec.batch or all(sides) else sides.index(False)
    stack = spec.batch if dealt is None else (spec.rows, spec.cols)[dealt]
    inner = tuple(axis for axis in spec.inner if axis not in stack)
    axes = tuple(name for axis in inner for name in cuts[axis])
    owners = Owners(axes=axes, sizes=tuple(sizes[name] for name in axes))
    height = math.prod(known.shape[axis] for axis in spec.rows)
    width = math.prod(known.shape[axis] for axis in spec.cols)
    grads = Home(
        shape=known.shape,
        partition=known.partition,
        order=(*stack, *inner),
        stacked=len(stack),
        cuts=tuple(cuts[axis] for axis in inner),
        matrix_shape=(height, width),
        dealt=dealt,
    )
    owned = len(stack) == 1 and known.local_shape[stack[0]] % owners.count == 0
    moved = [(*c, *axes) if axis in stack else () for axis, c in enumerate(cuts)]
    moment = replace(grads, partition=_partition(moved), cuts=None) if owned else grads
    batch = [tuple(cuts[axis]) for axis in spec.batch]
    batch = [(*batch[0], *axes)] if owned and batch else batch

    def square(side: int) -> Home | None:
        if not sides[side]:
            return None
        shape = (*(known.shape[axis] for axis in spec.batch), *[grads.matrix_shape[side]] * 2)
        return _square(shape, batch, None if owned or dealt is not None else owners)

    summed = tuple(name for names in cuts for name in names) if dealt is not None else ()
    homes = Moments(moment, moment, square(0), square(1), square(0), square(1))
    return SoapLayout(mesh=mesh, owners=owners, grads=grads, moments=homes, sum_axes=summed)


def _square(shape: tuple[int, ...], batch: list[Axes], owners: Owners | None) -> Home:
    """The home of a stack of Gram matrices or bases, cut over `owners`, or whole."""
    cuts, side = None, shape[-1]
    if owners is not None:
        cuts = owners.axes[:1], owners.axes[1:]
        if side % math.prod(owners.sizes[:1]) or side % math.prod(owners.sizes[1:]):
            cuts = (), ()
    return Home(
        shape=shape,
        partition=_partition([*batch, *(cuts or ((), ()))]),
        order=tuple(range(len(shape))),
        stacked=len(batch),
        cuts=cuts,
        matrix_shape=(side, side),
    )


def _partition(cuts: list[Axes]) -> PartitionSpec:
    return PartitionSpec(*(names or None for names in cuts))
