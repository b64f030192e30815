"""Reading of checkpoints: metadata and arrays, checked against checksum and digests.

`read` and `load` take the newest sound checkpoint, or the one of a given step. They change nothing
on the disk, so that they may be used while a run writes to the same directory. An error counts as
damage unless its cause may be elsewhere (network, memory, permissions): damage makes a run continue
from an older checkpoint, other errors end it. Each process reads its own shards, and all agree on
the verdict. `README.md` beside this file describes the format.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import hashlib
import json
import logging
import re
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding

from maxmars.checkpoint.digest import combine, digest, from_plain, leaf_types, to_plain
from maxmars.checkpoint.environment import commit_of
from maxmars.checkpoint.journal import mismatched_field
from maxmars.config import TrainConfig, from_dict
from maxmars.distributed import files, processes
from maxmars.distributed.workdir import CHECKPOINTS, JOURNAL

FORMAT_VERSION = 3
"""Format of a checkpoint's metadata; others are refused."""

Result = TypeVar("Result")
Skipped = tuple[tuple[int, str], ...]
"""(step, reason) of the newer checkpoints that could not be used."""

_LOGGER = logging.getLogger(__name__)
_READ_BYTES = 2**30  # size of the arrays that `check_arrays` reads at a time
_WIDE = {"float64", "int64", "uint64"}

# Errors that say nothing about the checkpoint: a retry, or another machine, may succeed.
_NOT_DAMAGE = (
    "RESOURCE_EXHAUSTED",
    "PERMISSION_DENIED",
    "Permission denied",
    "UNAUTHENTICATED",
    "Too many open files",
    "more bytes than we reserved",
    "MemoryError",
)


class DamagedError(Exception):
    """A checkpoint that cannot be used; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Metadata of a checkpoint."""

    path: epath.Path
    """Directory of the checkpoint."""
    step: int
    """Optimizer steps that led to the state."""
    data_position: int
    """Training examples consumed."""
    data_digest: str | None
    """Digest of the data that the run read; None if `Checkpointer` got none."""
    config: TrainConfig
    """Config of the run."""
    environment: dict[str, Any]
    """Versions, devices and mesh of the run; see `environment.environment`."""
    types: dict[str, str]
    """Type of each array by its path, like `float32[12,768]`."""
    digests: dict[str, str]
    """Digest of each array by its path; see `digest.digest`."""
    digest: str
    """Digest of the whole state."""
    tokens: int
    """Tokens trained on so far, whatever the batch size and length of earlier sessions."""
    journal: str | None
    """Hash of the `saved` line of this checkpoint in the run's journal; None if
    `Checkpointer.save` got no `journal`."""

    @property
    def has_evaluation_params(self) -> bool:
        """Whether other parameters than the trained `params` are evaluated and exported."""
        return any(name.startswith("evaluation_params/") for name in self.types)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """Arrays that match their digests."""

    state: Any
    """The arrays, in the containers of the abstract state."""
    checkpoint: Checkpoint
    skipped: Skipped


def read(directory: epath.PathLike, step: int | None = None) -> Checkpoint:
    """Metadata of the newest readable checkpoint, or of the one of `step`, without its arrays.

    Raises:
      FileNotFoundError, ValueError: see `first_sound`.
    """
    return first_sound(directory, lambda checkpoint, skipped: checkpoint, step)


def load(directory: epath.PathLike, abstract: Any, step: int | None = None) -> Loaded:
    """Load arrays of the newest checkpoint in which they match their digests, or of `step`.

    All processes of a run must call; each gets the result or an error. For arguments and errors see
    `first_sound` and `load_arrays`.
    """

    def use(checkpoint: Checkpoint, skipped: Skipped) -> Loaded:
        state = load_arrays(checkpoint, abstract)
        return Loaded(state=state, checkpoint=checkpoint, skipped=skipped)

    return first_sound(directory, use, step)


