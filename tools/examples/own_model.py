"""A language model of your own for `maxmars train`, and a config that trains it.

    maxmars train tools/examples/own_model.py:optimizer=mars_shampoo
    maxmars train tools/examples/own_model.py --model.options.num-layers 8
    maxmars generate runs/own-model --prompt "def "

The block is the one of most models today: rotary positions, RMSNorm before and QK-norm inside the
attention, SwiGLU, no biases, and a head of its own. Every parameter names its axes; these names say
how it is split over a mesh, and which matrix an optimizer sees. The rest is optional: by `prefill`
and `decode`, `generate` caches keys and values; by `continuations`, HellaSwag has a context and all
its endings in one row; by `export`, `maxmars export` writes Hugging Face's Qwen3; and of
`remat_policies`, `--model.remat` says what is computed again in the backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from maxmars.config import (
    AdamWConfig,
    MarsConfig,
    ModuleConfig,
    OptimizerConfig,
    TrainConfig,
    load_config,
)
from maxmars.distributed.sharding import constrain, copies, look_up

Parameter = nnx.Param[jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""Attention [batch, length, heads, head_dim] of queries, keys and values, and what it keeps."""


def rms_norm(x: jax.Array, scale: Parameter) -> jax.Array:
    """x over the root mean square of its last axis, in float32, times `scale`."""
    wide = x.astype(jnp.float32)
    mean = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6) * scale[...]).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions (arXiv 2104.09864) of x [batch, length, heads, head_dim]."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / half)
    angles = positions[:, :, None, None] * frequencies
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, embed_dim: int, num_heads: int, rngs: nnx.Rngs, out_std: float):
        """Projections start normal, with standard deviation 0.02 or, back to x, `out_std`."""
        head_dim, mlp_dim = embed_dim // num_heads, 8 * embed_dim // 3 // 64 * 64 or 64

        def matrix(std: float = 0.02, **axes: int) -> Parameter:
            values = std * jax.random.normal(rngs.params(), tuple(axes.values()))
            return nnx.Param(values, out_sharding=tuple(axes))

        def ones(size: int) -> Parameter:
            return nnx.Param(jnp.ones(size), out_sharding=("norm",))

        self.attention_norm, self.mlp_norm = ones(embed_dim), ones(embed_dim)
        self.query_norm, self.key_norm = ones(head_dim), ones(head_dim)
        self.qkv = matrix(embed=embed_dim, qkv=3, heads=num_heads, head_dim=head_dim)
        self.out = matrix(out_std, heads=num_heads, head_dim=head_dim, embed=embed_dim)
        self.gate = matrix(embed=embed_dim, mlp=mlp_dim)
        self.up = matrix(embed=embed_dim, mlp=mlp_dim)
        self.down = matrix(out_std, mlp=mlp_dim, embed=embed_dim)

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
        """x [batch, length, embed] after this block, and what `attend` keeps."""

        def dot(spec: str, x: jax.Array, kernel: Parameter) -> jax.Array:
            return jnp.einsum(spec, x, kernel[...].astype(x.dtype))

        x = constrain(x, "batch", "length", None)
        q, k, v = jnp.unstack(dot("btd,dshk->sbthk", rms_norm(x, self.attention_norm), self.qkv))
        q = rotate(rms_norm(q, self.query_norm), positions)
        k = rotate(rms_norm(k, self.key_norm), positions)
        attended, kept = attend(q, k, v)
        x = x + dot("bthk,hkd->btd", attended, self.out)
        y = rms_norm(x, self.mlp_norm)
        y = jax.nn.silu(dot("btd,df->btf", y, self.gate)) * dot("btd,df->btf", y, self.up)
        return x + dot("btf,fd->btd", y, self.down), kept


