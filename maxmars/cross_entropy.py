"""Cross-entropy of next-token predictions, without the logits of all tokens at once.

The logits of a batch are its largest array by far: in float32, 6 GB a chip for 30 sequences of
GPT-2. Here they are made for some tokens at a time, on each device for its own tokens and its own
part of the vocabulary, and are gone before those of the next ones come.

Shape letters: B batch, T length, D embed, V padded vocabulary; N tokens of a device, C of a chunk.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from maxmars.sharding import RULES

_CHUNK_BYTES = 2**29
_TENSOR = RULES.vocab


def cross_entropy(logits: Float[Array, "*B V"], targets: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Negative log-likelihood of each target, in nats: the plain reference."""
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log_normalizer - picked


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_losses(
    x: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    vocab_size: int,
) -> Float[Array, "B T"]:
    """`cross_entropy` of the logits x tableᵀ, in nats of float32 at least.

    The gradient makes the logits a second time; that of `mean_loss` does not.

    Args:
      x: the residual stream, in the type that matrix products are computed in.
      table: token embeddings in the same type, whole over `fsdp`.
      targets: the tokens to predict.
      vocab_size: rows of the table that are tokens; those after them have probability zero.
    """
    return _over_chunks(x, table, targets, vocab_size)[0]


def _token_losses_fwd(x: Any, table: Any, targets: Any, vocab_size: int) -> tuple[Any, Any]:
    return token_losses(x, table, targets, vocab_size), (x, table, targets)


def _token_losses_bwd(vocab_size: int, saved: Any, weights: Any) -> tuple[Any, Any, None]:
    x, table, targets = saved
    _, grads = _over_chunks(x, table, targets, vocab_size, weights)
    return _sum_over_devices(1, grads)


