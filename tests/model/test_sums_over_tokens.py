"""Gradients that are sums over tokens: a bfloat16 sum stops growing at 256 times its terms.

Each is compared with the gradient in float32 by the share of it that it holds, the projection.
"""

import argparse
import dataclasses
import functools
import inspect
import re
import typing
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from maxmars.config import GPT2Config, MeshConfig
from maxmars.distributed.sharding import batch_sharding, make_mesh
from maxmars.model.language_model import init_params, make_model, mean_loss, param_shardings
from maxmars.train.step import mean_loss_and_grads

BYTES = GPT2Config(
    num_layers=2,
    num_heads=2,
    embed_dim=64,
    max_seq_len=64,
    vocab_size=256,
    attention="plain",
)
LARGE_VOCABULARY = dataclasses.replace(BYTES, max_seq_len=256, vocab_size=50304)
NUM_TOKENS = 2**14


@functools.cache
def tokens_of(model):
    """Rows of real text, of which token 0 is the most frequent, then 1, and so on."""
    text = "".join(Path(module.__file__).read_text() for module in (argparse, inspect, typing))
    words = list(text) if model is BYTES else re.findall(r"\w+|\s+|.", text)
    rank = {word: i for i, (word, _) in enumerate(Counter(words).most_common())}
    length = model.max_seq_len + 1
    rows = np.array([rank[word] for word in words[: NUM_TOKENS // model.max_seq_len * length]])
    return rows.reshape(-1, length).astype(np.int32)


@functools.cache
def gradients(model, dtype, mesh, microbatches):
    mesh = make_mesh(MeshConfig(**dict(mesh)), jax.devices()[: np.prod([n for _, n in mesh])])
    tokens = tokens_of(model).reshape(microbatches, -1, model.max_seq_len + 1)
    model = dataclasses.replace(model, compute_dtype=dtype)
    shardings = param_shardings(model, mesh)

    def grads(params, tokens):
        loss = lambda params, tokens: mean_loss(make_model(model, params), tokens)  # noqa: E731
        return mean_loss_and_grads(loss, params, tokens, shardings, rows_apart=True)[1]

    with jax.set_mesh(mesh):
        params = jax.jit(lambda: init_params(model, 0), out_shardings=shardings)()
        found = jax.jit(grads)(params, jax.device_put(tokens, batch_sharding(mesh)))
    return jax.device_get(found)


@pytest.mark.parametrize("microbatches", [1, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 4}, {"fsdp": 4}, {"tensor": 2}], ids=str)
@pytest.mark.parametrize(
    "model",
    [BYTES, pytest.param(LARGE_VOCABULARY, marks=pytest.mark.slow)],
    ids=["bytes", "words"],
)
def test_frequent_tokens_and_biases_keep_their_gradients(model, mesh, microbatches):
    one = (("data", 1), ("fsdp", 1), ("tensor", 1))
    shape = tuple((axis, mesh.get(axis, 1)) for axis in ("data", "fsdp", "tensor"))
    exact = gradients(model, "float32", one, 1)
    found = gradients(model, "bfloat16", shape, microbatches)
    pairs = {f"token {i}": [g["wte"]["embedding"][i] for g in (found, exact)] for i in range(5)}
    pairs["positions"] = [g["wpe"]["embedding"] for g in (found, exact)]
    for name in ("c_attn", "c_proj"):
        pairs[f"attn.{name}.bias"] = [g["h"]["attn"][name]["bias"] for g in (found, exact)]
    for name in ("c_fc", "c_proj"):
        pairs[f"mlp.{name}.bias"] = [g["h"]["mlp"][name]["bias"] for g in (found, exact)]
    # The loss does not depend on the bias of keys; that of values is the one that sums most.
    pairs["values"] = [g["h"]["attn"]["c_attn"]["bias"][:, 2] for g in (found, exact)]
    shares = {name: np.vdot(ours, all) / np.vdot(all, all) for name, (ours, all) in pairs.items()}
    assert min(shares.values()) >= 0.99, shares
