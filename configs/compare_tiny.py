"""Tiny GPT-2s for comparing optimizers on two CPU cores, on the quickstart's text.

    maxmars compare compare_tiny --optimizers adamw mars mars_shampoo muon --workdir DIR
    maxmars compare compare_tiny:size=1M --workdir DIR      # the six of get_comparison
    maxmars compare compare_tiny:table=whole_matrices --workdir DIR       # another six
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
    MomentumKernelConfig,
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
    WeightUpdateConfig,
)
from maxmars.data.formats import vocab_size_of

Optimizer = Literal[
    "adamw",
    "nadamw",
    "lion",
    "soap",
    "muon",
    "normuon",
    "muonh",
    "muon_two_ema",
    "mars",
    "mars_exact",
    "mars_lion",
    "mars_shampoo",
    "mars_m",
    "mars_m_h",
]


Size = Literal["0.3M", "1M"]
Table = Literal["six", "whole_matrices"]
NUM_STEPS: dict[Size, int] = {"0.3M": 1024, "1M": 2048}
HYPERBALL = WeightUpdateConfig(hyperball=True)


def get_config(
    optimizer: Optimizer | Source = "mars", size: Size = "0.3M", data: str = ""
) -> TrainConfig:
    name = optimizer.short if isinstance(optimizer, Source) else optimizer
    vocab_size, source = 257, PythonSourcesConfig()
    if data:
        vocab_size = vocab_size_of(data)
        source = TokenShardsConfig(path=data)
    num_steps = NUM_STEPS[size]
    num_layers, embed_dim = {"0.3M": (2, 112), "1M": (3, 160)}[size]
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
        optimizer=get_optimizer(optimizer, size),
        schedule=ScheduleConfig(warmup_steps=num_steps // 20),
        data=source,
        eval=EvalConfig(every=num_steps // 16, num_windows=256, batch_size=64),
        checkpoint=CheckpointConfig(every=None),
        log=LogConfig(every=8),
    )


def get_comparison(size: Size = "0.3M", data: str = "", table: Table = "six") -> ComparisonConfig:
    """The comparisons of the results page; at 0.3M hours of two cores each."""
    fields: dict[Optimizer, tuple[str, ...]] = {  # beside the rate
        "adamw": ("weight_decay", "b1", "b2"),
        "nadamw": ("weight_decay", "b1", "b2"),
        "mars": ("weight_decay", "b1", "b2"),
        "mars_m": ("weight_decay", "b1", "vector_b2"),
        "muon": ("weight_decay", "momentum", "vector_b2"),
        "soap": ("weight_decay", "b1", "b2"),
    }
    if table == "whole_matrices":  # of which hyperball leaves nothing to decay
        fields = {
            "mars_m": fields["mars_m"],
            "mars_m_h": ("b1", "vector_b2"),
            "muon": fields["muon"],
            "muonh": ("momentum", "vector_b2"),
            "normuon": fields["muon"],
            "muon_two_ema": ("weight_decay", "vector_b2"),
        }
    return ComparisonConfig(
        contenders={name: get_config(name, size, data) for name in fields},
        tune=("learning_rate",),
        grids={name: dict.fromkeys(tuned, ()) for name, tuned in fields.items()},
        baseline="muon" if table == "whole_matrices" else None,
        budget=112,
        confirm=3,
        seeds=5,
    )


def get_optimizer(optimizer: Optimizer | Source, size: Size) -> OptimizerConfig:
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
        case "muonh":
            return MuonConfig(learning_rate=2e-2, weight_update=HYPERBALL)
        case "muon_two_ema":  # the record switches after as large a part of its steps
            kernel = MomentumKernelConfig(preset="two_ema", switch_step=NUM_STEPS[size] * 4 // 13)
            return MuonConfig(learning_rate=2e-2, momentum_kernel=kernel)
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
        case "mars_m" | "mars_m_h":
            return MarsConfig(
                learning_rate=1e-2,
                variant="m",
                weight_decay=0.1,
                decay_embeddings=True,
                vector_learning_rate_scale=1.0,
                weight_update=HYPERBALL if optimizer == "mars_m_h" else WeightUpdateConfig(),
            )
