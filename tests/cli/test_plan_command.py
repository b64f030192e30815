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
    output = tmp_path / "plan.json"
    words = [config_file, "--topology", "cpu:8", "--mesh.fsdp", "8", "--max-memory", "1"]
    words += ["--model.remat=full", "--eval.batch-size", "None"]
    main(["plan", *words, "--output", str(output)])
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


@pytest.mark.seconds
def test_the_text_of_the_compiled_step(config_file, tmp_path, capsys):
    words = ["plan", config_file, "--topology", "cpu:1", "--eval.every", "None"]
    plain, small = tmp_path / "step.txt", tmp_path / "step.txt.gz"
    main([*words, "--hlo", str(plain)])
    main([*words, "--hlo", str(small)])
    assert "--hlo" not in capsys.readouterr().out
    assert plain.read_text().startswith("HloModule")
    with gzip.open(small, "rt") as file:
        assert file.read(9) == "HloModule"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--topology"),
        (["--topology", "cpu:8", "--max-memory", "chip"], "CPU"),
        (["--topology", "cpu:8", "--max-memory", "much"], "--max-memory much"),
        (["--topology", "cpu:8", "--max-memory", "0"], "--max-memory 0.0"),
        (["--topology", "cpu:8", "--max-memory", "1e400"], "--max-memory inf"),
        (["--topology", "cpu:8", "--num-slices", "2"], "--num-slices 2"),
        (["--topology", "cpu:8", "--mesh.fsdp", "3"], "3 devices"),
        (["--topology", "cpu:8", "--price", "-1"], "--price -1.0"),
    ],
)
def test_what_cannot_be_planned(config_file, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        main(["plan", config_file, *words])
    assert stop.value.code in (1, 2)
    assert message in capsys.readouterr().err