def first_sound(
    directory: epath.PathLike, use: Callable[[Checkpoint, Skipped], Result], step: int | None = None
) -> Result:
    """The result of `use` for the newest checkpoint in which `use` finds no damage.

    If `use` raises DamagedError, it is called again: for the next older checkpoint, or if a run has
    saved meanwhile, for the newest. It may call `load_arrays` several times, for a state that is
    larger than the memory.

    Args:
      directory: the directory of the checkpoints, usually `<workdir>/checkpoints`.
      use: called with a checkpoint, and the skipped newer ones; raises DamagedError in every
        process or in none.
      step: take this checkpoint and no other.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of `step`.
      ValueError: every one is damaged, or another version of maxmars wrote one.
      OSError: the network or the store has failed.
    """
    root = files.resolve(directory)
    steps = steps_of_run(root)
    if not steps:
        raise FileNotFoundError(f"{root} holds no checkpoint; name a directory with one.")
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise FileNotFoundError(f"{root} has no checkpoint of step {step}, but of {known}.")
    skipped: list[tuple[int, str]] = []
    untried = [*steps] if step is None else [step]
    while untried:
        number = untried.pop()
        path = root / str(number)
        try:
            return use(_read_checkpoint(path), tuple(skipped))
        except DamagedError as error:
            damage = str(error)  # only the text: the error's traceback holds the arrays
        if step is None and (now := steps_of_run(root)) and now[-1] > steps[-1]:
            steps, untried = now, [*now]  # a run writes here, and deletes old checkpoints meanwhile
            skipped.clear()
            continue
        skipped.append((number, damage))
        if step is None:
            _LOGGER.warning("checkpoint %s skipped: %s", path, damage)
    reasons = "; ".join(f"step {s}: {reason}" for s, reason in skipped)
    raise ValueError(
        f"no checkpoint in {root} could be used ({reasons}); "
        f"{'name another step' if step is not None else 'start in another directory'}."
    )


def load_arrays(checkpoint: Checkpoint, abstract: Any, *, whole: bool = False) -> Any:
    """Load arrays of one checkpoint, and compare them with their digests.

    Args:
      checkpoint: metadata of the checkpoint.
      abstract: tree of `jax.ShapeDtypeStruct` of some or all arrays, such as `{"params": ...}`,
        with the shardings of the result, on any mesh and any number of processes. An array without
        a sharding goes to this process's first device.
      whole: raise if the checkpoint has other arrays besides.

    Raises:
      DamagedError: arrays cannot be read or differ from their digests; every process raises.
      ValueError: the checkpoint has arrays of other names, shapes or types, or a sharding does not
        divide its array.
      OSError: the network or the store has failed.
    """
    first_device = SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding or first_device),
        abstract,
    )
    for leaf in jax.tree.leaves(abstract):
        leaf.sharding.shard_shape(leaf.shape)  # raises if it does not divide: that is no damage
    wanted, saved = leaf_types(abstract), checkpoint.types
    names = wanted | saved if whole else wanted
    mismatched = [name for name in names if saved.get(name) != wanted.get(name)]
    if mismatched:  # no damage: older checkpoints of the run would not fit either
        there, here = (types.get(mismatched[0], "absent") for types in (saved, wanted))
        raise ValueError(
            f"the checkpoint {checkpoint.path} does not fit this configuration: {len(mismatched)} "
            f"arrays differ, first {mismatched[0]}, which is {there} there and {here} here. Use "
            "the configuration and version it was written with, or start a run from its weights "
            f"with --init-from {checkpoint.path} and another --workdir."
        )

    def read_own_shards() -> Any:
        plain = to_plain(abstract)
        restore_args = ocp.checkpoint_utils.construct_restore_args(plain)
        # Not `load` of Orbax's v1: it waits for the other processes, which may have failed, and
        # reads in an event loop of its own thread. No metadata store: each process would read a
        # file of every process that wrote, for PRNG keys, which no state has.
        arrays_alone = ocp.type_handlers.ArrayHandler(array_metadata_store=None)
        handler = ocp.PyTreeCheckpointHandler(
            restore_concurrent_gb=-(-bytes_in_flight(abstract) // 10**9),
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (jax.Array, arrays_alone)
            ),
        )
        with _tidy_event_loops():
            plain = handler.restore(
                checkpoint.path / "state",
                args=ocp.args.PyTreeRestore(plain, restore_args, partial_restore=True),
            )
        # Orbax leaves an array abstract if its own index, which may be damaged, lacks the array.
        if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(plain)):
            raise DamagedError("state cannot be read (arrays are missing)")
        return from_plain(plain, abstract)

    def compare_digests() -> None:
        damaged = [name for name, value in digests.items() if value != checkpoint.digests[name]]
        if damaged:
            raise DamagedError(
                f"{len(damaged)} of {len(digests)} arrays differ from their digest, first "
                f"{damaged[0]}"
            )

    # Two agreements: a digest sums over the devices of all processes, so a process whose reading
    # has failed must stop all of them before.
    path = checkpoint.path / "state"
    state = _in_all_processes(path, read_own_shards)
    digests = digest(state)
    _in_all_processes(path, compare_digests)
    return state


