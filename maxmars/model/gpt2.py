"""GPT-2 in Flax NNX: stacked layers under `jax.lax.scan`, Hugging Face names, named axes.

Parameters are named as in Hugging Face (`wte`, `wpe`, `h`, `ln_1`, `attn.c_attn`, ...), with two
differences. All blocks live in one `h` whose leaves have a leading axis of layers. `attn.c_attn` is
stored [L, D, 3, H, K] and `attn.c_proj` [L, H, K, D]: if the fused kernel [D, 3 D] were split by
columns over `tensor`, every layer would move queries, keys and values between devices.

Where this is not what NNX's own examples do, it is for these reasons. Optimizers, checkpoints and
digests take parameters as plain nested dicts, so there is no `nnx.Optimizer`, and `make_model`
merges them into the module inside of each trace, where that costs nothing. Blocks are stacked by
`nnx.scan` when they are made; a call scans them by `jax.lax.scan`, which also scans a cache and
rematerialises. `Linear`, `LayerNorm` and `Embedding` are our own, since `nnx.Linear` knows neither
kernels of named axes nor biases in float32, and their backward passes and layouts were measured.
The names of axes stand in the metadata `axes`, as Flax takes those in `out_sharding` for axes of
the mesh; beside them `matrix_spec` says to optimizers what a matrix is. Attention is a function
that blocks get, so that training, prefill and decoding share them.

Shape letters: B batch, T length, D embed, H heads, K head_dim, F mlp, V padded vocabulary,
L layers, P shards of the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int, Key

from maxmars.config import GPT2Config
from maxmars.distributed.sharding import (
    GPUS,
    RULES,
    ambient_batch_shards,
    ambient_platform,
    constrain,
    copies,
    gathered,
    look_up,
    on_shards,
)
from maxmars.model import kv_cache
from maxmars.model.attention import RESIDUALS, attention, flat_attention_on_mesh, takes_flat
from maxmars.model.products import cpu_linear
from maxmars.optim import MatrixSpec

LAYERS = "layers"
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention [B, T, H, K] of queries, keys and values [B, T, H, K], and the logits' factor []."""


@dataclass(frozen=True)
class FlatAttend:
    """Attention on arrays [B, T, H K], as products write them, with queries that are scaled."""

    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


_INIT_STD = 0.02
_VECTOR = MatrixSpec(rows=(), cols=(0,))


def _at_least_float32(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any) -> jax.Array:
    """Normal random numbers. They are drawn with few axes: each that is not split over a mesh is
    joined to the one before, as XLA's CPU backend unrolls loops over short ones, for seconds."""
    joined: list[int] = []
    for size, mesh_axis in zip(shape, RULES.spec(*axes), strict=True):
        if mesh_axis is None and joined:
            joined[-1] *= size
        else:
            joined.append(size)
    return jax.random.normal(rngs.params(), joined, dtype).reshape(shape)


