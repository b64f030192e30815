"""Runs that signals disturb, or that change their mesh, end as undisturbed ones do."""

import importlib.util
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
    """`python tools/soak.py` is the long form: 100 signals and five optimizers."""
    command = [sys.executable, TOOLS / "soak.py", "--out", tmp_path / "soak"]
    options = ["--kills", "4", "--optimizers", "mars"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    assert result.stdout.splitlines()[-1] == "4 kills, 8 lives: no faults"


@pytest.mark.slow
def test_other_meshes_and_processes_change_neither_state_nor_tokens(tmp_path, capsys):
    """`python tools/resume_on_meshes.py` is the whole table."""
    meshes = load_tool("resume_on_meshes")
    for chain in meshes.CHAINS[1:]:
        assert meshes.check_chain("mars_shampoo", chain, 4, tmp_path), capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(len, meshes.CHAINS[1:]))
    assert all(float(line.split()[-1]) < 1e-3 for line in lines)
