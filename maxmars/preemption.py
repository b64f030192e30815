"""Stopping a run between two steps when a scheduler or the user asks for it.

SIGTERM (what schedulers and cloud machines send) and Ctrl-C finish the step, save a checkpoint and
end the process with `EXIT_CODE`; the same command then continues the run. A second Ctrl-C leaves at
once: checkpoints appear under their names only when they are complete.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 75
"""BSD's EX_TEMPFAIL: nothing is wrong, run the same command again."""

_KILLED_BY_INTERRUPT = 128 + signal.SIGINT
_SHOW_CURSOR = "\x1b[?25h"


def leave_at_once(code: int) -> NoReturn:
    """End the process with this exit code, whatever its threads do."""
    if sys.stderr.isatty():
        os.write(2, _SHOW_CURSOR.encode())  # the progress line hides it
    os._exit(code)


class StopRequests:
    """Signals that ask for an end, held back inside a `with` block; see `due`.

    Outside the main thread, where Python allows no handlers, signals act as they always do.
    """

    def __init__(self) -> None:
        """Nothing has been asked for."""
        self._asked = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        """Begin to hold signals back."""
        if threading.current_thread() is threading.main_thread():
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
            if not jax.distributed.is_initialized():  # which otherwise has its own handler
                self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let signals act as before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def due(self, step: int) -> bool:
        """Whether to stop after `step` steps.

        Every process asks before each step; whichever was signalled, all get the same answer.
        """
        if jax.distributed.is_initialized():
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            leave_at_once(_KILLED_BY_INTERRUPT)
        self._asked = True
        os.write(2, b"\nstopping after this step; Ctrl-C again leaves at once\n")
        if jax.distributed.is_initialized():
            os.kill(
                os.getpid(), signal.SIGTERM
            )  # to JAX's handler, which tells the other processes
