"""Numbered work in a pool of processes on this machine.

`concurrent.futures` has the pool. Three things are added: progress within a number, as one may take
minutes; Ctrl-C goes to the parent alone; and no worker outlives a killed parent
(`end_with_parent`, for Grain's workers too).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from typing import Any

from maxmars.config.errors import EXTERNAL_ERRORS

_UPDATE_S = 0.5

Work = Callable[[int, Callable[[int], None]], None]
"""Does the work of a number, and calls its second argument with the bytes done since that call."""


def work_through(
    numbers: Sequence[int], work: Work, *, workers: int, progress: Callable[[int, int], None]
) -> None:
    """Do the work of all numbers, in any order.

    Args:
      numbers: those to do.
      work: a function that can be pickled.
      workers: processes to start, by `spawn`; 0 works here.
      progress: called now and then with the numbers done and the bytes done.

    Raises:
      ChildProcessError: a process has died.
    """
    if workers == 0:
        num_done, num_bytes, reported_s = 0, 0, time.monotonic()

        def report(num_new: int) -> None:  # called for each document: too often to print
            nonlocal num_bytes, reported_s
            num_bytes += num_new
            if time.monotonic() > reported_s + _UPDATE_S:
                reported_s = time.monotonic()
                progress(num_done, num_bytes)

        for number in numbers:
            work(number, report)
            num_done += 1
            progress(num_done, num_bytes)
        return
    if not numbers:
        return
    context = get_context("spawn")
    count, stop = context.Value("q"), context.Event()
    workers = min(workers, len(numbers))
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(work, count, stop)
    )
    try:
        waiting = {pool.submit(_work, number) for number in numbers}
        while waiting:
            done, waiting = wait(waiting, _UPDATE_S, FIRST_COMPLETED)
            for future in done:
                error, notes = future.result()
                if error is not None:
                    error.__notes__ = notes
                    raise error
            progress(len(numbers) - len(waiting), count.value)
    except BrokenProcessPool as error:
        raise ChildProcessError(
            f"one of the {workers} tokenising processes has died: it was killed, or memory ran "
            "out. Run the same command again to continue, with fewer --workers if memory is short."
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


_worker: tuple[Work, Any, Any]


def _start_worker(work: Work, count: Any, stop: Any) -> None:
    global _worker
    _worker = work, count, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_parent()


def end_with_parent() -> None:
    """End this process when its parent has ended, even by a kill."""
    # A worker waits for work on a pipe, which its siblings hold open even without the parent.
    parent = parent_process()
    assert parent is not None

    def end() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _work(number: int) -> tuple[Exception | None, list[str]]:
    """Do the work of a number; returns an error beside its notes, which pickle may lose."""
    work, count, stop = _worker

    def report(num_bytes: int) -> None:
        with count.get_lock():
            count.value += num_bytes
        if stop.is_set():
            raise CancelledError  # another process has failed

    try:
        work(number, report)
    except EXTERNAL_ERRORS as error:
        return error, getattr(error, "__notes__", [])
    return None, []
