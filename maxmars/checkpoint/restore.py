"""Reading checkpoints: from the newest to the oldest, until one agrees with its digests."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Sharding, SingleDeviceSharding
from orbax.checkpoint import v1

from maxmars import distributed
from maxmars.checkpoint.contents import DamagedError, check_leaves, damage, read_meta
from maxmars.checkpoint.directory import Directory, list_steps, resolve
from maxmars.config import GPT2Config, TrainConfig, from_dict
from maxmars.digest import digest, from_plain, leaf_types, to_plain
from maxmars.orbax_io import orbax_context, quiet_reads

_LOGGER = logging.getLogger(__name__)

Result = TypeVar("Result")
Skipped = tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpointer.restore` found: the state, the number of sequences that training had
    consumed, the step, the state's digest, and (step, reason) of the newer checkpoints that could
    not be used."""

    state: Any
    data_position: int
    step: int
    digest: str
    skipped: Skipped


def load_params(directory: Directory, abstract_params: Any, step: int | None = None) -> Any:
    """The parameters alone, of the newest checkpoint whose parameters' digests agree, or of `step`.

    Args:
      directory: of the checkpoints, as the `Checkpointer` got it.
      abstract_params: tree of `jax.ShapeDtypeStruct`; those without a sharding come to the first of
        this process's devices.
      step: take this checkpoint and no other.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of `step`.
      ValueError: every checkpoint (or that of `step`) is damaged, or belongs to another model.
    """

    def load(path: Any) -> Any:
        return read_params(path, read_meta_together(path), abstract_params)

    return first_sound(resolve(directory), step, load)[0]


def load_config(directory: Directory, step: int | None = None) -> TrainConfig:
    """The configuration that a checkpoint was written with: of the newest one, or of `step`.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of `step`.
      ValueError: none can be read, another version of maxmars wrote it, or it has parameters alone.
    """
    meta, _ = first_sound(resolve(directory), step, read_meta_together)
    config = from_dict(meta["config"])
    if not isinstance(config, TrainConfig):
        raise ValueError(
            f"{directory} holds the parameters of an imported model and no run that could be "
            "continued; start a run from them, in a directory of its own, by --init-from."
        )
    return config


def load_digests(directory: Directory, step: int | None = None) -> dict[str, str]:
    """The digest of each array of the newest checkpoint, or of that of `step`, as it was saved.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of `step`.
      ValueError: none can be read.
    """
    meta, _ = first_sound(resolve(directory), step, read_meta_together)
    return {path: leaf["digest"] for path, leaf in meta["leaves"].items()}


def load_leaf_types(directory: Directory) -> dict[str, str]:
    """The type of each array of the newest checkpoint, like `float32[12,768]`.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: none can be read.
    """
    meta, _ = first_sound(resolve(directory), None, read_meta_together)
    return {path: leaf["type"] for path, leaf in meta["leaves"].items()}


def load_state(path: Any, abstract: Any, config: TrainConfig) -> Restored:
    """The checkpoint at a path, if it agrees with its digests.

    Every process of the run calls, and every one gets the result or the error.

    Raises:
      DamagedError: it does not.
      ValueError: it has leaves of other names, shapes or types than `abstract`.
    """
    meta = read_meta_together(path)
    check_leaves(path, meta, leaf_types(abstract), config)
    state = _read_leaves(path, meta, abstract, partial=False)
    return Restored(state, meta["data_position"], meta["step"], meta["digest"], ())


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint says of itself: where it is, its configuration (that of the model alone if
    its parameters were imported), and each array's type by its path, like `float32[12,768]`."""

    path: Any
    config: TrainConfig | GPT2Config
    types: dict[str, str]


def load_parts(
    directory: Directory, choose: Callable[[Saved], dict[str, Any]], step: int | None = None
) -> tuple[dict[str, Any], Saved]:
    """Some parts of the state, of the newest checkpoint in which their digests agree.

    Args:
      directory: of the checkpoints, as the `Checkpointer` got it.
      choose: says what to read of a checkpoint: name of a part, such as `params`, -> its tree of
        `jax.ShapeDtypeStruct` with shardings. It may refuse the checkpoint with a ValueError.
      step: take this checkpoint and no other.

    Returns:
      The parts, and the checkpoint that they are from.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of `step`.
      ValueError: every checkpoint (or that of `step`) is damaged, or has arrays of other names,
        shapes or types than chosen.
    """

    def load(path: Any) -> tuple[dict[str, Any], Saved]:
        meta = read_meta_together(path)
        types = {name: leaf["type"] for name, leaf in meta["leaves"].items()}
        saved = Saved(path, from_dict(meta["config"]), types)
        parts = choose(saved)
        leaves = meta["leaves"].items()
        meta = meta | {"leaves": {k: v for k, v in leaves if k.partition("/")[0] in parts}}
        check_leaves(path, meta, leaf_types(parts), None)
        return _read_leaves(path, meta, parts, partial=True), saved

    return first_sound(resolve(directory), step, load)[0]


