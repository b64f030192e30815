"""Hyperball, floor, cautious and coupled decay in NumPy, and the matrices that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from refusals import refused
from trees import random_tree, take_steps

from maxmars.optim import (
    MatrixSpec,
    WeightUpdate,
    check_no_zero_matrix,
    descend,
    mars,
    muon,
    soap,
)

STEPS, DECAY = 50, 0.1
SPECS = {
    "stack": MatrixSpec(batch=(0,), rows=(1,), cols=(2,)),
    "table": MatrixSpec(rows=(0,), cols=(1,), embedding=True),
    "bias": MatrixSpec(rows=(), cols=(0,)),
}
SHAPES = {"stack": (3, 8, 16), "table": (8, 16), "bias": (8,)}


def draw(seed):
    """Layers of very different scale, an output without gradients, and an input of one without."""
    arrays = random_tree(seed, SHAPES, dtype="float64")
    arrays["stack"] *= np.array([1e-4, 1, 1e4])[:, None, None]
    return arrays


def gradients(step):
    grads = draw(1 + step)
    grads["stack"][:, :, 3] = 0
    grads["stack"][:, 1, 2] = 0
    return jax.tree.map(lambda g: g * (step > 0), grads)


def fraction(step):
    return 1 - step / (2 * STEPS)


def rate(count):
    return 0.01 * fraction(jnp.asarray(count, float))


def with_floor(p, u, rate, decay):
    norms = [max(np.linalg.norm(x), 1e-8) for x in (p, u)]
    return reference.cautious(p, u * max(1, 0.9 * norms[0] / norms[1]), rate, decay)


def coupled(p, u, rate, decay):
    return reference.decayed(p, u, rate, decay * rate / 0.01)


CHANGES = {
    "hyperball": (WeightUpdate(hyperball=True), reference.on_sphere),
    "floor and cautious": (WeightUpdate(floor=0.9, cautious_decay=True), with_floor),
    "cautious": (WeightUpdate(cautious_decay=True), reference.cautious),
    "coupled": (
        WeightUpdate(coupled_decay=lambda count: fraction(jnp.asarray(count, float))),
        coupled,
    ),
}


@pytest.mark.parametrize("kinds", [("matrix",), ("matrix", "embedding", "vector")])
@pytest.mark.parametrize("name", CHANGES)
def test_it_is_the_rule_in_numpy_for_each_matrix_of_a_stack(x64, name, kinds):
    weight_update, rule = CHANGES[name]
    weight_update = WeightUpdate(**vars(weight_update) | {"kinds": kinds})
    tx = optax.chain(
        optax.scale_by_adam(0.9, 0.95),
        descend(rate, DECAY, weight_update=weight_update, matrix_specs=SPECS),
    )
    params, grads = draw(0), [gradients(step) for step in range(STEPS)]
    found = take_steps(tx, params, grads).params[-1]
    for name, kind in (("stack", "matrix"), ("table", "embedding"), ("bias", "vector")):
        directions = [*reference.adam([g[name] for g in grads], 0.9, 0.95)]
        used = rule if kind in kinds else reference.decayed
        for part in range(len(params[name])) if name == "stack" else [...]:
            own = (u[part] for u in directions)
            *_, expected = reference.descend(params[name][part], own, rate, DECAY, used)
            np.testing.assert_allclose(found[name][part], expected, rtol=1e-12)


OPTIMIZERS = {
    "muon": (muon, {"ns_dtype": "float64"}),
    "mars": (mars, {"optimize_vectors": True}),
    "mars m": (mars, {"variant": "m", "ns_dtype": "float64"}),
    # Rounding decides about equal eigenvalues, and about signs.
    "soap": (soap, {"eps": 1e-2, "max_precondition_dim": 8}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_hyperball_every_optimizer_keeps_the_norms_and_moves(x64, name):
    make, options = OPTIMIZERS[name]
    changes = {"weight_decay": 0.1, "weight_update": WeightUpdate(hyperball=True)}
    tx = make(0.03, matrix_specs=SPECS, **changes, **options)
    before = draw(0)
    after = take_steps(tx, before, [gradients(step) for step in range(1, 5)]).params[-1]
    for old, new in zip(before["stack"], after["stack"], strict=True):
        np.testing.assert_allclose(np.linalg.norm(new), np.linalg.norm(old), rtol=1e-14)
        assert np.linalg.norm(new - old) > 0.03 * np.linalg.norm(old)


def test_a_matrix_of_zeros_is_refused_by_name():
    hyperball = WeightUpdate(hyperball=True)
    params = {"h": {"kernel": jnp.ones((3, 4, 2)).at[1].set(0)}, "bias": jnp.zeros(3)}
    specs = {"h": {"kernel": MatrixSpec(batch=(0,), rows=(1,), cols=(2,))}, "bias": None}
    tx = muon(0.1, weight_update=hyperball, matrix_specs=specs)
    for refuse in (
        lambda: tx.init(params),
        lambda: check_no_zero_matrix(params, hyperball, specs),
        lambda: descend(0.1, weight_update=hyperball, matrix_specs=specs).init(params),
    ):
        with refused(ValueError, "h.kernel", "1"):
            refuse()
    jax.jit(tx.init)(params)  # which sees no values
    check_no_zero_matrix(params, WeightUpdate(floor=0.35), specs)
    muon(0.1, weight_update=WeightUpdate(floor=0.35), matrix_specs=specs).init(params)
