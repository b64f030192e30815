"""The direction of MARS: corrected gradient, clip, momentum, and the scaling of each variant.

Equations and sources are in `maxmars.optim.mars`, which composes this into optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxmars.optim.matrix_spec import MatrixSpec, resolve_specs
from maxmars.optim.newton_schulz import Coefficients
from maxmars.optim.orthogonalization_plan import plan_orthogonalization
from maxmars.optim.orthogonalize import orthogonality_error, orthogonalize
from maxmars.optim.rules import (
    Scalar,
    ScalarOrSchedule,
    Tree,
    bias_correction,
    cast_like,
    check_choice,
    check_fraction,
    check_positive,
    widened,
    written_after,
)

VARIANTS = ("adamw", "lion", "shampoo", "m")
FIRST_STEPS = ("zero_last", "plain_gradient")


class ScaleByMarsState(NamedTuple):
    """State of `scale_by_mars`; every tree has the parameters' structure, shapes and shardings."""

    count: jax.Array
    """Number of updates, int32."""
    mu: Tree
    """First moment m; with `memory_efficient` the buffer b."""
    nu: Tree
    """Second moment v, in the adamw variant."""
    nu_max: Tree
    """Running maximum of v, with `amsgrad`."""
    last_grad: Tree
    """Gradient of the step before, in the approximate form."""
    clip_fraction: jax.Array | None
    """Share of the matrices that the last update clipped; None without a clip."""
    orthogonality_error: jax.Array | None
    """The last one measured, see `orthogonality_error`; None where none is."""


