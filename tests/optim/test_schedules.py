import numpy as np
import pytest

from maxmars.optim import (
    warmup_cosine,
    warmup_exponential,
    warmup_linear,
    warmup_stable_decay,
)

STEPS = (0, 5, 10, 60, 110, 1000)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (warmup_cosine(10, 110, 0.1), [0, 0.5, 1, 0.55, 0.1, 0.1]),
        (warmup_linear(10, 110, 0.1), [0, 0.5, 1, 0.55, 0.1, 0.1]),
        (
            warmup_exponential(10, 110, 0.1),
            [0, 0.5, 1, 0.1 + 0.9 * 0.9**50, 0.1 + 0.9 * 0.9**100, 0.1],
        ),
        (warmup_stable_decay(10, 110, 0.1, 0.5), [0, 0.5, 1, 0.1 + 0.9 * 50 / 55, 0.1, 0.1]),
        (warmup_stable_decay(10, 110, 0.0, 0.2), [0, 0.5, 1, 1, 0, 0]),
    ],
    ids=["cosine", "linear", "exponential", "wsd half", "wsd fifth"],
)
def test_values(schedule, expected):
    np.testing.assert_allclose([float(schedule(s)) for s in STEPS], expected, atol=1e-6)


@pytest.mark.parametrize(
    "make", [warmup_cosine, warmup_linear, warmup_exponential], ids=lambda make: make.__name__
)
def test_no_warmup_starts_at_the_peak(make):
    assert float(make(0, 10, 0.0)(0)) == 1


def test_warmup_up_to_the_end():
    assert float(warmup_cosine(10, 10, 0.5)(10)) == pytest.approx(1.0)
