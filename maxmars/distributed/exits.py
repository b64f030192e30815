"""How a process ends at once: exit codes, and a signal while a run starts. Loads no JAX.

`README.md` has the table of the exit codes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from typing import NoReturn

EXIT_CODE = 75
"""BSD's EX_TEMPFAIL: nothing is wrong, run the same command again."""

_SHOW_CURSOR = b"\x1b[?25h"


def exit_now(code: int, message: str | None = None) -> NoReturn:
    """Print a line to standard error and end the process, whatever its threads do.

    Python's usual exit would wait for the other processes of a run, and JAX would abort.
    """
    if sys.stderr.isatty():
        os.write(2, _SHOW_CURSOR)  # the progress line hides it
    if message is not None:  # past sys.stderr, whose lock another thread may hold
        os.write(2, f"maxmars: {message}\n".encode())
    os._exit(code)


@contextlib.contextmanager
def leaving_at_once() -> Generator[None]:
    """Ctrl-C ends the process at once: within an import, Python's exception may be lost in a
    callback of the garbage collector, or leave half a library."""
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if handler is not signal.default_int_handler or not is_main:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: exit_now(128 + signal.SIGINT, "interrupted"))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to stop, but Ctrl-C's.

    SIGTERM comes from most schedulers and cloud machines, SIGUSR1 and SIGUSR2 from jobs of SLURM
    that ask for them and from submitit, SIGXCPU at a limit of processor time, SIGHUP with a lost
    terminal, unless the process was started to ignore it, as by `nohup`.
    """
    always = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
    return always + [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)


class Starting(contextlib.AbstractContextManager["Starting"]):
    """A request to stop ends the process at once with `EXIT_CODE`: a run that starts has nothing to
    save.

    A thread waits for the signal. The main thread runs Python's handlers only between two lines of
    Python, and a compilation or the wait for other processes may take minutes.
    """

    def __init__(self) -> None:
        self.before_exit: Callable[[], None] = lambda: None
        """Called before the process ends."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def __enter__(self) -> Starting:
        # Without a handler of Python's own the signal would end the process before the thread acts.
        self._previous = {
            number: signal.signal(number, lambda number, frame: None) for number in stop_signals()
        }
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, daemon=True, name="starting").start()
        return self

    def done(self) -> None:
        """The run has started: from now on signals do what their handlers do."""
        if self._write != -1:
            signal.set_wakeup_fd(-1)
            os.close(self._write)  # which ends the thread
            self._write = -1

    def __exit__(self, *_: object) -> None:
        self.done()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _wait(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] in self._previous:
                self.before_exit()
                exit_now(
                    EXIT_CODE,
                    f"stopped while the run was starting. Exit code {EXIT_CODE}: the same command "
                    "starts it again.",
                )
        os.close(self._read)
