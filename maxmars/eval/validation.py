"""Validation loss of parameters over a fixed stream of windows, in nats a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

from maxmars.config import ModelConfig
from maxmars.distributed import sharding
from maxmars.model.language_model import make_model, token_losses


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """The result of `validation_loss`."""

    loss: float
    """Nats a token."""
    num_tokens: int
    """Number of tokens scored; where a mask weights them, the sum of the weights, rounded."""


def make_eval_step(config: ModelConfig, mesh: Mesh) -> Any:
    """The jitted evaluation of one batch on a mesh, for use under `jax.set_mesh`.

    It takes the parameters, in the mesh's shardings, and `tokens`, int32 [1, rows, T + 1], with
    `mask` of the same shape: bool, whether a token counts as a target, or float32, the weight of
    its loss. It returns the sum of nats over the targets, each times its mask, and that of the
    mask.
    """

    def step(
        params: Any, batch: dict[str, Shaped[Array, "1 rows window"]]
    ) -> tuple[Float[Array, ""], Shaped[Array, ""]]:
        rows = {name: array[0] for name, array in batch.items()}
        targets = rows.pop("mask")[:, 1:]
        losses = token_losses(make_model(config, params), **rows)
        # The count of a bool mask is exact, also above 2**24.
        total = targets.sum(dtype=jnp.int32 if targets.dtype == jnp.bool else jnp.float32)
        return (losses * targets.astype(losses.dtype)).sum(), total

    return jax.jit(
        step,
        in_shardings=(None, sharding.batch_sharding(mesh)),  # None: as the parameters lie
        out_shardings=sharding.replicated(mesh),
    )


def sees_later_tokens(
    eval_step: Any, mesh: Mesh, params: Any, batch: Mapping[str, jax.Array]
) -> bool:
    """Whether losses in the first half of a batch's first row change with the tokens of the second.

    Other rows stay, as a model may join rows: experts of limited capacity take the first tokens of
    a batch. The losses come from one program; where nothing is seen they differ at most by the
    order of sums, which GPUs need not keep.
    """

    def halves(batch: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], ...]:
        tokens = batch["tokens"]
        is_row = (jnp.arange(tokens.shape[1]) == 0)[:, None]
        is_half = jnp.arange(tokens.shape[2]) < tokens.shape[2] // 2
        one = {**batch, "mask": batch["mask"] * (is_row & is_half)}
        changed = jnp.where(is_row & ~is_half, tokens[..., ::-1], tokens)
        return one, {**one, "tokens": changed}

    with jax.set_mesh(mesh):
        pair = jax.jit(halves, out_shardings=sharding.batch_sharding(mesh))(batch)
        one, other = (float(jax.device_get(eval_step(params, half)[0])) for half in pair)
    return abs(one - other) > 1e-6 * abs(one)


def validation_loss(
    eval_step: Any,
    mesh: Mesh,
    params: Any,
    batches: Iterable[Mapping[str, jax.Array]],
    before_batch: Callable[[], None] = lambda: None,
) -> ValidationLoss:
    """Mean loss over the targets of all batches, weighted by the mask.

    For the arguments see `make_eval_step`; `before_batch` is called before each batch, and may end
    the evaluation by an exception.

    Raises:
      ValueError: the mask counts no target.
    """
    nats = weight = 0.0
    for batch in batches:
        before_batch()
        with jax.set_mesh(mesh):
            # Fetched one by one: nothing else would order the steps, and collectives of several
            # programs that run at once on the fake devices of a CPU can wait for each other
            # forever.
            batch_nats, batch_weight = jax.device_get(eval_step(params, batch))
        nats, weight = nats + float(batch_nats), weight + float(batch_weight)
    if not weight:
        raise ValueError(
            "the mask counts none of the validation windows' targets, so that there is no loss; "
            "let it count some, or raise eval.num_windows."
        )
    return ValidationLoss(loss=nats / weight, num_tokens=round(weight))
