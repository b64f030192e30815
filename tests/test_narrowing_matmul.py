"""The matrix product with a quicker gradient on CPUs against the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_config

from maxmars import sharding
from maxmars.narrowing_matmul import narrowing_matmul
from maxmars.train_step import make_train_step

TOKENS, INPUTS, OUTPUTS = 24, 64, 16


def arrays(dtype, *leading):
    rng = np.random.default_rng(0)
    shapes = ((TOKENS, INPUTS), (INPUTS, OUTPUTS), (TOKENS, OUTPUTS))
    return [jnp.asarray(rng.normal(size=(*leading, *shape)), dtype) for shape in shapes]


def product_and_gradients(function, x, kernel, dy):
    y, gradients_of = jax.vjp(function, x, kernel)
    return y, *gradients_of(dy)


# The same products in another order of sums.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2**-7)])
@pytest.mark.parametrize("batched", [False, True])
def test_product_and_gradients_are_the_plain_ones(dtype, tolerance, batched):
    found, expected = (
        jax.jit(jax.vmap(run) if batched else run)(*arrays(dtype, *([3] if batched else [])))
        for run in (
            lambda *args: product_and_gradients(narrowing_matmul, *args),
            lambda *args: product_and_gradients(jnp.matmul, *args),
        )
    )
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def test_the_train_step_on_cpus_uses_it():
    config = tiny_config()
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    text = make_train_step(config, mesh).lower().as_text()
    embed = config.model.embed_dim
    before_it_is_turned = f"tensor<{embed}x{4 * embed}xf32>"
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert any(before_it_is_turned in line for line in barriers)
