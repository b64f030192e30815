"""Causal attention: one plain formula, and the kernels that replace it on TPUs, GPUs and CPUs.

The plain formula writes the T x T logits of every head to memory. The kernels hold only the logits
of a block of queries and keys. `tests/model/test_attention.py` checks each kernel against the
formula.

Shape letters: B batch, T length, H heads, K head_dim; I queries of a block, J keys of a block.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxmars.config import GPT2Config
from maxmars.distributed.sharding import GPUS, RULES, ambient_platform, on_devices
from maxmars.model.products import wide_product

Implementation = Literal["plain", "blocked", "flat", "splash", "cudnn"]
Heads = Float[Array, "B T H K"]
Flat = Float[Array, "B T HK"]
Scale = Float[Array, ""]
Ids = Int[Array, "B T"]

RESIDUALS = "attention"
"""The name under which a remat policy keeps the residuals of attention: its result and, for splash
attention, the logarithm of each query's softmax denominator."""

_KERNELS: dict[str | None, tuple[Implementation, ...]] = {  # the first that can is taken
    "tpu": ("flat", "splash"),
    "gpu": ("cudnn",),
    "cuda": ("cudnn",),  # the compiler's name for GPUs that are not there (`plan`)
}
_DEVICES = {"flat": "TPUs", "splash": "TPUs", "cudnn": "NVIDIA GPUs"}
FLAT_HEAD_DIMS = (64, 128)  # two or one fill a tile of 128 lanes
LONGEST_FLAT = 8192
"""Tokens of a row; of longer ones keys and values exceed the fast memory of a v5e."""
_SPLASH_BLOCK = 512  # queries of a block, and its keys in the forward pass, as in MaxText
_LANES = 128
_SMALLEST_CPU_BLOCK = 64
_MOST_CPU_BLOCKS = 4


@dataclass(frozen=True)
class Choice:
    """The implementation of attention for a model and a platform."""

    implementation: Implementation
    reason: str | None = None
    """Why the platform's first kernel is not used; None where it is used, or there is none."""


@functools.cache
def choose_attention(config: GPT2Config, platform: str | None) -> Choice:
    """The implementation of attention on a platform (`jax.Device.platform`; None: no mesh).

    Raises:
      ValueError: `config.attention` names a kernel that this platform or this model cannot use.
    """
    wanted, kernels = config.attention, _KERNELS.get(platform, ())
    if wanted in ("plain", "blocked"):
        return Choice(wanted)
    if wanted not in ("auto", *kernels):
        raise ValueError(
            f"model.attention={wanted} needs {_DEVICES[wanted]}, but the devices are of platform "
            f"{platform}; set model.attention=auto."
        )
    if not kernels:
        return Choice("blocked" if platform == "cpu" else "plain")
    reason = None
    for kernel in kernels if wanted == "auto" else (wanted,):
        problem = _refusal(kernel, config)
        if problem is None:
            return Choice(kernel, reason)
        reason = reason or problem
    if wanted == "auto":
        return Choice("plain", reason)
    raise ValueError(f"model.attention={wanted} is not possible: {reason}; set it to auto.")


