"""Eight fake CPU devices, and fixtures that tests share."""

import os
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Level 0 of LLVM halves the time of compiling; XLA's own passes, which choose the collectives and
# the memory, stay as they are.
FLAGS = ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0")
GIVEN = os.environ.get("XLA_FLAGS", "")
ADDED = [flag for flag in FLAGS if flag.split("=")[0] not in GIVEN]
os.environ["XLA_FLAGS"] = " ".join([GIVEN, *ADDED]).strip()

# Many tests compile the same small programs: each is compiled once a session.
_CACHE = tempfile.TemporaryDirectory(prefix="maxmars-jax-cache-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser):
    parser.addoption(
        "--update-goldens", action="store_true", help="rewrite tests/goldens instead of comparing"
    )


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """The folder with the larger reference data; a test that needs it skips where it is absent."""
    path = Path(os.environ.get("MAXMARS_REFERENCE_DIR", ROOT.parent / "shared"))
    if not (path / "reference").is_dir():
        pytest.skip(f"no reference data in {path}; set MAXMARS_REFERENCE_DIR")
    return path


@pytest.fixture
def x64():
    """64-bit JAX within a test."""
    import jax

    with jax.enable_x64(True):
        yield
