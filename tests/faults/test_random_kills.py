"""A run that is killed at random times ends as an undisturbed one does, bit by bit."""

import importlib.util
import sys
from pathlib import Path

import jax
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
def test_five_random_kills(monkeypatch, tmp_path, capsys):
    """`python tools/soak.py --kills 100` is the long form."""
    soak = load_tool("soak")
    monkeypatch.setattr(soak, "LONGEST_S", 1.5)
    jax.devices()  # this process has chosen its own; the killed ones need but one
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    good = soak.soak(5, seed=0, out=tmp_path)
    assert good, capsys.readouterr().out
    assert "5 kills: identical to the undisturbed run" in capsys.readouterr().out


@pytest.mark.slow
def test_other_meshes_and_processes_change_neither_state_nor_tokens(tmp_path, capsys):
    """`python tools/resume_on_meshes.py` is the whole table."""
    meshes = load_tool("resume_on_meshes")
    for chain in meshes.CHAINS[1:]:
        assert meshes.check_chain("mars_shampoo", chain, 4, tmp_path), capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(len, meshes.CHAINS[1:]))
    assert all(float(line.split()[-1]) < 1e-3 for line in lines)
