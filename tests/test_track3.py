"""The config of modded-nanogpt's Track 3: its model, batch, schedule and rule, and short runs."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from token_directories import write_llm_c

from maxmars import cli
from maxmars.config import load_config
from maxmars.model import cross_entropy
from maxmars.model.language_model import make_model, mean_loss
from maxmars.model.parameters import Parameters, init_params
from maxmars.train.optimizer import make_optimizer, make_schedule

TRACK3 = Path(__file__).parents[1] / "tools" / "examples" / "track3" / "track3.py"
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("soap", "mars_shampoo", "mars_m", "nadamw")
]


def tiny(model):
    options = {"num_layers": 2, "num_heads": 2, "embed_dim": 32, "dtype": "float32"}
    return dataclasses.replace(model, options=options, vocab_size=320, max_seq_len=16)


def random_params(model):
    """Weights far from the initial ones, many of which are zero."""
    params = init_params(model, 0)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    return jax.tree.map(lambda p: p + 0.3 * jax.random.normal(next(keys), p.shape), params)


def test_it_is_the_published_benchmark():
    config = load_config(str(TRACK3))
    assert Parameters(config.model).count == 162_354_816  # of the published program's model
    assert config.tokens_per_step == 524_288
    assert config.num_steps == 3250
    assert config.eval.num_windows * config.model.max_seq_len == 10_485_760
    shape, step = make_schedule(config), np.arange(0, 3250, 25)
    published = np.where(step < 0.3 * 3250, 1.0, (1 - step / 3250) / 0.7)
    np.testing.assert_allclose([shape(s) for s in step], published, rtol=1e-5)
    tables = 50304 * 768
    expected = 6 * (162_354_816 - tables) + 12 * 12 * 768 * 1024
    assert Parameters(config.model).flops_per_token == expected


def plain_logits(params, tokens):
    """The published formulas, one layer and one head after the other, in NumPy."""
    blocks, width = params["blocks"], params["embedding"].shape[1]
    length, (layers, _, heads, size) = len(tokens), blocks["q"].shape

    def norm(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.finfo(np.float32).eps)

    def rotated(x):
        turning = size // 4
        frequency = np.concatenate([1024.0 ** -np.linspace(0, 1, turning), np.zeros(turning)])
        angle = np.arange(length)[:, None] * frequency
        a, b = x[:, : size // 2], x[:, size // 2 :]
        turned = [a * np.cos(angle) + b * np.sin(angle), -a * np.sin(angle) + b * np.cos(angle)]
        return np.concatenate(turned, axis=1)

    x = norm(params["embedding"][tokens]) * params["embedding_gain"]
    for i in range(layers):
        layer = {name: value[i] for name, value in blocks.items()}
        y, attended = norm(x) * layer["attention_gain"], np.zeros_like(x)
        for h in range(heads):
            q, k, v = (y @ layer[n][:, h] + layer[f"{n}_bias"][h] for n in "qkv")
            logits = 0.12 * rotated(norm(q)) @ rotated(norm(k)).T
            weights = np.exp(logits) * np.tri(length)
            attended += weights / weights.sum(1, keepdims=True) @ v @ layer["attention_out"][h]
        x = x + attended + layer["attention_out_bias"]
        y = norm(x) * layer["mlp_gain"]
        y = np.maximum(y @ layer["mlp_in"] + layer["mlp_in_bias"], 0) ** 2
        x = x + y @ layer["mlp_out"] + layer["mlp_out_bias"]
    logits = norm(x) * params["head_gain"] @ params["head"].T + params["head_bias"]
    assert width == x.shape[1]
    return 15 * logits / np.sqrt(logits**2 + 15**2)


@pytest.mark.seconds
def test_the_model_computes_the_published_formulas():
    model = tiny(load_config(str(TRACK3)).model)
    params = random_params(model)
    tokens = np.random.default_rng(0).integers(0, 320, 17)
    wide = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    expected = plain_logits(wide, tokens[:-1])
    logits = make_model(model, params)(tokens[None, :-1])[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)
    loss = mean_loss(make_model(model, params), jnp.asarray(tokens)[None])
    losses = cross_entropy.cross_entropy(jnp.asarray(expected), jnp.asarray(tokens[1:]))
    assert float(loss) == pytest.approx(float(losses.mean()), rel=1e-5)


@pytest.mark.seconds
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon", "muonh", "mars", *SLOW])
def test_each_optimizer_moves_every_parameter_at_its_rate(optimizer):
    config = load_config(f"{TRACK3}:optimizer={optimizer},start=nonzero")
    model, rate = tiny(config.model), config.optimizer.learning_rate
    params = random_params(model)
    tx = make_optimizer(config.optimizer, Parameters(model), jnp.float32(rate))
    signs, update = jax.tree.map(jnp.sign, params), jax.jit(tx.update)
    _, state = update(signs, jax.jit(tx.init)(params), signs)  # in which SOAP only measures
    updates, _ = update(signs, state, signs)
    moved = {name: float(jnp.abs(updates[name]).max()) for name in ("embedding", "head")}
    assert moved["embedding"] == pytest.approx(0.7, rel=0.01)
    assert moved["head"] == pytest.approx(0.004, rel=0.01)
    assert float(jnp.abs(updates["blocks"]["q_bias"]).max()) == pytest.approx(0.015, rel=0.01)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(updates))


def test_hyperball_needs_a_start_that_is_not_zero():
    with refused(ValueError, "muonh", "start=nonzero"):
        load_config(f"{TRACK3}:optimizer=muonh")


TINY = """
    --seeds 1 --num-steps 2 --learning-rates 6e-3 --budget 1 --finalists 1
    --global-batch-size 16 --num-microbatches 2 --model.max-seq-len 16 --eval.num-windows 8
    --model.options.num-layers 1 --model.options.num-heads 2 --model.options.embed-dim 16
    --model.options.dtype float32
"""


def test_contenders_begin_alike(tmp_path, capsys):
    tokens = tmp_path / "tokens"
    for name in ("train_000001", "val_000000"):
        write_llm_c(tokens / f"fineweb_{name}.bin", np.arange(400) % 320)
    words = ["--optimizers", "mars_m", "muonh", "--data.path", str(tokens), "--dry-run"]
    words += [*TINY.split(), "--workdir", str(tmp_path / "runs")]
    cli.main(["compare", f"{TRACK3}:start=nonzero", *words])
    assert {"mars_m:", "muonh:"} <= set(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_an_entry_is_made_and_verified(tmp_path, capsys):
    """Of a few tokens in files that are named and built as the published ones."""
    tokens, workdir = tmp_path / "tokens", tmp_path / "runs"
    rng = np.random.default_rng(0)
    for name in ("train_000001", "train_000002", "val_000000"):
        write_llm_c(tokens / f"fineweb_{name}.bin", rng.integers(0, 320, 400))
    words = ["--optimizers", "muonh", "--data.path", str(tokens), "--workdir", str(workdir)]
    cli.main(["compare", f"{TRACK3}:start=nonzero", *TINY.split(), *words])
    assert {path.name for path in (workdir / "sources").rglob("*.py")} == {"track3.py", "model.py"}
    assert "parameters" in (workdir / "report.md").read_text()
    cli.main(["compare", "verify", str(workdir), "--data", str(tokens)])
    assert "muonh, seed 0: confirmed, same digest" in capsys.readouterr().out
    cli.main(["report", str(workdir), "--out", str(tmp_path / "entry")])
    curves = (tmp_path / "entry" / "curves.csv").read_text().splitlines()
    assert {line.count("muonh") > 0 for line in curves[1:]} == {True}
