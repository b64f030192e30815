"""Training processes that the tests of faults start, signal and read; their config is theirs."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from xla_flags import xla_flags

from maxmars.cli import main

CONFIG = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from maxmars.config import *
from tiny import ADAMW, MODEL, short_config, tiny_config

TOKENS = Path(__file__).parent / "tokens"

def get_config():
    return {config}
"""


def write_config(folder, arguments, make="tiny_config"):
    """Write the config of `start`, `tiny_config` with these arguments, or `short_config`, whose
    first one is `TOKENS` beside the file; returns the folder."""
    arguments = arguments if make == "tiny_config" else f"TOKENS, {arguments}"
    text = CONFIG.format(tests=str(Path(__file__).parent), config=f"{make}({arguments})")
    (folder / "config.py").write_text(text)
    return folder


def environment(cache, devices=1):
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(devices),
        "MAXMARS_CACHE": str(cache),
        "PYTHONUNBUFFERED": "1",
    }


def start_python(folder, *arguments, devices=1, variables=None):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment(folder / "cache", devices) | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_python(*words, code=0, environment=None, folder=None, timeout_s=240):
    """What a process of Python printed, which must end with this exit code."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def exit_code(*words):
    """Exit code of a `maxmars` command, which runs in this process."""
    try:
        main(list(map(str, words)))
    except SystemExit as stop:
        return stop.code
    return 0


def start(folder, name, *arguments, devices=2, variables=None):
    """`maxmars train` of `<folder>/config.py` in `<folder>/<name>`."""
    command = ["-m", "maxmars", "train", folder / "config.py", "--workdir", folder / name]
    return start_python(folder, *command, *arguments, devices=devices, variables=variables)


def train_here(folder, name, *arguments):
    """What `start` does, in this process, which has eight devices."""
    words = ["train", folder / "config.py", "--workdir", folder / name, "--num-processes", 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAXMARS_CACHE", str(folder / "cache"))
        main([*map(str, [*words, *arguments])])


def start_together(folder, name, count, *arguments, of_each=(), **options):
    """So many processes of one run, with a device each; `of_each` are arguments of theirs alone."""
    shared = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", count, "--process-id"]
    own = [*of_each] or [[]] * count
    return [
        start(folder, name, *arguments, *own[i], *shared, i, **{"devices": 1} | options)
        for i in range(count)
    ]


def finish(process, timeout_s=480):
    """Exit code and output."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, output


def finish_well(processes):
    """Outputs of processes that must end with 0."""
    try:
        results = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for code, output in results:
        assert code == 0, output
    return [output for _, output in results]


def records(workdir):
    """Losses by step and key."""
    path = workdir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    keys = ("train/loss", "eval/loss")
    return {(row["step"], key): row[key] for row in rows for key in keys if key in row}


def hashed_files(workdir, count):
    """The names of the token files that each of so many processes has hashed."""
    texts = [(workdir / "verified" / f"host_{i:03d}.jsonl").read_text() for i in range(count)]
    return [{Path(json.loads(line)["file"]).name for line in text.splitlines()} for text in texts]


def assert_same_losses(one, other):
    """Those of two runs on different meshes, which sum in another order."""
    ours, theirs = records(one), records(other)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert ours[key] == pytest.approx(theirs[key], abs=1e-5), key


def wait_until(condition, process):
    """Wait while the process runs and the condition does not hold."""
    deadline = time.monotonic() + 480
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"it never came to that: {process.communicate()[0]}")


def wait_for(condition, timeout_s, shown=str):
    """Wait until the condition holds; the error, if it never does, has what `shown` returns."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.02)


def wait_for_steps(workdir, count, process):
    path = workdir / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count("train/loss") >= count, process)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def gpus_for_jax(folder, monkeypatch):
    """Let this Python's JAX have a plugin for GPUs, which is never loaded."""
    (folder / "plugin" / "jax_plugins" / "xla_cuda13").mkdir(parents=True, exist_ok=True)
    (folder / "plugin" / "jax_plugins" / "xla_cuda13" / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder / "plugin")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
