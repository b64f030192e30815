"""Compiled programs beside a run; in processes of their own, since JAX's settings are global."""

import os
from pathlib import Path

import jax
import pytest
from damage import halve
from running import run_python

from maxmars.train import compile_cache

PROGRAM = """
import sys
from pathlib import Path
import jax
from maxmars.train import compile_cache

jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.jit(lambda x: x + 1)(1.0)  # JAX has looked at its setting
platform, *workdir = sys.argv[1:]
compile_cache.keep_in_cache(platform)
if workdir:
    compile_cache.keep_beside(Path(*workdir), platform)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
for factor in (2, 3):
    jax.jit(lambda x: x * factor)(1.0)
print(hits.count("/jax/compilation_cache/cache_hits"))
"""


def start(cache, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"MAXMARS_CACHE": str(cache)}
    return int(run_python("-c", PROGRAM, *arguments, environment=environment).stdout)


@pytest.mark.slow
def test_the_second_start_finds_the_programs_of_the_first(tmp_path):
    """Beside its directory, as the user's cache cannot be written."""
    (tmp_path / "file").touch()
    assert start(tmp_path / "file", "tpu", tmp_path / "one") == 0
    assert (tmp_path / ".jax_cache").is_dir()
    assert start(tmp_path / "file", "tpu", tmp_path / "two") == 2


@pytest.mark.slow
def test_a_second_command_finds_the_programs_of_the_first_also_on_cpus(tmp_path):
    """Those of the second, as both programs of the first were damaged."""
    cache = tmp_path / "new" / "cache"
    assert start(cache, "cpu") == 0
    halved, emptied = cache.rglob("*-cache")
    halve(halved)
    emptied.write_bytes(b"")
    assert start(cache, "cpu") == 0
    assert start(cache, "cpu") == 2


@pytest.mark.parametrize("workdir", ["run", "gs://bucket/run"])
def test_nothing_is_set_on_cpus_and_where_jax_was_told(tmp_path, workdir):
    told = jax.config.jax_compilation_cache_dir  # by tests/conftest.py
    compile_cache.keep_beside(tmp_path / workdir, "cpu")
    compile_cache.keep_beside(Path(workdir), "gpu")
    compile_cache.keep_in_cache("cpu")
    assert jax.config.jax_compilation_cache_dir == told