@dataclass(frozen=True, kw_only=True)
class _Momentum:
    """c before its clip, the clip's factors and m of every leaf, and the state that follows."""

    c: Tree
    factors: Tree
    m: Tree
    buffer: Tree
    clip_fraction: jax.Array | None


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """The arithmetic of `scale_by_mars`, with its arguments."""

    variant: str
    b1: Scalar
    b2: Scalar
    eps: Scalar
    gamma: ScalarOrSchedule
    clip_threshold: Scalar | None
    amsgrad: bool
    exact: bool
    memory_efficient: bool
    first_step: str
    correct_eps: bool
    mu_dtype: Any
    last_grad_dtype: Any
    matrix_specs: Any
    ns_steps: int
    ns_coefficients: Coefficients
    ns_eps: Scalar | None
    ns_dtype: Any
    ns_scale: str | None
    orthogonality_every: int | None
    mesh: Any
    ownership_axes: tuple[str, ...] | None

    @property
    def keeps_last(self) -> bool:
        """Whether the state holds the gradient of the step before."""
        return not (self.exact or self.memory_efficient or _is_zero(self.gamma))

    def init(self, params: Tree) -> ScaleByMarsState:
        """Zeros."""
        resolve_specs(self.matrix_specs, params)  # raises here rather than in the first step

        def zeros(dtype: Any = None) -> Tree:
            return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=dtype), params)

        return ScaleByMarsState(
            count=jnp.zeros([], jnp.int32),
            mu=zeros(self.mu_dtype),
            nu=zeros() if self.variant == "adamw" else None,
            nu_max=zeros() if self.amsgrad else None,
            last_grad=zeros(self.last_grad_dtype) if self.keeps_last else None,
            clip_fraction=None if self.clip_threshold is None else jnp.zeros([], jnp.float32),
            orthogonality_error=jnp.zeros([]) if self.orthogonality_every else None,
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
        narrow, old_state = updates, state
        updates, state, prev_grads = widened((updates, state, prev_grads))
        count = jnp.asarray(optax.safe_increment(state.count))
        specs = resolve_specs(self.matrix_specs, updates)
        if self.memory_efficient:
            momentum = self.one_buffer_momentum(updates, state)
        else:
            momentum = self.momentum(updates, state, prev_grads, specs)
        nu = nu_max = error = None
        match self.variant:
            case "adamw":
                nu, nu_max = self.second_moment(momentum.c, momentum.factors, state)
                directions = self.adam(momentum.m, nu if nu_max is None else nu_max, count)
            case "lion":
                directions = jax.tree.map(jnp.sign, momentum.m)
            case "shampoo":  # the factor matters only beside eps
                scaled = jax.tree.map(lambda m: m / (1 - self.b1), momentum.m)
                directions, error = self.orthogonalized(scaled, specs, state, self.eps)
            case _:
                directions, error = self.orthogonalized(momentum.m, specs, state, 1e-7)
        new_state = ScaleByMarsState(
            count=count,
            mu=cast_like(momentum.buffer, old_state.mu),
            nu=cast_like(nu, old_state.nu),
            nu_max=cast_like(nu_max, old_state.nu_max),
            last_grad=self.next_last(narrow, old_state, (momentum.m, nu)),
            clip_fraction=momentum.clip_fraction,
            orthogonality_error=error,
        )
        return cast_like(directions, narrow), new_state

    def momentum(self, grads: Tree, state: ScaleByMarsState, prev: Tree, specs: Tree) -> _Momentum:
        """c = clip(g + κ (g − last)) and m = β₁ m + (1 − β₁) c."""
        last = self.last_gradients(grads, state, prev)
        gamma, b1 = self.gamma(state.count) if callable(self.gamma) else self.gamma, self.b1
        kappa = gamma * b1 / (1 - b1)
        c = jax.tree.map(
            lambda g, last: g + jnp.asarray(kappa, g.dtype) * (g - last.astype(g.dtype)),
            grads,
            last,
        )
        factors, fraction = jax.tree.map(lambda c: jnp.ones([], c.dtype), c), None
        if self.clip_threshold is not None:
            factors, fraction = _clip_factors(c, self.clip_threshold, specs)
        # The factor goes to the scalar: XLA's CPU backend would write a clipped c that two read.
        m = jax.tree.map(lambda m, c, f: b1 * m + ((1 - b1) * f) * c, state.mu, c, factors)
        return _Momentum(c=c, factors=factors, m=m, buffer=m, clip_fraction=fraction)

    def last_gradients(self, grads: Tree, state: ScaleByMarsState, prev_grads: Tree) -> Tree:
        """What the gradient is compared with; in the first step by the policy of `first_step`."""
        if self.exact:
            if prev_grads is None:
                raise ValueError(
                    "exact MARS needs the gradient of this batch at the previous parameters: call "
                    "update(grads, state, params, prev_grads=...)."
                )
            last = prev_grads
        elif self.keeps_last:
            last = state.last_grad
        else:
            return grads  # gamma is zero: the difference vanishes, whatever was before
        zero_last = self.first_step == "zero_last"
        if zero_last and not self.exact:
            return last  # the state starts at zero
        first = state.count == 0
        return jax.tree.map(
            lambda g, old: jnp.where(
                first, jnp.zeros_like(g) if zero_last else g, old.astype(g.dtype)
            ),
            grads,
            last,
        )

    def next_last(self, grads: Tree, old_state: ScaleByMarsState, readers: Tree) -> Tree:
        """The gradient to keep, written over the old one once its `readers` are done.

        Without that order a CPU's compiler may first copy the old one; a TPU's would make two
        passes of one by it, but for Newton-Schulz, which ends the pass anyway.
        """
        if not self.keeps_last:
            return None
        fused = self.variant in ("adamw", "lion")
        return written_after(cast_like(grads, old_state.last_grad), readers, fused=fused)

    def one_buffer_momentum(self, grads: Tree, state: ScaleByMarsState) -> _Momentum:
        """m = γ g + β b with b = β b + ((1 − γ)(1 − β) / β) g: the unclipped m without a last g."""
        beta, gamma = self.b1, self.gamma
        assert not callable(gamma), "checked at construction"
        step = (1 - gamma) * (1 - beta) / beta
        buffer = jax.tree.map(lambda b, g: beta * b + step * g, state.mu, grads)
        m = jax.tree.map(lambda b, g: gamma * g + beta * b, buffer, grads)
        return _Momentum(c=None, factors=None, m=m, buffer=buffer, clip_fraction=None)

    def second_moment(self, c: Tree, factors: Tree, state: ScaleByMarsState) -> tuple[Tree, Tree]:
        """v and, with `amsgrad`, its running maximum."""
        b2, root = self.b2, jnp.sqrt(jnp.asarray(1 - self.b2))

        def average(v: jax.Array, c: jax.Array, f: jax.Array) -> jax.Array:
            return b2 * v + jnp.square(root.astype(c.dtype) * f * c)

        nu = jax.tree.map(average, state.nu, c, factors)
        return nu, jax.tree.map(jnp.maximum, state.nu_max, nu) if self.amsgrad else None

    def adam(self, m: Tree, v: Tree, count: jax.Array) -> Tree:
        """m̂ / (√v̂ + ε), both bias-corrected; ε too, unless `correct_eps` is False."""
        m_correction = bias_correction(self.b1, count)
        v_correction = jnp.sqrt(bias_correction(self.b2, count))

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            m_hat, root = m / m_correction.astype(m.dtype), jnp.sqrt(v)
            correction = v_correction.astype(v.dtype)
            if self.correct_eps:
                return m_hat / (root / correction + self.eps)
            return m_hat * correction / (root + self.eps)

        return jax.tree.map(direction, m, v)

    def orthogonalized(
        self, m: Tree, specs: Tree, state: ScaleByMarsState, eps: Scalar
    ) -> tuple[Tree, jax.Array | None]:
        """Newton-Schulz of every matrix, and its error, anew every `orthogonality_every` updates.

        ε and the variant's scale hold unless told otherwise.
        """
        plan = plan_orthogonalization(m, specs, mesh=self.mesh, ownership_axes=self.ownership_axes)
        scale = self.ns_scale
        if scale == "default":
            scale = "spectral" if self.variant == "shampoo" else "rms"
        directions = orthogonalize(
            m,
            plan,
            steps=self.ns_steps,
            coefficients=self.ns_coefficients,
            eps=eps if self.ns_eps is None else self.ns_eps,
            dtype=self.ns_dtype,
            scale=scale,
        )
        if self.orthogonality_every is None:
            return directions, None
        error = jax.lax.cond(
            state.count % self.orthogonality_every == 0,
            lambda directions: orthogonality_error(directions, plan, scale=scale),
            lambda _: state.orthogonality_error,
            directions,
        )
        return directions, error


def scale_by_mars(
    *,
    variant: str = "adamw",
    b1: Scalar = 0.95,
    b2: Scalar = 0.99,
    eps: Scalar = 1e-8,
    gamma: ScalarOrSchedule = 0.025,
    clip_threshold: Scalar | None = 1.0,
    amsgrad: bool = False,
    exact: bool = False,
    memory_efficient: bool = False,
    first_step: str = "zero_last",
    correct_eps: bool = True,
    mu_dtype: Any = None,
    last_grad_dtype: Any = None,
    matrix_specs: Any = None,
    ns_steps: int = 5,
    ns_coefficients: Coefficients = "keller",
    ns_eps: Scalar | None = None,
    ns_dtype: Any = "bfloat16",
    ns_scale: str | None = "default",
    orthogonality_every: int | None = None,
    mesh: Any = None,
    ownership_axes: tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction u that `mars` steps along; the arguments are those of `mars`.

    Args:
      variant: how momentum becomes a direction: "adamw" divides by the root of the second moment,
        "lion" takes the sign, "shampoo" and "m" orthogonalise each matrix.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1); only adamw has one.
      eps: added to the root of the second moment; in shampoo to the norm.
      gamma: strength of the correction, a float or a schedule of the update count.
      clip_threshold: bound on the Frobenius norm of each corrected gradient; None does not clip.
      amsgrad: divide by the running maximum of the second moment.
      exact: take `prev_grads` from each `update` call in place of the stored gradient.
      memory_efficient: keep one buffer in place of momentum and last gradient. Exact where it is
        allowed: without a clip, with a constant gamma, and not in adamw.
      first_step: what the first gradient is compared with: zero (the official code: c = (1 + κ) g)
        or itself (the paper: c = g).
      correct_eps: whether eps is added after the bias correction (PyTorch's Adam) or before (the
        AdamW inside MARS-M and Muon).
      mu_dtype: dtype of the first moment; None keeps the parameter's.
      last_grad_dtype: dtype of the stored gradient; None keeps the parameter's.
      matrix_specs: `MatrixSpec`s as a pytree prefix, see `resolve_specs`.
      ns_steps: Newton-Schulz iterations.
      ns_coefficients: their preset or coefficients, see `newton_schulz`.
      ns_eps: added to the norm before them; None is `eps` in shampoo and 1e-7 in m.
      ns_dtype: dtype of their operands.
      ns_scale: factor after them; "default" is "spectral" in shampoo and "rms" in m.
      orthogonality_every: measure `orthogonality_error` in the first of so many updates, into the
        state; None never does.
      mesh: device mesh of the parameters; `MatrixSpec.partition` says how they are split.
      ownership_axes: see `plan_orthogonalization`.

    Raises:
      ValueError: an argument is out of range or does not go with another.
    """
    rule = _Rule(**locals())
    _check(rule)
    init: Any = rule.init
    update: Any = rule.update
    return optax.GradientTransformationExtraArgs(init, update)


def _check(rule: _Rule) -> None:
    check_choice("variant", rule.variant, VARIANTS)
    check_choice("first_step", rule.first_step, FIRST_STEPS)
    check_fraction("b1", rule.b1)
    check_fraction("b2", rule.b2)
    check_positive("clip_threshold", rule.clip_threshold)
    if rule.amsgrad and rule.variant != "adamw":
        raise ValueError(f"amsgrad=True needs variant='adamw', but it is {rule.variant!r}.")
    every = rule.orthogonality_every
    if every is not None:
        check_positive("orthogonality_every", every)
        if rule.variant not in ("shampoo", "m"):
            raise ValueError(
                f"orthogonality_every={every} needs variant='shampoo' or 'm', which orthogonalise, "
                f"but it is {rule.variant!r}."
            )
    if rule.memory_efficient:
        _check_memory_efficient(rule)


def _check_memory_efficient(rule: _Rule) -> None:
    reason = None
    if rule.variant == "adamw":
        reason = "the second moment of variant='adamw' needs the corrected gradient itself"
    elif rule.clip_threshold is not None:
        reason = (
            f"clip_threshold={rule.clip_threshold} needs the corrected gradient; set it to None"
        )
    elif rule.exact:
        reason = "exact=True stores no gradient to begin with"
    elif callable(rule.gamma):
        reason = "gamma must be a constant"
    elif rule.first_step != "zero_last":
        reason = "it implies first_step='zero_last'"
    elif isinstance(rule.b1, int | float) and rule.b1 == 0:
        reason = "b1 must not be zero"
    if reason is not None:
        raise ValueError(f"memory_efficient=True is not possible here: {reason}.")


def _is_zero(gamma: ScalarOrSchedule) -> bool:
    return isinstance(gamma, int | float) and gamma == 0


def _clip_factors(c: Tree, threshold: Scalar, specs: Tree) -> tuple[Tree, jax.Array]:
    """What scales each matrix (or vector) of each stack down to norm `threshold`.

    Returns:
      The factors, to be broadcast, and the share of matrices and vectors that were longer.
    """

    def norms(c: jax.Array, spec: MatrixSpec) -> jax.Array:
        wide = c.astype(jnp.promote_types(c.dtype, jnp.float32))
        axes = spec.inner if c.ndim else ()
        return jnp.sqrt(jnp.sum(jnp.square(wide), axis=axes, keepdims=True))

    norm_tree = jax.tree.map(norms, c, specs)
    leaves = jax.tree.leaves(norm_tree)
    longer = sum((jnp.sum(norm > threshold, dtype=jnp.float32) for norm in leaves), jnp.float32(0))
    share = longer / max(1, sum(norm.size for norm in leaves))
    return jax.tree.map(lambda norm: threshold / jnp.maximum(norm, threshold), norm_tree), share
