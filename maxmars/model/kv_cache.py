"""Cached keys and values: GPT-2 one token at a time.

`prefill` runs the prompts of a batch and keeps the keys and values of every layer; `decode` runs
one more token of each row against them. Both give the result of `GPT2.hidden` for the whole rows,
to rounding. A module of the user's own says by methods of these names what it keeps; of one without
them the tokens are kept, and `decode` runs whole rows.

The prompts of a batch differ in length. In the cache they end at the same slot, so that all rows
write the same slot from then on: one slice, which neither copies the cache nor moves data between
devices. How many slots a cache has is the only size that `decode` is compiled for.

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
from maxmars.model.gpt2 import GPT2, Block, document_segments
from maxmars.model.own_model import OwnModel


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer. Heads come before slots, so no product has to transpose."""

    keys: Float[Array, "L B H S K"]
    values: Float[Array, "L B H S K"]
    segments: Int[Array, "B S"]
    """Segment of each token, see `document_segments`; 0 where documents are not told apart."""
    starts: Int[Array, " B"]
    """The slot of each row's first token."""
    prompt_end: Int[Array, ""]
    """The slot after the prompts, the same for all rows."""
    num_new: Int[Array, ""]
    """New tokens of each row in the cache."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OwnCache:
    """What is kept of every row for a module of the user's own."""

    kept: Any
    """What the module's `prefill` and `decode` return, or else the tokens, int32 [B, S]."""
    lengths: Int[Array, " B"]
    """Tokens of each prompt."""
    num_new: Int[Array, ""]
    """New tokens of each row in the cache."""


def prefill(
    model: GPT2 | OwnModel, tokens: Int[Array, "B P"], lengths: Int[Array, " B"], num_slots: int
) -> tuple[Float[Array, "B D"], KVCache | OwnCache]:
    """Run prompts.

    Args:
      model: the model.
      tokens: prompts, padded on the right with any token.
      lengths: tokens of each prompt, from 1 to P.
      num_slots: S, of the longest prompt and its new tokens together; at least P.

    Returns:
      The last hidden state of each prompt's last token, and the cache.
    """
    if isinstance(model, OwnModel):
        if model.has_cache:
            x, kept = model.prefill(tokens, lengths, num_slots)
        else:
            kept = jnp.pad(tokens, ((0, 0), (0, num_slots - tokens.shape[1])))
            x = _last_hidden(model, kept, lengths)
        return x, OwnCache(kept=kept, lengths=lengths, num_new=jnp.zeros((), jnp.int32))
    config = model.config
    segment_ids = document_segments(tokens, config.document_end_id)
    prompt_end = lengths.max()
    starts = prompt_end - lengths
    # What other slots hold is never seen.
    sources = jnp.arange(num_slots) - starts[:, None]

    def block(
        x: Float[Array, "B P D"], layer: tuple[Block, Int[Array, ""]]
    ) -> tuple[Float[Array, "B P D"], list[Float[Array, "B H S K"]]]:
        cached = []

        def attend(q: Any, k: Any, v: Any, scale: Any) -> jax.Array:
            cached.extend(_constrain(_move(y, sources).swapaxes(1, 2)) for y in (k, v))
            return causal_attention(q, k, v, scale, segment_ids)

        return layer[0](x, layer[1], attend), cached

    x = model.embed(tokens)
    x, (keys, values) = jax.lax.scan(block, x, (model.h, jnp.arange(config.num_layers)))
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    unsegmented = jnp.zeros((len(tokens), num_slots), jnp.int32)
    cache = KVCache(
        keys=keys,
        values=values,
        segments=unsegmented if segment_ids is None else _move(segment_ids, sources),
        starts=starts,
        prompt_end=prompt_end,
        num_new=jnp.zeros((), jnp.int32),
    )
    return model.ln_f(last)[:, 0], cache


def _move(x: Shaped[Array, "B P *_"], sources: Int[Array, "B S"]) -> Shaped[Array, "B S *_"]:
    """Slot s of row b takes what `x` has at `sources[b, s]`, or at the nearest place."""
    return jax.vmap(lambda row, source: jnp.take(row, source, axis=0, mode="clip"))(x, sources)


