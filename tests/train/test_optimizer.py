"""Kinds, matrices, rules and parts of parameters; the optimizer and schedule of a config."""

import dataclasses
import inspect

import docstring_parser
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import refused
from tiny import ADAMW, MODEL, parameters_of, random_params, tiny_config
from trees import assert_close, take_steps

from maxmars.config import (
    AdamWConfig,
    LionConfig,
    MarsConfig,
    MomentumKernelConfig,
    MuonConfig,
    NAdamWConfig,
    ScheduleConfig,
    SoapConfig,
    WeightUpdateConfig,
)
from maxmars.model import GPT2
from maxmars.model.parameters import Parameters
from maxmars.optim import (
    MatrixSpec,
    kernel_preset,
    mars,
    momentum_kernel,
    muon,
    scale_by_adam_of,
    soap,
)
from maxmars.optim.nnx import matrix_specs_of
from maxmars.train.optimizer import (
    COMPONENTS,
    learning_rate_scales,
    make_optimizer,
    make_schedule,
    update_rules,
)
from maxmars.train.step import init_train_state

ADEMAMIX = MomentumKernelConfig(preset="ademamix", end_step=4)
TWO_EMAS = MomentumKernelConfig(preset="two_ema", switch_step=2)


def test_specs_of_stacked_parameters():
    block = Parameters(MODEL).specs["h"]
    assert block["attn"]["c_attn"]["kernel"] == MatrixSpec(batch=(0,), rows=(1,), cols=(2, 3, 4))
    assert block["attn"]["c_proj"]["kernel"] == MatrixSpec(batch=(0,), rows=(1, 2), cols=(3,))
    assert block["attn"]["c_attn"]["bias"] == MatrixSpec(batch=(0,), rows=(), cols=(1, 2, 3))
    assert block["ln_1"]["scale"] == MatrixSpec(batch=(0,), rows=(), cols=(1,))


def test_layers_tell_any_optimizer_what_their_parameters_are():
    model = GPT2(MODEL, rngs=nnx.Rngs(0))
    assert nnx.to_pure_dict(matrix_specs_of(model)) == Parameters(MODEL).specs


@pytest.mark.parametrize(
    ("function", "config"), [(mars, MarsConfig), (muon, MuonConfig), (soap, SoapConfig)]
)
def test_a_docstring_says_where_the_config_has_another_default(function, config):
    words = {p.arg_name: p.description for p in docstring_parser.parse(function.__doc__).params}
    for name, parameter in inspect.signature(function).parameters.items():
        default = getattr(config, name, parameter.default)
        if default != parameter.default and name not in ("learning_rate", "weight_update"):
            assert f"{default:g}" in words[name].replace(",", ""), name


def first_step(optimizer, params, grads):
    """Parameters after one step at a rate of 0.1."""
    tx = make_optimizer(optimizer, Parameters(MODEL), jnp.float32(0.1))
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


@pytest.mark.parametrize(
    "optimizer",
    [
        NAdamWConfig(),
        AdamWConfig(momentum_kernel=ADEMAMIX),
        SoapConfig(momentum_kernel=TWO_EMAS, weight_decay=0.0),
        MuonConfig(momentum_kernel=TWO_EMAS, weight_decay=0.1),
        MarsConfig(optimize_vectors=True),
        MarsConfig(variant="lion", decay_embeddings=True),
        MarsConfig(variant="m", decay_embeddings=True),
        MarsConfig(variant="shampoo", embeddings="orthogonalize"),
        MuonConfig(weight_decay=0.1, decay_embeddings=True, embeddings="orthogonalize"),
        MuonConfig(weight_decay=0.1, vector_weight_decay=0.2),
        LionConfig(),
        AdamWConfig(weight_update=WeightUpdateConfig(hyperball=True)),
        NAdamWConfig(weight_update=WeightUpdateConfig(floor=0.35)),
        LionConfig(weight_update=WeightUpdateConfig(cautious_decay=True)),
        MuonConfig(weight_decay=0.1, weight_update=WeightUpdateConfig(hyperball=True)),
        MarsConfig(weight_update=WeightUpdateConfig(hyperball=True, kinds=("matrix", "embedding"))),
    ],
)
def test_rules_say_what_the_optimizer_does(optimizer):
    # With zero gradients a step is the decay alone: p <- p (1 - rate * scale * decay).
    params = jax.tree.map(lambda x: x + 1, random_params(MODEL))
    after = jax.jit(first_step, static_argnums=0)(
        optimizer, params, jax.tree.map(np.zeros_like, params)
    )

    def check(before, after, rule):
        factor = 1 - 0.1 * rule.learning_rate_scale * rule.weight_decay
        np.testing.assert_allclose(after, before * factor, rtol=1e-6)

    jax.tree.map(check, params, after, update_rules(optimizer, Parameters(MODEL)))


