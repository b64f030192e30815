"""Write checkpoints: asynchronous saves with digests, and which of the old ones are kept."""

from __future__ import annotations

import contextlib
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
    """Writes and restores the checkpoints of one run; also a context manager that closes itself.

    Every process of the run makes one and calls its methods in the same order. Until it is closed,
    or its process dies, no other run can open the directory for writing. What interrupted saves
    left in the directory is removed.

    Args:
      directory: where the checkpoints are, on a disk or on `gs://`; best `<workdir>/checkpoints`.
      config: the run's configuration. It is stored in each checkpoint, and `config.checkpoint`
        says which checkpoints are kept.
      mesh: the run's mesh, for the description of the environment.
      data_digest: digest of the data that the run reads, which is stored in each checkpoint.

    Raises:
      ValueError: another run has it open.
      OSError: it cannot be written to.
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
        """Step of the newest checkpoint, sound or not, after the save under way; None if there is
        none."""
        self._finish()
        return max(steps_of_run(self._directory), default=None)

    def check_owner(self) -> None:
        """Raise ValueError or OSError if the directory is another run's by now; on a disk the
        primary process alone sees it."""
        if self._lock is not None:
            self._lock.check()

    def evaluated(self, losses: Mapping[int, float]) -> None:
        """Record validation losses by step, by which `keep_best` chooses; call it in every
        process."""
        self._retention.losses |= losses

    def is_due(self, step: int) -> bool:
        """Whether `config.checkpoint` wants one since the last save: by its steps or its minutes.

        Every process must ask after each step, and all get the same answer.
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

        On return the state has been copied, and its buffers may be donated. A checkpoint of the
        same step is replaced, unless this object wrote it from, or restored it to, the same state:
        then nothing happens.

        Args:
          step: number of optimizer steps that led to `state`.
          state: pytree of arrays. Containers are stored as plain dicts; `restore` gives them back.
          data_position: number of training examples consumed.
          tokens: trained on so far.
          journal: from step, digest, position and tokens to the hash of the line that the run's
            journal now has of this save; called before the checkpoint is written.
          wait: return only when the checkpoint is complete.

        Returns:
          Seconds for which the caller was blocked: the end of the save before, the digests and the
          copy, but not what `wait` waits for. None if nothing had to be written.

        Raises:
          OSError: the save before could not be completed, or with `wait` this one; or the
            directory was moved, or nobody can tell whose it is.
          ValueError: another run took over the directory, or some parameters are not finite.

        Unless parameters are not finite, all that can be done then is `close`.
        """
        started = time.perf_counter()
        self._is_due = False
        self._finish()
        processes.text_from_primary(self.check_owner)
        digests, finite = digest_and_finite(state)
        wrong = [path for path in finite if path.startswith("params/") and not finite[path]]
        if wrong:
            raise ValueError(
                f"{len(wrong)} arrays of parameters are not finite after step {step}, first "
                f"{wrong[0]}: nothing is saved, and the last checkpoint stays. Continue with a "
                "lower optimizer.learning_rate (name it in --resume-overrides); an optimizer that "
                "divides by the rate needs --schedule.warmup-steps 0, as a warm-up begins with 0."
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
        """Load the newest checkpoint whose digests agree, or that of `step`, to go on from it.

        Newer ones that were found damaged are renamed to `<step>.damaged`: since an older one could
        be read, it is not the reading that fails. They are never deleted.

        Args:
          abstract_state: the state, see `load_arrays`, or a function from the checkpoint to it.
          step: of the only checkpoint to take.
          whole: the checkpoint must have no other arrays.

        Raises:
          FileNotFoundError: there is no checkpoint, or none of `step`.
          ValueError: every checkpoint, or that of `step`, is damaged; or the newest sound one has
            arrays of other names, shapes or types than `abstract_state`, or is of another version
            of maxmars.
        """
        self._finish()

        def use(checkpoint: Checkpoint, skipped: Skipped) -> Loaded:
            wanted = abstract_state(checkpoint) if callable(abstract_state) else abstract_state
            state = load_arrays(checkpoint, wanted, whole=whole)
            return Loaded(state=state, checkpoint=checkpoint, skipped=skipped)

        loaded = first_sound(self._directory, use, step)
        # Not those that are newer alone: in a bucket one may have been completed meanwhile.
        self._set_aside([damaged for damaged, _ in loaded.skipped])
        self._newest = loaded.checkpoint.step, loaded.checkpoint.digest
        return loaded

    def close(self) -> None:
        """Wait for the save under way, and let other runs have the directory.

        Raises:
          OSError: it could not be completed.
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
        """Orbax's checkpointer, which knows the complete checkpoints; all processes must call.

        When a save at a preemption ends, process 0 subtracts the times of the last two checkpoints,
        and Orbax (0.12.8) fails there if it has not read both. So process 0 reads what each says of
        itself. Where one says nonsense, none are read, rather than that the run could not go on.
        """

        def open_manager(*, lightweight: bool) -> v1.training.Checkpointer:
            with reporting(self._directory):
                return v1.training.Checkpointer(
                    str(self._directory),
                    preservation_policy=self._retention,
                    lightweight_initialize=lightweight,
                )

        opened = None
        with contextlib.suppress(ValueError, OverflowError, RecursionError):
            opened = open_manager(lightweight=not processes.is_primary())
        is_open = processes.all_processes(opened is not None)
        return opened if opened is not None and is_open else open_manager(lightweight=True)

    def _remove_unfinished(self, paths: Iterable[epath.Path]) -> None:
        """Remove what the saves of killed runs left at these paths, which Orbax ignores but keeps;
        call it in every process."""
        for path in paths if processes.is_primary() else ():
            if ".orbax-checkpoint-tmp" in path.name or (is_step(path) and not is_committed(path)):
                # What cannot be removed costs space and nothing else; the next start tries again.
                with contextlib.suppress(OSError), reporting(path):
                    path.rmtree(missing_ok=True)
        processes.barrier("maxmars: removed unfinished checkpoints")

    def _set_aside(self, steps: Sequence[int]) -> None:
        """Rename damaged checkpoints, so that they count no more; in a bucket this copies files."""
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
    """Why a save failed, in one line: of an error of the system, which TensorStore gives among
    other words, the file and the reason."""
    match = re.search(r"\"([^\"]+)\": [^\"]*\[os_error_code='(\d+)'", str(innermost(error)))
    return f"{match[1]}: {os.strerror(int(match[2]))}" if match else root_cause(error)


