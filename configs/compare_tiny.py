"""A GPT-2 of 0.35M parameters for comparing optimizers on two CPU cores, on the quickstart's text.

    maxmars compare compare_tiny --optimizers adamw,mars,mars_shampoo,muon --workdir DIR

1,024 steps of 1,024 tokens a run. Each optimizer's learning rate is the lower middle of the grid
that `maxmars compare` makes of it.
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


def get_config(optimizer: Optimizer = "mars") -> TrainConfig:
    return TrainConfig(
        name=f"compare-tiny-{optimizer}",
        num_steps=1024,
        global_batch_size=8,
        model=GPT2Config(
            num_layers=2,
            num_heads=4,
            embed_dim=112,
            max_seq_len=128,
            vocab_size=257,
            vocab_pad_multiple=8,
            use_bias=False,
            compute_dtype="float32",  # faster than bfloat16 on a CPU
            scan_unroll=2,
        ),
        optimizer=get_optimizer(optimizer),
        schedule=ScheduleConfig(warmup_steps=50),
        data=PythonSourcesConfig(),
        eval=EvalConfig(every=64, num_windows=128, batch_size=64),
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
