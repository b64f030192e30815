"""The official GPT-2 and its training runs (see `reference/gpt2_reference.*`) in our parameter
layout."""

import json
from pathlib import Path

import numpy as np

from maxmars.config import (
    AdamWConfig,
    GPT2Config,
    MarsConfig,
    PythonSourcesConfig,
    ScheduleConfig,
    TrainConfig,
)


class Reference:
    """Arrays and run arguments of the reference file."""

    def __init__(self, directory: Path):
        with np.load(directory / "reference" / "gpt2_reference.npz") as arrays:
            self.arrays = dict(arrays)
        self.info = json.loads((directory / "reference" / "gpt2_reference.json").read_text())

    def model_config(self, dtype: str) -> GPT2Config:
        """The model in `dtype`; in bfloat16 its parameters stay in float32, as in training."""
        model = self.info["model"]
        return GPT2Config(
            num_layers=model["n_layer"],
            num_heads=model["n_head"],
            embed_dim=model["n_embd"],
            max_seq_len=model["block_size"],
            vocab_size=model["vocab_size"],
            use_bias=model["bias"],
            scale_attn_by_inverse_layer_idx=model["scale_attn_by_inverse_layer_idx"],
            param_dtype="float32" if dtype == "bfloat16" else dtype,
            compute_dtype=dtype,
        )

    def tree(self, prefix: str) -> dict:
        """The arrays `prefix/transformer...` (torch orientation) as a tree of our parameters."""
        model = self.info["model"]
        layers, heads, embed = model["n_layer"], model["n_head"], model["n_embd"]
        head_dim = embed // heads

        def get(name: str) -> np.ndarray:
            # The repository keeps initial parameters in float16, which holds them exactly.
            return self.arrays[f"{prefix}/transformer.{name}.weight"].astype(np.float64)

        def stacked(name: str) -> np.ndarray:
            return np.stack([get(f"h.{i}.{name}") for i in range(layers)])

        def kernel(name: str) -> np.ndarray:
            return stacked(name).transpose(0, 2, 1)

        return {
            "wte": {"embedding": get("wte")},
            "wpe": {"embedding": get("wpe")},
            "h": {
                "ln_1": {"scale": stacked("ln_1")},
                "ln_2": {"scale": stacked("ln_2")},
                "attn": {
                    "c_attn": {
                        "kernel": kernel("attn.c_attn").reshape(layers, embed, 3, heads, head_dim)
                    },
                    "c_proj": {
                        "kernel": kernel("attn.c_proj").reshape(layers, heads, head_dim, embed)
                    },
                },
                "mlp": {
                    "c_fc": {"kernel": kernel("mlp.c_fc")},
                    "c_proj": {"kernel": kernel("mlp.c_proj")},
                },
            },
            "ln_f": {"scale": get("ln_f")},
        }

    def train_config(self, run: str, dtype: str) -> TrainConfig:
        arguments = self.info["runs"][run]
        return TrainConfig(
            name=run,
            num_steps=self.info["steps"],
            global_batch_size=self.info["batch"] * self.info["accum"],
            num_microbatches=self.info["accum"],
            gradient_clip_norm=arguments["grad_clip"],
            model=self.model_config(dtype),
            optimizer=_optimizer(arguments, dtype),
            schedule=ScheduleConfig(
                warmup_steps=arguments["warmup"],
                final_fraction=arguments["min_lr"] / arguments["lr"],
            ),
            data=PythonSourcesConfig(),
        )


def _optimizer(arguments: dict, dtype: str) -> AdamWConfig | MarsConfig:
    shared = {
        "learning_rate": arguments["lr"],
        "b1": arguments["betas"][0],
        "b2": arguments["betas"][1],
        "weight_decay": arguments["weight_decay"],
    }
    if arguments["optimizer"] == "adamw":
        return AdamWConfig(**shared)
    return MarsConfig(
        **shared,
        variant=arguments["mars_type"].removeprefix("mars-"),
        exact=not arguments["is_approx"],
        embeddings="orthogonalize",
        ns_dtype=dtype,
        gamma=arguments["gamma"],
        optimize_vectors=arguments["optimize_1d"],
        vector_learning_rate_scale=arguments["lr_1d"] / arguments["lr"],
        vector_b1=arguments["betas_1d"][0],
        vector_b2=arguments["betas_1d"][1],
        vector_weight_decay=arguments["weight_decay_1d"],
    )
