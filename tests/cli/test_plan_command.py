import gzip
import json
import os
import shlex

import pytest
from running import write_config

from maxmars.cli import main

CONFIG = """
    name="one-layer",
    num_steps=2,
    num_microbatches=None,
    model=dataclasses.replace(MODEL, num_layers=1),
"""


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", os.environ["JAX_PLATFORMS"])
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")  # restored, as the others
    return str(write_config(tmp_path, CONFIG) / "config.py")


@pytest.mark.seconds
def test_a_plan_from_the_command_line(config_file, tmp_path, capsys):
    write_config(tmp_path, f'{CONFIG} optimizer=MarsConfig(variant="shampoo")')
    output, hlo = tmp_path / "plan.json", tmp_path / "step.txt.gz"
    words = [config_file, "--topology", "cpu:8", "--mesh.fsdp", "8", "--max-memory", "1"]
    words += ["--model.remat=full", "--eval.batch-size", "None"]
    main(["plan", *words, "--output", str(output), "--hlo", str(hlo)])
    printed = capsys.readouterr().out
    for part in ("one-layer", "parameters", "optimizer state: mu", "all-to-all", "with padding"):
        assert part in printed
    written = json.loads(output.read_text())
    assert written["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1}
    assert written["overrides"] == ["--num-microbatches", "1"]
    assert written["eval"]["peak_bytes"] > 0
    with gzip.open(hlo, "rt") as file:
        assert file.read(9) == "HloModule"
    # The last line is a command that works.
    label, first, second, *command = shlex.split(printed.splitlines()[-1])
    assert (label, first) == ("next:", "JAX_PLATFORMS=cpu")
    assert second == "XLA_FLAGS=--xla_force_host_platform_device_count=8"
    options = "--mesh.fsdp 8 --model.remat=full --eval.batch-size None --num-microbatches 1"
    assert command == ["maxmars", "train", config_file, *options.split()]
    command += ["--eval.every", "None", "--workdir", str(tmp_path / "run"), "--num-processes", "1"]
    main(command[1:])
    assert json.loads((tmp_path / "run/summary.json").read_text())["step"] == 2


@pytest.mark.seconds
def test_what_does_not_fit_is_warned_of_and_the_next_command_takes_less(config_file, capsys):
    words = [config_file, "--topology", "cpu:8", "--eval.every", "None"]
    main(["plan", *words, "--max-memory", "1e-6", "--num-microbatches", "1"])
    printed = capsys.readouterr().out
    assert "warning: " in printed
    assert printed.splitlines()[-1].endswith("--num-microbatches 1 --model.remat dots")


@pytest.mark.seconds
def test_a_row_for_each_policy(config_file, tmp_path, capsys):
    output = tmp_path / "policies.json"
    layers = ["--model.num-layers", "3"]
    words = ["--topology", "cpu:8", "--remat", "all", "--model.remat", "full"]
    main(["plan", config_file, *layers, *words, "--output", str(output)])
    _, *rows, following = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["None", "dots", "attention", "full"]
    assert [row.endswith("auto") for row in rows] == [True, False, False, False]
    options = f"{' '.join(layers)} --num-microbatches 1 --model.remat None"
    assert following.endswith(f"train {config_file} {options}")
    written = json.loads(output.read_text())["policies"]
    assert [row["overrides"][-1] for row in written] == ["None", "dots", "attention", "full"]
    peaks = [row["plan"]["memory"]["peak_bytes"] for row in written]
    assert peaks[-1] < peaks[0]