def _refusal(kernel: Implementation, config: GPT2Config) -> str | None:
    """Why a kernel cannot compute this model, or is not available."""
    dtype = config.compute_dtype
    if kernel in ("flat", "splash"):
        if dtype == "float64":
            return f"the {kernel} kernel does not compute in model.compute_dtype=float64"
        if kernel == "flat" and config.head_dim not in FLAT_HEAD_DIMS:
            sizes = " or ".join(map(str, FLAT_HEAD_DIMS))
            return f"the flat kernel takes heads of {sizes} columns, not of {config.head_dim}"
        if kernel == "flat" and config.max_seq_len > LONGEST_FLAT:
            return (
                f"the flat kernel takes up to {LONGEST_FLAT} tokens, and not "
                f"model.max_seq_len={config.max_seq_len}"
            )
        return None
    if dtype != "bfloat16":
        return f"cuDNN's flash attention does not compute in model.compute_dtype={dtype}"
    shape = (1, config.max_seq_len, config.num_heads, config.head_dim)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    one = jax.ShapeDtypeStruct((), jnp.float32)

    def gradient(q: Any, k: Any, v: Any, scale: Any) -> Any:
        return jax.grad(lambda q: cudnn_attention(q, k, v, scale).sum())(q)

    try:
        # Tracing checks shapes, and the versions of cuDNN and of the GPU.
        jax.eval_shape(gradient, x, x, x, one)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        told = str(error).splitlines()[0].rstrip(".")
        missing = "; `pip install nvidia-cudnn-cu13`" if "not found" in told else ""
        return f"cuDNN's flash attention refuses: {told}{missing}"
    return None


def attention(
    config: GPT2Config,
    q: Heads,
    k: Heads,
    v: Heads,
    scale: Scale,
    segment_ids: Ids | None = None,
    continuation_ids: Ids | None = None,
    drop: Callable[[jax.Array], jax.Array] | None = None,
) -> Heads:
    """`causal_attention`, by the implementation for the devices of the ambient mesh.

    The plain formula is used without an ambient mesh (`jax.set_mesh`), and with `continuation_ids`,
    which no kernel supports. The flat kernel has a form of its own; see `takes_flat`. `drop` is
    used with `model.attention=plain` alone, so that a run computes the same on all devices.
    """
    implementation = choose_attention(config, ambient_platform()).implementation
    if implementation in ("plain", "flat") or continuation_ids is not None:
        drop = drop if config.attention == "plain" else None
        attended = causal_attention(q, k, v, scale, segment_ids, continuation_ids, drop)
        return checkpoint_name(attended, RESIDUALS)
    if implementation == "blocked":
        return checkpoint_name(blocked_attention(q, k, v, scale, segment_ids), RESIDUALS)
    kernel = splash_attention if implementation == "splash" else cudnn_attention
    return attention_on_mesh(kernel, q, k, v, scale, segment_ids)


def attention_on_mesh(
    kernel: Callable[..., jax.Array],
    q: Heads,
    k: Heads,
    v: Heads,
    scale: Scale,
    segment_ids: Ids | None = None,
) -> Heads:
    """Attention by a kernel for one device, on each device's rows and heads of the ambient mesh."""
    heads, rows = RULES.spec("batch", "length", "heads", None), RULES.spec("batch", "length")
    mapped = on_devices(kernel, (heads, heads, heads, RULES.spec(), rows), heads)
    return mapped(q, k, v, scale, segment_ids)


def takes_flat(config: GPT2Config) -> bool:
    """Whether attention on the devices of the ambient mesh reads the heads side by side: the flat
    kernel does, and for cuDNN parts of one product of queries, keys and values would be copied."""
    return choose_attention(config, ambient_platform()).implementation in ("flat", "cudnn")


def flat_attention_on_mesh(
    head_dim: int, q: Flat, k: Flat, v: Flat, segment_ids: Ids | None = None, **options: Any
) -> Flat:
    """`flat_attention` on each device's rows and heads of the ambient mesh.

    Args:
      head_dim: columns of a head.
      q: queries, the heads side by side, times the factor of the logits already.
      k: keys.
      v: values.
      segment_ids: as in `causal_attention`.
      options: of the kernel.
    """
    if ambient_platform() in GPUS:

        def kernel(q: Flat, k: Flat, v: Flat, segment_ids: Ids | None) -> Flat:
            heads = [x.reshape(*x.shape[:2], -1, head_dim) for x in (q, k, v)]
            one = jnp.ones([], jnp.float32)
            return cudnn_attention(heads[0], heads[1], heads[2], one, segment_ids).reshape(q.shape)

    else:
        # This import takes 0.2 s, which only runs on TPUs should pay.
        from maxmars.model.flat_attention import flat_attention

        kernel = functools.partial(
            flat_attention, head_dim=head_dim, residual_name=RESIDUALS, **options
        )
    heads, rows = RULES.spec("batch", "length", "heads"), RULES.spec("batch", "length")
    return on_devices(kernel, (heads, heads, heads, rows), heads)(q, k, v, segment_ids)


