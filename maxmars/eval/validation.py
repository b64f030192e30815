"""Validation loss of parameters over a fixed stream of windows, in nats a token and bits a byte.

One jitted step evaluates a batch, in `train` and `maxmars eval`, and `plan` compiles it. The step
returns sums, and the host adds them up, so a batch with fewer targets weighs less.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int32, Shaped

from maxmars.config import ModelConfig
from maxmars.config.errors import EXTERNAL_ERRORS, in_words
from maxmars.data.batches import UNKNOWN_TOKENIZER
from maxmars.data.tokenizer import GPT2Tokenizer, Vocabulary, tokenizer_of_tokens
from maxmars.distributed import processes, sharding
from maxmars.model.language_model import make_model, token_losses


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """The result of `validation_loss`."""

    loss: float
    """Nats a token."""
    num_tokens: int
    """Number of tokens scored; where a mask weights them, the sum of the weights, rounded."""
    bits_per_byte: float | None
    """Bits that the model needs for a byte of the text, which compares models of different
    tokenizers: the nats of the targets that stand for bytes, over ln 2 times these bytes. Special
    tokens are in neither sum, and a mask weights both. None where the bytes are not known."""

    def __str__(self) -> str:
        """The loss for people: `3.2911 nats a token, 1.0762 bits a byte`."""
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits a byte"
        return f"{self.loss:.4f} nats a token{bits}"


def make_eval_step(
    config: ModelConfig, mesh: Mesh, token_bytes: Int32[np.ndarray, " ids"] | None = None
) -> Any:
    """Make the jitted evaluation of one batch, for calls under `jax.set_mesh`.

    Its arguments are the parameters, in the mesh's shardings, and a batch: `tokens`, int32
    [1, rows, T + 1], and `mask` of the same shape (bool: whether a token counts as a target;
    float32: the weight of its loss). The results are sums over the targets, each multiplied by its
    mask: `nats`, `weight` (the mask itself) and, with `token_bytes` (see
    `Tokenizer.bytes_of_tokens`), `bytes` and `text_nats`, the nats of targets that stand for bytes.
    """

    def step(
        params: Any, batch: dict[str, Shaped[Array, "1 rows window"]]
    ) -> dict[str, Shaped[Array, ""]]:
        rows = {name: array[0] for name, array in batch.items()}
        mask, targets = rows.pop("mask")[:, 1:], rows["tokens"][:, 1:]
        losses = token_losses(make_model(config, params), **rows)
        # Without the barrier XLA computes the losses once more for their second sum, `text_nats`.
        nats = jax.lax.optimization_barrier(losses * mask.astype(losses.dtype))
        # The count of a bool mask is exact, also above 2**24.
        count_type = jnp.int32 if mask.dtype == jnp.bool else jnp.float32
        sums = {"nats": nats.sum(), "weight": mask.sum(dtype=count_type)}
        if token_bytes is not None:
            # Ids beyond the tokenizer's, which pad a vocabulary, stand for no bytes.
            num_bytes = jnp.asarray(token_bytes).at[targets].get(mode="fill", fill_value=0)
            sums["text_nats"] = jnp.where(num_bytes > 0, nats, 0).sum()
            sums["bytes"] = (num_bytes * mask).sum(dtype=count_type)
        return sums

    return jax.jit(
        step,
        in_shardings=(None, sharding.batch_sharding(mesh)),  # None: as the parameters lie
        out_shardings=sharding.replicated(mesh),
    )


def bytes_of_data(
    vocabulary: Vocabulary, log: Callable[[str], None]
) -> Int32[np.ndarray, " ids"] | None:
    """Bytes that each token id of data stands for; every process calls, and gets the same.

    None where the tokenizer is unknown or cannot be opened (its library is not installed, or a
    vocabulary is missing): `log` then gets the reason. Process 0 alone opens it.
    """
    table, name = None, vocabulary.tokenizer
    if processes.is_primary() and name != UNKNOWN_TOKENIZER:
        try:
            # A start does not wait for a network, which may take minutes to give no answer.
            has_files = vocabulary.digest is not None or name != GPT2Tokenizer.name
            if not has_files and not os.environ.get("TIKTOKEN_CACHE_DIR"):
                raise ValueError(
                    "other programs' tokens bring no vocabulary; set TIKTOKEN_CACHE_DIR to a "
                    "directory with GPT-2's, which tiktoken fills"
                )
            table = tokenizer_of_tokens(vocabulary).bytes_of_tokens().tolist()
        except EXTERNAL_ERRORS as error:
            log(f"no bits per byte: {in_words(error)}")
    table = processes.from_primary(table)
    return None if table is None else np.array(table, np.int32)


def sees_later_tokens(
    eval_step: Any, mesh: Mesh, params: Any, batch: Mapping[str, jax.Array]
) -> bool:
    """Whether losses in the first half of a batch's first row depend on the row's second half.

    The tokens of the second half are changed. All other rows stay as they are, since a model may
    join rows: experts of limited capacity take the first tokens of a batch.
    """

    def with_changed_half(batch: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], ...]:
        tokens = batch["tokens"]
        is_row = (jnp.arange(tokens.shape[1]) == 0)[:, None]
        is_half = jnp.arange(tokens.shape[2]) < tokens.shape[2] // 2
        masked = {**batch, "mask": batch["mask"] * (is_row & is_half)}
        changed = jnp.where(is_row & ~is_half, tokens[..., ::-1], tokens)
        return masked, {**masked, "tokens": changed}

    with jax.set_mesh(mesh):
        pair = jax.jit(with_changed_half, out_shardings=sharding.batch_sharding(mesh))(batch)
        nats, changed_nats = (float(jax.device_get(eval_step(params, b)["nats"])) for b in pair)
    # One program computes both, so without a leak only a GPU's order of sums may differ.
    return abs(nats - changed_nats) > 1e-6 * abs(nats)


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
    sums = defaultdict[str, float](float)
    for batch in batches:
        before_batch()
        with jax.set_mesh(mesh):
            # Fetched one by one: nothing else would order the steps, and collectives of several
            # programs that run at once on the fake devices of a CPU can wait for each other
            # forever.
            batch_sums = jax.device_get(eval_step(params, batch))
        for name, value in batch_sums.items():
            sums[name] += value.item()
    if not sums["weight"]:
        raise ValueError(
            "the mask counts none of the validation windows' targets, so that there is no loss; "
            "let it count some, or raise eval.num_windows."
        )
    return ValidationLoss(
        loss=sums["nats"] / sums["weight"],
        num_tokens=round(sums["weight"]),
        bits_per_byte=sums["text_nats"] / sums["bytes"] / math.log(2) if sums["bytes"] else None,
    )
