"""Sophia-G (arXiv 2305.14342), an optimizer that requests a further gradient.

    maxmars train quickstart:optimizer=tools/examples/sophia.py:sophia
    maxmars train gpt2:size=small,optimizer=tools/examples/sophia.py:sophia \
      --gradient-multiplier 1 --schedule.final-fraction 0.025 --data.path DIR
    maxmars compare quickstart --optimizers mars tools/examples/sophia.py:sophia

The second line is the recipe of Sophia's repository for GPT-2 small. Medium has the rate 7e-4, rho
0.08 and the final fraction 0.0143; large 3e-4, 0.05 and 0.0333.

With g the gradient and, every k steps, s the gradient on labels that the model itself draws, means
over B tokens that the run clips to `gradient_clip_norm`:

    m = b1 m + (1 - b1) g
    h = b2 h + (1 - b2) B s^2         in steps k, 2k, ... (counted from 0); else h stays
    u = sign(m) min(1, |m| / (rho h + eps))
    p = p - rate (u + weight_decay p)

B s^2 is the Gauss-Newton-Bartlett estimate of the Hessian's diagonal: the mean's gradient has B
times less variance than one label's. As in the official code there is no correction of biases, and
the first estimate is in step k. `tests/optim/test_official.py` compares it with that code.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxmars.optim import GradientRequest, with_requests


class ScaleBySophiaState(NamedTuple):
    count: jax.Array
    """Number of updates, int32."""
    mu: Any
    """First moment m, like the parameters."""
    hessian: Any
    """Estimate h of the Hessian's diagonal, like the parameters."""


def scale_by_sophia(batch_tokens, b1, b2, rho, eps, is_due):
    """The direction u."""

    def init(params):
        zeros = optax.tree.zeros_like(params)
        return ScaleBySophiaState(jnp.zeros([], jnp.int32), zeros, zeros)

    def update(updates, state, params=None, *, sampled_grads=None, **extra_args):
        def estimate(h, sampled):
            new = b2 * h + (1 - b2) * batch_tokens * jnp.square(sampled)
            return jnp.where(is_due(state), new, h)

        def direction(m, h):
            return jnp.sign(m) * jnp.minimum(jnp.abs(m) / (rho * h + eps), 1)

        hessian = jax.tree.map(estimate, state.hessian, sampled_grads)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        directions = jax.tree.map(direction, mu, hessian)
        return directions, ScaleBySophiaState(state.count + 1, mu, hessian)

    return optax.GradientTransformationExtraArgs(init, update)


def sophia(
    learning_rate,
    *,
    batch_tokens,
    mask=None,
    b1=0.965,
    b2=0.99,
    rho=0.05,
    eps=1e-15,
    weight_decay=0.2,
    update_hessian_every=10,
):
    """A run gives `batch_tokens`, the tokens of a step, and `mask`, which decays matrices alone."""

    def is_due(state):
        return (state.count > 0) & (state.count % update_hessian_every == 0)

    tx = optax.chain(
        scale_by_sophia(float(batch_tokens), b1, b2, rho, eps, is_due),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    sampled = GradientRequest(
        name="sampled_grads", targets="sampled", due=lambda opt_state: is_due(opt_state[0])
    )
    return with_requests(tx, [sampled])
