import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from maxmars.optim import (
    MatrixSpec,
    clip_by_matrix_norm,
    correct_gradient,
    mars,
    mars_over,
    muon,
    newton_schulz,
    scale_by_mars,
)

VECTORS = MatrixSpec(batch=(0,), rows=(), cols=(1,))


def random_tree(seed=0, scale=1.0, dtype="float32"):
    """Parameters of a small network: two matrices and two vectors."""
    rng = np.random.default_rng(seed)
    shapes = {"dense": {"kernel": (6, 4), "bias": (4,)}, "embedding": (9, 6), "norm": (6,)}
    return jax.tree.map(
        lambda shape: (scale * rng.standard_normal(shape)).astype(dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def run(tx, params, gradients, prev_gradients=None, **kwargs):
    """Parameters after each step; the update is jitted once."""
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads, extra):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    history = []
    for i, grads in enumerate(gradients):
        extra = kwargs if prev_gradients is None else {"prev_grads": prev_gradients[i]}
        params, state = step(params, state, grads, extra)
        history.append(params)
    return history


def assert_trees_close(ours, theirs, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), ours, theirs)


# --- our own plain reference ---------------------------------------------------------------------


def plain_mars(param, grads, last_grads, *, rate, b1, b2, eps, gamma, clip, decay, amsgrad=False):
    """The equations of the module docstring in float64 NumPy, for one tensor; `rate` and `gamma`
    have a value for each step."""
    p = param.astype(np.float64)
    m = v = v_max = np.zeros_like(p)
    history = []
    for t, (g, last) in enumerate(zip(grads, last_grads, strict=True), start=1):
        c = g + gamma[t - 1] * b1 / (1 - b1) * (g - last)
        if clip is not None:
            c = c / max(1, np.linalg.norm(c) / clip)
        m = b1 * m + (1 - b1) * c
        v = b2 * v + (1 - b2) * c**2
        v_max = np.maximum(v_max, v)
        root = np.sqrt(v_max if amsgrad else v) / np.sqrt(1 - b2**t)
        p = p - rate[t - 1] * (m / (1 - b1**t) / (root + eps) + decay * p)
        history.append(p)
    return history


@pytest.mark.smoke
@pytest.mark.parametrize(("exact", "amsgrad"), [(False, False), (True, True)])
def test_equations(exact, amsgrad):
    params = random_tree(0)
    grads = [random_tree(i, 0.3 * i) for i in range(1, 9)]
    prev = [random_tree(100 + i, 0.3 * i) for i in range(1, 9)]
    rates, gammas = 0.01 / np.arange(1, 9), 0.3 * np.arange(8) % 1
    tx = mars(
        lambda count: jnp.asarray(rates)[count],
        gamma=lambda count: jnp.asarray(gammas)[count],
        weight_decay=0.2,
        exact=exact,
        amsgrad=amsgrad,
        vector_learning_rate_scale=0.5,
        vector_weight_decay=0.1,
    )
    ours = run(tx, params, grads, prev if exact else None)[-1]
    last = [jax.tree.map(np.zeros_like, params)] + (prev[1:] if exact else grads[:-1])

    def expected(param, *gs):
        gs, lasts = gs[: len(grads)], gs[len(grads) :]
        if param.ndim == 2:
            own = {"b1": 0.95, "b2": 0.99, "gamma": gammas, "clip": 1.0, "decay": 0.2}
            own["rate"] = rates
        else:
            own = {"b1": 0.9, "b2": 0.95, "gamma": np.zeros(8), "clip": None, "decay": 0.1}
            own["rate"] = rates / 2
        return plain_mars(param, gs, lasts, eps=1e-8, amsgrad=amsgrad, **own)[-1]

    assert_trees_close(ours, jax.tree.map(expected, params, *grads, *last), 2e-6)


def plain_orthogonalization(x, steps=5):
    """Newton-Schulz with Keller's coefficients in float64 NumPy."""
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x) / np.linalg.norm(x)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("variant", "shape"),
    [("lion", (6, 4)), ("shampoo", (6, 4)), ("shampoo", (4, 10)), ("m", (4, 10))],
)
def test_equations_of_the_other_variants(variant, shape):
    rng = np.random.default_rng(0)
    param, *grads = rng.standard_normal((6, *shape))
    m, last, p = np.zeros(shape), np.zeros(shape), param
    for g in grads:
        c = g + 0.3 * 0.95 / 0.05 * (g - last)
        m, last = 0.95 * m + 0.05 * c / max(1, np.linalg.norm(c)), g
        rows, cols = shape
        match variant:
            case "lion":
                u = np.sign(m)
            case "shampoo":
                u = plain_orthogonalization(m) * max(1, cols / rows) ** 0.5
            case "m":
                u = plain_orthogonalization(m) * 0.2 * max(rows, cols) ** 0.5
        p = p - 0.01 * (u + 0.2 * p)
    tx = mars(0.01, variant=variant, gamma=0.3, weight_decay=0.2, ns_dtype="float32")
    narrow = [g.astype(np.float32) for g in grads]
    ours = run(tx, param.astype(np.float32), narrow)[-1]
    # Newton-Schulz multiplies float32's rounding by up to 3.4 in each of 5 iterations.
    np.testing.assert_allclose(ours, p, rtol=0, atol=1e-5)


