"""How a run ends early: a request to stop, or a lost process; `README.md` has the exit codes.

SIGTERM, the other `exits.stop_signals` and Ctrl-C finish the step, save a checkpoint and end the
process with `EXIT_CODE`; the same command then continues the run. So does a process of several
whose collective fails because another process is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ClassVar

import jax
from jax.experimental import multihost_utils

from maxmars.distributed.exits import EXIT_CODE, exit_now, stop_signals

_LOST_PEER = re.compile(
    r"\bgloo\b|\bnccl\b|coordination.?service|\bbarrier\b|\bheartbeat\b|remote process exited", re.I
)


class StopRequestedError(Exception):
    """Somebody asked for an end, in the middle of what can be given up."""


class StopRequests(contextlib.AbstractContextManager["StopRequests"]):
    """Turns signals into an answer of `due` inside a `with` block.

    Outside the main thread, where Python allows no handlers, signals act as they always do.
    `before_leaving` is called where a second Ctrl-C ends the process at once. A block within
    another one, as a run of a comparison has, shares its requests.
    """

    _innermost: ClassVar[StopRequests | None] = None  # which has the handlers of this process
    _num_questions: ClassVar[int] = 0  # that this process has asked JAX

    def __init__(self, before_leaving: Callable[[], None] = lambda: None) -> None:
        self._before_leaving = before_leaving
        self._requested = self._agreed = False
        self._outer: StopRequests | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._outer, StopRequests._innermost = StopRequests._innermost, self
            if self._outer is not None:
                self._requested = self._outer._requested
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
            for number in stop_signals():
                # Of several processes JAX has a handler of SIGTERM, which tells the others.
                if number != signal.SIGTERM or not jax.distributed.is_initialized():
                    self._previous[number] = signal.signal(number, self._terminate)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._previous:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        StopRequests._innermost = self._outer
        if self._outer is not None:
            self._outer._requested |= self._requested

    def due(self) -> bool:
        """Whether to stop now.

        All processes ask at the same places, after steps and between the batches of evaluations,
        and equally often. Whichever was signalled, all get the same answer to the same question.
        """
        if not jax.distributed.is_initialized():
            return self._requested
        if not self._agreed:
            # After a signal JAX names the first number that no process has asked for, and is silent
            # about all others. So they count their questions.
            StopRequests._num_questions += 1
            number = StopRequests._num_questions
            self._agreed = multihost_utils.reached_preemption_sync_point(number)
        return self._agreed

    def check(self) -> None:
        """Ask as `due` does.

        Raises:
          StopRequestedError: the answer is yes.
        """
        if self.due():
            raise StopRequestedError

    def request(self) -> None:
        """Ask for an end as a signal does; any thread of any process may."""
        self._requested = True
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's handler tells the other processes

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.request()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            self._before_leaving()
            exit_now(128 + signal.SIGINT)
        os.write(2, b"\nstopping after this step; Ctrl-C again leaves at once\n")
        self.request()


class ExitIfPeerIsLost(contextlib.AbstractContextManager["ExitIfPeerIsLost"]):
    """Ends the process where an error is that another process of the run is gone.

    To be entered, or pushed on an `ExitStack`, after everything whose exit would wait for the lost
    process.

    Args:
      own_error: called before; what the lost process said of an error of its own, which would come
        back, or None. With such an error the exit code is 1, otherwise `EXIT_CODE`.
    """

    def __init__(self, own_error: Callable[[], str | None] = lambda: None) -> None:
        self._own_error = own_error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or jax.process_count() == 1 or not is_of_lost_peer(error):
            return
        own_error = self._own_error()
        who = f"process {jax.process_index()} of {jax.process_count()} has lost another process of "
        if own_error is not None:
            exit_now(1, f"{who}the run, which failed: {own_error}")
        exit_now(
            EXIT_CODE,
            f"{who}the run, which was killed, failed or no longer answers "
            f"({str(error).splitlines()[0]}). Exit code {EXIT_CODE}: the same command, in every "
            "process, continues from the last complete checkpoint.",
        )


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether an error, or one that caused it, is of a collective or barrier that a peer left."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError | ValueError | OSError) and _LOST_PEER.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
