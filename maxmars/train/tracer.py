"""Tracing of a few steps of a run (`--profile FIRST:LAST`) with JAX's profiler.

The trace has whole steps: work before the first is waited for, and so is the last. JAX writes only
to disks, so a run in a bucket traces into a temporary directory, which is uploaded at the end.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
from etils import epath

from maxmars.distributed.files import is_remote, write_bytes
from maxmars.distributed.workdir import PROFILE, of_process


class StepTracer:
    """Traces the steps of a range."""

    def __init__(self, profile: tuple[int, int] | None, workdir: epath.Path) -> None:
        """`profile`: first and last step, counted from 1 as in metrics; None traces no step."""
        self._first, self.last = profile or (None, None)
        self._workdir = workdir
        self._local: tempfile.TemporaryDirectory[str] | None = None
        self._running = False

    def check(self, step: int, num_steps: int) -> None:
        """Check that a run makes the steps to trace after `step`.

        Raises:
          ValueError: the run does not, or the first step to trace would be the one that compiles.
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
        # A property: the tracer is made before the processes have joined and have numbers.
        return self._workdir / of_process(PROFILE, jax.process_index())

    def before(self, step: int, state: Any) -> None:
        """Start the trace if `step` is the first to trace, and `state` is the state before it."""
        if step == self._first:
            jax.block_until_ready(state)  # else the trace would have a part of earlier steps
            directory = self._directory
            if is_remote(directory):
                self._local = tempfile.TemporaryDirectory()
                directory = self._local.name
            start_trace(Path(directory))
            self._running = True

    def end(self, result: Any) -> str:
        """Stop the trace when `result`, of the last step, is ready; return a message."""
        jax.block_until_ready(result)
        self.close()
        return (
            f"trace of steps {self._first} to {self.last} in {self._directory}, for "
            "`xprof --logdir` or Perfetto"
        )

    def close(self) -> None:
        """Stop the trace if it is running, and upload it to a bucket."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            if self._local is not None:
                with self._local as local:
                    for path in filter(Path.is_file, Path(local).rglob("*")):
                        write_bytes(self._directory / path.relative_to(local), path.read_bytes())


def start_trace(directory: Path) -> None:
    """Start a trace of the devices, without Python's calls. Small steps become slower."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2  # operations of a CPU device are host events
    jax.profiler.start_trace(str(directory), profiler_options=options)
