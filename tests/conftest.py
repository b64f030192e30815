"""Eight fake CPU devices, and fixtures that tests share."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = flags.strip()

import pytest

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
