"""Gradients that are sums over tokens: a bfloat16 sum stops growing at 256 times its terms.

Each is compared with the gradient in float32 by the share of it that it holds, the projection.
"""

import argparse
import dataclasses
import functools
import inspect
import typing
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import random_params

from maxmars.config import GPT2Config, MeshConfig, ModuleConfig
from maxmars.distributed.sharding import batch_sharding, make_mesh
from maxmars.model.language_model import make_model, mean_loss
from maxmars.model.parameters import Parameters, init_params
from maxmars.train.step import mean_loss_and_grads

BYTES = GPT2Config(
    num_layers=1,
    num_heads=2,
    embed_dim=64,
    max_seq_len=64,
    vocab_size=256,
    attention="plain",
)
NUM_TOKENS = 2**13
ONE = (("data", 1), ("fsdp", 1), ("tensor", 1))
ROOT = Path(__file__).parents[2]


@functools.cache
def rows_of_text():
    """Rows of real text, of which token 0 is the most frequent, then 1, and so on."""
    text = "".join(Path(module.__file__).read_text() for module in (argparse, inspect, typing))
    rank = {letter: i for i, (letter, _) in enumerate(Counter(text).most_common())}
    length = BYTES.max_seq_len + 1
    rows = [rank[letter] for letter in text[: NUM_TOKENS // BYTES.max_seq_len * length]]
    return np.array(rows, np.int32).reshape(-1, length)


@functools.cache
def gradients(model, mesh, microbatches):
    mesh = make_mesh(MeshConfig(**dict(mesh)), jax.devices()[: np.prod([n for _, n in mesh])])
    tokens = rows_of_text().reshape(microbatches, -1, model.max_seq_len + 1)
    shardings = Parameters(model, mesh).shardings

    def grads(params, tokens):
        def loss(params, tokens):
            return mean_loss(make_model(model, params), tokens)

        rows_independent = isinstance(model, GPT2Config)
        return mean_loss_and_grads(
            loss, params, tokens, shardings, rows_independent=rows_independent
        )[1]

    with jax.set_mesh(mesh):
        params = init_params(model, 0) if isinstance(model, GPT2Config) else random_params(model)
        params = jax.device_put(params, shardings)
        result = jax.jit(grads)(params, jax.device_put(tokens, batch_sharding(mesh)))
    return jax.device_get(result)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        pytest.param({"data": 1}, 1, id="one device"),
        pytest.param({"fsdp": 2, "tensor": 2}, 1, id="fsdp and tensor"),
        pytest.param({"data": 4}, 16, id="microbatches", marks=pytest.mark.slow),
    ],
)
def test_frequent_tokens_and_biases_keep_their_gradients(mesh, microbatches):
    shape = tuple((axis, mesh.get(axis, 1)) for axis in ("data", "fsdp", "tensor"))
    exact = gradients(dataclasses.replace(BYTES, compute_dtype="float32"), ONE, 1)
    result = gradients(BYTES, shape, microbatches)
    pairs = {f"token {i}": [g["wte"]["embedding"][i] for g in (result, exact)] for i in range(5)}
    pairs["positions"] = [g["wpe"]["embedding"] for g in (result, exact)]
    for name in ("c_attn", "c_proj"):
        pairs[f"attn.{name}.bias"] = [g["h"]["attn"][name]["bias"] for g in (result, exact)]
    for name in ("c_fc", "c_proj"):
        pairs[f"mlp.{name}.bias"] = [g["h"]["mlp"][name]["bias"] for g in (result, exact)]
    # The loss does not depend on the bias of keys; that of values is the one that sums most.
    pairs["values"] = [g["h"]["attn"]["c_attn"]["bias"][:, 2] for g in (result, exact)]
    shares = {name: np.vdot(ours, all) / np.vdot(all, all) for name, (ours, all) in pairs.items()}
    assert min(shares.values()) >= 0.99, shares


@pytest.mark.parametrize("data", [1, 2])
def test_a_gradient_in_bfloat16_is_the_mean_of_many_microbatches(data):
    mesh = make_mesh(MeshConfig(data=data), jax.devices()[:data])
    params = {"x": jax.device_put(jnp.ones(2, jnp.bfloat16), NamedSharding(mesh, P()))}
    shardings = jax.tree.map(lambda x: x.sharding, params)
    batch = jax.device_put(np.ones((1024, data)), NamedSharding(mesh, P(None, "data")))

    def loss(params, rows):
        return jnp.mean(rows) * jnp.sum(params["x"])

    with jax.set_mesh(mesh):
        value, grads = jax.jit(
            lambda params, batch: mean_loss_and_grads(
                loss, params, batch, shardings, rows_independent=data > 1
            )
        )(params, batch)
    assert value == 2
    assert grads["x"].dtype == jnp.bfloat16
    assert grads["x"].tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["tools/examples/own_model.py", "tools/examples/track3/model.py"])
def test_the_models_to_copy_from_keep_theirs(file):
    options = {"num_layers": 1, "num_heads": 2, "embed_dim": 64}

    def gradients_in(dtype, mesh):
        make = f"{ROOT / file}:make"
        options["dtype"] = dtype
        model = ModuleConfig(make=make, options=dict(options), vocab_size=256, max_seq_len=64)
        return gradients(model, mesh, 1)

    exact = gradients_in("float32", ONE)
    result = gradients_in("bfloat16", (("data", 1), ("fsdp", 4), ("tensor", 1)))
    pairs = {f"token {i}": [g["embedding"][i] for g in (result, exact)] for i in range(5)}
    for name in exact["blocks"]:
        if name.endswith(("bias", "gain", "norm")) and name != "k_bias":
            pairs[name] = [g["blocks"][name] for g in (result, exact)]
    shares = {name: np.vdot(ours, all) / np.vdot(all, all) for name, (ours, all) in pairs.items()}
    assert min(shares.values()) >= 0.99, shares
