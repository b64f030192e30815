"""The QR and the eigenvectors that stand in for LAPACK, against LAPACK; and no program blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxmars.optim._decompositions import (
    eigenvectors,
    jacobi_eigenvectors,
    orthonormal_columns,
    xla_qr,
)


def grams(side: int, dtype: str) -> np.ndarray:
    """A random one, one of low rank with eigenvalues far apart, the identity, and zero."""
    rng = np.random.default_rng(side)
    random, narrow = rng.normal(size=(side, side)), rng.normal(size=(side, max(1, side // 4)))
    narrow *= np.logspace(0, -4, narrow.shape[1])
    x = np.stack([random @ random.T, narrow @ narrow.T, np.eye(side), np.zeros((side, side))])
    return (x / np.maximum(np.trace(x, axis1=1, axis2=2), 1)[:, None, None]).astype(dtype)


def distance(x, y) -> float:
    return float(np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64))))


@pytest.mark.parametrize("side", [1, 2, 3, 16, 33])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 4e-6), ("float64", 1e-14)])
def test_eigenvectors_by_rotations(x64, side, dtype, tolerance):
    x = grams(side, dtype)
    vectors = np.asarray(jax.jit(jacobi_eigenvectors)(x))
    assert vectors.dtype == dtype
    identity = np.eye(side)
    assert distance(np.swapaxes(vectors, 1, 2) @ vectors, [identity] * 4) < tolerance
    rotated = np.swapaxes(vectors, 1, 2) @ x @ vectors
    eigenvalues = np.linalg.eigvalsh(x.astype(np.float64))[:, ::-1]
    assert distance(rotated, eigenvalues[:, None] * identity) < tolerance  # falling, as here


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 4e-6), ("float64", 1e-14)])
def test_qr_is_lapacks(x64, dtype, tolerance):
    x = np.random.default_rng(0).normal(size=(4, 24, 24)).astype(dtype)
    q = np.asarray(jax.jit(xla_qr)(x))
    assert q.dtype == dtype
    assert distance(q, np.linalg.qr(x)[0]) < 10 * tolerance
    assert distance(np.swapaxes(q, 1, 2) @ q, [np.eye(24)] * 4) < tolerance
    assert distance(xla_qr(jnp.zeros((1, 24, 24))), np.eye(24)) == 0


@pytest.mark.parametrize("decompose", [xla_qr, jacobi_eigenvectors])
def test_stacks_of_stacks(decompose):
    """As `maxmars compare` has them, with several learning rates in one program."""
    x = np.random.default_rng(0).normal(size=(3, 2, 8, 8)).astype("float32")
    x += x.swapaxes(2, 3)
    together = jax.jit(jax.vmap(decompose))(x)
    assert distance(together, [jax.jit(decompose)(each) for each in x]) < 1e-6


@pytest.mark.parametrize("decompose", [orthonormal_columns, eigenvectors])
def test_many_at_once_do_not_block(decompose):
    """With LAPACK of jaxlib 0.10 the second or third of these runs never ends."""
    mesh = jax.make_mesh((8,), ("x",))

    def run(xs):
        return [decompose(x) for x in xs]

    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    x = jax.device_put(np.tile(grams(8, "float32"), (4, 1, 1)), NamedSharding(mesh, P("x")))
    for _ in range(30):
        found = jax.block_until_ready(run([x] * 24))
    assert distance(found[0], found[-1]) == 0
