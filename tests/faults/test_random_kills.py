"""Runs that signals disturb, or that change their mesh, end as undisturbed ones do."""

from pathlib import Path

import pytest
from running import run_python

TOOL = Path(__file__).resolve().parents[2] / "tools" / "faults.py"

pytestmark = pytest.mark.multiprocess


def last_line(*words):
    return run_python(TOOL, *words, timeout_s=None).stdout.splitlines()[-1]


@pytest.mark.slow
def test_random_signals(tmp_path):
    """`python tools/faults.py kills` is the long form: 100 signals and five optimizers."""
    words = ["kills", "--kills", "2", "--optimizers", "mars", "--out", tmp_path / "kills"]
    assert last_line(*words).endswith("5 lives: no faults")


@pytest.mark.long
def test_other_meshes_and_processes_change_neither_state_nor_tokens(tmp_path):
    """`python tools/faults.py meshes` is the whole table."""
    words = ["meshes", "--optimizers", "mars_shampoo", "--steps", "4", "--chains", "1"]
    assert last_line(*words, "--out", tmp_path / "meshes") == "3 lives: no faults"
