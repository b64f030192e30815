"""Momentum kernels against plain forms in NumPy, 50 steps in float64, and inside optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from refusals import refused

from maxmars.optim import (
    MatrixSpec,
    clip_by_matrix_norm,
    correct_gradient,
    kernel_preset,
    mars,
    momentum_kernel,
    muon,
    scale_by_adam_of,
    scale_by_orthogonalization,
    soap,
)

STEPS = 50


def gradients(shape=(4, 3)):
    """Of very different sizes; the first two are zero, and one coordinate has none."""
    scales = np.concatenate([[0, 0], 10.0 ** np.random.default_rng(1).integers(-6, 3, STEPS)])
    grads = np.random.default_rng(0).standard_normal((STEPS, *shape)) * scales[:STEPS, None, None]
    grads[:, 0, 0] = 0
    return grads


def outputs(tx, grads):
    params = {"w": jnp.zeros(grads.shape[1:])}
    state, update, results = tx.init(params), jax.jit(tx.update), []
    for grad in grads:
        updates, state = update({"w": jnp.asarray(grad)}, state, params)
        results.append(np.asarray(updates["w"]))
    return np.array(results)


def assert_equal(tx, expected, grads=None):
    """Within 1e-12 of the largest number of each step."""
    found = outputs(tx, gradients() if grads is None else grads)
    expected = np.asarray(expected)
    assert found.dtype == expected.dtype == np.float64
    size = np.abs(expected).max(axis=(1, 2), keepdims=True)
    assert np.all(np.abs(found - expected) <= 1e-12 * size)


def value(x, t):
    return float(x(t)) if callable(x) else x


def plain(decays, weights, gradient_weight=0.0, debias=False):
    """The definition: each EMA and, where its bias is corrected, the EMA of ones."""
    debias = [debias] * len(decays) if isinstance(debias, bool) else debias
    emas, ones, results = [0.0] * len(decays), [0.0] * len(decays), []
    for t, c in enumerate(gradients()):
        total = value(gradient_weight, t) * c
        for k, (decay, weight) in enumerate(zip(decays, weights, strict=True)):
            b = value(decay, t)
            emas[k] = b * emas[k] + (1 - b) * c
            ones[k] = b * ones[k] + (1 - b)
            total = total + value(weight, t) * emas[k] / (ones[k] if debias[k] else 1)
        results.append(total)
    return results


SHORT = {"switch_step": 7, "end_step": 40}
KERNELS = {
    "constants": {"decays": (0.85, 0.98), "weights": (0.4, 0.5), "gradient_weight": 0.1},
    "schedules": {
        "decays": (0.9, lambda t: 1 - 1 / (t + 2.0)),
        "weights": (lambda t: 0.01 * t, 0.3),
        "gradient_weight": lambda t: 1 / (t + 1.0),
    },
    "corrected": {"decays": (0.9, 0.99), "weights": (2.0, -1.0), "debias": True},
    "two_ema": kernel_preset("two_ema", **SHORT),
    "six_ema": kernel_preset("six_ema", **SHORT),
    "eight_ema": kernel_preset("eight_ema", **SHORT),
    "ademamix": kernel_preset("ademamix", end_step=30),
}


@pytest.mark.parametrize("name", KERNELS)
def test_it_is_the_plain_form(x64, name):
    assert_equal(momentum_kernel(**KERNELS[name]), plain(**KERNELS[name]))


def heavy_ball(decay=0.9):
    m, results = 0.0, []
    for c in gradients():
        m = decay * m + c
        results.append((1 - decay) * m)
    return results


def nesterov(decay=0.9):
    return [decay * m + (1 - decay) * c for m, c in zip(heavy_ball(), gradients(), strict=True)]


def approximate_mars(decay=0.9, gamma=0.025):
    last, m, results = 0.0, 0.0, []
    for g in gradients():
        c = g + gamma * decay / (1 - decay) * (g - last)
        m, last = decay * m + (1 - decay) * c, g
        results.append(m)
    return results


def quasi_hyperbolic(decay=0.9, nu=0.7):
    return [(1 - nu) * c + nu * m for m, c in zip(heavy_ball(), gradients(), strict=True)]


def two_emas_of_the_record(switch=7):
    """One EMA up to and including the switch, copied into both buffers after it."""
    fast, slow, results = 0.0, 0.0, []
    for t, c in enumerate(gradients()):
        if t <= switch:
            fast = slow = mix = 0.95 * fast + 0.05 * c
        else:
            fast, slow = 0.85 * fast + 0.15 * c, 0.98 * slow + 0.02 * c
            mix = 0.4385 * fast + 0.5615 * slow
        results.append(0.05 * c + 0.95 * mix)
    return results


MEMBERS = {
    "heavy ball": ({"decays": (0.9,), "weights": (1.0,)}, heavy_ball),
    "nesterov": ({"decays": (0.9,), "weights": (0.9,), "gradient_weight": 0.1}, nesterov),
    "mars": ({"decays": (0.9,), "weights": (0.975,), "gradient_weight": 0.025}, approximate_mars),
    "quasi-hyperbolic": (
        {"decays": (0.9,), "weights": (0.7,), "gradient_weight": 1 - 0.7},
        quasi_hyperbolic,
    ),
    "two emas": (KERNELS["two_ema"], two_emas_of_the_record),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_its_members_are_what_they_are_called(x64, name):
    options, form = MEMBERS[name]
    assert_equal(momentum_kernel(**options), form())


@pytest.mark.parametrize(
    ("name", "number", "first", "last", "least"),
    [
        ("six_ema", 6, 50, 22, [0.021003991507788214, 0.06301197452336468]),
        ("eight_ema", 8, 58, 26, [0.005093975, 0.032261839]),
    ],
)
def test_many_emas_have_ages_and_weights_of_the_records(x64, name, number, first, last, least):
    kernel = kernel_preset(name, switch_step=100, end_step=200)
    decays = np.array([float(decay(101)) for decay in kernel["decays"]])
    ages = decays / (1 - decays)
    np.testing.assert_allclose(ages, np.geomspace(3, 64, number), rtol=1e-9)
    assert {float(decay(100)) for decay in kernel["decays"]} == {0.95}

    def mean_age(step):
        weights = np.array([float(weight(step)) for weight in kernel["weights"]])
        np.testing.assert_allclose(weights.sum() + kernel["gradient_weight"], 1, rtol=1e-9)
        return weights @ ages / weights.sum()

    found = [mean_age(step) for step in (0, 100, 150, 200, 900)]
    np.testing.assert_allclose(found, [first, first, (first + last) / 2, last, last], rtol=1e-9)
    for step, weight in zip((100, 200), least, strict=True):  # as the records' programs write them
        weights = [float(w(step)) / 0.95 for w in kernel["weights"]]
        digits = number * 5e-10  # nine are printed of the eight's
        np.testing.assert_allclose(weights[:-1], weight * np.arange(1, number), 0, digits)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ({"decays": (0.9,), "weights": (1.0,), "debias": True}, optax.scale_by_adam(0.9, 0.999)),
        (
            kernel_preset("ademamix", end_step=1, decays=(0.9, 0.999), weights=(1.0, 5.0)),
            optax.contrib.scale_by_ademamix(0.9, 0.999, 0.999, 5.0),
        ),
        (
            kernel_preset("ademamix", end_step=30),
            optax.contrib.scale_by_ademamix(
                0.9,
                0.999,
                kernel_preset("ademamix", end_step=30)["decays"][1],
                kernel_preset("ademamix", end_step=30)["weights"][1],
            ),
        ),
    ],
    ids=["adam", "ademamix", "ademamix warming up"],
)
def test_under_adam_it_is_the_numerator_alone(x64, kernel, expected):
    tx = scale_by_adam_of(momentum_kernel(**kernel))
    assert_equal(tx, outputs(expected, gradients()))


def ademamix_of_the_paper(alpha=8.0, b1=0.9, b2=0.999, b3=0.9999, eps=1e-8, warmup=30):
    """Algorithm 1 of arXiv 2409.03137."""
    fast = slow = square = 0.0
    results = []
    for t, grad in enumerate(gradients(), start=1):
        done = min(t / warmup, 1)
        slopes = np.log(b1), np.log(b3)
        now = np.exp(slopes[0] * slopes[1] / ((1 - done) * slopes[1] + done * slopes[0]))
        fast = b1 * fast + (1 - b1) * grad
        slow = now * slow + (1 - now) * grad
        square = b2 * square + (1 - b2) * grad**2
        mixed = fast / (1 - b1**t) + alpha * done * slow
        results.append(mixed / (np.sqrt(square / (1 - b2**t)) + eps))
    return results


def test_ademamix_is_the_papers(x64):
    kernel = momentum_kernel(**kernel_preset("ademamix", end_step=30))
    assert_equal(scale_by_adam_of(kernel), ademamix_of_the_paper())


# --- inside optimizers ---------------------------------------------------------------------------

EXACT = {"ns_dtype": "float64"}
EMA = momentum_kernel((0.9,), (1.0,))
EMA_OF_ADAM = momentum_kernel((0.9,), (1.0,), debias=True)
NESTEROV = momentum_kernel((0.9,), (0.9,), 0.1)


@pytest.mark.parametrize(
    ("make", "options", "kernel"),
    [
        (muon, {"momentum": 0.9, **EXACT}, NESTEROV),
        (mars, {"variant": "m", "b1": 0.9, **EXACT}, EMA),
        (mars, {"variant": "lion", "b1": 0.9}, EMA),
        (mars, {"b1": 0.9}, EMA_OF_ADAM),
        (mars, {"b1": 0.9, "amsgrad": True}, EMA_OF_ADAM),
        (soap, {"b1": 0.9, "precondition_frequency": 3}, EMA_OF_ADAM),
    ],
    ids=["muon", "mars m", "mars lion", "mars adamw", "mars amsgrad", "soap"],
)
def test_an_optimizer_with_its_own_ema_as_a_kernel_is_itself(x64, make, options, kernel):
    # Bases and signs of what is zero depend on rounding.
    grads = np.random.default_rng(0).standard_normal((STEPS, 4, 3))
    found = outputs(make(0.1, momentum_kernel=kernel, **options), grads)
    np.testing.assert_allclose(found, outputs(make(0.1, **options), grads), rtol=0, atol=1e-10)
    assert found[1:].any()


def test_muon_orthogonalises_the_kernel(x64):
    kernel = momentum_kernel(**KERNELS["constants"])
    orthogonal = scale_by_orthogonalization(eps=1e-7 * 0.05, dtype="float64")
    chain = optax.chain(kernel, orthogonal, optax.scale_by_learning_rate(0.1))
    tx = muon(0.1, momentum_kernel=kernel, ns_dtype="float64")
    assert_equal(tx, outputs(chain, gradients()))


def test_mars_corrects_and_clips_before_the_kernel(x64):
    kernel = momentum_kernel(**KERNELS["two_ema"], debias=True)
    adam = scale_by_adam_of(kernel, b2=0.99)
    rate = optax.scale_by_learning_rate(0.1)
    chain = optax.chain(correct_gradient(), clip_by_matrix_norm(), adam, rate)
    assert_equal(mars(0.1, momentum_kernel=kernel), outputs(chain, gradients()))


def test_layers_in_one_array_are_as_layers_apart(x64):
    kernel = momentum_kernel(**KERNELS["eight_ema"])
    spec = MatrixSpec(batch=(0,), rows=(1,), cols=(2,))
    grads = np.stack([gradients() * scale for scale in (1e-4, 1.0, 1e4)], axis=1)
    stacked = {"w": jnp.zeros((3, 4, 3))}
    apart = {str(i): jnp.zeros((4, 3)) for i in range(3)}
    one = muon(0.1, momentum_kernel=kernel, matrix_specs=spec, ns_dtype="float64")
    many = muon(0.1, momentum_kernel=kernel, ns_dtype="float64")
    states, updates = (
        (one.init(stacked), many.init(apart)),
        (jax.jit(one.update), jax.jit(many.update)),
    )
    for grad in grads:
        together, first = updates[0]({"w": jnp.asarray(grad)}, states[0], stacked)
        separate, second = updates[1](
            {str(i): jnp.asarray(grad[i]) for i in range(3)}, states[1], apart
        )
        states = first, second
        for i in range(3):
            np.testing.assert_allclose(together["w"][i], separate[str(i)], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: momentum_kernel((0.9, 0.99), (1.0,)), ("weights=(1.0,)", "(0.9, 0.99)")),
        (lambda: momentum_kernel((), ()), ("decays=()",)),
        (lambda: momentum_kernel((0.9, 1.0), (0.5, 0.5)), ("decays=1.0",)),
        (lambda: momentum_kernel((0.9,), (1.0,), debias=(True, False)), ("decays=(0.9,)",)),
        (lambda: kernel_preset("three_ema"), ("'three_ema'", "'two_ema'")),
        (lambda: kernel_preset("ademamix"), ("end_step",)),
        (
            lambda: mars(
                0.1, variant="m", clip_threshold=None, memory_efficient=True, momentum_kernel=EMA
            ),
            ("momentum_kernel",),
        ),
    ],
)
def test_wrong_arguments_are_named(make, words):
    with refused(ValueError, *words):
        make()
