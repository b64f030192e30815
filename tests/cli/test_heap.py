"""Freed memory stays with the process on CPUs: a step takes no new pages from the system."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from running import start_python, wait_for_steps

TAKE_AND_FREE = """
import resource, sys
if sys.argv[1] == "nothing":  # whatever this machine has
    sys.modules |= dict.fromkeys(("libtpu", "jax_plugins"))
from maxmars.cli.memory import keep_freed_memory
keep_freed_memory()
bytearray(b"x") * 80_000_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    bytearray(b"x") * 80_000_000  # 20,000 pages, or 40 huge ones
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc's heap is set"
)


@pytest.mark.parametrize(
    ("installed", "platforms", "stays"),
    [
        ("nothing", "", True),
        ("libtpu", "", False),
        ("libtpu", "tpu,cpu", False),
        ("libtpu", "cpu", True),
    ],
)
def test_freed_memory_stays_where_jax_computes_on_cpus(installed, platforms, stays, tmp_path):
    (tmp_path / f"{installed}.py").touch()
    paths = (str(tmp_path), *sys.path)
    env = os.environ | {"JAX_PLATFORMS": platforms, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", TAKE_AND_FREE, installed]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 100) == stays


@pytest.mark.slow
def test_a_step_takes_no_new_pages(tmp_path):
    words = ["train", "quickstart", "--num-steps", "100", "--workdir", tmp_path / "run"]
    words += ["--model.num-layers", "2", "--model.scan-unroll", "2", "--eval.every", "None"]
    words += ["--log.every", "1", "--num-processes", "1"]
    with start_python(tmp_path, "-m", "maxmars", *words) as process:

        def taken(steps):
            """Steps so far, after these, and pages that the process took from the system."""
            wait_for_steps(tmp_path / "run", steps, process)
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
            return sum("train/loss" in row for row in rows), int(fields[7])

        (few, before), (many, after) = taken(8), taken(16)  # the first steps need new ones
        process.kill()
    assert (after - before) / (many - few) < 3000  # 9,000 where freed memory goes back
