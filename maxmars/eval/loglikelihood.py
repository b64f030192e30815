"""Log-likelihoods of the continuations of a context, which is computed once for all of them.

A row holds a context, followed by all its continuations. Each continuation has the positions that
follow the context, and a mask (`LanguageModule.continuations`) hides the other continuations from
it, so its score is that of a separate row. Logits are computed only where a token is scored, in
chunks of a few positions; the loop over chunks ends at the last chunk that a batch needs.

Rows are sorted by length, longest first, and a batch is padded to the next of the lengths 32, 48,
64, 80, 96, 112, 144, 176, 208, ... (multiples of 16, about 15 % apart). One program is compiled for
each length that occurs, about ten for HellaSwag. The length decides how many rows a batch has; the
last batch is filled up with empty rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float64, Int, Int32, Integer

from maxmars.config import ModelConfig
from maxmars.data.tokenizer import Tokenizer
from maxmars.distributed import sharding
from maxmars.distributed.sharding import constrain
from maxmars.model import cross_entropy
from maxmars.model.language_model import make_model
from maxmars.model.parameters import abstract_module


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A context and the continuations to compare, as token ids."""

    context: Integer[np.ndarray, " context"]
    """At least one token; cut on the left where it does not fit into the model's context together
    with a continuation."""
    continuations: Sequence[Integer[np.ndarray, " _"]]
    """At least one token each."""


def encode_context(
    text: str, tokenizer: Tokenizer, start: int | None = None
) -> Integer[np.ndarray, " context"]:
    """Token ids of a text. An empty text is the token `start`, by default the end of a document."""
    start = tokenizer.eot if start is None else start
    return tokenizer.encode(text) if text else np.array([start])


def encode_choices(
    context: str, continuations: Sequence[str], tokenizer: Tokenizer, start: int | None = None
) -> Choices:
    """Encode a context together with each continuation, as lm-evaluation-harness does.

    If the context alone has n tokens, the continuation has all tokens of both texts from token n
    on. White space at the end of the context goes to the continuations.
    """
    stripped = context.rstrip()
    num_context = len(tokenizer.encode(stripped))
    wholes = [tokenizer.encode(context + continuation) for continuation in continuations]
    return Choices(
        context=encode_context(stripped, tokenizer, start),
        continuations=[whole[num_context:] for whole in wholes],
    )


class _Row(NamedTuple):
    """A context and one or more continuations in one row of the model's input.

    T input tokens; S of them predict a token (a target) of a continuation.
    """

    tokens: Int32[np.ndarray, " T"]
    positions: Int32[np.ndarray, " T"]
    continuation_ids: Int32[np.ndarray, " T"]
    predictors: Int32[np.ndarray, " S"]
    """For each target, the position in the row of the token that predicts it."""
    targets: Int32[np.ndarray, " S"]
    owners: Int32[np.ndarray, " S"]
    """For each target, the number of its continuation, counted over all choices."""

    @property
    def size(self) -> int:
        return max(len(self.tokens), len(self.targets))


_EMPTY = _Row(*[np.zeros(0, np.int32)] * 6)


@dataclass(frozen=True, kw_only=True)
class PackedChoices:
    """Choices packed into rows; see `pack_choices`."""

    rows: list[_Row]
    """Longest first."""
    first_equal: Int[np.ndarray, " continuations"]
    """For each continuation, the number of the first continuation of the same context that has the
    same tokens."""
    counts: list[int]
    """Number of continuations, by context."""


def _shares_contexts(config: ModelConfig) -> bool:
    return hasattr(abstract_module(config), "continuations")


def pack_choices(choices: Sequence[Choices], config: ModelConfig) -> PackedChoices:
    """Pack choices into rows for a model.

    The continuations of a context share a row where they fit and the module has the method
    `continuations`. Equal continuations are scored once, so that they tie on every device.

    Raises:
      ValueError: a context is empty, or a continuation is empty or longer than `max_seq_len`.
    """
    max_seq_len, shares_rows = config.max_seq_len, _shares_contexts(config)
    rows: list[_Row] = []
    first_equal: list[int] = []
    for number, item in enumerate(choices):
        number_of: dict[tuple[int, ...], int] = {}
        for continuation in item.continuations:
            key = tuple(continuation.tolist())
            if not 0 < len(key) <= max_seq_len or not len(item.context):
                raise ValueError(
                    f"item {number} has a context of {len(item.context)} tokens and a continuation "
                    f"of {len(key)}; the first needs one token at least, the second between 1 and "
                    f"model.max_seq_len={max_seq_len}."
                )
            first_equal.append(number_of.setdefault(key, len(first_equal)))
        longest = max(map(len, number_of), default=0)
        fits = len(item.context) + longest <= max_seq_len + 1  # the last token predicts nothing
        if fits and shares_rows:
            rows.append(_row(item.context, number_of))
        else:  # a row for each continuation, which may cut the context differently
            for key, owner in number_of.items():
                rows.append(_row(item.context[-(max_seq_len + 1 - len(key)) :], {key: owner}))
    return PackedChoices(
        rows=sorted(rows, key=lambda row: (row.size, len(row.targets)), reverse=True),
        first_equal=np.array(first_equal, np.int64),
        counts=[len(item.continuations) for item in choices],
    )