def causal_attention(
    q: Heads,
    k: Heads,
    v: Heads,
    scale: Scale,
    segment_ids: Ids | None = None,
    continuation_ids: Ids | None = None,
    drop: Callable[[jax.Array], jax.Array] | None = None,
) -> Heads:
    """softmax(scale q kᵀ + mask) v: the plain reference, logits and softmax in float32 at least.

    Args:
      q: queries.
      k: keys.
      v: values.
      scale: factor of the logits.
      segment_ids: a token attends only to tokens of its own segment; None is one segment a row.
      continuation_ids: 0 for the tokens of a context, which all later tokens of the row see, and
        another number for each continuation of it, whose tokens only that continuation sees.
      drop: dropout of the weights [B, H, T, T].
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=wide) * scale
    mask = jnp.tri(q.shape[1], dtype=bool)
    if segment_ids is not None:
        mask &= _same_segment(segment_ids)
    if continuation_ids is not None:
        keys, queries = continuation_ids[:, None, :], continuation_ids[:, :, None]
        mask &= ((keys == 0) | (keys == queries))[:, None]
    logits = jnp.where(mask, logits, jnp.finfo(wide).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(q.dtype)
    if drop is not None:
        weights = drop(weights)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def splash_attention(
    q: Heads,
    k: Heads,
    v: Heads,
    scale: Scale,
    segment_ids: Ids | None = None,
    *,
    block: int = _SPLASH_BLOCK,
    backward_block: int | None = None,
    interpret: bool = False,
) -> Heads:
    """`causal_attention` by JAX's Pallas kernel for TPUs, on one device.

    The queries times `scale` are rounded to their type, which is exact where `scale` is a power of
    two.

    Args:
      q: queries.
      k: keys.
      v: values.
      scale: factor of the logits.
      segment_ids: as in `causal_attention`.
      block: queries of a block, and its keys in the forward pass; a multiple of 128.
      backward_block: keys of a block in the backward pass, which divide the length rounded up to
        `block`; None takes `splash_backward_block`.
      interpret: run the kernel on a CPU, slowly, for tests.
    """
    # This import takes 0.2 s, which only runs on TPUs should pay.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length = q.shape[1]
    block = min(block, _round_up(length, _LANES))
    q, k, v = (_pad_length(x, block).swapaxes(1, 2) for x in (_scaled(q, scale), k, v))
    segments = None
    if segment_ids is not None:
        padded_ids = _pad_length(segment_ids, block)
        segments = splash.SegmentIds(padded_ids, padded_ids)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((q.shape[2],) * 2)] * q.shape[1]),
        # The fused backward pass computes the logits once, not twice.
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=backward_block or splash_backward_block(q.shape[2], block),
            use_fused_bwd_kernel=True,
        ),
        residual_checkpoint_name=RESIDUALS,
        interpret=interpret,
    )
    attended: Any = jax.vmap(kernel)(q, k, v, segments)
    return attended.swapaxes(1, 2)[:, :length]


def splash_backward_block(length: int, block: int = _SPLASH_BLOCK) -> int:
    """Keys of a block in splash attention's backward pass, for a length of whole blocks."""
    # The fused backward pass writes one term of the queries' gradient for each block of keys, and
    # the program adds these terms up; but larger blocks compute more logits that the mask drops.
    # For one head of 64 on v5e, the compiler and the count of products estimate 15, 12 us with keys
    # of 512, 1,024 at 1,024 tokens; 55, 47, 46 us with up to 2,048 at 2,048 tokens; 177, 148, 143
    # us at 4,096. v6e is similar; v5p prefers 1,024 at 4,096. Nothing was timed on a TPU.
    if length <= 2048:
        return length
    return block if length % 1024 else 1024


