"""A damaged file of a run or of its tokens loses nothing, is told, and stops no sound resume."""

import subprocess
import sys

import pytest
from running import environment
from test_random_kills import TOOLS

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_twelve_damaged_files(tmp_path):
    """`python tools/damage.py` is the long form."""
    command = [sys.executable, str(TOOLS / "damage.py"), "--damages", "12"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        env=environment(tmp_path / "cache"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 damages in " in done.stdout
    assert done.stdout.rstrip().endswith(": no fault")
