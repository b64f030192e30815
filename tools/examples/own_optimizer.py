"""Optimizers of your own for `maxmars train`, and a config that trains with one of them.

    maxmars train tools/examples/own_optimizer.py
    maxmars train tools/examples/own_optimizer.py --optimizer.options.b1 0.9

The state lies on the mesh as the parameters do; checkpoints, plans and comparisons work as they do
for the package's own optimizers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from maxmars.config import OptaxConfig, TrainConfig, load_config
from maxmars.optim import mars_over


def mars_nadam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    matrix_specs: Any,
    mesh: jax.sharding.Mesh | None,
    b1: float = 0.95,
    gamma: float = 0.025,
    weight_decay: float = 0.01,
) -> optax.GradientTransformation:
    """MARS over NAdam, with decay on matrices alone."""
    del mesh  # nothing here needs whole matrices
    decays = jax.tree.map(lambda spec: spec.is_matrix and not spec.embedding, matrix_specs)
    inner = optax.nadamw(learning_rate, b1=b1, weight_decay=weight_decay, mask=decays)
    return mars_over(inner, b1=b1, gamma=gamma, matrix_specs=matrix_specs)


def get_config() -> TrainConfig:
    """The quickstart's run under `mars_nadam`."""
    optimizer = OptaxConfig(
        make="own_optimizer.py:mars_nadam", options={"b1": 0.95}, learning_rate=3e-3
    )
    return dataclasses.replace(load_config("quickstart"), name="own-optimizer", optimizer=optimizer)