def _last_hidden(
    model: OwnModel, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
) -> Float[Array, "B D"]:
    last = jnp.minimum(lengths, tokens.shape[1]) - 1
    return jnp.take_along_axis(model.hidden(tokens), last[:, None, None], axis=1)[:, 0]


def decode(
    model: GPT2 | OwnModel, tokens: Int[Array, " B"], cache: KVCache | OwnCache
) -> tuple[Float[Array, "B D"], KVCache | OwnCache]:
    """Run one more token of each row; see `prefill` for the result.

    The result of a row beyond `max_seq_len` tokens means nothing, nor does any result where no slot
    was free.
    """
    if isinstance(cache, OwnCache):
        assert isinstance(model, OwnModel)
        places = cache.lengths + cache.num_new
        if model.has_cache:
            # A row that has ended may run past the last position; its result is not used.
            places = jnp.minimum(places, model.config.max_seq_len - 1)
            x, kept = model.decode(tokens, places, cache.kept)
        else:
            kept = cache.kept.at[jnp.arange(len(tokens)), places].set(tokens, mode="drop")
            x = _last_hidden(model, kept, places + 1)
        return x, dataclasses.replace(cache, kept=kept, num_new=cache.num_new + 1)
    assert isinstance(model, GPT2)
    config, slot = model.config, cache.prompt_end + cache.num_new
    segment_ids = jax.lax.dynamic_index_in_dim(cache.segments, slot - 1, axis=1, keepdims=False)
    if config.document_end_id is not None:
        segment_ids += tokens == config.document_end_id
    slots = jnp.arange(cache.segments.shape[1])
    visible = (cache.segments == segment_ids[:, None]) & (slots < slot)
    visible &= slots >= cache.starts[:, None]

    def block(
        x: Float[Array, "B 1 D"], layer: tuple[Any, ...]
    ) -> tuple[Float[Array, "B 1 D"], list[Float[Array, "B H 1 K"]]]:
        block, layer_index, cached_keys, cached_values = layer
        cached = []

        def attend(q: Any, k: Any, v: Any, scale: Any) -> jax.Array:
            q, k, v = (_constrain(y.swapaxes(1, 2)) for y in (q, k, v))
            cached.extend((k, v))
            parts = [
                (cached_keys, cached_values, visible),
                (k, v, jnp.ones((len(tokens), 1), bool)),
            ]
            return _attend(q, parts, scale).swapaxes(1, 2)

        return block(x, layer_index, attend), cached

    # A row that has ended may run past the last position; its result is not used.
    positions = jnp.minimum(slot - cache.starts, config.max_seq_len - 1)
    x = model.embed(tokens[:, None], positions[:, None])
    layers = (model.h, jnp.arange(config.num_layers), cache.keys, cache.values)
    x, (keys, values) = jax.lax.scan(block, x, layers)
    place = jax.lax.dynamic_update_slice_in_dim
    cache = dataclasses.replace(
        cache,
        keys=place(cache.keys, keys, slot, axis=3),
        values=place(cache.values, values, slot, axis=3),
        segments=place(cache.segments, segment_ids[:, None], slot, axis=1),
        num_new=cache.num_new + 1,
    )
    return model.ln_f(x)[:, 0], cache


def _attend(
    q: Float[Array, "B H 1 K"],
    parts: list[tuple[Float[Array, "B H _ K"], Float[Array, "B H _ K"], Bool[Array, "B _"]]],
    scale: Float[Array, ""],
) -> Float[Array, "B H 1 K"]:
    """softmax(scale q kᵀ) v over all visible slots of all parts."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    logits = []
    for keys, _, visible in parts:
        part = jnp.einsum("bhtk,bhsk->bhts", q, keys, preferred_element_type=wide) * scale
        logits.append(jnp.where(visible[:, None, None], part, jnp.finfo(wide).min))
    weights = jax.nn.softmax(jnp.concatenate(logits, axis=-1), axis=-1).astype(q.dtype)
    result, start = jnp.zeros_like(q), 0
    for _, values, visible in parts:
        part = weights[..., start : start + visible.shape[1]]
        result, start = result + jnp.einsum("bhts,bhsk->bhtk", part, values), start + part.shape[-1]
    return result


def _constrain(x: Float[Array, "B H S K"]) -> Float[Array, "B H S K"]:
    return constrain(x, "batch", "heads", None, None)
