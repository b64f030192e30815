"""Cached keys and values of attention, one more token of each row at a time.

The prompts of a batch differ in length. In the cache they end at the same slot, so that all rows
write the same slot from then on: one slice, which neither copies the cache nor moves data between
devices. How many slots a cache has is the only size that a program is compiled for.

Shape letters as in `gpt2.py`; P tokens of the longest prompt, padded; S slots of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from maxmars.distributed.sharding import constrain


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer. Heads come before slots, so no product has to transpose."""

    keys: Float[Array, "L B H S K"]
    values: Float[Array, "L B H S K"]
    slot: Int[Array, ""]
    """The next token's slot, the same for all rows."""


def by_heads(x: Float[Array, "B S H K"]) -> Float[Array, "B H S K"]:
    """Queries, keys or values as the cache holds them."""
    return constrain(x.swapaxes(1, 2), "batch", "heads", None, None)


def at_slots(x: Shaped[Array, "B P *_"], taken: Int[Array, "B S"]) -> Shaped[Array, "B S *_"]:
    """Slot s of row b takes what `x` has at position `taken[b, s]`, or at the nearest one."""
    return jax.vmap(lambda row, slots: jnp.take(row, slots, axis=0, mode="clip"))(x, taken)


def attend_to_blocks(
    q: Float[Array, "B H 1 K"],
    blocks: list[tuple[Float[Array, "B H _ K"], Float[Array, "B H _ K"], Bool[Array, "B _"]]],
    scale: Float[Array, ""],
) -> Float[Array, "B H 1 K"]:
    """softmax(scale q kᵀ) v over all visible slots of all blocks."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    logits = []
    for keys, _, visible in blocks:
        y = jnp.einsum("bhtk,bhsk->bhts", q, keys, preferred_element_type=wide) * scale
        logits.append(jnp.where(visible[:, None, None], y, jnp.finfo(wide).min))
    weights = jax.nn.softmax(jnp.concatenate(logits, axis=-1), axis=-1).astype(q.dtype)
    result, start = jnp.zeros_like(q), 0
    for _, values, visible in blocks:
        own = weights[..., start : start + visible.shape[1]]
        result, start = result + jnp.einsum("bhts,bhsk->bhtk", own, values), start + own.shape[-1]
    return result
