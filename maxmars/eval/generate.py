"""Continue prompts with a trained model, many at once, with cached keys and values of a GPT-2.

The context of every prompt is computed once (`prefill`); after that each new token costs one pass
over one token (`decode`). When a context is full, generation goes on from its last half: positions
are learned, so no cached key can move to another position.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Integer, Key, UInt32

from maxmars.config import GPT2Config, ModelConfig
from maxmars.distributed import sharding
from maxmars.distributed.progress import Progress
from maxmars.distributed.sharding import constrain
from maxmars.eval.loglikelihood import encode_context
from maxmars.eval.trained_model import TrainedModel
from maxmars.model.kv_cache import KVCache, TokenCache, decode, prefill
from maxmars.model.language_model import logical_axes, make_model

_CHUNK = 16  # tokens that the device draws before the host looks at them
_SMALLEST_BUCKET = 16

Tokens = Integer[np.ndarray, " _"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn: divide the logits by `temperature`, cut to `top_k`, then to `top_p`."""

    temperature: float = 0.8
    """Below 1 takes likely tokens more often, 0 always the likeliest."""
    top_k: int | None = 40
    """Sample among this many likeliest tokens only; None takes them all."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability; None takes all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} must be 0 (greedy) or a positive number."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"top_k={self.top_k} must be at least 1, or None to sample among all tokens."
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p={self.top_p} must lie in (0, 1], or be None to sample among all tokens."
            )


GREEDY = Sampling(temperature=0.0, top_k=None)


def choose(
    logits: Float[Array, "B V"], keys: Key[Array, " B"], sampling: Sampling
) -> Int[Array, " B"]:
    """Draw one token for each row, with the row's own key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    vocabulary = logits.shape[1]
    kept = min(sampling.top_k or vocabulary, vocabulary)
    ids = None
    if kept < vocabulary or sampling.top_p is not None:  # only then must the likeliest be known
        logits, ids = jax.lax.top_k(logits, kept)
    logits = (logits - logits.max(-1, keepdims=True)) / sampling.temperature
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        logits = jnp.where(before < sampling.top_p, logits, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    if ids is not None:
        drawn = jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]
    return drawn.astype(jnp.int32)