class LayerNorm(nnx.Module):
    """Normalisation over the last axis, computed in float32 at least."""

    def __init__(self, config: GPT2Config):
        """Scale of ones and, with `use_bias`, bias of zeros, both [D]."""
        self.config = config
        shape = (config.embed_dim,)
        kind: Any = {"axes": ("norm",), "matrix_spec": _VECTOR}
        self.scale = nnx.Param(jnp.ones(shape, config.param_dtype), **kind)
        if config.use_bias:
            self.bias = nnx.Param(jnp.zeros(shape, config.param_dtype), **kind)

    def __call__(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """Normalise x; the result has the type of matrix products."""
        y = _normalized(x, self.scale[...], self.config.layer_norm_epsilon)
        if self.config.use_bias:
            y = y + self.bias[...]
        return y.astype(self.config.compute_dtype)


def _recomputed(residuals: Any) -> Any:
    """Residuals from which a backward pass recomputes. Without the barrier XLA on GPUs would store
    results of the forward pass, such as the tanh of a GELU, in arrays as large as x."""
    return jax.lax.optimization_barrier(residuals) if ambient_platform() in GPUS else residuals


# The form of GPT-2 XL on TPUs. Its width of 1,600 does not fill the last tile of 128 lanes, and
# libtpu then (a) computes a norm or a GELU inside of the product that reads it, again for each
# window of the result, and (b) lays products out with the tokens innermost, for the sums over them
# in a norm's gradient, and copies. By its own clock such a product takes up to twice as long.
# With fewer columns or tokens, or whole tiles, the arrays that this form writes only cost.
_LANES, _LEAST_WIDTH, _LEAST_TOKENS = 128, 1280, 8192


def _is_ragged(x: Float[Array, "B T _"], width: int) -> bool:
    """Whether a TPU has many tokens of a wide residual stream whose last tile is not full."""
    if ambient_platform() != "tpu" or width < _LEAST_WIDTH or width % _LANES == 0:
        return False
    return math.prod(x.shape[:2]) >= _LEAST_TOKENS * ambient_batch_shards()


def _written(x: Float[Array, "B T _"], width: int) -> jax.Array:
    """x as an array of its own, and so its gradient, beside a residual stream of this width that
    `_is_ragged`; other x as they are."""
    return jax.lax.optimization_barrier(x) if _is_ragged(x, width) else x


def _in_rows(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The residual stream x with D innermost in memory, and so its gradient, if it `_is_ragged`."""
    if not _is_ragged(x, x.shape[-1]):
        return x
    return with_layout_constraint(x, Layout(major_to_minor=(0, 1, 2)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _normalized(
    x: Float[Array, "*B T D"], scale: Float[Array, " D"], epsilon: float
) -> Float[Array, "*B T D"]:
    """x normalised over its last axis, times the scale, in float32 at least."""
    return _normalized_fwd(x, scale, epsilon)[0]


def _normalized_fwd(x: Any, scale: Any, epsilon: float) -> tuple[jax.Array, Any]:
    y = x.astype(_at_least_float32(x.dtype))
    mean = y.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(y - mean).mean(-1, keepdims=True) + epsilon)
    return (y - mean) * inverse * scale, (x, scale, mean, inverse)


def _normalized_bwd(epsilon: float, residuals: Any, d_y: jax.Array) -> tuple[Any, Any]:
    # From the mean and the deviation of each token; what differentiation would keep instead makes
    # XLA write the terms of the scale's gradient to memory: 2 % of a step of small on an H200.
    x, scale, mean, inverse = residuals
    x, mean, inverse = _recomputed((x, mean, inverse))
    normal = (x.astype(mean.dtype) - mean) * inverse
    d_scale = (d_y * normal).sum(range(x.ndim - 1))
    d_normal = d_y * scale
    along = (d_normal * normal).mean(-1, keepdims=True)
    d_x = (d_normal - d_normal.mean(-1, keepdims=True) - normal * along) * inverse
    return d_x.astype(x.dtype), d_scale.astype(scale.dtype)


_normalized.defvjp(_normalized_fwd, _normalized_bwd)


class Linear(nnx.Module):
    """A linear map between (groups of) named axes, for example [D] -> [3, H, K]."""

    def __init__(
        self,
        config: GPT2Config,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        std: float = _INIT_STD,
        rngs: nnx.Rngs,
    ):
        """Draw the kernel from a normal distribution; the bias is zero.

        Args:
          config: gives the dtypes and `use_bias`.
          inputs: logical name and size of each contracted axis.
          outputs: logical name and size of each new axis.
          std: standard deviation of the initial kernel.
          rngs: source of random numbers.
        """
        self.config = config
        self.num_inputs = len(inputs)
        self.axes = (*inputs, *outputs)
        shape = (*inputs.values(), *outputs.values())
        kernel = std * _normal(rngs, shape, self.axes, config.param_dtype)
        dims = range(len(shape))
        spec = MatrixSpec(rows=(*dims[: len(inputs)],), cols=(*dims[len(inputs) :],))
        self.kernel = nnx.Param(kernel, axes=self.axes, matrix_spec=spec)
        if config.use_bias:
            zeros = jnp.zeros(tuple(outputs.values()), config.param_dtype)
            spec = MatrixSpec(rows=(), cols=(*range(zeros.ndim),))
            self.bias = nnx.Param(zeros, axes=tuple(outputs), matrix_spec=spec)

    def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
        """Contract the last axes of x with the kernel, in x's dtype."""
        kernel = self.cast_kernel(x.dtype)
        leading, inputs = x.shape[: -self.num_inputs], x.shape[-self.num_inputs :]
        # All tokens on one axis: where a kernel's gradient contracts B and T as two axes, XLA's CPU
        # backend writes the activations out transposed, element by element (0.4 times the rate).
        x = x.reshape(-1, *inputs)
        if ambient_platform() == "cpu":
            y = cpu_linear(x, kernel)
        else:
            y = jnp.tensordot(x, kernel, axes=self.num_inputs)
        y = y.reshape(*leading, *y.shape[1:])
        if self.config.use_bias:
            # Added in the bias's float32: its gradient is then the sum over all tokens in float32,
            # where one in bfloat16 stops growing.
            y = (y + self.bias[...]).astype(x.dtype)
        return y

    def cast_kernel(self, dtype: Any) -> Float[Array, ...]:
        """The kernel in the dtype of the products, gathered over `fsdp`."""
        return gathered(self.kernel[...].astype(dtype), self.axes)

    def flat(self, x: Float[Array, "*B N"]) -> Float[Array, "*B D"]:
        """Contract the one last axis of x, which holds those of the kernel's inputs side by side,
        to one axis."""
        # Without the barrier XLA transposes x to lay the kernel's gradient out by the inputs' axes.
        kernel = self.cast_kernel(x.dtype).reshape(x.shape[-1], -1)
        y = x.reshape(-1, x.shape[-1]) @ jax.lax.optimization_barrier(kernel)
        y = y.reshape(*x.shape[:-1], -1)
        return (y + self.bias[...]).astype(x.dtype) if self.config.use_bias else y


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        """`c_attn` [D, 3, H, K], and `c_proj` [H, K, D] with initial values divided by √(2 L)."""
        self.config = config
        embed = {"embed": config.embed_dim}
        heads = {"heads": config.num_heads, "head_dim": config.head_dim}
        self.c_attn = Linear(config, embed, {"qkv": 3, **heads}, rngs=rngs)
        self.c_proj = Linear(config, heads, embed, std=_residual_std(config), rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], layer_index: Int[Array, ""], attend: Attend | FlatAttend
    ) -> Float[Array, "B T D"]:
        """Attend by a function of queries, keys, values and the logits' scale; layers from 0."""
        scale = jnp.asarray(self.config.head_dim, _at_least_float32(x.dtype)) ** -0.5
        if self.config.scale_attn_by_inverse_layer_idx:
            scale = scale / (layer_index + 1)
        if isinstance(attend, FlatAttend):
            q, k, v = self._flat_heads(x, scale)
            return self.c_proj.flat(attend.attend(q, k, v))
        qkv = checkpoint_name(self.c_attn(x), "qkv")
        return self.c_proj(attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], scale))

    def _flat_heads(
        self, x: Float[Array, "B T D"], scale: Float[Array, ""]
    ) -> list[Float[Array, "B T HK"]]:
        """Queries, times the scale, keys and values, the heads side by side."""
        # Without the barriers XLA lays the kernel's gradient out as [D, 3, H, K], for which it
        # transposes x and the gradients of queries, keys and values. On GPUs the second is enough,
        # and the kernel is cast and cut at once.
        kernel = self.c_attn.cast_kernel(x.dtype)
        if ambient_platform() not in GPUS:
            kernel = jax.lax.optimization_barrier(kernel)
        projections = []
        for index in range(3):
            weight = kernel[:, index]
            if index == 0:  # here the scale costs nothing, and rounds as if it came later
                weight = (weight.astype(scale.dtype) * scale).astype(x.dtype)
            weight = jax.lax.optimization_barrier(weight.reshape(len(weight), -1))
            y = (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], -1)
            if self.config.use_bias:
                bias = self.c_attn.bias[...][index].reshape(-1)
                y = (y + (bias * scale if index == 0 else bias)).astype(x.dtype)
            projections.append(checkpoint_name(y, "qkv"))
        return projections


