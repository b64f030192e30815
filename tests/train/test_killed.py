"""A run that is killed and continued by the same command makes the steps of an undisturbed one.

`tools/examples/resuming_anywhere.md` shows the same four lines.
"""

import re

import jax
import pytest
from running import environment, finish_well, start_python, wait_until
from tiny import SOPHIA_FILE
from token_directories import write_tfds

from maxmars.checkpoint import list_steps
from maxmars.cli import main

SMALL = """--model.num-layers 1 --model.embed-dim 32 --model.max-seq-len 32 --model.scan-unroll 1
    --global-batch-size 8 --schedule.warmup-steps 2"""


@pytest.fixture
def here(monkeypatch, tmp_path, capsys):
    """Runs a command in this process, which has eight devices; returns what it printed."""

    def run(*words):
        main([*map(str, words)])
        return "".join(capsys.readouterr())

    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path / "cache"))
    return run


def kill_and_continue(folder, config, options, run_command, *, variables, steps=60, every=10):
    """A process that trains is killed after a save; then `run_command` gives the same command, and
    `audit`, which computes all steps again."""
    run = folder / "run"
    train = f"""train {config} {options} --workdir {run} --num-processes 1
        --num-steps {steps} --checkpoint.every {every} --eval.every None""".split()
    process = start_python(folder, "-m", "maxmars", *train, variables=variables)
    try:
        wait_until(lambda: (run / "checkpoints" / str(every)).exists(), process)
    finally:
        process.kill()
        process.communicate()
    assert every <= list_steps(run / "checkpoints")[-1] < steps
    run_command(*train)
    output = run_command("audit", run, "--replay", steps)
    assert re.findall(r"sessions: (\d+)", output) == ["2"]
    assert f"steps 1 to {steps} (of 2 sessions), computed again: the same digest" in output


@pytest.mark.multiprocess
@pytest.mark.slow
def test_from_a_set_of_tfds_to_text(tmp_path, here):
    """With the set's own validation split, an optimizer from a file, and masks of dropout."""
    import tensorflow_datasets as tfds

    texts = {"train": 60, "validation": 5, "test": 5}
    examples = {s: [{"text": f"{s} {i}\n" * 40} for i in range(n)] for s, n in texts.items()}
    write_tfds(tmp_path, examples, {"text": tfds.features.Text()})
    tokens = tmp_path / "tokens"
    output = here("data", "prepare", "tfds:made_up", tokens, "--data-dir", tmp_path)
    assert "tfds:made_up:validation" in output
    config = f"quickstart:data={tokens},optimizer={SOPHIA_FILE}:sophia"
    devices = environment(tmp_path / "cache", devices=8)
    kill_and_continue(tmp_path, config, f"{SMALL} --model.dropout 0.2", here, variables=devices)
    output = here("generate", tmp_path / "run", "--prompt", "train 1", "--max-new-tokens", 4)
    assert "train 1" in output


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["mars", "mars_shampoo"])
def test_a_killed_run_is_computed_again_on_this_machine(tmp_path, byte_tokens, optimizer):
    """In bfloat16 with the machine's attention kernel, whose backward pass may be in any order; in
    a loop over layers, as XLA (JAX 0.11.2) puts only the first such pass of a program in order."""
    platform = jax.devices()[0].platform
    flag = "--xla_gpu_exclude_nondeterministic_ops=true"
    here = {"JAX_PLATFORMS": {"gpu": "cuda"}.get(platform, platform), "XLA_FLAGS": flag}
    if platform == "cpu":
        del here["XLA_FLAGS"]
    options = f"""--data.path {byte_tokens} --global-batch-size 16 --num-microbatches 2
        --model.vocab-size 257 --model.num-layers 2 --model.num-heads 2 --model.embed-dim 64
        --model.max-seq-len 64 --model.scan-unroll 1 --model.compute-dtype bfloat16"""

    def run_command(*words):
        (output,) = finish_well([start_python(tmp_path, "-m", "maxmars", *words, variables=here)])
        return output

    kill_and_continue(
        tmp_path,
        f"gpt2:size=tiny,optimizer={optimizer}",
        options,
        run_command,
        steps={"cpu": 12}.get(platform, 2000),
        every={"cpu": 2}.get(platform, 1000),
        variables=here,
    )
