"""Cached keys and values: GPT-2 one token at a time.

`prefill` runs the prompts of a batch and keeps the keys and values of every layer; `decode` runs
one more token of each row against them. Both give the result of `GPT2.hidden` for the whole rows,
to rounding. Of a model of the user's own, whose keys and values nobody knows, the tokens are kept,
and `decode` runs whole rows.

The cache has two parts because the prompts of a batch differ in length. The second part counts new
tokens from the end of each row's own prompt, so that all rows write the same slot: one slice, which
neither copies the cache nor moves data between devices.

Shape letters as in `gpt2.py`; P slots for the prompt, N slots for new tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmars.distributed.sharding import constrain
from maxmars.model.attention import causal_attention
from maxmars.model.gpt2 import GPT2, Block, document_segments
from maxmars.model.own_model import OwnModel


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer. Heads come before slots, so no product has to transpose."""

    prompt_keys: Float[Array, "L B H P K"]
    prompt_values: Float[Array, "L B H P K"]
    new_keys: Float[Array, "L B H N K"]
    new_values: Float[Array, "L B H N K"]
    prompt_segments: Int[Array, "B P"]
    """Segment of each token, see `document_segments`; 0 where documents are not told apart."""
    new_segments: Int[Array, "B N"]
    lengths: Int[Array, " B"]
    """Tokens of each prompt."""
    num_new: Int[Array, ""]
    """New tokens of each row in the cache."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """The tokens of every row, for a model of the user's own."""

    tokens: Int[Array, "B slots"]
    """P + N slots, but no more than the model's context."""
    lengths: Int[Array, " B"]
    """Tokens of each prompt."""
    num_new: Int[Array, ""]
    """New tokens of each row in the cache."""


def prefill(
    model: GPT2 | OwnModel, tokens: Int[Array, "B P"], lengths: Int[Array, " B"], num_slots: int
) -> tuple[Float[Array, "B D"], KVCache | TokenCache]:
    """Run prompts.

    Args:
      model: the model.
      tokens: prompts, padded on the right with any token.
      lengths: tokens of each prompt, from 1 to P.
      num_slots: N, the largest number of new tokens.

    Returns:
      The last hidden state of each prompt's last token, and the cache.
    """
    if isinstance(model, OwnModel):
        slots = min(tokens.shape[1] + num_slots, model.config.max_seq_len)
        tokens = jnp.pad(tokens, ((0, 0), (0, max(0, slots - tokens.shape[1]))))
        cache = TokenCache(tokens=tokens, lengths=lengths, num_new=jnp.zeros((), jnp.int32))
        return _last_hidden(model, cache), cache
    config = model.config
    segment_ids = document_segments(tokens, config.document_end_id)

    def block(
        x: Float[Array, "B P D"], layer: tuple[Block, Int[Array, ""]]
    ) -> tuple[Float[Array, "B P D"], list[Float[Array, "B H P K"]]]:
        cached = []

        def attend(q: Any, k: Any, v: Any, scale: Any) -> jax.Array:
            cached.extend(_constrain(y.swapaxes(1, 2)) for y in (k, v))
            return causal_attention(q, k, v, scale, segment_ids)

        return layer[0](x, layer[1], attend), cached

    x = model.embed(tokens)
    x, (keys, values) = jax.lax.scan(block, x, (model.h, jnp.arange(config.num_layers)))
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    shape = (config.num_layers, len(tokens), config.num_heads, num_slots, config.head_dim)
    empty = constrain(jnp.zeros(shape, keys.dtype), "layers", "batch", "heads", None, None)
    cache = KVCache(
        prompt_keys=keys,
        prompt_values=values,
        new_keys=empty,
        new_values=empty,
        prompt_segments=jnp.zeros_like(tokens) if segment_ids is None else segment_ids,
        new_segments=jnp.zeros((len(tokens), num_slots), jnp.int32),
        lengths=lengths,
        num_new=jnp.zeros((), jnp.int32),
    )
    return model.ln_f(last)[:, 0], cache


