"""Sampling text from a trained model, with cached keys and values."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Integer, UInt32

from maxmars import sharding
from maxmars.config import GPT2Config
from maxmars.data.sources import LateStatus
from maxmars.kv_cache import KVCache, decode, prefill
from maxmars.model import graph_and_abstract_params, logical_axes
from maxmars.sampling import Sampling, choose
from maxmars.sharding import constrain
from maxmars.trained_model import TrainedModel

_CHUNK = 16  # tokens between two looks of the host
_SMALLEST_BUCKET = 16

Tokens = Integer[np.ndarray, " _"]


def generate_texts(
    model: TrainedModel,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 200,
    sampling: Sampling | None = None,
    seed: int = 0,
    batch_size: int = 16,
) -> list[str]:
    """The continuation of each prompt, without the prompt; see `generate_tokens`.

    Args:
      model: the model.
      prompts: texts to continue; an empty one starts at an end-of-text token.
      max_new_tokens: most tokens to add to each; fewer where end-of-text is sampled.
      sampling: how tokens are drawn; None takes the defaults.
      seed: seed of the sampling.
      batch_size: prompts continued at once.

    Raises:
      ValueError: an argument is out of range.
    """
    tokenizer = model.tokenizer
    encoded = [tokenizer.encode(p) if p else np.array([tokenizer.eot]) for p in prompts]
    found = generate_tokens(
        model,
        encoded,
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        seed=seed,
        batch_size=batch_size,
        stop=tokenizer.eot,
    )
    return [tokenizer.decode(tokens) for tokens in found]


def generate_tokens(
    model: TrainedModel,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    batch_size: int = 16,
    stop: int | None = None,
    is_complete: Callable[[Tokens], bool] | None = None,
) -> list[Tokens]:
    """Token ids that continue each prompt.

    The model sees the last `max_seq_len` tokens of a prompt. Each time its context is full, it goes
    on from the last half of it: positions are learned, so that no cached key can move to another.

    What is drawn for a prompt depends on the seed, the prompt and how often the same prompt came
    before it in `prompts`; to rounding not on the others, the batch size or the mesh.

    Args:
      model: the model.
      prompts: token ids, at least one each.
      max_new_tokens: most tokens to add to each.
      sampling: how tokens are drawn. Ids that the tokenizer does not know never are.
      seed: seed of the sampling.
      batch_size: prompts continued at once; rounded up to a multiple of the mesh's batch shards.
      stop: a row ends before this token.
      is_complete: asked now and then about a row's new tokens; True ends the row there. It may be
        asked late, so that the caller cuts what is too much.

    Raises:
      ValueError: an argument is out of range.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative.")
    job = _Job(
        model=model,
        num_rows=min(batch_size, len(prompts)),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=-1 if stop is None else stop,
        is_complete=is_complete,
    )
    rows = [
        _Row(context=prompt.tolist(), key=key)
        for prompt, key in zip(prompts, _keys(prompts, seed), strict=True)
    ]
    by_length = sorted(rows, key=lambda row: len(row.context))
    with LateStatus() as status, jax.set_mesh(model.mesh):

        def show() -> None:
            done, num_new = sum(row.ended for row in rows), sum(len(row.new) for row in rows)
            rate = num_new / max(status.elapsed_s, 1e-9)
            status.update(
                f"{done} of {len(rows)} prompts done, {num_new:,} tokens, {rate:,.0f} tokens/s"
            )

        params = model.params
        if model.config.compute_dtype != model.config.param_dtype:
            params = _decoding_params(params, config=model.config)
        for start in range(0, len(rows), batch_size):
            _continue_rows(job, params, by_length[start : start + batch_size], show)
    return [np.asarray(row.new, np.int32) for row in rows]


