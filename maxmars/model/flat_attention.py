"""Causal attention by a Pallas kernel for TPUs on arrays [B, T, H K], as products write them.

A TPU keeps an array in tiles of 128 lanes (columns). Between products and a kernel that wants
[B, H, T, K], such as splash attention, heads of 64 are therefore transposed and padded to 128
lanes, forward and backward, which costs more than the kernel's own products. Here a program of the
kernel takes a tile of 128 lanes as it is: two heads of 64, or one of 128. By the TPU compiler's own
clock a whole step of GPT-2 is a fifth shorter so. It was never run on a TPU: its
values are those of Pallas's interpreter on a CPU, and it compiles for v5e, v5p and v6e.

How it works:

* A grid of (rows, tiles, blocks of 512 tokens). Forward, a program has one block of queries, and
  all keys and values of its tile in fast memory (VMEM); it goes through the blocks of keys up to
  the diagonal, and computes none beyond; of the diagonal's own block it computes three quarters.
  Backward, it has one block of keys and goes through the queries from the diagonal on; dk and dv
  are sums of one program, and dq, in VMEM, of all programs of a tile. So there is one backward
  kernel, and no partial gradient in the chip's main memory.
* Logits are kept as [keys, queries]. Their maximum and sum then go over sublanes (rows), which a
  TPU's vector unit does without moving data between lanes, and what is known of a query is a row.
  After a tile's transposition its heads are rows 0:64 and 64:128, which cost nothing to slice. The
  matrix unit takes a row of a product's left side a cycle, whatever its width up to 128: so values
  and all gradients are made transposed, [K, I] and [K, J], of 64 rows instead of 512.
* All heads of a tile are read, then computed, then written, so that the compiler runs the products
  of one beside the exponentials of the other.
* Where the number of heads of 64 is odd, the last tile's other half is garbage, NaN in the
  interpreter; no slice of it reaches a result.
* VMEM: 4 MB forward and 7 MB backward at 1,024 tokens in bfloat16, 7 and 15 MB at 4,096, 11 and 26
  at 8,192. Beyond the usual limit of 16 MB the kernels ask for more.

Shape letters: B batch, T length, H heads, K head_dim; I queries of a block, J keys of a block, N
heads of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

_LANES, _BLOCK = 128, 512
_MASKED = -1e30  # finite, so that a block of keys that are all masked gives no NaN
_USUAL_VMEM_ROWS_BYTES = 4096  # 2,048 tokens in bfloat16 stay within 16 MB
_LARGE_VMEM_BYTES = 64 * 2**20
_NT = (((1,), (1,)), ((), ()))  # a bᵀ
_NN = (((1,), (0,)), ((), ()))  # a b

Flat = Float[Array, "B T HK"]
Ids = Int[Array, "B T"]


@dataclass(frozen=True)
class _Kernel:
    """Constants of a kernel."""

    head_dim: int
    residual_name: str
    block: int
    interpret: bool

    @property
    def heads(self) -> range:
        """Numbers of the heads of a tile."""
        return range(_LANES // self.head_dim)

    def lanes(self, x: jax.Array, head: int) -> jax.Array:
        """The columns of one head of a tile [rows, 128]."""
        return x[:, head * self.head_dim : (head + 1) * self.head_dim]

    def rows(self, x: jax.Array, head: int) -> jax.Array:
        """The rows of one head of a transposed tile [128, columns]."""
        return x[head * self.head_dim : (head + 1) * self.head_dim]


def flat_attention(
    q: Flat,
    k: Flat,
    v: Flat,
    segment_ids: Ids | None = None,
    *,
    head_dim: int,
    residual_name: str,
    block: int = _BLOCK,
    interpret: bool = False,
) -> Flat:
    """softmax(q kᵀ + mask) v of each head, on one device; see `attention.causal_attention`.

    Args:
      q: queries, the heads side by side, times the factor of the logits already.
      k: keys.
      v: values.
      segment_ids: a token attends only to tokens of its own segment; None is one segment a row.
      head_dim: K, 64 or 128.
      residual_name: name by which a remat policy saves the residuals of the backward pass: the
        result and the logarithm of each query's softmax denominator.
      block: tokens of a block, a multiple of 128. Smaller ones compute fewer logits that the mask
        drops, and take longer.
      interpret: run the kernel on a CPU, slowly, for tests.
    """
    length = q.shape[1]
    block = min(block, -(-length // _LANES) * _LANES)
    # Zeros after the last token: no earlier token attends to them.
    padding = -length % block
    arrays = [jnp.pad(x, ((0, 0), (0, padding), (0, 0))) for x in (q, k, v)]
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))
    kernel = _Kernel(head_dim, residual_name, block, interpret)
    return _attention(*arrays, segment_ids, kernel)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q: Any, k: Any, v: Any, segment_ids: Any, kernel: _Kernel) -> Any:
    return _forward(q, k, v, segment_ids, kernel)[0]


def _attention_fwd(q: Any, k: Any, v: Any, segment_ids: Any, kernel: _Kernel) -> tuple[Any, Any]:
    outputs = _forward(q, k, v, segment_ids, kernel)
    result, lse = (checkpoint_name(x, kernel.residual_name) for x in outputs)
    return result, (q, k, v, result, lse, segment_ids)


def _attention_bwd(kernel: _Kernel, residuals: Any, d_result: Any) -> tuple[Any, ...]:
    q, k, v, result, lse, segment_ids = residuals
    return *_backward(q, k, v, result, lse, d_result, segment_ids, kernel), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _forward(q: Any, k: Any, v: Any, segment_ids: Any, kernel: _Kernel) -> Any:
    """The result [B, T, H K], and lse [B, tiles, N, T] in float32: the logarithm of each query's
    softmax denominator."""
    batch, length, width = q.shape
    tiles, heads = pl.cdiv(width, _LANES), len(kernel.heads)
    tile, whole = _tile(kernel.block), _whole(length)
    return _call(
        _forward_kernel,
        "forward",
        kernel,
        inputs=[(q, tile), (k, whole), (v, whole)],
        segment_ids=segment_ids,
        outputs=[
            (jax.ShapeDtypeStruct(q.shape, q.dtype), tile),
            (
                jax.ShapeDtypeStruct((batch, tiles, heads, length), jnp.float32),
                pl.BlockSpec((1, 1, heads, kernel.block), lambda b, p, i: (b, p, 0, i)),
            ),
        ],
        scratch=[*map(_float32, ((8, kernel.block), (8, kernel.block), (_LANES, kernel.block)))],
        products=2,
    )


def _backward(
    q: Any, k: Any, v: Any, result: Any, lse: Any, d_result: Any, segment_ids: Any, kernel: _Kernel
) -> Any:
    """The gradients to q, k and v."""
    length, heads = q.shape[1], len(kernel.heads)
    tile, whole = _tile(kernel.block), _whole(length)
    of_queries = pl.BlockSpec((1, 1, heads, length), lambda b, p, j: (b, p, 0, 0))
    gradient = jax.ShapeDtypeStruct(q.shape, q.dtype)
    columns, sums = pltpu.VMEM((_LANES, length), q.dtype), (_LANES, kernel.block)
    return _call(
        _backward_kernel,
        "backward",
        kernel,
        inputs=[
            *((q, whole), (k, tile), (v, tile)),
            *((result, whole), (d_result, whole), (lse, of_queries)),
        ],
        segment_ids=segment_ids,
        outputs=[(gradient, whole), (gradient, tile), (gradient, tile)],
        scratch=[
            *(pltpu.VMEM(sums, k.dtype), columns, columns),
            *map(_float32, ((8, length), (_LANES, length), sums, sums)),
        ],
        products=5,
    )


def _tile(rows: int) -> pl.BlockSpec:
    """A program's own block of tokens."""
    return pl.BlockSpec((1, rows, _LANES), lambda b, p, i: (b, i, p))