def _last_hidden(model: OwnModel, cache: TokenCache) -> Float[Array, "B D"]:
    last = jnp.minimum(cache.lengths + cache.num_new, cache.tokens.shape[1]) - 1
    return jnp.take_along_axis(model.hidden(cache.tokens), last[:, None, None], axis=1)[:, 0]


def decode(
    model: GPT2 | OwnModel, tokens: Int[Array, " B"], cache: KVCache | TokenCache
) -> tuple[Float[Array, "B D"], KVCache | TokenCache]:
    """Run one more token of each row; see `prefill` for the result.

    The result of a row beyond `max_seq_len` tokens means nothing. There must be a free slot.
    """
    if isinstance(cache, TokenCache):
        assert isinstance(model, OwnModel)
        rows, places = jnp.arange(len(tokens)), cache.lengths + cache.num_new
        written = cache.tokens.at[rows, places].set(tokens, mode="drop")
        cache = dataclasses.replace(cache, tokens=written, num_new=cache.num_new + 1)
        return _last_hidden(model, cache), cache
    assert isinstance(model, GPT2)
    config, slot = model.config, cache.num_new
    segment_ids = _next_segments(tokens, cache, config.document_end_id)
    in_prompt, in_new = _visible(cache, segment_ids)

    def block(
        x: Float[Array, "B 1 D"], layer: tuple[Any, ...]
    ) -> tuple[Float[Array, "B 1 D"], list[Float[Array, "B H 1 K"]]]:
        block, layer_index, prompt_keys, prompt_values, new_keys, new_values = layer
        cached = []

        def attend(q: Any, k: Any, v: Any, scale: Any) -> jax.Array:
            q, k, v = (_constrain(y.swapaxes(1, 2)) for y in (q, k, v))
            cached.extend((k, v))
            parts = [
                (prompt_keys, prompt_values, in_prompt),
                (new_keys, new_values, in_new),
                (k, v, jnp.ones((len(tokens), 1), bool)),
            ]
            return _attend(q, parts, scale).swapaxes(1, 2)

        return block(x, layer_index, attend), cached

    # A row that has ended may run past the last position; its result is not used.
    positions = jnp.minimum(cache.lengths + slot, config.max_seq_len - 1)
    x = model.embed(tokens[:, None], positions[:, None])
    layers = (
        *(model.h, jnp.arange(config.num_layers)),
        *(cache.prompt_keys, cache.prompt_values, cache.new_keys, cache.new_values),
    )
    x, (keys, values) = jax.lax.scan(block, x, layers)
    place = jax.lax.dynamic_update_slice_in_dim
    cache = dataclasses.replace(
        cache,
        new_keys=place(cache.new_keys, keys, slot, axis=3),
        new_values=place(cache.new_values, values, slot, axis=3),
        new_segments=place(cache.new_segments, segment_ids[:, None], slot, axis=1),
        num_new=slot + 1,
    )
    return model.ln_f(x)[:, 0], cache


def _next_segments(
    tokens: Int[Array, " B"], cache: KVCache, document_end_id: int | None
) -> Int[Array, " B"]:
    last = jnp.take_along_axis(cache.prompt_segments, (cache.lengths - 1)[:, None], axis=1)[:, 0]
    newest = jnp.take(cache.new_segments, jnp.maximum(cache.num_new - 1, 0), axis=1)
    segment_ids = jnp.where(cache.num_new == 0, last, newest)
    return segment_ids if document_end_id is None else segment_ids + (tokens == document_end_id)


def _visible(
    cache: KVCache, segment_ids: Int[Array, " B"]
) -> tuple[Bool[Array, "B P"], Bool[Array, "B N"]]:
    """Which slots of the two parts the next token of each row attends to."""
    num_prompt, num_new = cache.prompt_segments.shape[1], cache.new_segments.shape[1]
    in_prompt = cache.prompt_segments == segment_ids[:, None]
    in_new = cache.new_segments == segment_ids[:, None]
    return (
        in_prompt & (jnp.arange(num_prompt) < cache.lengths[:, None]),
        in_new & (jnp.arange(num_new) < cache.num_new),
    )


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
