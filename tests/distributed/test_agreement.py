"""Two processes of one run that differ: each is told before the first step, and nothing is written.

Of data they may have copies, which each of them compares with the checksums.

By default one of them is tried through the command line; the others are slow.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from running import finish, free_port
from token_directories import write_shards
from xla_flags import xla_flags

import maxmars

pytestmark = pytest.mark.multiprocess

CONFIG = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
from maxmars.config import EvalConfig, OptaxConfig, TokenShardsConfig
from tiny import tiny_config

def get_config():
    return tiny_config(
        data=TokenShardsConfig(path={tokens!r}),
        eval=EvalConfig(every=None),
        optimizer=OptaxConfig(make="own.py:make", learning_rate=1e-3),
    )
"""
OWN = """
import optax

def make(learning_rate, *, matrix_specs, mesh):
    return optax.sgd(learning_rate)
"""


def write_run(folder, tokens):
    folder.mkdir()
    tests = str(Path(__file__).parents[1])
    (folder / "config.py").write_text(CONFIG.format(tests=tests, tokens=str(tokens)))
    (folder / "own.py").write_text(OWN)
    return folder


def write_tokens(folder, seed):
    stream = np.random.default_rng(seed).integers(0, 200, 4000)
    write_shards(folder, stream[:3000], stream[3000:], vocab_size=257)
    return folder


def other_learning_rate(_):
    return {}, ["--optimizer.learning-rate", "0.002"], "optimizer.learning_rate is 0.002 and not"


def other_seed(_):
    return {}, ["--seed", "7"], "seed is 7 and not 0"


def other_number_of_steps(_):
    return {}, ["--num-steps", "9"], "num_steps is 9 and not 6"


def other_batch_size(_):
    return {}, ["--global-batch-size", "32"], "global_batch_size is 32 and not 16"


def other_model(_):
    return {}, ["--model.num-layers", "2"], "model.num_layers is 2 and not 3"


def other_tokens(folder):
    tokens = write_tokens(folder / "other", seed=1)
    return {}, ["--data.path", str(tokens)], "process 1 has other data"


def weights_to_start_from(folder):
    return {}, ["--init-from", str(folder)], "--init-from is given and not absent"


def resume_overrides(_):
    return {}, ["--resume-overrides", "seed"], "--resume-overrides is seed and not None"


def other_text_of_the_own_optimizer(folder):
    path = write_run(folder / "edited", folder / "tokens") / "own.py"
    path.write_text(OWN.replace("sgd", "adam"))
    return {}, [str(path.parent / "config.py")], "optimizer.make.sha256 is"


def other_text_of_maxmars(folder):
    copy = folder / "code" / "maxmars"
    shutil.copytree(Path(maxmars.__file__).parent, copy)
    with (copy / "train" / "step.py").open("a") as file:
        file.write("# edited on one host\n")
    return {"PYTHONPATH": str(copy.parent)}, [], "the text of maxmars is"


def other_version_of_optax(folder):
    information = folder / "site" / "optax-9.9.9.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 9.9.9\n")
    path = os.pathsep.join([str(information.parent), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path}, [], "optax is 9.9.9 and not"


def other_precision(_):
    return {"JAX_ENABLE_X64": "1"}, [], "jax_enable_x64 is True and not False"


KINDS = [
    other_learning_rate,
    other_seed,
    other_number_of_steps,
    other_batch_size,
    other_model,
    other_tokens,
    weights_to_start_from,
    resume_overrides,
    other_text_of_the_own_optimizer,
    other_text_of_maxmars,
    other_version_of_optax,
    other_precision,
]


def start_both(folder, *variants):
    """Two processes of a run in `folder / "workdir"`, each with its variables and arguments."""
    port = free_port()
    processes = []
    for index, (more, arguments) in enumerate(variants):
        command = [sys.executable, "-m", "maxmars", "train", *arguments]
        command += ["--workdir", str(folder / "workdir"), "--num-processes", "2"]
        command += ["--process-id", str(index), "--coordinator", f"127.0.0.1:{port}"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(1)}
        environment |= {"PYTHONSAFEPATH": "1", "MAXMARS_CACHE": str(folder / "cache")} | more
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


@pytest.mark.seconds
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k is other_tokens else pytest.mark.slow) for k in KINDS],
    ids=lambda kind: kind.__name__,
)
def test_processes_that_differ_are_told_before_the_first_step(kind, tmp_path):
    config = write_run(tmp_path / "run", write_tokens(tmp_path / "tokens", seed=0)) / "config.py"
    variables, words, expected = kind(tmp_path)
    if not words or not words[0].endswith(".py"):
        words = [str(config), *words]
    processes = start_both(tmp_path, ({}, [str(config)]), (variables, words))
    for code, output in map(finish, processes):
        lines = [line for line in output.splitlines() if "process 1" in line]
        assert code == 1, output
        assert len(lines) == 1, output
        assert expected in lines[0]
        assert "Traceback" not in output
    assert not (tmp_path / "workdir").exists()


@pytest.mark.slow
@pytest.mark.parametrize("has_copy", [False, True])
def test_each_process_hashes_a_copy_of_its_own_and_both_divide_what_both_see(has_copy, tmp_path):
    config = write_run(tmp_path / "run", write_tokens(tmp_path / "tokens", seed=0)) / "config.py"
    names = {path.name for path in (tmp_path / "tokens").glob("*.bin")}
    words = [str(config)]
    if has_copy:
        shutil.copytree(tmp_path / "tokens", tmp_path / "copy")  # with the times of the files
        words += ["--data.path", str(tmp_path / "copy")]
    for process in start_both(tmp_path, ({}, [str(config)]), ({}, words)):
        code, output = finish(process)
        assert code == 0, output
    hashed = []
    for index in range(2):
        text = (tmp_path / "workdir" / "verified" / f"host_{index:03d}.jsonl").read_text()
        hashed.append({Path(json.loads(line)["file"]).name for line in text.splitlines()})
    assert hashed[0] | hashed[1] == names
    assert hashed[0] & hashed[1] == (names if has_copy else set())


@pytest.mark.slow
def test_a_damaged_copy_of_one_process_stops_both(tmp_path):
    config = write_run(tmp_path / "run", write_tokens(tmp_path / "tokens", seed=0)) / "config.py"
    shutil.copytree(tmp_path / "tokens", tmp_path / "copy")
    for path in (tmp_path / "copy").glob("*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    words = [str(config), "--data.path", str(tmp_path / "copy")]
    for process in start_both(tmp_path, ({}, [str(config)]), ({}, words)):
        code, output = finish(process)
        assert code == 1, output
        assert "checksum" in output
