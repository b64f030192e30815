r"""SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner.

One step of a matrix, with gradient G_t [rows, cols]:

    G'_t = Q_Lᵀ G_t Q_R                                 into the eigenbases
    m_t = β₁ m_{t−1} + (1 − β₁) G'_t
    v_t = β₂ v_{t−1} + (1 − β₂) G'_t²
    U_t = Q_L ( (m_t / (1 − β₁ᵗ)) √(1 − β₂ᵗ) / (√v_t + ε) ) Q_Rᵀ
    P_t = P_{t−1} − η (U_t + λ P_{t−1})
    L_t = β L_{t−1} + (1 − β) G_t G_tᵀ,    R_t = β R_{t−1} + (1 − β) G_tᵀ G_t

Every k steps follows one power iteration of each basis: the columns of Q are sorted by the
estimated eigenvalues diag(Qᵀ L Q), largest first, v along with them; then Q ← qr(L Q), and m is
rotated into the new basis. A side longer than `max_precondition_dim` keeps the identity; with both
it is Adam.

Where this follows the official code: the first gradient only sets L and R and their eigenvectors,
and changes neither parameters, m nor v (t counts from the second gradient on); L and R are updated
after the step, which so never uses the present gradient's own basis; ε is not bias-corrected; m is
kept in the eigenbases. Where it does not: each axis of a tensor was a side of its own there, here
it is the two of its `MatrixSpec`; vectors take AdamW from the first gradient on; the decay reads
the parameters before the step.

Where a Gram matrix has equal eigenvalues (a first G with fewer columns than rows leaves many zeros)
any basis of their space is right. Which one comes out depends on rounding, and so do the updates.

On a mesh, a matrix cannot be preconditioned in pieces, so whole matrices have owners. For each
leaf, the mesh axes that cut its matrices deal them out: every device sends its pieces of the
gradients to the owners in one joint all-to-all, owners do everything else for whole matrices, and
the pieces of the update go back in one all-to-all. Axes that cut the stack of matrices need no
transfers, and along axes that hold copies every slice repeats the work.

Where the owners divide the stack, the state stays with them: it is cut along the stack, and the two
all-to-alls are all there is. Where they do not, it is cut like the leaf (a Gram matrix along its
rows and columns) and travels too, as padding a checkpoint would tie it to the mesh. A Gram matrix
whose side the axes do not divide is copied.

A lone matrix with one preconditioned side, such as an embedding table, has no single owner: the
other side's rows are dealt out like matrices, and their Gram matrices summed up. That Gram matrix
and its basis are copied.

The file goes from the step of a stack of matrices over its layout on a mesh to the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard
from jaxtyping import Array, Float, Int

from maxmars.optim._decompositions import eigenvectors, orthonormal_columns
from maxmars.optim._matrices import MatrixSpec, resolve_specs
from maxmars.optim._orthogonalize import Axes, matrix_leaf
from maxmars.optim._rules import (
    Scalar,
    ScalarOrSchedule,
    Tree,
    bias_correction,
    by_kind,
    check_fraction,
    check_positive,
    in_float32,
    stepped,
    vector_rate,
    wide_dtype,
)

# --- one step of a stack of matrices: Adam in the eigenbases of their Gram matrices --------------


Grads = Float[Array, "*stack_rows_cols"]  # of another shape where no side is preconditioned
Square = Float[Array, "stack side side"]


class Moments(NamedTuple):
    """What SOAP remembers of a stack of matrices, or what belongs to each of it: arrays, homes,
    shardings. None for a side that keeps the identity."""

    mu: Any
    """First moment in the eigenbases, [stack, rows, cols]."""
    nu: Any
    """Second moment in the eigenbases, [stack, rows, cols]."""
    row_gram: Any
    """Moving average of G Gᵀ, [stack, rows, rows]."""
    col_gram: Any
    """Moving average of Gᵀ G, [stack, cols, cols]."""
    row_basis: Any
    """Eigenvectors of `row_gram` in columns, eigenvalues falling."""
    col_basis: Any
    """Eigenvectors of `col_gram` in columns, eigenvalues falling."""


@dataclass(frozen=True, kw_only=True)
class SoapRule:
    """The hyperparameters of SOAP, see `scale_by_soap`."""

    b1: Scalar
    b2: Scalar
    shampoo_beta: Scalar
    eps: Scalar
    precondition_frequency: int | jax.Array


def soap_step(
    grads: Grads,
    moments: Moments,
    count: Int[Array, ""],
    rule: SoapRule,
    sum_grams: Callable[[jax.Array], jax.Array],
) -> tuple[Grads, Moments]:
    """The direction of every matrix, and what to remember.

    Args:
      grads: gradients, in float32 or float64.
      moments: all in the gradients' dtype.
      count: number of earlier steps.
      rule: the hyperparameters.
      sum_grams: sums Gram matrices over the devices that a matrix is dealt out to.
    """
    moments, directions = _adam(grads, moments, count, rule)
    beta = rule.shampoo_beta
    row_gram, col_gram = moments.row_gram, moments.col_gram
    if row_gram is not None:
        row_gram = beta * row_gram + (1 - beta) * sum_grams(_matmul(grads, grads.mT))
    if col_gram is not None:
        col_gram = beta * col_gram + (1 - beta) * sum_grams(_matmul(grads.mT, grads))
    moments = moments._replace(row_gram=row_gram, col_gram=col_gram)
    if row_gram is not None or col_gram is not None:
        due = count % rule.precondition_frequency == 0
        branch = jnp.where(count == 0, 1, jnp.where(due, 2, 0))
        moments = jax.lax.switch(branch, (lambda m: m, _first_bases, _next_bases), moments)
    return directions, moments


def _adam(
    grads: Grads, moments: Moments, count: Int[Array, ""], rule: SoapRule
) -> tuple[Moments, Grads]:
    """Adam in the eigenbases; nothing in the first step, which has none yet."""
    projected = _to_bases(grads, moments)
    mu = rule.b1 * moments.mu + (1 - rule.b1) * projected
    nu = rule.b2 * moments.nu + (1 - rule.b2) * jnp.square(projected)
    updates = jnp.maximum(count, 1)  # the first step is not one of Adam's
    correction = jnp.sqrt(bias_correction(rule.b2, updates)) / bias_correction(rule.b1, updates)
    scaled = correction.astype(mu.dtype) * mu / (jnp.sqrt(nu) + rule.eps)
    directions = _from_bases(scaled, moments)
    first = count == 0
    mu, nu = jnp.where(first, moments.mu, mu), jnp.where(first, moments.nu, nu)
    return moments._replace(mu=mu, nu=nu), jnp.where(first, 0, directions)


def _to_bases(x: Grads, moments: Moments) -> Grads:
    if moments.row_basis is not None:
        x = _matmul(moments.row_basis.mT, x)
    return x if moments.col_basis is None else _matmul(x, moments.col_basis)


def _from_bases(x: Grads, moments: Moments) -> Grads:
    if moments.row_basis is not None:
        x = _matmul(moments.row_basis, x)
    return x if moments.col_basis is None else _matmul(x, moments.col_basis.mT)


def _first_bases(moments: Moments) -> Moments:
    def basis(gram: jax.Array | None) -> jax.Array | None:
        return None if gram is None else eigenvectors(_normalized(gram))

    return moments._replace(row_basis=basis(moments.row_gram), col_basis=basis(moments.col_gram))


def _next_bases(moments: Moments) -> Moments:
    """A power iteration of each basis, and the moments in the new ones."""
    original, nu = _from_bases(moments.mu, moments), moments.nu
    row_basis, col_basis = moments.row_basis, moments.col_basis
    if row_basis is not None:
        row_basis, order = _power_iteration(moments.row_gram, row_basis)
        nu = jnp.take_along_axis(nu, order[:, :, None], axis=1)
    if col_basis is not None:
        col_basis, order = _power_iteration(moments.col_gram, col_basis)
        nu = jnp.take_along_axis(nu, order[:, None, :], axis=2)
    moments = moments._replace(nu=nu, row_basis=row_basis, col_basis=col_basis)
    return moments._replace(mu=_to_bases(original, moments))


def _power_iteration(gram: Square, basis: Square) -> tuple[Square, Int[Array, "stack side"]]:
    """Q of the QR decomposition of gram @ basis, its columns ordered by estimated eigenvalues
    first; and that order of the old columns."""
    image = _matmul(_normalized(gram), basis)
    eigenvalues = jnp.sum(basis * image, axis=-2)
    order = jnp.argsort(eigenvalues, axis=-1, descending=True)
    return orthonormal_columns(jnp.take_along_axis(image, order[:, None, :], axis=-1)), order


def _normalized(gram: Square) -> Square:
    """The same eigenvectors, out of the reach of underflow: of trace one, unless it is zero."""
    trace = jnp.trace(gram, axis1=-2, axis2=-1)[:, None, None]
    return gram / jnp.where(trace > 0, trace, 1)


def _matmul(
    x: Float[Array, "stack rows inner"], y: Float[Array, "stack inner cols"]
) -> Float[Array, "stack rows cols"]:
    # By default an accelerator may multiply float32 in fewer bits, and eigenvectors need them.
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


# --- who preconditions which matrix, and where the state lies on a mesh --------------------------


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


# --- the optimizer -------------------------------------------------------------------------------


MAX_PRECONDITION_DIM = 2048


class ScaleBySoapState(NamedTuple):
    """State of `scale_by_soap`; trees like the parameters.

    The Gram matrices and bases of a parameter are [*batch, side, side] in float32 (float64 of a
    float64 parameter), or None where the side keeps the identity. None of it depends on the mesh
    but the shardings, see `soap_shardings`.
    """

    count: jax.Array
    """Number of updates, the first included, int32."""
    mu: Tree
    """First moment m, in the eigenbases; the parameters' shapes."""
    nu: Tree
    """Second moment v, in the eigenbases; the parameters' shapes and dtypes."""
    row_gram: Tree
    """L, moving average of G Gᵀ."""
    col_gram: Tree
    """R, moving average of Gᵀ G."""
    row_basis: Tree
    """Q_L, eigenvectors in columns."""
    col_basis: Tree
    """Q_R, eigenvectors in columns."""