def _whole(length: int) -> pl.BlockSpec:
    """All tokens, which are fetched once for the programs of a tile."""
    return pl.BlockSpec((1, length, _LANES), lambda b, p, i: (b, 0, p))


def _float32(shape: tuple[int, ...]) -> Any:
    return pltpu.VMEM(shape, jnp.float32)


def _call(
    body: Callable[..., None],
    name: str,
    kernel: _Kernel,
    *,
    inputs: Sequence[tuple[Any, pl.BlockSpec]],
    segment_ids: Any,
    outputs: Sequence[tuple[Any, pl.BlockSpec]],
    scratch: Sequence[Any],
    products: int,
) -> Any:
    """Run a kernel; `products` is how many it makes of each block of logits."""
    batch, length, width = inputs[0][0].shape
    blocks = length // kernel.block
    if segment_ids is not None:
        of_row = pl.BlockSpec((1, 1, length), lambda b, p, i: (b, 0, 0))
        inputs = [*inputs, (segment_ids[:, None, :], of_row)]
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)
    logits = batch * blocks * (blocks + 1) // 2 * kernel.block**2 * width // kernel.head_dim
    row_bytes = length * inputs[0][0].dtype.itemsize
    return pl.pallas_call(
        functools.partial(body, kernel=kernel, has_segments=segment_ids is not None),
        grid=(batch, pl.cdiv(width, _LANES), blocks),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=shapes,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=None if row_bytes <= _USUAL_VMEM_ROWS_BYTES else _LARGE_VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * logits * kernel.head_dim,
            transcendentals=logits,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *shapes)),
        ),
        name=f"flat_attention_{name}_{kernel.head_dim}",
        interpret=kernel.interpret,
    )(*arrays)