def _row(context: np.ndarray, continuations: Mapping[tuple[int, ...], int]) -> _Row:
    """Row of a context and its continuations, which map to their numbers over all choices."""
    # The context c0 c1 c2 with the continuations "a0 a1" and "b0 b1 b2":
    #
    #   tokens             c0 c1 c2 | a0 | b0 b1     the last token of each predicts nothing
    #   positions           0  1  2 |  3 |  3  4     as if each came right after the context
    #   continuation_ids    0  0  0 |  1 |  2  2     attention sees its own and those of 0
    #
    #   predictors          2  3 |  2  4  5          the positions that predict them: c2, at 2, the
    #   targets            a0 a1 | b0 b1 b2          first of both
    end = len(context)
    tokens, positions, continuation_ids = [context], [np.arange(end)], [np.zeros(end)]
    predictors, targets, owners = [], [], []
    start = end
    for number, (continuation, owner) in enumerate(continuations.items(), 1):
        inputs = len(continuation) - 1
        tokens.append(np.array(continuation[:-1]))
        positions.append(end + np.arange(inputs))
        continuation_ids.append(np.full(inputs, number))
        predictors += [[end - 1], start + np.arange(inputs)]
        targets.append(np.array(continuation))
        owners.append(np.full(inputs + 1, owner))
        start += inputs
    lists = (tokens, positions, continuation_ids, predictors, targets, owners)
    return _Row(*(np.concatenate(arrays).astype(np.int32) for arrays in lists))


@dataclass(frozen=True, kw_only=True)
class ScoredChoices:
    """The scores of choices: for each context, an array with one value a continuation."""

    log_likelihoods: list[Float64[np.ndarray, " _"]]
    """Log-likelihood given the context, in nats."""
    is_greedy: list[Bool[np.ndarray, " _"]]
    """Whether each token of the continuation is the likeliest one."""


