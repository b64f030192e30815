"""Continue many prompts at once with a trained model and a cache of keys and values.

* The context of every prompt is computed once (`prefill`). Each new token then costs one pass over
  one token (`decode`).
* A full context is cut to its last half and computed again: positions are learned, so no cached
  key can move. Where this will happen, the cache has the size of a whole context from the
  beginning, so nothing is compiled in the middle of a text.
* Each prompt has a random key of its own, so its text does not depend on its batch.

`stream_tokens` holds the loop; `stream_texts`, `generate_tokens` and `generate_texts` call it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Integer, Key, UInt32

from maxmars.config import GPT2Config, ModelConfig
from maxmars.config.checks import require
from maxmars.distributed import sharding
from maxmars.distributed.progress import Progress
from maxmars.distributed.sharding import constrain
from maxmars.eval.loglikelihood import encode_context
from maxmars.eval.trained_model import TrainedModel
from maxmars.model.language_model import Cache, make_model
from maxmars.model.parameters import Parameters

MAX_CHUNK = 16  # most tokens of a row that the device draws before the host sees them
INTERACTIVE_CHUNK = 4  # the same where somebody reads the text as it comes

Tokens = Integer[np.ndarray, " _"]
End = Literal["end_of_text", "length", "is_complete"]
"""Why a continuation ended: at a token of `stop`, after `max_new_tokens`, or by `is_complete`."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw a token: divide the logits by `temperature`, cut to `top_k`, then to `top_p`."""

    temperature: float = 0.8
    """Below 1 takes likely tokens more often, 0 always the likeliest."""
    top_k: int | None = 40
    """Sample among this many likeliest tokens only; None takes them all."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability; None takes all."""

    def __post_init__(self) -> None:
        require(
            0 <= self.temperature < float("inf"),
            f"temperature={self.temperature} must be 0 (greedy) or a positive number.",
        )
        require(
            self.top_k is None or self.top_k >= 1,
            f"top_k={self.top_k} must be at least 1, or None to sample among all tokens.",
        )
        require(
            self.top_p is None or 0 < self.top_p <= 1,
            f"top_p={self.top_p} must lie in (0, 1], or be None to sample among all tokens.",
        )


DEFAULT, GREEDY = Sampling(), Sampling(temperature=0.0, top_k=None)


