"""One clear message where JAX ends a process because another one of its run is gone.

JAX's distributed service notices that a process died, stopped answering or never came: connections
close, or heartbeats stay away. In every other process it then logs what it knows and calls abort(),
in a thread of C++ that no Python code can run in. So that this process can say what happened and
end with `EXIT_CODE`, such a thread is made to sleep before it goes on: the handler of SIGABRT is
C's sleep(), which gets the signal's number as its seconds. Meanwhile a thread of Python sees which
thread is in the handler.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator
from typing import NoReturn

from maxmars.preemption import EXIT_CODE, leave_at_once

_TICK_S = 0.5  # an abort takes int(signal.SIGABRT) = 6 seconds
_PRINTING_S = 10.0  # what reads our standard error may hang as well
_OTHERS_GONE = re.compile(
    r"\bgloo\b|\bnccl\b|coordination.?service|\bbarrier\b|\bheartbeat\b|remote process exited", re.I
)

_libc = ctypes.CDLL(None)
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.signal.restype = ctypes.c_void_p

_ending = threading.Lock()


def says_others_are_gone(error: BaseException) -> bool:
    """Whether an error, or one that led to it, is of a collective or a barrier that others left."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError | ValueError | OSError) and _OTHERS_GONE.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def end(report: Callable[[], None], code: int = EXIT_CODE, *, wait_s: float = 0.0) -> NoReturn:
    """Let `report` write to standard error, wait, and end the process; threads left as they are.

    Only the first call counts; in other threads it never returns either.
    """
    if not _ending.acquire(blocking=False):
        threading.Event().wait()
    printing = threading.Thread(target=report, daemon=True)
    try:
        printing.start()
    except RuntimeError:  # Python is ending already
        report()
    else:
        printing.join(_PRINTING_S)
    time.sleep(wait_s)
    leave_at_once(code)


def write(text: str) -> None:
    """Write a line to standard error, also while another thread holds Python's lock of it."""
    os.write(2, f"maxmars: {text}\n".encode())


class AbortWatch:
    """Watches this process for aborts by JAX's distributed service, until it ends."""

    def __init__(self, process: str) -> None:
        """Name the process, as in `process 1 of 2`."""
        self._process = process
        self._joining: str | None = None
        self._service: frozenset[int] = frozenset()
        self._failed = False
        self._main = threading.main_thread().native_id or os.getpid()

    @contextlib.contextmanager
    def joining(self, failure: str) -> Generator[None, None, None]:
        """Start the distributed service inside this; `failure` says what was wrong if it aborts."""
        _libc.signal(signal.SIGABRT, ctypes.cast(_libc.sleep, ctypes.c_void_p))
        threading.Thread(target=self._run, daemon=True, name="abort watch").start()
        self._joining = failure
        before = _threads()
        try:
            yield
        finally:
            self._service = _threads() - before
            self._joining = None

    def failed(self) -> None:
        """This process is ending with an error of its own, which its exit code is to tell."""
        self._failed = True

    def _run(self) -> None:
        while True:
            time.sleep(_TICK_S)
            service = any(map(_in_handler, self._service))
            if not service and not _in_handler(self._main):
                continue
            if service or self._failed:
                self._end()
            if self._joining is not None:
                end(lambda: write(f"{self._process}: {self._joining}"))
            _libc.signal(signal.SIGABRT, None)  # someone else's abort: let it happen now
            os.kill(os.getpid(), signal.SIGABRT)

    def _end(self) -> NoReturn:
        if self._failed:
            end(lambda: write(f"{self._process} ended with the error above."), 1)
        end(
            lambda: write(
                f"{self._process} has lost another one of its run, which was killed, failed or no "
                "longer answers; JAX's lines above name it as a task. Exit code "
                f"{EXIT_CODE}: the same command, in every process, continues from the last "
                "complete checkpoint."
            )
        )


def _threads() -> frozenset[int]:
    return frozenset(map(int, os.listdir("/proc/self/task")))


def _in_handler(thread: int) -> bool:
    """Whether SIGABRT is blocked in a thread, as it is while its handler runs.

    Where other signals are blocked, too, this has another reason: starting a thread, for example.
    """
    try:
        with open(f"/proc/self/task/{thread}/status") as status:
            line = next(line for line in status if line.startswith("SigBlk:"))
    except OSError:
        return False  # the thread has ended
    blocked = int(line.split()[1], 16)
    return bool(blocked >> (signal.SIGABRT - 1) & 1) and not blocked >> (signal.SIGBUS - 1) & 1
