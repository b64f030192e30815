"""GPT-2 as the MARS papers ran it (arXiv 2411.10438, 2510.21800), with every optimizer.

    maxmars train gpt2:size=small,optimizer=mars --data.path DIR --mesh.fsdp 8

Choices: size=tiny|small|medium|large|xl, data=openwebtext|fineweb_edu, and
optimizer=adamw|muon|moonlight|lion|adopt|sophia|soap|mars|mars_exact|mars_lion|mars_shampoo|mars_m.
`--data.path` is a directory of GPT-2 tokens (`maxmars data prepare`; nanoGPT's, llm.c's and TFDS's
are read as they are). 480 sequences of 1,024 tokens a step; 100,000 steps are 49B tokens.

Published best validation loss on OpenWebText in nats a token, after 5B / 20B / 50B tokens (10k /
40k / 100k steps):

    size     AdamW                    Muon                     MARS-AdamW (approximate)
    small    3.193 / 3.024 / 2.885    3.165 / 3.006 / 2.901    3.108 / 2.981 / 2.849
    medium   3.084 / 2.821 / 2.691    3.009 / 2.813 / 2.688    2.969 / 2.763 / 2.636
    large    3.013 / 2.741 / 2.561    2.915 / 2.691 / 2.573    2.876 / 2.647 / 2.518

Exact MARS, small: 3.107 / 2.980 / 2.847. HellaSwag after 50B tokens of FineWeb-Edu: small 36.91
with MARS against 36.26 with AdamW, XL 56.52 against 53.93.

The values of adamw, mars and mars_exact are the official repository's; so are muon's and mars_m's,
but for the sizes and data marked below. The others' are starting points after their papers' rules
of thumb, not published for these runs.

Official habits that this keeps: no biases, 50,304 rows of vocabulary all in the softmax, attention
logits scaled by the inverse layer index, LayerNorm gains decayed by 0.1 under MARS, everything
decayed under MARS-M, and microbatch gradients summed (over 4 or 12 microbatches) before the clip
to norm 1, so that almost every step is normalised.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from maxmars.config import (
    AdamWConfig,
    AdoptConfig,
    EvalConfig,
    GPT2Config,
    LionConfig,
    MarsConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    SoapConfig,
    SophiaConfig,
    TokenShardsConfig,
    TrainConfig,
)

Size = Literal["tiny", "small", "medium", "large", "xl"]
Data = Literal["openwebtext", "fineweb_edu"]
Optimizer = Literal[
    "adamw",
    "muon",
    "moonlight",
    "lion",
    "adopt",
    "sophia",
    "soap",
    "mars",
    "mars_exact",
    "mars_lion",
    "mars_shampoo",
    "mars_m",
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What varies with the size: peak learning rates, and the habits of the official runs."""

    model: GPT2Config
    adamw: float
    mars: float
    vector: float  # of norms and biases under MARS; AdamW's share under Muon
    muon: float
    mars_m: dict[Data, float]
    minimum: float  # the end of the cosine, the same for every optimizer
    microbatches: int  # whose gradients the official code sums


RECIPES: dict[Size, Recipe] = {
    "tiny": Recipe(  # to try a recipe out on a laptop, with small's rates; nobody published it
        model=GPT2Config(num_layers=4, num_heads=4, embed_dim=128, max_seq_len=256),
        adamw=6e-4,
        mars=6e-3,
        vector=3e-3,
        muon=2e-2,
        mars_m={"openwebtext": 6e-3, "fineweb_edu": 1e-2},
        minimum=3e-5,
        microbatches=4,
    ),
    "small": Recipe(
        model=GPT2Config.small(),
        adamw=6e-4,
        mars=6e-3,
        vector=3e-3,
        muon=2e-2,
        mars_m={"openwebtext": 6e-3, "fineweb_edu": 1e-2},
        minimum=3e-5,
        microbatches=4,
    ),
    "medium": Recipe(
        model=GPT2Config.medium(),
        adamw=3e-4,
        mars=3e-3,
        vector=1.5e-3,
        muon=1e-2,
        mars_m={"openwebtext": 5e-3, "fineweb_edu": 5e-3},
        minimum=6e-5,
        microbatches=4,
    ),
    "large": Recipe(
        model=GPT2Config.large(),
        adamw=2e-4,
        mars=2e-3,
        vector=1e-3,
        muon=6.67e-3,
        mars_m={"openwebtext": 5e-3, "fineweb_edu": 5e-3},
        minimum=1e-5,
        microbatches=12,
    ),
    "xl": Recipe(
        model=GPT2Config.xl(),
        adamw=2e-4,
        mars=2e-3,
        vector=1e-3,
        muon=6.67e-3,  # not published: large's
        mars_m={"openwebtext": 3e-3, "fineweb_edu": 3e-3},  # OpenWebText's is not published
        minimum=1e-5,
        microbatches=12,
    ),
}