# --- identities and structure --------------------------------------------------------------------


def test_without_correction_and_clip_it_is_adamw_of_the_whole_tree():
    params, grads = random_tree(0), [random_tree(i) for i in range(1, 20)]
    mask = {"dense": {"kernel": True, "bias": True}, "embedding": False, "norm": False}
    options = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "mask": mask}
    ours = mars(0.01, gamma=0.0, clip_threshold=None, vector_b1=0.9, vector_b2=0.95, **options)
    adamw = optax.adamw(0.01, **options)
    for a, b in zip(run(ours, params, grads), run(adamw, params, grads), strict=True):
        assert_trees_close(a, b, 2e-6)


def test_specs_may_be_the_dimension_numbers_of_optax():
    shapes = {"conv": (3, 1, 2, 9), "stacked": (4, 6, 8), "turned": (5, 3), "bias": (9,)}
    rng = np.random.default_rng(0)
    params, *grads = (
        {name: rng.standard_normal(shape, "f") for name, shape in shapes.items()} for _ in range(4)
    )
    numbers = {
        "conv": optax.contrib.MuonDimensionNumbers((0, 1, 2), (3,)),
        "stacked": optax.contrib.MuonDimensionNumbers(-2, -1),
        "turned": optax.contrib.MuonDimensionNumbers(1, 0),
        "bias": None,
    }
    theirs = optax.contrib.muon(0.1, nesterov=False, muon_weight_dimension_numbers=numbers)
    ours = muon(0.1, nesterov=False, ns_dtype="float32", matrix_specs=numbers)
    matrices = ("conv", "stacked", "turned")  # optax's Adam of vectors has other betas
    for a, b in zip(run(ours, params, grads), run(theirs, params, grads), strict=True):
        # Five iterations multiply float32's rounding by up to 3.4 each.
        assert_trees_close(*({name: x[name] for name in matrices} for x in (a, b)), 1e-5)


