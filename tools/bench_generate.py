"""Tokens/s of generation, with cached keys and values and by full forward passes.

    python tools/bench_generate.py [--batch-sizes 1,8] [--new-tokens 128] [--layers 12]
                                   [--compute-dtype float32] [--output F.json]

GPT-2 small with random weights on one device, prompts of 64 random tokens, greedy. Without a cache,
each new token takes a forward pass over what is seen: over the whole context of 1024, which is one
program, or over what is there rounded up to a multiple of 64. These passes are timed at every
sixteenth token. Compilation is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxmars.config import GPT2Config, MeshConfig
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.distributed import sharding
from maxmars.eval.generate import GREEDY, generate_tokens
from maxmars.eval.trained_model import TrainedModel
from maxmars.model.language_model import graph_and_abstract_params, init_params

PROMPT = 64
EVERY = 16


class AnyTokens(ByteTokenizer):
    """Stands for GPT-2's: nothing is decoded, only the size counts."""

    vocab_size = 50257


def make_model(config: GPT2Config) -> TrainedModel:
    """Random weights on one device."""
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    params = jax.jit(lambda: init_params(config, 0), out_shardings=sharding.replicated(mesh))()
    return TrainedModel(config=config, params=params, tokenizer=AnyTokens(), name="", mesh=mesh)


def cached_rate(model: TrainedModel, prompts: np.ndarray, new_tokens: int) -> float:
    """Tokens/s, over all rows."""

    def run() -> None:
        generate_tokens(
            model,
            list(prompts),
            max_new_tokens=new_tokens,
            sampling=GREEDY,
            batch_size=len(prompts),
        )

    run()
    start = time.perf_counter()
    run()
    return len(prompts) * new_tokens / (time.perf_counter() - start)


def uncached_rate(model: TrainedModel, prompts: np.ndarray, new_tokens: int, step: int) -> float:
    """Tokens/s by forward passes over a multiple of `step` tokens."""
    graph, _ = graph_and_abstract_params(model.config)

    @jax.jit
    def next_tokens(params: object, tokens: jax.Array, count: jax.Array) -> jax.Array:
        gpt2 = nnx.merge(graph, params)
        last = jax.lax.dynamic_slice_in_dim(gpt2.hidden(tokens), count - 1, 1, axis=1)
        return jnp.argmax(gpt2.logits(last)[:, 0], axis=-1)

    seconds = []
    for count in range(PROMPT + EVERY // 2, PROMPT + new_tokens, EVERY):
        length = min(-(-count // step) * step, model.config.max_seq_len)
        tokens = np.zeros((len(prompts), length), np.int32)
        tokens[:, :PROMPT] = prompts
        np.asarray(next_tokens(model.params, tokens, np.int32(count)))
        start = time.perf_counter()
        np.asarray(next_tokens(model.params, tokens, np.int32(count)))
        seconds.append(time.perf_counter() - start)
        if length == model.config.max_seq_len and len(seconds) == 2:
            break  # they are all alike
    return len(prompts) / float(np.mean(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--compute-dtype", default="float32")
    parser.add_argument("--output", type=Path, help="also write the rates as JSON")
    arguments = parser.parse_args()
    model = make_model(
        GPT2Config(num_layers=arguments.layers, compute_dtype=arguments.compute_dtype)
    )
    rates = []
    print("batch  tokens/s: cached  uncached, multiples of 64  uncached, whole context")
    for batch_size in map(int, arguments.batch_sizes.split(",")):
        prompts = np.random.default_rng(0).integers(0, 50257, (batch_size, PROMPT), np.int32)
        cached = cached_rate(model, prompts, arguments.new_tokens)
        growing = uncached_rate(model, prompts, arguments.new_tokens, PROMPT)
        whole = uncached_rate(model, prompts, arguments.new_tokens, model.config.max_seq_len)
        print(f"{batch_size:5d}  {cached:16.1f}  {growing:25.2f}  {whole:23.2f}", flush=True)
        rates.append({"batch": batch_size, "cached": cached, "growing": growing, "whole": whole})
    if arguments.output is not None:
        found = {"compute_dtype": arguments.compute_dtype, "tokens_per_sec": rates}
        arguments.output.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
