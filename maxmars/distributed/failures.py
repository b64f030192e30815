"""How a run ends early: a request to stop, or a lost process; `README.md` has the exit codes.

SIGTERM (which schedulers and cloud machines send) and Ctrl-C finish the step, save a checkpoint and
end the process with `EXIT_CODE`; the same command then continues the run. So does a process of
several whose collective fails because another process is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 75
"""BSD's EX_TEMPFAIL: nothing is wrong, run the same command again."""

_SHOW_CURSOR = b"\x1b[?25h"
_LOST_PEER = re.compile(
    r"\bgloo\b|\bnccl\b|coordination.?service|\bbarrier\b|\bheartbeat\b|remote process exited", re.I
)


class StopRequests(contextlib.AbstractContextManager["StopRequests"]):
    """Turns signals into an answer of `due` inside a `with` block.

    Outside the main thread, where Python allows no handlers, signals act as they always do.
    """

    def __init__(self) -> None:
        self._requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
            if not jax.distributed.is_initialized():  # JAX then has its own handler of SIGTERM
                self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def due(self, step: int) -> bool:
        """Whether to stop after `step` steps.

        Every process asks before each step. Whichever was signalled, all get the same answer.
        """
        if jax.distributed.is_initialized():
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._requested

    def request(self) -> None:
        """Ask for an end as a signal does; any thread of any process may."""
        self._requested = True
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's handler tells the other processes

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._requested = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            exit_now(128 + signal.SIGINT)
        os.write(2, b"\nstopping after this step; Ctrl-C again leaves at once\n")
        self.request()


def exit_now(code: int, message: str | None = None) -> NoReturn:
    """Print a line to standard error and end the process, whatever its threads do.

    Python's usual exit would wait for the other processes of a run, and JAX would abort.
    """
    if sys.stderr.isatty():
        os.write(2, _SHOW_CURSOR)  # the progress line hides it
    if message is not None:  # past sys.stderr, whose lock another thread may hold
        os.write(2, f"maxmars: {message}\n".encode())
    os._exit(code)


def exit_if_peer_is_lost(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """End the process with `EXIT_CODE` if the error is that another process of the run is gone.

    To be pushed on an `ExitStack` after everything whose exit would wait for the lost process.
    """
    if error is not None and jax.process_count() > 1 and is_of_lost_peer(error):
        reason = str(error).splitlines()[0]
        exit_now(
            EXIT_CODE,
            f"process {jax.process_index()} of {jax.process_count()} has lost another process of "
            f"the run, which was killed, failed or no longer answers ({reason}). Exit code "
            f"{EXIT_CODE}: the same command, in every process, continues from the last complete "
            "checkpoint.",
        )


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether an error, or one that caused it, is of a collective or barrier that a peer left."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError | ValueError | OSError) and _LOST_PEER.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