def bucket_length(length: int, longest: int) -> int:
    """A length to compile a program for: 16, 24, 32, 48, 64, 96, ... and `longest`.

    There are few of them, and none is longer than needed by more than a half.
    """
    bucket = _SMALLEST_BUCKET
    while bucket < length:
        is_power_of_2 = bucket & (bucket - 1) == 0
        bucket = bucket * 3 // 2 if is_power_of_2 else bucket * 4 // 3
    return min(bucket, longest)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is the same for all prompts."""

    model: TrainedModel
    num_rows: int
    max_new_tokens: int
    sampling: Sampling
    stop: int
    is_complete: Callable[[Tokens], bool] | None


@dataclass(kw_only=True)
class _Row:
    """One prompt."""

    context: list[int]
    """What the model sees, once `cut_context` is done."""
    key: UInt32[np.ndarray, " 2"]
    new: list[int] = field(default_factory=list)
    ended: bool = False

    def cut_context(self, longest: int) -> None:
        """Keep the end of a prompt that is too long, and half of a context that got full."""
        if len(self.context) > longest:
            keep = max(1, longest // 2) if self.new else longest
            self.context = self.context[-keep:]

    def add(self, tokens: list[int], job: _Job) -> None:
        """Add new tokens, unless it has ended."""
        if self.ended:
            return
        if job.stop in tokens:
            self.ended, tokens = True, tokens[: tokens.index(job.stop)]
        self.context += tokens
        self.new += tokens
        complete = job.is_complete is not None and job.is_complete(np.asarray(self.new, np.int32))
        self.ended |= complete or len(self.new) == job.max_new_tokens


def _continue_rows(job: _Job, params: Any, rows: list[_Row], show: Callable[[], None]) -> None:
    """Draw until all rows have ended, in stretches in which no context gets full."""
    num_rows = -(-job.num_rows // sharding.batch_shards(job.model.mesh))
    num_rows *= sharding.batch_shards(job.model.mesh)
    filling = _Row(context=[0], key=rows[0].key, ended=True)
    rows = rows + [filling] * (num_rows - len(rows))
    while not all(row.ended for row in rows):
        for row in rows:
            row.cut_context(job.model.config.max_seq_len)
        _continue_until_full(job, params, rows, show)


def _continue_until_full(
    job: _Job, params: Any, rows: list[_Row], show: Callable[[], None]
) -> None:
    config, mesh = job.model.config, job.model.mesh
    contexts = [[0] if row.ended else row.context for row in rows]
    lengths = np.array([len(context) for context in contexts], np.int32)
    # All rows that have not ended have the same number of new tokens.
    num_drawn = max(len(row.new) for row in rows if not row.ended)
    # The token that is predicted from a full context needs no place in it.
    num_steps = min(job.max_new_tokens - num_drawn, config.max_seq_len + 1 - int(lengths.max()))
    tokens = np.zeros((len(rows), bucket_length(int(lengths.max()), config.max_seq_len)), np.int32)
    for i, context in enumerate(contexts):
        tokens[i, : len(context)] = context
    keys = _to_device(np.stack([row.key for row in rows]), mesh)
    hidden, cache = _fill_cache(
        params,
        _to_device(tokens, mesh),
        _to_device(lengths, mesh),
        config=config,
        num_slots=bucket_length(num_steps, config.max_seq_len),
    )
    for start in range(0, num_steps, _CHUNK):
        stop = min(start + _CHUNK, num_steps)
        hidden, cache, new = _draw(
            params,
            hidden,
            cache,
            _to_device(np.array([row.ended for row in rows]), mesh),
            keys,
            np.array([num_drawn, stop, job.stop], np.int32),
            config=config,
            sampling=job.sampling,
            num_tokens=job.model.tokenizer.vocab_size,
        )
        for row, tokens in zip(rows, np.asarray(new)[:, : stop - start].tolist(), strict=True):
            row.add(tokens, job)
        show()
        if all(row.ended for row in rows):
            return


@functools.partial(jax.jit, static_argnames="config")
def _decoding_params(params: Any, *, config: GPT2Config) -> Any:
    """Parameters in the types that the model computes with, so that no step converts them."""

    def convert(axes: tuple[str, ...], param: Array) -> Array:
        # LayerNorms are computed in wide types.
        return param if "norm" in axes else param.astype(config.compute_dtype)

    return jax.tree.map(
        convert, logical_axes(config), params, is_leaf=lambda x: isinstance(x, tuple)
    )


@functools.partial(jax.jit, static_argnames=("config", "num_slots"))
def _fill_cache(
    params: Any,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    *,
    config: GPT2Config,
    num_slots: int,
) -> tuple[Float[Array, "B D"], KVCache]:
    graph, _ = graph_and_abstract_params(config)
    return prefill(nnx.merge(graph, params), tokens, lengths, num_slots)


@functools.partial(
    jax.jit,
    static_argnames=("config", "sampling", "num_tokens"),
    donate_argnames=("hidden", "cache"),
)
def _draw(
    params: Any,
    hidden: Float[Array, "B D"],
    cache: KVCache,
    ended: Bool[Array, " B"],
    keys: UInt32[Array, "B 2"],
    numbers: Int[Array, " 3"],
    *,
    config: GPT2Config,
    sampling: Sampling,
    num_tokens: int,
) -> tuple[Float[Array, "B D"], KVCache, Int[Array, "B chunk"]]:
    """Draw tokens one by one, until all rows have ended or the limit is reached.

    Args:
      params: see `_decoding_params`.
      hidden: what the next token is predicted from.
      cache: keys and values of the tokens before.
      ended: which rows have ended.
      keys: of each row's random numbers.
      numbers: new tokens that are no longer in the cache's second part, limit of those that are,
        and the token at which a row ends.
      config: the model.
      sampling: how to draw.
      num_tokens: ids from here on are never drawn.
    """
    model = nnx.merge(graph_and_abstract_params(config)[0], params)
    num_before, limit, stop = numbers
    row_keys = jax.random.wrap_key_data(keys, impl="threefry2x32")
    start = cache.num_new

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, cache, ended, drawn = state
        logits = constrain(model.logits(hidden[:, None])[:, 0], "batch", None)
        logits = jnp.where(jnp.arange(logits.shape[1]) < num_tokens, logits, -jnp.inf)
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, num_before + cache.num_new)
        tokens = choose(logits, step_keys, sampling)
        drawn = jax.lax.dynamic_update_slice(drawn, tokens[:, None], (0, cache.num_new - start))
        hidden, cache = decode(model, tokens, cache)
        return hidden, cache, ended | (tokens == stop), drawn

    def goes_on(state: tuple[Any, ...]) -> Bool[Array, ""]:
        _, cache, ended, _ = state
        return (cache.num_new < limit) & ~ended.all()

    drawn = jnp.zeros((len(ended), _CHUNK), jnp.int32)
    hidden, cache, _, drawn = jax.lax.while_loop(goes_on, step, (hidden, cache, ended, drawn))
    return hidden, cache, constrain(drawn, None, None)


def _keys(prompts: Sequence[Tokens], seed: int) -> list[UInt32[np.ndarray, " 2"]]:
    """A key for each prompt: the same for the same prompt, but where it comes a second time."""
    keys, seen = [], Counter[bytes]()
    for prompt in prompts:
        data = np.asarray(prompt, np.int64).tobytes()
        words = (seed, seen[data], *hashlib.sha256(data).digest())
        keys.append(np.random.SeedSequence(words).generate_state(2))
        seen[data] += 1
    return keys


def _to_device(array: np.ndarray, mesh: Mesh) -> Array:
    """An array that every process has, split over the mesh by rows."""
    spec = sharding.RULES.spec("batch", *[None] * (array.ndim - 1))
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), array.__getitem__)
