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

A mesh axis plays one of three roles for a leaf. It cuts its matrices into pieces (then the pieces
are exchanged over it), or it cuts the stack of matrices (each part is then planned alike, and
nothing is exchanged over it), or it holds copies (each copy then takes its share of the stack, and
the results are gathered over it).

The file goes from a leaf's layout over the static plan to the exchange itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from maxmars.optim._matrices import MatrixSpec, resolve_specs
from maxmars.optim._newton_schulz import Coefficients, newton_schulz, triples_of
from maxmars.optim._rules import Scalar, Tree, check_choice, check_positive

# --- how the matrices of a leaf lie on a mesh ----------------------------------------------------


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

    def factor(self, scale: str | None) -> float:
        """What `scale` multiplies an orthogonal matrix of this shape by, padding left out."""
        inputs, outputs = self.inputs, self.outputs - self.spec.padding
        if scale == "spectral":
            return math.sqrt(max(1.0, outputs / inputs))
        return 1.0 if scale is None else 0.2 * math.sqrt(max(inputs, outputs))

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
    if spec.partition is not None:
        return spec.partition
    traced = isinstance(leaf, jax.core.Tracer)
    sharding = getattr(jax.typeof(leaf) if traced else leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    # The type of a traced array knows its partition over Explicit axes only.
    if traced and any(t != AxisType.Explicit for t in sharding.mesh.axis_types):
        return None
    return sharding.spec


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


# --- which device orthogonalises which matrix: a static plan -------------------------------------


DEFAULT_OWNERSHIP_AXES = ("fsdp", "tensor")
_STEPS = 5  # of the FLOPs in the printed table
_ITEMSIZE = 2  # bytes of a bfloat16, in which the matrices travel
# A matrix may fill a slot up to so many times its own width: D x D one of D x 4D, but nothing of a
# model's interior that of an embedding table.
_MAX_WIDENING = 4


@dataclass(frozen=True, kw_only=True)
class Member:
    """Matrices `start` to `stop` of a leaf's local stack."""

    leaf: int
    """Place in `OrthogonalizationPlan.leaves`."""
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Group:
    """Matrices that travel together and are iterated on together."""

    rows: int
    cols: int
    """Shape of a slot, rows <= cols; narrower matrices get zero columns."""
    roles: Roles
    pieces: int
    """Devices that one matrix is cut over, which are also the owners to whom its pieces go."""
    copies: int
    """Devices that hold the same pieces."""
    parts: int
    """Parts of the stack that mesh axes cut; the numbers here are those of one part."""
    per_owner: int
    """Slots on each device."""
    members: tuple[Member, ...]

    @property
    def exchange_axes(self) -> Axes:
        """Mesh axes of the all-to-all, rows' first."""
        return self.roles.rows + self.roles.cols

    @property
    def owners(self) -> int:
        """Devices that iterate on different matrices."""
        return self.pieces * self.copies * self.parts

    @property
    def slots(self) -> int:
        """Matrices of one part of the stack, zero padding included."""
        return self.per_owner * self.pieces * self.copies

    @property
    def matrices(self) -> int:
        """Matrices of all parts of the stack, without padding."""
        return sum(member.count for member in self.members) * self.parts

    @property
    def padded_elements(self) -> int:
        """Elements of all slots on all owners."""
        return self.slots * self.parts * self.rows * self.cols

    @property
    def all_to_all_elements(self) -> int:
        """Elements that both transfers leave on a device."""
        return 2 * self.per_owner * self.rows * self.cols if self.pieces > 1 else 0

    @property
    def all_gather_elements(self) -> int:
        """Elements that the gathering of results over copies leaves on a device."""
        gathered = self.slots * self.rows * self.cols // self.pieces
        return gathered if self.copies > 1 else 0

    def flops(self, steps: int = _STEPS) -> int:
        """Multiplications and additions on one device."""
        return steps * self.per_owner * 2 * self.rows**2 * (2 * self.cols + self.rows)


@dataclass(frozen=True, kw_only=True)
class OrthogonalizationPlan:
    """What `orthogonalize` does; hashable, and printable as a table."""

    num_leaves: int
    """Leaves of the tree, vectors included."""
    leaves: tuple[MatrixLeaf, ...]
    """Those that hold matrices."""
    groups: tuple[Group, ...]
    """Largest slots first."""
    mesh: Mesh | AbstractMesh | None
    max_batch_bytes: int

    @property
    def elements(self) -> int:
        """Elements of all matrices, P."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves)

    @property
    def padded_elements(self) -> int:
        """Elements of all slots, P_padded."""
        return sum(group.padded_elements for group in self.groups)

    def transfer_bytes(self, itemsize: int = _ITEMSIZE) -> int:
        """Bytes that the collectives of one step leave on a device."""
        elements = sum(g.all_to_all_elements + g.all_gather_elements for g in self.groups)
        return itemsize * elements

    def __str__(self) -> str:
        """A table of the groups, with bytes in bfloat16 and FLOPs of five steps, per device."""
        header = ("group", "matrices", "owners", "slots", "exchange", "MB", "GFLOP", "members")
        rows = [header, *(self._row(group) for group in self.groups)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header) - 1)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ]
        return "\n".join([*lines, self._summary()])

    def _row(self, group: Group) -> tuple[str, ...]:
        elements = group.all_to_all_elements + group.all_gather_elements
        names = ", ".join(f"{self.leaves[m.leaf].name}[{m.count}]" for m in group.members)
        return (
            f"{group.rows} x {group.cols}",
            str(group.matrices),
            str(group.owners),
            str(group.slots * group.parts),
            " ".join(group.exchange_axes) or "-",
            f"{_ITEMSIZE * elements / 1e6:.1f}",
            f"{group.flops() / 1e9:.1f}",
            names,
        )

    def _summary(self) -> str:
        padding = self.padded_elements / max(self.elements, 1)
        flops = sum(group.flops() for group in self.groups)
        return (
            f"P = {self.elements:,} elements, "
            f"P_padded = {self.padded_elements:,} ({padding:.3f} P)\n"
            f"per device and step: {self.transfer_bytes() / 1e6:,.1f} MB in bfloat16, "
            f"{flops:.3g} FLOPs in {_STEPS} iterations"
        )


def plan_orthogonalization(
    params: Any,
    matrix_specs: Any = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    ownership_axes: Sequence[str] | None = None,
    max_batch_bytes: int = 2**30,
) -> OrthogonalizationPlan:
    """Assign the matrices of `params` to owners.

    Args:
      params: arrays, tracers or `jax.ShapeDtypeStruct`s; only shapes matter, and the shardings of
        leaves whose spec has no `partition`.
      matrix_specs: `MatrixSpec`s as a pytree prefix, see `resolve_specs`.
      mesh: the mesh that the parameters lie on; None for one device.
      ownership_axes: mesh axes over which matrices are distributed; default: those of "fsdp" and
        "tensor" that the mesh has. Along any other axis every slice repeats the work, which is
        right over a slow network; add "data" where gathering the updates over it takes less time
        than iterating on all of them.
      max_batch_bytes: bound on the temporaries of the iteration. What exceeds it is iterated on in
        several rounds, of one matrix at least.

    Raises:
      ValueError: a partition is missing, names an axis that is not one of ownership, or does not
        divide its leaf.
    """
    if max_batch_bytes <= 0:
        raise ValueError(f"max_batch_bytes={max_batch_bytes} must be positive.")
    owned = _ownership_axes(mesh, ownership_axes)
    paths = jax.tree_util.tree_leaves_with_path(params)
    specs = jax.tree.leaves(resolve_specs(matrix_specs, params))
    leaves = tuple(
        matrix_leaf(index, path, leaf, spec, mesh, owned)
        for index, ((path, leaf), spec) in enumerate(zip(paths, specs, strict=True))
        if spec.is_matrix and math.prod(leaf.shape)
    )
    return OrthogonalizationPlan(
        num_leaves=len(paths),
        leaves=leaves,
        groups=_groups(leaves, mesh),
        mesh=mesh,
        max_batch_bytes=max_batch_bytes,
    )


def _ownership_axes(mesh: Mesh | AbstractMesh | None, axes: Sequence[str] | None) -> Axes:
    names = () if mesh is None else mesh.axis_names
    for axis in axes or ():
        if axis not in names:
            raise ValueError(
                f"ownership_axes={tuple(axes or ())} names {axis!r}, which the mesh does not have; "
                f"it has {', '.join(map(str, names)) or 'no axes'}."
            )
    return tuple(
        axis for axis in names if axis in (DEFAULT_OWNERSHIP_AXES if axes is None else axes)
    )


def _groups(leaves: Sequence[MatrixLeaf], mesh: Mesh | AbstractMesh | None) -> tuple[Group, ...]:
    """The cheaper of two assignments: with free slots filled by narrower matrices, or without."""
    apart, filled = (_assign(leaves, mesh, fill) for fill in (False, True))

    def cost(groups: Sequence[Group]) -> int:
        return sum(group.padded_elements for group in groups)

    return filled if cost(filled) < cost(apart) else apart


def _assign(
    leaves: Sequence[MatrixLeaf], mesh: Mesh | AbstractMesh | None, fill: bool
) -> tuple[Group, ...]:
    queues: dict[tuple[tuple[int, int], Roles], list[Member]] = {}
    for place, leaf in enumerate(leaves):
        whole = Member(leaf=place, start=0, stop=leaf.stack)
        queues.setdefault((leaf.matrix_shape, leaf.roles), []).append(whole)
    sizes: dict[str, int] = {} if mesh is None else dict(mesh.shape)
    order = sorted(queues, key=lambda key: math.prod(key[0]), reverse=True)
    groups = []
    for position, (shape, roles) in enumerate(order):
        members = queues[shape, roles]
        if not members:
            continue  # all of them fill slots of larger groups
        group = _group(shape, roles, members, sizes)
        free = group.slots - sum(member.count for member in members)
        for other in order[position + 1 :] if fill else ():
            if _fits(other, shape, roles):
                taken, queues[other] = _take(queues[other], free)
                members = [*members, *taken]
                free -= sum(member.count for member in taken)
        groups.append(replace(group, members=tuple(members)))
    return tuple(groups)


def _group(
    shape: tuple[int, int], roles: Roles, members: Sequence[Member], sizes: dict[str, int]
) -> Group:
    """A group with as few slots as its members need."""
    pieces, copies = _devices(roles.rows + roles.cols, sizes), _devices(roles.copy, sizes)
    count = sum(member.count for member in members)
    return Group(
        rows=shape[0],
        cols=shape[1],
        roles=roles,
        pieces=pieces,
        copies=copies,
        parts=_devices(roles.stack, sizes),
        per_owner=-(-count // (pieces * copies)),
        members=tuple(members),
    )


def _fits(other: tuple[tuple[int, int], Roles], shape: tuple[int, int], roles: Roles) -> bool:
    """Whether other matrices may fill slots of this shape."""
    (rows, cols), other_roles = other
    return (rows, other_roles) == (shape[0], roles) and shape[1] <= _MAX_WIDENING * cols


def _take(queue: list[Member], count: int) -> tuple[list[Member], list[Member]]:
    """The first `count` matrices of a queue, and the rest."""
    taken, rest = [], []
    for member in queue:
        split = member.start + min(count, member.count)
        if split > member.start:
            taken.append(Member(leaf=member.leaf, start=member.start, stop=split))
        if split < member.stop:
            rest.append(Member(leaf=member.leaf, start=split, stop=member.stop))
        count -= split - member.start
    return taken, rest


def _devices(axes: Axes, sizes: dict[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


# --- the exchange and the iterations -------------------------------------------------------------


Iteration = Callable[[jax.Array], jax.Array]
SCALES = ("spectral", "rms", None)


class ScaleByOrthogonalizationState(NamedTuple):
    """State of `scale_by_orthogonalization` where it measures."""

    count: jax.Array
    """Number of updates, int32."""
    orthogonality_error: jax.Array
    """The last one measured, see `orthogonality_error`."""


def scale_by_orthogonalization(
    matrix_specs: Any = None,
    *,
    steps: int | jax.Array = 5,
    coefficients: Coefficients = "keller",
    eps: Scalar = 1e-7,
    dtype: Any = "bfloat16",
    scale: str | None = "spectral",
    measure_every: int | jax.Array | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    ownership_axes: Sequence[str] | None = None,
) -> optax.GradientTransformation:
    """`orthogonalize` as an optax transformation; vectors pass as they are.

    Args:
      matrix_specs: `MatrixSpec`s, see `resolve_specs`.
      steps: see `newton_schulz`.
      coefficients: see `newton_schulz`.
      eps: see `newton_schulz`.
      dtype: see `orthogonalize`.
      scale: see `orthogonalize`.
      measure_every: measure `orthogonality_error` in the first of so many updates, into the state;
        None never does, and keeps no state.
      mesh: see `plan_orthogonalization`.
      ownership_axes: see `plan_orthogonalization`.

    Raises:
      ValueError: an argument is unknown or out of range, or a partition does not fit the mesh.
    """
    check_choice("ns_scale", scale, SCALES)
    check_positive("ns_steps", steps)
    check_positive("ns_eps", eps)
    check_positive("orthogonality_every", measure_every)
    triples_of(coefficients, steps)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"ns_dtype={dtype} must be a floating-point type, such as bfloat16.")

    def init_fn(params: Tree) -> Any:
        resolve_specs(matrix_specs, params)  # raises here rather than in the first step
        if measure_every is None:
            return optax.EmptyState()
        return ScaleByOrthogonalizationState(jnp.zeros([], jnp.int32), jnp.zeros([]))

    def update_fn(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        del params
        plan = plan_orthogonalization(
            updates, matrix_specs, mesh=mesh, ownership_axes=ownership_axes
        )
        directions = orthogonalize(
            updates,
            plan,
            steps=steps,
            coefficients=coefficients,
            eps=eps,
            dtype=dtype,
            scale=scale,
        )
        if measure_every is None:
            return directions, state
        error = jax.lax.cond(
            state.count % measure_every == 0,
            lambda directions: orthogonality_error(directions, plan, scale=scale),
            lambda _: state.orthogonality_error,
            directions,
        )
        count = jnp.asarray(optax.safe_increment(state.count))
        return directions, ScaleByOrthogonalizationState(count, error)

    return optax.GradientTransformation(init_fn, update_fn)


def orthogonalize(
    updates: Any,
    plan: OrthogonalizationPlan,
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
    check_choice("scale", scale, SCALES)
    factors = [leaf.factor(scale) for leaf in plan.leaves]
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
    factors = [leaf.factor(scale) for leaf in plan.leaves]
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
