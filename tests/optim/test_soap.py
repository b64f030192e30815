import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxmars.optim import MatrixSpec, scale_by_soap, soap

LAYERS = MatrixSpec(batch=(0,), rows=(1,), cols=(2,))


def random_arrays(shapes, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.standard_normal(s)).astype("f") for name, s in shapes.items()}


SHAPES = {"square": (6, 6), "table": (12, 5), "bias": (6,)}
FEWER = {"square": (6, 6), "bias": (6,)}


def run(tx, params, gradients, put=lambda tree: tree):
    """Parameters after the last step, and the state; the update is jitted once."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, put(params))
    state = jax.jit(tx.init)(params)
    for i, grads in enumerate(gradients):
        params, state = step(params, state, put(grads))
        # On a mesh the first state's vectors are not where later ones are.
        assert step._cache_size() == 1 or (i > 0 and step._cache_size() == 2)
    return params, state


def assert_close(ours, theirs, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), ours, theirs)


# --- a plain reference ---------------------------------------------------------------------------


def plain_soap(p, grads, rates, *, decay, frequency, b1, b2, beta, eps, sides, first_bases):
    """The equations for one matrix, with the momentum in the parameter's own basis."""

    def transform(x, bases, inverse=False):
        left, right = (q.T if inverse else q for q in bases)
        return left.T @ x @ right

    bases = [np.eye(n) for n in p.shape]
    grams = [np.zeros((n, n)) for n in p.shape]
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True)):
        if t > 0:
            projected = transform(g, bases)
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * projected**2
            scaled = transform(m, bases) / (1 - b1**t) * np.sqrt(1 - b2**t) / (np.sqrt(v) + eps)
            p = p - rate * (transform(scaled, bases, inverse=True) + decay * p)
        for i, outer in enumerate([g @ g.T, g.T @ g]):
            grams[i] = beta * grams[i] + (1 - beta) * outer
        for i in np.flatnonzero(sides):
            if t == 0:
                bases[i] = np.asarray(first_bases[i])
            elif t % frequency == 0:
                order = np.argsort(-np.diag(bases[i].T @ grams[i] @ bases[i]))
                v = np.take(v, order, axis=i)
                bases[i] = np.linalg.qr(grams[i] @ bases[i][:, order])[0]
    return p


DEFAULTS = {"b1": 0.95, "b2": 0.95, "beta": 0.95, "eps": 1e-8}


@pytest.mark.parametrize(
    ("shape", "frequency", "options"),
    [
        ((6, 6), 3, {"b1": 0.9, "b2": 0.99, "shampoo_beta": 0.8, "eps": 1e-3}),
        ((14, 5), 2, {}),  # of 12 rows or columns: the other side alone
        ((5, 14), 4, {}),
    ],
)
def test_equations(x64, shape, frequency, options):
    rng = np.random.default_rng(0)
    p = rng.standard_normal(shape)
    grads = list(rng.standard_normal((27, *shape)))
    rates = 0.01 / np.arange(1, 28)
    tx = soap(
        lambda count: jnp.asarray(rates)[count],
        weight_decay=0.1,
        precondition_frequency=frequency,
        max_precondition_dim=12,
        **options,
    )
    bases = first_bases(tx, p, grads[0])
    given = DEFAULTS | {n.replace("shampoo_", ""): x for n, x in options.items()}
    sides = [n <= 12 for n in shape]
    expected = plain_soap(
        p, grads, rates, decay=0.1, frequency=frequency, sides=sides, first_bases=bases, **given
    )
    ours, _ = run(tx, p, grads)
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-10)


def first_bases(tx, p, g):
    """The bases after one step, None of a side that keeps the identity.

    They are checked and then given to the reference: any basis of a singular Gram matrix's kernel
    is right, and the eigenvectors that stand in for LAPACK's stop at 1e-7, in float64 too.
    """
    _, state = run(tx, p, [g])
    state = state.inner_states["matrix"].inner_state[0]
    for q, gram in [(state.row_basis, g @ g.T), (state.col_basis, g.T @ g)]:
        if q is not None:
            np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-12)
            values = np.linalg.eigvalsh(gram)[::-1]
            atol = 1e-7 * values[0]
            np.testing.assert_allclose(q.T @ gram @ q, np.diag(values), rtol=0, atol=atol)
    return state.row_basis, state.col_basis


def test_with_both_sides_over_the_limit_it_is_adam_after_one_step():
    params = {"table": random_arrays(SHAPES)["table"]}
    grads = [{"table": random_arrays(SHAPES, i)["table"]} for i in range(1, 9)]
    tx = soap(0.01, b1=0.9, b2=0.95, weight_decay=0.01, max_precondition_dim=4)
    ours, _ = run(tx, params, grads)
    adamw = optax.adamw(0.01, b1=0.9, b2=0.95, weight_decay=0.01)
    assert_close(ours, run(adamw, params, grads[1:])[0], 1e-6)