@pytest.mark.parametrize(
    "optimizer",
    [
        AdamWConfig(),
        AdamWConfig(momentum_kernel=ADEMAMIX),
        SoapConfig(weight_decay=0.1),
        MuonConfig(),
    ],
)
def test_a_coupled_decay_follows_the_schedule(optimizer):
    decays = dataclasses.replace(
        optimizer,
        weight_decay=0.1,
        weight_update=WeightUpdateConfig(coupled_decay=True),
    )
    params = jax.tree.map(lambda x: x + 1, random_params(MODEL))
    grads = jax.tree.map(np.zeros_like, params)

    @jax.jit
    def step(rate_fraction):
        tx = make_optimizer(
            decays, Parameters(MODEL), 0.1 * rate_fraction, rate_fraction=rate_fraction
        )
        state = tx.update(grads, tx.init(params), params)[1]  # SOAP's first step is none
        return tx.update(grads, state, params)[0]

    updates = step(jnp.float32(0.3))
    kernel = ("h", "attn", "c_attn", "kernel")
    for name in kernel:
        updates, params = updates[name], params[name]
    np.testing.assert_allclose(updates, -0.1 * 0.3 * 0.1 * 0.3 * params, rtol=1e-5)


def test_a_run_refuses_to_start_from_a_matrix_that_hyperball_never_moves():
    hyperball = WeightUpdateConfig(hyperball=True)
    config = tiny_config(optimizer=AdamWConfig(weight_update=hyperball))
    parameters = parameters_of(config)
    params = jax.tree.map(jnp.asarray, random_params(MODEL))
    init_train_state(config, parameters, {"params": params})
    params["h"]["mlp"]["c_fc"]["kernel"] = params["h"]["mlp"]["c_fc"]["kernel"].at[2].set(0)
    with refused(ValueError, "h.mlp.c_fc.kernel", "2"):
        init_train_state(config, parameters, {"params": params})


THREE_EMAS = MomentumKernelConfig(decays=(0.8, 0.9, 0.99), weights=(0.2, 0.3, 0.4))


@pytest.mark.parametrize(
    ("optimizer", "matrix", "vector"),
    [
        (AdamWConfig(momentum_kernel=ADEMAMIX), "adamw ademamix", "adamw ademamix"),
        (MuonConfig(momentum_kernel=TWO_EMAS), "muon two_ema", "adamw"),
        (SoapConfig(momentum_kernel=THREE_EMAS), "soap 3 EMAs", "adamw"),
        (MarsConfig(variant="m", row_normalization=0.95), "mars-m rows", "adamw"),
        (
            MarsConfig(variant="m", optimize_vectors=True, momentum_kernel=TWO_EMAS),
            "mars-m two_ema",
            "mars-adamw",
        ),
        (
            MuonConfig(
                row_normalization=0.95,
                momentum_kernel=THREE_EMAS,
                weight_update=WeightUpdateConfig(hyperball=True),
            ),
            "normuon 3 EMAs hyperball",
            "adamw",
        ),
    ],
)
def test_rules_name_all_that_makes_the_update(optimizer, matrix, vector):
    assert [optimizer.rule_of(kind).name for kind in ("matrix", "vector")] == [matrix, vector]