class Decoder(nnx.Module):
    """Token embedding, blocks under `jax.lax.scan`, a norm, and the head `lm_head`."""

    remat_policies: ClassVar = {
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    remat = None  # or one of these, which the trainer puts here

    def __init__(
        self,
        rngs: nnx.Rngs,
        vocab_size: int,
        max_seq_len: int,
        num_layers: int,
        num_heads: int,
        embed_dim: int,
        dtype: str,
    ):
        """`dtype` is that of the matrix products."""
        self.dtype = dtype
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        rows = -(-vocab_size // 128) * 128  # so that a mesh divides them; the loss masks the rest

        def table() -> Parameter:
            values = 0.02 * jax.random.normal(rngs.params(), (rows, embed_dim))
            return nnx.Param(values, out_sharding=("vocab", "embed"))

        @functools.partial(nnx.vmap, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(embed_dim, num_heads, rngs, out_std=0.02 / (2 * num_layers) ** 0.5)

        self.embedding, self.lm_head = table(), table()
        self.blocks = blocks(rngs.split(num_layers))
        self.norm = nnx.Param(jnp.ones(embed_dim), out_sharding=("norm",))

    @property
    def output_embedding(self) -> jax.Array:
        """The rows of the head."""
        return self.lm_head[...]

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """The last hidden states [batch, length, embed] of tokens [batch, length]."""
        mask = None
        if segment_ids is not None:
            mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        return self._run_whole(tokens, positions, mask)

    def continuations(
        self, tokens: jax.Array, positions: jax.Array, continuation_ids: jax.Array
    ) -> jax.Array:
        """The same of rows of a context, 0, which all its continuations, 1, 2, ..., see."""
        keys = continuation_ids[:, None, None, :]
        mask = (keys == 0) | (keys == continuation_ids[:, None, :, None])
        return self._run_whole(tokens, positions, mask)

    def _run_whole(
        self, tokens: jax.Array, positions: jax.Array | None, mask: jax.Array | None
    ) -> jax.Array:
        """`mask` says, besides causality, which keys [batch, 1, length, length] a token sees."""

        def attend(before: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True), None

        return self._run(tokens, positions, attend)[0]

    def _run(
        self, tokens: jax.Array, positions: jax.Array | None, attend: Any, cache: Any = None
    ) -> tuple[jax.Array, Any]:
        """`attend` gets the layer's part of `cache` before queries, keys and values."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def step(x: jax.Array, layer: tuple[Block, Any]) -> tuple[jax.Array, Any]:
            block, before = layer
            return block(x, positions, functools.partial(attend, before))

        # `table[tokens]` would do on one device. This sums the gradient of each row in float32, and
        # moves table and gradient between devices in the type of the products.
        x = look_up(copies(self.embedding[...].astype(self.dtype)), tokens).astype(self.dtype)
        if self.remat is not None:
            step = jax.checkpoint(step, policy=self.remat_policies[self.remat], prevent_cse=False)
        x, kept = jax.lax.scan(step, x, (self.blocks, cache))
        return rms_norm(x, self.norm), kept

    def prefill(
        self, tokens: jax.Array, lengths: jax.Array, num_slots: int
    ) -> tuple[jax.Array, Any]:
        """The hidden state [batch, embed] of each prompt's last token [batch, length], and keys
        and values [layers, batch, num_slots, heads, head_dim]."""
        padding = (0, 0), (0, num_slots - tokens.shape[1]), (0, 0), (0, 0)

        def attend(before: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            return y, (jnp.pad(k, padding), jnp.pad(v, padding))

        x, cache = self._run(tokens, None, attend)
        return jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)[:, 0], cache

    def decode(self, tokens: jax.Array, positions: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """The hidden states of one more token of each row; the slots are the positions."""
        rows = jnp.arange(len(tokens))
        seen = jnp.arange(cache[0].shape[2]) <= positions[:, None]

        def attend(before: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            keys, values = (
                old.at[rows, positions].set(new[:, 0])
                for old, new in zip(before, (k, v), strict=True)
            )
            y = jax.nn.dot_product_attention(q, keys, values, mask=seen[:, None, None])
            return y, (keys, values)

        x, cache = self._run(tokens[:, None], positions[:, None], attend, cache)
        return x[:, 0], cache

    def export(self) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """The model as Hugging Face's Qwen3: the fields of `config.json`, and the arrays."""
        blocks = self.blocks
        _, width, _, num_heads, head_dim = blocks.qkv.shape
        fields = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_seq_len,
            "hidden_size": width,
            "intermediate_size": blocks.gate.shape[-1],
            "num_hidden_layers": len(blocks.qkv),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": head_dim,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
        }
        arrays = {
            "model.embed_tokens.weight": self.embedding[: self.vocab_size],
            "model.norm.weight": self.norm[...],
            "lm_head.weight": self.lm_head[: self.vocab_size],
        }
        for i in range(len(blocks.qkv)):
            qkv = jnp.unstack(blocks.qkv[i].reshape(width, 3, -1), axis=1)  # PyTorch has [out, in]
            layer = {
                "input_layernorm": blocks.attention_norm[i],
                **{f"self_attn.{name}_proj": w.T for name, w in zip("qkv", qkv, strict=True)},
                "self_attn.q_norm": blocks.query_norm[i],
                "self_attn.k_norm": blocks.key_norm[i],
                "self_attn.o_proj": blocks.out[i].reshape(-1, width).T,
                "post_attention_layernorm": blocks.mlp_norm[i],
                "mlp.gate_proj": blocks.gate[i].T,
                "mlp.up_proj": blocks.up[i].T,
                "mlp.down_proj": blocks.down[i].T,
            }
            arrays |= {f"model.layers.{i}.{name}.weight": array for name, array in layer.items()}
        return fields, arrays


def make(
    *,
    rngs: nnx.Rngs,
    vocab_size: int,
    max_seq_len: int,
    num_layers: int = 4,
    num_heads: int = 4,
    embed_dim: int = 128,
    dtype: str = "bfloat16",
) -> Decoder:
    """The model of `ModuleConfig`; rotary positions need no `max_seq_len`, which `export` tells."""
    return Decoder(rngs, vocab_size, max_seq_len, num_layers, num_heads, embed_dim, dtype)


def get_config(
    optimizer: Literal["adamw", "mars", "mars_shampoo"] = "mars", data: str = ""
) -> TrainConfig:
    """The quickstart's run with this model; `data` is a directory of tokens, as there."""
    rules: dict[str, OptimizerConfig] = {
        "adamw": AdamWConfig(learning_rate=3e-3),
        "mars": MarsConfig(learning_rate=6e-3),
        "mars_shampoo": MarsConfig(
            variant="shampoo",
            learning_rate=2e-2,
            vector_learning_rate_scale=0.15,
            clip_threshold=None,
        ),
    }
    # On the command line only options that stand here can be changed.
    options = {"num_layers": 4, "num_heads": 4, "embed_dim": 128, "dtype": "float32"}
    base = load_config(f"quickstart:data={data}" if data else "quickstart")
    model = ModuleConfig(
        make="own_model.py:make",
        options=options,
        vocab_size=base.model.vocab_size,
        max_seq_len=base.model.max_seq_len,
    )
    return dataclasses.replace(base, name="own-model", model=model, optimizer=rules[optimizer])
