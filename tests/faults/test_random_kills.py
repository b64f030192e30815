"""Runs that signals disturb, or that change their mesh, end as undisturbed ones do."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"

pytestmark = pytest.mark.multiprocess


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_random_signals(tmp_path):
    """`python tools/faults.py kills` is the long form: 100 signals and five optimizers."""
    command = [sys.executable, TOOLS / "faults.py", "kills", "--out", tmp_path / "kills"]
    options = ["--kills", "4", "--optimizers", "mars"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    assert result.stdout.splitlines()[-1].endswith("7 lives: no faults")


@pytest.mark.slow
def test_other_meshes_and_processes_change_neither_state_nor_tokens(tmp_path, capsys):
    """`python tools/faults.py meshes` is the whole table."""
    faults = load_tool("faults")
    (tmp_path / "config.py").write_text(faults.CONFIG)
    for chain in faults.CHAINS[1:]:
        assert faults.check_chain("mars_shampoo", chain, 4, tmp_path), capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(len, faults.CHAINS[1:]))
    assert all(float(line.split()[-1]) < 1e-3 for line in lines)


@pytest.mark.slow
def test_one_kill_of_any_run(tmp_path):
    """What `tools/gpu_acceptance.py` does with a real run."""
    (tmp_path / "config.py").write_text(load_tool("faults").CONFIG)
    command = [sys.executable, TOOLS / "faults.py", "once", tmp_path / "config.py"]
    command += [
        "--steps",
        "400",
        "--workdir",
        tmp_path / "run",
        "--output",
        tmp_path / "found.json",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["compared_steps"] > 0
    assert found["different_steps"] == []
    assert found["audit"] == "one trajectory"
    assert [point["step"] for point in found["losses"]] == [100, 200, 300, 400]