token_losses.defvjp(_token_losses_fwd, _token_losses_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def mean_loss(
    x: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    vocab_size: int,
) -> Float[Array, ""]:
    """Mean of `token_losses`.

    Where a gradient is asked for it is made with the value, while the logits of a chunk are there:
    making them again would be one matrix product in four. It takes no more memory, as the gradient
    of the table is the first that a backward pass makes.
    """
    return _over_chunks(x, table, targets, vocab_size)[0].mean()


def _mean_loss_fwd(x: Any, table: Any, targets: Any, vocab_size: int) -> tuple[Any, Any]:
    ones = jnp.ones(targets.shape, jnp.promote_types(x.dtype, jnp.float32))
    losses, grads = _over_chunks(x, table, targets, vocab_size, ones)
    return losses.mean(), grads


def _mean_loss_bwd(vocab_size: int, grads: Any, weight: Any) -> tuple[Any, Any, None]:
    return _sum_over_devices(weight / math.prod(grads[0].shape[1:3]), grads)


mean_loss.defvjp(_mean_loss_fwd, _mean_loss_bwd)


def _over_chunks(
    x: Any, table: Any, targets: Any, vocab_size: int, weights: Any = None
) -> tuple[Any, Any]:
    """Losses and, with `weights` [B, T], the gradient of their weighted sum to x and table.

    The gradients are the terms of a sum over devices, along a first axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rows, batch = RULES.spec("batch", None), RULES.batch
    if mesh.empty:
        losses, grads = _on_device(x, table, targets, weights, vocab_size=vocab_size, parts=1)
    else:
        partial_sums = (PartitionSpec(_TENSOR, batch), PartitionSpec(batch, _TENSOR))
        losses, grads = jax.shard_map(
            functools.partial(_on_device, vocab_size=vocab_size, parts=mesh.shape[_TENSOR]),
            in_specs=(rows, RULES.spec("vocab", None), rows, rows),
            out_specs=(rows, None if weights is None else partial_sums),
            check_vma=False,
        )(x, table, targets, weights)
    return losses, grads


def _sum_over_devices(weight: Any, grads: tuple[Any, Any]) -> tuple[Any, Any, None]:
    """The gradients to x, table and targets, from the devices' terms and a factor of the sum.

    XLA makes the sums: that of the table's gradient can so join that of the table's other use, the
    lookup, and go straight to the shards.
    """
    x_grad, table_grad = ((weight * terms).astype(terms.dtype).sum(0) for terms in grads)
    return x_grad, table_grad, None


def _on_device(
    x: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None,
    *,
    vocab_size: int,
    parts: int,
) -> tuple[Float[Array, "B T"], tuple[Float[Array, "1 B T D"], Float[Array, "1 V D"]] | None]:
    """`_over_chunks` for the tokens of a device and its part of the vocabulary, out of `parts`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    size, count = _chunks(targets.size, len(table) * wide.itemsize)
    vocab = _vocabulary(table, vocab_size, parts)

    def add(total: Any, chunk: Any) -> tuple[Any, Any]:
        losses, grads = _chunk(vocab, *chunk)
        if grads is None:
            return total, (losses, None)
        return total + grads[1], (losses, grads[0].astype(x.dtype))

    # The weights of what fills up the last chunk are zero.
    chunks = jax.tree.map(lambda a: _split_tokens(a, size, count), (x, targets, weights))
    zeros: Any = None if weights is None else jnp.zeros(table.shape, wide)
    table_grad, (losses, x_grad) = jax.lax.scan(add, zeros, chunks)
    losses = losses.reshape(-1)[: targets.size].reshape(targets.shape)
    if weights is None:
        return losses, None
    x_grad = x_grad.reshape(-1, x.shape[-1])[: targets.size].reshape(x.shape)
    return losses, (x_grad[None], table_grad.astype(table.dtype)[None])


def draw_targets(
    x: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    uniforms: Float[Array, "B T"],
    vocab_size: int,
) -> Int[Array, "B T"]:
    """For each position a token, drawn from the distribution of the logits x tableᵀ.

    It is the token in whose share of [0, 1) the position's uniform number lies, with the shares in
    the order of the vocabulary: but for rounding, neither chunks nor devices change it.

    Args:
      x: as in `token_losses`.
      table: as in `token_losses`.
      uniforms: independent numbers from [0, 1), of float32 at least.
      vocab_size: rows of the table that are tokens; those after them are never drawn.
    """
    mesh = jax.sharding.get_abstract_mesh()
    draw = functools.partial(_draw_on_device, vocab_size=vocab_size)
    if mesh.empty:
        return draw(x, table, uniforms, parts=1)
    rows = RULES.spec("batch", None)
    return jax.shard_map(
        functools.partial(draw, parts=mesh.shape[_TENSOR]),
        in_specs=(rows, RULES.spec("vocab", None), rows),
        out_specs=rows,
        check_vma=False,
    )(x, table, uniforms)


def _draw_on_device(
    x: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    uniforms: Float[Array, "B T"],
    *,
    vocab_size: int,
    parts: int,
) -> Int[Array, "B T"]:
    """`draw_targets` for the tokens of a device and its part of the vocabulary, out of `parts`."""
    vocab = _vocabulary(table, vocab_size, parts)
    size, count = _chunks(uniforms.size, len(table) * uniforms.dtype.itemsize)
    chunks = jax.tree.map(lambda a: _split_tokens(a, size, count), (x, uniforms))
    drawn = jax.lax.map(lambda chunk: _draw_chunk(vocab, *chunk), chunks)
    return drawn.reshape(-1)[: uniforms.size].reshape(uniforms.shape)


def _draw_chunk(
    vocab: _Vocabulary, x: Float[Array, "C D"], uniforms: Float[Array, " C"]
) -> Int[Array, " C"]:
    """Tokens for a chunk: first which device's, then which block of its tokens, then which one.

    So there is no running sum over all tokens, which would be as large as the logits.
    """
    logits = vocab.logits(x)
    largest = logits.max(-1)
    if vocab.parts > 1:
        largest = jax.lax.pmax(largest, _TENSOR)
    weights = jnp.exp(logits - largest[:, None])
    blocks = weights.reshape(len(x), -1, _block_size(len(vocab.table)))
    sums = blocks.sum(-1)
    totals = sums.sum(-1, keepdims=True)
    if vocab.parts > 1:
        totals = jax.lax.all_gather(totals[:, 0], _TENSOR, axis=1)
    part, point = _find_share(totals, uniforms * totals.sum(-1))
    block, point = _find_share(sums, point)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token, _ = _find_share(inside, point)
    token = vocab.first + block * blocks.shape[-1] + token
    if vocab.parts > 1:
        is_here = part == jax.lax.axis_index(_TENSOR)
        token = jax.lax.psum(jnp.where(is_here, token, 0), _TENSOR)
    return token


def _find_share(
    weights: Float[Array, "C N"], point: Float[Array, " C"]
) -> tuple[Int[Array, " C"], Float[Array, " C"]]:
    """In which weight a point of [0, sum) lies when they are put end to end, and how far into it.

    Rounding may put the point beyond them all; it never makes the answer one of weight zero.
    """
    ends = jnp.cumsum(weights, axis=-1)
    covers = (ends > point[:, None]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax((weights > 0)[:, ::-1], axis=-1)
    index = jnp.where(covers.any(-1), jnp.argmax(covers, axis=-1), last)
    start = jnp.take_along_axis(ends - weights, index[:, None], axis=-1)[:, 0]
    return index, point - start


def _block_size(num_tokens: int) -> int:
    """The divisor nearest to the root, on which there are about as many blocks as tokens in one."""
    divisors = [n for n in range(1, num_tokens + 1) if num_tokens % n == 0]
    return min(divisors, key=lambda n: abs(math.log(n * n / num_tokens)))


def _chunks(num_tokens: int, row_bytes: int) -> tuple[int, int]:
    """Tokens of a chunk, so that its logits take about `_CHUNK_BYTES`, and number of chunks."""
    least = math.ceil(num_tokens * row_bytes / _CHUNK_BYTES)
    for count in range(least, 2 * least):
        if num_tokens % (count * 128) == 0:  # whole tiles of a TPU, and nothing to fill up
            return num_tokens // count, count
    return math.ceil(num_tokens / least), least


def _split_tokens(array: jax.Array, size: int, count: int) -> jax.Array:
    """An array [B, T, ...] as [chunks, tokens of a chunk, ...], filled up with zeros."""
    flat = array.reshape(-1, *array.shape[2:])
    filler = [(0, size * count - len(flat))] + [(0, 0)] * (flat.ndim - 1)
    return jnp.pad(flat, filler).reshape(count, size, *flat.shape[1:])


class _Vocabulary(NamedTuple):
    """The part of the vocabulary that a device has."""

    table: jax.Array
    first: Any
    """Id of its first token."""
    vocab_size: int
    """Ids from here on are padding."""
    parts: int
    """Devices with a part each."""

    @property
    def ids(self) -> Int[Array, " V"]:
        """The tokens of its rows."""
        return self.first + jnp.arange(len(self.table))

    def logits(self, x: Float[Array, "C D"]) -> Float[Array, "C V"]:
        """In float32 at least; the lowest value for padding."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.einsum("cd,vd->cv", x, self.table, preferred_element_type=wide)
        if len(self.table) * self.parts > self.vocab_size:
            logits = jnp.where(self.ids < self.vocab_size, logits, jnp.finfo(wide).min)
        return logits


def _vocabulary(table: Float[Array, "V D"], vocab_size: int, parts: int) -> _Vocabulary:
    """The part of the device that this runs on."""
    first = jax.lax.axis_index(_TENSOR) * len(table) if parts > 1 else 0
    return _Vocabulary(table, first, vocab_size, parts)


def _chunk(
    vocab: _Vocabulary,
    x: Float[Array, "C D"],
    targets: Int[Array, " C"],
    weights: Float[Array, " C"] | None,
) -> tuple[Float[Array, " C"], tuple[Float[Array, "C D"], Float[Array, "V D"]] | None]:
    """Losses of a chunk and, with weights, the gradient of their weighted sum."""
    table, logits = vocab.table, vocab.logits(x)
    wide = logits.dtype
    # A comparison joins the other passes over the logits, which a gather from them would not.
    is_target = vocab.ids == targets[:, None]
    picked = jnp.where(is_target, logits, 0).sum(-1)
    largest = logits.max(-1)
    total = jnp.exp(logits - largest[:, None]).sum(-1)
    if vocab.parts > 1:
        every = jax.lax.all_gather(jnp.stack([picked, largest, total]), _TENSOR)
        picked, largest = every[:, 0].sum(0), every[:, 1].max(0)
        total = (every[:, 2] * jnp.exp(every[:, 1] - largest)).sum(0)
    log_normalizer = largest + jnp.log(total)
    losses = log_normalizer - picked
    if weights is None:
        return losses, None
    slopes = (jnp.exp(logits - log_normalizer[:, None]) - is_target) * weights[:, None]
    slopes = slopes.astype(x.dtype)  # the products below are as fast as their wider type
    x_grad = jnp.einsum("cv,vd->cd", slopes, table, preferred_element_type=wide)
    return losses, (x_grad, jnp.einsum("cv,cd->vd", slopes, x, preferred_element_type=wide))
