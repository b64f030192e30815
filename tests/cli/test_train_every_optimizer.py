"""`maxmars train` with every optimizer of configs/gpt2.py and some of optax: trained, continued.

The default runs as a user runs it, in a process without the compiler flags of the tests. The others
run on a mesh, where the state of those of whole matrices lies with the matrices' owners.
"""

import math
import os
import shutil

import pytest
from running import run_python
from tiny import first_difference, values_of

from maxmars.cli import main
from maxmars.config.load import choices_of

*NAMES, _ = choices_of("gpt2")["optimizer"]  # the last stands for one of the user's own
DEFAULT = "mars"
EIGHT = "--optimizer.momentum-kernel.preset eight_ema --optimizer.momentum-kernel.switch-step 2"
EIGHT += " --optimizer.momentum-kernel.end-step 5"
long = pytest.mark.long
# Those whose state has other arrays than that of their optimizer's defaults. The long ones combine
# what others show: the eight averages of `muon`, the second gradient of `mars_exact`.
OPTIONS = [
    "adamw --optimizer.momentum-kernel.preset ademamix --optimizer.momentum-kernel.end-step 4",
    f"muon {EIGHT}",
    f"mars {EIGHT} --optimizer.amsgrad True --optimizer.last-grad-dtype bfloat16",
    pytest.param(f"soap {EIGHT}", marks=long),
    pytest.param("mars_lion --optimizer.exact True", marks=long),
    pytest.param("mars_m --optimizer.exact True", marks=long),
]
# The last two divide by the rate. The long ones have a state like that of `optax:adamw` or Prodigy.
OPTAX = [
    "optax:adafactor --optimizer.options.momentum 0.9 --optimizer.options.weight-decay-rate None",
    "optax:adamw --optimizer.options.b2 0.95 --optimizer.options.mu-dtype bfloat16",
    pytest.param("optax:lamb --optimizer.options.weight-decay 0.1", marks=long),
    pytest.param(
        "optax:sgd --optimizer.options.momentum 0.9 --optimizer.options.nesterov True", marks=long
    ),
    pytest.param("optax.contrib:adopt", marks=long),
    "optax.contrib:schedule_free_adamw --optimizer.options.warmup-steps 2",
    pytest.param("optax.contrib:dadapt_adamw", marks=long),
    "optax.contrib:prodigy",
]
OTHERS = [*(name for name in NAMES if name != DEFAULT), *OPTIONS, *OPTAX]
# This model compiles fastest.
TINY = """--num-steps 5 --global-batch-size 8 --num-microbatches 1 --schedule.warmup-steps 0
    --model.num-layers 1 --model.num-heads 2 --model.embed-dim 32 --model.compute-dtype float32
    --model.max-seq-len 16 --model.vocab-size 257 --eval.every None --log.every 1
    --checkpoint.every 3 --num-processes 1"""


def words_of(optimizer, tokens):
    name, *options = optimizer.split()
    start = ["train", f"gpt2:size=small,optimizer={name}", "--data.path", str(tokens)]
    return [*start, *TINY.split(), *options, "--workdir"]


# JAX reads the flags when it starts, so the default has a process of its own.
PROGRAM = """
import shutil, sys
from maxmars.cli import main
main([*sys.argv[1:], "whole"])
shutil.copytree("whole", "continued")
shutil.rmtree("continued/checkpoints/5")  # as a kill leaves it
main([*sys.argv[1:], "continued"])
"""


def assert_continued(folder, printed):
    assert printed.count("continuing from step 3") == 1
    losses = values_of(folder / "whole", "train/loss")
    assert losses.keys() == {1, 2, 3, 4, 5}
    assert all(map(math.isfinite, losses.values()))
    assert first_difference(folder / "whole", folder / "continued") is None


@pytest.mark.seconds
def test_the_default_trains_and_continues(byte_tokens, tmp_path):
    ours = ("JAX_", "XLA_", "MAXMARS_", "TF_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    words = words_of(DEFAULT, byte_tokens)
    done = run_python("-c", PROGRAM, *words, folder=tmp_path, environment=environment)
    assert_continued(tmp_path, done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OTHERS)
def test_it_trains_and_continues(optimizer, byte_tokens, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = words_of(f"{optimizer} --mesh.data 4 --mesh.fsdp 2", byte_tokens)
    main([*words, "whole"])
    shutil.copytree("whole", "continued")
    shutil.rmtree("continued/checkpoints/5")
    main([*words, "continued"])
    assert_continued(tmp_path, capsys.readouterr().out)
    name, _, function = optimizer.partition(" ")[0].partition(":")
    if function:
        log = (tmp_path / "whole" / "logs" / "host_000.log").read_text()
        assert f"{name}:{function} gets the layers stacked" in log
        losses = values_of(tmp_path / "whole", "train/loss")
        assert losses[3] < losses[1] + 0.1
