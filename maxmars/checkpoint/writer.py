"""Writing of checkpoints: asynchronous saves with digests, and retention of old ones.

Orbax writes the arrays and renames a complete checkpoint into place. This module adds the digests,
which are computed on the devices before the copy, so that they are of the state in memory; the
order of journal and checkpoint; the lock; and retention whose choice can be computed again from
steps and losses alone. Saves are due by steps or minutes, at the same step in every process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from etils import epath
from jax.sharding import Mesh
from orbax.checkpoint import v1

from maxmars.checkpoint.digest import combine, digest_and_finite, leaf_types, to_plain
from maxmars.checkpoint.environment import environment
from maxmars.checkpoint.lock import acquire
from maxmars.checkpoint.reader import (
    FORMAT_VERSION,
    Checkpoint,
    Loaded,
    Skipped,
    bytes_in_flight,
    checksum,
    first_sound,
    innermost,
    is_committed,
    is_step,
    load_arrays,
    root_cause,
    steps_of_run,
)
from maxmars.config import CheckpointConfig, TrainConfig, to_dict
from maxmars.distributed import processes
from maxmars.distributed.files import is_remote, reporting, resolve, set_aside

_LOGGER = logging.getLogger(__name__)


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Writes and restores the checkpoints of one run; a context manager that closes itself.

    All processes of the run make one, and call its methods in the same order. Until it is closed,
    or the primary process dies, no other run can open the directory for writing. Incomplete
    checkpoints of earlier runs are removed.

    Args:
      directory: of the checkpoints, on a disk or `gs://`; usually `<workdir>/checkpoints`.
      config: stored in each checkpoint; `config.checkpoint` decides which checkpoints are kept.
      mesh: the run's mesh, for the description of the environment.
      data_digest: digest of the data that the run reads, which every checkpoint holds.

    Raises:
      ValueError: another run has the directory open.
      OSError: the directory cannot be written to.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        config: TrainConfig,
        *,
        mesh: Mesh,
        data_digest: str | None = None,
    ) -> None:
        self._directory = resolve(directory)
        self._config, self._data_digest = config, data_digest
        self._environment = environment(mesh)
        self._pending: v1.AsyncResponse[bool] | None = None
        self._failed = False
        self._newest: tuple[int, str] | None = None  # step and digest that were saved or restored
        self._retention = Retention(config.checkpoint, {})
        self._timer = SaveTimer(config.checkpoint.every_minutes)
        self._is_due = False
        self._lock = acquire(self._directory)
        try:
            # In a bucket the run that this one takes over from may be ending a save.
            if not is_remote(self._directory):
                self._remove_unfinished(self._directory.iterdir())
            self._orbax = self._open_orbax()
        except BaseException:
            self._release()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, sound or not, once no save is under way; None if none."""
        self._finish()
        return max(steps_of_run(self._directory), default=None)

    def check_owner(self) -> None:
        """Raise ValueError or OSError if another run owns the directory by now; on a disk only the
        primary process can raise."""
        if self._lock is not None:
            self._lock.check()

    def evaluated(self, losses: Mapping[int, float]) -> None:
        """Record validation losses by step, for `keep_best`; all processes must call."""
        self._retention.losses |= losses

    def is_due(self, step: int) -> bool:
        """Whether a save is due since the last one, by steps or minutes of `config.checkpoint`.

        All processes must call after each step, and all get the same answer.
        """
        every = self._config.checkpoint.every
        self._is_due |= self._timer.is_due(step) or (every is not None and step % every == 0)
        return self._is_due

    def save(
        self,
        step: int,
        state: Any,
        *,
        data_position: int,
        tokens: int = 0,
        journal: Callable[[int, str, int, int], str | None] = lambda *_: None,
        wait: bool = False,
    ) -> float | None:
        """Write a checkpoint in the background.

        On return the state has been copied, and its buffers may be donated. An older checkpoint of
        the same step is replaced. If the newest checkpoint is of this step and this state already,
        nothing is written.

        Args:
          step: number of optimizer steps that led to `state`.
          state: pytree of arrays. Containers are stored as plain dicts.
          data_position: number of training examples consumed.
          tokens: number of tokens trained on so far.
          journal: called before the checkpoint is written, with step, digest, position and tokens;
            writes the journal's line of this save, and returns its hash.
          wait: return only when the checkpoint is complete.

        Returns:
          Seconds for which the caller was blocked: by the end of the save before, the digests and
          the copy, but not by `wait`. None if nothing was written.

        Raises:
          OSError: the save before failed, or with `wait` this one; or the directory was moved, or
            its owner cannot be determined. Only `close` may be called afterwards.
          ValueError: another run took over the directory (only `close` may be called afterwards),
            or some parameters are not finite.
        """
        started = time.perf_counter()
        self._is_due = False
        self._finish()
        processes.text_from_primary(self.check_owner)
        digests, finite = digest_and_finite(state)
        non_finite = [path for path in finite if path.startswith("params/") and not finite[path]]
        if non_finite:
            raise ValueError(
                f"{len(non_finite)} arrays of parameters are not finite after step {step}, first "
                f"{non_finite[0]}: nothing is saved, and the last checkpoint stays. Continue with "
                "a lower optimizer.learning_rate (name it in --resume-overrides); an optimizer "
                "that divides by the rate needs --schedule.warmup-steps 0, as a warm-up begins "
                "with 0."
            )
        digest, types = combine(digests), leaf_types(state)
        if self._newest == (step, digest) and step in steps_of_run(self._directory):
            return None
        derived = "every random number is a function of config.seed, the step and its place in it"
        meta = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "data_position": data_position,
            "data_digest": self._data_digest,
            "rng": {"seed": self._config.seed, "step": step, "derivation": derived},
            "config": to_dict(self._config),
            "environment": self._environment,
            "leaves": {path: {"type": types[path], "digest": digests[path]} for path in types},
            "digest": digest,
            "tokens": tokens,
            "journal": journal(step, digest, data_position, tokens),
        }
        meta["checksum"] = checksum(meta)
        # In a bucket leftovers are not removed at the start: one of this step may be in the way.
        if is_remote(self._directory):
            self._remove_unfinished([self._directory / str(step)])
        with self._reporting(), _orbax_context(state):
            self._pending = self._orbax.save_checkpointables_async(
                step, {"state": to_plain(state), "meta": meta}, force=True, overwrite=True
            )
        self._newest = step, digest
        self._timer.restart()
        blocked_s = time.perf_counter() - started
        if wait:
            self._finish()
        return blocked_s

    def restore(
        self, abstract_state: Any, step: int | None = None, *, whole: bool = True
    ) -> Loaded:
        """Load the newest sound checkpoint, or that of `step`, to continue the run from it.

        Newer, damaged checkpoints are renamed to `<step>.damaged`, and never deleted. (An older one
        could be read, so the damage is theirs and no fault of reading.)

        Args:
          abstract_state: see `load_arrays`; or a function from a checkpoint to the abstract state.
          step: load this checkpoint and no other.
          whole: raise if the checkpoint has other arrays besides.

        Raises:
          FileNotFoundError: there is no checkpoint, or none of `step`.
          ValueError: every checkpoint, or that of `step`, is damaged; or the newest sound one has
            arrays of other names, shapes or types than `abstract_state`, or another version of
            maxmars wrote it.
        """
        self._finish()

        def use(checkpoint: Checkpoint, skipped: Skipped) -> Loaded:
            wanted = abstract_state(checkpoint) if callable(abstract_state) else abstract_state
            state = load_arrays(checkpoint, wanted, whole=whole)
            return Loaded(state=state, checkpoint=checkpoint, skipped=skipped)

        loaded = first_sound(self._directory, use, step)
        # Only the skipped ones, not all newer ones: in a bucket, a save of the run before may have
        # been completed meanwhile.
        self._set_aside([damaged for damaged, _ in loaded.skipped])
        self._newest = loaded.checkpoint.step, loaded.checkpoint.digest
        return loaded

    def close(self) -> None:
        """Wait for the save under way, and release the directory.

        Raises:
          OSError: the save failed.
        """
        try:
            self._finish()
            if not self._failed:  # after a failure Orbax would raise the same again
                self._orbax.close()
        finally:
            self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _open_orbax(self) -> v1.training.Checkpointer:
        """A new Orbax checkpointer for the directory; all processes must call.

        At the end of a save at a preemption, Orbax (0.12.8) subtracts the times of the last two
        checkpoints in process 0, and fails if it has not read their metadata. So process 0 reads
        the metadata of all checkpoints; if one is malformed, of none, so that the run can continue.
        """

        def open_manager(*, lightweight: bool) -> v1.training.Checkpointer:
            make = functools.partial(
                v1.training.Checkpointer,
                str(self._directory),
                preservation_policy=self._retention,
                lightweight_initialize=lightweight,
            )
            with reporting(self._directory):
                # In a bucket the run that this one takes over from may delete a checkpoint that
                # Orbax has listed; it ends at its next save.
                with contextlib.suppress(FileNotFoundError):
                    return make()
                return make()

        opened = None
        with contextlib.suppress(ValueError, OverflowError, RecursionError):
            opened = open_manager(lightweight=not processes.is_primary())
        is_open = processes.all_processes(opened is not None)
        return opened if opened is not None and is_open else open_manager(lightweight=True)

    def _remove_unfinished(self, paths: Iterable[epath.Path]) -> None:
        """Remove the incomplete checkpoints among these paths, which Orbax ignores but keeps; all
        processes must call."""
        for path in paths if processes.is_primary() else ():
            if ".orbax-checkpoint-tmp" in path.name or (is_step(path) and not is_committed(path)):
                # A leftover costs only space, and the next start tries again.
                with contextlib.suppress(OSError), reporting(path):
                    path.rmtree(missing_ok=True)
        processes.barrier("maxmars: removed unfinished checkpoints")

    def _set_aside(self, steps: Sequence[int]) -> None:
        """Rename damaged checkpoints to `<step>.damaged`; in a bucket this copies files."""
        if steps:
            if processes.is_primary():
                for step in steps:
                    target = set_aside(self._directory / str(step))
                    _LOGGER.warning(
                        "damaged checkpoint %d is now %s; delete it if you wish", step, target
                    )
            processes.barrier("maxmars: set aside checkpoints")
            self._orbax.close()
            self._orbax = self._open_orbax()

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
                f"a checkpoint could not be written to {self._directory} ({_reason(error)}); "
                "the complete ones are untouched: start again to go on from the newest."
            ) from error


