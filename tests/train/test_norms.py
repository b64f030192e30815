"""Norms of each layer's matrices, `log.norms=layers`: their values, on meshes, in a run's files."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import stopped
from running import write_config
from tiny import MODEL, parameters_of, take_first_step, tiny_config

from maxmars import cli
from maxmars.config import (
    LogConfig,
    MeshConfig,
    MuonConfig,
    ScheduleConfig,
)
from maxmars.optim import MatrixSpec
from maxmars.plan.collectives import collectives, total_bytes
from maxmars.train.metrics import read_metrics
from maxmars.train.norms import named_norms, spectral_norms
from maxmars.train.optimizer import COMPONENTS
from maxmars.train.step import make_train_step

MESHES = {
    "1,1,1": MeshConfig(),
    "1,8,1": MeshConfig(fsdp=8),
    "2,2,2": MeshConfig(data=2, fsdp=2, tensor=2),
}
STACKS = {
    "h.attn.c_attn.kernel": ("h", "attn", "c_attn"),
    "h.attn.c_proj.kernel": ("h", "attn", "c_proj"),
    "h.mlp.c_fc.kernel": ("h", "mlp", "c_fc"),
    "h.mlp.c_proj.kernel": ("h", "mlp", "c_proj"),
}


def config_of(mesh="1,1,1", norms="layers", **changes):
    options = {
        "optimizer": MuonConfig(),
        "num_microbatches": 1,
        "gradient_clip_norm": 0.1,
        "schedule": ScheduleConfig(warmup_steps=0),
        "log": LogConfig(norms=norms),
        "mesh": MESHES[mesh],
    }
    return tiny_config(**(options | changes))


@functools.cache
def one_step(mesh):
    """A first step, and its norms by name."""
    config = config_of(mesh)
    step = take_first_step(config)
    return step, named_norms(step.metrics, parameters_of(config))


def norms_by_name(tree):
    """Norms of the parts, taken from the names of the parameters rather than of their axes."""
    squares = dict.fromkeys(COMPONENTS, 0.0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [entry.key for entry in path]
        part = "embedding" if names[0] in ("wte", "wpe") else "vector"
        if names[-1] == "kernel":
            part = "attention" if "attn" in names else "mlp"
        squares[part] += np.sum(np.square(leaf.astype(np.float64)))
    return {part: np.sqrt(total) for part, total in squares.items()}


@pytest.mark.seconds
@pytest.mark.smoke
def test_norms_of_parts_are_those_of_numpy():
    step, norms = one_step("1,1,1")
    for name, tree, rtol in (
        ("grad", step.grads, 1e-4),
        ("param", jax.tree.map(np.add, step.before, step.update), 1e-5),
        ("update", step.update, 1e-3),
    ):
        for part, expected in norms_by_name(tree).items():
            assert norms[f"train/{name}_norm/{part}"] == pytest.approx(expected, rel=rtol)
    parts = [norms[f"train/grad_norm/{part}"] for part in COMPONENTS]
    assert np.linalg.norm(parts) == pytest.approx(step.metrics["train/grad_norm"], rel=1e-5)
    assert step.metrics["train/grad_clipped"] == (step.metrics["train/grad_norm"] > 0.1)


def matrices(tree, name):
    """The matrices [layers, rows, cols] of a stack."""
    for key in STACKS[name]:
        tree = tree[key]
    rows = 2 if name == "h.attn.c_proj.kernel" else 1
    kernel = tree["kernel"].astype(np.float64)
    return kernel.reshape(MODEL.num_layers, int(np.prod(kernel.shape[1 : 1 + rows])), -1)


def test_norms_of_layers_are_those_of_numpy():
    step, norms = one_step("1,1,1")
    by_layer = {key for key in norms if key.startswith("layers/")}
    assert len(by_layer) == 3 * len(STACKS) * MODEL.num_layers
    for name in STACKS:
        for layer in range(MODEL.num_layers):
            grad, moved = (matrices(tree, name)[layer] for tree in (step.grads, step.update))
            singular = np.linalg.svd(moved, compute_uv=False)[0]
            measured = norms[f"layers/update_spectral_norm/{name}/{layer}"]
            assert 0.9 * singular < measured < (1 + 1e-4) * singular
            for quantity, expected in (
                ("grad_norm", np.linalg.norm(grad)),
                ("update_rms", np.sqrt(np.mean(moved**2))),
            ):
                measured = norms[f"layers/{quantity}/{name}/{layer}"]
                assert measured == pytest.approx(expected, rel=1e-3)


# A mesh on all axes shows what one on an axis does.
@pytest.mark.parametrize("mesh", ["2,2,2", pytest.param("1,8,1", marks=pytest.mark.long)])
def test_norms_of_layers_are_the_same_on_every_mesh(mesh):
    *_, norms = one_step(mesh)
    *_, one = one_step("1,1,1")
    assert norms.keys() == one.keys()
    for name, value in norms.items():
        # Muon's first matrices have singular values near zero, which rounding decides.
        assert value == pytest.approx(one[name], rel=5e-3 if "update" in name else 1e-3), name


@pytest.mark.seconds
def test_only_vectors_travel_for_norms_of_layers():
    def moved(norms):
        config = config_of("2,2,2", norms)
        parameters = parameters_of(config)
        compiled = make_train_step(config, parameters).lower().compile()
        return collectives(compiled, parameters.mesh)

    plain, layers = moved(True), moved("layers")
    for op in {row.op for row in (*plain, *layers)} - {"all-reduce"}:
        assert total_bytes(row for row in layers if row.op == op) == total_bytes(
            row for row in plain if row.op == op
        )
    rows_and_cols = (4 + 2 + 5 + 5) * MODEL.embed_dim * MODEL.num_layers  # of the four stacks
    more = total_bytes(layers) - total_bytes(plain)
    assert 0 < more < 8 * 4 * (rows_and_cols + 3 * 4 * MODEL.num_layers) + 100


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e8])
def test_a_spectral_norm_is_a_close_lower_bound_at_any_scale(scale):
    spec = MatrixSpec(batch=(1,), rows=(0, 2), cols=(3,))
    stack = scale * np.random.default_rng(0).normal(size=(8, 3, 6, 96)).astype(np.float32)
    found = np.ravel(spectral_norms(jnp.asarray(stack), spec))
    flat = np.moveaxis(stack, 1, 0).reshape(3, 48, 96)
    expected = np.linalg.svd(flat, compute_uv=False)[:, 0]
    assert (found > 0.9 * expected).all()
    assert (found < (1 + 1e-5) * expected).all()


def test_the_spectral_norm_of_zeros_is_zero():
    assert spectral_norms(jnp.zeros((4, 6)), MatrixSpec(rows=(0,), cols=(1,))) == 0


SEPARATE = """
import jax, jax.numpy as jnp
from flax import nnx

