"""GPT-2 as the MARS papers ran it (arXiv 2411.10438, 2510.21800), with every optimizer.

    maxmars train gpt2:size=small,optimizer=mars --data.path DIR --mesh.fsdp 8

Choices: size=tiny|small|medium|large|xl|6.7b|13b, data=openwebtext|fineweb_edu, and
optimizer=adamw|nadamw|muon|normuon|moonlight|lion|soap|mars|mars_exact|mars_lion|
mars_shampoo|mars_m.
`--data.path` is a directory of GPT-2 tokens (`maxmars data prepare`; nanoGPT's and llm.c's are
read as they are). 480 sequences of 1,024 tokens a step; 100,000 steps are 49B tokens. At 6.7b
and 13b it is 1,024 sequences of 2,048 tokens.

Published best validation loss on OpenWebText in nats a token, after 5B / 20B / 50B tokens (10k /
40k / 100k steps):

    size     AdamW                    Muon                     MARS-AdamW (approximate)
    small    3.193 / 3.024 / 2.885    3.165 / 3.006 / 2.901    3.108 / 2.981 / 2.849
    medium   3.084 / 2.821 / 2.691    3.009 / 2.813 / 2.688    2.969 / 2.763 / 2.636
    large    3.013 / 2.741 / 2.561    2.915 / 2.691 / 2.573    2.876 / 2.647 / 2.518

Exact MARS, small: 3.107 / 2.980 / 2.847. HellaSwag after 50B tokens of FineWeb-Edu: small 36.91
with MARS against 36.26 with AdamW, XL 56.52 against 53.93.

Where the values come from (XL and tiny take large's and small's where nobody published theirs):

* adamw, mars, mars_exact: the official repository.
* muon: the official repository, which gives Muon to wte and wpe too; `--optimizer.embeddings adamw`
  is Keller Jordan's. There the norms' rate ends at the minimum as well; here one schedule
  multiplies both rates, so theirs ends lower. There the norms decay by the rate after AdamW's
  correction of the bias, rate sqrt(1 - b2^t) / (1 - b1^t), here by the rate itself.
* normuon: Muon's rates and decays, and its repository's decay of the rows' averages and AdamW for
  embeddings; nobody has published it for these runs.
* mars_m, moonlight: the MARS-M repository, with the decay of 0.1 of its README (its shipped configs
  say 0.01) on every parameter.
* lion: the table of Sophia's repository; the decay is ten times AdamW's, Lion's own advice.
* soap: SOAP's repository, which rotates sides of up to 10,000. There embeddings are rotated on such
  sides too, and embeddings and vectors share the matrices' moments and decay; here AdamW has them.
* ademamix: adamw with `--optimizer.momentum-kernel.preset ademamix`, its `end-step` the steps,
  and the authors' `--optimizer.b2 0.999` and `--optimizer.learning-rate 1e-3` at small.
* nadamw: the best of Marin's sweeps (arXiv 2509.02046) at the nearest size, with its warmup and its
  decay to zero; those models and data are others.
* `optimizer=my_optim.py:make` or `optimizer=optax.contrib:adopt`: AdamW's rate.
* mars_lion, mars_shampoo: rates by rules of thumb, not published for these runs.
* 6.7b, 13b: width, depth, heads of 128, context, tokens a step, AdamW's rate and its end, betas,
  decay, and the clip of mean gradients are GPT-3's (arXiv 2005.14165). Nobody has published MARS at
  these sizes: MARS has ten times AdamW's rate, Muon and MARS-Shampoo 33 times, the others XL's
  values. Take them as a start for a search.

What differs from GPT-3 at 6.7b and 13b:

* its 13B has 5,140 columns; here 40 heads of 128 fill 5,120.
* attention: every second layer there sees a band alone; here all layers see all tokens before.
* biases, 50,257 rows of vocabulary, and logits of attention that no layer's index scales: there;
  here as at the other sizes (below).
* schedule: it warms up over 375M tokens (180 steps), decays over 260B and ends after 300B; here
  2,000 steps (4.2B tokens) of warmup and 100,000 steps (210B) of decay, as at the other sizes.
* its batch grows from 32,000 tokens over the first 4B to 12B; here it is whole from the start.
* data: it is Common Crawl, WebText2, books and Wikipedia; here one of `data`.

What differs from the official runs, beside what is said of the optimizers:

* windows: those start at random tokens, drawn with replacement (`--data.order random_windows`);
  here every window is read once an epoch, in a new random order each time.
* validation: those score other random windows each time, 3,000 of them, 1,000 at large and XL;
  here always the same 3,000 (`--eval.num-windows 1000`).
* the residual stream: PyTorch's autocast leaves it in float32 (`--model.residual-dtype float32`);
  here it is in bfloat16 like the products. model/README.md has what that costs and brings.

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
    EvalConfig,
    GPT2Config,
    LionConfig,
    MarsConfig,
    MuonConfig,
    NAdamWConfig,
    OptaxConfig,
    OptimizerConfig,
    ScheduleConfig,
    SoapConfig,
    Source,
    TokenShardsConfig,
    TrainConfig,
)

Size = Literal["tiny", "small", "medium", "large", "xl", "6.7b", "13b"]
Data = Literal["openwebtext", "fineweb_edu"]
NUM_STEPS = 100_000
Optimizer = Literal[
    "adamw",
    "nadamw",
    "muon",
    "normuon",
    "moonlight",
    "lion",
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
    nadamw: float
    nadamw_b1: float
    nadamw_warmup: int
    lion: float
    minimum: float  # the end of the cosine of the other optimizers
    microbatches: int  # whose gradients the official code sums
    batch_size: int = 480


RECIPES: dict[Size, Recipe] = {
    "small": Recipe(
        model=GPT2Config.small(),
        adamw=6e-4,
        mars=6e-3,
        vector=3e-3,
        muon=2e-2,
        mars_m={"openwebtext": 6e-3, "fineweb_edu": 1e-2},
        nadamw=8e-3,
        nadamw_b1=0.95,
        nadamw_warmup=2000,
        lion=1e-4,
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
        nadamw=8e-3,
        nadamw_b1=0.95,
        nadamw_warmup=2000,
        lion=1e-4,
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
        nadamw=4e-3,
        nadamw_b1=0.98,
        nadamw_warmup=4000,
        lion=8e-5,
        minimum=1e-5,
        microbatches=12,
    ),
}
RECIPES["tiny"] = dataclasses.replace(  # to try a recipe out on a laptop
    RECIPES["small"],
    model=GPT2Config(num_layers=4, num_heads=4, embed_dim=128, max_seq_len=256),
)
RECIPES["xl"] = dataclasses.replace(
    RECIPES["large"],
    model=GPT2Config.xl(),
    mars_m={"openwebtext": 3e-3, "fineweb_edu": 3e-3},  # OpenWebText's is not published
)
RECIPES["6.7b"] = dataclasses.replace(
    RECIPES["xl"],
    model=GPT2Config(num_layers=32, num_heads=32, embed_dim=4096, max_seq_len=2048),
    adamw=1.2e-4,
    mars=1.2e-3,
    vector=6e-4,
    muon=4e-3,
    minimum=1.2e-5,
    microbatches=1,
    batch_size=1024,
)
RECIPES["13b"] = dataclasses.replace(
    RECIPES["6.7b"],
    model=GPT2Config(num_layers=40, num_heads=40, embed_dim=5120, max_seq_len=2048),
    adamw=1e-4,
    mars=1e-3,
    vector=5e-4,
    muon=3.3e-3,
    minimum=1e-5,
)


def get_config(
    size: Size = "small", optimizer: Optimizer | Source = "mars", data: Data = "openwebtext"
) -> TrainConfig:
    recipe = RECIPES[size]
    optimizer_config = get_optimizer(optimizer, recipe, data)
    named = optimizer.short if isinstance(optimizer, Source) else optimizer
    minimum = 0.0 if optimizer == "nadamw" else recipe.minimum
    return TrainConfig(
        name=f"gpt2-{size}-{named}" + ("" if data == "openwebtext" else f"-{data}"),
        num_steps=NUM_STEPS,
        global_batch_size=recipe.batch_size,
        gradient_multiplier=float(recipe.microbatches),
        model=dataclasses.replace(
            recipe.model,
            vocab_size=50304,
            use_bias=False,
            scale_attn_by_inverse_layer_idx=True,
            remat="auto",
        ),
        optimizer=optimizer_config,
        schedule=ScheduleConfig(
            warmup_steps=recipe.nadamw_warmup if optimizer == "nadamw" else 2000,
            final_fraction=min(1.0, minimum / optimizer_config.learning_rate),
        ),
        data=TokenShardsConfig(path=f"data/{data}"),
        eval=EvalConfig(every=1000, num_windows=3000),
    )


def get_optimizer(optimizer: Optimizer | Source, recipe: Recipe, data: Data) -> OptimizerConfig:
    match optimizer:
        case Source():
            return OptaxConfig(make=optimizer, learning_rate=recipe.adamw)
        case "adamw":
            return AdamWConfig(learning_rate=recipe.adamw, b1=0.9, b2=0.95, weight_decay=0.1)
        case "nadamw":
            return NAdamWConfig(learning_rate=recipe.nadamw, b1=recipe.nadamw_b1)
        case "lion":
            return LionConfig(learning_rate=recipe.lion, weight_decay=1.0)
        case "soap":
            return SoapConfig(learning_rate=3e-3, max_precondition_dim=10_000)
        case "muon":
            return MuonConfig(
                learning_rate=recipe.muon,
                vector_learning_rate_scale=recipe.vector / recipe.muon,
                vector_weight_decay=0.1,
                embeddings="orthogonalize",
            )
        case "normuon":
            return MuonConfig(
                learning_rate=recipe.muon,
                vector_learning_rate_scale=recipe.vector / recipe.muon,
                vector_weight_decay=0.1,
                row_normalization=0.95,
            )
        case "moonlight":  # one rate for all, MARS-M's
            return MuonConfig(
                learning_rate=recipe.mars_m[data],
                weight_decay=0.1,
                decay_embeddings=True,
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
