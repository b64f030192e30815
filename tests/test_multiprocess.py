"""Real processes over loopback, through the command line, against one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from maxmars.config import MeshConfig
from tiny import tiny_config

def get_config():
    return tiny_config(mesh=MeshConfig(data=2, fsdp=4))
"""


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start(arguments, devices, cache):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} "
        "--xla_backend_optimization_level=0",
        "MAXMARS_CACHE": str(cache),
    }
    command = [sys.executable, "-m", "maxmars", "train", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process):
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        (row["step"], key): row[key]
        for row in rows
        for key in ("train/loss", "eval/loss")
        if key in row
    }


def test_two_processes_train_as_one_and_one_continues_their_run(tmp_path):
    config = tmp_path / "tiny_config.py"
    config.write_text(CONFIG.format(tests=str(Path(__file__).parent)))
    one, two, cache = tmp_path / "one", tmp_path / "two", tmp_path / "cache"

    finish(start([str(config), "--workdir", str(one)], 8, cache))
    expected = losses(one)
    assert len(expected) == 6 + 3

    shared = [str(config), "--workdir", str(two), "--num-steps", "4", "--schedule.decay-steps", "6"]
    shared += ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    processes = [start([*shared, "--process-id", str(i)], 4, cache) for i in range(2)]
    outputs = [finish(process) for process in processes]
    assert "done: 4 steps" in outputs[0]
    assert "done:" not in outputs[1]  # only the primary speaks
    environment = json.loads((two / "environment.json").read_text())
    assert environment["num_processes"] == 2
    assert environment["num_devices"] == 8

    continued = [str(config), "--workdir", str(two), "--schedule.decay-steps", "6"]
    assert "continuing from step 4" in finish(start(continued, 8, cache))
    ours = losses(two)
    for key in expected:
        assert ours[key] == pytest.approx(expected[key], abs=1e-5), key