class MLP(nnx.Module):
    """Two linear layers around a GELU (the tanh approximation, as in GPT-2)."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        """`c_fc` [D, F] and `c_proj` [F, D], F = 4 D."""
        embed, mlp = {"embed": config.embed_dim}, {"mlp": 4 * config.embed_dim}
        self.c_fc = Linear(config, embed, mlp, rngs=rngs)
        self.c_proj = Linear(config, mlp, embed, std=_residual_std(config), rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.c_proj(_written(_gelu(self.c_fc(x)), x.shape[-1]))


_tanh_gelu = functools.partial(jax.nn.gelu, approximate=True)
_gelu = jax.custom_vjp(_tanh_gelu)


def _gelu_fwd(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The slope in place of x: the backward pass is then a factor at the end of a product.
    y, vjp = jax.vjp(_tanh_gelu, x)
    return y, vjp(jnp.ones_like(x))[0]


_gelu.defvjp(_gelu_fwd, lambda slope, d_y: (d_y * _recomputed(slope),))


class Block(nnx.Module):
    """Pre-norm transformer block: attention and MLP, each behind a LayerNorm."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        layer_index: Int[Array, ""],
        attend: Attend | FlatAttend,
        drop: Callable[[jax.Array, int], jax.Array] = lambda y, site: y,
    ) -> Float[Array, "B T D"]:
        """Add attention and MLP to the residual stream x; see `Attention`. `drop` is dropout of an
        array at one of the block's sites, which are numbered."""
        # Behind a barrier on GPUs, where XLA adds to the end of a product what has no past.
        x = _in_rows(_recomputed(constrain(x, "batch", "length", None)))
        x = _in_rows(x + drop(self.attn(_in_rows(self.ln_1(x)), layer_index, attend), 0))
        width = x.shape[-1]
        y = drop(self.mlp(_written(_in_rows(self.ln_2(x)), width)), 1)
        return x + _written(_in_rows(y), width)


