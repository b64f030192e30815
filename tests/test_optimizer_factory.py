import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import ADAMW, MODEL, tiny_config

from maxmars.config import ScheduleConfig
from maxmars.model import init_params
from maxmars.optim import MatrixSpec
from maxmars.optimizer_config import MarsConfig
from maxmars.optimizer_factory import (
    make_optimizer,
    make_schedule,
    matrix_specs,
    parameter_groups,
    parameter_kinds,
)


def test_kinds_follow_the_names_of_the_axes():
    kinds = parameter_kinds(MODEL)
    block = kinds["h"]
    assert block["attn"]["c_attn"] == {"kernel": "linear", "bias": "vector"}
    assert block["attn"]["c_proj"] == {"kernel": "linear", "bias": "vector"}
    assert block["mlp"]["c_fc"] == {"kernel": "linear", "bias": "vector"}
    assert block["ln_1"] == {"scale": "vector", "bias": "vector"}
    assert kinds["wte"] == kinds["wpe"] == {"embedding": "embedding"}


def test_specs_of_stacked_parameters():
    block = matrix_specs(MODEL)["h"]
    assert block["attn"]["c_attn"]["kernel"] == MatrixSpec(batch=(0,), rows=(1,), cols=(2, 3, 4))
    assert block["attn"]["c_proj"]["kernel"] == MatrixSpec(batch=(0,), rows=(1, 2), cols=(3,))
    assert block["attn"]["c_attn"]["bias"] == MatrixSpec(batch=(0,), rows=(), cols=(1, 2, 3))
    assert block["ln_1"]["scale"] == MatrixSpec(batch=(0,), rows=(), cols=(1,))


@pytest.mark.parametrize("optimizer", [ADAMW, MarsConfig(), MarsConfig(optimize_vectors=True)])
def test_groups_say_what_the_optimizer_does(optimizer):
    # With zero gradients a step is the decay alone: p <- p (1 - rate * scale * decay).
    params = jax.tree.map(lambda x: x + 1, init_params(MODEL, 0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = make_optimizer(optimizer, MODEL, jnp.float32(0.1))
    updates, _ = tx.update(zeros, tx.init(params), params)
    after = optax.apply_updates(params, updates)
    groups = parameter_groups(optimizer, MODEL)

    def check(before, after, group):
        factor = 1 - 0.1 * group.learning_rate_scale * group.weight_decay
        np.testing.assert_allclose(after, before * factor, rtol=1e-6)

    jax.tree.map(check, params, after, groups)


def test_groups_say_the_rates():
    # Adam's first step has the size of the rate, wherever the gradient is not tiny.
    params = init_params(MODEL, 0)
    ones = jax.tree.map(jnp.ones_like, params)
    optimizer = MarsConfig(weight_decay=0.0, vector_weight_decay=0.0, clip_threshold=None)
    tx = make_optimizer(optimizer, MODEL, 0.1)
    updates, _ = tx.update(ones, tx.init(params), params)
    groups = parameter_groups(optimizer, MODEL)
    jax.tree.map(
        lambda u, g: np.testing.assert_allclose(u, -0.1 * g.learning_rate_scale, rtol=1e-5),
        updates,
        groups,
    )
    assert groups["ln_f"]["scale"].learning_rate_scale == 0.5


def test_schedule_ends_at_decay_steps_or_num_steps():
    config = tiny_config(num_steps=100, schedule=ScheduleConfig(warmup_steps=10))
    assert float(make_schedule(config)(100)) == pytest.approx(0.1)
    schedule = dataclasses.replace(config.schedule, decay_steps=50)
    assert float(make_schedule(dataclasses.replace(config, schedule=schedule))(50)) == (
        pytest.approx(0.1)
    )
