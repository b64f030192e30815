"""The chunked loss against the plain one: values, gradients, meshes, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmars import cross_entropy, hlo, sharding
from maxmars.config import MeshConfig

VOCAB, PADDED = 250, 256


@pytest.fixture(params=["one chunk", "even chunks", "filled up"])
def chunks(request, monkeypatch):
    """Of the 96 tokens: one chunk, 3 of 32, and 5 of 20 of which the last is filled up."""
    row_bytes, sizes = 4 * PADDED, {"one chunk": 96, "even chunks": 32, "filled up": 20}
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", row_bytes * sizes[request.param])


def inputs(dtype="float32", rows=8, length=12):
    rng = np.random.default_rng(0)
    x, table = rng.normal(size=(rows, length, 16)), rng.normal(size=(PADDED, 16))
    targets = rng.integers(0, VOCAB, (rows, length))
    return jnp.asarray(x, dtype), jnp.asarray(table, dtype), jnp.asarray(targets, jnp.int32)


def plain(x, table, targets):
    logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)
    logits = jnp.where(jnp.arange(PADDED) < VOCAB, logits, jnp.finfo(jnp.float32).min)
    return cross_entropy.cross_entropy(logits, targets)


def weighted(losses, x, table, targets):
    """A sum in which each token has another weight, so that no gradient can hide in a mean."""
    found = losses(x, table, targets)
    return (found * jnp.arange(found.size).reshape(found.shape)).mean()


def with_grads(function, *arguments):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(*arguments)


def assert_same(found, expected, rtol=1e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


FUNCTIONS = {
    "mean_loss": (
        lambda *arrays: cross_entropy.mean_loss(*arrays, VOCAB),
        lambda *arrays: plain(*arrays).mean(),
    ),
    "token_losses": (
        functools.partial(weighted, lambda *arrays: cross_entropy.token_losses(*arrays, VOCAB)),
        functools.partial(weighted, plain),
    ),
}


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_loss_and_gradients_equal_the_plain_ones(name):
    chunked, reference = FUNCTIONS[name]
    assert_same(with_grads(chunked, *inputs()), with_grads(reference, *inputs()))
    assert_same(jax.jit(chunked)(*inputs()), reference(*inputs()))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 8)])
def test_the_same_on_a_mesh(name, shape):
    chunked, reference = FUNCTIONS[name]
    data, fsdp, tensor = shape
    expected = with_grads(reference, *inputs())
    with jax.set_mesh(sharding.make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor))):
        assert_same(with_grads(chunked, *inputs()), expected)


def logits_in(function, tokens, vocab):
    """float32 arrays of a program with gradients that have so many tokens' logits, or more."""
    return large_in(jax.value_and_grad(function, argnums=(0, 1)), inputs(), tokens, vocab)


def large_in(function, arguments, tokens, vocab):
    program = jax.jit(function).lower(*arguments).compile()
    return [
        array
        for array in hlo.arrays(program)
        if array.dtype == "f32" and vocab in array.dims and np.prod(array.dims) >= tokens * vocab
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_logits_of_all_tokens_are_never_there(name, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", 4 * PADDED * 24)  # 24 of 96 tokens
    chunked, reference = FUNCTIONS[name]
    assert logits_in(reference, 96, PADDED)
    assert logits_in(chunked, 24, PADDED)
    assert not logits_in(chunked, 25, PADDED)
    with jax.set_mesh(sharding.make_mesh(MeshConfig(fsdp=2, tensor=4))):
        monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", 4 * PADDED // 4 * 24)
        assert not logits_in(chunked, 25, PADDED // 4)  # of the 48 of a device
        assert not logits_in(chunked, 17, PADDED)  # nor gathered; the table has 16 columns


# --- drawn targets -------------------------------------------------------------------------------


def drawer():
    """A new function each time, so that `jax.jit` traces it anew, for other chunks."""
    return lambda x, table, uniforms: cross_entropy.draw_targets(x, table, uniforms, VOCAB)


def uniforms(rows=8, length=12, seed=1):
    return jax.random.uniform(jax.random.key(seed), (rows, length))


def in_order(x, table, uniforms):
    """The first token whose cumulated probability exceeds the uniform number, in float64."""
    logits = np.asarray(x, np.float64) @ np.asarray(table, np.float64)[:VOCAB].T
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    ends = weights.cumsum(-1) / weights.sum(-1, keepdims=True)
    return (ends > np.asarray(uniforms, np.float64)[..., None]).argmax(-1)


@pytest.mark.usefixtures("chunks")
def test_targets_are_those_of_the_uniform_numbers_on_every_mesh():
    x, table, _ = inputs()
    x = x / 4  # several likely tokens everywhere
    expected = in_order(x, table, uniforms())
    assert len(np.unique(expected)) > 30
    np.testing.assert_array_equal(jax.jit(drawer())(x, table, uniforms()), expected)
    with jax.set_mesh(sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        np.testing.assert_array_equal(jax.jit(drawer())(x, table, uniforms()), expected)


@pytest.mark.parametrize("tensor", [1, 4])
def test_targets_are_drawn_as_often_as_they_should_be(tensor):
    """Over 200,000 positions with the same logits, against the softmax."""
    logits = np.random.default_rng(0).normal(0, 2, PADDED).astype(np.float32)
    x, table = jnp.ones((8, 25_000, 1)), jnp.asarray(logits[:, None])
    with jax.set_mesh(sharding.make_mesh(MeshConfig(fsdp=8 // tensor, tensor=tensor))):
        drawn = jax.jit(drawer())(x, table, uniforms(8, 25_000))
    counts = np.bincount(np.ravel(drawn), minlength=PADDED)
    assert counts[VOCAB:].sum() == 0
    expected = drawn.size * np.asarray(jax.nn.softmax(logits[:VOCAB]), np.float64)
    statistic = np.square(counts[:VOCAB] - expected) / expected
    assert statistic[expected > 5].sum() < 2 * (expected > 5).sum()  # chi squared: about 1 each
    np.testing.assert_allclose(counts[:VOCAB], expected, atol=6 * expected.max() ** 0.5)


def test_nothing_without_probability_is_drawn():
    """Whatever rounding does at the ends: the first and the last tokens have none here."""
    logits = np.full((PADDED, 1), -1e4, np.float32)
    logits[[40, 41, 130]] = [[0.0], [-16.0], [-16.0]]
    ends = jnp.asarray([[0.0, 0.5, 1 - 2.0**-24, 1 - 2.0**-23, 1.0]])
    drawn = jax.jit(drawer())(jnp.ones((1, 5, 1)), jnp.asarray(logits), ends)
    assert drawn[0, 0] == drawn[0, 1] == 40
    assert set(np.ravel(drawn)) <= {40, 41, 130}


def test_the_logits_of_all_tokens_are_not_there_when_targets_are_drawn(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", 4 * PADDED * 24)  # 24 of 96 tokens
    arguments = (*inputs()[:2], uniforms())
    assert large_in(drawer(), arguments, 24, PADDED)
    assert not large_in(drawer(), arguments, 25, PADDED)