def test_vectors_and_embeddings_are_adamw_and_the_first_step_changes_no_matrix():
    params, *grads = (random_arrays(SHAPES, i) for i in range(5))
    specs = {
        "square": MatrixSpec(rows=(0,), cols=(1,)),
        "table": MatrixSpec(rows=(1,), cols=(0,), embedding=True),
        "bias": None,
    }
    tx = soap(0.01, vector_learning_rate=0.02, vector_weight_decay=0.1, matrix_specs=specs)
    first, state = run(tx, params, grads[:1])
    np.testing.assert_array_equal(first["square"], params["square"])
    state = state.inner_states["matrix"].inner_state[0]
    assert not state.mu["square"].any()
    assert state.row_gram["square"].any()
    ours, _ = run(tx, params, grads)
    theirs, _ = run(optax.adamw(0.02, b1=0.9, b2=0.95, weight_decay=0.1), params, grads)
    for name in ("table", "bias"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-6)


def test_a_stack_of_layers_equals_separate_parameters():
    shapes = {"square": (6, 6), "fused": (6, 2, 8)}  # heads and their width are columns, over 12
    fused = {
        "square": MatrixSpec(rows=(0,), cols=(1,)),
        "fused": MatrixSpec(rows=(0,), cols=(1, 2)),
    }
    stacked = {"square": LAYERS, "fused": MatrixSpec(batch=(0,), rows=(1,), cols=(2, 3))}
    # Layers differ in size, but no matrix knows of another.
    steps = [
        [random_arrays(shapes, 10 * step + i, 10.0 ** (3 * i - 3)) for i in range(2)]
        for step in range(8)
    ]
    options = {"precondition_frequency": 2, "max_precondition_dim": 12}

    def stack(trees):
        return jax.tree.map(lambda *xs: np.stack(xs), *trees)

    together, _ = run(
        soap(0.01, matrix_specs=stacked, **options), stack(steps[0]), list(map(stack, steps[1:]))
    )
    tx = soap(0.01, matrix_specs=fused, **options)
    apart = [run(tx, steps[0][i], [s[i] for s in steps[1:]])[0] for i in range(2)]
    assert_close(together, stack(apart), 1e-5)


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


# --- state ---------------------------------------------------------------------------------------


def test_bytes_of_the_state():
    def per_element(shape, spec=None, **options):
        param = {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
        specs = None if spec is None else {"kernel": spec}
        state = jax.eval_shape(soap(0.1, matrix_specs=specs, **options).init, param)
        arrays = [x for x in jax.tree.leaves(state) if x.size > 1]
        return sum(x.size * x.dtype.itemsize for x in arrays) / np.prod(shape)

    assert per_element((64, 64)) == 8 + 2 * 2 * 4  # Gram matrix and basis of both sides
    assert per_element((64, 64), mu_dtype=jnp.bfloat16) == 6 + 16
    assert per_element((7, 64, 64), LAYERS) == 8 + 16
    assert per_element((64, 256), max_precondition_dim=128) == 8 + 2 * 4 * 64 / 256
    assert per_element((256, 512), max_precondition_dim=128) == 8
    assert per_element((50304, 768)) == pytest.approx(8 + 2 * 4 * 768 / 50304)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes_of_the_state(dtype):
    params = {n: jnp.asarray(x, dtype) for n, x in random_arrays(FEWER).items()}
    tx = soap(0.01, mu_dtype="bfloat16", weight_decay=0.1)
    state = jax.eval_shape(tx.init, params)
    after = jax.eval_shape(tx.update, params, state, params)
    assert after == (jax.eval_shape(lambda: params), state)
    inner = state.inner_states["matrix"].inner_state[0]
    assert inner.mu["square"].dtype == jnp.bfloat16
    wide = "float32" if dtype == "float16" else dtype  # where squares of gradients are zero
    assert inner.nu["square"].dtype == jnp.dtype(wide)
    assert inner.row_gram["square"].dtype == inner.col_basis["square"].dtype == jnp.float32


# --- optax's contract ----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1e-15])
def test_zero_and_tiny_gradients(scale):
    params = random_arrays(FEWER)
    tx = soap(0.1, weight_decay=0.0, precondition_frequency=2)
    after, state = run(tx, params, [random_arrays(FEWER, i, scale) for i in range(5)])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    if scale == 0:
        assert_close(after, params, 0)
    q = state.inner_states["matrix"].inner_state[0].row_basis["square"]
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
    after, _ = run(tx, params, [zeros] * 3)
    np.testing.assert_allclose(after["a"], (1 - 0.1 / 2 * 0.5) * (1 - 0.1 / 3 * 1.0), rtol=1e-6)
    np.testing.assert_array_equal(after["b"], 1)
    np.testing.assert_allclose(after["c"], 0.99 * 0.995 * (1 - 0.02 / 6), rtol=1e-6)
