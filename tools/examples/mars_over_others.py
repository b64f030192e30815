"""MARS over four optimizers beside the same four without it, for `maxmars compare`.

    maxmars compare tools/examples/mars_over_others.py --steps 256 --workdir runs/mars_over \\
      --optimizers nadam,mars_nadam,ademamix,mars_ademamix,adopt,mars_adopt,soap,mars_soap

It is the tiny comparison's model on the sources of Python.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import optax
import optax.contrib

from maxmars.config import OptaxConfig, TrainConfig, load_config
from maxmars.optim import mars_over, scale_by_soap

Optimizer = Literal[
    "nadam",
    "mars_nadam",
    "ademamix",
    "mars_ademamix",
    "adopt",
    "mars_adopt",
    "soap",
    "mars_soap",
]
RATES = {"nadam": 4e-3, "ademamix": 2e-3, "adopt": 4e-3, "soap": 8e-3}
B1 = 0.95


def make(
    learning_rate: optax.ScalarOrSchedule,
    *,
    matrix_specs: Any,
    mesh: jax.sharding.Mesh | None,
    inner: str,
    gamma: float | None,
) -> optax.GradientTransformation:
    """`inner`, and a decay of 0.01 of the linear layers; under MARS unless gamma is None."""
    directions = {
        "nadam": lambda: optax.scale_by_adam(B1, 0.99, nesterov=True),
        "ademamix": lambda: optax.contrib.scale_by_ademamix(B1, 0.99, b3=0.99, alpha=2.0),
        "adopt": lambda: optax.contrib.scale_by_adopt(B1, 0.99, eps=1e-6),
        "soap": lambda: scale_by_soap(b1=B1, matrix_specs=matrix_specs, mesh=mesh),
    }
    decays = jax.tree.map(lambda spec: spec.is_matrix and not spec.embedding, matrix_specs)
    optimizer = optax.chain(
        directions[inner](),
        optax.add_decayed_weights(0.01, decays),
        optax.scale_by_learning_rate(learning_rate),
    )
    if gamma is None:
        return optimizer
    return mars_over(optimizer, b1=B1, gamma=gamma, matrix_specs=matrix_specs)


def get_config(optimizer: Optimizer = "mars_nadam") -> TrainConfig:
    """The tiny comparison's run under one of them."""
    inner = optimizer.removeprefix("mars_")
    options = {"inner": inner, "gamma": 0.025 if optimizer != inner else None}
    return dataclasses.replace(
        load_config("compare_tiny"),
        name=f"over-{optimizer}",
        optimizer=OptaxConfig(
            make="mars_over_others.py:make", options=options, learning_rate=RATES[inner]
        ),
    )
