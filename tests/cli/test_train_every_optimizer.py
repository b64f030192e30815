"""`maxmars train` with every optimizer of configs/gpt2.py and with configs/gpt3.py, each in a
process of its own."""

import itertools
import json
import math
import os
import runpy
import subprocess
import sys
import typing

import pytest

from maxmars.config.load import named_configs

OPTIMIZERS = typing.get_args(runpy.run_path(str(named_configs()["gpt2"]))["Optimizer"])
DEFAULT = {"mars", "mars_exact"}
SPECS = [
    *(
        pytest.param(
            f"gpt2:size=small,optimizer={name}",
            id=name,
            marks=[] if name in DEFAULT else pytest.mark.slow,
        )
        for name in OPTIMIZERS
    ),
    pytest.param("gpt3:size=13b,optimizer=mars_shampoo", id="gpt3", marks=pytest.mark.slow),
]
TINY = {
    "--num-steps": "3",
    "--global-batch-size": "4",
    "--num-microbatches": "1",
    "--schedule.warmup-steps": "0",
    # With a user's flags most of the time goes to compiling, and this model compiles fastest.
    "--model.num-layers": "1",
    "--model.num-heads": "2",
    "--model.embed-dim": "32",
    "--model.compute-dtype": "float32",
    "--model.max-seq-len": "16",
    "--model.vocab-size": "257",
    "--eval.every": "None",
    "--log.every": "1",
}


@pytest.mark.seconds
@pytest.mark.parametrize("spec", SPECS)
def test_three_steps_as_a_user_runs_them(spec, byte_tokens, tmp_path):
    # A user has neither the fake devices of the tests nor their compiler flags.
    ours = ("JAX_", "XLA_", "MAXMARS_", "TF_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    words = [
        spec,
        "--data.path",
        str(byte_tokens),
        *itertools.chain.from_iterable(TINY.items()),
    ]
    result = subprocess.run(
        [sys.executable, "-m", "maxmars", "train", *words, "--workdir", "run"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
