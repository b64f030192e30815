"""Cached keys and values: GPT-2 one token at a time.

`prefill` runs the prompts of a batch and keeps the keys and values of every layer; `decode` runs
one more token of each row against them. Both give what `GPT2.hidden` gives for the whole rows, to
rounding. Shape letters as in `model.py`; P slots hold the prompt, N new tokens.

The cache has two parts because the prompts of a batch differ in length. New tokens are counted from
the end of each row's own prompt, so that all rows write the same slot of the second part: a slice,
which neither copies the cache nor moves anything between devices.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmars.attention import causal_attention
from maxmars.model import GPT2, Block, document_numbers
from maxmars.sharding import constrain


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer. Heads come before slots: their products transpose nothing."""

    prompt_keys: Float[Array, "L B H P K"]
    prompt_values: Float[Array, "L B H P K"]
    new_keys: Float[Array, "L B H N K"]
    new_values: Float[Array, "L B H N K"]
    prompt_documents: Int[Array, "B P"]
    """Document of each token, see `document_numbers`; 0 where they are not told apart."""
    new_documents: Int[Array, "B N"]
    lengths: Int[Array, " B"]
    """Tokens of each prompt."""
    num_new: Int[Array, ""]
    """New tokens in the cache, the same number for each row."""


def prefill(
    model: GPT2, tokens: Int[Array, "B P"], lengths: Int[Array, " B"], num_slots: int
) -> tuple[Float[Array, "B D"], KVCache]:
    """Run prompts.

    Args:
      model: the model.
      tokens: prompts, filled up on the right with anything.
      lengths: tokens of each prompt, from 1 to P.
      num_slots: N, the most new tokens that will follow.

    Returns:
      The residual stream after the last LayerNorm at each prompt's last token, and the cache.
    """
    config = model.config
    rows, length = tokens.shape
    documents = document_numbers(tokens, config.document_end_id)

    def block(
        x: Float[Array, "B P D"], layer: tuple[Block, Int[Array, ""]]
    ) -> tuple[Float[Array, "B P D"], tuple[Float[Array, "B H P K"], Float[Array, "B H P K"]]]:
        block, layer_index = layer
        x = constrain(x, "batch", "length", None)
        q, k, v = block.attn.qkv(block.ln_1(x))
        scale = block.attn.scale(layer_index, x.dtype)
        x = x + block.attn.c_proj(causal_attention(q, k, v, scale, documents))
        x = x + block.mlp(block.ln_2(x))
        return x, (_constrain(k.swapaxes(1, 2)), _constrain(v.swapaxes(1, 2)))

    x = _embed(model, tokens, jnp.arange(length))
    x, (keys, values) = jax.lax.scan(block, x, (model.h, jnp.arange(config.num_layers)))
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    shape = (config.num_layers, rows, config.num_heads, num_slots, config.head_dim)
    empty = constrain(jnp.zeros(shape, keys.dtype), "layers", "batch", "heads", None, None)
    cache = KVCache(
        prompt_keys=keys,
        prompt_values=values,
        new_keys=empty,
        new_values=empty,
        prompt_documents=jnp.zeros_like(tokens) if documents is None else documents,
        new_documents=jnp.zeros((rows, num_slots), jnp.int32),
        lengths=lengths,
        num_new=jnp.zeros((), jnp.int32),
    )
    return model.ln_f(last)[:, 0], cache


def decode(
    model: GPT2, tokens: Int[Array, " B"], cache: KVCache
) -> tuple[Float[Array, "B D"], KVCache]:
    """Run one more token of each row; see `prefill` for the result.

    A row whose tokens exceed `max_seq_len` gets nothing of use; new tokens must not exceed the
    slots.
    """
    config, slot = model.config, cache.num_new
    documents = _next_documents(tokens, cache, config.document_end_id)
    in_prompt, in_new = _visible(cache, documents)

    def block(
        x: Float[Array, "B 1 D"], layer: tuple[Any, ...]
    ) -> tuple[Float[Array, "B 1 D"], tuple[Float[Array, "B H 1 K"], Float[Array, "B H 1 K"]]]:
        block, layer_index, prompt_keys, prompt_values, new_keys, new_values = layer
        x = constrain(x, "batch", "length", None)
        q, k, v = (_constrain(y.swapaxes(1, 2)) for y in block.attn.qkv(block.ln_1(x)))
        parts = [
            (prompt_keys, prompt_values, in_prompt),
            (new_keys, new_values, in_new),
            (k, v, jnp.ones((len(tokens), 1), bool)),
        ]
        attended = _attend(q, parts, block.attn.scale(layer_index, x.dtype))
        x = x + block.attn.c_proj(attended.swapaxes(1, 2))
        return x + block.mlp(block.ln_2(x)), (k, v)

    x = _embed(model, tokens[:, None], (cache.lengths + slot)[:, None])
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
        new_documents=place(cache.new_documents, documents[:, None], slot, axis=1),
        num_new=slot + 1,
    )
    return model.ln_f(x)[:, 0], cache


def _embed(
    model: GPT2, tokens: Int[Array, "B T"], positions: Int[Array, "*B T"]
) -> Float[Array, "B T D"]:
    dtype = model.config.compute_dtype
    # Gathered over fsdp before the lookups, as in `GPT2.hidden`.
    table = constrain(model.wte.embedding[...].astype(dtype), "vocab", None)
    places = constrain(model.wpe.embedding[...].astype(dtype), "positions", None)
    # A row that has ended may run past the last position; what it computes is not looked at.
    positions = jnp.minimum(positions, model.config.max_seq_len - 1)
    return constrain(table[tokens] + places[positions], "batch", "length", None)


def _next_documents(
    tokens: Int[Array, " B"], cache: KVCache, document_end_id: int | None
) -> Int[Array, " B"]:
    last = jnp.take_along_axis(cache.prompt_documents, (cache.lengths - 1)[:, None], axis=1)[:, 0]
    newest = jnp.take(cache.new_documents, jnp.maximum(cache.num_new - 1, 0), axis=1)
    documents = jnp.where(cache.num_new == 0, last, newest)
    return documents if document_end_id is None else documents + (tokens == document_end_id)


def _visible(
    cache: KVCache, documents: Int[Array, " B"]
) -> tuple[Bool[Array, "B P"], Bool[Array, "B N"]]:
    """Which slots of the two parts hold something that the next token attends to."""
    num_prompt, num_new = cache.prompt_documents.shape[1], cache.new_documents.shape[1]
    in_prompt = cache.prompt_documents == documents[:, None]
    in_new = cache.new_documents == documents[:, None]
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
