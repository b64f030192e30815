"""Causal attention.

Shape letters: B batch, T length, H heads, K head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def causal_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    scale: Float[Array, ""],
    documents: Int[Array, "B T"] | None = None,
    branches: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H K"]:
    """softmax(scale q kᵀ + mask) v, with logits and softmax in float32 at least.

    The mask is causal. Where the `documents` of the tokens are given, it keeps each in its own;
    where their `branches` are, it shows each only those of branch 0 and of its own.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=wide) * scale
    mask = jnp.tri(q.shape[1], dtype=bool)
    if documents is not None:
        mask &= (documents[:, :, None] == documents[:, None, :])[:, None]
    if branches is not None:
        seen = branches[:, None, :]
        mask &= ((seen == 0) | (seen == branches[:, :, None]))[:, None]
    logits = jnp.where(mask, logits, jnp.finfo(wide).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(q.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights, v)