def load_params(checkpoint: Checkpoint, abstract: Any) -> Any:
    """The parameters for evaluation and export, or some of them, in the dtypes of `abstract`; see
    `load_arrays`."""
    if not checkpoint.has_evaluation_params:
        return load_arrays(checkpoint, {"params": abstract})["params"]
    wanted = {"evaluation_params": in_float32(abstract)}
    wide = load_arrays(checkpoint, wanted)["evaluation_params"]
    return jax.tree.map(lambda array, leaf: array.astype(leaf.dtype), wide, abstract)


def in_float32(params: Any) -> Any:
    """Abstract parameters in the dtypes of `evaluation_params`: float32 at least."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32), sharding=leaf.sharding
        ),
        params,
    )


def array_keys(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """From each array's path to its keys in nested dicts; a key may contain a slash.

    Raises:
      DamagedError: the keys cannot be read.
      OSError: the network or the store has failed.
    """

    def read_keys() -> dict[str, tuple[str, ...]]:
        tree = ocp.PyTreeCheckpointHandler().metadata(checkpoint.path / "state").tree
        return {"/".join(keys): keys for keys in flatten_dict(tree)}

    return _in_all_processes(checkpoint.path / "state", read_keys)


def check_arrays(checkpoint: Checkpoint) -> None:
    """Compare all arrays of a checkpoint with their digests, about 1 GiB at a time on one device.

    Raises:
      DamagedError: an array cannot be read, is missing, or differs from its digest.
      ValueError: see `require_64_bits`.
    """
    require_64_bits(checkpoint)
    part, size, keys = {}, 0, array_keys(checkpoint)
    for name, kind in checkpoint.types.items():
        dtype, _, shape = kind.partition("[")
        sizes = tuple(int(number) for number in shape.rstrip("]").split(",") if number)
        leaf = jax.ShapeDtypeStruct(sizes, dtype)
        if name not in keys:
            raise DamagedError(f"state has no array {name}")
        part[keys[name]] = leaf
        size += leaf.size * leaf.dtype.itemsize
        if size > _READ_BYTES:
            load_arrays(checkpoint, unflatten_dict(part))
            part, size = {}, 0
    if part:
        load_arrays(checkpoint, unflatten_dict(part))


def require_64_bits(checkpoint: Checkpoint) -> None:
    """Raise ValueError if a checkpoint has 64-bit arrays and JAX runs without `jax_enable_x64`."""
    wide = {kind.partition("[")[0] for kind in checkpoint.types.values()} & _WIDE
    if wide and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"{checkpoint.path.parent.parent} has arrays of {min(wide)}, which needs 64-bit JAX: "
            "set the environment variable JAX_ENABLE_X64=1."
        )


def list_steps(directory: epath.PathLike) -> list[int]:
    """Steps of the checkpoints in a directory, ascending, sound or not; empty if there is none.

    Raises:
      ImportError, OSError: see `files.require_access`.
    """
    root = files.resolve(directory)
    with files.reporting(root):
        if not root.is_dir():
            return []
        return sorted(
            int(path.name) for path in root.iterdir() if is_step(path) and is_committed(path)
        )


def steps_of_run(directory: epath.PathLike) -> list[int]:
    """`list_steps` of process 0, for all processes of a run, which all must call.

    A thousand processes need not list one directory, and a network file system may show a new
    checkpoint to one host earlier than to another.
    """
    text = processes.text_from_primary(lambda: json.dumps(list_steps(directory)))
    return json.loads(text or "[]")


def find(path: epath.PathLike) -> tuple[epath.Path, int | None] | None:
    """The directory of checkpoints of a path, and the step if the path is a single checkpoint.

    Args:
      path: a run's working directory, its directory of checkpoints, or a checkpoint.

    Returns:
      None if the path is none of these.

    Raises:
      ValueError: the path is a checkpoint whose name is not a step.
      ImportError, OSError: see `files.require_access`.
    """
    root = files.resolve(path)
    if (root / "meta" / "data.json").exists():
        if not is_step(root):
            raise ValueError(
                f"{root} is a checkpoint whose name is not its step: it is damaged, or was renamed "
                "by hand; name another one, or give it the name of its step again."
            )
        return root.parent, int(root.name)
    for directory in (root / CHECKPOINTS, root):
        if list_steps(directory):
            return directory, None
    return None


def is_step(path: epath.Path) -> bool:
    """Whether a path has the name of a checkpoint: 50, but not 0050."""
    return re.fullmatch("0|[1-9][0-9]*", path.name) is not None and path.is_dir()


def is_committed(path: epath.Path) -> bool:
    """Whether a checkpoint is complete: Orbax renames it last, or in a bucket writes this file."""
    return not files.is_remote(path) or (path / "commit_success.txt").exists()


def checksum(meta: dict[str, Any]) -> str:
    """SHA-256 of all fields of `meta/data.json` but `checksum` itself, in hex."""
    fields = {k: v for k, v in meta.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def bytes_in_flight(tree: Any) -> int:
    """Bytes of arrays that Orbax may write or read at the same time in this process: a sixteenth of
    its share, but more than the largest array, which Orbax would refuse."""
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
    return max([*sizes, sum(sizes) // (16 * jax.process_count()), 2**20]) + 1


def root_cause(error: Exception) -> str:
    """The innermost cause of an error, in one line; Orbax wraps errors several times."""
    error = innermost(error)
    first_line = next(iter(str(error).strip().splitlines()), "").split(" [tensorstore_spec")[0]
    return f"{type(error).__name__}: {first_line[:400]}"


def innermost(error: Exception) -> Exception:
    """The first error in the chain of causes."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _read_checkpoint(path: epath.Path) -> Checkpoint:
    """Metadata of the checkpoint at `path`, read by process 0 for all.

    Orbax wrote the file, but would read it only through its own index, which may be damaged.

    Raises:
      DamagedError: `meta` is missing, or differs from what was written.
      ValueError: another version of maxmars wrote it.
    """

    def read_meta() -> dict[str, Any]:
        try:
            file = path / "meta" / "data.json"
            files.require_file(file)
            meta = files.parse_json(file.read_text())
        except FileNotFoundError:
            if (path / "meta").is_dir():
                raise
            raise DamagedError("it is not complete: there is no meta in it") from None
        if not isinstance(meta, dict) or meta.get("checksum") != checksum(meta):
            raise DamagedError("meta does not agree with its checksum")
        if str(meta["step"]) != path.name:
            raise DamagedError(f"meta is that of step {meta['step']}")
        if meta["digest"] != combine({key: leaf["digest"] for key, leaf in meta["leaves"].items()}):
            raise DamagedError("meta has another digest than its arrays")
        return meta

    def read_checked() -> str:
        try:
            with _finding_damage(path / "meta"):
                meta = read_meta()
            if name := mismatched_field(path.parent.parent, meta):
                raise DamagedError(f"meta has another {name} than {JOURNAL} tells of")
        except DamagedError as error:
            return json.dumps([None, str(error)])
        return json.dumps([meta, None])

    meta, damage = json.loads(processes.text_from_primary(read_checked) or "")
    if damage is not None:
        raise DamagedError(damage)
    config = _config_of(path, meta)  # raises first for another version, whose meta may lack fields
    return Checkpoint(
        path=path,
        step=meta["step"],
        data_position=meta["data_position"],
        data_digest=meta["data_digest"],
        config=config,
        environment=meta["environment"],
        types={name: leaf["type"] for name, leaf in meta["leaves"].items()},
        digests={name: leaf["digest"] for name, leaf in meta["leaves"].items()},
        digest=meta["digest"],
        tokens=meta["tokens"],
        journal=meta["journal"],
    )


