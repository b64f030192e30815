"""GPT-2 on OpenWebText, as the MARS paper (arXiv 2411.10438) ran it.

    maxmars train configs/gpt2.py:size=small,optimizer=mars --data.path DIR --mesh.fsdp 8

Choices: size=small|medium|large|xl, optimizer=adamw|mars. `--data.path` is a directory of GPT-2
tokens (`maxmars data prepare`). 480 sequences of 1,024 tokens a step; 100,000 steps are 49B tokens.

Published best validation loss in nats a token, after 5B / 20B / 50B tokens (10k / 40k / 100k
steps):

    size     AdamW                    MARS-AdamW (approximate)
    small    3.193 / 3.024 / 2.885    3.108 / 2.981 / 2.849
    medium   3.084 / 2.821 / 2.691    2.969 / 2.763 / 2.636
    large    3.013 / 2.741 / 2.561    2.876 / 2.647 / 2.518

The values are those of the official repository's configs, its habits included: no biases, 50,304
rows of vocabulary all in the softmax, attention logits scaled by the inverse layer index,
LayerNorm gains decayed by 0.1 under MARS, and microbatch gradients summed (over 4 or 12
microbatches) before the clip to norm 1, so that almost every step is normalised.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from maxmars.config import (
    AdamWConfig,
    EvalConfig,
    GPT2Config,
    MarsConfig,
    OptimizerConfig,
    ScheduleConfig,
    TokenShardsConfig,
    TrainConfig,
)

Size = Literal["small", "medium", "large", "xl"]
Optimizer = Literal["adamw", "mars"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the official configs vary with the size."""

    adamw_learning_rate: float
    mars_learning_rate: float
    mars_vector_learning_rate: float
    min_learning_rate: float  # the end of the cosine, the same for every optimizer
    official_microbatches: int  # whose gradients the official code sums


RECIPES = {
    "small": Recipe(
        adamw_learning_rate=6e-4,
        mars_learning_rate=6e-3,
        mars_vector_learning_rate=3e-3,
        min_learning_rate=3e-5,
        official_microbatches=4,
    ),
    "medium": Recipe(
        adamw_learning_rate=3e-4,
        mars_learning_rate=3e-3,
        mars_vector_learning_rate=1.5e-3,
        min_learning_rate=6e-5,
        official_microbatches=4,
    ),
    "large": Recipe(
        adamw_learning_rate=2e-4,
        mars_learning_rate=2e-3,
        mars_vector_learning_rate=1e-3,
        min_learning_rate=1e-5,
        official_microbatches=12,
    ),
    "xl": Recipe(
        adamw_learning_rate=2e-4,
        mars_learning_rate=2e-3,
        mars_vector_learning_rate=1e-3,
        min_learning_rate=1e-5,
        official_microbatches=12,
    ),
}

MODELS = {
    "small": GPT2Config.small(),
    "medium": GPT2Config.medium(),
    "large": GPT2Config.large(),
    "xl": GPT2Config.xl(),
}


def get_config(size: Size = "small", optimizer: Optimizer = "mars") -> TrainConfig:
    recipe = RECIPES[size]
    optimizer_config = get_optimizer(optimizer, recipe)
    return TrainConfig(
        name=f"gpt2-{size}-{optimizer}",
        num_steps=100_000,
        global_batch_size=480,
        num_microbatches=recipe.official_microbatches,
        gradient_multiplier=float(recipe.official_microbatches),
        model=dataclasses.replace(
            MODELS[size],
            vocab_size=50304,
            use_bias=False,
            scale_attn_by_inverse_layer_idx=True,
            remat="full",
        ),
        optimizer=optimizer_config,
        schedule=ScheduleConfig(
            warmup_steps=2000,
            final_fraction=recipe.min_learning_rate / optimizer_config.learning_rate,
        ),
        data=TokenShardsConfig(path="data/openwebtext"),
        eval=EvalConfig(every=1000, num_windows=3000),
    )


def get_optimizer(optimizer: Optimizer, recipe: Recipe) -> OptimizerConfig:
    match optimizer:
        case "adamw":
            return AdamWConfig(
                learning_rate=recipe.adamw_learning_rate, b1=0.9, b2=0.95, weight_decay=0.1
            )
        case "mars":
            rate = recipe.mars_learning_rate
            return MarsConfig(
                learning_rate=rate,
                b1=0.95,
                b2=0.99,
                gamma=0.025,
                weight_decay=1e-2,
                vector_learning_rate_scale=recipe.mars_vector_learning_rate / rate,
                vector_weight_decay=0.1,
            )
