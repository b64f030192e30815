"""Momentum kernels against plain forms in NumPy, 50 steps in float64, and inside optimizers."""

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from trees import take_steps

from maxmars.optim import (
    kernel_preset,
    mars,
    momentum_kernel,
    muon,
    scale_by_adam_of,
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


KERNELS = {
    "constants": {"decays": (0.85, 0.98), "weights": (0.4, 0.5), "gradient_weight": 0.1},
    "schedules": {
        "decays": (0.9, lambda t: 1 - 1 / (t + 2.0)),
        "weights": (lambda t: 0.01 * t, 0.3),
        "gradient_weight": lambda t: 1 / (t + 1.0),
    },
    "corrected": {"decays": (0.9, 0.99), "weights": (2.0, -1.0), "debias": True},
}


@pytest.mark.parametrize("name", KERNELS)
def test_it_is_the_plain_form(x64, name):
    assert_equal(
        momentum_kernel(**KERNELS[name]), [*reference.kernel(gradients(), **KERNELS[name])]
    )


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


def test_two_emas_are_those_of_the_record(x64):
    tx = momentum_kernel(**kernel_preset("two_ema", switch_step=7, end_step=40))
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