def _config_of(path: epath.Path, meta: dict[str, Any]) -> TrainConfig:
    """The config of the run that wrote a checkpoint.

    Raises:
      ValueError: another version of maxmars wrote the checkpoint: in another format, with other
        config fields or without a journal.
    """
    version = meta["format_version"]
    problem = f"this maxmars reads format {FORMAT_VERSION} with a line of the run's journal"
    if version == FORMAT_VERSION and "journal" in meta:
        try:
            return from_dict(meta["config"])
        except ValueError as error:
            problem = str(error).removesuffix(".")
    commit = commit_of(meta.get("environment", {}))
    raise ValueError(
        f"{path} was written in format {version} by maxmars of commit {commit}, but {problem}. Use "
        f"it with that code (`git checkout {commit}` in maxmars's repository); a directory that "
        "its `maxmars export` writes is what --init-from takes here."
    )


def _in_all_processes(path: epath.Path, read_own: Callable[[], Result]) -> Result:
    """The result of `read_own`; raises DamagedError in every process if one of them fails."""
    result: Any = None
    damage = None
    try:
        with _finding_damage(path):
            result = read_own()
    except DamagedError as error:
        damage = str(error)  # only the text: the error's traceback holds the arrays
    if not processes.all_processes(damage is None):
        gc.collect()  # Orbax's tasks hold arrays in cycles
        raise DamagedError(damage or "another process could not read its share")
    return result


