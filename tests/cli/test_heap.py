"""Freed memory stays with the process on CPUs: a step takes no new pages from the system."""

import os
import platform
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
SMALL = ["--eval.every", "None", "--log.every", "1", "--num-processes", "1"]

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


def new_pages(tmp_path, steps):
    """Pages that a whole run of so many steps took from the system."""
    words = ["train", "quickstart", "--num-steps", f"{steps}"]
    words += ["--workdir", f"{tmp_path / str(steps)}", *SMALL]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}  # a user's one device
    environment["JAX_PLATFORMS"] = "cpu"
    process = subprocess.Popen(
        [sys.executable, "-m", "maxmars", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_minflt


@pytest.mark.slow
def test_a_step_takes_no_new_pages(tmp_path):
    few, many = (new_pages(tmp_path, steps) for steps in (12, 42))
    assert (many - few) / 30 < 3000  # 18,000 where freed memory goes back
