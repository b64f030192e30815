"""One process of a run: joining the others, requests to stop, hangs, lost peers, the exit code.

The command makes a `RunProcess` before it loads JAX, which takes seconds, and hands it to `train`;
so this module imports JAX and files late. `cli/README.md` has the exit codes. The effect of a
signal depends on the phase:

    starting   `join` counts the start and meets the others, `train` opens the run;
               a signal ends the process at once with 75: there is nothing to save
    training   from `started` on; a signal finishes the step, saves, and ends with 75

A process that fails by an error of its own ends with 78 (see `cli`); processes that have only lost
this peer end with 75. So launchers know which exit to report.

**Failed starts.** Launchers restart a run after a preemption or a lost peer. Process 0 counts in
`<workdir>/starts.json` the starts in a row that saved fewer than `_FEWEST_STEPS` steps. After
`_MOST_STARTS` of them it refuses to begin, with an error of its own, which ends the restarts. The
same command, given again by a person, counts anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, NoReturn

from maxmars.distributed.exits import EXIT_CODE, exit_now, is_one_of_several, stop_signals
from maxmars.distributed.workdir import LOGS, STARTS

_MOST_STARTS = 10
_FEWEST_STEPS = 10
_LONGEST_PAUSE_S = 60.0  # shorter than the other processes wait for this one
_STACKS_S = 5.0  # time for the other processes to show their stacks before they lose this one
_LOST_PEER = re.compile(
    r"\bgloo\b|\bnccl\b|coordination.?service|\bbarrier\b|\bheartbeat\b|remote process exited", re.I
)
_PATH = re.compile(r"(?<![\w.])(gs:/)?/\S+")  # removed first: a path may contain such a word


class StopRequestedError(Exception):
    """A request to stop, raised where the work under way can be given up."""


@dataclass(frozen=True, kw_only=True)
class _Starts:
    """The contents of `starts.json`."""

    job: str | None
    """SLURM's job, which keeps its number when it is requeued; None without SLURM."""
    start: str | None = None
    """Identifier of the last start."""
    step: int = 0
    """Step of the newest checkpoint at the last start."""
    count: int = 0
    """Failed starts in a row, the last one included until it has saved enough steps."""
    stopped: bool = False
    """Whether the last start ended on request."""


