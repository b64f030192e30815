"""Tiny GPT-2s for comparing optimizers on two CPU cores, on the quickstart's text.

    maxmars compare compare_tiny --optimizers adamw mars mars_shampoo muon --workdir DIR
    maxmars compare compare_tiny:size=1M --workdir DIR      # the six of get_comparison
    maxmars compare compare_tiny:data=TOKENS --optimizers adamw my_optim.py:make --workdir DIR

Size 0.3M has 0.35M parameters, and takes 1,024 steps of 1,024 tokens a run; 1M has 0.99M, and takes
twice as many steps. Each optimizer's learning rate is the lower middle of the grid that `maxmars
compare` makes of it. TOKENS is a directory of tokens that `maxmars data prepare` or another program
wrote.
"""

from typing import Literal

from maxmars.config import (
    AdamWConfig,
    CheckpointConfig,
    ComparisonConfig,
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

Optimizer = Literal[
    "adamw",
    "nadamw",
    "lion",
    "soap",
    "muon",
    "normuon",
    "mars",
    "mars_exact",
    "mars_lion",
    "mars_shampoo",
    "mars_m",
]


Size = Literal["0.3M", "1M"]


def get_config(
    optimizer: Optimizer | Source = "mars", size: Size = "0.3M", data: str = ""
) -> TrainConfig:
    name = optimizer.short if isinstance(optimizer, Source) else optimizer
    vocab_size, source = 257, PythonSourcesConfig()
    if data:
        vocab_size = vocab_size_of(data)
        source = TokenShardsConfig(path=data)
    num_steps, num_layers, embed_dim = {"0.3M": (1024, 2, 112), "1M": (2048, 3, 160)}[size]
    return TrainConfig(
        name=f"compare-tiny-{name}" if size == "0.3M" else f"compare-{size}-{name}",
        num_steps=num_steps,
        global_batch_size=8,
        model=GPT2Config(
            num_layers=num_layers,
            num_heads=4,
            embed_dim=embed_dim,
            max_seq_len=128,
            vocab_size=vocab_size,
            vocab_pad_multiple=8,
            use_bias=False,
            compute_dtype="float32",  # faster than bfloat16 on a CPU
            scan_unroll=num_layers,
        ),
        optimizer=get_optimizer(optimizer),
        schedule=ScheduleConfig(warmup_steps=num_steps // 20),
        data=source,
        eval=EvalConfig(every=num_steps // 16, num_windows=256, batch_size=64),
        checkpoint=CheckpointConfig(every=None),
        log=LogConfig(every=8),
    )


def get_comparison(size: Size = "0.3M", data: str = "") -> ComparisonConfig:
    """The comparison of the results page; at 0.3M hours of two cores."""
    names = ("adamw", "nadamw", "mars", "mars_m", "muon", "soap")
    decays = dict.fromkeys(names, ("b2",)) | {
        "mars_m": ("vector_b2",),
        "muon": ("momentum", "vector_b2"),
    }
    return ComparisonConfig(
        contenders={name: get_config(name, size, data) for name in names},
        tune=("learning_rate", "weight_decay", "b1"),
        grids={name: dict.fromkeys(fields, ()) for name, fields in decays.items()},
        budget=112,
        confirm=3,
        seeds=5,
    )


def get_optimizer(optimizer: Optimizer | Source) -> OptimizerConfig:
    match optimizer:
        case Source():
            return OptaxConfig(make=optimizer, learning_rate=2e-3)
        case "adamw":
            return AdamWConfig(learning_rate=2e-3)
        case "nadamw":
            return NAdamWConfig(learning_rate=2e-3)
        case "lion":
            return LionConfig(learning_rate=2.5e-4, weight_decay=0.1)
        case "soap":
            return SoapConfig(learning_rate=8e-3)
        case "muon":
            return MuonConfig(learning_rate=2e-2)
        case "normuon":
            return MuonConfig(learning_rate=2e-2, row_normalization=0.95)
        case "mars":
            return MarsConfig(learning_rate=2e-3)
        case "mars_exact":
            return MarsConfig(learning_rate=2e-3, exact=True)
        case "mars_lion":
            return MarsConfig(learning_rate=2.5e-4, variant="lion", weight_decay=0.1)
        case "mars_shampoo":
            return MarsConfig(
                learning_rate=2e-2, variant="shampoo", vector_learning_rate_scale=0.15
            )
        case "mars_m":
            return MarsConfig(
                learning_rate=1e-2,
                variant="m",
                weight_decay=0.1,
                decay_embeddings=True,
                vector_learning_rate_scale=1.0,
            )
