"""A run whose own data, model and optimizer have options with names like those of credentials."""

import json

import pytest

from maxmars.cli import main

OWN = """
import grain, numpy, optax

def windows(*, split, length, text_key, answer_token):
    assert (text_key, answer_token) == ("question", "<answer>"), (text_key, answer_token)
    tokens = numpy.random.default_rng(0).integers(0, 256, (64, length + 1))
    return grain.MapDataset.source(tokens.astype(numpy.int32))

def optimizer(learning_rate, *, rng_key, signature):
    assert (rng_key, signature) == ("7", ("a", "b")), (rng_key, signature)
    return optax.adam(learning_rate)
"""
CONFIG = """
from maxmars.config import *

def get_config(author: str = "") -> TrainConfig:
    return TrainConfig(
        name="honest", num_steps=2, global_batch_size=8,
        model=GPT2Config(num_layers=1, num_heads=2, embed_dim=16, max_seq_len=16, vocab_size=257),
        data=GrainConfig(
            source="own.py:windows", tokenizer="byte",
            options={"text_key": "", "answer_token": "<answer>"},
        ),
        optimizer=OptaxConfig(
            make="own.py:optimizer", learning_rate=1e-3,
            options={"rng_key": "7", "signature": ["a", "b"]},
        ),
        schedule=ScheduleConfig(warmup_steps=0, decay_steps=4),
        eval=EvalConfig(every=2, num_windows=8, batch_size=8),
        checkpoint=CheckpointConfig(every=1, keep_last=9),
    )
"""


@pytest.mark.slow
def test_a_run_with_honest_options_continues_and_is_evaluated_and_replayed(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "config.py").write_text(CONFIG)
    run = tmp_path / "run"
    train = ["train", f"{tmp_path / 'config.py'}:author=me", "--workdir", str(run)]
    train += ["--num-processes", "1", "--data.options.text-key", "question"]
    main(train)
    main([*train, "--num-steps", "4"])
    main(["eval", str(run), "--tasks", "loss", "--num-processes", "1"])
    capsys.readouterr()
    main(["audit", str(run), "--replay", "1"])
    assert "one trajectory" in capsys.readouterr().out
    options = json.loads((run / "config.json").read_text())["data"]["options"]
    assert options == {"text_key": "question", "answer_token": "<answer>"}
