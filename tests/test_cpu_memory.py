"""Memory of programs that compute on CPUs."""

import os
import subprocess
import sys

import pytest

from maxmars.cpu_memory import keep_freed_memory

PROGRAM = """
import resource, sys
from maxmars.cpu_memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
import jax, jax.numpy as jnp

@jax.jit
def sums(x):  # with temporaries of 16 MiB
    return jnp.cumsum(jnp.cumsum(x, 0), 1).max()

x = jnp.ones((2048, 2048))
for _ in range(5):  # until the heap has grown as large as it will
    sums(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    sums(x).block_until_ready()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 3)
"""


def page_faults(word: str, **environment: str) -> int:
    """Pages that the system had to find for a run of the program."""
    others = ("MALLOC_", "XLA_")  # the tests' own devices, of which each has its temporaries
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, word],
        env=kept | {"JAX_PLATFORMS": "cpu"} | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_temporaries_are_not_given_back() -> None:
    given_back = page_faults("leave")
    assert given_back > 1000
    assert page_faults("keep") < given_back / 4
    # What the environment says about malloc counts.
    assert page_faults("keep", MALLOC_MMAP_THRESHOLD_="65536") > 1000


@pytest.mark.parametrize("variable", [("JAX_PLATFORMS", "tpu,cpu"), ("MALLOC_ARENA_MAX", "2")])
def test_others_habits_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    def load(name: object) -> None:
        raise AssertionError(f"the C library {name} was loaded")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", load)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(AssertionError):
        keep_freed_memory()
    monkeypatch.setenv(*variable)
    keep_freed_memory()
