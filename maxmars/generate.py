"""Sampling text from a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from maxmars import sharding
from maxmars.checkpoint import load_config, load_params
from maxmars.config import GPT2Config, MeshConfig
from maxmars.data.tokenizer import saved_tokenizer
from maxmars.model import graph_and_abstract_params


def generate_text(
    workdir: Path,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 40,
    seed: int = 0,
) -> str:
    """The continuation of a prompt by the newest checkpoint of a run.

    Args:
      workdir: working directory of the run.
      prompt: text to continue; empty starts at an end-of-text token.
      max_new_tokens: number of tokens to sample; fewer if end-of-text is sampled.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: sample among the k likeliest tokens; None among all.
      seed: seed of the sampling.

    Raises:
      FileNotFoundError: there is no checkpoint in `workdir`.
      ValueError: an argument is out of range.
    """
    _check_arguments(max_new_tokens, temperature, top_k)
    checkpoints = Path(workdir) / "checkpoints"
    config = load_config(checkpoints)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    _, abstract = graph_and_abstract_params(config.model)
    shardings = jax.tree.map(lambda _: sharding.replicated(mesh), abstract)
    params = load_params(checkpoints, sharding.with_shardings(abstract, shardings))
    tokenizer = saved_tokenizer(Path(workdir) / "tokenizer")
    start = tokenizer.encode(prompt) if prompt else np.array([tokenizer.eot])
    tokens = sample(
        config.model,
        params,
        np.asarray(start, np.int32),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop=tokenizer.eot,
        num_tokens=tokenizer.vocab_size,
    )
    return tokenizer.decode(tokens)


def sample(
    config: GPT2Config,
    params: Any,
    prompt: Int[np.ndarray, " prompt"],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    stop: int,
    num_tokens: int,
) -> Int[np.ndarray, " new"]:
    """Token ids that continue a prompt; the model sees the last `max_seq_len` tokens each time.

    Args:
      config: the model.
      params: its parameters.
      prompt: token ids, at least one.
      max_new_tokens: number of tokens to sample.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: sample among the k likeliest tokens; None among all.
      seed: seed of the sampling.
      stop: sampling ends before this token.
      num_tokens: ids from here on are never sampled (the tokenizer does not know them).
    """
    graph, _ = graph_and_abstract_params(config)
    length = config.max_seq_len

    @jax.jit
    def next_token(
        params: Any, window: Int[Array, " T"], count: Int[Array, ""], key: jax.Array
    ) -> Int[Array, ""]:
        model = nnx.merge(graph, params)
        hidden = model.hidden(window[None])[:, count - 1][:, None]
        logits = model.logits(hidden)[0, 0]
        logits = jnp.where(jnp.arange(logits.size) < num_tokens, logits, -jnp.inf)
        return _choose(logits, key, temperature, top_k)

    tokens, keys = prompt.tolist(), jax.random.split(jax.random.key(seed), max_new_tokens)
    for i in range(max_new_tokens):
        recent = tokens[-length:]
        window = np.zeros(length, np.int32)
        window[: len(recent)] = recent
        token = int(next_token(params, window, np.int32(len(recent)), keys[i]))
        if token == stop:
            break
        tokens.append(token)
    return np.asarray(tokens[len(prompt) :], np.int32)


def _choose(
    logits: Float[Array, " V"], key: jax.Array, temperature: float, top_k: int | None
) -> Int[Array, ""]:
    if temperature == 0:
        return jnp.argmax(logits)
    if top_k is not None and top_k < logits.size:
        smallest = jax.lax.top_k(logits, top_k)[0][-1]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature)


def _check_arguments(max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or a positive number.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1, or None to sample among all tokens.")
