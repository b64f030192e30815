"""Between AdamW, NAdamW and MARS-AdamW: each part of MARS that they lack, one at a time.

    maxmars compare tools/examples/continuum.py --workdir runs/continuum --baseline nesterov-g2 \\
      --optimizers 0,0.025-c2,0.025-g2,nesterov-c2,nesterov-g2,0.1-c2,0.1-g2 \\
      --tune learning_rate,b1,b2 --budget 60 --confirm 3 --finalists 2 --seeds 5

All of them are, with kappa = gamma b1 / (1 - b1),

    c = g + kappa (g - last)           last: the gradient of the step before
    m = b1 m + (1 - b1) c
    v = b2 v + (1 - b2) c^2            or g^2
    p = p - rate (m / sqrt(v) + decay p)

where m and v are corrected for their start at zero. A choice names gamma and the gradient that v is
the square of: `0` is AdamW, `nesterov-g2` (gamma = 1 - b1) is NAdamW but for how it corrects m for
its start, and `0.025-c2-clip` MARS-AdamW, where each matrix of c is clipped to the norm 1. In
`-exact`, with v of c^2, last is the gradient of the same batch at the previous parameters, and
`1-exact` is STORM's estimate of the gradient (arXiv 1905.10018) inside Adam. The model and the text
are those of the tiny comparison.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxmars.config import MarsConfig, OptaxConfig, OptimizerConfig, TrainConfig, load_config
from maxmars.optim import clip_by_matrix_norm, correct_gradient

Optimizer = Literal[
    "0",
    "0.025-c2",
    "0.025-g2",
    "nesterov-c2",
    "nesterov-g2",
    "0.1-c2",
    "0.1-g2",
    "0-clip",
    "0.025-c2-clip",
    "nesterov-c2-clip",
    "0.025-exact",
    "0.1-exact",
    "1-exact",
]
B1, B2, DECAY = 0.9, 0.95, 0.01


class AdamState(NamedTuple):
    """State of `adam_on_corrected`; `mu` and `nu` are like the parameters."""

    count: jax.Array
    correction: Any
    mu: Any
    nu: Any


def adam_on_corrected(
    correction: optax.GradientTransformationExtraArgs, b1: float, b2: float, moment_of: str
) -> optax.GradientTransformation:
    """Adam's direction with m of the corrected gradient c, and v of c ("c2") or of g ("g2")."""

    def init(params: Any) -> AdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdamState(jnp.zeros([], jnp.int32), correction.init(params), zeros, zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AdamState]:
        corrected, kept = correction.update(updates, state.correction, params)
        squared = corrected if moment_of == "c2" else updates
        count = state.count + 1
        mu = jax.tree.map(lambda m, c: b1 * m + (1 - b1) * c, state.mu, corrected)
        nu = jax.tree.map(lambda v, x: b2 * v + (1 - b2) * x**2, state.nu, squared)

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            return m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + 1e-8)

        return jax.tree.map(direction, mu, nu), AdamState(count, kept, mu, nu)

    return optax.GradientTransformation(init, update)


def make(
    learning_rate: optax.ScalarOrSchedule,
    *,
    matrix_specs: Any,
    mesh: jax.sharding.Mesh | None,
    b1: float,
    b2: float,
    gamma: float | Literal["nesterov"],
    moment_of: str,
    clip: float | None,
    weight_decay: float,
) -> optax.GradientTransformation:
    """The optimizer of the module's text, on every parameter; linear layers decay."""
    del mesh  # nothing here needs whole matrices
    parts = [correct_gradient(b1, 1 - b1 if gamma == "nesterov" else gamma)]
    if clip is not None:
        parts.append(optax.with_extra_args_support(clip_by_matrix_norm(clip, matrix_specs)))
    decays = jax.tree.map(lambda spec: spec.is_matrix and not spec.embedding, matrix_specs)
    return optax.chain(
        adam_on_corrected(optax.chain(*parts), b1, b2, moment_of),
        optax.add_decayed_weights(weight_decay, decays),
        optax.scale_by_learning_rate(learning_rate),
    )


def get_optimizer(choice: Optimizer) -> OptimizerConfig:
    """The config of a choice."""
    gamma, *rest = choice.split("-")
    if "exact" in rest:  # of maxmars's optimizers only MARS itself gets two gradients a step
        return MarsConfig(
            learning_rate=4e-3,
            b1=B1,
            b2=B2,
            gamma=float(gamma),
            clip_threshold=None,
            exact=True,
            weight_decay=DECAY,
            optimize_vectors=True,
        )
    options = {
        "b1": B1,
        "b2": B2,
        "gamma": gamma if gamma == "nesterov" else float(gamma),
        "moment_of": "g2" if "g2" in rest else "c2",
        "clip": 1.0 if "clip" in rest else None,
        "weight_decay": DECAY,
    }
    return OptaxConfig(make="continuum.py:make", options=options, learning_rate=4e-3)


def get_config(optimizer: Optimizer = "0.025-c2") -> TrainConfig:
    """The tiny comparison's run under one of them."""
    return dataclasses.replace(
        load_config("compare_tiny"),
        name=f"continuum-{optimizer}",
        optimizer=get_optimizer(optimizer),
    )