def test_rules_say_the_rates():
    # Adam's first step has the size of the rate, wherever the gradient is not tiny.
    zeros, ones = (
        jax.tree.map(like, random_params(MODEL)) for like in (np.zeros_like, np.ones_like)
    )
    optimizer = MarsConfig(weight_decay=0.0, vector_weight_decay=0.0, clip_threshold=None)
    updates = jax.jit(first_step, static_argnums=0)(optimizer, zeros, ones)
    rules = update_rules(optimizer, Parameters(MODEL))
    jax.tree.map(
        lambda u, rule: np.testing.assert_allclose(u, -0.1 * rule.learning_rate_scale, rtol=1e-5),
        updates,
        rules,
    )
    assert rules["ln_f"]["scale"].learning_rate_scale == 0.5


def test_ademamix_of_a_config_is_that_of_the_package():
    """`tests/optim/test_momentum_kernel.py` compares that one with the paper's."""
    options = {"end_step": 4, "decays": (0.9, 0.99), "weights": (1.0, 5.0)}
    kernel = MomentumKernelConfig(preset="ademamix", **options)
    config = AdamWConfig(momentum_kernel=kernel, b2=0.999, weight_decay=0.0)
    direction = scale_by_adam_of(momentum_kernel(**kernel_preset("ademamix", **options)), b2=0.999)
    params, *grads = (random_params(MODEL, seed) for seed in range(7))
    ours = make_optimizer(config, Parameters(MODEL), jnp.float32(0.1))
    plain = optax.chain(direction, optax.scale_by_learning_rate(0.1))
    pairs = (take_steps(tx, params, grads).params for tx in (ours, plain))
    assert_close(*pairs, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"decay": "cosine"}, [0, 0.5, 1, 0.55, 0.1, 0.1]),
        ({"decay": "linear"}, [0, 0.5, 1, 0.55, 0.1, 0.1]),
        (
            {"decay": "exponential"},
            [0, 0.5, 1, 0.1 + 0.9 * 0.9**50, 0.1 + 0.9 * 0.9**100, 0.1],
        ),
        (
            {"decay": "wsd", "wsd_decay_fraction": 0.5},
            [0, 0.5, 1, 0.1 + 0.9 * 50 / 55, 0.1, 0.1],
        ),
        ({"decay": "wsd", "final_fraction": 0.0}, [0, 0.5, 1, 1, 0, 0]),
    ],
    ids=["cosine", "linear", "exponential", "wsd half", "wsd fifth"],
)
def test_schedules(options, expected):
    config = tiny_config(num_steps=110, schedule=ScheduleConfig(warmup_steps=10, **options))
    schedule = make_schedule(config)
    shape = [float(schedule(step)) for step in (0, 5, 10, 60, 110, 1000)]
    np.testing.assert_allclose(shape, expected, atol=1e-6)
    given = ScheduleConfig(warmup_steps=0, decay_steps=110, **options)
    schedule = make_schedule(tiny_config(num_steps=200, schedule=given))
    assert float(schedule(0)) == 1
    assert float(schedule(110)) == pytest.approx(options.get("final_fraction", 0.1), abs=1e-4)


def test_a_warmup_may_last_to_the_end():
    config = tiny_config(num_steps=10, schedule=ScheduleConfig(warmup_steps=10))
    assert float(make_schedule(config)(10)) == pytest.approx(1.0)


def test_parts_and_rates_follow_from_the_axes():
    parts = Parameters(MODEL).components
    assert set(jax.tree.leaves(parts)) == set(COMPONENTS)
    assert parts["h"]["attn"]["c_proj"] == {"kernel": "attention", "bias": "vector"}
    assert parts["h"]["mlp"]["c_fc"]["kernel"] == "mlp"
    assert parts["ln_f"]["scale"] == "vector"
    assert learning_rate_scales(ADAMW, Parameters(MODEL)) == {}
    mars = MarsConfig(variant="shampoo", vector_learning_rate_scale=0.25)
    assert learning_rate_scales(mars, Parameters(MODEL)) == {"embedding": 0.25, "vector": 0.25}
