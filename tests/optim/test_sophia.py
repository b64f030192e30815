import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from test_soap import assert_close, run

from maxmars.optim import needs_sampled_grads, sophia, sophia_state

SHAPES = {"kernel": (6, 4), "norm": (6,)}


def random_tree(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(scale * rng.standard_normal(s), "f") for n, s in SHAPES.items()}


def plain_sophia(p, grads, sampled, rates, *, tokens, b1, b2, rho, decay, every):
    """The official order and parametrisation: h is kept without the number of tokens, is updated
    after the steps k − 1, 2k − 1, ..., and parameters decay first."""
    m, h = np.zeros_like(p), np.zeros_like(p)
    clipped = []
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True)):
        p = p * (1 - rate * decay)
        m = b1 * m + (1 - b1) * g
        ratio = np.minimum(np.abs(m) / (rho * tokens * h + 1e-15), 1)
        clipped.append(np.mean(ratio == 1))
        p = p - rate * np.sign(m) * ratio
        if t % every == every - 1 and t + 1 < len(sampled):
            h = b2 * h + (1 - b2) * sampled[t + 1] ** 2
    return p, clipped


@pytest.mark.smoke
@pytest.mark.parametrize("every", [1, 3])
def test_equations(x64, every):
    rng = np.random.default_rng(0)
    grads, sampled = rng.standard_normal((2, 25, 6, 4))
    p, rates = rng.standard_normal((6, 4)), 0.01 / np.arange(1, 26)
    given = {"b1": 0.9, "b2": 0.8, "rho": 0.01}
    # Elsewhere than where they are needed sampled gradients are ignored, even if not finite.
    masked = [s if t and t % every == 0 else np.full_like(s, np.nan) for t, s in enumerate(sampled)]
    tx = sophia(
        lambda count: jnp.asarray(rates)[count],
        batch_tokens=20.0,
        update_hessian_every=every,
        weight_decay=0.3,
        **given,
    )
    expected, clipped = plain_sophia(
        p, grads, sampled, rates, tokens=20.0, decay=0.3, every=every, **given
    )
    assert 0 < np.mean(clipped[10:]) < 1  # both branches count
    ours, _ = run(tx, p, grads, sampled=masked)
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)


def test_without_an_estimate_it_is_sign_momentum():
    params, grads = random_tree(0), [random_tree(i) for i in range(1, 6)]
    ours, _ = run(sophia(0.01, batch_tokens=8.0, weight_decay=0.1), params, grads, sampled=grads)

    def expected(p, *gs):
        m = np.zeros_like(p)
        for g in gs:
            m = 0.965 * m + 0.035 * g
            p = p - 0.01 * (np.sign(m) + 0.1 * p)
        return p

    assert_close(ours, jax.tree.map(expected, params, *grads), 1e-6)


def test_which_steps_need_sampled_gradients():
    needed = [int(t) for t in range(31) if needs_sampled_grads(t, 10)]
    assert needed == [10, 20, 30]
    assert [t for t in range(4) if needs_sampled_grads(t, 1)] == [1, 2, 3]


def test_a_train_step_computes_sampled_gradients_only_where_needed():
    params, grads = random_tree(0), random_tree(1)
    tx = sophia(0.01, batch_tokens=8.0, update_hessian_every=3)
    computed = []

    def sampled_gradient():
        jax.debug.callback(lambda: computed.append(len(computed)))
        return random_tree(2)

    @jax.jit
    def step(state):
        due = needs_sampled_grads(sophia_state(state).count, 3)
        zeros = jax.tree.map(jnp.zeros_like, params)
        sampled = jax.lax.cond(due, sampled_gradient, lambda: zeros)
        return tx.update(grads, state, params, sampled_grads=sampled)[1]

    state = tx.init(params)
    for _ in range(7):
        state = step(state)
    jax.effects_barrier()
    assert len(computed) == 2
    h = 8 * 0.01 * np.square(random_tree(2)["kernel"])
    np.testing.assert_allclose(sophia_state(state).hessian["kernel"], 1.99 * h, rtol=1e-5)
    assert step._cache_size() == 1


def test_missing_sampled_gradients():
    params = random_tree()
    tx = sophia(0.01, batch_tokens=8.0, update_hessian_every=2)
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(params, state, params)  # not needed, and known not to be
    with refused(ValueError, "sampled_grads="):
        tx.update(params, state, params)


def test_the_state_is_two_trees_like_the_parameters_in_float32_for_float16():
    params = {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.float16)}
    state = jax.eval_shape(sophia(0.1, batch_tokens=8.0).init, params)
    arrays = [x for x in jax.tree.leaves(state) if x.size > 1]
    assert [(x.shape, x.dtype) for x in arrays] == [((64, 64), jnp.float32)] * 2
