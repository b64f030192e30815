"""A resolved config with its data and its train step: what a run, the replay of an audit, a
comparison and the benchmarks open in the same way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import Mesh

from maxmars.checkpoint import Checkpoint, Loaded
from maxmars.config import TrainConfig
from maxmars.data.batches import DataSplit, TrainBatches, open_data
from maxmars.distributed import processes
from maxmars.train.resolve import Resolved
from maxmars.train.step import (
    TrainState,
    TrainStep,
    abstract_saved_state,
    continued_state,
    init_train_state,
    make_train_step,
)


class Restored(NamedTuple):
    """What training goes on from."""

    checkpoint: Checkpoint
    state: TrainState
    position: int
    """Number of the next example."""


@dataclass(frozen=True)
class Training:
    """All that trains but a state and its place in the data."""

    data: DataSplit
    step: TrainStep

    @property
    def config(self) -> TrainConfig:
        """The resolved config."""
        return self.step.config

    @property
    def mesh(self) -> Mesh:
        return self.step.mesh

    @functools.cached_property
    def data_digest(self) -> str:
        """Digest of the training tokens, which process 0 makes; all processes ask at once."""
        return processes.text_from_primary(self.data.digest) or ""

    def new_state(self) -> TrainState:
        """The state of step 0, from the config's seed."""
        return init_train_state(self.config, self.step.parameters)

    def restore(
        self,
        load: Callable[[Callable[[Checkpoint], TrainState]], Loaded],
        *,
        skip_examples: int = 0,
        new_optimizer_state: bool = False,
    ) -> Restored:
        """The state of a checkpoint, as the config goes on with it.

        Args:
          load: reads a checkpoint, given a function from it to the abstract state to read.
          skip_examples: how many are left out from the checkpoint's position on.
          new_optimizer_state: make the state of the optimizer anew.
        """

        def stored(checkpoint: Checkpoint) -> TrainState:
            return abstract_saved_state(
                self.step, checkpoint, new_optimizer_state=new_optimizer_state
            )

        loaded = load(stored)
        state = continued_state(self.step, loaded.state)
        position = loaded.checkpoint.data_position + skip_examples
        return Restored(loaded.checkpoint, state, position)

    def batches(self, position: int = 0, *, prefetch: bool = True) -> TrainBatches:
        """The batches from an example on; to be closed.

        Args:
          position: number of the first example.
          prefetch: read batches ahead in another thread.
        """
        ahead = {} if prefetch else {"prefetch_steps": 0}
        return TrainBatches(self.data, self.config, self.mesh, position=position, **ahead)


def open_training(resolved: Resolved, data: DataSplit | None = None) -> Training:
    """Open the data of a config and make its train step.

    Args:
      resolved: what to train.
      data: its training tokens, if they are open already.

    Raises:
      ValueError, FileNotFoundError: see `open_data`.
    """
    config = resolved.config
    if data is None:
        data = open_data(config.data, "train", model=config.model)
    return Training(data, make_train_step(config, resolved.parameters, data.types))
