"""Immediate ends of a process: exit codes and signals.

This module loads no JAX, which takes seconds: a signal may come while it loads. `os._exit` replaces
Python's exit, which would wait for threads and for the other processes of a run. The table of the
exit codes is in `cli/README.md`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Generator
from typing import NoReturn

EXIT_CODE = 75
"""BSD's EX_TEMPFAIL: nothing is wrong, run the same command again."""
OWN_ERROR = 78
"""One of several processes failed by an error of its own: the same command would fail again. It is
greater than the 75 of the other processes, as SLURM takes the greatest code for the job's."""

_SHOW_CURSOR = b"\x1b[?25h"


def exit_now(code: int, message: str | None = None) -> NoReturn:
    """Print a line to standard error, and end the process without waiting for its threads.

    Python's usual exit would wait for the other processes of a run, and JAX would abort.
    """
    if sys.stderr.isatty():
        os.write(2, _SHOW_CURSOR)  # the progress line hides it
    if message is not None:  # not to sys.stderr: another thread may hold its lock
        os.write(2, f"maxmars: {message}\n".encode())
    os._exit(code)


@contextlib.contextmanager
def leaving_at_once() -> Generator[None]:
    """Let Ctrl-C end the process at once, for imports: KeyboardInterrupt may be lost there in a
    callback of the garbage collector, or leave a library half loaded."""
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
    """The signals, other than Ctrl-C's, that request a run to stop.

    SIGTERM comes from most schedulers and cloud machines, SIGUSR1 and SIGUSR2 from jobs of SLURM
    that ask for them and from submitit, SIGXCPU at a limit of processor time, SIGHUP with a lost
    terminal, unless the process was started to ignore it, as by `nohup`.
    """
    always = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
    return always + [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)


def is_one_of_several() -> bool:
    """Whether this process has joined other processes in a run."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()
