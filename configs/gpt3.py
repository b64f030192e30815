"""GPT-3's sizes of 6.7 and 13 billion parameters, with the optimizers whose cost differs most.

    maxmars plan gpt3:size=6.7b,optimizer=mars --topology v5p:4x4x4
    maxmars train gpt3:size=13b,optimizer=mars_shampoo --data.path DIR

Choices: size=6.7b|13b, optimizer=adamw|mars|mars_shampoo. `--data.path` is a directory of GPT-2
tokens (`maxmars data prepare`).

Width, depth, heads of 128, context, AdamW's rates and moments, the clip, the decay and 2M tokens a
step are table 2.1 and appendix B of GPT-3's paper (arXiv 2005.14165; the 13B model has 5,120
columns here, not 5,140, so that 40 heads of 128 fill them). The blocks are GPT-2's: every layer
attends to the whole window, where every second one of GPT-3's is sparse.

Nobody has published MARS at these sizes. Its rates follow those of the sizes in `gpt2`: MARS has
ten times AdamW's, MARS-Shampoo a third more than thirty times. Take them as a start for a search.
"""

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

Size = Literal["6.7b", "13b"]
Optimizer = Literal["adamw", "mars", "mars_shampoo"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What varies with the size."""

    num_layers: int
    num_heads: int
    learning_rate: float  # AdamW's


RECIPES: dict[Size, Recipe] = {
    "6.7b": Recipe(num_layers=32, num_heads=32, learning_rate=1.2e-4),
    "13b": Recipe(num_layers=40, num_heads=40, learning_rate=1.0e-4),
}


def get_config(size: Size = "6.7b", optimizer: Optimizer = "mars") -> TrainConfig:
    recipe = RECIPES[size]
    return TrainConfig(
        name=f"gpt3-{size}-{optimizer}",
        num_steps=150_000,  # of 2M tokens: the paper's 300B
        global_batch_size=1024,
        model=GPT2Config(
            num_layers=recipe.num_layers,
            num_heads=recipe.num_heads,
            embed_dim=128 * recipe.num_heads,
            max_seq_len=2048,
            vocab_size=50257,
            vocab_pad_multiple=128,
            use_bias=False,
            remat="auto",
        ),
        optimizer=get_optimizer(optimizer, recipe.learning_rate),
        schedule=ScheduleConfig(warmup_steps=2000, final_fraction=0.1),
        data=TokenShardsConfig(path="data/fineweb_edu"),
        eval=EvalConfig(every=1000, num_windows=1024),
    )


def get_optimizer(optimizer: Optimizer, adamw: float) -> OptimizerConfig:
    match optimizer:
        case "adamw":
            return AdamWConfig(learning_rate=adamw, b1=0.9, b2=0.95, weight_decay=0.1)
        case "mars":
            return get_mars("adamw", 10 * adamw, adamw)
        case "mars_shampoo":
            return get_mars("shampoo", 33 * adamw, adamw)


def get_mars(variant: Literal["adamw", "shampoo"], learning_rate: float, adamw: float):
    return MarsConfig(
        variant=variant,
        learning_rate=learning_rate,
        gamma=0.025,
        weight_decay=1e-2,
        vector_learning_rate_scale=5 * adamw / learning_rate,
        vector_weight_decay=0.1,
    )
