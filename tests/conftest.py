"""Eight fake CPU devices, and fixtures that tests share."""

import atexit
import gc
import hashlib
import importlib.metadata
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from fake_hub import ENDPOINT
from xla_flags import xla_flags

from maxmars.cli.memory import keep_freed_memory

keep_freed_memory()  # as every command does, before JAX is there
ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
GIVEN = os.environ.get("XLA_FLAGS", "")
IS_CPU = os.environ["JAX_PLATFORMS"] == "cpu"  # on a GPU, `-m gpu`, programs are the users'
ADDED = [flag for flag in xla_flags(8).split() if IS_CPU and flag.split("=")[0] not in GIVEN]
os.environ["XLA_FLAGS"] = " ".join([GIVEN, *ADDED]).strip()


# Many tests compile the same small programs: each is compiled once, and kept for the next session.
# JAX writes entries without a lock, so each worker of xdist has a folder of its own; other versions
# of jaxlib and other processors must not meet each other's programs.
def _compilation_cache() -> Path:
    cpu = hashlib.sha256(
        Path("/proc/cpuinfo").read_bytes().partition(b"flags")[2].partition(b"\n")[0]
    )
    programs = f"{importlib.metadata.version('jaxlib')}-{cpu.hexdigest()[:12]}"
    root = Path(os.environ.get("MAXMARS_TEST_CACHE", ROOT / ".pytest_cache" / "programs"))
    return root / programs / os.environ.get("PYTEST_XDIST_WORKER", "main")


os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_compilation_cache())
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
if "jax" in sys.modules:  # with --jaxtyping-packages, and it reads variables when it is imported
    config = sys.modules["jax"].config
    config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    config.update("jax_persistent_cache_min_compile_time_secs", 0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# huggingface_hub reads these when it is imported. Its transfers by xet cannot be imitated.
os.environ["HF_ENDPOINT"], os.environ["HF_HUB_DISABLE_XET"] = ENDPOINT, "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="maxmars-hub-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
    os.environ.pop(name, None)

# In the background of a shell Ctrl-C is ignored, and would be by every process that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# JAX keeps many small objects of its programs, and Python would go through all of them again and
# again to find unused ones: that took a fifth of the tests' time.
gc.set_threshold(100_000, 20, 20)


def pytest_collection_finish():
    gc.freeze()  # modules stay


def pytest_addoption(parser):
    parser.addoption(
        "--update-goldens", action="store_true", help="rewrite tests/goldens instead of comparing"
    )


@pytest.fixture(scope="module")
def uncached():
    """For tests that compile for chips that are not there, whose programs JAX writes into its cache
    but cannot read back."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    # JAX looks at the option when it compiles first, and again after a reset.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """The folder with the larger reference data; a test that needs it skips where it is absent."""
    path = Path(os.environ.get("MAXMARS_REFERENCE_DIR", ROOT.parent / "shared"))
    if not (path / "reference").is_dir():
        pytest.skip(f"no reference data in {path}; set MAXMARS_REFERENCE_DIR")
    return path


@pytest.fixture
def tiktoken_cache(reference_dir, monkeypatch):
    """The vocabulary of GPT-2, without a network."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(reference_dir / "data" / "tiktoken"))


@pytest.fixture(scope="session", params=["shipped", "larger"])
def official_dir(request) -> Path:
    """The folder whose `reference` has numbers of the official code: those of the repository, made
    by `tools/make_reference.py`, and the larger set."""
    if request.param == "shipped":
        return ROOT / "tests"
    return request.getfixturevalue("reference_dir")


@pytest.fixture
def x64():
    """64-bit JAX within a test."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture
def own_checks_only():
    """Without the type checks of every call that tests may run with, which come first."""
    import jaxtyping

    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def without_figures(monkeypatch):
    """Reports without figures, whose drawing takes longer than a tiny run."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # Python's way to say: not installed


@pytest.fixture(scope="session")
def byte_tokens(tmp_path_factory) -> Path:
    """A directory of byte tokens that `maxmars data prepare` made of 40 kB of generated text."""
    from maxmars.cli import main

    folder = tmp_path_factory.mktemp("byte_tokens")
    draw = random.Random(0)
    words = ["the", "model", "reads", "a", "short", "text", "and", "learns", "every", "word"]
    words += ["of", "it"]
    lines = (" ".join(draw.choices(words, k=12)) + ".\n" for _ in range(700))
    (folder / "text.txt").write_text("".join(lines))
    main(["data", "prepare", str(folder / "text.txt"), str(folder / "tokens"), "--workers", "0"])
    return folder / "tokens"


@pytest.fixture(scope="session")
def finished_run(byte_tokens, tmp_path_factory) -> Path:
    """The workdir of a trained run, for tests that read one; copy it before you change it.

    A GPT-2 of two layers after 6 steps of MARS on `byte_tokens`, on a mesh of eight devices, with
    checkpoints at steps 2, 4 and 6 and evaluations at 0, 3 and 6.
    """
    from maxmars.cli import main

    workdir = tmp_path_factory.mktemp("finished_run") / "run"
    options = """--num-processes 1 --num-steps 6 --global-batch-size 8 --schedule.warmup-steps 2
        --model.num-layers 2 --model.num-heads 2 --model.embed-dim 32 --model.max-seq-len 32
        --model.scan-unroll 1 --model.compute-dtype float32
        --eval.every 3 --eval.num-windows 16 --eval.batch-size 8
        --checkpoint.every 2 --checkpoint.keep-last 9 --log.every 1"""
    main(["train", f"quickstart:data={byte_tokens}", "--workdir", str(workdir), *options.split()])
    return workdir
