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
    # The one kill of this seed comes while the run trains, in the middle of a file operation.
    words = ["kills", "--kills", "1", "--seed", "50", "--optimizers", "mars"]
    assert last_line(*words, "--out", tmp_path / "kills").endswith("4 lives: no faults")


@pytest.mark.long
def test_other_meshes_and_processes_change_neither_state_nor_tokens(tmp_path):
    """`python tools/faults.py meshes` is the whole table."""
    words = ["meshes", "--optimizers", "mars_shampoo", "--steps", "4", "--chains", "1"]
    assert last_line(*words, "--out", tmp_path / "meshes") == "3 lives: no faults"
