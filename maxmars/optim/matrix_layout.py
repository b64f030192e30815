"""How the matrices of a leaf lie on a mesh.

A mesh axis plays one of three roles for a leaf. It cuts its matrices into pieces (then the pieces
are exchanged over it), or it cuts the stack of matrices (each part is then planned alike, and
nothing is exchanged over it), or it holds copies (each copy then takes its share of the stack, and
the results are gathered over it).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from maxmars.optim.matrix_spec import MatrixSpec

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What each ownership axis of more than one device does to a leaf, matrices turned over."""

    rows: Axes
    """Cut the rows."""
    cols: Axes
    """Cut the columns."""
    stack: Axes
    """Cut the stack of matrices."""
    copy: Axes
    """Hold copies."""


@dataclass(frozen=True, kw_only=True)
class MatrixLeaf:
    """A leaf that holds matrices, as one device sees it."""

    name: str
    """Its key path, for people."""
    index: int
    """Its place among all leaves."""
    spec: MatrixSpec
    shape: tuple[int, ...]
    partition: PartitionSpec
    """Without mesh axes of size one."""
    local_shape: tuple[int, ...]
    transposed: bool
    """Whether its matrices are turned over, so that rows <= cols."""
    roles: Roles

    @property
    def inputs(self) -> int:
        """Input width of one block."""
        return math.prod(self.shape[axis] for axis in self.spec.block_rows)

    @property
    def outputs(self) -> int:
        """Output width of one block."""
        return math.prod(self.shape[axis] for axis in self.spec.block_cols)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of one block, after turning over."""
        return (self.outputs, self.inputs) if self.transposed else (self.inputs, self.outputs)

    @property
    def stack(self) -> int:
        """Number of blocks that a device holds pieces of."""
        return math.prod(self.local_shape[axis] for axis in self.spec.stack)

    @property
    def permutation(self) -> tuple[int, ...]:
        """Transposition to the axes of the stack, of the rows and of the columns."""
        rows, cols = self.spec.block_rows, self.spec.block_cols
        return self.spec.stack + (cols + rows if self.transposed else rows + cols)


def matrix_leaf(
    index: int,
    path: Any,
    leaf: Any,
    spec: MatrixSpec,
    mesh: Mesh | AbstractMesh | None,
    owned: Axes,
) -> MatrixLeaf:
    """The layout of one leaf; `owned` are the ownership axes, in the mesh's order.

    Raises:
      ValueError: see `plan_orthogonalization`.
    """
    name, shape = jax.tree_util.keystr(path, simple=True, separator="."), tuple(leaf.shape)
    sizes: dict[str, int] = {} if mesh is None else dict(mesh.shape)
    partition = _known_partition(leaf, spec)
    cuts = ((),) * spec.ndim
    if mesh is not None:
        cuts = _cuts(name, partition, spec.ndim, sizes, owned)
    parts = [math.prod(sizes[axis] for axis in axes) for axes in cuts]
    if any(size % count for size, count in zip(shape, parts, strict=True)):
        raise ValueError(
            f"{name} of shape {shape} is partitioned into {tuple(parts)} parts, which do not "
            "divide it; take a mesh or a partition that does."
        )

    def cutting(axes: Sequence[int]) -> Axes:
        found = {mesh_axis for axis in axes for mesh_axis in cuts[axis]}
        return tuple(axis for axis in owned if axis in found)

    row_axes, col_axes = cutting(spec.block_rows), cutting(spec.block_cols)
    height = math.prod(shape[axis] for axis in spec.block_rows)
    width = math.prod(shape[axis] for axis in spec.block_cols)
    transposed = height > width or (height == width and _turn_square(spec, partition))
    used = (*row_axes, *col_axes, *cutting(spec.stack))
    roles = Roles(
        rows=col_axes if transposed else row_axes,
        cols=row_axes if transposed else col_axes,
        stack=cutting(spec.stack),
        copy=tuple(axis for axis in owned if axis not in used and sizes[axis] > 1),
    )
    return MatrixLeaf(
        name=name,
        index=index,
        spec=spec,
        shape=shape,
        partition=PartitionSpec(*(axes or None for axes in cuts)),
        local_shape=tuple(size // count for size, count in zip(shape, parts, strict=True)),
        transposed=transposed,
        roles=roles,
    )


def _turn_square(spec: MatrixSpec, partition: PartitionSpec | None) -> bool:
    """Whether to turn a square matrix over, so that its cuts are those of other matrices: an
    attention output [heads, embed] then is cut like an MLP input [embed, mlp].

    It does not depend on the mesh, which therefore changes no rounding.
    """
    entries = _entries(partition or PartitionSpec(), spec.ndim)

    def names(axes: Sequence[int]) -> list[str]:
        return sorted(itertools.chain(*(entries[axis] for axis in axes)))

    rows, cols = names(spec.block_rows), names(spec.block_cols)
    return bool(cols) and (not rows or cols < rows)


def _known_partition(leaf: Any, spec: MatrixSpec) -> PartitionSpec | None:
    if spec.partition is not None or isinstance(leaf, jax.core.Tracer):
        return spec.partition
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def _cuts(
    name: str, partition: PartitionSpec | None, ndim: int, sizes: dict[str, int], owned: Axes
) -> tuple[Axes, ...]:
    """For each axis of a leaf, the mesh axes of more than one device that cut it."""
    if partition is None:
        raise ValueError(
            f"{name} is a matrix on a mesh without a known partition; give its "
            "MatrixSpec(partition=...), PartitionSpec() for a copy on every device."
        )
    cuts = _entries(partition, ndim)
    for axis in itertools.chain(*cuts):
        if axis not in sizes:
            raise ValueError(
                f"the partition {partition} of {name} names {axis!r}, which the mesh does not "
                f"have; it has {', '.join(sizes)}."
            )
        if axis not in owned and sizes[axis] > 1:
            raise ValueError(
                f"the partition {partition} of {name} names {axis!r}, which is not an ownership "
                f"axis; give ownership_axes={(*owned, axis)}."
            )
    return tuple(tuple(axis for axis in axes if sizes[axis] > 1) for axes in cuts)


def _entries(partition: PartitionSpec, ndim: int) -> tuple[Axes, ...]:
    """The mesh axes of each axis of an array."""
    entries = [*partition, *[None] * (ndim - len(partition))]
    return tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in entries)


def to_stack(x: Float[Array, ...], leaf: MatrixLeaf) -> Float[Array, "stack rows cols"]:
    """The (pieces of) matrices of a leaf, turned over so that whole ones have rows <= cols."""
    ordered = x.transpose(leaf.permutation)
    stacked = len(leaf.spec.stack)
    heights = len(leaf.spec.block_cols if leaf.transposed else leaf.spec.block_rows)
    rows = math.prod(ordered.shape[stacked : stacked + heights])
    cols = math.prod(ordered.shape[stacked + heights :])
    return ordered.reshape(math.prod(ordered.shape[:stacked]), rows, cols)


def from_stack(y: Float[Array, "stack rows cols"], leaf: MatrixLeaf) -> Float[Array, ...]:
    """The inverse of `to_stack`."""
    ordered = y.reshape([leaf.local_shape[axis] for axis in leaf.permutation])
    return ordered.transpose(np.argsort(leaf.permutation))
