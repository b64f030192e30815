"""Asynchronous saves with digests, and restores that check them and clean up."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Generator
from typing import Any

from jax.sharding import Mesh
from orbax.checkpoint import v1

from maxmars import distributed
from maxmars.checkpoint.contents import make_meta, read_metrics
from maxmars.checkpoint.directory import Directory, list_steps, resolve, set_aside, sweep
from maxmars.checkpoint.lock import acquire
from maxmars.checkpoint.restore import Restored, first_sound, load_state, with_shardings
from maxmars.checkpoint.retention import Retention, SaveTimer
from maxmars.config import TrainConfig
from maxmars.digest import combine, digest, to_plain
from maxmars.metrics import environment
from maxmars.orbax_io import orbax_context
from maxmars.sharding import replicated
from maxmars.workdir import reporting

_LOGGER = logging.getLogger(__name__)


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Writes and reads the checkpoints of one run; also a context manager that closes itself.

    Every process of the run makes one and calls its methods in the same order. Until it is closed,
    or its process dies, no other run can open the directory for writing.
    """

    def __init__(self, directory: Directory, config: TrainConfig, *, mesh: Mesh) -> None:
        """Open `directory`, which is created, and remove what interrupted saves left in it.

        Args:
          directory: where the checkpoints are, a local path or `gs://`; best
            `<workdir>/checkpoints`.
          config: the run's configuration: it is stored in each checkpoint, and `config.checkpoint`
            says which are kept.
          mesh: leaves of an abstract state that carry no sharding are restored to all its devices.

        Raises:
          ValueError: another run has it open.
          OSError: it cannot be written to.
        """
        self._directory = resolve(directory)
        self._config = config
        self._mesh = mesh
        self._environment = environment(mesh)
        self._pending: v1.AsyncResponse[bool] | None = None
        self._failed = False
        self._on_disk: dict[int, str] = {}  # step -> digest of the state that is known to be there
        self._retention = Retention(config.checkpoint)
        self._timer = SaveTimer(config.checkpoint.every_minutes)
        self._lock = acquire(self._directory)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._release)
            if distributed.is_primary():
                sweep(self._directory)
            distributed.barrier("maxmars: swept checkpoints")
            if config.checkpoint.keep_best is not None:
                for step in list_steps(self._directory):
                    self._retention.record(step, read_metrics(self._directory / str(step)))
            with reporting(self._directory):
                self._orbax = v1.training.Checkpointer(
                    str(self._directory),
                    preservation_policy=self._retention,
                    lightweight_initialize=True,
                )
            on_error.pop_all()

    def __exit__(self, *exception: object) -> None:
        """Close, and so raise what went wrong in a save that was still under way."""
        self.close()

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, sound or not; None if there is none."""
        self._finish()
        return max(distributed.from_primary(list_steps(self._directory)), default=None)

    def check_owner(self) -> None:
        """Raise OSError if another run took over the directory, which the primary process sees."""
        if self._lock is not None:
            self._lock.check()

    def is_due(self, step: int) -> bool:
        """Whether `config.checkpoint.every_minutes` are over since the last save.

        Every process must ask at each step, and all get the same answer.
        """
        return self._timer.is_due(step)

    def save(
        self,
        step: int,
        state: Any,
        *,
        data_position: int,
        metrics: dict[str, Any] | None = None,
        wait: bool = False,
    ) -> float | None:
        """Write a checkpoint in the background.

        On return the state has been copied and its buffers may be donated. A checkpoint of the same
        step is replaced, unless this object wrote it from, or restored it to, the same state: then
        nothing happens.

        Args:
          step: number of optimizer steps that led to `state`.
          state: pytree of arrays; containers that are no dicts come back by `restore` only.
          data_position: number of sequences consumed.
          metrics: numbers that are stored beside the state, and decide which are the best.
          wait: return only when the checkpoint is complete.

        Returns:
          Seconds for which the caller was blocked: the end of the save before, the digests and the
          copy, but not what `wait` waits for. None if nothing had to be written.

        Raises:
          OSError: the previous save could not be completed, or with `wait` this one; or another run
            took over the directory. All that can be done then is `close`.
          ValueError: `metrics` lacks `config.checkpoint.best_metric`.
        """
        started = time.perf_counter()
        self._finish()
        digests = digest(state)
        total = combine(digests)
        known = self._on_disk.get(step) == total
        if known and distributed.everywhere(step in list_steps(self._directory)):
            return None
        metrics = metrics or {}
        self._retention.record(step, metrics)
        self._retention.outdated.discard(step)
        meta = make_meta(
            step,
            state,
            digests,
            data_position=data_position,
            config=self._config,
            metrics=metrics,
            environment=self._environment,
        )
        with self._reporting(), orbax_context(tree=state):
            self.check_owner()
            self._pending = self._orbax.save_checkpointables_async(
                step, {"state": to_plain(state), "meta": meta}, force=True, overwrite=True
            )
        self._on_disk[step] = total
        self._timer.restart()
        blocked_s = time.perf_counter() - started
        if wait:
            self._finish()
        return blocked_s

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
        """The newest checkpoint whose digests agree, or the one of `step`.

        Newer ones that were found damaged are renamed to `<step>.damaged`: with a sound one at
        hand, it is not the reading that fails. They are never deleted.

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
        abstract = with_shardings(abstract_state, replicated(self._mesh))
        restored, skipped = first_sound(
            self._directory, step, lambda path: load_state(path, abstract, self._config)
        )
        self._set_aside([s for s, _ in skipped])
        self._on_disk = {restored.step: restored.digest}
        # A run that goes on from here writes the newer steps anew; until then retention must not
        # count them, or it would delete the new checkpoints in favour of them.
        self._retention.outdated = {s for s in list_steps(self._directory) if s > restored.step}
        return dataclasses.replace(restored, skipped=skipped)

    def close(self) -> None:
        """Wait for the save under way, and let other runs have the directory.

        Raises:
          OSError: it could not be completed.
        """
        try:
            self._finish()
        finally:
            try:
                if not self._failed:  # after a failure Orbax would raise the same again
                    self._orbax.close()
            finally:
                self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _set_aside(self, damaged: list[int]) -> None:
        if not damaged:
            return
        if distributed.is_primary():
            for step in damaged:
                path = set_aside(self._directory, step)
                _LOGGER.warning(
                    "damaged checkpoint %d is now %s; delete it if you wish", step, path
                )
        distributed.barrier("maxmars: set aside damaged checkpoints")
        self._orbax.reload()

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
