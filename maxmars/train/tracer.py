"""Tracing a few steps of a run (`--profile FIRST:LAST`) with JAX's profiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from maxmars.distributed.files import Workdir, is_remote
from maxmars.distributed.workdir import PROFILE, of_process

TraceTables = Callable[[Path, str, int], str]
"""Makes tables of the operations that took the time, from the trace's directory, the text of the
compiled step and the number of steps; `maxmars.plan.trace.trace_tables`."""


class StepTracer:
    """Traces some steps of a run, and then says what took the time; without `profile` none."""

    def __init__(
        self, profile: tuple[int, int] | None, workdir: Workdir, tables: TraceTables | None = None
    ) -> None:
        """`profile`: the first and the last step, counted from 1 as in the metrics."""
        self._first, self.last = profile or (None, None)
        self._workdir, self._tables = workdir, tables
        self._running = False

    def check(self, step: int, num_steps: int) -> None:
        """Check that a run that goes on from `step` makes the steps to trace, on a disk.

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
        if is_remote(self._workdir):
            raise ValueError(
                f"--profile {self._first}:{self.last} writes into the workdir, and "
                f"{self._workdir} is a bucket; trace in a short run with a --workdir on a disk."
            )

    @property
    def _directory(self) -> Path:
        return Path(self._workdir) / of_process(PROFILE, jax.process_index())

    def before(self, step: int, state: Any) -> None:
        """Start the trace if `step`, which comes next, is the first to trace.

        The steps before it, which are complete when `state` is, are waited for: the trace would
        hold a part of them.
        """
        if step == self._first:
            jax.block_until_ready(state)
            start_trace(self._directory)
            self._running = True

    def end(self, result: Any, program: Callable[[], str]) -> str:
        """Stop after the last step; the message for the user, whose tables are in `operations.txt`.

        Args:
          result: arrays of the last step, to wait for.
          program: makes the text of the compiled step.
        """
        jax.block_until_ready(result)
        self.close()
        text = ""
        if self._tables is not None:
            count = (self.last or 0) - (self._first or 0) + 1
            text = self._tables(self._directory, program(), count)
            (self._directory / "operations.txt").write_text(text)
        return f"{text}trace of steps {self._first} to {self.last} in {self._directory}"

    def close(self) -> None:
        """Stop tracing, if that has not been done."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


def start_trace(directory: Path) -> None:
    """Begin to trace what the devices do, and little of what Python does; slows small steps."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2  # operations of a CPU device are host events
    jax.profiler.start_trace(str(directory), profiler_options=options)
