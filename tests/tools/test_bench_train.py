"""The benchmark of whole steps, run as a user runs it on a tiny model."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, random_params
from xla_flags import xla_flags

from maxmars.config import to_dict
from maxmars.model.language_model import make_model, token_losses
from maxmars.model.parameters import Parameters

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--model.num-layers", "2", "--model.embed-dim", "32", "--model.max-seq-len", "16"]


@pytest.fixture
def bench(monkeypatch):
    """The command, here; its contestants are processes."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setenv("XLA_FLAGS", xla_flags(1))
    import bench_train

    def run(*arguments):
        words = [*arguments, *TINY, "--rounds", "2", "--steps", "2", "--random-tokens"]
        monkeypatch.setattr(sys, "argv", ["bench_train.py", *words])
        bench_train.main()

    return run


@pytest.mark.slow
def test_the_table_and_the_json_of_one_config(bench, capsys, tmp_path):
    output = tmp_path / "result.json"
    bench(str(ROOT / "configs" / "quickstart.py"), "--output", str(output), "--one-at-a-time")
    printed = capsys.readouterr().out
    for name in ("tokens/s", "backward, %", "host, ms", "compile, s", "time to first step, s"):
        assert name in printed
    (result,) = json.loads(output.read_text())["results"]
    assert result["config"]["model"]["num_layers"] == 2
    assert result["recompiles"] == 0
    assert sum(result["phases"].values()) == pytest.approx(1)
    assert result["phases"]["forward"] > 0
    assert result["phases"]["optimizer"] > 0
    assert 0 < result["compile_time"] < result["first_step_time"] < result["time_to_first_step"]
    assert result["tokens_per_sec"]["min"] <= result["tokens_per_sec"]["median"]
    assert result["tokens_per_sec"]["max"] * result["step_time"]["min"] == pytest.approx(8 * 16)
    assert 0 < len(result["longest"]) <= 10
    assert sum(operation["share"] for operation in result["longest"]) <= 1
    assert result["plan"]["memory"]["peak_bytes"] > result["plan"]["memory"]["parameters_bytes"]
    assert result["environment"]["platform"] == "cpu"
    assert "mfu" not in result  # a CPU's peak is not known


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is here")
def test_without_pytorch_the_peer_is_refused(bench):
    with pytest.raises(SystemExit, match="\\[peers\\]'`"):
        bench(str(ROOT / "configs" / "quickstart.py"), "--peer", "torch")


@pytest.mark.peers
def test_pytorchs_model_and_loss_are_ours(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from torch_gpt2 import GPT2

    config = dataclasses.replace(MODEL, vocab_pad_multiple=1)
    params = random_params(config)
    theirs = GPT2(to_dict(config), config.padded_vocab_size)
    assert sum(p.numel() for p in theirs.parameters()) == Parameters(config).count
    copy_params(torch, params, theirs)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(2, config.max_seq_len + 1))
    ours = float(
        token_losses(make_model(config, jax.device_put(params)), jnp.asarray(tokens)).mean()
    )
    given = torch.tensor(tokens)
    loss = theirs(given[:, :-1], given[:, 1:]).detach()
    assert float(loss) == pytest.approx(ours, abs=1e-5)


def copy_params(torch, params, model):
    """Our parameters into the PyTorch model, whose linear layers are stored [out, in]."""

    def fill(layer, ours, index=None):
        ours = {name: x if index is None else x[index] for name, x in ours.items()}
        if "kernel" in ours:
            outputs, inputs = layer.weight.shape
            ours = {"weight": ours["kernel"].reshape(inputs, outputs).T, "bias": ours["bias"]}
        ours = {{"scale": "weight", "embedding": "weight"}.get(k, k): x for k, x in ours.items()}
        with torch.no_grad():
            for name, value in ours.items():
                parameter = getattr(layer, name)
                parameter.copy_(torch.tensor(value.reshape(parameter.shape)))

    h = params["h"]
    fill(model.wte, params["wte"])
    fill(model.wpe, params["wpe"])
    fill(model.ln_f, params["ln_f"])
    for i, block in enumerate(model.h):
        fill(block.ln_1, h["ln_1"], i)
        fill(block.qkv, h["attn"]["c_attn"], i)
        fill(block.proj, h["attn"]["c_proj"], i)
        fill(block.ln_2, h["ln_2"], i)
        fill(block.up, h["mlp"]["c_fc"], i)
        fill(block.down, h["mlp"]["c_proj"], i)
