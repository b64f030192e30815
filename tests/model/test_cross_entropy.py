"""The chunked loss against the plain one: values, gradients, meshes, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import mesh_of

from maxmars.distributed import sharding
from maxmars.model import cross_entropy

VOCAB, PADDED = 250, 256
# Sizes of chunks that split the 96 tokens into one chunk, and into 5 of 20, the last padded.
CHUNKS = pytest.mark.parametrize(
    "chunk_bytes",
    [
        pytest.param(4 * PADDED * 96, id="one"),
        pytest.param(4 * PADDED * 20, id="padded"),
    ],
)

pytestmark = pytest.mark.smoke


def inputs(rows=8, length=12, vocab=PADDED):
    rng = np.random.default_rng(0)
    x, embedding = rng.normal(size=(rows, length, 16)), rng.normal(size=(vocab, 16))
    targets = rng.integers(0, VOCAB, (rows, length))
    return x.astype(np.float32), embedding.astype(np.float32), targets.astype(np.int32)


def cap(logits):
    return 2 * jnp.tanh(logits / 2)


def plain(x, embedding, targets, cap=lambda logits: logits):
    logits = cap(jnp.einsum("btd,vd->btv", x, embedding, preferred_element_type=jnp.float32))
    logits = jnp.where(jnp.arange(len(embedding)) < VOCAB, logits, jnp.finfo(jnp.float32).min)
    return cross_entropy.cross_entropy(logits, targets)


def with_grads(function, *arguments):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(*arguments)


def assert_same(result, expected, rtol=1e-6):
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


def chunked_losses(x, embedding, targets, chunk_bytes, losses=cross_entropy.token_losses, cap=None):
    return losses(x, sharding.copies(embedding), targets, VOCAB, chunk_bytes, cap)


SLOPES = jnp.asarray(np.random.default_rng(1).random((8, 12)), jnp.float32)
# Each token has another weight in the second, so that no gradient can hide in a mean.
FUNCTIONS = {
    "mean_loss": (
        functools.partial(chunked_losses, losses=cross_entropy.mean_loss),
        lambda *arrays: plain(*arrays).mean(),
    ),
    "weighted under a cap": (
        functools.partial(
            chunked_losses,
            losses=functools.partial(cross_entropy.mean_loss, weights=SLOPES),
            cap=cap,
        ),
        lambda *arrays: (SLOPES * plain(*arrays, cap=cap)).mean(),
    ),
}


@functools.cache
def plain_with_grads(name):
    return jax.device_get(with_grads(FUNCTIONS[name][1], *inputs()))


@CHUNKS
@pytest.mark.parametrize("name", FUNCTIONS)
def test_loss_and_gradients_equal_the_plain_ones(name, chunk_bytes):
    chunked = functools.partial(FUNCTIONS[name][0], chunk_bytes=chunk_bytes)
    assert_same(with_grads(chunked, *inputs()), plain_with_grads(name))
    assert_same(jax.jit(chunked)(*inputs()), plain_with_grads(name)[0])


@CHUNKS
def test_losses_of_tokens_equal_the_plain_ones(chunk_bytes):
    losses = jax.jit(functools.partial(chunked_losses, chunk_bytes=chunk_bytes, cap=cap))
    expected = jax.jit(functools.partial(plain, cap=cap))(*inputs())
    assert_same(losses(*inputs()), expected)
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tensor=2)):
        assert_same(losses(*inputs()), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_on_a_mesh(name):
    chunked = functools.partial(FUNCTIONS[name][0], chunk_bytes=4 * PADDED // 2 * 10)
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tensor=2)):
        assert_same(with_grads(chunked, *inputs()), plain_with_grads(name))


def test_a_token_that_is_ruled_out_has_a_finite_loss_and_a_gradient_that_lowers_it():
    x, embedding, targets = inputs()
    chunked, reference = FUNCTIONS["mean_loss"]
    chunked = functools.partial(chunked, chunk_bytes=None)
    for scale, is_capped in ((2, False), (20, True)):  # the largest losses are 60 and 700 nats
        arrays = x, scale * embedding, targets
        losses = jax.jit(functools.partial(chunked_losses, chunk_bytes=None))(*arrays)
        assert (losses.max() > 75) == is_capped
        assert_same(losses, jax.jit(plain)(*arrays))  # of a validation, without a limit
        (loss, grads), (exact, exact_grads) = (with_grads(f, *arrays) for f in (chunked, reference))
        if not is_capped:
            assert_same((loss, grads), (exact, exact_grads))
            continue
        assert 0 < loss < exact
        for ours, theirs in zip(grads, exact_grads, strict=True):
            cosine = np.vdot(ours, theirs) / (np.linalg.norm(ours) * np.linalg.norm(theirs))
            assert cosine > 0.5


def temporaries(function, *arguments):
    """Bytes that a program holds beside its arguments and results."""
    program = jax.jit(function).lower(*arguments).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_the_logits_of_all_tokens_are_never_there():
    chunked, reference = FUNCTIONS["mean_loss"]
    chunked = functools.partial(chunked, chunk_bytes=2**20)
    arrays = inputs(rows=8, length=128, vocab=8192)  # logits of 32 MB, an embedding of 0.5 MB
    grads = [jax.value_and_grad(function, argnums=(0, 1)) for function in (chunked, reference)]
    logits = 4 * 8 * 128 * 8192
    assert temporaries(grads[1], *arrays) > logits
    assert temporaries(grads[0], *arrays) < logits / 4
    losses = functools.partial(chunked_losses, chunk_bytes=2**20)
    assert temporaries(losses, *arrays) < logits / 4
    with jax.set_mesh(mesh_of(fsdp=2, tensor=4)):
        assert temporaries(grads[0], *arrays) < logits / 8  # the logits of a device
    drawn = functools.partial(draw, chunk_bytes=2**20)
    assert temporaries(drawn, *arrays[:2], uniforms(8, 128)) < logits / 4


# The largest differences on CPUs: 2e-4 in the loss, and 0.0025 of a gradient's norm.
@pytest.mark.gpu
def test_the_loss_in_bfloat16_is_that_in_float32():
    x, embedding, targets = (jnp.asarray(a) for a in inputs(4, 128, 1024))
    x, embedding = jnp.tile(x, 16) / 4, jnp.tile(embedding, 16) / 8
    with jax.default_matmul_precision("highest"):  # float32 is not TF32 here
        expected = with_grads(lambda *a: plain(*a, targets).mean(), x, embedding)
    chunked = functools.partial(FUNCTIONS["mean_loss"][0], chunk_bytes=4 * 1024 * 100)
    narrow = (a.astype(jnp.bfloat16) for a in (x, embedding))
    loss, grads = with_grads(lambda *a: chunked(*a, targets), *narrow)
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(float(expected[0]), abs=1e-3)
    for a, b in zip(grads, expected[1], strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert 1e-5 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.005


# --- drawn targets -------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="chunk_bytes")
def draw(x, embedding, uniforms, chunk_bytes=2**29):
    tables = sharding.copies(embedding)
    return cross_entropy.draw_targets(x, tables, uniforms, VOCAB, chunk_bytes)


def uniforms(rows=8, length=12, seed=1):
    return jax.random.uniform(jax.random.key(seed), (rows, length))


def in_order(x, embedding, uniforms):
    """The first token whose cumulated probability exceeds the uniform number, in float64."""
    logits = np.asarray(x, np.float64) @ np.asarray(embedding, np.float64)[:VOCAB].T
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    ends = weights.cumsum(-1) / weights.sum(-1, keepdims=True)
    return (ends > np.asarray(uniforms, np.float64)[..., None]).argmax(-1)


@CHUNKS
def test_targets_are_those_of_the_uniform_numbers_on_every_mesh(chunk_bytes):
    x, embedding, _ = inputs()
    x = x / 4  # several likely tokens everywhere
    expected = in_order(x, embedding, uniforms())
    assert len(np.unique(expected)) > 30
    result = draw(x, embedding, uniforms(), chunk_bytes=chunk_bytes)
    np.testing.assert_array_equal(result, expected)
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tensor=2)):
        result = draw(x, embedding, uniforms(), chunk_bytes=chunk_bytes)
    np.testing.assert_array_equal(result, expected)


def test_nothing_without_probability_is_drawn():
    """Whatever rounding does at the ends: the first and the last tokens have none here."""
    logits = np.full((PADDED, 1), -1e4, np.float32)
    logits[[40, 41, 130]] = [[0.0], [-16.0], [-16.0]]
    ends = jnp.asarray([[0.0, 0.5, 1 - 2.0**-24, 1 - 2.0**-23, 1.0]])
    drawn = draw(jnp.ones((1, 5, 1)), jnp.asarray(logits), ends)
    assert drawn[0, 0] == drawn[0, 1] == 40
    assert set(np.ravel(drawn)) <= {40, 41, 130}
