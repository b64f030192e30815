"""Our optimizers under `nnx.Optimizer`, whose init sees Variables and whose update sees arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxmars.optim import mars, muon


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def loss(model, x):
    return jnp.square(model(x) - x[:, :2]).mean()


@pytest.mark.parametrize("make", [mars, muon])
def test_it_trains_and_equals_plain_optax(make):
    model, tx = Network(nnx.Rngs(0)), make(1e-2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = tx.init(params)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((32, 4)), jnp.float32)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value, nnx.to_pure_dict(grads)

    @jax.jit
    def plain_step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    losses = []
    for _ in range(20):
        value, grads = step(model, optimizer)
        params, state = plain_step(params, state, grads)
        losses.append(float(value))
    assert losses[-1] < 0.8 * losses[0]
    ours = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, params)


def test_exact_mars_beside_a_clone_of_the_model():
    """The clone holds the parameters of the step before, and is not the model."""
    model, tx = Network(nnx.Rngs(0)), mars(1e-2, exact=True, gamma=0.5)
    optimizer, previous = nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.clone(model)
    params = before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    graph, state = nnx.graphdef(model), tx.init(params)
    batches = np.random.default_rng(0).standard_normal((5, 32, 4)).astype("f")

    @nnx.jit
    def step(model, previous, optimizer, x):
        grads, prev_grads = nnx.grad(loss)(model, x), nnx.grad(loss)(previous, x)
        nnx.update(previous, nnx.state(model))
        optimizer.update(model, grads, prev_grads=prev_grads)

    @jax.jit
    def plain_step(params, before, state, x):
        def gradient(params):
            return jax.grad(lambda params: loss(nnx.merge(graph, params), x))(params)

        extra = {"prev_grads": gradient(before)}
        updates, state = tx.update(gradient(params), state, params, **extra)
        return jax.tree.map(jnp.add, params, updates), params, state

    for x in batches:
        step(model, previous, optimizer, x)
        params, before, state = plain_step(params, before, state, x)
        for ours, theirs in ((model, params), (previous, before)):
            ours = nnx.to_pure_dict(nnx.state(ours, nnx.Param))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, theirs)
