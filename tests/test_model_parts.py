"""Norms and learning rates of the parts of the model, against plain NumPy."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from tiny import ADAMW, MODEL, tiny_config

from maxmars import sharding
from maxmars.config import LogConfig, MeshConfig, ScheduleConfig
from maxmars.model import graph_and_abstract_params, mean_loss
from maxmars.model_parts import PARTS, learning_rate_scales, named_norms, parameter_parts
from maxmars.optimizer_config import MarsConfig
from maxmars.train_step import init_train_state, make_train_step

ONE_DEVICE = MeshConfig(data=1)


def one_step(config):
    """Parameters before, gradient, update and metrics of the first step."""
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    step, state = make_train_step(config, mesh), init_train_state(config, mesh)
    shape = step.abstract_tokens.shape
    tokens = np.random.default_rng(0).integers(0, 257, shape).astype(np.int32)
    before = jax.device_get(state.params)
    graph, _ = graph_and_abstract_params(config.model)
    loss = jax.jit(jax.grad(lambda p, tokens: mean_loss(nnx.merge(graph, p), tokens)))
    grads = loss(before, tokens[0])
    state, metrics = step(state, jax.device_put(tokens, step.abstract_tokens.sharding))
    update = jax.tree.map(np.subtract, jax.device_get(state.params), before)
    return before, jax.device_get(grads), update, jax.device_get(metrics)


def norms_by_name(tree):
    """Norms of the parts, taken from the names of the parameters rather than of their axes."""
    squares = dict.fromkeys(PARTS, 0.0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [entry.key for entry in path]
        part = "embedding" if names[0] in ("wte", "wpe") else "vector"
        if names[-1] == "kernel":
            part = "attention" if "attn" in names else "mlp"
        squares[part] += np.sum(np.square(leaf.astype(np.float64)))
    return {part: np.sqrt(total) for part, total in squares.items()}


@pytest.mark.smoke
def test_norms_of_a_step_are_those_of_numpy():
    config = tiny_config(
        optimizer=ADAMW,
        mesh=ONE_DEVICE,
        num_microbatches=1,
        gradient_clip_norm=0.5,
        schedule=ScheduleConfig(warmup_steps=0),
    )
    before, grads, update, metrics = one_step(config)
    norms = named_norms(metrics["train/norms"])
    for name, tree, rtol in (
        ("grad", grads, 1e-4),
        ("param", jax.tree.map(np.add, before, update), 1e-5),
        ("update", update, 1e-3),
    ):
        for part, expected in norms_by_name(tree).items():
            assert norms[f"train/{name}_norm/{part}"] == pytest.approx(expected, rel=rtol)
    parts = [norms[f"train/grad_norm/{part}"] for part in PARTS]
    assert np.linalg.norm(parts) == pytest.approx(metrics["train/grad_norm"], rel=1e-5)
    assert metrics["train/grad_clipped"] == (metrics["train/grad_norm"] > 0.5)


def test_without_norms_the_program_has_none():
    config = tiny_config(mesh=ONE_DEVICE)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    sizes = {}
    for norms in (True, False):
        step = make_train_step(dataclasses.replace(config, log=LogConfig(norms=norms)), mesh)
        (_, metrics), lowered = step.trace().out_info, step.lower()
        assert ("train/norms" in metrics) is norms
        sizes[norms] = lowered.as_text().count("\n")
    assert sizes[False] < sizes[True]


def test_parts_and_rates_follow_from_the_axes():
    parts = parameter_parts(MODEL)
    assert set(jax.tree.leaves(parts)) == set(PARTS)
    assert parts["h"]["attn"]["c_proj"] == {"kernel": "attention", "bias": "vector"}
    assert parts["h"]["mlp"]["c_fc"]["kernel"] == "mlp"
    assert parts["ln_f"]["scale"] == "vector"
    assert learning_rate_scales(ADAMW, MODEL) == {}
    mars = MarsConfig(variant="shampoo", vector_learning_rate_scale=0.25)
    assert learning_rate_scales(mars, MODEL) == {"embedding": 0.25, "vector": 0.25}
