import numpy as np
import pytest

from maxmars.hellaswag import compare


def answers(both, first, second, neither):
    """Answers of two models that agree and differ on so many questions."""
    counts = (both, first, second, neither)
    return (
        np.repeat([True, True, False, False], counts),
        np.repeat([True, False, True, False], counts),
    )


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (6, 0, 2 / 64),
        (1, 9, 2 * 11 / 1024),  # by hand: 1 + 10 of 1024 sequences are so uneven, on each side
        (4, 6, 2 * 386 / 1024),
    ],
)
def test_mcnemar_is_exact(only_first, only_second, p):
    first, second = answers(30, only_first, only_second, 20)
    found = compare(first, second)
    assert found.mcnemar_p == pytest.approx(p)
    assert (found.only_first, found.only_second) == (only_first, only_second)
    assert found.difference == pytest.approx((only_first - only_second) / len(first))


def test_the_interval_is_that_of_resampled_questions():
    first, second = answers(300, 80, 50, 170)
    found = compare(first, second)
    difference = first.astype(float) - second
    rng = np.random.default_rng(1)
    means = [rng.choice(difference, 600).mean() for _ in range(4000)]
    np.testing.assert_allclose(found.interval_95, np.quantile(means, [0.025, 0.975]), atol=0.004)
    assert found.interval_95[0] > 0
    assert found.mcnemar_p < 0.05


def test_a_large_difference_underflows_to_no_error():
    assert 0 <= compare(*answers(0, 6000, 4042, 0)).mcnemar_p < 1e-80


def test_questions_must_be_the_same():
    with pytest.raises(ValueError, match="3 and 2 questions"):
        compare(np.ones(3, bool), np.ones(2, bool))