@contextlib.contextmanager
def _finding_damage(path: epath.Path) -> Generator[None]:
    """Raise DamagedError for an error while a path is read, if its cause is in the checkpoint.

    Errors of memory, permissions and the like pass unchanged.

    Raises:
      OSError: the network or the store has failed.
    """
    try:
        yield
    except DamagedError:
        raise
    except Exception as error:  # a damaged file may raise nearly any type
        cause = root_cause(error)
        if any(text in cause for text in _NOT_DAMAGE):
            raise
        if files.is_transient(innermost(error), path):
            raise OSError(
                f"{path} could not be read ({cause}); the checkpoint stays as it is: start again "
                "when the network and the store answer."
            ) from error
        raise DamagedError(f"{path.name} cannot be read ({cause})") from error


class _TidyLoop(asyncio.SelectorEventLoop):
    """An event loop whose tasks end before it closes."""

    def close(self) -> None:
        if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            # Not cancelled: their threads would still report to the loop after its close.
            done, _ = self.run_until_complete(asyncio.wait(tasks))
            for task in done:
                task.cancelled() or task.exception()  # else asyncio prints what nobody has read
        super().close()


class _TidyPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _TidyLoop()


@contextlib.contextmanager
def _tidy_event_loops() -> Generator[None, None, None]:
    """Wait for the other reads when one of Orbax's reads has failed.

    Orbax 0.12.8 closes its event loop before they end, and they print stack traces.
    """
    policy = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_TidyPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
