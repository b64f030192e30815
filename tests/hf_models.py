"""Small models, Hugging Face directories of them, and Hugging Face's GPT-2 in plain NumPy."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file
from tiny import tiny_config
from trees import mesh_of

from maxmars.checkpoint import Checkpointer
from maxmars.config import GPT2Config
from maxmars.data.tokenizer import save
from maxmars.model.language_model import make_model
from maxmars.model.parameters import Parameters

BASE = GPT2Config(
    num_layers=3,
    num_heads=2,
    embed_dim=16,
    max_seq_len=12,
    vocab_size=61,
    compute_dtype="float32",
)
VARIANTS = {
    "biased": BASE,
    "bias_free": dataclasses.replace(BASE, use_bias=False),
    "inverse_scaled": dataclasses.replace(BASE, scale_attn_by_inverse_layer_idx=True),
    "padded": dataclasses.replace(BASE, vocab_pad_multiple=8),
}
TOKENS = np.random.default_rng(5).integers(0, 61, (2, 12)).astype(np.int32)
BYTES = dataclasses.replace(BASE, vocab_size=257)
"""A model that fits the tokenizer of bytes."""


def random_params(config, seed=0):
    """Parameters far from those at initialisation, so that each of them shows in the logits."""
    noise = np.random.default_rng(seed)

    def leaf(path, abstract):
        values = noise.standard_normal(abstract.shape).astype(np.float32)
        return 1 + 0.2 * values if path[-1].key == "scale" else 0.3 * values

    return jax.tree_util.tree_map_with_path(leaf, Parameters(config).abstract)


@functools.cache
def forward(config):
    return jax.jit(lambda p, t: make_model(config, p)(t))


def logits(config, params, tokens=TOKENS):
    return np.asarray(forward(config)(params, tokens))[..., : config.vocab_size]


def make_run(workdir, config, params_of_step, tokenizer):
    """A run's directory with a checkpoint for each step of a dict, and a tokenizer or None."""
    mesh = mesh_of()
    config = tiny_config(model=config)
    with Checkpointer(workdir / "checkpoints", config, mesh=mesh) as checkpointer:
        for step, params in params_of_step.items():
            state = {"params": jax.tree.map(jax.numpy.asarray, params)}
            checkpointer.save(step, state, data_position=0)
    if tokenizer is not None:
        save(tokenizer, workdir / "tokenizer")
    return workdir


def hf_fields(config):
    """The part of a config.json that matters, as Hugging Face writes it."""
    return {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.embed_dim,
        "n_positions": config.max_seq_len,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
    }


def hf_arrays(config, seed=0):
    """Random weights in Hugging Face's names and shapes."""
    noise, width = np.random.default_rng(seed), config.embed_dim
    shapes = {"wte.weight": (config.vocab_size, width), "wpe.weight": (config.max_seq_len, width)}
    for i in range(config.num_layers):
        for name, outputs, inputs in (
            ("attn.c_attn", 3 * width, width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", 4 * width, width),
            ("mlp.c_proj", width, 4 * width),
        ):
            shapes[f"h.{i}.{name}.weight"] = (inputs, outputs)
            shapes[f"h.{i}.{name}.bias"] = (outputs,)
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{name}.{kind}": (width,) for kind in ("weight", "bias")}
    shapes |= {f"ln_f.{kind}": (width,) for kind in ("weight", "bias")}
    return {
        name: (0.3 * noise.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_hf(directory, fields, arrays, prefix=""):
    """A Hugging Face directory, written by the safetensors library."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    named = {f"{prefix}{name}": array for name, array in arrays.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def read_hf(directory):
    """The fields and arrays (without prefix) of a Hugging Face directory."""
    fields = json.loads((directory / "config.json").read_text())
    arrays = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        arrays |= load_file(path)
    return fields, {name.removeprefix("transformer."): array for name, array in arrays.items()}


def plain_hf_logits(fields, arrays, tokens, start=0):
    """GPT-2 from Hugging Face's arrays in float64 NumPy, one sequence [T] -> [T, vocabulary], whose
    first token is at position `start`."""
    w = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    width, heads = fields["n_embd"], fields["n_head"]
    length = len(tokens)

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(
            x.var(-1, keepdims=True) + fields["layer_norm_epsilon"]
        )
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][start : start + length]
    for i in range(fields["n_layer"]):
        q, k, v = np.split(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1)
        mixed = []
        for columns in np.split(np.arange(width), heads):
            scores = q[:, columns] @ k[:, columns].T / np.sqrt(width // heads)
            if fields["scale_attn_by_inverse_layer_idx"]:
                scores /= i + 1
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v[:, columns])
        x = x + linear(np.concatenate(mixed, -1), f"h.{i}.attn.c_proj")
        y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T
