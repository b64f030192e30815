"""Tokens/s of generation: as text streams, without streaming, and by full forward passes.

    python tools/bench_generate.py [--batch-sizes 1,8] [--new-tokens 128] [--layers 12]
                                   [--compute-dtype float32] [--repeats 5] [--target RUN]
                                   [--output F.json]

GPT-2 small with random weights on one device, or the model TARGET; prompts of 64 random tokens,
greedy. All ways take turns; shown are medians over the repeats, with the lowest and the highest.
Without a cache, each new token takes a forward pass over what is seen: over the whole context,
which is one program, or over what is there rounded up to a multiple of 64. These passes are timed
at every sixteenth token, once. Compilation is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxmars.config import GPT2Config, MeshConfig
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.distributed import sharding
from maxmars.eval.generate import GREEDY, generate_tokens, stream_tokens
from maxmars.eval.trained_model import TrainedModel, load
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


def cached_rates(
    model: TrainedModel, prompts: np.ndarray, new_tokens: int, repeats: int
) -> list[list[float]]:
    """Tokens/s over all rows in each repeat: without streaming, streaming as `maxmars generate`
    does, and streaming one token at a time."""
    options = {"max_new_tokens": new_tokens, "sampling": GREEDY, "batch_size": len(prompts)}

    def stream(every_s: float) -> None:
        for _ in stream_tokens(model, list(prompts), every_s=every_s, **options):
            pass

    ways = [
        lambda: generate_tokens(model, list(prompts), **options),
        lambda: stream(0.05),
        lambda: stream(0.0),
    ]
    rates: list[list[float]] = [[] for _ in ways]
    ways[0]()  # compiles the programs of all
    for _ in range(repeats):
        for way, found in zip(ways, rates, strict=True):
            start = time.perf_counter()
            way()
            found.append(len(prompts) * new_tokens / (time.perf_counter() - start))
    return rates


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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--target")
    parser.add_argument("--output", type=Path, help="also write the rates as JSON")
    arguments = parser.parse_args()
    config = GPT2Config(num_layers=arguments.layers, compute_dtype=arguments.compute_dtype)
    model = load(arguments.target) if arguments.target else make_model(config)
    found = []
    names = ("batch size", "at once", "streaming", "one by one", "64s, no cache", "whole")
    print("tokens/s\n{:>10}{:>28}{:>28}{:>28}{:>16}{:>10}".format(*names))
    for batch_size in map(int, arguments.batch_sizes.split(",")):
        shape = (batch_size, PROMPT)
        prompts = np.random.default_rng(0).integers(0, model.tokenizer.vocab_size, shape, np.int32)
        cached = cached_rates(model, prompts, arguments.new_tokens, arguments.repeats)
        words = [
            f"{statistics.median(rates):,.1f} ({min(rates):,.1f}-{max(rates):,.1f})"
            for rates in cached
        ]
        growing = uncached_rate(model, prompts, arguments.new_tokens, PROMPT)
        whole = uncached_rate(model, prompts, arguments.new_tokens, model.config.max_seq_len)
        row = "".join(f"{text:>28}" for text in words)
        print(f"{batch_size:10d}{row}{growing:16.2f}{whole:10.2f}", flush=True)
        at_once, streaming, one_by_one = map(statistics.median, cached)
        rates = {"cached": at_once, "streaming": streaming, "one_by_one": one_by_one}
        found.append({"batch": batch_size, **rates, "growing": growing, "whole": whole})
    if arguments.output is not None:
        fields = {"compute_dtype": model.config.compute_dtype, "tokens_per_sec": found}
        arguments.output.write_text(json.dumps(fields, indent=2))


if __name__ == "__main__":
    main()
