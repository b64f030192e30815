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
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from maxmars.optim.eigenbasis import Moments, SoapRule, soap_step
from maxmars.optim.matrix_spec import MatrixSpec, resolve_specs
from maxmars.optim.rules import (
    Scalar,
    ScalarOrSchedule,
    Tree,
    by_kind,
    check_fraction,
    check_positive,
    stepped,
    vector_rate,
    wide_dtype,
)
from maxmars.optim.scale_by_mars import scale_by_mars
from maxmars.optim.soap_layout import SoapLayout, Sum, soap_layout


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


@dataclass(frozen=True, kw_only=True)
class _Soap:
    """`scale_by_soap` with its arguments."""

    rule: SoapRule
    max_precondition_dim: int
    mu_dtype: Any
    matrix_specs: Any
    mesh: Mesh | AbstractMesh | None

    def init(self, params: Tree) -> ScaleBySoapState:
        """Zeros."""
        leaves, treedef = jax.tree.flatten(params)
        pairs = zip(leaves, self.layouts(params), strict=True)
        zeros = [self.zeros(param, layout) for param, layout in pairs]
        return _state(jnp.zeros([], jnp.int32), zeros, treedef)

    def update(
        self, updates: Tree, state: Any, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, ScaleBySoapState]:
        """The direction U and the new state."""
        del params, extra_args
        leaves, treedef = jax.tree.flatten(updates)
        results = [
            self.step(g, moments, state.count, _nothing_to_sum)
            if layout is None
            else layout.run(self.step, g, moments, state.count)
            for g, moments, layout in zip(
                leaves, _moments(state, treedef), self.layouts(updates), strict=True
            )
        ]
        count = jnp.asarray(optax.safe_increment(state.count))
        directions = jax.tree.unflatten(treedef, [direction for direction, _ in results])
        return directions, _state(count, [moments for _, moments in results], treedef)

    def layouts(self, params: Tree) -> list[SoapLayout | None]:
        """The layout of each parameter; None where nothing is preconditioned."""
        limit = self.max_precondition_dim

        def sides(x: Any, spec: MatrixSpec) -> tuple[bool, bool]:
            if not spec.is_matrix:
                return False, False
            rows, cols = (math.prod(x.shape[i] for i in axes) for axes in (spec.rows, spec.cols))
            return rows <= limit, cols <= limit

        return _layouts(params, self.matrix_specs, self.mesh, sides)

    def zeros(self, param: Any, layout: SoapLayout | None) -> Moments:
        """The initial state of a parameter."""
        if layout is None:
            mu, nu = jnp.zeros_like(param, self.mu_dtype), jnp.zeros_like(param)
            return Moments(mu, nu, None, None, None, None)
        wide = wide_dtype(param.dtype)
        dtypes = Moments(self.mu_dtype or param.dtype, param.dtype, wide, wide, wide, wide)
        arrays = [
            None if home is None else layout.zeros(home, dtype)
            for home, dtype in zip(layout.moments, dtypes, strict=True)
        ]
        return Moments(*arrays)

    def step(
        self, grads: jax.Array, moments: Moments, count: jax.Array, sum_grams: Sum
    ) -> tuple[jax.Array, Moments]:
        """`soap_step` in float32 at least, back in the dtypes of its arguments."""
        dtype = wide_dtype(grads.dtype)
        wide = jax.tree.map(lambda x: x.astype(dtype), moments)
        direction, new = soap_step(grads.astype(dtype), wide, count, self.rule, sum_grams)
        new = jax.tree.map(lambda x, old: x.astype(old.dtype), new, moments)
        return direction.astype(grads.dtype), new


def scale_by_soap(
    *,
    b1: Scalar = 0.95,
    b2: Scalar = 0.95,
    shampoo_beta: Scalar | None = None,
    eps: Scalar = 1e-8,
    precondition_frequency: int | jax.Array = 10,
    max_precondition_dim: int = 2048,
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
      max_precondition_dim: longest side of a matrix that is preconditioned.
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
    soap = _Soap(
        rule=rule,
        max_precondition_dim=max_precondition_dim,
        mu_dtype=mu_dtype,
        matrix_specs=matrix_specs,
        mesh=mesh,
    )
    return optax.GradientTransformationExtraArgs(soap.init, soap.update)


def soap(
    learning_rate: ScalarOrSchedule,
    *,
    b1: Scalar = 0.95,
    b2: Scalar = 0.95,
    shampoo_beta: Scalar | None = None,
    eps: Scalar = 1e-8,
    weight_decay: ScalarOrSchedule = 0.01,
    mask: Any = None,
    precondition_frequency: int | jax.Array = 10,
    max_precondition_dim: int = 2048,
    mu_dtype: Any = None,
    vector_learning_rate: ScalarOrSchedule | None = None,
    vector_learning_rate_scale: Scalar | None = None,
    vector_b1: Scalar = 0.9,
    vector_b2: Scalar = 0.95,
    vector_weight_decay: ScalarOrSchedule = 0.0,
    matrix_specs: Any = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SOAP on matrices, AdamW on vectors. The defaults of the matrices are the official code's,
    `max_precondition_dim` aside (10,000 there).

    Args:
      learning_rate: η of the matrices, a float, a traced scalar or a schedule.
      b1: decay of the matrices' first moment, in [0, 1).
      b2: decay of the matrices' second moment, in [0, 1).
      shampoo_beta: decay of the Gram matrices, in [0, 1); None is `b2`.
      eps: added to the root of the second moment; of matrices before its bias correction.
      weight_decay: decoupled decay λ of the matrices, multiplied by η; a float or a schedule.
        Nothing decays in the first step.
      mask: which parameters decay, a tree of bools or a function from parameters to one; it does
        not apply to vectors.
      precondition_frequency: k, steps between two power iterations of the bases.
      max_precondition_dim: longest side of a matrix that is preconditioned; a longer one keeps the
        identity. Gram matrix and basis of a side n are 2 n² numbers.
      mu_dtype: dtype of the matrices' first moment; None keeps the parameter's.
      vector_learning_rate: learning rate of vectors; None takes the matrices'.
      vector_learning_rate_scale: instead, their learning rate as a multiple of `learning_rate`.
      vector_b1: decay of the vectors' first moment, in [0, 1).
      vector_b2: decay of the vectors' second moment, in [0, 1).
      vector_weight_decay: decay of all vectors, a float or a schedule.
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
    adam = scale_by_mars(b1=vector_b1, b2=vector_b2, eps=eps, gamma=0.0, clip_threshold=None)
    rules = {
        "matrix": stepped(direction, _after_first(weight_decay), mask, learning_rate),
        "vector": stepped(adam, vector_weight_decay, None, rate),
    }
    return by_kind(rules, matrix_specs)


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


def _nothing_to_sum(gram: jax.Array) -> jax.Array:
    return gram


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
