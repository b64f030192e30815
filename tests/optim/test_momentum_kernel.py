"""Momentum kernels against plain forms in NumPy, 50 steps in float64, and inside optimizers."""

import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import reference
from refusals import refused
from trees import take_steps

from maxmars.optim import (
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
    return np.array(take_steps(tx, jnp.zeros(grads.shape[1:]), grads).updates)


def assert_equal(tx, expected):
    """Within 1e-12 of the largest number of each step."""
    found, expected = outputs(tx, gradients()), np.asarray(expected)
    assert found.dtype == expected.dtype == np.float64
    size = np.abs(expected).max(axis=(1, 2), keepdims=True)
    assert np.all(np.abs(found - expected) <= 1e-12 * size)


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
    assert_equal(
        momentum_kernel(**KERNELS[name]), [*reference.kernel(gradients(), **KERNELS[name])]
    )


def ema(gradients):
    return np.array([0.1 * m for m in reference.heavy_ball(gradients, 0.9)])


def approximate_mars(gradients):
    last = np.concatenate([np.zeros_like(gradients[:1]), gradients[:-1]])
    return ema(reference.correct(gradients, last, 0.9, 0.025))


def two_emas_of_the_record(gradients, switch=7):
    """One EMA up to and including the switch, copied into both buffers after it."""
    fast, slow, results = 0.0, 0.0, []
    for t, c in enumerate(gradients):
        if t <= switch:
            fast = slow = mix = 0.95 * fast + 0.05 * c
        else:
            fast, slow = 0.85 * fast + 0.15 * c, 0.98 * slow + 0.02 * c
            mix = 0.4385 * fast + 0.5615 * slow
        results.append(0.05 * c + 0.95 * mix)
    return results


MEMBERS = {  # weights of one EMA of decay 0.9 and of the gradient
    "heavy ball": ((1.0, 0.0), ema),
    "nesterov": ((0.9, 0.1), lambda grads: [0.1 * m for m in reference.nesterov(grads, 0.9)]),
    "mars": ((0.975, 0.025), approximate_mars),
    "quasi-hyperbolic": ((0.7, 1 - 0.7), lambda grads: (1 - 0.7) * grads + 0.7 * ema(grads)),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_its_members_are_what_they_are_called(x64, name):
    (weight, gradient_weight), form = MEMBERS[name]
    assert_equal(momentum_kernel((0.9,), (weight,), gradient_weight), form(gradients()))


def test_two_emas_are_those_of_the_record(x64):
    tx = momentum_kernel(**KERNELS["two_ema"])
    assert_equal(tx, two_emas_of_the_record(gradients()))


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


def test_ademamix_is_the_papers(x64):
    kernel = momentum_kernel(**kernel_preset("ademamix", end_step=30))
    assert_equal(scale_by_adam_of(kernel), [*reference.ademamix(gradients(), warmup=30)])


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
