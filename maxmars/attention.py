"""Causal attention: the plain formula, and what stands for it on TPUs, GPUs and CPUs.

A kernel of TPUs or GPUs keeps the logits of a few queries and keys at a time, where the plain
formula writes those of all T x T of them to memory. Each is checked against it in
`tests/test_attention.py`.

Shape letters: B batch, T length, H heads, K head_dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxmars.blocked_attention import blocked_attention
from maxmars.config import GPT2Config
from maxmars.sharding import RULES, ambient_platform

Implementation = Literal["plain", "blocked", "splash", "cudnn"]
RESIDUALS = "attention"
"""Name under which a remat policy can keep what the backward pass needs of the forward one: the
result and, of splash attention, each query's log of the softmax's denominator."""

_KERNELS: dict[str, tuple[Implementation, str]] = {
    "tpu": ("splash", "TPUs"),
    "gpu": ("cudnn", "NVIDIA GPUs"),
    "cuda": ("cudnn", "NVIDIA GPUs"),  # what the compiler calls them where there are none
}

# The fused backward pass of splash attention writes a term of the queries' gradient for each block
# of keys, which the program then adds up; larger blocks also make logits that the mask drops. One
# head of one sequence takes, in microseconds, by the compiler's estimate of what is outside the
# kernels (libtpu 0.0.52, heads of 64, clocks taken as 1.5 GHz of v5e and 1.75 GHz of v6e and v5p)
# and five products of all logits that are made, at half the published peak:
#   tokens             1,024           2,048                4,096
#   keys in a block    512  1,024      512  1,024  2,048    512  1,024  2,048
#   v5e                 15     12       55     47     46    177    148    143
#   v6e                  8      6       37     39     24    111     96    102
#   v5p                 11      7       27     29     22     80     71      -
# Nothing was timed on a TPU. Elsewhere blocks are of 512, which MaxText begins with.
_BLOCK = 512
_WHOLE = 2048
_LONG_BLOCK = 1024
_LANES = 128


@dataclass(frozen=True)
class Choice:
    """What computes attention."""

    implementation: Implementation
    reason: str | None = None
    """Why it is not the kernel of these devices; None where it is, or where they have none."""


@functools.cache
def choose_attention(config: GPT2Config, platform: str | None) -> Choice:
    """What computes attention on devices of a platform (`jax.Device.platform`; None: no mesh).

    Raises:
      ValueError: `config.attention` names a kernel that these devices or this model cannot use.
    """
    kernel, _ = _KERNELS.get(platform or "", (None, ""))
    wanted = config.attention
    if wanted in ("plain", "blocked"):
        return Choice(wanted)
    if wanted == "auto" and kernel is None:
        return Choice("blocked" if platform == "cpu" else "plain")
    if wanted not in ("auto", kernel):
        needed = next(devices for name, devices in _KERNELS.values() if name == wanted)
        raise ValueError(
            f"model.attention={wanted} needs {needed}, but the devices are of platform "
            f"{platform}; set model.attention=auto."
        )
    problem = _no_float64(config) if kernel == "splash" else _no_cudnn(config)
    if problem is None:
        assert kernel is not None
        return Choice(kernel)
    if wanted == "auto":
        return Choice("plain", problem)
    raise ValueError(f"model.attention={wanted} is not possible: {problem}; set it to auto.")


def attention(
    config: GPT2Config,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    scale: Float[Array, ""],
    documents: Int[Array, "B T"] | None = None,
    branches: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H K"]:
    """`causal_attention` by what suits the devices of the ambient mesh (`jax.set_mesh`).

    That is the plain formula where there is no mesh, and for `branches`, of which no kernel knows.
    """
    implementation = choose_attention(config, ambient_platform()).implementation
    if implementation == "plain" or branches is not None:
        return checkpoint_name(causal_attention(q, k, v, scale, documents, branches), RESIDUALS)
    if implementation == "blocked":
        return checkpoint_name(blocked_attention(q, k, v, scale, documents), RESIDUALS)
    kernel = splash_attention if implementation == "splash" else cudnn_attention
    heads, rows = RULES.spec("batch", "length", "heads", None), RULES.spec("batch", "length")
    return jax.shard_map(
        kernel,
        in_specs=(heads, heads, heads, RULES.spec(), rows),
        out_specs=heads,
        check_vma=False,
    )(q, k, v, scale, documents)


def causal_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    scale: Float[Array, ""],
    documents: Int[Array, "B T"] | None = None,
    branches: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H K"]:
    """softmax(scale q kᵀ + mask) v, with logits and softmax in float32 at least.

    The mask is causal. Where the `documents` of the tokens are given, it keeps each in its own;
    where their `branches` are, it shows each only those of branch 0 and of its own.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=wide) * scale
    mask = jnp.tri(q.shape[1], dtype=bool)
    if documents is not None:
        mask &= _same(documents)
    if branches is not None:
        seen = branches[:, None, :]
        mask &= ((seen == 0) | (seen == branches[:, :, None]))[:, None]
    logits = jnp.where(mask, logits, jnp.finfo(wide).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(q.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def splash_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    scale: Float[Array, ""],
    documents: Int[Array, "B T"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """`causal_attention` by JAX's Pallas kernel for TPUs, on one device.

    Queries times `scale` are rounded to their type, which is exact for the usual powers of two.

    Args:
      q: queries.
      k: keys.
      v: values.
      scale: factor of the logits.
      documents: keep attention within these.
      interpret: run the kernel on a CPU, slowly, for tests.
    """
    # Takes a fifth of a second, which only runs on TPUs should pay.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length = q.shape[1]
    block = min(_BLOCK, _round_up(length, _LANES))
    q, k, v = (_fill_up(x, block).swapaxes(1, 2) for x in (_scaled(q, scale), k, v))
    segments = None
    if documents is not None:
        filled = _fill_up(documents, block)
        segments = splash.SegmentIds(filled, filled)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((q.shape[2],) * 2)] * q.shape[1]),
        # The fused backward pass makes the logits once, not twice.
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=_backward_block(q.shape[2], block),
            use_fused_bwd_kernel=True,
        ),
        residual_checkpoint_name=RESIDUALS,
        interpret=interpret,
    )
    attended: Any = jax.vmap(kernel)(q, k, v, segments)
    return attended.swapaxes(1, 2)[:, :length]


