r"""MARS: variance-reduced pretraining optimizers (arXiv 2411.10438), as the official code computes
them.

One step of a matrix, with gradient g_t (after any global-norm clip) and κ = γ β₁ / (1 − β₁):

    c_t = g_t + κ (g_t − last_t)         variance-reduced gradient
    c_t = c_t / max(1, ‖c_t‖_F)          clip of each matrix by itself, layer by layer
    m_t = β₁ m_{t−1} + (1 − β₁) c_t
    v_t = β₂ v_{t−1} + (1 − β₂) c_t²
    p_t = p_{t−1} − η ( (m_t / (1 − β₁ᵗ)) / (√v_t / √(1 − β₂ᵗ) + ε) + λ p_{t−1} )

`last_t` is the gradient of the step before (approximate MARS) or the gradient of this step's batch
at the previous parameters (exact MARS, passed as `prev_grads`); it is zero in the first step.
Vectors (norms, biases) take AdamW on g_t with their own betas, rate and decay, unless
`optimize_vectors`.

Where this follows the official code rather than the paper's text: last_1 is 0 (the paper would give
c_1 = g_1), and v_t averages the square of the clipped c_t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxmars.optim.matrix_spec import MatrixSpec, resolve_specs

Scalar = float | jax.Array
ScalarOrSchedule = optax.ScalarOrSchedule
Tree = Any  # a pytree of arrays like the parameters


class ScaleByMarsState(NamedTuple):
    """State of `scale_by_mars`; every tree has the parameters' structure, shapes and shardings."""

    count: jax.Array
    """Number of updates, int32."""
    mu: Tree
    """First moment m."""
    nu: Tree
    """Second moment v."""
    nu_max: Tree
    """Running maximum of v, with `amsgrad`."""
    last_grad: Tree
    """Gradient of the step before, in the approximate form."""


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """The arithmetic of `scale_by_mars`, with its arguments."""

    b1: Scalar
    b2: Scalar
    eps: Scalar
    gamma: ScalarOrSchedule
    clip_threshold: Scalar | None
    amsgrad: bool
    exact: bool
    mu_dtype: Any
    last_grad_dtype: Any
    matrix_specs: Any

    @property
    def keeps_last(self) -> bool:
        """Whether the state holds the gradient of the step before."""
        gamma_is_zero = isinstance(self.gamma, int | float) and self.gamma == 0
        return not self.exact and not gamma_is_zero

    def init(self, params: Tree) -> ScaleByMarsState:
        """Zeros."""
        resolve_specs(self.matrix_specs, params)  # raises here rather than in the first step

        def zeros(dtype: Any = None) -> Tree:
            return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=dtype), params)

        return ScaleByMarsState(
            count=jnp.zeros([], jnp.int32),
            mu=zeros(self.mu_dtype),
            nu=zeros(),
            nu_max=zeros() if self.amsgrad else None,
            last_grad=zeros(self.last_grad_dtype) if self.keeps_last else None,
        )

    def update(
        self,
        updates: Tree,
        state: Any,
        params: Tree = None,
        *,
        prev_grads: Tree = None,
        **extra_args: Any,
    ) -> tuple[Tree, ScaleByMarsState]:
        """The direction u and the new state."""
        del params, extra_args
        b1, b2 = self.b1, self.b2
        c = self.corrected_gradients(updates, state, prev_grads)
        mu = jax.tree.map(lambda m, c: b1 * m + (1 - b1) * c, state.mu, c)
        nu = jax.tree.map(lambda v, c: b2 * v + (1 - b2) * c * c, state.nu, c)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu) if self.amsgrad else None
        count = jnp.asarray(optax.safe_increment(state.count))
        new_state = ScaleByMarsState(
            count=count,
            mu=_cast_like(mu, state.mu),
            nu=_cast_like(nu, state.nu),
            nu_max=_cast_like(nu_max, state.nu_max) if self.amsgrad else None,
            last_grad=_cast_like(updates, state.last_grad) if self.keeps_last else None,
        )
        directions = self.directions(mu, nu_max if self.amsgrad else nu, count)
        return _cast_like(directions, updates), new_state

    def corrected_gradients(self, grads: Tree, state: ScaleByMarsState, prev_grads: Tree) -> Tree:
        """c of every leaf, clipped."""
        last = _previous_or_zero(prev_grads, state.count) if self.exact else state.last_grad
        gamma = self.gamma(state.count) if callable(self.gamma) else self.gamma
        kappa = gamma * self.b1 / (1 - self.b1)

        def corrected(g: jax.Array, last: jax.Array, spec: MatrixSpec) -> jax.Array:
            c = g + jnp.asarray(kappa, g.dtype) * (g - last.astype(g.dtype))
            return c if self.clip_threshold is None else _clip(c, self.clip_threshold, spec)

        specs = resolve_specs(self.matrix_specs, grads)
        # With gamma 0 the gradient stands in for the last one: the difference vanishes.
        return jax.tree.map(corrected, grads, grads if last is None else last, specs)

    def directions(self, mu: Tree, nu: Tree, count: jax.Array) -> Tree:
        """m and v, bias-corrected, to u."""
        m_correction = _bias_correction(self.b1, count)
        v_correction = _bias_correction(self.b2, count)

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            root = jnp.sqrt(v) / jnp.sqrt(v_correction).astype(v.dtype)
            return m / m_correction.astype(m.dtype) / (root + self.eps)

        return jax.tree.map(direction, mu, nu)


