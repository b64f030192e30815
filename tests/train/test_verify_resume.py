"""`verify-resume`, on real processes."""

import json
import os
from pathlib import Path

import jax
import pytest
from refusals import refused
from tiny import tiny_config

from maxmars import cli
from maxmars.config import ScheduleConfig
from maxmars.train.verify_resume import verify_resume


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_resume_is_verified_and_a_difference_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path / "cache"))
    config = tmp_path / "config.py"
    config.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from tiny import tiny_config\n\ndef get_config():\n    return tiny_config()\n"
    )
    out = tmp_path / "out"
    cli.main(["verify-resume", str(config), "--steps", "40", "--out", str(out)])
    assert "identical to the undisturbed run" in capsys.readouterr().out
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["verdict"] == "identical"
    assert 20 <= receipt["killed_after_step"] <= 40
    assert 20 <= receipt["resumed_from_step"] < 40
    assert "continuing from step" in (out / "run.log").read_text()
    assert receipt["environment"]["num_devices"] == 8
    assert "steps 1 to 40, computed again: the same digest" in receipt["audit"]

    with refused(FileExistsError, out):
        verify_resume(tiny_config(), out, steps=4, checkpoint_step=2)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["mars", "mars_shampoo"])
def test_a_resume_is_identical_on_this_machine(
    tmp_path, byte_tokens, monkeypatch, capsys, optimizer
):
    """In bfloat16 with the machine's attention kernel, whose backward pass may be in any order; in
    a loop over layers, as XLA (JAX 0.11.2) puts only the first such pass of a program in order."""
    flag = "--xla_gpu_exclude_nondeterministic_ops=true"
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {flag}")
    steps = {"cpu": 12}.get(jax.devices()[0].platform, 2000)  # it is killed during the second half
    options = f"""--data.path {byte_tokens} --global-batch-size 16 --num-microbatches 2
        --model.vocab-size 257 --model.num-layers 2 --model.num-heads 2 --model.embed-dim 64
        --model.max-seq-len 64 --model.compute-dtype bfloat16 --model.scan-unroll 1
        --steps {steps} --out {tmp_path / "out"}"""
    cli.main(["verify-resume", f"gpt2:size=tiny,optimizer={optimizer}", *options.split()])
    assert "identical to the undisturbed run" in capsys.readouterr().out


@pytest.mark.seconds
def test_a_run_that_fails_is_named_with_its_log_and_tried_as_it_is(tmp_path):
    config = tiny_config(global_batch_size=2**20, schedule=ScheduleConfig(warmup_steps=9))
    with refused(ValueError, "1/3", "code 1", tmp_path / "out" / "run.log"):
        verify_resume(config, tmp_path / "out", steps=4, checkpoint_step=2)
    tried = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tried["schedule"]["warmup_steps"] == 9


def test_the_checkpoint_must_lie_inside(tmp_path):
    with refused(ValueError, "checkpoint_step=4", "steps=4"):
        verify_resume(tiny_config(), tmp_path / "out", steps=4, checkpoint_step=4)
    assert not (tmp_path / "out").exists()


def test_a_bucket_is_no_place_for_it():
    with refused(ValueError, "--out gs://bucket/run"):
        verify_resume(tiny_config(), "gs://bucket/run", steps=4, checkpoint_step=2)
