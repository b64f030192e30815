r"""Sophia-G (arXiv 2305.14342): sign momentum where curvature is small, Newton steps elsewhere.

With gradient g_t of the loss on the batch, and every k steps ĝ_t, the gradient of the same loss on
labels that are sampled from the model itself:

    m_t = β₁ m_{t−1} + (1 − β₁) g_t
    h_t = β₂ h_{t−1} + (1 − β₂) B ĝ_t²         in steps k, 2k, ... (counted from 0); else h_{t−1}
    u_t = sign(m_t) min(1, |m_t| / (ρ h_t + ε))
    p_t = p_{t−1} − η (u_t + λ p_{t−1})

B ĝ² is the Gauss-Newton-Bartlett estimate of the Hessian's diagonal, where B is the number of
labels (tokens) over which that loss is a mean: the mean's gradient has B times less variance than
one label's. Its labels are independent samples; gradients of given labels estimate nothing of the
kind. With a custom gradient in the model it is the estimator that still works, unlike Hutchinson's.

This follows the official code: no bias corrections, ε = 1e-15, the first estimate in step k (the
paper's first is in step 0), one rule for all parameters. It keeps ĝ² without B in its state and
multiplies by ρ B later, which is the same. It clips ĝ to the global norm of 1 just as g; whoever
computes `sampled_grads` does that. It takes ĝ on the next step's batch, after the update of step
k − 1; those are the parameters that step k starts from, and that step's batch is the one at hand.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from maxmars.optim._rules import (
    Scalar,
    ScalarOrSchedule,
    Tree,
    check_like_gradients,
    check_numbers,
    in_float32,
)


class ScaleBySophiaState(NamedTuple):
    """State of `scale_by_sophia`; the trees have the parameters' structure, shapes, dtypes (float32
    of float16) and shardings."""

    count: jax.Array
    """Number of updates, int32."""
    mu: Tree
    """First moment m."""
    hessian: Tree
    """Estimate h of the Hessian's diagonal."""


def scale_by_sophia(
    *,
    batch_tokens: Scalar,
    b1: Scalar = 0.965,
    b2: Scalar = 0.99,
    rho: Scalar = 0.04,
    eps: Scalar = 1e-15,
    update_hessian_every: int | jax.Array = 10,
) -> optax.GradientTransformationExtraArgs:
    """The direction u that `sophia` steps along; its arguments, and its errors, are those of
    `sophia`."""
    check_numbers("lie in [0, 1)", b1=b1, b2=b2)
    check_numbers("be positive", batch_tokens=batch_tokens, rho=rho, eps=eps)
    check_numbers("be positive", update_hessian_every=update_hessian_every)

    def init_fn(params: Tree) -> ScaleBySophiaState:
        return ScaleBySophiaState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params),
            hessian=optax.tree.zeros_like(params),
        )

    def update_fn(
        updates: Tree,
        state: Any,
        params: Tree = None,
        *,
        sampled_grads: Tree = None,
        **extra_args: Any,
    ) -> tuple[Tree, ScaleBySophiaState]:
        del params, extra_args
        due = needs_sampled_grads(state.count, update_hessian_every)

        def estimate(h: jax.Array, sampled: jax.Array) -> jax.Array:
            new = b2 * h + (1 - b2) * batch_tokens * jnp.square(sampled.astype(h.dtype))
            return jnp.where(due, new, h)  # ignores what stands in for ĝ, NaN included

        def direction(m: jax.Array, h: jax.Array) -> jax.Array:
            return jnp.sign(m) * jnp.minimum(jnp.abs(m) / (rho * h + eps), 1)

        hessian = state.hessian
        if sampled_grads is not None:
            check_like_gradients("sampled_grads", sampled_grads, updates)
            hessian = jax.tree.map(estimate, hessian, sampled_grads)
        elif isinstance(due, jax.core.Tracer) or due:
            raise ValueError(
                "Sophia needs the gradient of the loss on sampled labels: call update(grads, "
                "state, params, sampled_grads=...). A jitted update needs it in every step; where "
                "needs_sampled_grads is false its values are ignored and may be zeros."
            )
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        directions = jax.tree.map(direction, mu, hessian)
        return directions, ScaleBySophiaState(
            jnp.asarray(optax.safe_increment(state.count)), mu, hessian
        )

    return in_float32(optax.GradientTransformationExtraArgs(init_fn, update_fn))


def sophia(
    learning_rate: ScalarOrSchedule,
    *,
    batch_tokens: Scalar,
    b1: Scalar = 0.965,
    b2: Scalar = 0.99,
    rho: Scalar = 0.04,
    eps: Scalar = 1e-15,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Any = None,
    update_hessian_every: int | jax.Array = 10,
) -> optax.GradientTransformationExtraArgs:
    """Sophia-G. The defaults are the official code's, but for `weight_decay` (0.1 there).

    `update` takes the gradient of the loss on sampled labels as `sampled_grads`, a tree like the
    gradients. It is used in the steps that `needs_sampled_grads` names. Inside `jit` it must be
    given in every step, so leave its computation to those steps:

    ```python
    due = needs_sampled_grads(sophia_state(opt_state).count, 10)
    zeros = jax.tree.map(jnp.zeros_like, params)
    sampled = jax.lax.cond(due, lambda: sampled_gradient(params, tokens, key), lambda: zeros)
    updates, opt_state = tx.update(grads, opt_state, params, sampled_grads=sampled)
    ```

    Args:
      learning_rate: η, a float, a traced scalar or a schedule.
      batch_tokens: B, the number of labels (tokens) over which the sampled loss is a mean. The
        official code calls it `bs`; for GPT-2 it is 480 · 1024.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the Hessian estimate, in [0, 1), once every `update_hessian_every` steps.
      rho: ρ, scale of the Hessian; the greater, the fewer elements are clipped to ±1.
      eps: added to ρ h.
      weight_decay: decoupled decay λ, multiplied by η; a float or a schedule.
      mask: which parameters decay, a tree of bools or a function from parameters to one.
      update_hessian_every: k, steps between two estimates.

    Raises:
      ValueError: an argument is out of range; in `update`, `sampled_grads` is missing: always
        inside `jit`, outside of it where it is needed.
    """
    direction = scale_by_sophia(
        batch_tokens=batch_tokens,
        b1=b1,
        b2=b2,
        rho=rho,
        eps=eps,
        update_hessian_every=update_hessian_every,
    )
    return in_float32(
        optax.chain(
            direction,
            optax.add_decayed_weights(weight_decay, mask),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def needs_sampled_grads(
    count: int | Int[Array, ""], update_hessian_every: int | Int[Array, ""] = 10
) -> Bool[Array, ""]:
    """Whether the update after `count` others uses its `sampled_grads`."""
    count = jnp.asarray(count)
    return (count > 0) & (count % update_hessian_every == 0)


def sophia_state(opt_state: Any) -> ScaleBySophiaState:
    """The state of `scale_by_sophia` within that of an optimizer that contains it.

    Raises:
      ValueError: there is none, or more than one.
    """

    def is_sophia(x: Any) -> bool:
        return isinstance(x, ScaleBySophiaState)

    states = [x for x in jax.tree.leaves(opt_state, is_leaf=is_sophia) if is_sophia(x)]
    if len(states) != 1:
        raise ValueError(
            f"the optimizer state contains {len(states)} of Sophia's; it must be exactly one."
        )
    return states[0]
