"""Validation loss of parameters over a fixed stream of windows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int

from maxmars import sharding
from maxmars.config import GPT2Config
from maxmars.model import graph_and_abstract_params, logical_axes, token_losses


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """Result of `validation_loss`."""

    loss: float
    """Nats a token."""
    num_tokens: int
    """Tokens scored."""


@dataclass(frozen=True)
class EvalStep:
    """The jitted evaluation of one batch on its mesh."""

    mesh: Mesh
    jitted: Any
    """`jax.jit` function of (params, tokens, mask)."""

    def __call__(
        self, params: Any, tokens: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Score a batch.

        Args:
          params: the parameters, in the mesh's shardings.
          tokens: int32 [1, rows, T + 1].
          mask: float32 [1, rows], 1 for the rows that count.

        Returns:
          The sum of nats over the rows that count, and how many tokens these are.
        """
        with jax.set_mesh(self.mesh):
            return self.jitted(params, tokens, mask)

    def lower(self, abstract_params: Any, rows: int, window: int) -> jax.stages.Lowered:
        """The step lowered ahead of time for `rows` sequences of `window` tokens (T + 1)."""
        tokens = jax.ShapeDtypeStruct((1, rows, window), jnp.int32)
        mask = jax.ShapeDtypeStruct((1, rows), jnp.float32)
        with jax.set_mesh(self.mesh):
            return self.jitted.lower(abstract_params, tokens, mask)


def make_eval_step(config: GPT2Config, mesh: Mesh) -> EvalStep:
    """The evaluation step of a model on a mesh."""
    graph, _ = graph_and_abstract_params(config)

    def step(
        params: Any, tokens: Int[Array, "1 rows window"], mask: Float32[Array, "1 rows"]
    ) -> tuple[Float[Array, ""], Int[Array, ""]]:
        losses = token_losses(nnx.merge(graph, params), tokens[0])
        rows = mask[0].astype(losses.dtype)
        num_tokens = mask[0].astype(jnp.int32).sum() * losses.shape[1]
        return (losses * rows[:, None]).sum(), num_tokens

    jitted = jax.jit(
        step,
        in_shardings=(
            sharding.tree_shardings(mesh, logical_axes(config)),
            sharding.batch_sharding(mesh),
            jax.sharding.NamedSharding(mesh, sharding.RULES.spec(None, "batch")),
        ),
        out_shardings=sharding.replicated(mesh),
    )
    return EvalStep(mesh, jitted)


def validation_loss(
    eval_step: EvalStep, params: Any, batches: Iterable[tuple[jax.Array, jax.Array]]
) -> ValidationLoss:
    """Mean over all tokens of all batches: sum of nats over number of tokens.

    Args:
      eval_step: see `make_eval_step`.
      params: the parameters, in the mesh's shardings.
      batches: pairs (tokens, mask).
    """
    nats, num_tokens = 0.0, 0
    for tokens, mask in batches:
        # Fetched one by one: nothing else would order the steps, and collectives of several
        # programs that run at once on the fake devices of a CPU can wait for each other forever.
        batch_nats, batch_tokens = jax.device_get(eval_step(params, tokens, mask))
        nats, num_tokens = nats + float(batch_nats), num_tokens + int(batch_tokens)
    return ValidationLoss(loss=nats / num_tokens, num_tokens=num_tokens)
