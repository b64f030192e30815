"""The compiled programs of a contender, which all its cells share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from maxmars import hlo, sharding
from maxmars.config import TrainConfig
from maxmars.data.pipeline import SplitTokens, TrainBatches, open_data
from maxmars.evaluate import EvalStep, make_eval_step
from maxmars.mesh_checks import check_mesh
from maxmars.model import num_parameters
from maxmars.optimizer_config import SophiaConfig
from maxmars.plan.memory import bytes_on_chip
from maxmars.train_step import (
    TrainState,
    TrainStep,
    make_hyperparams,
    make_initializer,
    make_train_step,
)


@dataclass(frozen=True, kw_only=True)
class Programs:
    """What is compiled once for all learning rates and seeds."""

    mesh: Mesh
    tokens: SplitTokens
    train_step: TrainStep
    eval_step: EvalStep
    initialize: Callable[[int], dict[str, Any]]

    def initial_state(self, config: TrainConfig) -> TrainState:
        """The state that a cell's config starts from; its weights depend on the seed alone."""
        fields = self.initialize(config.seed)
        return TrainState(**fields | {"hyperparams": make_hyperparams(config, self.mesh)})


class ProgramStore:
    """Makes each contender's programs when they are first asked for, and keeps them."""

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        """Compile for these devices, or for all of them."""
        self._devices = devices
        self._made: dict[TrainConfig, Programs] = {}

    def get(self, config: TrainConfig) -> Programs:
        """The programs of a cell's config.

        Raises:
          ValueError, FileNotFoundError: mesh, data and model do not fit together.
        """
        key = _without_rate_and_seed(config)
        if key not in self._made:
            self._made[key] = _make_programs(config, self._devices)
        return self._made[key]


def _without_rate_and_seed(config: TrainConfig) -> TrainConfig:
    """What the programs depend on."""
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1.0)
    # Sophia's step draws labels with the seed, as a constant of the program.
    seed = config.seed if isinstance(optimizer, SophiaConfig) else 0
    return dataclasses.replace(config, name="any", optimizer=optimizer, seed=seed)


def _make_programs(config: TrainConfig, devices: Sequence[jax.Device] | None) -> Programs:
    mesh = sharding.make_mesh(config.mesh, devices)
    check_mesh(config, mesh.shape)
    tokens = open_data(config.data, "train", model=config.model)
    next(TrainBatches(tokens, config, mesh, prefetch_steps=0))  # enough tokens, and readable?
    return Programs(
        mesh=mesh,
        tokens=tokens,
        train_step=make_train_step(config, mesh),
        eval_step=make_eval_step(config.model, mesh),
        initialize=make_initializer(config, mesh),
    )


def describe(config: TrainConfig, programs: Programs) -> dict[str, Any]:
    """What a contender's step keeps and moves, JSON-ready; bytes are those of one device."""
    state = programs.train_step.abstract_state
    return {
        "num_parameters": num_parameters(config.model),
        "num_devices": programs.mesh.size,
        "parameter_bytes": bytes_on_chip(state.params),
        "optimizer_state_bytes": bytes_on_chip((state.opt_state, state.prev_params)),
        "collective_bytes": _collective_bytes(programs),
    }


def _collective_bytes(programs: Programs) -> int:
    """Bytes that one step moves between devices, those of the results on one of them."""
    if programs.mesh.size == 1:
        return 0
    compiled: jax.stages.Compiled = programs.train_step.lower().compile()
    return sum(c.bytes for c in hlo.collectives(compiled, programs.mesh))
