import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import reference
from running import run_python
from trees import assert_close, random_tree, take_steps

from maxmars.optim import (
    MatrixSpec,
    clip_by_matrix_norm,
    correct_gradient,
    mars,
    mars_over,
    muon,
    scale_by_mars,
)


@pytest.mark.smoke
def test_equations_with_schedules():
    """Of the rate and γ, under the exact correction and AMSGrad; test_official.py has the rest."""
    params = random_tree(0)
    grads = [random_tree(i, scale=0.3 * i) for i in range(1, 9)]
    prev = [random_tree(100 + i, scale=0.3 * i) for i in range(1, 9)]
    rates, gammas = 0.01 / np.arange(1, 9), 0.3 * np.arange(8) % 1
    tx = mars(
        lambda count: jnp.asarray(rates)[count],
        gamma=lambda count: jnp.asarray(gammas)[count],
        weight_decay=0.2,
        exact=True,
        amsgrad=True,
        vector_learning_rate_scale=0.5,
        vector_weight_decay=0.1,
    )
    ours = take_steps(tx, params, grads, extra={"prev_grads": prev}).params[-1]
    last = [jax.tree.map(np.zeros_like, params), *prev[1:]]

    def expected(param, *gs):
        gs, lasts = gs[: len(grads)], gs[len(grads) :]
        if param.ndim == 2:
            corrected = reference.correct(gs, lasts, 0.95, lambda t: gammas[t], clip=1.0)
            directions = reference.adam(corrected, 0.95, 0.99, amsgrad=True)
            *_, after = reference.descend(param, directions, lambda t: rates[t], 0.2)
        else:
            directions = reference.adam(gs, 0.9, 0.95, amsgrad=True)
            *_, after = reference.descend(param, directions, lambda t: rates[t] / 2, 0.1)
        return after

    in_float64 = jax.tree.map(np.float64, [params, *grads, *last])
    assert_close(ours, jax.tree.map(expected, *in_float64), 2e-6)


# --- identities and structure --------------------------------------------------------------------


def test_without_correction_and_clip_it_is_adamw_of_the_whole_tree():
    params, grads = random_tree(0), [random_tree(i) for i in range(1, 20)]
    mask = {"dense": {"kernel": True, "bias": True}, "embedding": False, "norm": False}
    options = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "mask": mask}
    ours = mars(0.01, gamma=0.0, clip_threshold=None, vector_b1=0.9, vector_b2=0.95, **options)
    adamw = optax.adamw(0.01, **options)
    assert_close(*(take_steps(tx, params, grads).params for tx in (ours, adamw)), 2e-6)


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
    for name in matrices:
        found, expected = (
            [after[name] for after in take_steps(tx, params, grads).params] for tx in (ours, theirs)
        )
        # Five iterations multiply float32's rounding by up to 3.4 each.
        assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("variant", ["lion", "shampoo", "m"])
def test_one_buffer_gives_what_two_give(x64, variant):
    params, *grads = (random_tree(i, dtype="float64") for i in range(20))
    options = {"variant": variant, "clip_threshold": None, "gamma": 0.3, "ns_dtype": "float64"}
    two, one = (mars(0.01, memory_efficient=one, **options) for one in (False, True))
    assert_close(*(take_steps(tx, params, grads).params for tx in (two, one)), 1e-12)


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
        tx = mars(0.1, matrix_specs=spec, **options)
        return take_steps(tx, table[0], table[1:]).params[-1]

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
    assert run_python("-c", code).stdout.split() == ["maxmars"]


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
    extra = {"prev_grads": grads[::-1]} if "exact" in options else None
    both = (optax.chain(direction, *rest), whole)
    assert_close(*(take_steps(tx, params, grads, extra=extra).params for tx in both))
    states = [type(state).__name__ for state in direction.init(params)]
    for name in states:
        assert name in scale_by_mars.__doc__


def test_exact_mars_over_several_batches_takes_the_mean_of_both_gradients():
    # The correction is linear: before MultiSteps, its mean is that of the mean gradients.
    grads = [random_tree(i) for i in range(1, 9)]
    prev = [*grads[:2], *(random_tree(100 + i) for i in range(6))]  # nothing precedes the first
    options = {"b1": 0.95, "gamma": 0.3, "exact": True, "first_step": "plain_gradient"}
    inner = optax.chain(clip_by_matrix_norm(), optax.adam(0.01, b1=0.95))
    several = optax.MultiSteps(inner, 2).gradient_transformation()
    ours = optax.chain(correct_gradient(**options), several)

    def means(trees):
        pairs = zip(trees[::2], trees[1::2], strict=True)
        return [jax.tree.map(lambda a, b: (a + b) / 2, *pair) for pair in pairs]

    whole = mars_over(optax.adam(0.01, b1=0.95), **options)
    extra = {"prev_grads": means(prev)}
    theirs = take_steps(whole, random_tree(0), means(grads), extra=extra).params
    ours = take_steps(ours, random_tree(0), grads, extra={"prev_grads": prev}).params
    assert_close(ours[1::2], theirs, 1e-6)
