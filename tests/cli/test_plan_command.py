import gzip
import json
import os

import pytest

from maxmars.cli import main

CONFIG = """
from maxmars.config import EvalConfig, GPT2Config, MarsConfig, PythonSourcesConfig, TrainConfig

def get_config():
    return TrainConfig(
        name="one-layer",
        num_steps=10,
        global_batch_size=16,
        model=GPT2Config(num_layers=1, num_heads=2, embed_dim=16, max_seq_len=16, vocab_size=64),
        optimizer=MarsConfig(variant="shampoo"),
        data=PythonSourcesConfig(),
        eval=EvalConfig(every=5),
    )
"""


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", os.environ["JAX_PLATFORMS"])
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")  # restored, as the others
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return str(path)


@pytest.mark.seconds
def test_a_plan_from_the_command_line(config_file, tmp_path, capsys):
    output, hlo = tmp_path / "plan.json", tmp_path / "step.txt.gz"
    words = [config_file, "--topology", "cpu:8", "--mesh.fsdp", "8", "--max-memory", "1"]
    words += ["--model.remat=full", "--eval.batch-size", "None"]
    main(["plan", *words, "--output", str(output), "--hlo", str(hlo)])
    printed = capsys.readouterr().out
    for part in ("one-layer", "parameters", "optimizer state: mu", "all-to-all", "with padding"):
        assert part in printed
    assert "use: --num-microbatches 1 --model.remat None" in printed
    command = f"maxmars train {config_file} --mesh.fsdp 8 --eval.batch-size None"
    command += " --num-microbatches 1 --model.remat None"
    assert printed.endswith(f"next, on those chips: {command}\n")
    written = json.loads(output.read_text())
    assert written["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1}
    assert written["overrides"] == ["--num-microbatches", "1", "--model.remat", "None"]
    assert written["eval"]["peak_bytes"] > 0
    with gzip.open(hlo, "rt") as file:
        assert file.read(9) == "HloModule"
