import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import NamedSharding, PartitionSpec
from trees import assert_close, random_tree, take_steps

from maxmars.optim import MatrixSpec, scale_by_soap, soap

SHAPES = {"square": (6, 6), "table": (12, 5), "bias": (6,)}
FEWER = {"square": (6, 6), "bias": (6,)}


def test_equations(x64):
    """With both sides preconditioned; test_official.py has matrices of one side."""
    p, *grads = np.random.default_rng(0).standard_normal((28, 6, 6))
    rates = 0.01 / np.arange(1, 28)
    options = {"b1": 0.9, "b2": 0.99, "eps": 1e-3}
    tx = soap(
        lambda count: jnp.asarray(rates)[count],
        weight_decay=0.1,
        precondition_frequency=3,
        shampoo_beta=0.8,
        **options,
    )
    # Any basis of a singular Gram matrix's kernel is right, and the eigenvectors that stand in for
    # LAPACK's stop at 1e-7: the first ones are checked and then given to the reference.
    state = take_steps(tx, p, grads[:1]).state.inner_states["matrix"].inner_state[0]
    bases, g = (state.row_basis, state.col_basis), grads[0]
    for q, gram in zip(bases, (g @ g.T, g.T @ g), strict=True):
        np.testing.assert_allclose(q.T @ q, np.eye(6), atol=1e-12)
        values = np.linalg.eigvalsh(gram)[::-1]
        np.testing.assert_allclose(q.T @ gram @ q, np.diag(values), 0, 1e-7 * values[0])
    directions = reference.soap(grads, frequency=3, first_bases=bases, beta=0.8, **options)
    # In the first step nothing decays either.
    *_, expected = reference.descend(p, directions, lambda t: rates[t], lambda t: 0.1 * (t > 0))
    ours = take_steps(tx, p, grads).params[-1]
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-10)


def test_with_both_sides_over_the_limit_it_is_adam_after_one_step():
    params, *grads = (random_tree(i, {"table": (12, 5)}) for i in range(9))
    tx = soap(0.01, b1=0.9, b2=0.95, weight_decay=0.01, max_precondition_dim=4)
    adamw = optax.adamw(0.01, b1=0.9, b2=0.95, weight_decay=0.01)
    ours, theirs = take_steps(tx, params, grads), take_steps(adamw, params, grads[1:])
    assert_close(ours.params[1:], theirs.params, 1e-6)


@pytest.mark.smoke
def test_vectors_and_embeddings_are_adamw_and_the_first_step_changes_no_matrix():
    params, *grads = (random_tree(i, SHAPES) for i in range(5))
    specs = {
        "square": MatrixSpec(rows=(0,), cols=(1,)),
        "table": MatrixSpec(rows=(1,), cols=(0,), embedding=True),
        "bias": None,
    }
    tx = soap(0.01, vector_learning_rate=0.02, vector_weight_decay=0.1, matrix_specs=specs)
    first = take_steps(tx, params, grads[:1])
    np.testing.assert_array_equal(first.params[0]["square"], params["square"])
    state = first.state.inner_states["matrix"].inner_state[0]
    assert not state.mu["square"].any()
    assert state.row_gram["square"].any()
    adamw = optax.adamw(0.02, b1=0.9, b2=0.95, weight_decay=0.1)
    ours, theirs = (take_steps(each, params, grads).params[-1] for each in (tx, adamw))
    for name in ("table", "bias"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_many_matrices_on_many_devices_do_not_block():
    # With LAPACK of jaxlib 0.10 one of these steps never ends.
    mesh = jax.make_mesh((8,), ("x",))
    layout = NamedSharding(mesh, PartitionSpec("x"))
    spec = MatrixSpec(batch=(0,), rows=(1,), cols=(2,), partition=layout.spec)
    tx = scale_by_soap(precondition_frequency=1, matrix_specs=spec, mesh=mesh)
    x = jax.device_put(np.random.default_rng(0).standard_normal((8, 96, 96)).astype("f"), layout)
    state = tx.init(x)
    update = jax.jit(tx.update)
    for _ in range(5):
        directions, state = jax.block_until_ready(update(x, state))
    assert np.isfinite(directions).all()


def test_zero_and_tiny_gradients():
    params = random_tree(0, FEWER)
    tx = soap(0.1, weight_decay=0.0, precondition_frequency=2)
    scales = [0, 0, 0, 1e-15, 1e-15, 1e-15]
    grads = [random_tree(i, FEWER, scale=scale) for i, scale in enumerate(scales)]
    after = take_steps(tx, params, grads)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.state))
    assert_close(after.params[2], params)
    q = after.state.inner_states["matrix"].inner_state[0].row_basis["square"]
    np.testing.assert_allclose(q.T @ q, np.eye(6), atol=1e-5)


def test_decay_mask_and_schedules():
    params = {"a": np.ones((6, 6), "f"), "b": np.ones((6, 6), "f"), "c": np.ones(6, "f")}
    zeros = jax.tree.map(np.zeros_like, params)
    tx = soap(
        lambda count: 0.1 / (count + 1),
        weight_decay=lambda count: 0.5 * count,
        mask={"a": True, "b": False, "c": True},
        vector_learning_rate_scale=0.5,
        vector_weight_decay=0.2,
    )
    after = take_steps(tx, params, [zeros] * 3).params[-1]
    np.testing.assert_allclose(after["a"], (1 - 0.1 / 2 * 0.5) * (1 - 0.1 / 3 * 1.0), rtol=1e-6)
    np.testing.assert_array_equal(after["b"], 1)
    np.testing.assert_allclose(after["c"], 0.99 * 0.995 * (1 - 0.02 / 6), rtol=1e-6)
