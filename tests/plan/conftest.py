"""Plans for eight fake CPU devices that tests share; each is compiled when first asked for."""

import dataclasses
import functools

import pytest
from tiny import ADAMW, MODEL, tiny_config

from maxmars.config import CheckpointConfig, EvalConfig, MarsConfig, MeshConfig
from maxmars.plan import get_topology, make_plan

OPTIMIZERS = {
    "adamw": ADAMW,
    "mars": MarsConfig(),
    "shampoo": MarsConfig(variant="shampoo"),
    "exact": MarsConfig(exact=True),
    "average": ADAMW,
}


@pytest.fixture(scope="session")
def config_of():
    """Config of an optimizer's plan: three steps of a tiny model without biases."""

    def config(name, **changes):
        return tiny_config(
            optimizer=OPTIMIZERS[name],
            model=dataclasses.replace(MODEL, use_bias=False),
            mesh=MeshConfig(data=1, fsdp=4, tensor=2),
            num_steps=3,
            ema_decay=0.9 if name == "average" else None,
            checkpoint=CheckpointConfig(every=None),
            **changes,
        )

    return config


@pytest.fixture(scope="session")
def plan_of(config_of):
    """Plan of an optimizer; with the evaluation step for `shampoo` only."""

    @functools.cache
    def plan(name):
        config = config_of(name, eval=EvalConfig(every=2))
        return make_plan(config, get_topology("cpu:8"), evaluate=name == "shampoo")

    return plan
