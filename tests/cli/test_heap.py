"""Freed memory stays with the process on CPUs: a step takes no new pages from the system."""

import importlib.util
import os
import platform
import subprocess
import sys

import pytest

SMALL = ["--eval.every", "None", "--log.every", "1", "--num-processes", "1"]


def new_pages(tmp_path, steps):
    """Pages that a whole run of so many steps took from the system."""
    words = ["train", "quickstart", "--num-steps", f"{steps}"]
    words += ["--workdir", f"{tmp_path / str(steps)}", *SMALL]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}  # a user's one device
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
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is set")
@pytest.mark.skipif(
    any(map(importlib.util.find_spec, ("libtpu", "jax_plugins"))),
    reason="beside other devices nothing is set",
)
def test_a_step_takes_no_new_pages(tmp_path):
    few, many = (new_pages(tmp_path, steps) for steps in (12, 42))
    assert (many - few) / 30 < 3000  # 18,000 where freed memory goes back
