"""Log-likelihoods of the continuations of a context, which is computed once for all of them.

One row holds a context and, one after the other, its continuations. The positions of each follow
those of the context, and a mask hides the others from it (`branches` of `GPT2.hidden`), so that the
numbers are those of separate rows. Logits are computed only where a token is scored, and only a few
positions at a time: the loop over them ends at the last one that a batch needs.

Rows are sorted by length, longest first, and a batch is padded to the next of the lengths 32, 48,
64, 80, 96, 112, 144, 176, 208, ... (multiples of 16, about 15 % apart). One program is compiled for
each length that occurs, ten or so for HellaSwag. The number of rows of a batch follows from its
length, so a last batch that is not full is filled up with empty rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float64, Int, Int32, Integer

from maxmars import sharding
from maxmars.config import GPT2Config
from maxmars.model import graph_and_abstract_params, logical_axes
from maxmars.sharding import constrain

_Losses = Callable[..., tuple[jax.Array, jax.Array | None]]
Progress = Callable[[int, int], None]
"""Called with the number of rows that are done, and of all."""

# Per device. A CPU is fastest while activations and logits stay in its caches.
_TOKENS = {"cpu": 2048}
_TOKENS_ELSEWHERE = 16384
_HEAD_POSITIONS = {"cpu": 128}
_HEAD_POSITIONS_ELSEWHERE = 2048


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A context and the continuations to compare, as token ids."""

    context: Integer[np.ndarray, " context"]
    """At least one token; cut on the left where it and a continuation are longer than the model's
    context."""
    continuations: Sequence[Integer[np.ndarray, " _"]]
    """At least one token each."""


class _Row(NamedTuple):
    """A context and one or more continuations, as the model gets them."""

    tokens: Int32[np.ndarray, " T"]
    positions: Int32[np.ndarray, " T"]
    branches: Int32[np.ndarray, " T"]
    sources: Int32[np.ndarray, " S"]
    """Place in the row of the token whose logits score a target."""
    targets: Int32[np.ndarray, " S"]
    owners: Int32[np.ndarray, " S"]
    """Number of the continuation that a target belongs to, counted over all choices."""

    @property
    def size(self) -> int:
        return max(len(self.tokens), len(self.targets))


class _Batch(NamedTuple):
    """A batch on the mesh, int32 [1, rows, T] and [1, shards, S]; `_Row` has the fields' meaning,
    but sources count from the beginning of a shard."""

    tokens: jax.Array
    positions: jax.Array
    branches: jax.Array
    sources: jax.Array
    targets: jax.Array


_Shards = Sequence[Sequence[_Row]]
"""The rows of a batch by the part of the mesh that they go to."""


@dataclass(frozen=True, kw_only=True)
class PackedChoices:
    """Choices as rows for a model; see `pack_choices`."""

    rows: list[_Row]
    """Longest first."""
    first_equal: Int[np.ndarray, " continuations"]
    """For each continuation, the first of its choices that has the same tokens."""
    counts: list[int]
    """Number of continuations of each of the choices."""


def pack_choices(choices: Sequence[Choices], max_seq_len: int) -> PackedChoices:
    """Choices as rows for a model whose context is `max_seq_len` tokens.

    Equal continuations are scored once, so that they tie on every device.

    Raises:
      ValueError: a context is empty, or a continuation is empty or longer than `max_seq_len`.
    """
    rows: list[_Row] = []
    first_equal: list[int] = []
    for number, item in enumerate(choices):
        different: dict[tuple[int, ...], int] = {}
        for continuation in item.continuations:
            key = tuple(continuation.tolist())
            if not 0 < len(key) <= max_seq_len or not len(item.context):
                raise ValueError(
                    f"item {number} has a context of {len(item.context)} tokens and a continuation "
                    f"of {len(key)}; the first needs one token at least, the second between 1 and "
                    f"model.max_seq_len={max_seq_len}."
                )
            first_equal.append(different.setdefault(key, len(first_equal)))
        rows += _rows(item.context, different, max_seq_len)
    return PackedChoices(
        rows=sorted(rows, key=lambda row: (row.size, len(row.targets)), reverse=True),
        first_equal=np.array(first_equal, np.int64),
        counts=[len(item.continuations) for item in choices],
    )


