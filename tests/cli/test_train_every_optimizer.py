"""`maxmars train` with every optimizer of configs/gpt2.py, on one device.

The defaults run as a user runs them, without the compiler flags of the tests, with which the others
compile in half the time.
"""

import json
import math
import os
import subprocess
import sys

import pytest
from xla_flags import xla_flags

from maxmars.config.load import choices_of

*OPTIMIZERS, _ = choices_of("gpt2")["optimizer"]  # the last stands for one of the user's own
DEFAULT = ["mars", "mars_exact"]
OTHERS = [name for name in OPTIMIZERS if name not in DEFAULT]
# With a user's flags most of the time goes to compiling, and this model compiles fastest.
TINY = """--num-steps 3 --global-batch-size 4 --num-microbatches 1 --schedule.warmup-steps 0
    --model.num-layers 1 --model.num-heads 2 --model.embed-dim 32 --model.compute-dtype float32
    --model.max-seq-len 16 --model.vocab-size 257 --eval.every None --log.every 1
    --num-processes 1"""
# One process trains them all, one after the other; JAX is then too late to look for others.
PROGRAM = """
import sys
from maxmars.cli import main
for line in sys.stdin:
    print("maxmars", line, flush=True)
    main(line.split())
"""


@pytest.mark.parametrize(
    ("specs", "flags"),
    [
        pytest.param(
            [f"gpt2:size=small,optimizer={name}" for name in DEFAULT],
            {},
            marks=pytest.mark.seconds,
        ),
        pytest.param(
            [f"gpt2:size=small,optimizer={name}" for name in OTHERS],
            {"XLA_FLAGS": xla_flags(1)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["default", "others"],
)
def test_three_steps(specs, flags, byte_tokens, tmp_path):
    ours = ("JAX_", "XLA_", "MAXMARS_", "TF_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    commands = [
        f"train {spec} --data.path {byte_tokens} --workdir run{number} {' '.join(TINY.split())}\n"
        for number, spec in enumerate(specs)
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join(commands),
        cwd=tmp_path,
        env=environment | flags,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for number, spec in enumerate(specs):
        lines = (tmp_path / f"run{number}" / "metrics.jsonl").read_text().splitlines()
        rows = map(json.loads, lines)
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        assert len(losses) == 3, spec
        assert all(map(math.isfinite, losses)), spec
