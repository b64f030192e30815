"""Checkpoints: asynchronous saves with digests, and restores that check them.

A run's checkpoints are `<directory>/<step>/`, each committed by one rename:

    state/           the arrays as nested dicts of plain keys (`params/h/...`), in Orbax's format
    meta/data.json   step, data position, configuration, versions, each leaf's type and digest

Orbax notices a missing file but not a flipped bit, and does not go back to an older checkpoint.
Restoring therefore recomputes the digests, and goes from the newest checkpoint to the oldest until
one agrees, saying why it skipped the others. One run writes to a directory at a time; the readers
`load_params` and `load_config` change nothing in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from orbax.checkpoint import v1

import maxmars
from maxmars import distributed
from maxmars.config import TrainConfig, differences, from_dict, to_dict
from maxmars.digest import combine, digest, from_plain, leaf_types, to_plain
from maxmars.orbax_io import orbax_context, quiet_reads, root_cause
from maxmars.sharding import replicated

FORMAT_VERSION = 1

_LOGGER = logging.getLogger(__name__)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

Result = TypeVar("Result")
Directory = str | os.PathLike[str]
Skipped = tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpointer.restore` found: the state, the number of sequences that training had
    consumed, the step, and (step, reason) of the newer checkpoints that could not be used."""

    state: Any
    data_position: int
    step: int
    skipped: Skipped


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Writes and reads the checkpoints of one run; also a context manager that closes itself.

    Every process of the run makes one and calls its methods in the same order.
    """

    def __init__(self, directory: Directory, config: TrainConfig, *, mesh: Mesh) -> None:
        """Open `directory`, which is created, and remove what interrupted saves left in it.

        Args:
          directory: where the checkpoints are; best `<workdir>/checkpoints`.
          config: the run's configuration: it is stored in each checkpoint, and
            `config.checkpoint.keep_last` is the number of newest checkpoints to keep.
          mesh: leaves of an abstract state that carry no sharding are restored to all its devices.
        """
        self._directory = _absolute(directory)
        self._config = config
        self._mesh = mesh
        self._pending: v1.AsyncResponse[bool] | None = None
        self._failed = False
        self._saved: dict[int, str] = {}
        self._retention = _KeepNewest(config.checkpoint.keep_last)
        if distributed.is_primary():
            _sweep(self._directory)
        distributed.barrier("maxmars: swept checkpoints")
        self._orbax = v1.training.Checkpointer(
            str(self._directory), context=orbax_context(), preservation_policy=self._retention
        )

    def __exit__(self, *exception: object) -> None:
        """Close, and so raise what went wrong in a save that was still under way."""
        self.close()

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, sound or not; None if there is none."""
        self._finish()
        return max(list_steps(self._directory), default=None)

    def save(
        self,
        step: int,
        state: Any,
        *,
        data_position: int,
        metrics: dict[str, Any] | None = None,
        wait: bool = False,
    ) -> None:
        """Write a checkpoint in the background.

        On return the state has been copied and its buffers may be donated. A checkpoint of the same
        step is replaced, unless this object wrote it from the same state: then nothing happens.

        Args:
          step: number of optimizer steps that led to `state`.
          state: pytree of arrays; containers that are no dicts come back by `restore` only.
          data_position: number of sequences consumed.
          metrics: JSON numbers that are stored beside the state.
          wait: return only when the checkpoint is complete.

        Raises:
          OSError: the previous save could not be completed, or with `wait` this one. All that can
            be done then is `close`.
        """
        self._finish()
        digests = digest(state)
        total = combine(digests)
        known = self._saved.get(step) == total
        if known and distributed.everywhere(step in list_steps(self._directory)):
            return
        meta = _make_meta(step, state, digests, data_position, self._config)
        items = {"state": to_plain(state), "meta": meta}
        with self._reporting():
            self._pending = self._orbax.save_checkpointables_async(
                step, items, force=True, overwrite=True, metrics=metrics
            )
        self._saved[step] = total
        self._retention.outdated.discard(step)
        if wait:
            self._finish()

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
        """The newest checkpoint whose digests agree, or the one of `step`.

        Args:
          abstract_state: tree of `jax.ShapeDtypeStruct` with the shardings that the result shall
            have, on any mesh and any number of devices and processes.
          step: take this checkpoint and no other.

        Raises:
          FileNotFoundError: there is no checkpoint, or none of `step`.
          ValueError: there are checkpoints, but every one (or that of `step`) is damaged; or the
            newest sound one has leaves of other names, shapes or types than `abstract_state`.
        """
        self._finish()
        abstract = _with_shardings(abstract_state, replicated(self._mesh))

        def load(path: Path) -> Restored:
            meta = _read_meta(path)
            _check_leaves(path, meta, leaf_types(abstract), self._config)
            state = _read_leaves(path, meta, abstract, partial=False)
            return Restored(state, meta["data_position"], meta["step"], ())

        restored, skipped = _first_sound(self._directory, step, load)
        # A run that goes on from here writes the newer steps anew; until then retention must not
        # count them, or it would delete the new checkpoints in favour of them.
        self._retention.outdated = {s for s in list_steps(self._directory) if s > restored.step}
        return dataclasses.replace(restored, skipped=skipped)

    def close(self) -> None:
        """Wait for the save under way.

        Raises:
          OSError: it could not be completed.
        """
        try:
            self._finish()
        finally:
            if not self._failed:  # after a failure Orbax would raise the same again
                self._orbax.close()

    def _finish(self) -> None:
        """Wait for the save under way."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._reporting():
                pending.result()

    @contextlib.contextmanager
    def _reporting(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            self._failed = True
            raise OSError(
                f"a checkpoint could not be written to {self._directory} ({type(error).__name__}: "
                f"{error}); the complete ones are untouched: start again to go on from the newest."
            ) from error


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
    first_device = SingleDeviceSharding(jax.local_devices()[0])
    abstract = {"params": _with_shardings(abstract_params, first_device)}

    def load(path: Path) -> Any:
        meta = _read_meta(path)
        meta["leaves"] = {k: v for k, v in meta["leaves"].items() if k.startswith("params/")}
        _check_leaves(path, meta, leaf_types(abstract), None)
        return _read_leaves(path, meta, abstract, partial=True)["params"]

    return _first_sound(_absolute(directory), step, load)[0]


def load_config(directory: Directory, step: int | None = None) -> TrainConfig:
    """The configuration that a checkpoint was written with: of the newest one, or of `step`.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of `step`.
      ValueError: none can be read, or another version of maxmars wrote it.
    """
    meta, _ = _first_sound(_absolute(directory), step, _read_meta)
    return from_dict(meta["config"])


def load_digests(directory: Directory, step: int | None = None) -> dict[str, str]:
    """The digest of each array of the newest checkpoint, or of that of `step`, as it was saved.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of `step`.
      ValueError: none can be read.
    """
    meta, _ = _first_sound(_absolute(directory), step, _read_meta)
    return {path: leaf["digest"] for path, leaf in meta["leaves"].items()}


def list_steps(directory: Directory) -> list[int]:
    """Steps of the checkpoints in a directory, ascending, sound or not; empty if it is missing."""
    path = Path(directory)
    if not path.is_dir():
        return []
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal() and p.is_dir())


class _DamagedError(Exception):
    """A checkpoint that cannot be used; the message says why."""


class _KeepNewest:
    """Retention: keep what is as new as the `count` newest steps that are not `outdated`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.outdated: set[int] = set()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether to keep each checkpoint (Orbax's PreservationPolicy)."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = sorted(set(steps) - self.outdated)[-self.count :]
        return [not kept or step >= kept[0] for step in steps]


def _first_sound(
    directory: Path, step: int | None, load: Callable[[Path], Result]
) -> tuple[Result, Skipped]:
    """`load`'s result for the newest checkpoint of which no process finds that it is damaged."""
    skipped: list[tuple[int, str]] = []
    for candidate in _candidates(directory, step):
        try:
            result, reason = load(directory / str(candidate)), None
        except _DamagedError as error:
            result, reason = None, str(error)
        # Either every process takes this checkpoint or none does.
        if distributed.everywhere(reason is None) and result is not None:
            return result, tuple(skipped)
        skipped.append((candidate, reason or "another process found it damaged"))
        if step is None:
            _LOGGER.warning("checkpoint %s skipped: %s", directory / str(candidate), skipped[-1][1])
    reasons = "; ".join(f"step {s}: {reason}" for s, reason in skipped)
    raise ValueError(
        f"no checkpoint in {directory} could be used ({reasons}); "
        f"{'name another step' if step is not None else 'start in another directory'}."
    )


def _candidates(directory: Path, step: int | None) -> list[int]:
    steps = list_steps(directory)
    if not steps:
        raise FileNotFoundError(f"{directory} holds no checkpoint; name a directory with one.")
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise FileNotFoundError(f"{directory} has no checkpoint of step {step}, but of {known}.")
    return steps[::-1] if step is None else [step]


def _make_meta(
    step: int, state: Any, digests: dict[str, str], data_position: int, config: TrainConfig
) -> dict[str, Any]:
    types = leaf_types(state)
    meta = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "data_position": data_position,
        "config": to_dict(config),
        "leaves": {path: {"type": types[path], "digest": digests[path]} for path in types},
        "digest": combine(digests),
        "versions": {"maxmars": maxmars.__version__}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
    }
    return meta | {"checksum": _checksum(meta)}