def scale_by_mars(
    *,
    b1: Scalar = 0.95,
    b2: Scalar = 0.99,
    eps: Scalar = 1e-8,
    gamma: ScalarOrSchedule = 0.025,
    clip_threshold: Scalar | None = 1.0,
    amsgrad: bool = False,
    exact: bool = False,
    mu_dtype: Any = None,
    last_grad_dtype: Any = None,
    matrix_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Variance reduction, clip and AdamW scaling: the direction u that `mars` steps along.

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment, after bias correction.
      gamma: strength of the correction, a float or a schedule of the update count.
      clip_threshold: bound on the Frobenius norm of each corrected gradient; None does not clip.
      amsgrad: divide by the running maximum of the second moment.
      exact: take `prev_grads` from each `update` call in place of the stored gradient.
      mu_dtype: dtype of the first moment; None keeps the parameter's.
      last_grad_dtype: dtype of the stored gradient; None keeps the parameter's.
      matrix_specs: `MatrixSpec`s as a pytree prefix, see `resolve_specs`. They say which axes stack
        independent tensors, each of which is clipped by itself.

    Raises:
      ValueError: an argument is out of range.
    """
    _check_range("b1", b1)
    _check_range("b2", b2)
    if isinstance(clip_threshold, int | float) and not clip_threshold > 0:
        raise ValueError(f"clip_threshold={clip_threshold} must be positive, or None not to clip.")
    rule = _Rule(
        b1=b1,
        b2=b2,
        eps=eps,
        gamma=gamma,
        clip_threshold=clip_threshold,
        amsgrad=amsgrad,
        exact=exact,
        mu_dtype=mu_dtype,
        last_grad_dtype=last_grad_dtype,
        matrix_specs=matrix_specs,
    )
    return optax.GradientTransformationExtraArgs(rule.init, rule.update)


def mars(
    learning_rate: ScalarOrSchedule,
    *,
    b1: Scalar = 0.95,
    b2: Scalar = 0.99,
    eps: Scalar = 1e-8,
    gamma: ScalarOrSchedule = 0.025,
    weight_decay: Scalar = 0.0,
    mask: Any = None,
    clip_threshold: Scalar | None = 1.0,
    amsgrad: bool = False,
    exact: bool = False,
    mu_dtype: Any = None,
    last_grad_dtype: Any = None,
    optimize_vectors: bool = False,
    vector_learning_rate: ScalarOrSchedule | None = None,
    vector_learning_rate_scale: Scalar | None = None,
    vector_b1: Scalar = 0.9,
    vector_b2: Scalar = 0.95,
    vector_weight_decay: Scalar = 0.1,
    matrix_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """MARS-AdamW on matrices, AdamW on vectors. The defaults are the paper's.

    Args:
      learning_rate: η of the matrices, a float, a traced scalar or a schedule.
      b1: decay of the matrices' first moment.
      b2: decay of the matrices' second moment.
      eps: added to the root of the second moment.
      gamma: strength of the variance reduction; 0 turns it off.
      weight_decay: decoupled decay λ of the matrices, multiplied by η.
      mask: which parameters decay, a tree of bools or a function from parameters to one; it applies
        to vectors with `optimize_vectors` too, but not to AdamW's vectors.
      clip_threshold: bound on the norm of each corrected gradient; None does not clip.
      amsgrad: divide by the running maximum of the second moment, in matrices and vectors.
      exact: exact MARS: call `update(grads, state, params, prev_grads=...)` with the gradient of
      the
        same batch at the previous parameters, clipped by its own global norm.
      mu_dtype: dtype of the matrices' first moment; None keeps the parameter's.
      last_grad_dtype: dtype of the stored gradient; bfloat16 saves 2 bytes a parameter.
      optimize_vectors: give vectors the matrices' rule and hyperparameters; the `vector_*`
      arguments
        are then ignored (the official `optimize_1d`).
      vector_learning_rate: learning rate of vectors; None takes the matrices'.
      vector_learning_rate_scale: instead, their learning rate as a multiple of `learning_rate`.
      vector_b1: decay of the vectors' first moment.
      vector_b2: decay of the vectors' second moment.
      vector_weight_decay: decay of all vectors. The official code uses 0.1, LayerNorm gains
      included.
      matrix_specs: `MatrixSpec`s as a pytree prefix. Default: each 2-D leaf is a matrix.

    Raises:
      ValueError: an argument is out of range, or the vectors' learning rate is given twice or as a
        constant beside a schedule.
    """
    vector_rate = _vector_learning_rate(
        learning_rate, vector_learning_rate, vector_learning_rate_scale
    )
    _check_range("vector_b1", vector_b1)
    _check_range("vector_b2", vector_b2)
    matrix_rule = optax.chain(
        scale_by_mars(
            b1=b1,
            b2=b2,
            eps=eps,
            gamma=gamma,
            clip_threshold=clip_threshold,
            amsgrad=amsgrad,
            exact=exact,
            mu_dtype=mu_dtype,
            last_grad_dtype=last_grad_dtype,
            matrix_specs=matrix_specs,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    if optimize_vectors:
        return matrix_rule
    vector_rule = optax.chain(
        _adam(b1=vector_b1, b2=vector_b2, eps=eps, amsgrad=amsgrad, matrix_specs=matrix_specs),
        optax.add_decayed_weights(vector_weight_decay),
        optax.scale_by_learning_rate(vector_rate),
    )
    return _by_kind(matrix_rule, vector_rule, matrix_specs)


def _adam(**options: Any) -> optax.GradientTransformationExtraArgs:
    """Adam, with the official code's amsgrad: the maximum is taken before the bias correction."""
    return scale_by_mars(gamma=0.0, clip_threshold=None, **options)


def _by_kind(
    matrix_rule: optax.GradientTransformation,
    vector_rule: optax.GradientTransformation,
    matrix_specs: Any,
) -> optax.GradientTransformationExtraArgs:
    """One rule for matrices, another for vectors."""

    def labels(params: Tree) -> Any:
        specs = resolve_specs(matrix_specs, params)
        return jax.tree.map(lambda spec: "matrix" if spec.is_matrix else "vector", specs)

    return optax.partition(
        {"matrix": matrix_rule, "vector": vector_rule}, labels, mask_compatible_extra_args=True
    )


def _check_range(name: str, value: Any) -> None:
    if isinstance(value, int | float) and not 0 <= value < 1:
        raise ValueError(f"{name}={value} must lie in [0, 1).")


def _vector_learning_rate(
    learning_rate: ScalarOrSchedule, rate: ScalarOrSchedule | None, scale: Scalar | None
) -> ScalarOrSchedule:
    if rate is not None and scale is not None:
        raise ValueError(
            "vector_learning_rate and vector_learning_rate_scale are both given; give one of them."
        )
    if rate is not None:
        if callable(learning_rate) and not callable(rate):
            raise ValueError(
                f"vector_learning_rate={rate} is a constant beside a learning_rate schedule, so "
                "vectors would not follow the schedule; give vector_learning_rate_scale (a "
                "multiple of the schedule) or a schedule."
            )
        return rate
    if scale is None:
        return learning_rate
    if callable(learning_rate):
        return lambda count: learning_rate(count) * scale
    return learning_rate * scale


def _previous_or_zero(prev_grads: Tree, count: jax.Array) -> Tree:
    if prev_grads is None:
        raise ValueError(
            "exact MARS needs the gradient of this batch at the previous parameters: call "
            "update(grads, state, params, prev_grads=...)."
        )
    return jax.tree.map(lambda g: jnp.where(count == 0, jnp.zeros_like(g), g), prev_grads)


def _clip(c: jax.Array, threshold: Scalar, spec: MatrixSpec) -> jax.Array:
    """Scale each matrix (or vector) of the stack down to norm `threshold`."""
    wide = c.astype(jnp.promote_types(c.dtype, jnp.float32))
    axes = spec.inner if c.ndim else ()
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=axes, keepdims=True))
    return (wide * (threshold / jnp.maximum(norm, threshold))).astype(c.dtype)


def _bias_correction(decay: Scalar, count: jax.Array) -> jax.Array:
    """1 − decayᵗ; expm1 keeps its relative precision when decay is near one."""
    return -jnp.expm1(count * jnp.log(jnp.asarray(decay, float)))


def _cast_like(tree: Tree, like: Tree) -> Tree:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)
