"""Tiny GPT-2s for comparing optimizers on two CPU cores, on the quickstart's text.

    maxmars compare compare_tiny --optimizers adamw,mars,mars_shampoo,muon --workdir DIR

Size 0.3M has 0.35M parameters, and takes 1,024 steps of 1,024 tokens a run; 1M has 0.99M, and takes
twice as many steps. Each optimizer's learning rate is the lower middle of the grid that `maxmars
compare` makes of it.
"""

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
    OptimizerConfig,
    PythonSourcesConfig,
    ScheduleConfig,
    SoapConfig,
    TrainConfig,
)

Optimizer = Literal[
    "adamw",
    "nadamw",
    "lion",
    "soap",
    "muon",
    "mars",
    "mars_exact",
    "mars_lion",
    "mars_shampoo",
    "mars_m",
]


Size = Literal["0.3M", "1M"]


def get_config(optimizer: Optimizer = "mars", size: Size = "0.3M") -> TrainConfig:
    num_steps, num_layers, embed_dim = {"0.3M": (1024, 2, 112), "1M": (2048, 3, 160)}[size]
    return TrainConfig(
        name=f"compare-tiny-{optimizer}" if size == "0.3M" else f"compare-{size}-{optimizer}",
        num_steps=num_steps,
        global_batch_size=8,
        model=GPT2Config(
            num_layers=num_layers,
            num_heads=4,
            embed_dim=embed_dim,
            max_seq_len=128,
            vocab_size=257,
            vocab_pad_multiple=8,
            use_bias=False,
            compute_dtype="float32",  # faster than bfloat16 on a CPU
            scan_unroll=num_layers,
        ),
        optimizer=get_optimizer(optimizer),
        schedule=ScheduleConfig(warmup_steps=num_steps // 20),
        data=PythonSourcesConfig(),
        eval=EvalConfig(every=num_steps // 16, num_windows=256, batch_size=64),
        checkpoint=CheckpointConfig(every=None),
        log=LogConfig(every=8),
    )


def get_optimizer(optimizer: Optimizer) -> OptimizerConfig:
    match optimizer:
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