def _forward_kernel(*refs: Any, kernel: _Kernel, has_segments: bool) -> None:
    """A block of queries, against the blocks of keys up to its own."""
    q_ref, k_ref, v_ref = refs[:3]
    ids_ref = refs[3] if has_segments else None
    o_ref, lse_ref, max_ref, sum_ref, total_ref = refs[-5:]
    i, block = pl.program_id(2), kernel.block
    max_ref[...] = jnp.full(max_ref.shape, _MASKED, jnp.float32)
    sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    query_ids: Any = None if ids_ref is None else ids_ref[0, :, _tokens(i * block, block)]

    def step(keys: Any, queries: slice, *, is_diagonal: bool = False) -> None:
        q, k, v = q_ref[0, queries, :], k_ref[0, keys, :], v_ref[0, keys, :].T  # v: [128, J]
        ids = None if ids_ref is None else (_as_column(ids_ref[0, :, keys]), query_ids[:, queries])
        logits = [_logits(kernel, k, q, head, ids, is_diagonal) for head in kernel.heads]
        results = []
        for head in kernel.heads:
            row = slice(head, head + 1)
            before, total = max_ref[row, queries], sum_ref[row, queries]
            largest = jnp.maximum(before, logits[head].max(axis=0, keepdims=True))
            weights, shrink = jnp.exp(logits[head] - largest), jnp.exp(before - largest)
            total = total * shrink + weights.sum(axis=0, keepdims=True)
            values = _product(kernel.rows(v, head), weights.astype(v.dtype), _NN)  # [K, I]
            results.append((largest, total, shrink, values))
        for head, (largest, total, shrink, values) in enumerate(results):
            row, rows = slice(head, head + 1), pl.ds(head * kernel.head_dim, kernel.head_dim)
            max_ref[row, queries], sum_ref[row, queries] = largest, total
            total_ref[rows, queries] = total_ref[rows, queries] * shrink + values

    every = slice(0, block)
    lax.fori_loop(0, i, lambda j, _: step(_tokens(j * block, block), every), None)
    for first, size in _halves(block):  # keys, and the queries from there on
        step(_tokens(i * block + first, size), slice(first, block), is_diagonal=True)
    count = len(kernel.heads)
    sums, totals = sum_ref[0:count, :], total_ref[...]
    lse_ref[0, 0] = max_ref[0:count, :] + jnp.log(sums)
    result = [kernel.rows(totals, head) / sums[head : head + 1] for head in kernel.heads]
    o_ref[0] = jnp.concatenate(result, axis=0).T.astype(o_ref.dtype)


