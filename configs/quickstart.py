"""Quickstart: a GPT-2 of 0.84M parameters learns the sources of Python's standard library.

    bash tools/quickstart.sh          or          maxmars train quickstart

1,000 steps of 1,024 tokens, one token a byte. Expected: validation loss from 5.4 to about 1.8 nats
a byte, in one to two minutes on 2 CPU cores (measured there; a bigram model reaches 2.45).

Your own text, with any tokenizer, as `maxmars data prepare` or another program wrote it to DIR:

    maxmars train quickstart:data=DIR

Another optimizer, also one of your own, `make(learning_rate)` in my_optim.py; or which is better:

    maxmars train quickstart:data=DIR,optimizer=my_optim.py:make
    maxmars compare quickstart:data=DIR --optimizers mars_m my_optim.py:make --workdir runs/which
"""

from pathlib import Path
from typing import Literal

from maxmars.config import (
    AdamWConfig,
    CheckpointConfig,
    EvalConfig,
    GPT2Config,
    LionConfig,
    LogConfig,
    MarsConfig,
    MuonConfig,
    NAdamWConfig,
    OptaxConfig,
    OptimizerConfig,
    PythonSourcesConfig,
    ScheduleConfig,
    SoapConfig,
    Source,
    TokenShardsConfig,
    TrainConfig,
)
from maxmars.data.formats import vocab_size_of

Optimizer = Literal["mars", "mars_m", "adamw", "nadamw", "lion", "muon", "soap"]


def get_config(data: str = "", optimizer: Optimizer | Source = "mars") -> TrainConfig:
    """`data` is a directory of tokens, also in a bucket; by default Python's sources are read."""
    name, vocab_size, source = "quickstart", 257, PythonSourcesConfig()
    if data:
        name = f"quickstart-{Path(data).resolve().name}"
        vocab_size = vocab_size_of(data)
        source = TokenShardsConfig(path=data)
    if optimizer != "mars":
        name += f"-{optimizer.short if isinstance(optimizer, Source) else optimizer}"
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
        optimizer=get_optimizer(optimizer),
        schedule=ScheduleConfig(warmup_steps=50),
        data=source,
        eval=EvalConfig(every=250, num_windows=256, batch_size=64),
        checkpoint=CheckpointConfig(every=250),
        log=LogConfig(every=10),
    )


def get_optimizer(optimizer: Optimizer | Source) -> OptimizerConfig:
    """MARS with the papers' rate, the others with those that were best for `compare_tiny`'s 1M."""
    match optimizer:
        case Source():
            return OptaxConfig(make=optimizer, learning_rate=4e-3)
        case "mars":
            return MarsConfig(learning_rate=6e-3)
        case "mars_m":
            return MarsConfig(variant="m", learning_rate=2e-2, vector_learning_rate_scale=1.0)
        case "adamw":
            return AdamWConfig(learning_rate=4e-3)
        case "nadamw":
            return NAdamWConfig(learning_rate=4e-3)
        case "lion":
            return LionConfig(learning_rate=5e-4, weight_decay=0.1)
        case "muon":
            return MuonConfig(learning_rate=4e-2)
        case "soap":
            return SoapConfig(learning_rate=8e-3)
