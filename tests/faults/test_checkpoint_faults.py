"""Damaged files, full disks, read-only directories, two writers: in real processes where it counts.

`tests/checkpoint` has the same damage one kind at a time, with the reason that each gives.
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from running import environment, free_port
from tiny import tiny_config

from maxmars.checkpoint import Checkpointer, list_steps
from maxmars.checkpoint.lock import acquire
from maxmars.config import CheckpointConfig, MeshConfig
from maxmars.distributed.sharding import make_mesh
from maxmars.model.parameters import Parameters
from maxmars.train.step import init_train_state, make_train_step

TESTS = Path(__file__).parents[1]
WORKER = Path(__file__).parent / "checkpoint_worker.py"
CONFIG = tiny_config(checkpoint=CheckpointConfig(keep_last=9))

TRAIN_CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from maxmars.config import CheckpointConfig, EvalConfig
from tiny import tiny_config

def get_config():
    checkpoint = CheckpointConfig(every=1, keep_last=9)
    return tiny_config(checkpoint=checkpoint, eval=EvalConfig(every=None))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def train_config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "faults.py"
    path.write_text(TRAIN_CONFIG.format(tests=str(TESTS)))
    return path


def train(config, workdir, cache, *arguments):
    command = [sys.executable, "-m", "maxmars", "train", str(config), "--workdir", str(workdir)]
    return subprocess.run(
        [*command, *arguments], env=environment(cache), capture_output=True, text=True, timeout=240
    )


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def files_of(path):
    return sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size)


@pytest.mark.slow
def test_training_goes_on_before_every_kind_of_damage(train_config, tmp_path, cache):
    """The newest checkpoint is an empty directory, the next lacks a file, and so on."""
    workdir = tmp_path / "run"
    first = train(train_config, workdir, cache, "--num-steps", "5", "--schedule.decay-steps", "8")
    assert first.returncode == 0, first.stderr
    checkpoints = workdir / "checkpoints"
    assert list_steps(checkpoints) == [1, 2, 3, 4, 5]
    # Some of what Orbax writes is read by nothing, a different part each time: many bits, not one.
    for path in checkpoints.glob("2/state/ocdbt.process_0/d/*"):
        for number in range(64):
            flip(path, random.Random(number))
    largest = {
        s: max(files_of(checkpoints / str(s)), key=lambda p: p.stat().st_size) for s in (3, 4)
    }
    largest[3].write_bytes(largest[3].read_bytes()[: largest[3].stat().st_size // 2])
    largest[4].unlink()
    shutil.rmtree(checkpoints / "5")
    (checkpoints / "5").mkdir()

    second = train(train_config, workdir, cache, "--num-steps", "2", "--schedule.decay-steps", "8")
    assert second.returncode == 0, second.stderr
    assert "continuing from step 1" in second.stdout
    assert list_steps(checkpoints) == [1, 2]
    for step in (2, 3, 4, 5):
        assert (checkpoints / f"{step}.damaged").is_dir()
        assert re.search(rf"checkpoints/{step} skipped: \w+", second.stdout)
        assert (
            f"damaged checkpoint {step} is now {checkpoints / f'{step}.damaged'}" in second.stdout
        )
    assert "Traceback" not in second.stderr


@pytest.mark.slow
def test_a_second_run_in_a_workdir_is_refused_until_the_first_is_killed(
    train_config, tmp_path, cache
):
    workdir = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, str(WORKER), "hold", str(workdir / "checkpoints")],
        env=environment(cache),
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        try:
            assert holder.stdout.readline() == "holding\n"
            refused = train(train_config, workdir, cache, "--num-steps", "1")
            assert refused.returncode == 1
            assert (
                f"is being written by process {holder.pid} on {socket.gethostname()}"
                in refused.stderr
            )
            assert "Traceback" not in refused.stderr
            assert {path.name for path in workdir.iterdir()} == {"checkpoints"}
        finally:
            holder.send_signal(signal.SIGKILL)
    allowed = train(train_config, workdir, cache, "--num-steps", "1")
    assert allowed.returncode == 0, allowed.stderr


def namespaces():
    """A command in whose process one may mount, root or not; None where the kernel refuses."""
    for flags in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        command = ["unshare", *flags]
        test = [*command, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"]
        if shutil.which("unshare") and subprocess.run(test, capture_output=True).returncode == 0:
            return command
    return None


@pytest.fixture(scope="module")
def shortages(tmp_path_factory, cache):
    """What one process reports of each shortage; `fill` is missing where nobody may mount."""
    directory, wrapper, modes = tmp_path_factory.mktemp("shortages"), [], ["limit", "descriptors"]
    unshare = namespaces()
    if unshare is not None:
        modes.insert(0, "fill")
        (directory / "fill").mkdir()
        mount = f'mount -t tmpfs -o size=8m tmpfs {directory / "fill"} && exec "$@"'
        wrapper = [*unshare, "sh", "-c", mount, "sh"]
    result = subprocess.run(
        [*wrapper, sys.executable, str(WORKER), "run_out_of", str(directory), *modes],
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    reports = map(json.loads, result.stdout.splitlines()[-len(modes) :])
    return dict(zip(modes, reports, strict=True))


@pytest.mark.parametrize(
    ("shortage", "reason"),
    [("limit", "(File too large|FILE_SIZE|EFBIG)"), ("fill", "No space left")],
)
def test_a_full_disk_costs_no_checkpoint(shortages, shortage, reason):
    if shortage not in shortages:
        pytest.skip("this system lets nobody mount a tmpfs, not even in a user namespace")
    result = shortages[shortage]
    assert len(result["errors"]) >= 2  # the save, and the next one
    for error in result["errors"]:
        assert re.fullmatch(
            rf"a checkpoint could not be written to (\S+) \(\1/\S+: {reason}\S*( on device)?\); .*",
            error,
        )
    assert result["after"] == {"step": 1, "sound": True}
    assert result["again"] == [1, 2]  # once there is space
    assert result["left"] == [".lock", "1", "2"]


def test_a_reader_in_trouble_takes_no_older_checkpoint(shortages):
    result = shortages["descriptors"]
    assert result["limits"][-1] == 2
    assert any("Too many open files" in str(outcome) for outcome in result["limits"])
    assert 1 not in result["limits"]
    assert not any("no checkpoint in" in str(outcome) for outcome in result["limits"])
    assert result["left"] == [".lock", "1", "2"]


# Takes from root, and all that it starts, the right to write where permissions forbid it.
OBEY = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
def test_a_read_only_directory_is_an_error_of_one_line(train_config, tmp_path, cache):
    workdir = tmp_path / "run"
    workdir.mkdir()
    workdir.chmod(0o555)
    try:
        arguments = ["-m", "maxmars", "train", str(train_config), "--workdir", str(workdir)]
        result = subprocess.run(
            [sys.executable, "-c", OBEY, *arguments],
            env=environment(cache),
            capture_output=True,
            text=True,
            timeout=240,
        )
    finally:
        workdir.chmod(0o755)
    assert result.returncode == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"maxmars: error: {workdir}")
    assert line.endswith("Permission denied")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
def test_damage_that_one_process_sees_is_damage_to_all(tmp_path, cache):
    port = free_port()
    owned = acquire(epath.Path(tmp_path / "owned"))
    command = [sys.executable, str(WORKER), "pair"]
    processes = [
        subprocess.Popen(
            [*command, str(tmp_path / "checkpoints"), str(port), str(i)],
            env=environment(cache, devices=2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    results = []
    for process in processes:
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 0, errors
        results.append(json.loads(output.splitlines()[-1]))
    owned.release()
    assert f"is being written by process {os.getpid()} on" in results[0]["refused"]
    assert re.search(r"process 0 could not open .*owned .*; it says why", results[1]["refused"])
    assert results[0]["due"] == results[1]["due"] == [60, 120, 180]
    assert [r["step"] for r in results] == [1, 1]
    assert [r["sound"] for r in results] == [True, True]
    assert "another process" in results[0]["skipped"][0][1]
    assert "state cannot be read" in results[1]["skipped"][0][1]
    assert results[0]["left"] == [".lock", "1", "2.damaged"]
    assert results[0]["saved"] == results[1]["saved"] == [1, 3]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """Checkpoints 1 and 2 of a tiny GPT-2 under MARS, on one device."""
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    states = {1: init_train_state(CONFIG, Parameters(CONFIG.model, mesh))}
    states[2] = jax.tree.map(lambda x: x * 3, states[1])
    with Checkpointer(directory, CONFIG, mesh=mesh) as checkpointer:
        for step, state in states.items():
            checkpointer.save(step, state, data_position=8 * step, metrics={"eval/loss": 1.0})
    return directory, mesh, states


@pytest.mark.slow
def test_every_flipped_bit_is_caught_or_harmless(two_checkpoints, tmp_path):
    directory, mesh, states = two_checkpoints
    directory = Path(shutil.copytree(directory, tmp_path / "checkpoints"))
    want = {
        step: [np.asarray(x).tobytes() for x in jax.tree.leaves(s)] for step, s in states.items()
    }
    abstract = make_train_step(CONFIG, Parameters(CONFIG.model, mesh)).abstract_state
    newest, rng, caught = directory / "2", random.Random(100), {}
    for _ in range(100):
        path = rng.choice(files_of(newest))
        content = path.read_bytes()
        flip(path, rng)
        with Checkpointer(directory, CONFIG, mesh=mesh) as checkpointer:
            got = checkpointer.restore(abstract)
            step = got.checkpoint.step
        assert [np.asarray(x).tobytes() for x in jax.tree.leaves(got.state)] == want[step]
        assert got.checkpoint.data_position == 8 * step
        caught.setdefault(path.relative_to(newest).as_posix(), []).append(step == 1)
        if step == 1:
            (directory / "2.damaged").rename(newest)
        path.write_bytes(content)
    with Checkpointer(directory, CONFIG, mesh=mesh) as checkpointer:
        assert checkpointer.restore(abstract).checkpoint.step == 2
    for name, outcomes in sorted(caught.items()):
        print(f"{name}: {sum(outcomes)} caught, {len(outcomes) - sum(outcomes)} harmless")
    assert any(any(outcomes) for outcomes in caught.values())