def choose(
    logits: Float[Array, "B V"], keys: Key[Array, " B"], sampling: Sampling
) -> Int[Array, " B"]:
    """Draw one token for each row, with the row's own key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    vocabulary = logits.shape[1]
    num_candidates = min(sampling.top_k or vocabulary, vocabulary)
    ids = None
    if num_candidates < vocabulary or sampling.top_p is not None:
        logits, ids = jax.lax.top_k(logits, num_candidates)  # sorts, so only where a cut needs it
    logits = (logits - logits.max(-1, keepdims=True)) / sampling.temperature
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(logits, axis=-1)
        # The token that crosses top_p is a candidate too: the sum before it is still below.
        sum_before = jnp.cumsum(probabilities, axis=-1) - probabilities
        logits = jnp.where(sum_before < sampling.top_p, logits, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    if ids is not None:
        drawn = jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]
    return drawn.astype(jnp.int32)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """New tokens of one prompt."""

    index: int
    """Number of the prompt, from 0."""
    tokens: Tokens
    text: str = ""
    """Whole characters, from `stream_texts`; a character whose last token is yet to come is in a
    later piece."""
    end: End | None
    """Why the continuation ended with these tokens; None where it goes on."""


class Options(TypedDict, total=False):
    """Options of `stream_tokens` that all functions here take."""

    max_new_tokens: int
    sampling: Sampling
    seed: int
    batch_size: int


def generate_texts(
    model: TrainedModel, prompts: Sequence[str], **options: Unpack[Options]
) -> list[str]:
    """Continue texts and return each continuation without its prompt.

    An empty prompt is the token `TrainedModel.start`. A continuation ends at any token that ends a
    text in the model's tokenizer. For the options and errors see `stream_tokens`.
    """
    tokenizer = model.tokenizer
    contexts = [encode_context(prompt, tokenizer, model.start) for prompt in prompts]
    continuations = generate_tokens(model, contexts, stop=tokenizer.ends, **options)
    return [tokenizer.decode(tokens) for tokens in continuations]


def generate_tokens(
    model: TrainedModel,
    prompts: Sequence[Tokens],
    *,
    stop: int | Sequence[int] | None = None,
    is_complete: Callable[[Tokens], bool] = lambda tokens: False,
    **options: Unpack[Options],
) -> list[Tokens]:
    """Continue token ids and return each continuation without its prompt.

    Prompts of similar length are continued together. For the arguments and errors see
    `stream_tokens`.
    """
    # A batch computes as many positions as its longest prompt has.
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    tokens_of: list[list[Tokens]] = [[] for _ in prompts]
    num_done = num_new = 0
    with Progress(stderr=True) as status:
        stream = stream_tokens(
            model, [prompts[i] for i in by_length], stop=stop, is_complete=is_complete, **options
        )
        for piece in stream:
            tokens_of[by_length[piece.index]].append(piece.tokens)
            num_done += piece.end is not None
            num_new += len(piece.tokens)
            rate = num_new / max(status.elapsed_s, 1e-9)
            status.update(
                f"{num_done} of {len(prompts)} prompts done, {num_new:,} tokens, "
                f"{rate:,.0f} tokens/s"
            )
    return [np.concatenate(tokens) for tokens in tokens_of]


def stream_texts(
    model: TrainedModel,
    prompts: Sequence[str],
    *,
    chunk: int = INTERACTIVE_CHUNK,
    seen: Counter[bytes] | None = None,
    **options: Unpack[Options],
) -> Iterator[Piece]:
    """Continue texts, and yield each piece of text as it comes.

    The pieces of a prompt, joined, are the continuation that `generate_texts` returns. The first
    `batch_size` prompts are continued together, then the next. For the arguments and errors see
    `stream_tokens`.
    """
    tokenizer = model.tokenizer
    contexts = [encode_context(prompt, tokenizer, model.start) for prompt in prompts]
    texts = [tokenizer.pieces() for _ in prompts]
    stream = stream_tokens(model, contexts, stop=tokenizer.ends, chunk=chunk, seen=seen, **options)
    for piece in stream:
        text = texts[piece.index](piece.tokens, piece.end is not None)
        yield dataclasses.replace(piece, text=text)


def stream_tokens(
    model: TrainedModel,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int = 200,
    sampling: Sampling = DEFAULT,
    seed: int = 0,
    batch_size: int = 16,
    stop: int | Sequence[int] | None = None,
    is_complete: Callable[[Tokens], bool] = lambda tokens: False,
    chunk: int = MAX_CHUNK,
    seen: Counter[bytes] | None = None,
) -> Iterator[Piece]:
    """Continue token ids, and yield the new tokens of each prompt of a batch as they come.

    The model sees the last `max_seq_len` tokens of a prompt; each time its context is full, it goes
    on with the last half. The tokens drawn for a prompt depend on the seed, the prompt and the
    number of equal prompts before it. Up to rounding they do not depend on the other prompts, the
    batch size, the mesh or `chunk`.

    Args:
      model: the model.
      prompts: token ids, at least one each.
      max_new_tokens: the most tokens to add to each.
      sampling: how to draw tokens. Ids that the tokenizer does not know are never drawn.
      seed: seed of the sampling.
      batch_size: number of prompts continued at once; rounded up to a multiple of the mesh's batch
        shards.
      stop: a continuation ends before this token, or before the first of several.
      is_complete: called every few tokens with a prompt's new tokens; True ends the continuation.
        Since tokens are drawn several at a time, the caller must cut the surplus.
      chunk: the most tokens of a prompt that come at once, up to 16.
      seen: how often earlier calls continued each prompt; this call adds its own.

    Raises:
      ValueError: an argument is out of range. The first `next` raises it.
    """
    require(max_new_tokens > 0, f"max_new_tokens={max_new_tokens} must be at least 1.")
    require(batch_size > 0, f"batch_size={batch_size} must be at least 1.")
    require(seed >= 0, f"seed={seed} must not be negative.")
    require(0 < chunk <= MAX_CHUNK, f"chunk={chunk} must lie in [1, {MAX_CHUNK}].")
    shards = sharding.batch_shards(model.mesh)
    num_rows = -(-min(batch_size, len(prompts)) // shards) * shards  # one shape for all batches
    config = model.config
    if isinstance(config, GPT2Config) and config.compute_dtype != config.param_dtype:
        with jax.set_mesh(model.mesh):
            params = _decoding_params(model.params, config=config)
        model = dataclasses.replace(model, params=params)
    all_rows = [
        _Row(context=prompt.tolist()[-config.max_seq_len :], key=key)
        for prompt, key in zip(prompts, _keys(prompts, seed, seen), strict=True)
    ]
    stops = () if stop is None else tuple(np.atleast_1d(stop).tolist())
    for first in range(0, len(prompts), batch_size):
        rows = all_rows[first : first + batch_size]
        padding = _Row(context=[0], key=rows[0].key, end="length")
        padded = [*rows, *[padding] * (num_rows - len(rows))]
        for drawn in _draw_rows(model, padded, max_new_tokens, sampling, stops, chunk):
            for i, row in enumerate(rows):
                if row.end is None:
                    tokens = row.add(drawn[i].tolist(), stops, max_new_tokens)
                    if row.end is None and is_complete(np.array(row.new, np.int32)):
                        row.end = "is_complete"
                    yield Piece(index=first + i, tokens=tokens, end=row.end)


def bucket_length(length: int, longest: int) -> int:
    """Length to pad to: the next of 16, 24, 32, 48, 64, 96, ... and `longest`.

    These are few, as each takes a program of its own, and padding adds half a length at most.
    """
    bucket = 16
    while bucket < length:
        # 16, 24 = 16 * 3 / 2, 32 = 24 * 4 / 3, 48, 64, ...
        is_power_of_2 = bucket & (bucket - 1) == 0
        bucket = bucket * 3 // 2 if is_power_of_2 else bucket * 4 // 3
    return min(bucket, longest)


@dataclass(kw_only=True)
class _Row:
    """A prompt and its continuation so far."""

    context: list[int]
    """The tokens that the model sees."""
    key: UInt32[np.ndarray, " 2"]
    new: list[int] = field(default_factory=list)
    end: End | None = None

    def add(self, tokens: list[int], stop: Sequence[int], max_new_tokens: int) -> Tokens:
        """Add drawn tokens up to the first token of `stop`, and return the added ones."""
        stop_index = next((i for i, token in enumerate(tokens) if token in stop), None)
        added = tokens[:stop_index]
        self.context += added
        self.new += added
        if stop_index is not None:
            self.end = "end_of_text"
        elif len(self.new) == max_new_tokens:
            self.end = "length"
        return np.array(added, np.int32)


def _draw_rows(
    model: TrainedModel,
    rows: Sequence[_Row],
    max_new_tokens: int,
    sampling: Sampling,
    stop: Sequence[int],
    chunk: int,
) -> Iterator[Int[np.ndarray, "rows some"]]:
    """Draw tokens until all rows have ended; the caller adds them to the rows."""
    # Rows of the cache, `num_slots` long; contexts end side by side:
    #
    #   |      the context of 0|new tokens ...      |
    #   |a longer context of 1|new tokens ...      |
    #
    # A cache has as many slots as the answer can need at most, so that one program serves all
    # of it. Where the context is full, it is cut to half of `max_seq_len` and computed again into a
    # new cache; `prompt_slots` then gives the program the same shape at each such cut.
    mesh, config, max_seq_len = model.mesh, model.config, model.config.max_seq_len
    num_prompt = max(len(row.context) for row in rows)
    prompt_slots, num_slots = 0, bucket_length(num_prompt + max_new_tokens, max_seq_len)
    # The token that is predicted from a full context needs no slot in it.
    if num_prompt + max_new_tokens > max_seq_len + 1 and len(rows) == 1:
        # The context will be cut; the programs from before serve afterwards.
        prompt_slots = max(num_prompt, max_seq_len // 2)
    with jax.set_mesh(mesh):
        keys = _to_device(np.stack([row.key for row in rows]), mesh)
    while not all(row.end for row in rows):
        hidden, cache, num_context = _prefill(model, rows, prompt_slots, num_slots)
        # All rows that have not ended have the same number of new tokens.
        num_before = max(len(row.new) for row in rows if not row.end)
        # The longest row decides: a context of n tokens leaves max_seq_len - n slots, and the full
        # one still predicts a token, which needs none.
        limit = min(max_new_tokens, num_before + max_seq_len + 1 - num_context)
        for start in range(num_before, limit, chunk):
            if all(row.end for row in rows):
                break
            next_start = min(start + chunk, limit)
            with jax.set_mesh(mesh):
                hidden, cache, new = _draw(
                    model.params,
                    hidden,
                    cache,
                    _to_device(np.array([row.end is not None for row in rows]), mesh),
                    keys,
                    np.array([num_before, next_start - num_before, *stop], np.int32),
                    config=config,
                    sampling=sampling,
                    num_tokens=min(model.tokenizer.vocab_size, config.vocab_size),
                )
                drawn = np.asarray(new)[:, : next_start - start]
            yield drawn


def _prefill(
    model: TrainedModel, rows: Sequence[_Row], prompt_slots: int, num_slots: int
) -> tuple[Float[Array, "B D"], Cache, int]:
    """Compute the contexts of all rows; those that are too long are first cut to their last half.

    Returns the last hidden states, a cache of `num_slots`, and the length of the longest context.
    """
    max_seq_len = model.config.max_seq_len
    for row in rows:
        if len(row.context) > max_seq_len:
            row.context = row.context[-max(1, max_seq_len // 2) :]
    contexts = [[0] if row.end else row.context for row in rows]
    lengths = np.array([len(context) for context in contexts], np.int32)
    num_context = int(lengths.max())
    width = bucket_length(max(prompt_slots, num_context), max_seq_len)
    tokens = np.zeros((len(rows), width), np.int32)
    for i, context in enumerate(contexts):
        tokens[i, : len(context)] = context
    with jax.set_mesh(model.mesh):
        arrays = _to_device(tokens, model.mesh), _to_device(lengths, model.mesh)
        hidden, cache = _fill_cache(model.params, *arrays, config=model.config, num_slots=num_slots)
    return hidden, cache, num_context


@functools.partial(jax.jit, static_argnames="config")
def _decoding_params(params: Any, *, config: GPT2Config) -> Any:
    """Cast parameters to the compute dtype once, so that no step casts them."""

    def cast(axes: tuple[str, ...], param: Array) -> Array:
        # LayerNorms compute in their parameters' wider dtype.
        return param if "norm" in axes else param.astype(config.compute_dtype)

    return jax.tree.map(
        cast, Parameters(config).axes, params, is_leaf=lambda x: isinstance(x, tuple)
    )


@functools.partial(jax.jit, static_argnames=("config", "num_slots"))
def _fill_cache(
    params: Any,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    *,
    config: ModelConfig,
    num_slots: int,
) -> tuple[Float[Array, "B D"], Cache]:
    return make_model(config, params).prefill(tokens, lengths, num_slots)


@functools.partial(
    jax.jit,
    static_argnames=("config", "sampling", "num_tokens"),
    donate_argnames=("hidden", "cache"),
)
def _draw(
    params: Any,
    hidden: Float[Array, "B D"],
    cache: Cache,
    ended: Bool[Array, " B"],
    keys: UInt32[Array, "B 2"],
    counts_and_stop: Int[Array, " counts_and_stop"],
    *,
    config: ModelConfig,
    sampling: Sampling,
    num_tokens: int,
) -> tuple[Float[Array, "B D"], Cache, Int[Array, "B chunk"]]:
    """Draw tokens one by one, until all rows have ended or the limit is reached.

    `hidden` is the last hidden state of each row, which predicts its next token. `counts_and_stop`,
    one array and so one transfer, has the number of new tokens that were drawn before this cache
    was filled, the number that the cache may get, and the tokens at which a row ends. Ids from
    `num_tokens` on, which pad the vocabulary, are never drawn.
    """
    model = make_model(config, params)
    num_before, limit, stop = counts_and_stop[0], counts_and_stop[1], counts_and_stop[2:]
    row_keys = jax.random.wrap_key_data(keys, impl="threefry2x32")
    start = cache.num_new

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, cache, ended, drawn = state
        logits = constrain(model.logits(hidden[:, None])[:, 0], "batch", None)
        logits = jnp.where(jnp.arange(logits.shape[1]) < num_tokens, logits, -jnp.inf)
        # The key depends on the number of the token, not on chunks or on cuts of the context.
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, num_before + cache.num_new)
        tokens = choose(logits, step_keys, sampling)
        drawn = jax.lax.dynamic_update_slice(drawn, tokens[:, None], (0, cache.num_new - start))
        hidden, cache = model.decode(tokens, cache)
        return hidden, cache, ended | jnp.isin(tokens, stop), drawn

    def not_done(state: tuple[Any, ...]) -> Bool[Array, ""]:
        _, cache, ended, _ = state
        return (cache.num_new < limit) & ~ended.all()

    drawn = jnp.zeros((len(ended), MAX_CHUNK), jnp.int32)
    hidden, cache, _, drawn = jax.lax.while_loop(not_done, step, (hidden, cache, ended, drawn))
    return hidden, cache, constrain(drawn, None, None)


def _keys(
    prompts: Sequence[Tokens], seed: int, seen: Counter[bytes] | None
) -> list[UInt32[np.ndarray, " 2"]]:
    """A key for each prompt, from the seed, the prompt, and the number of equal prompts before."""
    keys, seen = [], Counter[bytes]() if seen is None else seen
    for prompt in prompts:
        prompt_bytes = np.asarray(prompt, np.int64).tobytes()
        words = (seed, seen[prompt_bytes], *hashlib.sha256(prompt_bytes).digest())
        keys.append(np.random.SeedSequence(words).generate_state(2))
        seen[prompt_bytes] += 1
    return keys


def _to_device(array: np.ndarray, mesh: Mesh) -> Array:
    """Split an array that every process holds over the mesh by rows."""
    spec = sharding.RULES.spec("batch", *[None] * (array.ndim - 1))
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), array.__getitem__)
