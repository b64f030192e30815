"""Freed memory stays in the process where JAX computes on CPUs."""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
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
