"""Which steps are skipped: those that are not finite and, if wanted, spikes of the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxmars.config import GuardConfig


class Guard(NamedTuple):
    """What the guard remembers, as scalars; part of the train state."""

    num_skipped: Any
    """Steps skipped in all, int32 []."""
    skipped_in_a_row: Any
    """Steps skipped since the last that was not, int32 []."""
    num_losses: Any
    """Finite losses seen, int32 []."""
    loss_mean: Any
    """Running mean of the loss, float32 []."""
    loss_variance: Any
    """Running variance of the loss, float32 []."""


def new_guard() -> Guard:
    """Nothing seen yet."""
    zero = jnp.zeros([], jnp.int32)
    return Guard(zero, zero, zero, jnp.zeros([], jnp.float32), jnp.zeros([], jnp.float32))


def check_step(
    config: GuardConfig, guard: Guard, loss: jax.Array, grad_norms: list[jax.Array]
) -> tuple[jax.Array, Guard]:
    """Whether to apply a step's update, and the guard after it.

    The running mean and variance weigh the last `history` losses most. A spike enters them cut off
    at the threshold: should the loss stay that high, the threshold rises until it passes.

    Args:
      config: the threshold.
      guard: the guard before the step.
      loss: the step's loss, [].
      grad_norms: norms of the gradients that the update is made of, each [].
    """
    finite = jnp.isfinite(loss)
    for norm in grad_norms:
        finite &= jnp.isfinite(norm)
    loss = loss.astype(jnp.float32)
    spike = jnp.zeros([], bool)
    if config.loss_spike_threshold is not None:
        limit = guard.loss_mean + config.loss_spike_threshold * jnp.sqrt(guard.loss_variance)
        spike = (loss > limit) & (guard.num_losses >= config.history)
        loss = jnp.where(spike, limit, loss)
    apply = finite & ~spike
    weight = 1 / jnp.minimum(guard.num_losses + 1, config.history).astype(jnp.float32)
    change = loss - guard.loss_mean
    seen = guard._replace(
        num_losses=guard.num_losses + 1,
        loss_mean=guard.loss_mean + weight * change,
        loss_variance=(1 - weight) * (guard.loss_variance + weight * change**2),
    )
    guard = jax.tree.map(lambda new, old: jnp.where(finite, new, old), seen, guard)
    return apply, guard._replace(
        num_skipped=guard.num_skipped + ~apply,
        skipped_in_a_row=jnp.where(apply, 0, guard.skipped_in_a_row + 1),
    )