class Layer(nnx.Module):
    def __init__(self, rngs):
        kernel = 0.1 * jax.random.normal(rngs.params(), (16, 24))
        self.up = nnx.Param(kernel, out_sharding=("embed", "mlp"))
        self.down = nnx.Param(kernel.T, out_sharding=("mlp", "embed"))

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]

class Model(nnx.Module):
    def __init__(self, rngs, vocab_size):
        table = 0.1 * jax.random.normal(rngs.params(), (vocab_size, 16))
        self.output_embedding = nnx.Param(table, out_sharding=("vocab", "embed"))
        self.layers = nnx.List([Layer(rngs) for _ in range(3)])

    def __call__(self, tokens, segment_ids=None, positions=None):
        x = self.output_embedding[...][tokens]
        for layer in self.layers:
            x = layer(x)
        return x

def make(*, rngs, vocab_size, max_seq_len):
    return Model(rngs, vocab_size)
"""


@pytest.mark.seconds
def test_a_run_whose_layers_are_separate_parameters(tmp_path, byte_tokens):
    (tmp_path / "model.py").write_text(SEPARATE)
    model = "model=ModuleConfig(make='model.py:make', vocab_size=257, max_seq_len=16)"
    data = f"data=TokenShardsConfig(path={str(byte_tokens)!r})"
    write_config(tmp_path, f"num_steps=2, optimizer=ADAMW, {model}, {data}")
    run = str(tmp_path / "run")
    words = ["train", str(tmp_path / "config.py"), "--num-processes", "1", "--workdir", run]
    with stopped(2, "'layer'"):
        cli.main([*words, "--log.norms", "layer"])
    cli.main([*words, "--log.norms", "layers", "--eval.every", "None"])
    matrices = {f"layers.{layer}.{name}" for layer in range(3) for name in ("up", "down")}
    quantities = ("grad_norm", "update_rms", "update_spectral_norm")
    for line in (line for line in read_metrics(run) if "train/loss" in line):
        by_layer = {key: value for key, value in line.items() if key.startswith("layers/")}
        assert by_layer.keys() == {f"layers/{q}/{name}" for q in quantities for name in matrices}
        assert all(value >= 0 for value in by_layer.values())
    cli.main(["report", run, "--out", str(tmp_path / "report")])
    assert (tmp_path / "report" / "figures" / "norms_by_layer.png").exists()