def scale_by_soap(
    *,
    b1: Scalar = 0.95,
    b2: Scalar = 0.95,
    shampoo_beta: Scalar | None = None,
    eps: Scalar = 1e-8,
    precondition_frequency: int | jax.Array = 10,
    max_precondition_dim: int | None = None,
    mu_dtype: Any = None,
    matrix_specs: Any = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction U that `soap` steps along; the arguments are those of `soap`.

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      shampoo_beta: decay of the Gram matrices, in [0, 1); None is `b2`.
      eps: added to the root of the second moment.
      precondition_frequency: k, steps between two power iterations of the bases.
      max_precondition_dim: longest side of a matrix that is preconditioned; None is 2048.
      mu_dtype: dtype of the first moment; None keeps the parameter's.
      matrix_specs: `MatrixSpec`s as a pytree prefix, see `resolve_specs`. What is a vector takes
        Adam with the same hyperparameters, and nothing in the first step.
      mesh: device mesh of the parameters. `MatrixSpec.partition` then says how each is split, and
        whole matrices are preconditioned by owners.

    Raises:
      ValueError: an argument is out of range, or a partition does not fit the mesh.
    """
    shampoo_beta = b2 if shampoo_beta is None else shampoo_beta
    check_fraction("b1", b1)
    check_fraction("b2", b2)
    check_fraction("shampoo_beta", shampoo_beta)
    check_positive("eps", eps)
    check_positive("precondition_frequency", precondition_frequency)
    check_positive("max_precondition_dim", max_precondition_dim)
    rule = SoapRule(
        b1=b1,
        b2=b2,
        shampoo_beta=shampoo_beta,
        eps=eps,
        precondition_frequency=precondition_frequency,
    )
    limit = MAX_PRECONDITION_DIM if max_precondition_dim is None else max_precondition_dim

    def sides(x: Any, spec: MatrixSpec) -> tuple[bool, bool]:
        if not spec.is_matrix or not x.size:
            return False, False
        rows, cols = (math.prod(x.shape[i] for i in axes) for axes in (spec.rows, spec.cols))
        return rows <= limit, cols <= limit

    def step(
        grads: jax.Array, moments: Moments, count: jax.Array, sum_grams: Sum
    ) -> tuple[jax.Array, Moments]:
        return soap_step(grads, moments, count, rule, sum_grams)

    def zeros(param: Any, layout: SoapLayout | None) -> Moments:
        if layout is None:
            mu, nu = jnp.zeros_like(param, mu_dtype), jnp.zeros_like(param)
            return Moments(mu, nu, None, None, None, None)
        wide = wide_dtype(param.dtype)
        dtypes = Moments(mu_dtype or param.dtype, param.dtype, wide, wide, wide, wide)
        arrays = [
            None if home is None else layout.zeros(home, dtype)
            for home, dtype in zip(layout.moments, dtypes, strict=True)
        ]
        return Moments(*arrays)

    def init_fn(params: Tree) -> ScaleBySoapState:
        leaves, treedef = jax.tree.flatten(params)
        pairs = zip(leaves, _layouts(params, matrix_specs, mesh, sides), strict=True)
        moments = [zeros(param, layout) for param, layout in pairs]
        return _state(jnp.zeros([], jnp.int32), moments, treedef)

    def update_fn(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, ScaleBySoapState]:
        del params
        leaves, treedef = jax.tree.flatten(updates)
        layouts = _layouts(updates, matrix_specs, mesh, sides)
        results = [
            step(g, moments, state.count, lambda gram: gram)
            if layout is None
            else layout.run(step, g, moments, state.count)
            for g, moments, layout in zip(leaves, _moments(state, treedef), layouts, strict=True)
        ]
        directions = jax.tree.unflatten(treedef, [direction for direction, _ in results])
        count = jnp.asarray(optax.safe_increment(state.count))
        return directions, _state(count, [moments for _, moments in results], treedef)

    return in_float32(optax.GradientTransformation(init_fn, update_fn))


def soap(
    learning_rate: ScalarOrSchedule,
    *,
    b1: Scalar = 0.95,
    b2: Scalar = 0.95,
    shampoo_beta: Scalar | None = None,
    eps: Scalar = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Any = None,
    precondition_frequency: int | jax.Array = 10,
    max_precondition_dim: int | None = None,
    mu_dtype: Any = None,
    vector_learning_rate: ScalarOrSchedule | None = None,
    vector_learning_rate_scale: Scalar | None = None,
    vector_b1: Scalar = 0.9,
    vector_b2: Scalar = 0.95,
    vector_weight_decay: ScalarOrSchedule | None = None,
    matrix_specs: Any = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SOAP on matrices, AdamW on vectors. The defaults of the matrices are the official code's, but
    for `max_precondition_dim` (10,000 there) and `weight_decay` (0.01 there).

    Args:
      learning_rate: η of the matrices, a float, a traced scalar or a schedule.
      b1: decay of the matrices' first moment, in [0, 1).
      b2: decay of the matrices' second moment, in [0, 1).
      shampoo_beta: decay of the Gram matrices, in [0, 1); None is `b2`.
      eps: added to the root of the second moment; of matrices before its bias correction.
      weight_decay: decoupled decay λ of the matrices, multiplied by η; a float or a schedule.
        Nothing decays in the first step.
      mask: which parameters decay, a tree of bools or a function from parameters to one.
      precondition_frequency: k, steps between two power iterations of the bases.
      max_precondition_dim: longest side of a matrix that is preconditioned, None is 2048; a longer
        one keeps the identity. Gram matrix and basis of a side n are 2 n² numbers.
      mu_dtype: dtype of the matrices' first moment; None keeps the parameter's.
      vector_learning_rate: learning rate of vectors; None takes the matrices'.
      vector_learning_rate_scale: instead, their learning rate as a multiple of `learning_rate`.
      vector_b1: decay of the vectors' first moment, in [0, 1).
      vector_b2: decay of the vectors' second moment, in [0, 1).
      vector_weight_decay: decay of vectors, a float or a schedule; None takes `weight_decay`.
      matrix_specs: `MatrixSpec`s as a pytree prefix. Default: each 2-D leaf is a matrix.
      mesh: device mesh of the parameters. `MatrixSpec.partition` then says how each is split, and
        whole matrices are preconditioned by owners; `soap_shardings` says how the state lies.

    Raises:
      ValueError: an argument is out of range, the vectors' learning rate is given twice or as a
        constant beside a schedule, or a partition does not fit the mesh.
    """
    check_fraction("vector_b1", vector_b1)
    check_fraction("vector_b2", vector_b2)
    direction = scale_by_soap(
        b1=b1,
        b2=b2,
        shampoo_beta=shampoo_beta,
        eps=eps,
        precondition_frequency=precondition_frequency,
        max_precondition_dim=max_precondition_dim,
        mu_dtype=mu_dtype,
        matrix_specs=matrix_specs,
        mesh=mesh,
    )
    rate = vector_rate(learning_rate, vector_learning_rate, vector_learning_rate_scale)
    adam = optax.scale_by_adam(vector_b1, vector_b2, eps)
    if vector_weight_decay is None:
        vector_weight_decay = weight_decay
    rules = {
        "matrix": stepped([direction], _after_first(weight_decay), mask, learning_rate),
        "vector": stepped([adam], vector_weight_decay, mask, rate),
    }
    return in_float32(by_kind(rules, matrix_specs))


def soap_shardings(opt_state: Any, mesh: Mesh | AbstractMesh, matrix_specs: Any = None) -> Any:
    """How the state of SOAP lies on a mesh.

    Args:
      opt_state: the state (arrays or abstract) of an optimizer that contains `scale_by_soap`.
      mesh: the mesh.
      matrix_specs: those of the optimizer, each with its `partition`.

    Returns:
      A tree like `opt_state` of NamedShardings; None where the state is not one of SOAP's matrices.

    Raises:
      ValueError: a partition is missing or does not fit the mesh.
    """

    def is_soap(x: Any) -> bool:
        return isinstance(x, ScaleBySoapState)

    def shardings(x: Any) -> Any:
        if not is_soap(x):
            return None
        treedef = jax.tree.structure(x.mu)
        moments = _moments(x, treedef)
        sides = iter([(m.row_gram is not None, m.col_gram is not None) for m in moments])
        layouts = _layouts(x.mu, matrix_specs, mesh, lambda *_: next(sides))
        none = Moments(*[None] * len(Moments._fields))
        return _state(None, [none if lay is None else lay.shardings for lay in layouts], treedef)

    return jax.tree.map(shardings, opt_state, is_leaf=is_soap)


def _after_first(weight_decay: ScalarOrSchedule) -> optax.Schedule:
    """No decay in the first step, which changes no parameter."""

    def schedule(count: jax.typing.ArrayLike) -> Any:
        decay = weight_decay(count) if callable(weight_decay) else weight_decay
        return jnp.where(jnp.asarray(count) == 0, 0.0, decay)

    return schedule


def _layouts(
    params: Tree,
    matrix_specs: Any,
    mesh: Mesh | AbstractMesh | None,
    sides: Callable[[Any, MatrixSpec], tuple[bool, bool]],
) -> list[SoapLayout | None]:
    specs = jax.tree.leaves(resolve_specs(matrix_specs, params))
    paths = jax.tree_util.tree_leaves_with_path(params)
    layouts = []
    for (path, x), spec in zip(paths, specs, strict=True):
        chosen = sides(x, spec)
        layouts.append(soap_layout(path, x, spec, chosen, mesh) if any(chosen) else None)
    return layouts


def _moments(state: ScaleBySoapState, treedef: Any) -> list[Moments]:
    """The state of each parameter."""
    trees = [treedef.flatten_up_to(getattr(state, name)) for name in Moments._fields]
    return [Moments(*arrays) for arrays in zip(*trees, strict=True)]


def _state(count: Any, moments: list[Moments], treedef: Any) -> ScaleBySoapState:
    """The inverse of `_moments`."""
    trees = {
        name: jax.tree.unflatten(treedef, [getattr(m, name) for m in moments])
        for name in Moments._fields
    }
    return ScaleBySoapState(count=count, **trees)
