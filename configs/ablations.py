"""What each part of MARS-AdamW does: the same run with one thing changed.

The correction's strength gamma (0 is none, 0.025 the papers'), the bound on each corrected
gradient (1 is the papers'), and exact against approximate MARS, on two CPU cores:

    maxmars compare ablations --optimizers mars gamma_0 gamma_0.1 --workdir DIR

and as the papers ran it, on a pod or a node, one run each, which `maxmars report RUN RUN --out DIR`
compares:

    maxmars train ablations:size=small,optimizer=gamma_0 --data.path DIR --mesh.fsdp 8

Published for small, best validation loss after 50B tokens of OpenWebText: exact 2.847, approximate
2.849, AdamW 2.885.
"""

import dataclasses
from typing import Literal

from maxmars.config import MarsConfig, TrainConfig, load_config

Size = Literal["tiny", "small", "medium", "large", "xl"]
Optimizer = Literal[
    "mars",
    "gamma_0",
    "gamma_0.001",
    "gamma_0.005",
    "gamma_0.01",
    "gamma_0.05",
    "gamma_0.1",
    "clip_none",
    "clip_0.1",
    "clip_0.3",
    "exact",
]


def get_config(size: Size = "tiny", optimizer: Optimizer = "mars") -> TrainConfig:
    config = load_config("compare_tiny" if size == "tiny" else f"gpt2:size={size}")
    assert isinstance(config.optimizer, MarsConfig)
    name = config.name if optimizer == "mars" else f"{config.name}-{optimizer}"
    return dataclasses.replace(config, name=name, optimizer=change(config.optimizer, optimizer))


def change(config: MarsConfig, optimizer: Optimizer) -> MarsConfig:
    part, _, value = optimizer.partition("_")
    match part:
        case "gamma":
            return dataclasses.replace(config, gamma=float(value))
        case "clip":
            threshold = None if value == "none" else float(value)
            return dataclasses.replace(config, clip_threshold=threshold)
        case "exact":
            return dataclasses.replace(config, exact=True)
        case _:
            return config
