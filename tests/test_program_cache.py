"""Compiled programs beside a run: used again to the same bits, never trusted, never in the way."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tiny import short_config

from maxmars.checkpoint import load_digests
from maxmars.config import to_dict
from maxmars.program_cache import ProgramCache, default_directory

# A run as on an accelerator: there the cache is on.
PROGRAM = """
import json, sys
from pathlib import Path
import jax
import maxmars.run
from maxmars.config import from_dict
from maxmars.train import train

maxmars.run.default_directory = lambda workdir, platform: default(workdir, "tpu")
from maxmars.program_cache import default_directory as default
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
train(from_dict(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])
names = ("cache_hits", "cache_misses")
print(json.dumps({n: events.count(f"/jax/compilation_cache/{n}") for n in names}))
"""


@pytest.fixture(autouse=True)
def the_cache_of_the_tests():
    """JAX goes on with the cache that all tests share."""
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def run(config, workdir, **environment):
    """Train in a process of its own; hits and misses of the cache."""
    file = workdir.parent / f"{workdir.name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(to_dict(config)))
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | environment
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file), str(workdir)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def losses(workdir):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    keys = ("train/loss", "train/grad_norm", "eval/loss")
    return [(row["step"], key, row[key]) for row in rows for key in keys if key in row]


def test_entries_that_are_not_as_they_were_sealed_are_deleted(tmp_path):
    directory, said = tmp_path / ".jax_cache", []
    with ProgramCache(directory, said.append) as cache:
        (directory / "a-cache").write_text("whole")
        (directory / "b-cache").write_text("whole")
        cache.seal()
        (directory / "a-cache").write_text("hole")
        (directory / "b-cache.sha256").unlink()  # as when killed while it was written
        (directory / "c-cache").write_text("whole")
        ProgramCache(directory, said.append).__enter__()
        assert list(directory.iterdir()) == []
        (directory / "d-cache").write_text("whole")
    with ProgramCache(directory, said.append):
        assert {path.name for path in directory.iterdir()} == {"d-cache", "d-cache.sha256"}
    assert said == []


@pytest.mark.slow
def test_the_second_start_has_the_same_bits_and_damage_is_found(tmp_path):
    config = short_config(tmp_path / "tokens")
    runs, cache = tmp_path / "runs", tmp_path / "runs" / ".jax_cache"
    # Two processes fill it at the same time: one may warn of an entry that the other still writes.
    with ThreadPoolExecutor(2) as pool:
        (counts, text), _ = pool.map(lambda name: run(config, runs / name), ("one", "other"))
    assert counts["cache_misses"] > 0
    assert "first step after" in text
    assert cache.stat().st_mode & 0o777 == 0o700
    entries = sorted(cache.glob("*-cache"))
    assert len(list(cache.glob("*.sha256"))) == len(entries) > 2
    large, cut, *_ = sorted(entries, key=lambda path: -path.stat().st_size)
    data = bytearray(large.read_bytes())
    data[len(data) // 2] ^= 1
    large.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-100])
    again, _ = run(config, runs / "again")
    assert again == {"cache_hits": len(entries) - 2, "cache_misses": 2}
    warm, _ = run(config, runs / "warm")
    assert warm == {"cache_hits": len(entries), "cache_misses": 0}
    for name in ("other", "again", "warm"):
        assert losses(runs / name) == losses(runs / "one")
        assert load_digests(runs / name / "checkpoints") == load_digests(runs / "one/checkpoints")


def test_where_it_is(tmp_path):
    assert default_directory(tmp_path / "run", "tpu") is None  # the tests have one already
    jax.config.update("jax_compilation_cache_dir", None)
    assert default_directory(tmp_path / "run", "gpu") == tmp_path / ".jax_cache"
    assert default_directory(tmp_path / "run", "cpu") is None
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert default_directory(tmp_path / "run", "gpu") is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path):
    directory, said = tmp_path / ".jax_cache", []
    directory.mkdir()
    directory.chmod(0o777)
    (directory / "planted-cache").write_text("code")
    with ProgramCache(directory, said.append) as cache:
        cache.seal()
    assert said == [
        f"compiled programs are not kept: others can write to {directory}, and what it holds would "
        "be executed."
    ]
    assert [path.name for path in directory.iterdir()] == ["planted-cache"]


def test_a_directory_that_cannot_be_made_stops_nothing(tmp_path):
    said = []
    (tmp_path / "file").touch()
    with ProgramCache(tmp_path / "file" / ".jax_cache", said.append):
        pass
    assert len(said) == 1
    assert said[0].startswith("compiled programs are not kept: ")
