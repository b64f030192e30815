"""A resolved config with its data and its train step.

Runs, `audit --replay`, comparisons and benchmarks all open a `Training`, so that they read the same
examples and compute the same steps. State and position in the data are the caller's: a step is a
pure function, and batches follow from a position.
"""

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
    init_train_state,
    make_train_step,
    restore_state,
)


class Restored(NamedTuple):
    """A restored checkpoint, with the state and the position from which training continues."""

    checkpoint: Checkpoint
    state: TrainState
    position: int
    """Index of the next example."""


@dataclass(frozen=True)
class Training:
    """The parts of training that do not change from step to step."""

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
        """Digest of the training tokens; process 0 computes it for all, and all must call."""
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
        """Restore the state of a checkpoint, adapted to the config.

        Args:
          load: reads a checkpoint. Its argument is a function from the checkpoint's metadata to the
            abstract state to read.
          skip_examples: number of examples to leave out after the checkpoint's position.
          new_optimizer_state: do not read the optimizer's state; make a new one.
        """
        abstract = functools.partial(
            abstract_saved_state, self.step, new_optimizer_state=new_optimizer_state
        )
        loaded = load(abstract)
        state = restore_state(self.step, loaded.state)
        position = loaded.checkpoint.data_position + skip_examples
        return Restored(loaded.checkpoint, state, position)

    def batches(self, position: int = 0, *, prefetch: bool = True) -> TrainBatches:
        """The batches from a position in the data on; the caller closes them.

        Args:
          position: index of the first example.
          prefetch: read batches ahead in another thread.
        """
        ahead = {} if prefetch else {"prefetch_steps": 0}  # else the default of `TrainBatches`
        return TrainBatches(self.data, self.config, self.mesh, position=position, **ahead)


def open_training(resolved: Resolved, data: DataSplit | None = None) -> Training:
    """Open the data of a config and make its train step.

    Args:
      resolved: what to train.
      data: the training tokens, if they are open already.

    Raises:
      ValueError, FileNotFoundError: see `open_data`.
    """
    config = resolved.config
    if data is None:
        data = open_data(config.data, "train", model=config.model)
    return Training(data, make_train_step(config, resolved.parameters, data.types))
