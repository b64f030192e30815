"""Cross-entropy of next-token predictions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(logits: Float[Array, "*B V"], targets: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Negative log-likelihood of each target, in nats."""
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log_normalizer - picked