def generate_texts(
    model: TrainedModel,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 200,
    sampling: Sampling | None = None,
    seed: int = 0,
    batch_size: int = 16,
) -> list[str]:
    """Continue texts; returns each continuation without its prompt.

    An empty prompt starts at an end-of-text token, and such a token ends a continuation. For the
    arguments and errors see `generate_tokens`; `sampling` None is `Sampling()`.
    """
    tokenizer = model.tokenizer
    found = generate_tokens(
        model,
        [encode_context(prompt, tokenizer) for prompt in prompts],
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
    """Continue token ids; returns each continuation without its prompt.

    The model sees the last `max_seq_len` tokens of a prompt, and the last half of them each time
    its context is full. The tokens drawn for a prompt depend on the seed, the prompt and how often
    the same prompt came before it in `prompts`; up to rounding they do not depend on the other
    prompts, the batch size or the mesh.

    Args:
      model: the model.
      prompts: token ids, at least one each.
      max_new_tokens: the most tokens to add to each.
      sampling: how tokens are drawn. Ids that the tokenizer does not know are never drawn.
      seed: seed of the sampling.
      batch_size: number of prompts continued at once; rounded up to a multiple of the mesh's batch
        shards.
      stop: a continuation ends before this token.
      is_complete: called every few tokens with a prompt's new tokens; True ends the continuation.
        Since tokens are drawn several at a time, the caller must cut what is too much.

    Raises:
      ValueError: an argument is out of range.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative.")
    shards = sharding.batch_shards(model.mesh)
    num_rows = -(-min(batch_size, len(prompts)) // shards) * shards
    stop = -1 if stop is None else stop
    rows = [
        _Row(context=prompt.tolist(), key=key)
        for prompt, key in zip(prompts, _keys(prompts, seed), strict=True)
    ]
    by_length = sorted(rows, key=lambda row: len(row.context))
    with Progress(stderr=True) as status, jax.set_mesh(model.mesh):
        params = model.params
        config = model.config
        if isinstance(config, GPT2Config) and config.compute_dtype != config.param_dtype:
            params = _decoding_params(params, config=config)
        for start in range(0, len(rows), batch_size):
            batch = by_length[start : start + batch_size]
            padding = _Row(context=[0], key=batch[0].key, ended=True)
            batch += [padding] * (num_rows - len(batch))
            while not all(row.ended for row in batch):
                drawn = _draw_until_full(model, params, batch, max_new_tokens, sampling, stop)
                for chunk in drawn:
                    for row, tokens in zip(batch, chunk.tolist(), strict=True):
                        if not row.ended:
                            row.add(tokens, stop)
                            row.ended |= len(row.new) == max_new_tokens or (
                                is_complete is not None and is_complete(np.array(row.new, np.int32))
                            )
                    done, num_new = sum(row.ended for row in rows), sum(len(r.new) for r in rows)
                    rate = num_new / max(status.elapsed_s, 1e-9)
                    status.update(
                        f"{done} of {len(rows)} prompts done, {num_new:,} tokens, "
                        f"{rate:,.0f} tokens/s"
                    )
    return [np.array(row.new, np.int32) for row in rows]


def bucket_length(length: int, longest: int) -> int:
    """The length to pad to: the next of 16, 24, 32, 48, 64, 96, ... and `longest`.

    So few programs are compiled, and padding adds a half at most.
    """
    bucket = _SMALLEST_BUCKET
    while bucket < length:
        is_power_of_2 = bucket & (bucket - 1) == 0
        bucket = bucket * 3 // 2 if is_power_of_2 else bucket * 4 // 3
    return min(bucket, longest)


@dataclass(kw_only=True)
class _Row:
    """One prompt."""

    context: list[int]
    """The tokens that the model sees."""
    key: UInt32[np.ndarray, " 2"]
    new: list[int] = field(default_factory=list)
    ended: bool = False

    def add(self, tokens: list[int], stop: int) -> None:
        if stop in tokens:
            self.ended, tokens = True, tokens[: tokens.index(stop)]
        self.context += tokens
        self.new += tokens


def _draw_until_full(
    model: TrainedModel,
    params: Any,
    rows: Sequence[_Row],
    max_new_tokens: int,
    sampling: Sampling,
    stop: int,
) -> Iterator[Int[np.ndarray, "rows chunk"]]:
    """Cut the contexts that are full, and draw until one is full again or all rows have ended.

    The caller adds the tokens of each chunk to the rows.
    """
    longest = model.config.max_seq_len
    for row in rows:
        if len(row.context) > longest:  # of a prompt that is too long all that fits is kept
            row.context = row.context[-(max(1, longest // 2) if row.new else longest) :]
    contexts = [[0] if row.ended else row.context for row in rows]
    lengths = np.array([len(context) for context in contexts], np.int32)
    # All rows that have not ended have the same number of new tokens.
    num_drawn = max(len(row.new) for row in rows if not row.ended)
    # The token that is predicted from a full context needs no place in it.
    num_steps = min(max_new_tokens - num_drawn, longest + 1 - int(lengths.max()))
    tokens = np.zeros((len(rows), bucket_length(int(lengths.max()), longest)), np.int32)
    for i, context in enumerate(contexts):
        tokens[i, : len(context)] = context
    keys = _to_device(np.stack([row.key for row in rows]), model.mesh)
    hidden, cache = _fill_cache(
        params,
        _to_device(tokens, model.mesh),
        _to_device(lengths, model.mesh),
        config=model.config,
        num_slots=bucket_length(num_steps, longest),
    )
    for start in range(0, num_steps, _CHUNK):
        end = min(start + _CHUNK, num_steps)
        hidden, cache, new = _draw(
            params,
            hidden,
            cache,
            _to_device(np.array([row.ended for row in rows]), model.mesh),
            keys,
            np.array([num_drawn, end, stop], np.int32),
            config=model.config,
            sampling=sampling,
            num_tokens=model.tokenizer.vocab_size,
        )
        yield np.asarray(new)[:, : end - start]
        if all(row.ended for row in rows):
            return


@functools.partial(jax.jit, static_argnames="config")
def _decoding_params(params: Any, *, config: GPT2Config) -> Any:
    """Convert parameters to the compute type once, so that no step converts them."""

    def convert(axes: tuple[str, ...], param: Array) -> Array:
        # LayerNorms compute in their parameters' wider type.
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
    config: ModelConfig,
    num_slots: int,
) -> tuple[Float[Array, "B D"], KVCache | TokenCache]:
    return prefill(make_model(config, params), tokens, lengths, num_slots)


@functools.partial(
    jax.jit,
    static_argnames=("config", "sampling", "num_tokens"),
    donate_argnames=("hidden", "cache"),
)
def _draw(
    params: Any,
    hidden: Float[Array, "B D"],
    cache: KVCache | TokenCache,
    ended: Bool[Array, " B"],
    keys: UInt32[Array, "B 2"],
    numbers: Int[Array, " 3"],
    *,
    config: ModelConfig,
    sampling: Sampling,
    num_tokens: int,
) -> tuple[Float[Array, "B D"], KVCache | TokenCache, Int[Array, "B chunk"]]:
    """Draw tokens one by one, until all rows have ended or the limit is reached.

    `hidden` is the last hidden state of each row, which predicts its next token. `numbers` are how
    many new tokens were drawn before this cache was filled, how many new tokens the cache may get,
    and the token at which a row ends. Ids from `num_tokens` on, which pad the vocabulary, are never
    drawn.
    """
    model = make_model(config, params)
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

    def not_done(state: tuple[Any, ...]) -> Bool[Array, ""]:
        _, cache, ended, _ = state
        return (cache.num_new < limit) & ~ended.all()

    drawn = jnp.zeros((len(ended), _CHUNK), jnp.int32)
    hidden, cache, _, drawn = jax.lax.while_loop(not_done, step, (hidden, cache, ended, drawn))
    return hidden, cache, constrain(drawn, None, None)


def _keys(prompts: Sequence[Tokens], seed: int) -> list[UInt32[np.ndarray, " 2"]]:
    """A key for each prompt, from the seed, the prompt, and how often the same came before."""
    keys, seen = [], Counter[bytes]()
    for prompt in prompts:
        data = np.asarray(prompt, np.int64).tobytes()
        words = (seed, seen[data], *hashlib.sha256(data).digest())
        keys.append(np.random.SeedSequence(words).generate_state(2))
        seen[data] += 1
    return keys


def _to_device(array: np.ndarray, mesh: Mesh) -> Array:
    """Split an array that every process holds over the mesh by rows."""
    spec = sharding.RULES.spec("batch", *[None] * (array.ndim - 1))
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), array.__getitem__)