class RunProcess(contextlib.AbstractContextManager["RunProcess"]):
    """One process of a run, inside a `with` block.

    Python allows signal handlers in the main thread alone; in another thread none are installed.

    Args:
      command: the command line, which the journal records. None for a program that calls `train`:
        its own signal handlers stay until `started`.
      pause_s: wait of a start after two failed ones; it doubles with each further one.
    """

    _sync_points: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self, command: str | None = None, pause_s: float = 5.0) -> None:
        self.command = command
        self._pause_s = pause_s
        self._is_training = self._requested = self._agreed = self._has_met = False
        self._previous: dict[int, Any] = {}  # handlers of signals
        self._wakeup: tuple[int, int] | None = None  # wakeup descriptor, and the one before
        self._start: tuple[Any, str | None] | None = None  # workdir and identifier, once counted
        self._starts: _Starts | None = None  # the record, in the process that counts
        self._made_directories: list[Any] = []
        self._lock = threading.RLock()  # a signal ends a start from another thread

    def __enter__(self) -> RunProcess:
        self._has_met = is_one_of_several()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self.command is not None:
            self._install_handlers()
            # A thread waits for signals while the run starts: the main thread runs handlers only
            # between two instructions of Python, and a compilation may take minutes.
            read, write = os.pipe()
            os.set_blocking(write, False)
            self._wakeup = write, signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            threading.Thread(
                target=self._end_start, args=(read,), daemon=True, name="starting"
            ).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._end_if_peer_is_lost(error)
            self._forget_starts()  # an error of its own ends the restarts anyway
        self._close_wakeup()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    # --- joining ---------------------------------------------------------------------------------

    def join(
        self,
        workdir: Any,
        newest_step: Callable[[], int | None],
        *,
        coordinator: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        timeout_s: float = 300.0,
        log: Callable[[str], None] = print,
    ) -> None:
        """Count this start and meet the other processes; every process of the run calls.

        Args:
          workdir: `epath.Path` of the directory of the run.
          newest_step: returns the step of the newest checkpoint, 0 without one; or None while
            another start owns the directory, so that this one must not touch its files.
          coordinator, num_processes, process_id, timeout_s: see `processes.initialize`.
          log: called with a line if this start waits.

        Raises:
          ValueError: too many starts in a row failed; every process raises.
          ValueError, OSError: see `processes.initialize` and `processes.check_accelerators`.
        """
        from maxmars.distributed import processes

        is_process_zero = processes.is_process_zero(process_id)
        if is_process_zero:
            self._count_start(workdir, newest_step, log)
        open_port = processes.initialize(
            coordinator, num_processes, process_id, timeout_s=timeout_s
        )
        processes.check_accelerators()
        self._has_met = True

        def check_starts() -> str | None:
            if not is_process_zero:
                self._count_start(workdir, newest_step, log)
            self._refuse_more_starts()
            return None if self._starts is None else self._starts.start

        start = processes.text_from_primary(check_starts)
        if start is not None:
            self._start = workdir, start
        processes.warn_once(open_port)

    def _count_start(
        self, workdir: Any, newest_step: Callable[[], int | None], log: Callable[[str], None]
    ) -> None:
        newest = newest_step()
        if newest is None:
            return
        before = _read_starts(workdir)
        count = 0 if newest >= before.step + _FEWEST_STEPS else before.count
        self._start = workdir, before.start
        self._starts = dataclasses.replace(before, step=newest, count=count)
        if count > _MOST_STARTS:  # the last start never met the others, so it could not refuse
            self._refuse_more_starts()
        if count >= 2 and not before.stopped:
            pause_s = min(self._pause_s * 2 ** (count - 2), _LONGEST_PAUSE_S)
            log(f"{count} starts in a row got no further; waiting {pause_s:.0f} s")
            time.sleep(pause_s)
        self._start = workdir, uuid.uuid4().hex
        self._write_starts(start=self._start[1], count=count + 1, stopped=False)

    def _refuse_more_starts(self) -> None:
        """Raise ValueError after too many failed starts; the next start counts as the first."""
        if self._start is None or self._starts is None or self._starts.count <= _MOST_STARTS:
            return
        workdir = self._start[0]
        raise ValueError(
            f"{workdir}: {_MOST_STARTS} starts in a row crashed, hung, lost a machine or were "
            f"stopped before they had saved {_FEWEST_STEPS} steps each, the last one after step "
            f"{self._starts.step}, so this start ends as well. Look at what they printed, and in "
            f"{workdir / LOGS}; the same command, given again, tries anew."
        )

    def _write_starts(self, **changes: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # bookkeeping never stops a run
            if self._start is None or self._starts is None:
                return
            from maxmars.distributed.files import is_remote, write_json

            workdir = self._start[0]
            self._starts = dataclasses.replace(self._starts, **changes)
            if not is_remote(workdir):
                directories = (workdir, *workdir.parents)
                self._made_directories += [path for path in directories if not path.exists()]
            write_json(workdir / STARTS, dataclasses.asdict(self._starts))

    def _forget_starts(self) -> None:
        """Remove the record, unless another start wrote it: the next start counts as the first."""
        with self._lock:
            if self._start is None:
                return
            from maxmars.distributed.files import reporting

            (workdir, start), self._start = self._start, None
            with contextlib.suppress(OSError), reporting(workdir):
                if _read_starts(workdir).start == start:
                    (workdir / STARTS).unlink(missing_ok=True)
                for path in self._made_directories:  # a refused run leaves nothing behind
                    os.rmdir(path)

    # --- requests to stop ------------------------------------------------------------------------

    def started(self) -> None:
        """Let a signal request a stop from here on, instead of an immediate end."""
        self._is_training = True
        self._close_wakeup()
        if signal.SIGINT not in self._previous:
            self._install_handlers()
            self._install(signal.SIGINT, self._interrupt)

    def stop_due(self) -> bool:
        """Whether to stop now; all processes must call, at the same places and equally often.

        All get the same answer at the same call, whichever of them got the signal.
        """
        if not is_one_of_several():
            return self._requested
        from jax.experimental import multihost_utils

        if not self._agreed:
            # After a signal JAX chooses the first number that no process has passed, and returns
            # True for it alone. So every call has the next number.
            number = next(RunProcess._sync_points)
            self._agreed = multihost_utils.reached_preemption_sync_point(number)
        return self._agreed

    def check_stop(self) -> None:
        """Raise StopRequestedError if `stop_due`."""
        if self.stop_due():
            raise StopRequestedError

    def request_stop(self) -> None:
        """Request a stop as a signal does; any thread of any process may call."""
        self._requested = True
        if is_one_of_several():
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's handler tells the other processes

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self._is_training:
            self.request_stop()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            self._forget_starts()
            exit_now(128 + signal.SIGINT)
        os.write(2, b"\nstopping after this step; Ctrl-C again leaves at once\n")
        self.request_stop()

    def _install_handlers(self) -> None:
        for number in stop_signals():
            # With several processes, SIGTERM stays with JAX's handler, which tells the others.
            if number != signal.SIGTERM or not is_one_of_several():
                self._install(number, self._terminate)

    def _install(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        if threading.current_thread() is threading.main_thread() and number not in self._previous:
            self._previous[number] = signal.signal(number, handler)

    def _close_wakeup(self) -> None:
        if self._wakeup is not None:
            (write, before), self._wakeup = self._wakeup, None
            signal.set_wakeup_fd(before)
            os.close(write)

    # --- how it ends -----------------------------------------------------------------------------

    def end(self, *, done: bool) -> int:
        """Record the end of the run, `done` or stopped on request; returns the exit code."""
        if done:
            self._forget_starts()
            return 0
        self._write_starts(stopped=True)
        return EXIT_CODE

    def _end_start(self, read: int) -> None:
        """End the process at a signal before `started`; runs in a thread of its own."""
        while number := os.read(read, 1):
            if number[0] in self._previous:
                self._write_starts(stopped=True)
                exit_now(
                    EXIT_CODE,
                    f"stopped while the run was starting. Exit code {EXIT_CODE}: the same command "
                    "starts it again.",
                )
        os.close(read)

    @contextlib.contextmanager
    def ending_if_peer_is_lost(self) -> Iterator[None]:
        """End the process if an error in this block means that a peer is lost.

        Enter it last, inside of every context whose exit would wait for the lost peer.
        """
        try:
            yield
        except BaseException as error:
            self._end_if_peer_is_lost(error)
            raise

    def _end_if_peer_is_lost(self, error: BaseException) -> None:
        """End the process if an error means that another process of the run is gone."""
        # Before all have met, a similar error comes from `initialize`, or from the devices.
        if not self._has_met or not is_one_of_several() or not is_of_lost_peer(error):
            return
        import jax

        exit_now(
            EXIT_CODE,
            f"process {jax.process_index()} of {jax.process_count()} has lost another process of "
            "the run, which was killed, failed or no longer answers "
            f"({str(error).splitlines()[0]}). Exit code {EXIT_CODE}: the same command, in every "
            "process, continues from the last complete checkpoint.",
        )


def end_hanging(name: str, lasted_s: float, timeout_s: float) -> NoReturn:
    """Show the stacks of all threads, and end a process that hangs.

    Args:
      name: the activity that hangs, in words.
      lasted_s: seconds since the activity began.
      timeout_s: the config's `hang_timeout_s`.
    """
    import jax

    several = jax.process_count() > 1
    suspect = "another process of the run" if several else "a device or a file system"
    faulthandler.dump_traceback(file=2)
    time.sleep(_STACKS_S * several)
    exit_now(
        EXIT_CODE,
        f"process {jax.process_index()} of {jax.process_count()} hangs: {name} has taken "
        f"{lasted_s:.0f} s. Perhaps {suspect} hangs; the stacks above show what this process waits "
        f"for. If it was only slow, raise --hang-timeout-s ({timeout_s:g}). Exit code {EXIT_CODE}: "
        "the same command, in every process, continues from the last complete checkpoint.",
    )


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether an error, or one of its causes, is of a collective or barrier that lacks a peer."""
    cause: BaseException | None = error
    while cause is not None:
        text = _PATH.sub("", str(cause))
        if isinstance(cause, RuntimeError | ValueError | OSError) and _LOST_PEER.search(text):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _read_starts(workdir: Any) -> _Starts:
    """The record of starts; an empty one if it is missing, damaged, or of another SLURM job."""
    from maxmars.distributed.files import read_json

    job = os.environ.get("SLURM_JOB_ID")
    with contextlib.suppress(OSError, TypeError, ValueError):
        starts = _Starts(**read_json(workdir / STARTS))
        if starts.job == job and starts.count >= 0 and starts.step >= 0:
            return starts
    return _Starts(job=job)