def _rows(
    context: np.ndarray, continuations: dict[tuple[int, ...], int], max_seq_len: int
) -> Iterator[_Row]:
    """One row or, where the context must be cut, one for each continuation: the cuts differ."""
    longest = max(map(len, continuations), default=0)
    if len(context) + longest <= max_seq_len + 1:  # the last token is no input
        yield _row(context, continuations)
        return
    for continuation, owner in continuations.items():
        yield _row(context[-(max_seq_len + 1 - len(continuation)) :], {continuation: owner})


def _row(context: np.ndarray, continuations: dict[tuple[int, ...], int]) -> _Row:
    end = len(context)
    tokens, positions, branches = [context], [np.arange(end)], [np.zeros(end)]
    sources, targets, owners = [], [], []
    start = end
    for branch, (continuation, owner) in enumerate(continuations.items(), 1):
        inputs = len(continuation) - 1
        tokens.append(np.array(continuation[:-1]))
        positions.append(end + np.arange(inputs))
        branches.append(np.full(inputs, branch))
        sources += [[end - 1], start + np.arange(inputs)]
        targets.append(np.array(continuation))
        owners.append(np.full(inputs + 1, owner))
        start += inputs
    parts = (tokens, positions, branches, sources, targets, owners)
    return _Row(*(np.concatenate(part).astype(np.int32) for part in parts))


@dataclass(frozen=True, kw_only=True)
class ScoredChoices:
    """An array for each of the choices, with a number for each of its continuations."""

    log_likelihoods: list[Float64[np.ndarray, " _"]]
    """Given the context, in nats."""
    is_greedy: list[Bool[np.ndarray, " _"]]
    """Whether each of its tokens is the likeliest where it stands."""