def first_sound(
    directory: Any, step: int | None, load: Callable[[Any], Result]
) -> tuple[Result, Skipped]:
    """`load`'s result for the newest checkpoint (or that of `step`) that it does not find damaged.

    `load` raises DamagedError in every process or in none.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of `step`.
      ValueError: it finds every one damaged.
    """
    skipped: list[tuple[int, str]] = []
    for candidate in _candidates(directory, step):
        try:
            return load(directory / str(candidate)), tuple(skipped)
        except DamagedError as error:
            skipped.append((candidate, str(error)))
            if step is None:
                _LOGGER.warning("checkpoint %s skipped: %s", directory / str(candidate), error)
    reasons = "; ".join(f"step {s}: {reason}" for s, reason in skipped)
    raise ValueError(
        f"no checkpoint in {directory} could be used ({reasons}); "
        f"{'name another step' if step is not None else 'start in another directory'}."
    )


def with_shardings(abstract: Any, default: Sharding) -> Any:
    """The abstract tree with the default sharding where a leaf has none."""

    def leaf(a: Any) -> jax.ShapeDtypeStruct:
        sharding = a.sharding or default
        sharding.shard_shape(a.shape)  # a sharding that does not divide is no damage: raise now
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    return jax.tree.map(leaf, abstract)


def _candidates(directory: Any, step: int | None) -> list[int]:
    # A network file system may show a new directory to one process and not yet to another.
    steps = distributed.from_primary(list_steps(directory))
    if not steps:
        raise FileNotFoundError(f"{directory} holds no checkpoint; name a directory with one.")
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise FileNotFoundError(f"{directory} has no checkpoint of step {step}, but of {known}.")
    return steps[::-1] if step is None else [step]


def read_params(path: Any, meta: dict[str, Any], abstract_params: Any, prefix: str = "") -> Any:
    """Parameters of the checkpoint at a path, with the contents `meta`.

    Args:
      path: of the checkpoint.
      meta: see `read_meta_together`.
      abstract_params: all those whose path begins with `prefix`; see `load_params`.
      prefix: a path below `params`; empty for all.

    Raises:
      DamagedError: they do not agree with their digests.
      ValueError: they have other names, shapes or types.
    """
    first_device = SingleDeviceSharding(jax.local_devices()[0])
    abstract = {"params": with_shardings(abstract_params, first_device)}
    wanted = f"params/{prefix}"
    leaves = {name: leaf for name, leaf in meta["leaves"].items() if name.startswith(wanted)}
    meta = meta | {"leaves": leaves}
    check_leaves(path, meta, leaf_types(abstract), None)
    return _read_leaves(path, meta, abstract, partial=True)["params"]


def read_meta_together(path: Any) -> dict[str, Any]:
    """See `read_meta`; every process calls, and DamagedError comes in all of them or in none."""
    return _together(lambda: read_meta(path))


def _read_leaves(path: Any, meta: dict[str, Any], abstract: Any, *, partial: bool) -> Any:
    """The arrays of `abstract`, which names all (or with `partial` some) of the checkpoint's."""

    def load() -> Any:
        try:
            options = orbax_context(tree=abstract, partial_load=partial, alone=True)
            with options, quiet_reads():
                return v1.load(str(path), to_plain(abstract), checkpointable_name="state")
        except Exception as error:  # a damaged file comes up as nearly any type
            raise damage("state", error) from error

    def check() -> None:
        wrong = [name for name, leaf in meta["leaves"].items() if leaf["digest"] != found.get(name)]
        if wrong:
            raise DamagedError(
                f"{len(wrong)} of {len(found)} arrays differ from their digest, first {wrong[0]}"
            )

    # Digests are sums over the devices of all processes: each must have its part before.
    state = from_plain(_together(load), abstract)
    found = digest(state)
    _together(check)
    return state


def _together(read: Callable[[], Result]) -> Result:
    """What `read` returns; DamagedError in every process if it raises that in one."""
    try:
        result = read()
    except DamagedError:
        distributed.everywhere(False)
        raise
    if not distributed.everywhere(True):
        raise DamagedError("another process could not read its part of it")
    return result
