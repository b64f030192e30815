"""Cross-entropy of next-token predictions, without the logits of all tokens at once.

The logits of a batch are its largest array by far: in float32, 6 GB a chip for 30 sequences of
GPT-2. Here each device computes them chunk by chunk, for its own tokens and its own shard of the
vocabulary, and drops each chunk's logits before the next chunk.

Shape letters: B batch, T length, D embed, V padded vocabulary, P shards of the batch; N tokens of a
device, C tokens of a chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from maxmars.distributed.sharding import GPUS, RULES, ambient_platform, constrain, on_devices
from maxmars.model.products import wide_product

CHUNK_BYTES = 2**29
"""Size of a chunk's logits on each device, about; with gradients on TPUs twice as much, as each
chunk reads and writes the gradient of the whole table."""
_TENSOR = RULES.vocab

Cap = Callable[[jax.Array], jax.Array]
"""A soft cap: a function of each logit by itself, such as `lambda x: 30 * jnp.tanh(x / 30)`."""


def logits(
    x: Float[Array, "B T D"],
    output_embedding: Float[Array, "V D"],
    vocab_size: int,
    cap: Cap | None = None,
) -> Float[Array, "B T V"]:
    """The logits x output_embeddingᵀ of all tokens, under the cap, in float32 at least.

    Columns from `vocab_size` on are padding and hold the lowest finite value.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    values = jnp.einsum("btd,vd->btv", x, output_embedding, preferred_element_type=wide)
    values = constrain(values, "batch", "length", "vocab")
    if cap is not None:
        values = cap(values)
    rows = len(output_embedding)
    if rows > vocab_size:
        values = jnp.where(jnp.arange(rows) < vocab_size, values, jnp.finfo(wide).min)
    return values


