"""Two processes of one run that differ: each is told before the first step, and nothing is written.

Of data they may have copies, which each of them compares with the checksums.
"""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from damage import flip
from running import finish, free_port, start_python, write_config
from token_directories import write_shards

import maxmars
from maxmars.distributed.exits import OWN_ERROR

pytestmark = pytest.mark.multiprocess

CONFIG = """
    num_steps=2,
    num_microbatches=1,
    model=dataclasses.replace(MODEL, num_layers=1),
    eval=EvalConfig(every=None),
    checkpoint=CheckpointConfig(every=None),
    optimizer=OptaxConfig(make="own.py:make", learning_rate=1e-3),
"""
OWN = """
import optax

def make(learning_rate, *, matrix_specs, mesh):
    return optax.sgd(learning_rate)
"""


def write_run(folder, tokens):
    folder.mkdir()
    write_config(folder, f"data=TokenShardsConfig(path={str(tokens)!r}), {CONFIG}")
    (folder / "own.py").write_text(OWN)
    return folder


def write_tokens(folder, seed):
    stream = np.random.default_rng(seed).integers(0, 200, 4000)
    write_shards(folder, stream[:3000], stream[3000:], vocab_size=257)
    return folder


def other_options(folder):
    words = ["--optimizer.learning-rate", "0.002", "--global-batch-size", "32"]
    words += ["--init-from", str(folder), "--resume-overrides", "seed"]
    told = ["optimizer.learning_rate is 0.002 and not", "global_batch_size is 32 and not"]
    return {}, words, [*told, "--init-from is given", "overrides is seed"]


def other_files_and_settings(folder):
    config = write_run(folder / "edited", folder / "tokens") / "config.py"
    config.with_name("own.py").write_text(OWN.replace("sgd", "adam"))
    code, site = folder / "code", folder / "site"
    shutil.copytree(Path(maxmars.__file__).parent, code / "maxmars")
    with (code / "maxmars" / "train" / "step.py").open("a") as file:
        file.write("# edited on one host\n")
    information = site / "optax-9.9.9.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 9.9.9\n")
    path = os.pathsep.join([str(code), str(site), os.environ.get("PYTHONPATH", "")])
    told = ["optimizer.make.sha256 is", "the text of maxmars is", "optax is 9.9.9 and not"]
    return (
        {"PYTHONPATH": path, "JAX_ENABLE_X64": "1"},
        [str(config)],
        [*told, "jax_enable_x64 is True and not False"],
    )


def other_tokens(folder):
    tokens = write_tokens(folder / "other", seed=1)
    return {}, ["--data.path", str(tokens)], ["process 1 has other data"]


def start_both(folder, *variants):
    """Two processes of a run in `folder / "workdir"`, each with its variables and arguments."""
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", 2, "--process-id"]
    common = ["--workdir", folder / "workdir", *place]
    return [
        start_python(
            *(folder, "-m", "maxmars", "train", *arguments, *common, index),
            variables={"PYTHONSAFEPATH": "1", **more},
        )
        for index, (more, arguments) in enumerate(variants)
    ]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "kind",
    [
        other_tokens,
        pytest.param(other_options, marks=pytest.mark.slow),
        pytest.param(other_files_and_settings, marks=pytest.mark.slow),
    ],
    ids=lambda kind: kind.__name__,
)
def test_processes_that_differ_are_told_before_the_first_step(kind, tmp_path):
    config = write_run(tmp_path / "run", write_tokens(tmp_path / "tokens", seed=0)) / "config.py"
    variables, words, expected = kind(tmp_path)
    if not words[0].endswith(".py"):
        words = [str(config), *words]
    processes = start_both(tmp_path, ({}, [str(config)]), (variables, words))
    for code, output in map(finish, processes):
        (line,) = [line for line in output.splitlines() if "process 1" in line]
        assert code == OWN_ERROR, output
        assert [difference for difference in expected if difference not in line] == []
        assert "Traceback" not in output
    assert not (tmp_path / "workdir").exists()


@pytest.mark.slow
def test_damage_that_one_process_finds_in_its_copy_stops_both(tmp_path):
    """In the middle of a run. Sound copies: tests/train/test_two_processes.py; where both see the
    same files, they divide them: test_multiprocess.py."""
    config = write_run(tmp_path / "run", write_tokens(tmp_path / "tokens", seed=0)) / "config.py"
    shutil.copytree(tmp_path / "tokens", tmp_path / "copy")
    flip(tmp_path / "copy" / "train_00001.bin", 7)
    words = [str(config), "--num-steps", "100000"]
    copy = ["--data.path", str(tmp_path / "copy")]
    for process in start_both(tmp_path, ({}, words), ({}, [*words, *copy])):
        code, output = finish(process)
        assert code == OWN_ERROR, output
        assert re.search(r"error: the file of tokens .*/train_00001\.bin does not match", output)
        assert "Traceback" not in output
