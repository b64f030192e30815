import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmars.sampling import GREEDY, Sampling, choose

PROBABILITIES = np.array([0.05, 0.4, 0.02, 0.3, 0.13, 0.1])
LOGITS = np.log(PROBABILITIES).astype(np.float32) + 3
DRAWS = 4000


def frequencies(sampling):
    """How often each id is drawn by as many rows, each with its own key."""
    logits = jnp.tile(LOGITS, (DRAWS, 1))
    keys = jax.random.split(jax.random.key(0), DRAWS)
    drawn = jax.jit(lambda logits, keys: choose(logits, keys, sampling))(logits, keys)
    return np.bincount(drawn, minlength=len(PROBABILITIES)) / DRAWS


@pytest.mark.parametrize(
    ("sampling", "kept", "temperature"),
    [
        (Sampling(temperature=1.0, top_k=None), [0, 1, 2, 3, 4, 5], 1.0),
        (Sampling(temperature=0.5, top_k=None), [0, 1, 2, 3, 4, 5], 0.5),
        (Sampling(temperature=1.0, top_k=3), [1, 3, 4], 1.0),
        # The third of them reaches 0.75.
        (Sampling(temperature=1.0, top_k=None, top_p=0.75), [1, 3, 4], 1.0),
        # 0.4 / 0.7 of the two likeliest is 0.57, so that the likeliest alone has 0.5.
        (Sampling(temperature=1.0, top_k=2, top_p=0.5), [1], 1.0),
        # A higher temperature flattens the distribution before it is cut.
        (Sampling(temperature=4.0, top_k=None, top_p=0.75), [1, 3, 4, 5], 4.0),
        (Sampling(temperature=1e-6, top_k=None), [1], 1.0),
        (GREEDY, [1], 1.0),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_should_be(sampling, kept, temperature):
    expected = np.zeros(len(PROBABILITIES))
    expected[kept] = PROBABILITIES[kept] ** (1 / temperature)
    expected /= expected.sum()
    found = frequencies(sampling)
    assert set(np.flatnonzero(found)) == set(kept)
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / DRAWS**0.5)


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}],
    ids=str,
)
def test_values_out_of_range_are_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Sampling(**options)
