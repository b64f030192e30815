"""Digest of a tree of arrays, which changes with any bit and with the position of any value.

The digest of a leaf is two sums modulo 2**32 over the leaf's 32-bit words. Each word is mixed with
a hash of its global index before it is added:

    a = sum_i mix_a(word_i xor index_hash(i, SEED_A))        b likewise with mix_b and SEED_B
    index_hash(i, seed) = mix(seed + sum_d mix(i_d + seed + (d + 1) * GOLDEN))

`i_d` are the coordinates of the element, so no index is ever larger than one dimension and none
overflows. Integer sums do not depend on their order: the digest is the same on every mesh, sharding
and number of processes, while swapped layers, permuted rows and exchanged shards change it. The
digest finds accidents; it is no protection against an attacker.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: keeps the seeds of the dimensions far apart
_MIX_A = (16, 0x7FEB352D, 15, 0x846CA68B, 16)
_MIX_B = (15, 0xD168AAAD, 15, 0xAF723597, 15)
_SEED_A = 0x243F6A88  # digits of pi
_SEED_B = 0x85A308D3


def leaf_paths(tree: Any) -> list[str]:
    """Path of each leaf, like `params/h/attn/c_attn/kernel`: dict keys, field names and indices.

    Raises:
      ValueError: two leaves have the same path, for example under the keys 1 and "1".
    """
    paths = ["/".join(keys) for keys, _ in _leaves_with_keys(tree)]
    if len(set(paths)) < len(paths):
        twice = min(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"leaf path {twice!r} is not unique in the tree; rename one of its keys.")
    return paths


def leaf_types(tree: Any) -> dict[str, str]:
    """From leaf path to type of the array, like `float32[12,768]`; the leaves may be abstract."""
    return {
        path: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    }


def to_plain(tree: Any) -> Any:
    """The tree as nested dicts, whose keys are the elements of the leaves' paths."""
    return unflatten_dict(dict(_leaves_with_keys(tree)))


def from_plain(plain: Any, like: Any) -> Any:
    """The inverse of `to_plain`, with the containers of `like`."""
    leaves = flatten_dict(plain)
    return jax.tree.unflatten(
        jax.tree.structure(like), [leaves[keys] for keys, _ in _leaves_with_keys(like)]
    )


def _leaves_with_keys(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def digest(tree: Any) -> dict[str, str]:
    """From leaf path to digest of the leaf in 16 hex digits; see `digest_and_finite`."""
    return digest_and_finite(tree)[0]


def digest_and_finite(tree: Any) -> tuple[dict[str, str], dict[str, bool]]:
    """By leaf path, the digest of the leaf in 16 hex digits, and whether all elements are finite.

    Both are computed on the leaves' devices, by one program for all leaves.

    Args:
      tree: any pytree of real arrays or scalars. Arrays may be sharded over one mesh, also over the
        devices of several processes; then all processes must call, and all get the result.

    Raises:
      ValueError: a leaf is complex, a PRNG key or wider than 64 bits, or two paths are equal.
    """
    paths, leaves = leaf_paths(tree), jax.tree.leaves(tree)
    for path, leaf in zip(paths, leaves, strict=True):
        dtype = jnp.result_type(leaf)
        is_numeric = not jnp.issubdtype(dtype, jax.dtypes.extended) and dtype.kind != "c"
        if not is_numeric or dtype.itemsize > 8:
            raise ValueError(
                f"leaf {path!r} has type {dtype}, which has no digest; store it as real numbers "
                "(a PRNG key as jax.random.key_data(key))."
            )
    if not leaves:
        return {}, {}
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    # Replicated, so that each process can read the result.
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    sums = np.asarray(_compiled(everywhere)(leaves))
    digests = {path: f"{a:08x}{b:08x}" for path, (a, b, _) in zip(paths, sums, strict=True)}
    return digests, {path: not row[2] for path, row in zip(paths, sums, strict=True)}


def combine(digests: dict[str, str]) -> str:
    """One digest for a whole tree: SHA-256 over the sorted leaves' paths and digests, in hex."""
    lines = "".join(f"{path} {value}\n" for path, value in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


@functools.cache  # jit caches traces by function, and each call here would make a new lambda
def _compiled(sharding: NamedSharding | None) -> Callable[[Sequence[Any]], jax.Array]:
    return jax.jit(lambda leaves: jnp.stack(list(map(leaf_sums, leaves))), out_shardings=sharding)


@jax.jit  # leaves of one shape are then traced once for all trees
def leaf_sums(x: Any) -> Array:
    """The two sums of the module's docstring, and 1 if an element is not finite, as `uint32[3]`."""
    x = jnp.asarray(x)
    words = _words(x)
    mixed = [
        _mix(words ^ _index_hash(words.shape, seed, constants), constants)
        for seed, constants in ((_SEED_A, _MIX_A), (_SEED_B, _MIX_B))
    ]
    infinite = ~jnp.isfinite(x if words.ndim == x.ndim else x[..., None])
    infinite = jnp.broadcast_to(infinite, words.shape).astype(jnp.uint32)
    # All in one reduction: XLA on CPUs splits separate ones, and then stores their operands, which
    # takes twice the memory of the leaf and six times as long.
    zero = np.uint32(0)
    sums = jax.lax.reduce(
        [*mixed, infinite],
        [zero, zero, zero],
        lambda x, y: [x[0] + y[0], x[1] + y[1], x[2] | y[2]],
        dimensions=range(words.ndim),
    )
    return jnp.stack(sums)


def _words(x: Array) -> Array:
    """The bits of each element as a uint32; 64 bits as two in a last axis, low word first."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _index_hash(shape: tuple[int, ...], seed: int, constants: tuple[int, ...]) -> Array:
    total = jnp.full(shape, seed, jnp.uint32)
    for d in range(len(shape)):
        offset = np.uint32((seed + (d + 1) * _GOLDEN) % 2**32)
        coordinate = jax.lax.broadcasted_iota(jnp.uint32, shape, d)
        total = total + _mix(coordinate + offset, constants)
    return _mix(total, constants)


def _mix(x: Array, constants: tuple[int, ...]) -> Array:
    """A bijection of 32 bits in which every input bit affects every output bit."""
    shift_1, factor_1, shift_2, factor_2, shift_3 = constants
    x = (x ^ (x >> shift_1)) * np.uint32(factor_1)
    x = (x ^ (x >> shift_2)) * np.uint32(factor_2)
    return x ^ (x >> shift_3)