class LogLikelihoods:
    """Scores packed choices under a model.

    Args:
      config: the model.
      mesh: of the parameters; rows are split over its `data` and `fsdp` axes.
      batch_size: rows scored at once, over all devices; None takes as many as suit the device. The
        scores do not depend on it, rounding aside.

    Raises:
      ValueError: `batch_size` is less than 1.
    """

    def __init__(self, config: GPT2Config, mesh: Mesh, *, batch_size: int | None = None) -> None:
        """Compile nothing yet."""
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        self._mesh = mesh
        self._shards = sharding.batch_shards(mesh)
        self._batch_size = batch_size
        platform = mesh.devices.flat[0].platform
        self._tokens = _TOKENS.get(platform, _TOKENS_ELSEWHERE)
        self._head_positions = _HEAD_POSITIONS.get(platform, _HEAD_POSITIONS_ELSEWHERE)
        self._losses = self._make_losses(config, greedy=False)
        self._greedy_losses = self._make_losses(config, greedy=True)

    def __call__(
        self, params: Any, packed: PackedChoices, progress: Progress | None = None
    ) -> list[Float64[np.ndarray, " continuations"]]:
        """The log-likelihood of each continuation given its context, in nats, by choices.

        Every process calls with the same choices and gets all scores.

        Args:
          params: the parameters, in the mesh's shardings.
          packed: the choices.
          progress: called now and then.
        """
        return self._score(params, packed, progress, self._losses).log_likelihoods

    def with_greedy(
        self, params: Any, packed: PackedChoices, progress: Progress | None = None
    ) -> ScoredChoices:
        """The log-likelihoods, and which continuations greedy decoding gives; see `__call__`."""
        return self._score(params, packed, progress, self._greedy_losses)

    def _score(
        self, params: Any, packed: PackedChoices, progress: Progress | None, losses: _Losses
    ) -> ScoredChoices:
        sums = np.zeros(len(packed.first_equal))
        is_greedy = np.ones(len(packed.first_equal), bool)
        done, running = 0, None
        for shards, batch, num_chunks in self._batches(packed.rows):
            # One at a time: collectives of several programs that run at once on the fake devices of
            # a CPU can wait for each other forever. The next batch is packed meanwhile.
            if running is not None:
                _add(sums, is_greedy, *running)
                done += sum(map(len, running[0]))
                if progress is not None:
                    progress(done, len(packed.rows))
            with jax.set_mesh(self._mesh):
                running = shards, losses(params, batch, num_chunks)
        if running is not None:
            _add(sums, is_greedy, *running)
        if progress is not None:
            progress(len(packed.rows), len(packed.rows))
        ends = np.cumsum(packed.counts)[:-1]
        return ScoredChoices(
            log_likelihoods=np.split(sums[packed.first_equal], ends),
            is_greedy=np.split(is_greedy[packed.first_equal], ends),
        )

    def _batches(self, rows: Sequence[_Row]) -> Iterator[tuple[_Shards, _Batch, np.int32]]:
        """The rows of each batch by shard, the same on the mesh, and its number of chunks."""
        done = 0
        while done < len(rows):
            length = _padded_length(rows[done].size)
            count = self._batch_size or max(1, self._tokens // length) * self._shards
            height = -(-min(count, len(rows)) // self._shards)
            while height > 1 and -(-height // 2) * self._shards >= len(rows) - done:
                height = -(-height // 2)  # the last rows: few programs, and few empty rows
            batch = rows[done : done + height * self._shards]
            done += len(batch)
            shards = [batch[i :: self._shards] for i in range(self._shards)]  # much the same work
            targets = max(sum(len(row.targets) for row in shard) for shard in shards)
            num_chunks = -(-targets // self._chunk(height * length))
            yield shards, self._place(shards, height, length), np.int32(num_chunks)

    def _place(self, shards: _Shards, height: int, length: int) -> _Batch:
        """Put this process's shards of a batch on its devices."""
        chunk = self._chunk(height * length)
        mine = [shards[i] for i in sharding.local_rows(self._mesh, (1, self._shards))[0]]
        filled = [row for shard in mine for row in [*shard, *[_EMPTY] * (height - len(shard))]]
        inputs = [_stack(column, length) for column in list(zip(*filled, strict=True))[:3]]
        width = -(-height * length // chunk) * chunk
        sources = _stack([_flat_sources(shard, length) for shard in mine], width)
        targets = _stack([_joined([row.targets for row in shard]) for shard in mine], width)
        rows = height * self._shards
        tokens, positions, branches = (
            sharding.to_device(self._mesh, array[None], rows) for array in inputs
        )
        return _Batch(
            tokens=tokens,
            positions=positions,
            branches=branches,
            sources=sharding.to_device(self._mesh, sources[None], self._shards),
            targets=sharding.to_device(self._mesh, targets[None], self._shards),
        )

    def _chunk(self, tokens: int) -> int:
        """Positions of a shard whose logits are computed at once, where it has so many tokens."""
        return min(self._head_positions, tokens)

    def _make_losses(self, config: GPT2Config, *, greedy: bool) -> _Losses:
        """A jitted function of (params, batch, chunks).

        It gives the targets' nats [shards, S] and, if `greedy`, whether each is the likeliest.
        """
        graph, _ = graph_and_abstract_params(config)

        def losses(
            params: Any, batch: _Batch, num_chunks: Int[Array, ""]
        ) -> tuple[Float[Array, "N S"], Bool[Array, "N S"] | None]:
            model = nnx.merge(graph, params)
            tokens, positions, branches, sources, targets = (array[0] for array in batch)
            hidden = model.hidden(tokens, positions, branches)
            hidden = hidden.reshape(self._shards, -1, hidden.shape[-1])
            hidden = constrain(hidden, "batch", None, None)
            # Gathered over fsdp here, once, and not in the loop.
            table = constrain(model.wte.embedding[...].astype(hidden.dtype), "vocab", None)
            size = self._chunk(hidden.shape[1])

            def chunk(i: Int[Array, ""], found: tuple[Any, ...]) -> tuple[Any, ...]:
                def part(x: jax.Array) -> jax.Array:
                    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=1)

                x = jnp.take_along_axis(hidden, part(sources)[..., None], axis=1)
                new = _nats(config, table, x, part(targets), greedy=greedy)
                return jax.tree.map(
                    lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * size, axis=1),
                    found,
                    new,
                )

            nats = jnp.zeros(targets.shape, jnp.promote_types(hidden.dtype, jnp.float32))
            nothing = (nats, jnp.zeros(targets.shape, bool) if greedy else None)
            return jax.lax.fori_loop(0, num_chunks, chunk, nothing)

        return jax.jit(
            losses,
            in_shardings=(
                sharding.tree_shardings(self._mesh, logical_axes(config)),
                sharding.batch_sharding(self._mesh),
                sharding.replicated(self._mesh),
            ),
            out_shardings=sharding.replicated(self._mesh),
        )


def _nats(
    config: GPT2Config,
    table: Float[Array, "V D"],
    x: Float[Array, "B S D"],
    targets: Int[Array, "B S"],
    *,
    greedy: bool,
) -> tuple[Float[Array, "B S"], Bool[Array, "B S"] | None]:
    """`cross_entropy(GPT2.logits(x), targets)`, with logits [V, B S] and not [B, S, V].

    On a CPU, that halves the time. The target's logit is computed apart: picking it among all would
    be a gather over an axis that `tensor` may split. If `greedy`, also whether a target is the
    likeliest token.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    flat = x.reshape(-1, x.shape[-1])
    logits = jnp.einsum("vd,nd->vn", table, flat, preferred_element_type=wide)
    logits = constrain(logits, "vocab", "batch")
    if config.padded_vocab_size > config.vocab_size:
        is_token = jnp.arange(config.padded_vocab_size) < config.vocab_size
        logits = jnp.where(is_token[:, None], logits, jnp.finfo(wide).min)
    normalizer = jax.nn.logsumexp(logits, axis=0).reshape(targets.shape)
    picked = jnp.einsum("bsd,bsd->bs", x, table[targets], preferred_element_type=wide)
    likeliest = None
    if greedy:
        # The maximum is there anyway, while an argmax takes a CPU ten times as long. `picked` is
        # rounded in another order than the logits; what is as close as that is a tie.
        top = logits.max(axis=0).reshape(targets.shape)
        likeliest = picked >= top - 1e-5 * (1 + jnp.abs(top))
    return normalizer - picked, likeliest


_EMPTY = _Row(*[np.zeros(0, np.int32)] * 6)


def _flat_sources(shard: Sequence[_Row], length: int) -> Int32[np.ndarray, " S"]:
    """Sources in a shard whose rows of `length` tokens follow each other."""
    return _joined([i * length + row.sources for i, row in enumerate(shard)])


def _joined(arrays: Sequence[np.ndarray]) -> Int32[np.ndarray, " joined"]:
    return np.concatenate([np.zeros(0, np.int32), *arrays]).astype(np.int32)


def _stack(arrays: Sequence[np.ndarray], width: int) -> Int32[np.ndarray, "rows width"]:
    stacked = np.zeros((len(arrays), width), np.int32)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked


def _padded_length(size: int) -> int:
    length = 32
    while length < size:
        length = -(-length * 23 // 320) * 16
    return length


def _add(
    sums: Float64[np.ndarray, " all"],
    is_greedy: Bool[np.ndarray, " all"],
    shards: _Shards,
    losses: tuple[jax.Array, jax.Array | None],
) -> None:
    """Add the log-likelihoods of a batch's targets to those of the continuations they belong to."""
    nats, likeliest = jax.device_get(losses)
    for i, shard in enumerate(shards):
        owners = _joined([row.owners for row in shard])
        np.subtract.at(sums, owners, nats[i, : len(owners)].astype(np.float64))
        if likeliest is not None:
            np.logical_and.at(is_greedy, owners, likeliest[i, : len(owners)])