def _checksum(meta: dict[str, Any]) -> str:
    fields = {k: v for k, v in meta.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _read_meta(path: Path) -> dict[str, Any]:
    """Everything about a checkpoint except its arrays.

    Raises:
      ValueError: a newer version of maxmars wrote it.
    """
    if not (path / "meta").is_dir():
        raise _DamagedError("it is not complete: there is no meta in it")
    try:
        with orbax_context():
            meta = v1.load_checkpointables(str(path), {"meta": None})["meta"]
    except Exception as error:
        raise _damage("meta", error) from error
    if not isinstance(meta, dict) or meta.get("checksum") != _checksum(meta):
        raise _DamagedError("meta does not agree with its checksum")
    if meta["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format {meta['format_version']} and maxmars {maxmars.__version__} reads "
            f"up to {FORMAT_VERSION}; use maxmars {meta['versions']['maxmars']} or newer."
        )
    return meta


def _read_leaves(path: Path, meta: dict[str, Any], abstract: Any, *, partial: bool) -> Any:
    """The arrays of `abstract`, which names all (or with `partial` some) of the checkpoint's."""
    try:
        with orbax_context(partial_load=partial), quiet_reads():
            plain = v1.load(str(path), to_plain(abstract), checkpointable_name="state")
    except Exception as error:  # a damaged file comes up as nearly any type
        raise _damage("state", error) from error
    state = from_plain(plain, abstract)
    found = digest(state)
    wrong = [name for name, leaf in meta["leaves"].items() if leaf["digest"] != found.get(name)]
    if wrong:
        raise _DamagedError(
            f"{len(wrong)} of {len(found)} arrays differ from their digest, first {wrong[0]}"
        )
    return state


def _damage(part: str, error: Exception) -> _DamagedError:
    return _DamagedError(f"{part} cannot be read ({root_cause(error)})")


def _check_leaves(
    path: Path, meta: dict[str, Any], wanted: dict[str, str], config: TrainConfig | None
) -> None:
    """Refuse a checkpoint of another model: older ones of the same run would not fit either."""
    saved = {name: leaf["type"] for name, leaf in meta["leaves"].items()}
    if saved == wanted:
        return
    names = [name for name in {**wanted, **saved} if saved.get(name) != wanted.get(name)]
    leaf = names[0]
    text = (
        f"the checkpoint {path} does not fit this configuration: {len(names)} arrays differ, first "
        f"{leaf}, which is {saved.get(leaf, 'absent')} there and {wanted.get(leaf, 'absent')} here"
    )
    rows = differences(from_dict(meta["config"]), config) if config is not None else []
    if rows:
        changed = (f"{name} is {old} there and {new} here" for name, old, new in rows[:8])
        text += f" ({'; '.join(changed)})"
    raise ValueError(f"{text}. Use the configuration it was written with, or another directory.")


def _with_shardings(abstract: Any, default: Sharding) -> Any:
    def leaf(a: Any) -> jax.ShapeDtypeStruct:
        sharding = a.sharding or default
        sharding.shard_shape(a.shape)  # a sharding that does not divide is no damage: raise now
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    return jax.tree.map(leaf, abstract)


def _absolute(directory: Directory) -> Path:
    """Orbax rejects a relative path only when the save is under way, in a background thread."""
    return Path(directory).expanduser().absolute()


def _sweep(directory: Path) -> None:
    """Remove the unfinished checkpoints of runs that were killed; Orbax ignores but keeps them."""
    for path in directory.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path, ignore_errors=True)
