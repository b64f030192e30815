"""NorMuon: Newton-Schulz with rows of even size, in NumPy."""

import functools

import jax
import numpy as np
import pytest
import reference
from trees import random_tree, take_steps

from maxmars.optim import MatrixSpec, RowNormalizationState, mars, muon

MOMENTUM, B2, STEPS = 0.95, 0.95, 50
SPECS = {
    "c_attn": MatrixSpec(batch=(0,), rows=(1,), cols=(2, 3, 4), split=(2,)),
    "mlp": MatrixSpec(batch=(0,), rows=(1,), cols=(2,)),
    "square": MatrixSpec(rows=(0,), cols=(1,)),
    "bias": MatrixSpec(rows=(), cols=(0,)),
}
SHAPES = {"c_attn": (2, 8, 3, 2, 4), "mlp": (3, 16, 6), "square": (8, 8), "bias": (8,)}


def draw(seed):
    """Layers of very different scale."""
    arrays = random_tree(seed, SHAPES, dtype="float64")
    arrays["c_attn"] *= np.array([1e-4, 1e4])[:, None, None, None, None]
    return arrays


def gradients(step):
    """Zeros first; an output row that never has a gradient, and one coordinate without."""
    grads = draw(1 + step)
    grads["mlp"][:, :, 2] = 0
    grads["square"][3, 5] = 0
    return jax.tree.map(lambda g: g * (step > 0), grads)


def blocks(x):
    """The matrices of each leaf, [count, in, out]."""
    return {
        "c_attn": np.moveaxis(x["c_attn"], 2, 1).reshape(6, 8, 8),
        "mlp": x["mlp"],
        "square": x["square"][None],
    }


def ema(gradients, decay):
    return ((1 - decay) * m for m in reference.heavy_ball(gradients, decay))


plain_mars = functools.partial(mars, b1=MOMENTUM, gamma=0.0, clip_threshold=None)


@pytest.mark.parametrize(
    ("make", "momentum", "scale"),
    [
        (muon, reference.nesterov, "spectral"),
        (
            functools.partial(plain_mars, variant="shampoo", ns_eps=1e-7),
            reference.heavy_ball,
            "spectral",
        ),
        (functools.partial(plain_mars, variant="m"), ema, "rms"),
    ],
    ids=["muon", "mars shampoo", "mars m"],
)
def test_it_is_the_papers_in_numpy(x64, make, momentum, scale):
    options = {"weight_decay": 0.1, "vector_learning_rate_scale": 0.5, "ns_dtype": "float64"}
    tx = make(0.02, matrix_specs=SPECS, row_normalization=B2, **options)
    grads = [gradients(step) for step in range(STEPS)]
    after = take_steps(tx, draw(0), grads)
    matrices = [blocks(g) for g in grads]
    for name, starts in blocks(draw(0)).items():
        for i, start in enumerate(starts):
            momenta = momentum([g[name][i] for g in matrices], MOMENTUM)
            directions = reference.even_rows(reference.spectral(momenta, scale), B2)
            *_, expected = reference.descend(start, directions, 0.02, 0.1)
            found = blocks(after.params[-1])[name][i]
            # The scale multiplies numbers beside which there is an eps of 1e-10, here earlier.
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10, err_msg=name)
    states = jax.tree.leaves(after.state, is_leaf=lambda x: isinstance(x, RowNormalizationState))
    (own,) = [x for x in states if isinstance(x, RowNormalizationState)]
    np.testing.assert_array_equal(own.row_moment["mlp"] > 0, [[[1, 1, 0, 1, 1, 1]]] * 3)