@pytest.mark.parametrize("variant", ["lion", "shampoo", "m"])
def test_one_buffer_gives_what_two_give(x64, variant):
    params, *grads = (random_tree(i, dtype="float64") for i in range(20))
    options = {"variant": variant, "clip_threshold": None, "gamma": 0.3, "ns_dtype": "float64"}
    two, one = (mars(0.01, memory_efficient=one, **options) for one in (False, True))
    sizes = [sum(x.size for x in jax.tree.leaves(tx.init(params))) for tx in (two, one)]
    assert sizes[0] - sizes[1] >= params["embedding"].size + params["dense"]["kernel"].size
    for a, b in zip(run(two, params, grads), run(one, params, grads), strict=True):
        assert_trees_close(a, b, 1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_newton_schulz_of_nesterov_momentum(x64, nesterov):
    params, *grads = (random_tree(i, dtype="float64") for i in range(20))
    ours = muon(0.01, momentum=0.9, nesterov=nesterov, ns_dtype="float64")
    matrix = params["embedding"]
    buffer = np.zeros_like(matrix)
    for after, gs in zip(run(ours, params, grads), grads, strict=True):
        buffer = 0.9 * buffer + gs["embedding"]
        look = gs["embedding"] + 0.9 * buffer if nesterov else buffer
        rows, cols = look.shape
        matrix = matrix - 0.01 * np.sqrt(max(1, cols / rows)) * newton_schulz(
            jnp.asarray(look), dtype="float64"
        )
        np.testing.assert_allclose(
            after["embedding"], matrix, atol=1e-7
        )  # eps is beside another norm


def test_gamma_zero_stores_no_last_gradient():
    params = random_tree()
    assert not jax.tree.leaves(correct_gradient(gamma=0.0).init(params))
    assert correct_gradient(gamma=lambda count: 0.0 * count).init(params).last_grad is not None


def test_a_stack_of_layers_equals_separate_parameters():
    layers = [random_tree(i) for i in range(4)]
    # Different sizes of gradient, so that some layers are clipped and others are not.
    gradients = [
        [random_tree(10 * step + i, 10.0 ** (i - 2)) for i in range(4)] for step in range(1, 7)
    ]
    options = {"weight_decay": 0.1, "gamma": 0.1, "optimize_vectors": True}
    matrix = MatrixSpec(batch=(0,), rows=(1,), cols=(2,))
    specs = {
        "dense": {"kernel": matrix, "bias": VECTORS},
        "embedding": matrix,
        "norm": VECTORS,
    }

    def stack(trees):
        return jax.tree.map(lambda *xs: np.stack(xs), *trees)

    stacked = run(
        mars(0.01, matrix_specs=specs, **options), stack(layers), [stack(g) for g in gradients]
    )[-1]
    separate = [
        run(mars(0.01, **options), layer, [g[i] for g in gradients])[-1]
        for i, layer in enumerate(layers)
    ]
    assert_trees_close(stacked, stack(separate), 1e-6)


@pytest.mark.parametrize("variant", ["adamw", "shampoo", "m"])
def test_a_padded_vocabulary_changes_nothing(x64, variant):
    options = {
        "variant": variant,
        "weight_decay": 0.1,
        "embeddings": "orthogonalize",
        "ns_dtype": "float64",
    }
    rng = np.random.default_rng(0)
    param, *grads = rng.standard_normal((9, 13, 6))  # [tokens, embed]: more tokens than width

    def trained(padding):
        spec = MatrixSpec(rows=(1,), cols=(0,), embedding=True, padding=padding)
        table = [np.pad(x, ((0, padding), (0, 0))) for x in (param, *grads)]
        return run(mars(0.1, matrix_specs=spec, **options), table[0], table[1:])[-1]

    padded = trained(3)
    np.testing.assert_allclose(padded[:13], trained(0), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(padded[13:], 0)


def test_importing_it_imports_nothing_but_optax_and_jaxtyping():
    code = """
import sys
import jaxtyping, numpy, optax
before = {name.partition(".")[0] for name in sys.modules}
from maxmars.optim import mars
print(*{name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names)
"""
    program = [sys.executable, "-c", code]
    packages = subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()
    assert packages == ["maxmars"]


# --- compositions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"amsgrad": True}, {"gamma": 0.0, "mu_dtype": "bfloat16"}, {"exact": True}],
)
def test_mars_of_all_parameters_is_scale_by_mars_decay_and_rate(options):
    params, *grads = (random_tree(i) for i in range(5))
    direction = scale_by_mars(0.9, 0.98, **options)
    rest = optax.add_decayed_weights(0.2), optax.scale_by_learning_rate(0.01)
    whole = mars(0.01, b1=0.9, b2=0.98, weight_decay=0.2, optimize_vectors=True, **options)
    prev = grads[::-1] if "exact" in options else None
    ours = run(optax.chain(direction, *rest), params, grads, prev)
    assert_trees_close(ours, run(whole, params, grads, prev), 0)
    states = [type(state).__name__ for state in direction.init(params)]
    for name in states:
        assert name in scale_by_mars.__doc__


def test_specs_may_be_a_prefix():
    params = {"a": {"x": np.ones((2, 3), np.float32), "y": np.ones((3, 2), np.float32)}}
    state = mars(0.1, matrix_specs={"a": None}).init(params)
    assert "vector" in state.inner_states
    (_, mu), *_ = [
        (path, mu) for path, mu in optax.tree.get_all_with_path(state, "mu") if jax.tree.leaves(mu)
    ]
    assert mu["a"]["x"].shape == (2, 3)
    assert not jax.tree.leaves(state.inner_states["matrix"].inner_state[0].last_grad)


# --- states and wrappers -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes_of_the_state(dtype):
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), random_tree())
    tx = mars(0.01, mu_dtype="bfloat16", last_grad_dtype="bfloat16", amsgrad=True)
    state = jax.eval_shape(tx.init, params)
    assert jax.eval_shape(tx.update, params, state, params) == (
        jax.eval_shape(lambda: params),
        state,
    )
    correction, _, adam = state.inner_states["matrix"].inner_state[:3]
    assert adam.mu["embedding"].dtype == correction.last_grad["embedding"].dtype == jnp.bfloat16
    wide = "float32" if dtype == "float16" else dtype  # where squares of gradients are zero
    assert adam.nu["embedding"].dtype == jnp.dtype(wide)


def test_bytes_per_parameter():
    params = {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.float32)}

    def per_parameter(**options):
        state = jax.eval_shape(mars(0.1, **options).init, params)
        big = [x for x in jax.tree.leaves(state) if x.size > 1]
        return sum(x.size * x.dtype.itemsize for x in big) / 64**2

    assert per_parameter() == 12
    assert per_parameter(last_grad_dtype=jnp.bfloat16) == 10
    assert per_parameter(exact=True) == per_parameter(gamma=0.0) == 8


def test_exact_mars_over_several_batches_takes_the_mean_of_both_gradients():
    # The correction is linear: before MultiSteps, its mean is that of the mean gradients.
    grads = [random_tree(i) for i in range(1, 9)]
    prev = [*grads[:2], *(random_tree(100 + i) for i in range(6))]  # nothing precedes the first
    options = {"b1": 0.95, "gamma": 0.3, "exact": True, "first_step": "plain_gradient"}
    inner = optax.chain(clip_by_matrix_norm(), optax.adam(0.01, b1=0.95))
    several = optax.MultiSteps(inner, 2).gradient_transformation()
    ours = run(optax.chain(correct_gradient(**options), several), random_tree(0), grads, prev)

    def means(trees):
        pairs = zip(trees[::2], trees[1::2], strict=True)
        return [jax.tree.map(lambda a, b: (a + b) / 2, *pair) for pair in pairs]

    whole = mars_over(optax.adam(0.01, b1=0.95), **options)
    theirs = run(whole, random_tree(0), means(grads), means(prev))
    assert_trees_close(ours[1::2], theirs, 1e-6)
