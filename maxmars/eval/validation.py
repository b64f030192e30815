"""Validation loss of parameters over a fixed stream of windows, in nats a token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from maxmars.config import GPT2Config
from maxmars.distributed import sharding
from maxmars.model.gpt2 import graph_and_abstract_params, logical_axes, token_losses


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """The result of `validation_loss`."""

    loss: float
    """Nats a token."""
    num_tokens: int
    """Number of tokens scored."""


def make_eval_step(config: GPT2Config, mesh: Mesh) -> Any:
    """The jitted evaluation of one batch on a mesh, for use under `jax.set_mesh`.

    It takes the parameters, in the mesh's shardings, and `tokens`, int32 [1, rows, T + 1], with
    `mask`, bool of the same shape: whether a token counts as a target. It returns the sum of nats
    over the targets that count, and their number.
    """
    graph, _ = graph_and_abstract_params(config)

    def step(
        params: Any, batch: dict[str, Shaped[Array, "1 rows window"]]
    ) -> tuple[Float[Array, ""], Int[Array, ""]]:
        rows = {name: array[0] for name, array in batch.items()}
        targets = rows.pop("mask")[:, 1:]
        losses = token_losses(nnx.merge(graph, params), **rows)
        return (losses * targets.astype(losses.dtype)).sum(), targets.sum(dtype=jnp.int32)

    return jax.jit(
        step,
        in_shardings=(
            sharding.tree_shardings(mesh, logical_axes(config)),
            sharding.batch_sharding(mesh),
        ),
        out_shardings=sharding.replicated(mesh),
    )


def validation_loss(
    eval_step: Any, mesh: Mesh, params: Any, batches: Iterable[Mapping[str, jax.Array]]
) -> ValidationLoss:
    """Mean loss over the targets that count of all batches: sum of nats over their number.

    For the arguments see `make_eval_step`.
    """
    nats, num_tokens = 0.0, 0
    for batch in batches:
        with jax.set_mesh(mesh):
            # Fetched one by one: nothing else would order the steps, and collectives of several
            # programs that run at once on the fake devices of a CPU can wait for each other
            # forever.
            batch_nats, batch_tokens = jax.device_get(eval_step(params, batch))
        nats, num_tokens = nats + float(batch_nats), num_tokens + int(batch_tokens)
    return ValidationLoss(loss=nats / num_tokens, num_tokens=num_tokens)