def cudnn_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    scale: Float[Array, ""],
    documents: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H K"]:
    """`causal_attention` by cuDNN's flash attention, on one device.

    Its scale is a constant, so that the queries are scaled as in `splash_attention`; documents are
    a mask [B, 1, T, T], one for all heads.
    """
    length = q.shape[1]
    q, k, v = (_fill_up(x, _LANES) for x in (_scaled(q, scale), k, v))
    mask = None if documents is None else _same(_fill_up(documents, _LANES))
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=1.0, is_causal=True, implementation="cudnn"
    )[:, :length]


def _backward_block(length: int, block: int) -> int:
    """Keys of a block of the backward pass, in sequences of whole blocks; see `_BLOCK`."""
    if length <= _WHOLE:
        return length
    return block if length % _LONG_BLOCK else _LONG_BLOCK


def _scaled(q: jax.Array, scale: jax.Array) -> jax.Array:
    return (q.astype(scale.dtype) * scale).astype(q.dtype)


def _same(documents: Int[Array, "B T"]) -> jax.Array:
    return (documents[:, :, None] == documents[:, None, :])[:, None]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _fill_up(x: jax.Array, multiple: int) -> jax.Array:
    """x [B, T, ...] with zeros after its last token, which no token before them sees."""
    missing = _round_up(x.shape[1], multiple) - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


def _no_float64(config: GPT2Config) -> str | None:
    """Why splash attention cannot compute this model."""
    if config.compute_dtype == "float64":
        return "the splash kernel does not compute in model.compute_dtype=float64"
    return None


def _no_cudnn(config: GPT2Config) -> str | None:
    """Why cuDNN's flash attention cannot compute this model, or is not there."""
    dtype = config.compute_dtype
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
        return f"cuDNN's flash attention refuses: {str(error).splitlines()[0].rstrip('.')}"
    return None