def cross_entropy(logits: Float[Array, "*B V"], targets: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Negative log-likelihood of each target, in nats: the plain reference."""
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log_normalizer - picked


def token_losses(
    x: Float[Array, "B T D"],
    tables: Float[Array, "P V D"],
    targets: Int[Array, "B T"],
    vocab_size: int,
    chunk_bytes: int | None = None,
    cap: Cap | None = None,
) -> Float[Array, "B T"]:
    """`cross_entropy` of the logits x tableᵀ, in nats, in float32 at least; for validation, as its
    gradient keeps the logits of all tokens, where that of `mean_loss` does not.

    Args:
      x: the residual stream, in the type of the matrix products.
      tables: `sharding.copies` of the output head [V, D] in the same type.
      targets: the tokens to predict.
      vocab_size: the rows from here on are padding and have probability zero.
      chunk_bytes: size of a chunk's logits on each device, about; None takes the platform's.
      cap: of the logits; it closes over no array that is differentiated.
    """
    return _over_chunks(x, tables, targets, vocab_size, chunk_bytes, cap)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def mean_loss(
    x: Float[Array, "B T D"],
    tables: Float[Array, "P V D"],
    targets: Int[Array, "B T"],
    vocab_size: int,
    chunk_bytes: int | None = None,
    cap: Cap | None = None,
    weights: Float[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Mean over all tokens of `token_losses`, with the same arguments, times `weights`.

    Under differentiation, the gradient is computed together with the value, while the logits of a
    chunk are there: to compute them again would cost one matrix product in four. Memory stays the
    same, because the gradient of the output embedding is the first of a backward pass anyway. There
    a logit counts as at most 75 nats above the target's, which bounds the loss of a token.
    `weights` has no gradient.
    """
    losses, _ = _over_chunks(x, tables, targets, vocab_size, chunk_bytes, cap)
    return (losses if weights is None else weights * losses).mean()


def _mean_loss_fwd(
    x: Any,
    tables: Any,
    targets: Any,
    vocab_size: int,
    chunk_bytes: int | None,
    cap: Cap | None,
    weights: Any,
) -> tuple[Any, Any]:
    slopes = weights
    if weights is None:
        slopes = jnp.ones(targets.shape, jnp.promote_types(x.dtype, jnp.float32))
    losses, grads = _over_chunks(x, tables, targets, vocab_size, chunk_bytes, cap, slopes)
    return (losses if weights is None else weights * losses).mean(), grads


def _mean_loss_bwd(
    vocab_size: int, chunk_bytes: int | None, cap: Cap | None, grads: Any, weight: Any
) -> tuple[Any, ...]:
    weight = weight / math.prod(grads[0].shape[1:3])
    # Each shard of the vocabulary has a term of the gradient to x.
    x_terms, tables_grad = ((weight * terms).astype(terms.dtype) for terms in grads)
    return x_terms.sum(0), tables_grad, None, None


mean_loss.defvjp(_mean_loss_fwd, _mean_loss_bwd)


def _over_chunks(
    x: Any,
    tables: Any,
    targets: Any,
    vocab_size: int,
    chunk_bytes: int | None,
    cap: Cap | None,
    weights: Any = None,
) -> tuple[Any, Any]:
    """Losses and, with `weights` [B, T], the gradient of their weighted sum to x and the tables.

    A new first axis of the gradient to x holds the term of each shard of the vocabulary.
    """
    on_device = functools.partial(
        _on_device, vocab_size=vocab_size, chunk_bytes=chunk_bytes, cap=cap
    )
    grads = RULES.spec("vocab", "batch"), RULES.spec("batch", "vocab", None)
    out_specs = RULES.spec("batch", None), None if weights is None else grads
    return _shard_mapped(on_device, out_specs, x, tables, targets, weights)


def _shard_mapped(
    function: Callable[..., Any], out_specs: Any, x: Any, tables: Any, *rows: Any
) -> Any:
    """Call a function with the tokens and the shard of the vocabulary of a device, on every device
    of the ambient mesh, if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(x, tables, *rows, num_shards=1)
    function = functools.partial(function, num_shards=mesh.shape[_TENSOR])
    of_rows = RULES.spec("batch", None)
    in_specs = (of_rows, RULES.spec("batch", "vocab", None), *[of_rows] * len(rows))
    return on_devices(function, in_specs, out_specs)(x, tables, *rows)


def _on_device(
    x: Float[Array, "B T D"],
    tables: Float[Array, "1 V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None,
    *,
    vocab_size: int,
    chunk_bytes: int | None,
    cap: Cap | None,
    num_shards: int,
) -> tuple[Float[Array, "B T"], tuple[Float[Array, "1 B T D"], Float[Array, "1 V D"]] | None]:
    """`_over_chunks` for one device's tokens and its one of `num_shards` of the vocabulary."""
    vocab, platform = _vocabulary(tables[0], vocab_size, num_shards, cap), ambient_platform()
    row_bytes = tables.shape[1] * jnp.promote_types(x.dtype, jnp.float32).itemsize
    if chunk_bytes is None:
        sums_gradients = weights is not None and platform in ("tpu", *GPUS)
        chunk_bytes = 2 * CHUNK_BYTES if sums_gradients else CHUNK_BYTES
    if platform in GPUS:  # two at least: XLA makes no loop of one, whose arguments are then results
        chunk_bytes = min(chunk_bytes, targets.size * row_bytes // 2)
    split = functools.partial(_split_tokens, *_chunks(targets.size, row_bytes, chunk_bytes))

    def joined(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return chunks.reshape(-1, *shape[2:])[: targets.size].reshape(shape)

    if weights is None:
        losses = jax.lax.map(lambda chunk: _losses(vocab, *chunk), (split(x), split(targets)))
        return joined(losses, targets.shape), None

    def add(carry: Any, chunk: Any) -> tuple[Any, Any]:
        total, products = carry
        arrays, next_products = chunk
        losses, x_grad, embedding_grad = _losses_and_gradients(vocab, products, *arrays)
        return (total + embedding_grad, next_products), (losses, x_grad.astype(x.dtype))

    products = vocab.products_of(x, targets)
    # All targets' own rows at once: each chunk would sort its own, and copy the table.
    first = vocab.gradient_of_rows(x, targets, weights, products)
    # XLA fuses an argument of the loop into the epilogue of a product, but not what it takes from
    # an array there. So each chunk hands the next one its targets' products.
    rest = jnp.roll(split(products), -1, 0)
    # The tokens that pad the last chunk have weight zero.
    chunks = tuple(map(split, (x, targets, weights))), rest
    (embedding_grad, _), (losses, x_grad) = jax.lax.scan(add, (first, rest[-1]), chunks)
    if platform == "tpu":
        # Where all tokens are one chunk, libtpu else gives the update the product's own layout: it
        # copies the table and its moments into that layout and back.
        embedding_grad = with_layout_constraint(embedding_grad, Layout((0, 1)))
    x_grad = joined(x_grad, x.shape)[None]
    return joined(losses, targets.shape), (x_grad, embedding_grad.astype(tables.dtype)[None])


def draw_targets(
    x: Float[Array, "B T D"],
    tables: Float[Array, "P V D"],
    uniforms: Float[Array, "B T"],
    vocab_size: int,
    chunk_bytes: int = CHUNK_BYTES,
    cap: Cap | None = None,
) -> Int[Array, "B T"]:
    """Draw a token for each position from the softmax of the logits x tableᵀ.

    By inverse transform sampling: [0, 1) is divided among the tokens in the order of the
    vocabulary, each with its probability, and the position's uniform number picks the token. Apart
    from rounding, the result depends neither on chunks nor on devices.

    Args:
      x, tables, vocab_size, chunk_bytes, cap: as in `token_losses`; padding is never drawn.
      uniforms: independent numbers from [0, 1), in float32 at least.
    """
    draw = functools.partial(
        _draw_on_device, vocab_size=vocab_size, chunk_bytes=chunk_bytes, cap=cap
    )
    return _shard_mapped(draw, RULES.spec("batch", None), x, tables, uniforms)


def _draw_on_device(
    x: Float[Array, "B T D"],
    tables: Float[Array, "1 V D"],
    uniforms: Float[Array, "B T"],
    *,
    vocab_size: int,
    chunk_bytes: int,
    cap: Cap | None,
    num_shards: int,
) -> Int[Array, "B T"]:
    """`draw_targets` for one device's tokens and its one of `num_shards` of the vocabulary."""
    vocab = _vocabulary(tables[0], vocab_size, num_shards, cap)
    row_bytes = tables.shape[1] * uniforms.dtype.itemsize
    split = functools.partial(_split_tokens, *_chunks(uniforms.size, row_bytes, chunk_bytes))
    chunks = split(x), split(uniforms)
    drawn = jax.lax.map(lambda chunk: _draw_chunk(vocab, *chunk), chunks)
    return drawn.reshape(-1)[: uniforms.size].reshape(uniforms.shape)


def _draw_chunk(
    vocab: _Vocabulary, x: Float[Array, "C D"], uniforms: Float[Array, " C"]
) -> Int[Array, " C"]:
    """Draw a chunk's targets: choose the device, then a block of its tokens, then a token of it.

    A cumulative sum over all tokens at once would be as large as the logits.
    """
    logits = vocab.logits(vocab.products(x))
    largest = logits.max(-1)
    if vocab.num_shards > 1:
        largest = jax.lax.pmax(largest, _TENSOR)
    weights = jnp.exp(logits - largest[:, None])
    blocks = weights.reshape(len(x), -1, _block_size(len(vocab.embedding)))
    sums = blocks.sum(-1)
    totals = sums.sum(-1, keepdims=True)
    if vocab.num_shards > 1:
        totals = jax.lax.all_gather(totals[:, 0], _TENSOR, axis=1)
    shard, point = _find_interval(totals, uniforms * totals.sum(-1))
    block, point = _find_interval(sums, point)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token, _ = _find_interval(inside, point)
    token = vocab.first + block * blocks.shape[-1] + token
    if vocab.num_shards > 1:  # every device draws, and the chosen one's token counts
        is_here = shard == jax.lax.axis_index(_TENSOR)
        token = jax.lax.psum(jnp.where(is_here, token, 0), _TENSOR)
    return token


def _find_interval(
    weights: Float[Array, "C N"], point: Float[Array, " C"]
) -> tuple[Int[Array, " C"], Float[Array, " C"]]:
    """The index of the weight that a point of [0, sum) falls into, and the distance from its start.

    The weights lie end to end. Where rounding moves the point beyond the last one, or onto a weight
    of zero, the index is still that of a positive weight.
    """
    ends = jnp.cumsum(weights, axis=-1)
    covers = (ends > point[:, None]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax((weights > 0)[:, ::-1], axis=-1)
    index = jnp.where(covers.any(-1), jnp.argmax(covers, axis=-1), last)
    start = jnp.take_along_axis(ends - weights, index[:, None], axis=-1)[:, 0]
    return index, point - start


def _block_size(num_tokens: int) -> int:
    """The divisor of `num_tokens` nearest to its root: about as many blocks as tokens in each."""
    divisors = [n for n in range(1, num_tokens + 1) if num_tokens % n == 0]
    return min(divisors, key=lambda n: abs(math.log(n * n / num_tokens)))


def _chunks(num_tokens: int, row_bytes: int, chunk_bytes: int) -> tuple[int, int]:
    """Tokens of a chunk, so that its logits take about `chunk_bytes`, and the number of chunks."""
    least = math.ceil(num_tokens * row_bytes / chunk_bytes)
    for count in range(least, 2 * least):
        if num_tokens % (count * 128) == 0:  # whole tiles of a TPU, and no padding
            return num_tokens // count, count
    return math.ceil(num_tokens / least), least


def _split_tokens(size: int, count: int, array: jax.Array) -> jax.Array:
    """An array [B, T, ...] as [chunks, tokens of a chunk, ...], padded with zeros."""
    flat = array.reshape(-1, *array.shape[2:])
    padding = [(0, size * count - len(flat))] + [(0, 0)] * (flat.ndim - 1)
    return jnp.pad(flat, padding).reshape(count, size, *flat.shape[1:])


class _Vocabulary(NamedTuple):
    """A device's shard of the vocabulary."""

    embedding: jax.Array
    """Its rows of the output embedding."""
    first: Any
    """Id of its first token."""
    num_shards: int
    """Number of shards, each on devices of its own."""
    padding: jax.Array
    """Minus infinity for ids that are padding, 0 for others, [V]."""
    cap: Cap | None

    def products(self, x: Float[Array, "C D"]) -> Float[Array, "C V"]:
        """The logits before the cap, in float32 at least."""
        return wide_product(x, self.embedding, transpose_b=True)

    def capped(self, products: jax.Array) -> jax.Array:
        return products if self.cap is None else self.cap(products)

    def logits(self, products: Float[Array, "C V"]) -> Float[Array, "C V"]:
        """The products under the cap; minus infinity for padding."""
        return self.capped(products) + self.padding

    def slopes(self, products: jax.Array, d_logits: jax.Array) -> jax.Array:
        """The gradient to the products, from the gradient to the logits."""
        return d_logits if self.cap is None else jax.vjp(self.cap, products)[1](d_logits)[0]

    def rows(self, targets: Int[Array, "*N"]) -> tuple[Int[Array, "*N"], Bool[Array, "*N"]]:
        """The row of each target in this shard, 0 for those of others, and whether it is here."""
        rows = targets - self.first
        is_here = (rows >= 0) & (rows < len(self.embedding))
        return jnp.where(is_here, rows, 0), is_here

    def vectors(self, targets: Int[Array, "*N"], dtype: Any) -> Float[Array, "*N D"]:
        """The rows of the targets in this shard; zeros for others."""
        rows, is_here = self.rows(targets)
        return jnp.where(is_here[..., None], self.embedding[rows], 0).astype(dtype)

    def products_of(self, x: Float[Array, "*N D"], targets: Int[Array, "*N"]) -> Float[Array, "*N"]:
        """The products of the targets alone, in float32 at least."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        products = (x.astype(wide) * self.vectors(targets, wide)).sum(-1)
        return self.over_shards(jax.lax.psum, products)

    def gradient_of_rows(
        self,
        x: Float[Array, "*N D"],
        targets: Int[Array, "*N"],
        weights: Float[Array, "*N"],
        products: Float[Array, "*N"],
    ) -> Float[Array, "V D"]:
        """Gradient to the embedding of the targets' logits alone, weighted and negative."""
        rows, is_here = self.rows(targets)
        slopes = jnp.where(is_here, -self.slopes(products, weights), 0)
        zeros = jnp.zeros(self.embedding.shape, products.dtype)
        return zeros.at[rows].add(slopes[..., None] * x.astype(products.dtype))

    def over_shards(self, reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        """x reduced by `jax.lax.psum` or `pmax` over the shards of the vocabulary."""
        return reduce(x, _TENSOR) if self.num_shards > 1 else x


def _vocabulary(
    embedding: Float[Array, "V D"], vocab_size: int, num_shards: int, cap: Cap | None
) -> _Vocabulary:
    """The shard of the device that this runs on."""
    first = jax.lax.axis_index(_TENSOR) * len(embedding) if num_shards > 1 else 0
    wide = jnp.promote_types(embedding.dtype, jnp.float32)
    is_token = first + jnp.arange(len(embedding)) < vocab_size
    padding = jnp.where(is_token, 0, -jnp.inf).astype(wide)
    return _Vocabulary(embedding, first, num_shards, padding, cap)


def _losses(
    vocab: _Vocabulary, x: Float[Array, "C D"], targets: Int[Array, " C"]
) -> Float[Array, " C"]:
    """Losses of a chunk, exact however large a logit is.

    The target's logit is one of the chunk's: computed apart, it would be rounded in another way
    where float32 products are of bfloat16 or TF32.
    """
    logits, (rows, is_here) = vocab.logits(vocab.products(x)), vocab.rows(targets)
    # XLA fuses a comparison with the other passes over the logits, but not a gather.
    is_target = (jnp.arange(logits.shape[1]) == rows[:, None]) & is_here[:, None]
    picked = jnp.where(is_target, logits, 0).sum(-1)
    largest = vocab.over_shards(jax.lax.pmax, logits.max(-1))
    total = jnp.exp(logits - largest[:, None]).sum(-1)
    picked, total = (vocab.over_shards(jax.lax.psum, some) for some in (picked, total))
    return jnp.log(total) + (largest - picked)


_MOST_NATS = 75.0
"""Largest difference of a logit and its target's: a sum of a vocabulary is finite in float32."""


def _losses_and_gradients(
    vocab: _Vocabulary,
    target_products: Float[Array, " C"],
    x: Float[Array, "C D"],
    targets: Int[Array, " C"],
    weights: Float[Array, " C"],
) -> tuple[Float[Array, " C"], Float[Array, "C D"], Float[Array, "V D"]]:
    """Losses of a chunk, and the gradient of their weighted sum to x and to the embedding, the
    latter without `gradient_of_rows`.

    With s = exp(logit - target's logit) a loss is log(sum s), and the gradient to a logit s / sum
    s, less 1 at the target. The target's logit is known before all others, so s is computed in the
    epilogue of their product, and no logits are written.
    """
    platform = ambient_platform()
    if platform == "tpu":
        # Else both products would read the chunk out of all tokens, in windows so small that the
        # exponentials are computed twice: by the compiler's clock a third more for XL.
        x = jax.lax.optimization_barrier(x)
    products = vocab.products(x)
    wide = products.dtype
    relative = vocab.logits(products) - vocab.capped(target_products)[:, None]
    exponentials = jnp.exp(jnp.minimum(relative, _MOST_NATS))
    # Rounded, as products run at the rate of their wider type. On GPUs before they are summed: else
    # XLA would write the logits for the sum.
    if platform in GPUS:
        rounded = jax.lax.optimization_barrier(exponentials.astype(x.dtype))
        total = rounded.astype(wide).sum(-1)
    else:
        rounded, total = jax.lax.optimization_barrier(
            (exponentials.astype(x.dtype), exponentials.sum(-1))
        )
    total = vocab.over_shards(jax.lax.psum, total)
    if vocab.cap is not None:
        rounded = vocab.slopes(products, exponentials).astype(x.dtype)
    scale = (weights / total)[:, None]
    target_slopes = vocab.slopes(target_products, total)[:, None]
    x_grad = wide_product(rounded, vocab.embedding) - target_slopes * vocab.vectors(targets, wide)
    embedding_grad = wide_product(rounded, (scale * x).astype(x.dtype), transpose_a=True)
    return jnp.log(total), scale * x_grad, embedding_grad
