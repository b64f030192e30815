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


def kill_and_continue(folder, config, options, *, steps, every, environment):
    """What `audit` says of all steps, computed again, of a run that was killed after a save."""
    run = folder / "run"
    train = ["-m", "maxmars", "train", config, *options, "--workdir", run, "--num-processes", 1]
    train += ["--num-steps", steps, "--checkpoint.every", every, "--eval.every", None]
    process = start_python(folder, *train, variables=environment)
    try:
        wait_until(lambda: (run / "checkpoints" / str(every)).exists(), process)
    finally:
        process.kill()
        process.communicate()
    assert every <= list_steps(run / "checkpoints")[-1] < steps
    for command in (train, ["-m", "maxmars", "audit", run, "--replay", steps]):
        (output,) = finish_well([start_python(folder, *command, variables=environment)])
    return output


def check(audited, steps):
    (sessions,) = re.findall(r"sessions: (\d+)", audited)
    assert sessions == "2"
    assert f"steps 1 to {steps} (of 2 sessions), computed again: the same digest" in audited


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "dropout"),
    [("mars", 0), ("mars_m", 0.2), (f"{SOPHIA_FILE}:sophia", 0)],
    ids=["mars", "dropout", "sophia"],
)
def test_a_killed_run_is_computed_again_from_before_the_kill(
    tmp_path, byte_tokens, optimizer, dropout
):
    options = ["--model.num-layers", 1, "--model.embed-dim", 32, "--model.max-seq-len", 32]
    options += ["--model.dropout", dropout]
    options += ["--global-batch-size", 4, "--model.scan-unroll", 1, "--schedule.warmup-steps", 2]
    audited = kill_and_continue(
        tmp_path,
        f"quickstart:data={byte_tokens},optimizer={optimizer}",
        options,
        steps=60,
        every=4,
        environment=environment(tmp_path / "cache", devices=2),
    )
    check(audited, 60)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_from_a_set_of_tfds_to_text(tmp_path, file_format):
    """On the command line, with the set's own validation split."""
    import tensorflow_datasets as tfds

    texts = {"train": 60, "validation": 5, "test": 5}
    examples = {s: [{"text": f"{s} {i}\n" * 40} for i in range(n)] for s, n in texts.items()}
    write_tfds(tmp_path, examples, {"text": tfds.features.Text()}, file_format=file_format)
    tokens, prepare = tmp_path / "tokens", ["-m", "maxmars", "data", "prepare", "tfds:made_up"]
    (output,) = finish_well([start_python(tmp_path, *prepare, tokens, "--data-dir", tmp_path)])
    assert "tfds:made_up:validation" in output
    options = ["--model.num-layers", 1, "--model.embed-dim", 32, "--model.max-seq-len", 32]
    options += ["--global-batch-size", 4, "--model.scan-unroll", 1, "--schedule.warmup-steps", 2]
    audited = kill_and_continue(
        tmp_path,
        f"quickstart:data={tokens}",
        options,
        steps=60,
        every=4,
        environment=environment(tmp_path / "cache"),
    )
    check(audited, 60)
    generate = ["-m", "maxmars", "generate", tmp_path / "run", "--prompt", "train 1"]
    (output,) = finish_well([start_python(tmp_path, *generate, "--max-new-tokens", 4)])
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
    options = ["--data.path", byte_tokens, "--global-batch-size", 16, "--num-microbatches", 2]
    options += ["--model.vocab-size", 257, "--model.num-layers", 2, "--model.num-heads", 2]
    options += ["--model.embed-dim", 64, "--model.max-seq-len", 64, "--model.scan-unroll", 1]
    options += ["--model.compute-dtype", "bfloat16"]
    audited = kill_and_continue(
        tmp_path,
        f"gpt2:size=tiny,optimizer={optimizer}",
        options,
        steps={"cpu": 12}.get(platform, 2000),
        every={"cpu": 2}.get(platform, 1000),
        environment=here,
    )
    check(audited, {"cpu": 12}.get(platform, 2000))
