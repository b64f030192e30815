"""The parameters alone: of a checkpoint, all at once or one by one, and as a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from orbax.checkpoint import v1

from maxmars.checkpoint.contents import make_meta
from maxmars.checkpoint.directory import Directory, resolve
from maxmars.checkpoint.restore import first_sound, read_meta_together, read_params
from maxmars.config import GPT2Config, TrainConfig, from_dict
from maxmars.digest import digest, to_plain
from maxmars.metrics import environment
from maxmars.orbax_io import orbax_context, root_cause

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """What `load_model` found: the model, its parameters, and the checkpoint's step."""

    config: GPT2Config
    params: Any
    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model whose parameters are still on disk."""

    config: GPT2Config
    step: int
    read: Callable[[Sequence[str], jax.ShapeDtypeStruct], np.ndarray]
    """One parameter, from its path and its abstract value."""


def load_model(
    directory: Directory,
    abstract_params_of: Callable[[GPT2Config], Any],
    step: int | None = None,
) -> LoadedModel:
    """The model of the newest checkpoint whose parameters' digests agree, or of that of `step`.

    Args:
      directory: of the checkpoints, as the `Checkpointer` got it.
      abstract_params_of: tree of `jax.ShapeDtypeStruct` for the model of a checkpoint; those
        without a sharding come to the first of this process's devices.
      step: take this checkpoint and no other.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of `step`.
      ValueError: every checkpoint (or that of `step`) is damaged, or of another version of maxmars.
    """

    def load(path: Any) -> LoadedModel:
        meta = read_meta_together(path)
        config = _model(meta)
        params = read_params(path, meta, abstract_params_of(config))
        return LoadedModel(config=config, params=params, step=meta["step"])

    return first_sound(resolve(directory), step, load)[0]


def stream_model(
    directory: Directory, use: Callable[[StoredModel], Result], step: int | None = None
) -> Result:
    """What `use` makes of a model that it reads one parameter at a time.

    Args:
      directory: of the checkpoints, as the `Checkpointer` got it.
      use: called with the model of the newest checkpoint; where a parameter that it reads is
        damaged, it is left and called again with the checkpoint before.
      step: take this checkpoint and no other.

    Raises:
      FileNotFoundError, ValueError: see `load_model`.
    """

    def attempt(path: Any) -> Result:
        meta = read_meta_together(path)

        def read(keys: Sequence[str], abstract: jax.ShapeDtypeStruct) -> np.ndarray:
            tree = functools.reduce(lambda inner, key: {key: inner}, reversed(keys), abstract)
            return np.asarray(jax.tree.leaves(read_params(path, meta, tree, "/".join(keys)))[0])

        return use(StoredModel(config=_model(meta), step=meta["step"], read=read))

    return first_sound(resolve(directory), step, attempt)[0]


def save_params(directory: Directory, config: GPT2Config, params: Any, *, mesh: Mesh) -> None:
    """Write parameters that no run of ours trained as the checkpoint of step 0.

    Args:
      directory: of checkpoints; there must be none of step 0.
      config: the model.
      params: its parameters, on the mesh.
      mesh: the mesh, for the description of the environment.

    Raises:
      OSError: it cannot be written to.
    """
    state = {"params": params}
    meta = make_meta(
        0,
        state,
        digest(state),
        data_position=0,
        config=config,
        metrics={},
        environment=environment(mesh),
    )
    path = resolve(directory) / "0"
    try:
        with orbax_context(tree=state):
            v1.save_checkpointables(str(path), {"state": to_plain(state), "meta": meta})
    except Exception as error:  # a full disk comes up as nearly any type
        raise OSError(f"{path} could not be written: {root_cause(error)}.") from error


def _model(meta: dict[str, Any]) -> GPT2Config:
    config = from_dict(meta["config"])
    return config.model if isinstance(config, TrainConfig) else config
