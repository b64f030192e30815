"""Inputs of attention kernels, and what is compared of their results."""

import jax
import jax.numpy as jnp
import numpy as np


def random_segments(rows, length):
    """Segments of about 50 tokens, with borders inside the kernel's blocks; numbers may fall."""
    ends = np.random.default_rng(1).random((rows, length)) < 0.02
    return jnp.asarray(99 - np.cumsum(ends, axis=1), jnp.int32)


def result_and_gradients(function, q, k, v, *more):
    """Attention, and the gradients of a sum in which each number has another weight."""

    def weighted(q, k, v):
        result = function(q, k, v, *more)
        weights = jnp.sin(jnp.arange(result.size, dtype=jnp.float32)).reshape(result.shape)
        return (result.astype(jnp.float32) * weights).sum(), result

    (_, result), grads = jax.jit(jax.value_and_grad(weighted, (0, 1, 2), has_aux=True))(q, k, v)
    return result, *grads


def assert_close(ours, expected, tolerance):
    """The largest difference is small beside the largest number."""
    names = ("result", "dq", "dk", "dv")[: len(ours)]
    for name, a, b in zip(names, ours, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name
