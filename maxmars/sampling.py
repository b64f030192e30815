"""How a token is drawn from logits."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn: the logits are divided by `temperature`, then cut to `top_k`, then to
    `top_p`."""

    temperature: float = 0.8
    """Below 1 takes likely tokens more often, 0 always the likeliest."""
    top_k: int | None = 40
    """Sample among this many likeliest tokens only; None takes them all."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability; None takes all."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} must be 0 (greedy) or a positive number."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"top_k={self.top_k} must be at least 1, or None to sample among all tokens."
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p={self.top_p} must lie in (0, 1], or be None to sample among all tokens."
            )


GREEDY = Sampling(temperature=0.0, top_k=None)


def choose(
    logits: Float[Array, "B V"], keys: Key[Array, " B"], sampling: Sampling
) -> Int[Array, " B"]:
    """One token of each row, drawn with the row's own key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    vocabulary = logits.shape[1]
    # Sorted where the likeliest must be known.
    kept = min(sampling.top_k or vocabulary, vocabulary)
    ids = None
    if kept < vocabulary or sampling.top_p is not None:
        logits, ids = jax.lax.top_k(logits, kept)
    logits = (logits - logits.max(-1, keepdims=True)) / sampling.temperature
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        logits = jnp.where(before < sampling.top_p, logits, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    if ids is not None:
        drawn = jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]
    return drawn.astype(jnp.int32)
