"""`maxmars train` with every optimizer of configs/gpt2.py and some of optax: trained, continued.

The default runs as a user runs it, without the compiler flags of the tests, with which the others
compile in half the time. On one device, but for those of whole matrices, whose state lies with the
matrices' owners; `tests/train/test_step.py` trains all on meshes.
"""

import math
import os
import shlex
import subprocess
import sys

import pytest
from tiny import first_difference, values_of
from xla_flags import xla_flags

from maxmars.config.load import choices_of

*NAMES, _ = choices_of("gpt2")["optimizer"]  # the last stands for one of the user's own
DEFAULT = "mars"
EIGHT = "--optimizer.momentum-kernel.preset eight_ema --optimizer.momentum-kernel.switch-step 2"
EIGHT += " --optimizer.momentum-kernel.end-step 5"
# The state of whole matrices lies with the matrices' owners.
OWNERS = [
    f"{words} --mesh.data 2 --mesh.fsdp 2" for words in ("mars_shampoo", f"muon {EIGHT}", "soap")
]
# Besides the defaults some whose state has other arrays. Of an optimizer of optax `--NAME` is an
# option of its own; Prodigy and D-Adaptation divide by the rate.
OTHERS = [
    *(name for name in NAMES if name not in {DEFAULT, "mars_shampoo", "muon", "soap"}),
    "adamw --optimizer.momentum-kernel.preset ademamix --optimizer.momentum-kernel.end-step 4",
    f"mars {EIGHT} --optimizer.amsgrad True --optimizer.last-grad-dtype bfloat16",
    "optax:adafactor --momentum 0.9 --weight-decay-rate None",
    "optax:adamw --b2 0.95 --mu-dtype bfloat16",
    "optax.contrib:schedule_free_adamw --warmup-steps 2",
    "optax.contrib:prodigy",
]
# They combine what those show, or have a state like another's.
SIBLINGS = [
    "muon",
    f"soap {EIGHT}",
    "mars_lion --optimizer.exact True",
    "mars_m --optimizer.exact True",
    "optax:lamb --weight-decay 0.1",
    "optax:sgd --momentum 0.9 --nesterov True",
    "optax.contrib:adopt",
    "optax.contrib:dadapt_adamw",
]
# With a user's flags most of the time goes to compiling, and this model compiles fastest.
TINY = """--num-steps 5 --global-batch-size 4 --num-microbatches 1 --schedule.warmup-steps 0
    --model.num-layers 1 --model.num-heads 2 --model.embed-dim 32 --model.compute-dtype float32
    --model.max-seq-len 16 --model.vocab-size 257 --eval.every None --log.every 1
    --checkpoint.every 3 --num-processes 1"""
# One process trains them all, one after the other; JAX is then too late to look for others.
PROGRAM = """
import shlex, shutil, sys
from maxmars.cli import main
for line in sys.stdin:
    print("maxmars", line, flush=True)
    *words, name = shlex.split(line)
    main([*words, f"{name}/whole"])
    shutil.copytree(f"{name}/whole", f"{name}/continued")
    shutil.rmtree(f"{name}/continued/checkpoints/5")  # as a kill leaves it
    main([*words, f"{name}/continued"])
"""


ONE, FOUR = ({"XLA_FLAGS": xla_flags(devices)} for devices in (1, 4))


@pytest.mark.parametrize(
    ("optimizers", "flags"),
    [
        pytest.param([DEFAULT], {}, marks=pytest.mark.seconds, id="default"),
        pytest.param(OTHERS, ONE, marks=pytest.mark.slow, id="others"),
        pytest.param(OWNERS, FOUR, marks=pytest.mark.slow, id="owners"),
        pytest.param(SIBLINGS, ONE, marks=pytest.mark.long, id="siblings"),
    ],
)
def test_it_trains_and_continues(optimizers, flags, byte_tokens, tmp_path):
    ours = ("XLA_", "MAXMARS_", "TF_") if flags else ("JAX_", "XLA_", "MAXMARS_", "TF_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    commands = []
    for number, words in enumerate(optimizers):
        if words.startswith("optax"):
            words = words.replace("--", "--optimizer.options.")
        name, *options = words.split()
        train = ["train", f"gpt2:size=small,optimizer={name}", "--data.path", str(byte_tokens)]
        commands.append(shlex.join([*train, *TINY.split(), *options, "--workdir", str(number)]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join(f"{command}\n" for command in commands),
        cwd=tmp_path,
        env=environment | flags,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("continuing from step 3") == len(optimizers)
    for number, words in enumerate(optimizers):
        whole, continued = tmp_path / str(number) / "whole", tmp_path / str(number) / "continued"
        losses = values_of(whole, "train/loss")
        assert losses.keys() == {1, 2, 3, 4, 5}, words
        assert all(map(math.isfinite, losses.values())), words
        assert first_difference(whole, continued) is None, words
        name, _, function = words.partition(" ")[0].partition(":")
        if function:
            log = (whole / "logs" / "host_000.log").read_text()
            assert f"{name}:{function} gets the layers stacked" in log, words
            assert losses[3] < losses[1] + 0.1, words
