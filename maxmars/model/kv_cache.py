"""Generation by `GPT2` with cached keys and values, one more token of each row at a time.

The prompts of a batch differ in length. In the cache they end at the same slot, so that all rows
write the same slot from then on: one slice, which neither copies the cache nor moves data between
devices. How many slots a cache has is the only size that a program is compiled for.

Shape letters as in `gpt2.py`; P tokens of the longest prompt, padded; S slots of the cache.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from maxmars.distributed.sharding import constrain
from maxmars.model.attention import causal_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer. Heads come before slots, so no product has to transpose."""

    keys: Float[Array, "L B H S K"]
    values: Float[Array, "L B H S K"]
    slot: Int[Array, ""]
    """The next token's slot, the same for all rows."""


def prefill(
    gpt2: Any, tokens: Int[Array, "B P"], lengths: Int[Array, " B"], num_slots: int
) -> tuple[Float[Array, "B D"], KVCache]:
    """Run prompts through a `GPT2`; see `LanguageModel.prefill`."""
    config = gpt2.config
    prompt_end = lengths.max()
    # All prompts end at one slot: slot s of row b holds position s - (prompt_end - lengths[b]).
    # Slots without such a position hold anything, and no query sees them.
    positions = jnp.arange(num_slots) - (prompt_end - lengths)[:, None]

    def block(
        x: Float[Array, "B P D"], layer: tuple[Any, Int[Array, ""]]
    ) -> tuple[Float[Array, "B P D"], list[Float[Array, "B H S K"]]]:
        cached = []

        def attend(q: Any, k: Any, v: Any, scale: Any) -> jax.Array:
            cached.extend(_by_heads(_at_slots(y, positions)) for y in (k, v))
            return causal_attention(q, k, v, scale)

        return layer[0](x, layer[1], attend), cached

    x = gpt2.embed(tokens)
    x, (keys, values) = jax.lax.scan(block, x, (gpt2.h, jnp.arange(config.num_layers)))
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return gpt2.ln_f(last)[:, 0], KVCache(keys=keys, values=values, slot=prompt_end)


def decode(
    gpt2: Any, tokens: Int[Array, " B"], positions: Int[Array, " B"], cache: KVCache
) -> tuple[Float[Array, "B D"], KVCache]:
    """Run one more token of each row; see `LanguageModel.decode`."""
    config, slot = gpt2.config, cache.slot
    slots = jnp.arange(cache.keys.shape[3])
    visible = (slots < slot) & (slots >= (slot - positions)[:, None])

    def block(
        x: Float[Array, "B 1 D"], layer: tuple[Any, ...]
    ) -> tuple[Float[Array, "B 1 D"], list[Float[Array, "B H 1 K"]]]:
        # The new token is a block of its own: the scan then reads the cache alone, and one write
        # for all layers follows it.
        block, layer_index, cached_keys, cached_values = layer
        cached = []

        def attend(q: Any, k: Any, v: Any, scale: Any) -> jax.Array:
            q, k, v = map(_by_heads, (q, k, v))
            cached.extend((k, v))
            blocks = [
                (cached_keys, cached_values, visible),
                (k, v, jnp.ones((len(tokens), 1), bool)),
            ]
            return _attend_to_blocks(q, blocks, scale).swapaxes(1, 2)

        return block(x, layer_index, attend), cached

    x = gpt2.embed(tokens[:, None], positions[:, None])
    layers = (gpt2.h, jnp.arange(config.num_layers), cache.keys, cache.values)
    x, (keys, values) = jax.lax.scan(block, x, layers)
    write = jax.lax.dynamic_update_slice_in_dim
    cache = dataclasses.replace(
        cache,
        keys=write(cache.keys, keys, slot, axis=3),
        values=write(cache.values, values, slot, axis=3),
        slot=slot + 1,
    )
    return gpt2.ln_f(x)[:, 0], cache


def _by_heads(x: Float[Array, "B S H K"]) -> Float[Array, "B H S K"]:
    """Queries, keys or values as the cache holds them."""
    return constrain(x.swapaxes(1, 2), "batch", "heads", None, None)


def _at_slots(x: Shaped[Array, "B P *_"], positions: Int[Array, "B S"]) -> Shaped[Array, "B S *_"]:
    """`x` by slots: slot s of row b holds position `positions[b, s]`, or the nearest in range."""
    return jax.vmap(lambda row, slots: jnp.take(row, slots, axis=0, mode="clip"))(x, positions)


def _attend_to_blocks(
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
    # Only logits are joined: joined keys and values would be a copy of the cache.
    weights = jax.nn.softmax(jnp.concatenate(logits, axis=-1), axis=-1).astype(q.dtype)
    result, start = jnp.zeros_like(q), 0
    for _, values, visible in blocks:
        own = weights[..., start : start + visible.shape[1]]
        result, start = result + jnp.einsum("bhts,bhsk->bhtk", own, values), start + own.shape[-1]
    return result
