"""Which device orthogonalises which matrix: a static plan, from shapes, specs and the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from maxmars.optim.matrix_layout import Axes, MatrixLeaf, Roles, matrix_leaf
from maxmars.optim.matrix_spec import resolve_specs

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
        if spec.is_matrix
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
