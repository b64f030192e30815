import numpy as np
import pytest

from maxmars.optim import warmup_cosine


def test_warmup_then_cosine():
    schedule = warmup_cosine(10, 110, 0.1)
    values = [float(schedule(step)) for step in (0, 5, 10, 60, 110, 1000)]
    np.testing.assert_allclose(values, [0, 0.5, 1, 0.55, 0.1, 0.1], atol=1e-6)


def test_no_warmup_starts_at_the_peak():
    assert float(warmup_cosine(0, 10, 0.0)(0)) == 1


def test_warmup_up_to_the_end():
    assert float(warmup_cosine(10, 10, 0.5)(10)) == pytest.approx(1.0)