def get_config(
    size: Size = "small", optimizer: Optimizer = "mars", data: Data = "openwebtext"
) -> TrainConfig:
    recipe = RECIPES[size]
    optimizer_config = get_optimizer(optimizer, recipe, data)
    return TrainConfig(
        name=f"gpt2-{size}-{optimizer}" + ("" if data == "openwebtext" else f"-{data}"),
        num_steps=100_000,
        global_batch_size=480,
        num_microbatches=recipe.microbatches,
        gradient_multiplier=float(recipe.microbatches),
        model=dataclasses.replace(
            recipe.model,
            vocab_size=50304,
            use_bias=False,
            scale_attn_by_inverse_layer_idx=True,
            remat="full",
        ),
        optimizer=optimizer_config,
        schedule=ScheduleConfig(
            warmup_steps=2000,
            final_fraction=min(1.0, recipe.minimum / optimizer_config.learning_rate),
        ),
        data=TokenShardsConfig(path=f"data/{data}"),
        eval=EvalConfig(every=1000, num_windows=3000),
    )


def get_optimizer(optimizer: Optimizer, recipe: Recipe, data: Data) -> OptimizerConfig:
    match optimizer:
        case "adamw":
            return AdamWConfig(learning_rate=recipe.adamw, b1=0.9, b2=0.95, weight_decay=0.1)
        case "adopt":  # AdamW's values with the paper's b2 and eps
            return AdoptConfig(learning_rate=recipe.adamw, weight_decay=0.1)
        case "lion":  # a tenth of AdamW's rate, ten times its decay
            return LionConfig(learning_rate=recipe.adamw / 10, weight_decay=1.0)
        case "sophia":
            return SophiaConfig(learning_rate=recipe.adamw)
        case "soap":
            return SoapConfig(learning_rate=recipe.vector)
        case "muon":
            return MuonConfig(
                learning_rate=recipe.muon, vector_learning_rate_scale=recipe.vector / recipe.muon
            )
        case "moonlight":  # one rate for all, MARS-M's
            return MuonConfig(
                learning_rate=recipe.mars_m[data],
                weight_decay=0.1,
                vector_learning_rate_scale=1.0,
                vector_weight_decay=0.1,
                ns_scale="rms",
            )
        case "mars_m":
            return MarsConfig(
                variant="m",
                learning_rate=recipe.mars_m[data],
                weight_decay=0.1,
                decay_embeddings=True,
                vector_learning_rate_scale=1.0,
                vector_weight_decay=0.1,
            )
        case "mars":
            return get_mars(recipe, recipe.mars)
        case "mars_exact":
            return dataclasses.replace(get_mars(recipe, recipe.mars), exact=True)
        case "mars_lion":  # a twentieth of MARS-AdamW's rate, as in the reference runs
            rate = recipe.mars / 20
            return dataclasses.replace(
                get_mars(recipe, rate), variant="lion", weight_decay=0.01 * recipe.mars / rate
            )
        case "mars_shampoo":  # Muon's rate: the updates have the same size
            return dataclasses.replace(get_mars(recipe, recipe.muon), variant="shampoo")


def get_mars(recipe: Recipe, learning_rate: float) -> MarsConfig:
    return MarsConfig(
        learning_rate=learning_rate,
        b1=0.95,
        b2=0.99,
        gamma=0.025,
        weight_decay=1e-2,
        vector_learning_rate_scale=recipe.vector / learning_rate,
        vector_weight_decay=0.1,
    )