class LogLikelihoods:
    """Scores packed choices under a model.

    Args:
      config: the model.
      mesh: the mesh of the parameters; rows are split over its `data` and `fsdp` axes.
      batch_size: rows scored at once, over all devices; None takes as many as suit the device. Up
        to rounding, the scores do not depend on it.

    Raises:
      ValueError: `batch_size` is less than 1.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, *, batch_size: int | None = None) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        self._mesh = mesh
        self._shards = sharding.batch_shards(mesh)
        self._config, self._batch_size = config, batch_size
        # On each device. A CPU is fastest while activations and logits stay in its caches.
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self._batch_tokens, self._chunk_positions = (2048, 128) if on_cpu else (16384, 2048)
        self._score_batch = self._make_score_batch(config)

    def __call__(
        self,
        params: Any,
        packed: PackedChoices,
        progress: Callable[[int, int], None] | None = None,
    ) -> ScoredChoices:
        """Score all continuations; every process calls with the same choices and gets all scores.

        Args:
          params: the parameters, in the mesh's shardings.
          packed: the choices.
          progress: called after each batch with the number of rows scored so far, and of all.
        """
        sums = np.zeros(len(packed.first_equal))
        is_greedy = np.ones(len(packed.first_equal), bool)
        num_done, running = 0, None

        def collect(shards: list[list[_Row]], scores: tuple[jax.Array, jax.Array]) -> None:
            nonlocal num_done
            for shard, nats, greedy in zip(shards, *jax.device_get(scores), strict=True):
                owners = np.concatenate([row.owners for row in shard])
                np.subtract.at(sums, owners, nats[: len(owners)].astype(np.float64))
                np.logical_and.at(is_greedy, owners, greedy[: len(owners)])
                num_done += sum(row is not _EMPTY for row in shard)
            if progress is not None:
                progress(num_done, len(packed.rows))

        for shards, length in self._batches(packed.rows):
            # The loop over chunks ends at the last target of the device that has most.
            num_targets = max(sum(len(row.targets) for row in shard) for shard in shards)
            num_chunks = np.int32(-(-num_targets // self._chunk_size(len(shards[0]) * length)))
            arrays = self._on_devices(shards, length)
            # One at a time: collectives of several programs that run at once on the fake devices of
            # a CPU can wait for each other forever. The next batch is packed meanwhile.
            if running is not None:
                collect(*running)
            with jax.set_mesh(self._mesh):
                running = shards, self._score_batch(params, arrays, num_chunks)
        if running is not None:
            collect(*running)
        ends = np.cumsum(packed.counts)[:-1]
        return ScoredChoices(
            log_likelihoods=np.split(sums[packed.first_equal], ends),
            is_greedy=np.split(is_greedy[packed.first_equal], ends),
        )

    def _batches(self, rows: list[_Row]) -> Iterator[tuple[list[list[_Row]], int]]:
        """Split rows into batches: equally many rows for each shard, and their padded length."""
        first = 0
        while first < len(rows):
            length = padded_length(rows[first].size)
            if not _shares_contexts(self._config):  # no row is longer than the context
                length = min(length, self._config.max_seq_len)
            count = self._batch_size or max(1, self._batch_tokens // length) * self._shards
            shard_rows = -(-min(count, len(rows)) // self._shards)
            # Halved for the last rows: few programs and few empty rows.
            while shard_rows > 1 and -(-shard_rows // 2) * self._shards >= len(rows) - first:
                shard_rows = -(-shard_rows // 2)
            batch = rows[first : first + shard_rows * self._shards]
            shards = [batch[i :: self._shards] for i in range(self._shards)]  # equal work
            yield [[*shard, *[_EMPTY] * (shard_rows - len(shard))] for shard in shards], length
            first += len(batch)

    def _on_devices(self, shards: list[list[_Row]], length: int) -> tuple[jax.Array, ...]:
        """Arrays of a batch over the mesh, made from the rows of this process's devices.

        The first five fields of the rows: int32 [1, rows, length], and [1, shards, S] for
        predictors and targets. Predictors count from the beginning of a shard.
        """
        shard_rows = len(shards[0])
        chunk = self._chunk_size(shard_rows * length)
        width = -(-shard_rows * length // chunk) * chunk
        local_shards = [shards[i] for i in sharding.local_rows(self._mesh, (1, self._shards))[0]]
        local_rows = [row for shard in local_shards for row in shard]
        columns = list(zip(*local_rows, strict=True))[:3]
        inputs = [(_stack(column, length), shard_rows * self._shards) for column in columns]
        predictors = [
            np.concatenate([i * length + row.predictors for i, row in enumerate(shard)])
            for shard in local_shards
        ]
        targets = [np.concatenate([row.targets for row in shard]) for shard in local_shards]
        outputs = [(_stack(arrays, width), self._shards) for arrays in (predictors, targets)]
        return tuple(
            sharding.to_device(self._mesh, array[None], rows) for array, rows in inputs + outputs
        )

    def _chunk_size(self, num_tokens: int) -> int:
        """Number of positions in a shard of `num_tokens` whose logits are computed at once."""
        return min(self._chunk_positions, num_tokens)

    def _make_score_batch(self, config: ModelConfig) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Make the jitted function of (params, batch, chunks) that gives the loss of each target,
        in nats, and whether the target is the likeliest token."""

        def score_batch(
            params: Any, batch: tuple[jax.Array, ...], num_chunks: Int[Array, ""]
        ) -> tuple[Float[Array, "N S"], Bool[Array, "N S"]]:
            model = make_model(config, params)
            tokens, positions, continuation_ids, predictors, targets = (array[0] for array in batch)
            if _shares_contexts(config):
                hidden = model.continuations(tokens, positions, continuation_ids)
            else:  # a row holds one continuation; see `pack_choices`
                hidden = model.hidden(tokens, positions=positions)
            hidden = hidden.reshape(self._shards, -1, hidden.shape[-1])
            hidden = constrain(hidden, "batch", None, None)
            # Gathered over `fsdp` once here: in the loop below, every chunk would gather it.
            embedding = model.output_embedding(hidden.dtype)
            size = self._chunk_size(hidden.shape[1])

            def score_chunk(i: Int[Array, ""], scores: tuple[Any, ...]) -> tuple[Any, ...]:
                def in_chunk(x: jax.Array) -> jax.Array:
                    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=1)

                x = jnp.take_along_axis(hidden, in_chunk(predictors)[..., None], axis=1)
                logits = cross_entropy.logits(x, embedding, config.vocab_size, model.cap_logits)
                losses = cross_entropy.cross_entropy(logits, in_chunk(targets))
                # An argmax would take a CPU ten times as long.
                picked = jnp.take_along_axis(logits, in_chunk(targets)[..., None], axis=-1)
                new = losses, picked[..., 0] >= logits.max(-1)
                return jax.tree.map(
                    lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * size, axis=1),
                    scores,
                    new,
                )

            nats = jnp.zeros(targets.shape, jnp.promote_types(hidden.dtype, jnp.float32))
            initial = (nats, jnp.zeros(targets.shape, bool))
            return jax.lax.fori_loop(0, num_chunks, score_chunk, initial)

        return jax.jit(
            score_batch,
            in_shardings=(
                None,  # as the parameters lie
                sharding.batch_sharding(self._mesh),
                sharding.replicated(self._mesh),
            ),
            out_shardings=sharding.replicated(self._mesh),
        )


def _stack(arrays: Sequence[np.ndarray], width: int) -> Int32[np.ndarray, "rows width"]:
    stacked = np.zeros((len(arrays), width), np.int32)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked


def padded_length(size: int) -> int:
    """The next length that programs are compiled for; the top of the file lists them."""
    length = 32
    while length < size:
        length = -(-length * 23 // 320) * 16
    return length
