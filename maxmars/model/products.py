"""Matrix products in the forms that XLA's CPU backend computes fast.

It has hardware products of bfloat16 only where the result is float32 and no factor is transposed on
its first axis; for others it converts both factors to float32, which takes 1.5 to 2.5 times as long
(JAX 0.10 and 0.12, a CPU with AVX512_BF16). Other platforms take every form equally well.

Shape letters: N tokens; I inputs, O outputs, one axis or several.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from maxmars.distributed.sharding import ambient_platform


def wide_product(
    a: Float[Array, "*B _ _"],
    b: Float[Array, "*B _ _"],
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Float[Array, "*B _ _"]:
    """The matrix product a b of the last two axes, or aᵀ b, or a bᵀ; in float32 at least."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    # Of transposed factors XLA is fast with a single matrix of float32 alone.
    if transpose_a and ambient_platform() == "cpu" and (a.dtype != wide or a.ndim > 2):
        a, transpose_a = _in_memory(a.mT), False
    batch = (*range(a.ndim - 2),)
    contracted = (a.ndim - 2 if transpose_a else a.ndim - 1, b.ndim - (1 if transpose_b else 2))
    dimensions = ((contracted[:1], contracted[1:]), (batch, batch))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=wide)


@jax.custom_vjp
def cpu_linear(x: Float[Array, "N ..."], kernel: Float[Array, ...]) -> Float[Array, "N ..."]:
    """The inputs x [N, *I] contracted with a kernel [*I, *O], in x's type, for CPUs."""
    return _linear(x, kernel, x.ndim - 1)


def _linear(a: jax.Array, b: jax.Array, axes: Any) -> jax.Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.tensordot(a, b, axes, preferred_element_type=wide).astype(a.dtype)


def _cpu_linear_bwd(factors: Any, d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = factors
    inputs = x.ndim - 1
    d_x = _linear(d_y, kernel, ((*range(1, d_y.ndim),), (*range(inputs, kernel.ndim),)))
    if x.dtype == jnp.bfloat16:
        return d_x, _linear(_in_memory(jnp.moveaxis(x, 0, -1)), d_y, 1)
    if x[0].size > d_y[0].size:  # float32 products are slow where the result has the more rows
        d_kernel = jax.lax.optimization_barrier(_linear(d_y, x, ((0,), (0,))))
        outputs = d_y.ndim - 1
        return d_x, jnp.moveaxis(d_kernel, (*range(outputs),), (*range(-outputs, 0),))
    return d_x, _linear(x, d_y, ((0,), (0,)))


cpu_linear.defvjp(lambda x, kernel: (cpu_linear(x, kernel), (x, kernel)), _cpu_linear_bwd)


def _in_memory(x: jax.Array) -> jax.Array:
    """x, a transposed array, written out: XLA would else transpose within the product."""
    x, mesh = jax.lax.optimization_barrier(x), jax.sharding.get_abstract_mesh()
    if any(mesh.shape[axis] > 1 for axis in set(mesh.axis_names) - set(mesh.manual_axes)):
        return x  # XLA's partitioner would gather what has a layout
    return with_layout_constraint(x, Layout((*range(x.ndim),)))