def _reason(error: Exception) -> str:
    """Cause of a failed save, in one line; for a system error in TensorStore's long message, the
    file and the system's text."""
    match = re.search(r"\"([^\"]+)\": [^\"]*\[os_error_code='(\d+)'", str(innermost(error)))
    return f"{match[1]}: {os.strerror(int(match[2]))}" if match else root_cause(error)


def _orbax_context(state: Any) -> v1.Context:
    """Orbax's options for writing a state: `meta` as JSON, and arrays without compression."""
    registry = v1.handlers.local_registry()
    registry.add(v1.handlers.JsonHandler, checkpointable_name="meta")  # else strings become arrays
    context = v1.Context()
    context.checkpointables.registry = registry
    # Compression saves at most a tenth of weights, and doubles the time and memory of writing.
    context.array.saving.use_compression = False
    # Devices with copies of an array each write a share of it, but not of arrays below 1 MiB: the
    # programs that cut them would take longer to compile than the writing.
    context.array.saving.min_slice_bytes_for_replica_parallel = 2**20
    # By default Orbax copies all arrays to the host at once.
    context.memory.write_concurrent_bytes = bytes_in_flight(state)
    return context


class Retention:
    """Keeps the checkpoints that a `CheckpointConfig` names: newest, best, and one per interval.

    Why not Orbax's policies: `BestN` keeps checkpoints without a metric while there are at most n,
    so its choice depends on earlier deletions, and an audit after a kill could not compute it
    again. `EveryNSteps` keeps exact multiples, which saves by minutes miss; `EveryNStepsClosest`
    also keeps the first checkpoint of a run for good.
    """

    def __init__(self, config: CheckpointConfig, losses: Mapping[int, float]) -> None:
        self._config = config
        self.losses = dict(losses)
        """Validation losses by step, also of steps without a checkpoint."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether to keep each checkpoint (Orbax's PreservationPolicy)."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        chosen = self.choose(steps)
        return [step in chosen for step in steps]

    def choose(self, steps: Sequence[int]) -> set[int]:
        """The subset of these steps whose checkpoints to keep."""
        steps = sorted(steps)
        chosen = set(steps[-self._config.keep_last :])
        if self._config.keep_best is not None:
            scored = [s for s in steps if math.isfinite(self.losses.get(s, math.nan))]
            scored.sort(key=lambda step: (self.losses[step], -step))
            chosen |= set(scored[: self._config.keep_best])
        if self._config.keep_every is not None:
            # The first at or after each multiple: by minutes, steps are no round numbers.
            windows = {step // self._config.keep_every: step for step in reversed(steps)}
            chosen |= {step for window, step in windows.items() if window > 0}
        return chosen


class SaveTimer:
    """Finds the step at which `every_minutes` have passed since the last save, in every process.

    The primary process's clock decides, and every look at it costs an exchange between processes.
    So the next look is after half of the steps that fit into the remaining time. With None no save
    is ever due.
    """

    def __init__(
        self, every_minutes: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = None if every_minutes is None else 60 * every_minutes
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Restart the interval, after a save."""
        self._since = self._clock()
        self._first_step: int | None = None
        self._next_look = 0

    def is_due(self, step: int) -> bool:
        """Whether the interval is over; all processes must call at each step."""
        if self._interval_s is None or step < self._next_look:
            return False
        if self._first_step is None:
            self._first_step = step
        elapsed = self._clock() - self._since
        steps_left = (self._interval_s - elapsed) * (step - self._first_step) / max(elapsed, 1e-9)
        ahead = max(1, min(int(steps_left / 2), 10**6))
        due, ahead = processes.from_primary([int(elapsed >= self._interval_s), ahead])
        self._next_look = step + ahead
        return bool(due)