def cudnn_attention(
    q: Heads, k: Heads, v: Heads, scale: Scale, segment_ids: Ids | None = None
) -> Heads:
    """`causal_attention` by cuDNN's flash attention, on one device.

    cuDNN takes the scale as a constant, so the queries are scaled as in `splash_attention`. The
    segments become a mask [B, 1, T, T], one for all heads.
    """
    length = q.shape[1]
    q, k, v = (_pad_length(x, _LANES) for x in (_scaled(q, scale), k, v))
    mask = None if segment_ids is None else _same_segment(_pad_length(segment_ids, _LANES))
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=1.0, is_causal=True, implementation="cudnn"
    )[:, :length]


def blocked_attention(
    q: Heads, k: Heads, v: Heads, scale: Scale, segment_ids: Ids | None = None
) -> Heads:
    """`causal_attention` for CPUs: blocks of queries, each with the keys up to its last query.

    It has no gradient to `scale`. `causal_attention` takes, forward and backward, 2.1 times as long
    for 1 x 1,024 tokens and 12 heads of 64, 1.1 times for 4 x 128 tokens with these heads and 1.3
    times for 8 x 128 tokens and 4 heads of 32 (two cores, float32, JAX 0.10.2).
    """
    length = q.shape[1]
    count = min(max(1, length // _SMALLEST_CPU_BLOCK), _MOST_CPU_BLOCKS)
    borders = [length * block // count for block in range(count + 1)]
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    blocks = []
    for start, stop in itertools.pairwise(borders):
        mask = jnp.asarray(np.tri(stop - start, stop, start, dtype=bool))
        if segment_ids is not None:
            queries = segment_ids[:, start:stop, None]
            mask = mask & (queries == segment_ids[:, None, :stop])[:, None]
        blocks.append(_attend(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], scale, mask))
    return jnp.concatenate(blocks, axis=2).swapaxes(1, 2)


@jax.custom_vjp
def _attend(
    q: Float[Array, "B H I K"],
    k: Float[Array, "B H J K"],
    v: Float[Array, "B H J K"],
    scale: Scale,
    mask: Bool[Array, "*B I J"],
) -> Float[Array, "B H I K"]:
    return _attend_forward(q, k, v, scale, mask)[0]


def _attend_forward(q: Any, k: Any, v: Any, scale: Any, mask: Any) -> tuple[jax.Array, Any]:
    logits = wide_product(q, k, transpose_b=True) * scale
    logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    weights = jax.nn.softmax(logits, axis=-1)
    result = wide_product(weights.astype(q.dtype), v).astype(q.dtype)
    return result, (q, k, v, scale, weights)


def _attend_backward(residuals: Any, d_result: jax.Array) -> tuple[Any, ...]:
    q, k, v, scale, weights = residuals
    d_weights = wide_product(d_result, v, transpose_b=True)
    inner = jnp.sum(weights * d_weights, axis=-1, keepdims=True)
    d_logits = (weights * (d_weights - inner) * scale).astype(q.dtype)
    d_q = wide_product(d_logits, k)
    d_k = wide_product(d_logits, q, transpose_a=True)
    d_v = wide_product(weights.astype(q.dtype), d_result, transpose_a=True)
    return *(x.astype(q.dtype) for x in (d_q, d_k, d_v)), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _scaled(q: jax.Array, scale: jax.Array) -> jax.Array:
    return (q.astype(scale.dtype) * scale).astype(q.dtype)


def _same_segment(segment_ids: Ids) -> Bool[Array, "B 1 T T"]:
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad_length(x: jax.Array, multiple: int) -> jax.Array:
    """x [B, T, ...] with zeros after its last token; no earlier token attends to them."""
    missing = _round_up(x.shape[1], multiple) - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