def _backward_kernel(*refs: Any, kernel: _Kernel, has_segments: bool) -> None:
    """A block of keys, against the blocks of queries from its own on."""
    q_ref, k_ref, v_ref, o_ref, do_ref, lse_ref = refs[:6]
    ids_ref = refs[6] if has_segments else None
    dq_ref, dk_ref, dv_ref, k_columns_ref, q_columns_ref, do_columns_ref, *sum_refs = refs[-10:]
    inner_ref, dq_sum_ref, dk_sum_ref, dv_sum_ref = sum_refs
    j, block = pl.program_id(2), kernel.block

    @pl.when(j == 0)
    def _() -> None:
        terms = (o_ref[0].astype(jnp.float32) * do_ref[0].astype(jnp.float32)).T  # [128, T]
        for head in kernel.heads:
            inner = kernel.rows(terms, head).sum(axis=0, keepdims=True)
            inner_ref[head : head + 1, :] = inner
        dq_sum_ref[...] = jnp.zeros(dq_sum_ref.shape, jnp.float32)
        q_columns_ref[...], do_columns_ref[...] = q_ref[0].T, do_ref[0].T

    dk_sum_ref[...] = jnp.zeros(dk_sum_ref.shape, jnp.float32)
    dv_sum_ref[...] = jnp.zeros(dv_sum_ref.shape, jnp.float32)
    # By way of memory: libtpu 0.0.42.1 breaks off (mxu_lmr_transform.cc) where a product of all 128
    # rows takes the transposed keys themselves.
    k_columns_ref[...] = k_ref[0].T
    key_ids: Any = None
    if ids_ref is not None:
        key_ids = _as_column(ids_ref[0, :, _tokens(j * block, block)])

    def step(keys: slice, queries: Any, *, is_diagonal: bool = False) -> None:
        q, do = q_ref[0, queries, :], do_ref[0, queries, :]
        k, v = k_ref[0, keys, :], v_ref[0, keys, :]
        ids = None if ids_ref is None else (key_ids[keys], ids_ref[0, :, queries])
        logits = [_logits(kernel, k, q, head, ids, is_diagonal) for head in kernel.heads]
        d_weights = [
            _product(kernel.lanes(v, head), kernel.lanes(do, head), _NT) for head in kernel.heads
        ]
        terms = []
        for head in kernel.heads:
            row, rows = slice(head, head + 1), pl.ds(head * kernel.head_dim, kernel.head_dim)
            weights = jnp.exp(logits[head] - lse_ref[0, 0, row, queries])
            d_logits = (weights * (d_weights[head] - inner_ref[row, queries])).astype(q.dtype)
            to_v = _product(do_columns_ref[rows, queries], weights.astype(do.dtype), _NT)  # [K, J]
            to_k = _product(q_columns_ref[rows, queries], d_logits, _NT)
            to_q = _product(k_columns_ref[rows, keys], d_logits, _NN)  # [K, I]
            terms.append((rows, to_v, to_k, to_q))
        for rows, to_v, to_k, to_q in terms:
            dv_sum_ref[rows, keys] += to_v
            dk_sum_ref[rows, keys] += to_k
            dq_sum_ref[rows, queries] += to_q

    for first, size in _halves(block):  # queries from a half's first on see its keys
        queries = _tokens(j * block + first, block - first)
        step(slice(first, first + size), queries, is_diagonal=True)
    every, end = slice(0, block), pl.num_programs(2)
    lax.fori_loop(j + 1, end, lambda i, _: step(every, _tokens(i * block, block)), None)
    dk_ref[0] = dk_sum_ref[...].T.astype(dk_ref.dtype)
    dv_ref[0] = dv_sum_ref[...].T.astype(dv_ref.dtype)

    @pl.when(j == pl.num_programs(2) - 1)
    def _() -> None:
        dq_ref[0] = dq_sum_ref[...].T.astype(dq_ref.dtype)


def _tokens(first: Any, size: int) -> Any:
    """A slice of `size` tokens from `first` on, which begins a tile."""
    return pl.ds(pl.multiple_of(first, _LANES), size)


def _halves(block: int) -> list[tuple[int, int]]:
    """First token and size of each part of a block on the diagonal: whole tiles."""
    half = block // 2
    return [(0, block)] if half % _LANES else [(0, half), (half, half)]


def _product(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _logits(
    kernel: _Kernel, k: Any, q: Any, head: int, ids: tuple[Any, Any] | None, is_diagonal: bool
) -> jax.Array:
    """The logits of a head [J, I]. On the diagonal, where keys and queries begin at the same token,
    no query sees a later key; anywhere, none a key of another segment."""
    logits = _product(kernel.lanes(k, head), kernel.lanes(q, head), _NT)
    if is_diagonal:
        keys, queries = (lax.broadcasted_iota(jnp.int32, logits.shape, axis) for axis in (0, 1))
        logits = jnp.where(keys <= queries, logits, _MASKED)
    if ids is not None:
        logits = jnp.where(ids[0] == ids[1], logits, _MASKED)
    return logits


def _as_column(row: jax.Array) -> jax.Array:
    """[1, J] as [J, 1]; a TPU transposes whole tiles."""
    return jnp.broadcast_to(row, (_LANES, row.shape[1])).T[:, :1]
