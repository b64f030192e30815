"""Ends a run that hangs, or that has lost one of its processes, with a clear message.

Collectives wait for ever for a process that hangs. Each process watches itself: the loop says what
it begins, and where that lasts too long, the process shows where its threads are and ends with
`EXIT_CODE`, upon which launchers start the run again. See `lost_peers` for processes that die.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import jax

from maxmars import distributed, lost_peers
from maxmars.checkpoint import list_steps
from maxmars.preemption import EXIT_CODE
from maxmars.workdir import Workdir

_PATIENCE = 10
_OTHERS_S = 5.0  # for the other processes to show where they are, before they lose this one

T = TypeVar("T")


@dataclass(frozen=True)
class _Doing:
    """What the process does, since when (monotonic), and how many seconds it may take."""

    what: str
    kind: str | None
    since: float
    allowed_s: float


class Watchdog(contextlib.AbstractContextManager["Watchdog"]):
    """Watches over what is begun inside a `with` block.

    What is one of a kind, like steps, may take `timeout_s`, or ten times as long as the one before
    it if that is longer. The first of a kind, which may have to compile, and what is of no kind,
    like a checkpoint, may take ten times `timeout_s`.
    """

    def __init__(self, timeout_s: float | None, checkpoints: Workdir) -> None:
        """Watch, with None only for lost processes; `checkpoints` is where the run's are."""
        self._timeout_s = timeout_s
        self._checkpoints = checkpoints
        self._doing: _Doing | None = None
        self._last_s: dict[str, float] = {}  # kind -> seconds that the last one took
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> Watchdog:
        """Begin to watch."""
        self._process = f"process {jax.process_index()} of {jax.process_count()}"
        if self._timeout_s is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Watch no longer; see `leave_if_others_are_gone`."""
        self.rest()
        self._stop.set()
        if self._timeout_s is not None:
            self._thread.join()
        self.leave_if_others_are_gone(kind, error, trace)

    def leave_if_others_are_gone(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process if the error that leaves a `with` block is that other processes are gone.

        To be called before anything that would wait for them.
        """
        if error is None or jax.process_count() == 1:
            return
        if lost_peers.says_others_are_gone(error):
            reason = str(error).splitlines()[0]
            message = (
                f"{self._process} has lost another one of its run, which was killed, failed or no "
                f"longer answers: {reason}."
            )
            lost_peers.end(lambda: self._report(message))
        distributed.leaves_with_error()

    def begin(self, what: str, kind: str | None = None) -> None:
        """What was begun before is done, and this begins; `what` is for people."""
        self.rest()
        if self._timeout_s is not None:
            last_s = self._timeout_s if kind is None else self._last_s.get(kind, self._timeout_s)
            allowed_s = max(self._timeout_s, _PATIENCE * last_s)
            self._doing = _Doing(what, kind, time.monotonic(), allowed_s)

    def rest(self) -> None:
        """What was begun is done, and what follows may take as long as it likes."""
        done, self._doing = self._doing, None
        if done is not None and done.kind is not None:
            self._last_s[done.kind] = time.monotonic() - done.since

    @contextlib.contextmanager
    def watching(self, what: str) -> Generator[None, None, None]:
        """`begin`, and `rest` at the end."""
        self.begin(what)
        yield
        self.rest()

    def over(self, items: Iterable[T], kind: str) -> Iterator[T]:
        """The items; what is done with each is one of a kind."""
        for number, item in enumerate(items, 1):
            self.begin(f"{kind} {number}", kind)
            yield item
        self.rest()

    def _watch(self) -> None:
        assert self._timeout_s is not None
        tick_s = min(1.0, self._timeout_s / 10)
        seen, lasted_s, then = self._doing, 0.0, time.monotonic()
        while not self._stop.wait(tick_s):
            now = time.monotonic()
            # A process that was stopped for a while, by Ctrl-Z for example, did not hang.
            passed_s, then = min(now - then, 2 * tick_s), now
            if self._doing is not seen:
                seen, lasted_s = self._doing, 0.0
                continue
            lasted_s += passed_s
            if seen is not None and lasted_s > seen.allowed_s:
                self._bark(seen, lasted_s)

    def _bark(self, doing: _Doing, lasted_s: float) -> None:
        several = jax.process_count() > 1
        suspect = "another process of the run" if several else "a device or a file system"
        message = (
            f"{self._process} hangs: {doing.what} has taken {lasted_s:.0f} s. It may be {suspect} "
            "that hangs; the stacks above show what this one waits for. If it was only slow, raise "
            f"--hang-timeout-s ({self._timeout_s:g})."
        )
        lost_peers.end(lambda: self._report(message, stacks=True), wait_s=_OTHERS_S * several)

    def _report(self, message: str, *, stacks: bool = False) -> None:
        if stacks:
            faulthandler.dump_traceback(file=2)
        lost_peers.write(message)
        last = max(list_steps(self._checkpoints), default=None)
        where = "begins anew" if last is None else f"continues from the checkpoint of step {last}"
        lost_peers.write(f"exit code {EXIT_CODE}: the same command, in every process, {where}.")