class Embedding(nnx.Module):
    """A vector for each token or position."""

    def __init__(
        self, config: GPT2Config, rows: int, axis: str, *, padding: int = 0, rngs: nnx.Rngs
    ):
        """Draw the vectors [rows, D] from a normal distribution; `axis` names the first axis, and
        the last `padding` rows are never used."""
        shape, axes = (rows, config.embed_dim), (axis, "embed")
        vectors = _INIT_STD * _normal(rngs, shape, axes, config.param_dtype)
        spec = MatrixSpec(rows=(1,), cols=(0,), embedding=True, padding=padding)  # as of a head
        self.embedding = nnx.Param(vectors, axes=axes, matrix_spec=spec)


class GPT2(nnx.Module):
    """GPT-2 with tied input and output embeddings."""

    remat_policies = ("dots", "attention", "full")

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        """Initialise as GPT-2: normal with standard deviation 0.02, and 0.02 / √(2 L) for c_proj.

        Raises:
          ValueError: the config asks for float64 while JAX runs in 32 bits.
        """
        if "float64" in (config.param_dtype, config.compute_dtype) and not jax.config.read(
            "jax_enable_x64"
        ):
            raise ValueError(
                "float64 in model.param_dtype or model.compute_dtype needs 64-bit JAX: "
                "set the environment variable JAX_ENABLE_X64=1."
            )
        self.config = config
        rows = config.padded_vocab_size
        padding = rows - config.vocab_size
        self.wte = Embedding(config, rows, "vocab", padding=padding, rngs=rngs)
        self.wpe = Embedding(config, config.max_seq_len, "positions", rngs=rngs)

        stacked = {nnx.PARTITION_NAME: None, "axes": LAYERS}  # the name of the new axis

        @nnx.scan(in_axes=0, out_axes=0, transform_metadata=stacked)  # vmap compiles for longer
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.h = blocks(rngs.split(config.num_layers))
        self.ln_f = LayerNorm(config)

    # With these `generate` caches keys and values; see `LanguageModel`.
    prefill, decode = kv_cache.prefill, kv_cache.decode

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        tables: Float[Array, "P V D"] | None = None,
        continuation_ids: Int[Array, "B T"] | None = None,
        dropout_keys: Key[Array, " B"] | None = None,
    ) -> Float[Array, "B T D"]:
        """The residual stream after the last LayerNorm.

        See `LanguageModel.hidden` for the first three arguments, and `LanguageModule` for the
        others.

        Raises:
          ValueError: `model.compute_dtype` is still `auto`.
        """
        config = self.config
        x = self.embed(tokens, positions, tables)
        if dropout_keys is not None:
            x = _dropped(x, config.dropout, dropout_keys)

        def attend_flat(q: Any, k: Any, v: Any) -> jax.Array:
            return flat_attention_on_mesh(config.head_dim, q, k, v, segment_ids)

        is_flat = continuation_ids is None and takes_flat(config)

        def block(x: jax.Array, layer: tuple[Block, jax.Array]) -> tuple[jax.Array, None]:
            def drop(y: jax.Array, site: int) -> jax.Array:
                if dropout_keys is None:
                    return y
                return _dropped(y, config.dropout, dropout_keys, layer[1], site)

            def attend(q: Any, k: Any, v: Any, scale: Any) -> jax.Array:
                drop_weights = functools.partial(drop, site=2)
                return attention(
                    config, q, k, v, scale, segment_ids, continuation_ids, drop_weights
                )

            by = FlatAttend(attend_flat) if is_flat else attend
            return layer[0](x, layer[1], by, drop), None

        layers = (self.h, jnp.arange(config.num_layers))
        unroll = blocks_at_once(config, ambient_platform())
        x, _ = jax.lax.scan(_remat(block, config, unroll), x, layers, unroll=unroll)
        return self.ln_f(x)

    def continuations(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        continuation_ids: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """The residual stream of rows of a context and its continuations; see `LanguageModule`."""
        return self(tokens, positions=positions, continuation_ids=continuation_ids)

    def embed(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        tables: Float[Array, "P V D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """The sum of token and position embeddings, where the residual stream begins."""
        tables = self.tables() if tables is None else tables
        x, dtype = look_up(tables, tokens), tables.dtype
        position_table = copies(self.wpe.embedding[...].astype(dtype), ("positions", "embed"))
        if positions is None:
            # Each device sums the gradients of its own rows, in the type of x.
            x = on_shards(_add_positions, x, position_table)
        else:
            x += look_up(position_table, positions)
        return x.astype(jnp.promote_types(dtype, self.config.residual_dtype or dtype))

    def tables(self) -> Float[Array, "P V D"]:
        """The token embedding in the type of the products, once for each shard of the batch."""
        dtype = self.config.compute_dtype
        if dtype == "auto":
            raise ValueError(
                "model.compute_dtype=auto names no type, which only `maxmars train` chooses; set "
                "float32 or bfloat16."
            )
        table = self.wte.embedding[...].astype(dtype)
        return copies(gathered(table, ("vocab", "embed")))

    @property
    def output_embedding(self) -> nnx.Param[Array]:
        """The token embedding [V, D], which is the output head as well."""
        return self.wte.embedding


def _add_positions(x: jax.Array, table: jax.Array) -> jax.Array:
    """x [B T D] plus the first T rows of the device's own copy of the table [1 P D]."""
    x += table[0, : x.shape[1]].astype(x.dtype)
    if ambient_platform() in GPUS:
        # The table's gradient sums over the rows. From 32 rows on XLA (JAX 0.10 to 0.12) would lay
        # out the residual stream for this sum, neighbouring rows side by side, and transpose it at
        # every product: 8 to 10 % of a step of small by `step_clock`.
        x = with_layout_constraint(x, Layout(major_to_minor=(0, 1, 2)))
    return x


def _dropped(
    x: Float[Array, "B ..."], rate: float, keys: Key[Array, " B"], *site: int | jax.Array
) -> Float[Array, "B ..."]:
    """x with dropout at this rate. A row's key and the site in the model alone decide what is
    dropped, so that every mesh draws the same."""

    def keep_mask(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(
            functools.reduce(jax.random.fold_in, site, key), 1 - rate, x.shape[1:]
        )

    return jnp.where(jax.vmap(keep_mask)(keys), x / (1 - rate), 0)


def _residual_std(config: GPT2Config) -> float:
    return _INIT_STD / (2 * config.num_layers) ** 0.5


def blocks_at_once(config: GPT2Config, platform: str | None) -> int:
    """Blocks in one iteration of the scan over layers on a platform (`jax.Device.platform`)."""
    # A loop over layers reads what it kept of each out of arrays of all layers. On GPUs neither
    # products nor attention take a part of an array, so that each is copied first: 16 % of a step
    # of GPT-2 small on an H200, and 30 % with all that the copies keep from being fused.
    if config.scan_unroll is None:
        return config.num_layers if platform in GPUS else 1
    return min(config.scan_unroll, config.num_layers)


def _remat(block: Any, config: GPT2Config, unroll: int) -> Any:
    policies = jax.checkpoint_policies
    match config.remat:
        case None | "auto":  # `train.auto` replaces "auto" where gradients are taken
            return block
        case "full":
            policy = policies.nothing_saveable
        case "attention":
            policy = policies.save_only_these_names("qkv", RESIDUALS)
        case "dots":
            policy = policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(RESIDUALS)
            )
    # Outside of a loop, XLA would merge the recomputation with the forward pass and store results.
    is_loop = unroll < config.num_layers
    return jax.checkpoint(block, policy=policy, prevent_cse=not is_loop)
