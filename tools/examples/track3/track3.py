r"""Track 3 of modded-nanogpt: fewest steps to a validation loss of 3.28, for one GPU.

    hf download kjj0/fineweb10B-gpt2 --repo-type dataset --local-dir data/fineweb10B
    maxmars compare tools/examples/track3/track3.py:start=nonzero --optimizers mars_m muonh \
      --workdir runs/track3
    maxmars plan tools/examples/track3/track3.py:optimizer=mars --topology h200:1

The benchmark (https://github.com/KellerJordan/modded-nanogpt, records/track_3_optimization) fixes
model, data and batch, and leaves optimizer, schedule and number of steps open:

* the model of `model.py`, 162,354,816 parameters;
* 512 sequences of 1,024 tokens of FineWeb a step, in the order of the files; 3,250 steps are 1.70B
  tokens, so 18 of the 103 files (0.2 GB each) are enough;
* validation on the first 10,485,760 tokens of the held-out file;
* a result counts if (3.28 - mean) times the root of the number of runs is at least 0.004.

Matrices of the blocks are optimized by `optimizer`, and embedding, head and vectors always by
AdamW, each with a rate of its own. Published steps to 3.28, in September 2026: 3,250 with Muon (its
values are `muon` here), 3,210 with Muon's momentum of two averages, 3,250 to 3,125 with MuonH by
its schedule and 3,065 by its momentum, 5,625 with AdamW (`adamw`, with --num-steps 5625), 2,580
with what adds to many of these. Nobody published a run with MARS, MARS-M, NAdamW or SOAP as they
are here: these values are where tuning begins, as are those of `normuon` and `muonh`.

What differs from the benchmark:

* Embedding, head and vectors have the rates and decay of Muon's result (0.7, 0.004, 0.015; 0.001)
  under every rule, and one schedule multiplies all rates. AdamW's result has 0.3, 0.003125, 0.01
  and no decay, MuonH's 0.91, 0.0064, 0.0195 and a schedule of its own: neither is here.
* The benchmark's program takes 190 batches from each file of 100M tokens and skips the other
  385,280; here files follow each other without a gap. So no batch from the second file on is the
  benchmark's.
* It sums the losses of a batch where we take the mean, which the `eps` of AdamW allows for.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import optax

from maxmars.config import (
    EvalConfig,
    ModuleConfig,
    OptaxConfig,
    ScheduleConfig,
    TokenShardsConfig,
    TrainConfig,
)
from maxmars.optim import MatrixSpec, WeightUpdate, mars, muon, soap

Optimizer = Literal[
    "adamw", "nadamw", "soap", "muon", "normuon", "muonh", "mars", "mars_shampoo", "mars_m"
]

EPS = 1e-10 / (512 * 1024)
"""The benchmark's 1e-10, for gradients of a mean over tokens in place of a sum."""


def get_config(
    optimizer: Optimizer = "muon", start: Literal["zero", "nonzero"] = "zero"
) -> TrainConfig:
    """The benchmark with an optimizer for the matrices of the blocks; `start` is that of the
    projections back to the residual stream, see `model.Block`."""
    if optimizer == "muonh" and start == "zero":
        raise ValueError(
            "optimizer=muonh keeps the norm of every matrix, so those of zeros would never move; "
            "take start=nonzero."
        )
    learning_rate, weight_decay = {
        "adamw": (1.5e-3, 0.1),
        "nadamw": (1.5e-3, 0.1),
        "soap": (3e-3, 0.01),
        "muon": (2.5e-2, 0.05),
        "normuon": (2.5e-2, 0.05),
        "muonh": (3e-2, 0.0),
        "mars": (6e-3, 0.01),
        "mars_shampoo": (2.5e-2, 0.05),
        "mars_m": (1e-2, 0.1),
    }[optimizer]
    return TrainConfig(
        name=f"track3-{optimizer}",
        num_steps=3250,
        global_batch_size=512,
        num_microbatches=16,
        gradient_clip_norm=None,
        model=ModuleConfig(
            make="model.py:make",
            options={
                "num_layers": 12,
                "num_heads": 6,
                "embed_dim": 768,
                "dtype": "bfloat16",
                "nonzero": start == "nonzero",
            },
            vocab_size=50304,
            max_seq_len=1024,
        ),
        optimizer=OptaxConfig(
            make="track3.py:make_optimizer",
            learning_rate=learning_rate,
            options={
                "rule": optimizer,
                "weight_decay": weight_decay,
                # As multiples of the rate of the matrices.
                "embedding_scale": 0.7 / learning_rate,
                "head_scale": 0.004 / learning_rate,
                "vector_scale": 0.015 / learning_rate,
            },
        ),
        schedule=ScheduleConfig(
            warmup_steps=250 if optimizer in ("adamw", "nadamw") else 0,
            decay="wsd",
            wsd_decay_fraction=0.7,
            final_fraction=0.0,
        ),
        data=TokenShardsConfig(path="data/fineweb10B", order="sequential"),
        eval=EvalConfig(every=125, num_windows=10_240),
    )


def make_optimizer(
    learning_rate: jax.Array,
    *,
    matrix_specs: Any,
    mesh: jax.sharding.Mesh | None,
    rule: Optimizer,
    weight_decay: float,
    embedding_scale: float,
    head_scale: float,
    vector_scale: float,
) -> optax.GradientTransformation:
    """`rule` for the matrices of the blocks, AdamW for embedding, head and vectors.

    Args:
      learning_rate: of the matrices in this step.
      matrix_specs, mesh: see `OptaxConfig`.
      rule: which optimizer the matrices have.
      weight_decay: of the matrices, decoupled.
      embedding_scale, head_scale, vector_scale: rates as multiples of `learning_rate`.
    """

    def adamw(scale: float) -> optax.GradientTransformation:
        rate = scale * learning_rate
        return optax.adamw(rate, b1=0.8, b2=0.95, eps=EPS, weight_decay=0.001)

    def label(path: tuple[Any, ...], spec: MatrixSpec) -> str:
        if spec.embedding:
            return path[-1].key
        return "matrix" if spec.is_matrix else "vector"

    options: dict[str, Any] = {"matrix_specs": matrix_specs, "mesh": mesh}
    match rule:
        case "adamw":
            matrix = optax.adamw(learning_rate, b2=0.95, eps=EPS, weight_decay=weight_decay)
        case "nadamw":
            matrix = optax.nadamw(learning_rate, b2=0.95, eps=EPS, weight_decay=weight_decay)
        case "soap":
            options |= {"max_precondition_dim": 4096}
            matrix = soap(learning_rate, weight_decay=weight_decay, **options)
        case "muon" | "normuon" | "muonh":
            options |= {"ns_steps": 12, "ns_coefficients": (2.0, -1.5, 0.5)}
            if rule == "normuon":
                options["row_normalization"] = 0.95
            if rule == "muonh":
                options["weight_update"] = WeightUpdate(hyperball=True)
            matrix = muon(learning_rate, weight_decay=weight_decay, **options)
        case "mars":
            matrix = mars(learning_rate, weight_decay=weight_decay, **options)
        case "mars_shampoo" | "mars_m":
            variant = rule.removeprefix("mars_")
            matrix = mars(learning_rate, variant=variant, weight_decay=weight_decay, **options)
    rules: dict[Any, optax.GradientTransformation] = {
        "matrix": matrix,
        "embedding": adamw(embedding_scale),
        "head": adamw(head_scale),
        "vector": adamw(vector_scale),
    }
    return optax.partition(rules, jax.tree.map_with_path(label, matrix_specs))
