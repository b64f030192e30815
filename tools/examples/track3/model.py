"""The model of Track 3 of modded-nanogpt, its optimization benchmark.

A decoder with an embedding and a head of its own: RMSNorm before each branch, after the embedding
and before the head, all with gains; rotary positions on half of each head, after queries and keys
are normalised; squared ReLU; biases everywhere; and logits capped at 15 in a smooth way. 12 layers,
6 heads of 128 columns and 50,304 rows of vocabulary, all in the softmax, are 162,354,816
parameters.

The benchmark fixes the architecture. Initial values are free there, and those of its baseline here.
It keeps its embedding in bfloat16; here all parameters are in float32, and matrix products in
bfloat16.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from maxmars.config import GPT2Config
from maxmars.distributed.sharding import constrain, copies, look_up
from maxmars.model.attention import attention

Parameter = nnx.Param[jax.Array]

LOGIT_CAP = 15.0
ATTENTION_SCALE = 0.12
LONGEST_PERIOD = 1024.0
HEAD_COLUMNS = 8
"""More columns of the head than the model is wide: its bias, and zeros that keep the matrix product
aligned to what GPUs multiply fast."""


def rms_norm(x: jax.Array, gain: Parameter | None = None) -> jax.Array:
    """x over the root mean square of its last axis, times the gain, in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.square(wide).mean(-1, keepdims=True)
    y = wide * jax.lax.rsqrt(mean + jnp.finfo(jnp.float32).eps)
    return (y if gain is None else y * gain[...]).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions of x [batch, length, heads, head_dim].

    Column i and column i + head_dim / 2 are a pair. The first half of the pairs turns by angles
    whose frequencies fall from 1 to 1/1024 a position; the other half does not turn.
    """
    turning = x.shape[-1] // 4
    frequencies = LONGEST_PERIOD ** -jnp.linspace(0.0, 1.0, turning)
    frequencies = jnp.concatenate([frequencies, jnp.zeros(turning)])
    angles = positions[:, :, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1).astype(x.dtype)


def normal(rngs: nnx.Rngs, std: float, **axes: int) -> Parameter:
    """A parameter with these axes, normally distributed."""
    values = std * jax.random.normal(rngs.params(), tuple(axes.values()))
    return nnx.Param(values, out_sharding=tuple(axes))


def constant(value: float, **axes: int) -> Parameter:
    """A parameter with these axes, all of one value."""
    return nnx.Param(jnp.full(tuple(axes.values()), value), out_sharding=tuple(axes))


class Block(nnx.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, kernels: GPT2Config, rngs: nnx.Rngs, nonzero: bool):
        """Projections back to the residual stream start at zero, the others with a variance of a
        third over their inputs; `nonzero` is the start of MuonH's results, which keep the norm of
        every matrix. `kernels` says which kernel computes attention."""
        heads = {"heads": kernels.num_heads, "head_dim": kernels.head_dim}
        embed, mlp = kernels.embed_dim, 4 * kernels.embed_dim
        std = (0.33 / embed) ** 0.5
        self.kernels = kernels
        self.attention_gain, self.mlp_gain = constant(1.0, norm=embed), constant(1.0, norm=embed)
        self.q, self.k, self.v = (normal(rngs, std, embed=embed, **heads) for _ in range(3))
        self.q_bias, self.k_bias, self.v_bias = (constant(0.0, **heads) for _ in range(3))
        self.attention_out = (
            normal(rngs, 1.25 * std, **heads, embed=embed)
            if nonzero
            else constant(0.0, **heads, embed=embed)
        )
        self.attention_out_bias = constant(0.0, norm=embed)
        self.mlp_in = normal(rngs, (1.5 if nonzero else 1) * std, embed=embed, mlp=mlp)
        self.mlp_in_bias = constant(0.0, mlp=mlp)
        self.mlp_out = (
            normal(rngs, 1.5 * std, mlp=mlp, embed=embed)  # three times that of its inputs
            if nonzero
            else constant(0.0, mlp=mlp, embed=embed)
        )
        self.mlp_out_bias = constant(0.0, norm=embed)

    def __call__(
        self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None
    ) -> jax.Array:
        """x [batch, length, embed]; positions and segments [batch, length]."""

        def linear(spec: str, x: jax.Array, kernel: Parameter, bias: Parameter) -> jax.Array:
            # In float32, as the gradient of a bias is a sum over all tokens.
            y = jnp.einsum(spec, x, kernel[...].astype(x.dtype)) + bias[...]
            return y.astype(x.dtype)

        x = constrain(x, "batch", "length", None)
        y = rms_norm(x, self.attention_gain)
        q = rotate(rms_norm(linear("btd,dhk->bthk", y, self.q, self.q_bias)), positions)
        k = rotate(rms_norm(linear("btd,dhk->bthk", y, self.k, self.k_bias)), positions)
        v = linear("btd,dhk->bthk", y, self.v, self.v_bias)
        y = attention(self.kernels, q, k, v, jnp.float32(ATTENTION_SCALE), segment_ids)
        x = x + linear("bthk,hkd->btd", y, self.attention_out, self.attention_out_bias)
        y = rms_norm(x, self.mlp_gain)
        y = jnp.square(jax.nn.relu(linear("btd,df->btf", y, self.mlp_in, self.mlp_in_bias)))
        return x + linear("btf,fd->btd", y, self.mlp_out, self.mlp_out_bias)


class Decoder(nnx.Module):
    """Embedding, norm, blocks under `jax.lax.scan`, norm, and the head."""

    def __init__(self, kernels: GPT2Config, rngs: nnx.Rngs, nonzero: bool):
        """The embedding starts standard normal, the head at zero."""
        rows, embed = kernels.vocab_size, kernels.embed_dim

        @functools.partial(nnx.vmap, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(kernels, rngs, nonzero)

        self.kernels = kernels
        self.embedding = normal(rngs, 1.0, vocab=rows, embed=embed)
        self.embedding_gain = constant(1.0, norm=embed)
        self.blocks = blocks(rngs.split(kernels.num_layers))
        self.head_gain = constant(1.0, norm=embed)
        self.head = constant(0.0, vocab=rows, embed=embed)
        self.head_bias = constant(0.0, vocab=rows)

    @property
    def output_embedding(self) -> jax.Array:
        """The rows of the head, each with its bias in the first of `HEAD_COLUMNS` more columns."""
        bias = jnp.pad(self.head_bias[...][:, None], ((0, 0), (0, HEAD_COLUMNS - 1)))
        return jnp.concatenate([self.head[...], bias], axis=-1)

    @staticmethod
    def cap_logits(logits: jax.Array) -> jax.Array:
        """Logits between -15 and 15, about the same where they are small."""
        return LOGIT_CAP * logits * jax.lax.rsqrt(jnp.square(logits) + LOGIT_CAP**2)

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """The last hidden states of tokens [batch, length], and a one for the bias of the head."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def step(x: jax.Array, block: Block) -> tuple[jax.Array, None]:
            return block(x, positions, segment_ids), None

        dtype = self.kernels.compute_dtype
        # The gradient of each row is a sum over all its tokens, made in float32.
        x = look_up(copies(self.embedding[...].astype(dtype)), tokens)
        x = rms_norm(x, self.embedding_gain).astype(dtype)
        x, _ = jax.lax.scan(step, x, self.blocks)
        x = rms_norm(x, self.head_gain)
        one = jnp.zeros((*tokens.shape, HEAD_COLUMNS), x.dtype).at[..., 0].set(1)
        return jnp.concatenate([x, one], axis=-1)


def make(
    *,
    rngs: nnx.Rngs,
    vocab_size: int,
    max_seq_len: int,
    num_layers: int = 12,
    num_heads: int = 6,
    embed_dim: int = 768,
    dtype: str = "bfloat16",
    nonzero: bool = False,
) -> Decoder:
    """The model of `ModuleConfig`; `dtype` is that of the matrix products. See `Block` for
    `nonzero`."""
    kernels = GPT2Config(
        num_layers=num_layers,
        num_heads=num_heads,
        embed_dim=embed_dim,
        max_seq_len=max_seq_len,
        vocab_size=vocab_size,
        compute_dtype=dtype,  # pyrefly: ignore
    )
    return Decoder(kernels, rngs, nonzero)