def _orbax_context(state: Any) -> v1.Context:
    """Options of Orbax for writing a state: `meta` is JSON, and arrays are not compressed."""
    registry = v1.handlers.local_registry()
    registry.add(v1.handlers.JsonHandler, checkpointable_name="meta")  # else strings become arrays
    context = v1.Context()
    context.checkpointables.registry = registry
    # Weights shrink by a tenth at most, and compression takes as long as writing and as much memory
    # again.
    context.array.saving.use_compression = False
    # Where devices hold copies of an array, each writes a share of it. Smaller arrays are written
    # whole: the programs that cut them would take longer to compile than the writing.
    context.array.saving.min_slice_bytes_for_replica_parallel = 2**20
    # Without it, Orbax copies all arrays at once.
    context.memory.write_concurrent_bytes = bytes_in_flight(state)
    return context


class Retention:
    """Keeps the newest checkpoints, the best, and some for good, as a `CheckpointConfig` says.

    Orbax's `LatestN` is `keep_last`. Its `BestN` also keeps checkpoints without a metric while
    there are no more than n, so what it says of one depends on which others are deleted already,
    and an audit after a kill could not tell what the run would have kept. Its `EveryNSteps` knows
    exact multiples, which saves by minutes never meet, and otherwise, as `EveryNStepsClosest`, it
    keeps the first checkpoint of a run for good.
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
        """The steps, of these, whose checkpoints to keep."""
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
    """Says when `every_minutes` have passed since the last save, at the same step in every process.

    The primary process's clock decides. Asking the others costs an exchange between processes, so
    the clock is only looked at after half of the steps that fit into the time left, then half of
    the rest, and so on. With None no save is ever due.
    """

    def __init__(
        self, every_minutes: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = None if every_minutes is None else 60 * every_minutes
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Start the time anew: a checkpoint was written."""
        self._since = self._clock()
        self._first_step: int | None = None
        self._next_look = 0

    def is_due(self, step: int) -> bool:
        """Whether the time is over; every process must ask at each step."""
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
