"""Tracing a few steps of a run (`--profile FIRST:LAST`) with JAX's profiler."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
from etils import epath

from maxmars.distributed.files import is_remote, write_bytes
from maxmars.distributed.workdir import PROFILE, of_process


class StepTracer:
    """Traces some steps of a run; without `profile` none."""

    def __init__(self, profile: tuple[int, int] | None, workdir: epath.Path) -> None:
        """`profile`: the first and the last step, counted from 1 as in the metrics."""
        self._first, self.last = profile or (None, None)
        self._workdir = workdir
        self._local: tempfile.TemporaryDirectory[str] | None = None
        self._running = False

    def check(self, step: int, num_steps: int) -> None:
        """Check that a run that goes on from `step` makes the steps to trace.

        Raises:
          ValueError: it does not.
        """
        if self._first is None or self.last is None:
            return
        if not step + 2 <= self._first <= self.last <= num_steps:
            raise ValueError(
                f"--profile {self._first}:{self.last} must name steps of this run from step "
                f"{step + 2} on, after the one that compiles, to {num_steps}."
            )

    @property
    def _directory(self) -> epath.Path:
        return self._workdir / of_process(PROFILE, jax.process_index())

    def before(self, step: int, state: Any) -> None:
        """Start the trace if `step`, which comes next, is the first to trace.

        The steps before it, which are complete when `state` is, are waited for: the trace would
        hold a part of them.
        """
        if step == self._first:
            jax.block_until_ready(state)
            directory = self._directory
            if is_remote(directory):  # the profiler writes to disks
                self._local = tempfile.TemporaryDirectory()
                directory = self._local.name
            start_trace(Path(directory))
            self._running = True

    def end(self, result: Any) -> str:
        """Stop after the last step, whose arrays are waited for; the message for the user."""
        jax.block_until_ready(result)
        self.close()
        return (
            f"trace of steps {self._first} to {self.last} in {self._directory}, for "
            "`xprof --logdir` or Perfetto"
        )

    def close(self) -> None:
        """Stop tracing, if that has not been done, and upload the trace if it goes to a bucket."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            if self._local is not None:
                with self._local as local:
                    for path in filter(Path.is_file, Path(local).rglob("*")):
                        write_bytes(self._directory / path.relative_to(local), path.read_bytes())


def start_trace(directory: Path) -> None:
    """Begin to trace what the devices do, and little of what Python does; slows small steps."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2  # operations of a CPU device are host events
    jax.profiler.start_trace(str(directory), profiler_options=options)
