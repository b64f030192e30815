"""Quickstart: a GPT-2 of 0.84M parameters learns the sources of Python's standard library.

    bash tools/quickstart.sh          or          maxmars train quickstart

1,000 steps of 1,024 tokens, one token a byte. Expected: validation loss from 5.4 to about 1.8 nats
a byte, in one to two minutes on 2 CPU cores (measured there; a bigram model reaches 2.45).

Your own text, with any tokenizer, as `maxmars data prepare` or another program wrote it to DIR:

    maxmars train quickstart:data=DIR
"""

from pathlib import Path

from maxmars.config import (
    CheckpointConfig,
    EvalConfig,
    GPT2Config,
    LogConfig,
    MarsConfig,
    PythonSourcesConfig,
    ScheduleConfig,
    TokenShardsConfig,
    TrainConfig,
)
from maxmars.data.formats import vocab_size_of


def get_config(data: str = "") -> TrainConfig:
    """`data` is a directory of tokens, also in a bucket; by default Python's sources are read."""
    name, vocab_size, source = "quickstart", 257, PythonSourcesConfig()
    if data:
        name = f"quickstart-{Path(data).resolve().name}"
        vocab_size = vocab_size_of(data)
        source = TokenShardsConfig(path=data)
    return TrainConfig(
        name=name,
        num_steps=1000,
        global_batch_size=8,
        model=GPT2Config(
            num_layers=4,
            num_heads=4,
            embed_dim=128,
            max_seq_len=128,
            vocab_size=vocab_size,
            vocab_pad_multiple=8,
            use_bias=False,
            compute_dtype="auto",
            scan_unroll=4,
        ),
        optimizer=MarsConfig(learning_rate=6e-3),
        schedule=ScheduleConfig(warmup_steps=50),
        data=source,
        eval=EvalConfig(every=250, num_windows=256, batch_size=64),
        checkpoint=CheckpointConfig(every=250),
        log=LogConfig(every=10),
    )
