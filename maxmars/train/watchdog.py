"""Ends a run that hangs: the stacks of all threads, one line, exit code 75.

Collectives wait for ever for a process that hangs. Each process watches itself: the loop says what
it begins, and where that takes too long, the process ends and a launcher starts the run again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import NamedTuple, TypeVar

import jax

from maxmars.distributed.exits import EXIT_CODE, exit_now

_PATIENCE = 10
_OTHERS_S = 5.0  # the other processes show their stacks before they lose this one

T = TypeVar("T")


class _Activity(NamedTuple):
    name: str
    kind: str | None
    since: float
    allowed_s: float


class Watchdog(contextlib.AbstractContextManager["Watchdog"]):
    """Watches over everything that is begun inside a `with` block.

    An activity of a kind, such as a step, may take `timeout_s`, or ten times as long as the one
    before it if that is longer. The first of a kind, which may have to compile, and an activity of
    no kind, such as a checkpoint, may take ten times `timeout_s`. With `timeout_s` None nothing is
    watched.
    """

    def __init__(
        self, timeout_s: float | None, own_error: Callable[[], str | None] = lambda: None
    ) -> None:
        """For `own_error` see `failures.ExitIfPeerIsLost`."""
        self._timeout_s, self._own_error = timeout_s, own_error
        self._activity: _Activity | None = None
        self._last_s: dict[str, float] = {}  # kind -> seconds that the last one took
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self._timeout_s is not None:
            arguments = (self._timeout_s,)
            self._thread = threading.Thread(
                target=self._watch, args=arguments, daemon=True, name="watchdog"
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, name: str, kind: str | None = None) -> None:
        """End the activity before, and begin this one; the message of a hang has its name."""
        self.rest()
        if self._timeout_s is not None:
            last_s = self._timeout_s if kind is None else self._last_s.get(kind, self._timeout_s)
            allowed_s = max(self._timeout_s, _PATIENCE * last_s)
            self._activity = _Activity(name, kind, time.monotonic(), allowed_s)

    def rest(self) -> None:
        """End the activity; what follows may take as long as it likes."""
        done, self._activity = self._activity, None
        if done is not None and done.kind is not None:
            self._last_s[done.kind] = time.monotonic() - done.since

    @contextlib.contextmanager
    def watching(self, name: str) -> Generator[None, None, None]:
        """An activity of no kind."""
        self.begin(name)
        yield
        self.rest()

    def over(self, items: Iterable[T], kind: str) -> Iterator[T]:
        """The items; the work on each of them is an activity of this kind."""
        for number, item in enumerate(items, 1):
            self.begin(f"{kind} {number}", kind)
            yield item
        self.rest()

    def _watch(self, timeout_s: float) -> None:
        tick_s = min(1.0, timeout_s / 10)
        seen, lasted_s, then = self._activity, 0.0, time.monotonic()
        while not self._stop.wait(tick_s):
            now = time.monotonic()
            # A process that was stopped for a while, by Ctrl-Z for example, did not hang.
            passed_s, then = min(now - then, 2 * tick_s), now
            if self._activity is not seen:
                seen, lasted_s = self._activity, 0.0
                continue
            lasted_s += passed_s
            if seen is not None and lasted_s > seen.allowed_s:
                break
        else:
            return
        several = jax.process_count() > 1
        suspect = "another process of the run" if several else "a device or a file system"
        faulthandler.dump_traceback(file=2)
        time.sleep(_OTHERS_S * several)
        what = (
            f"process {jax.process_index()} of {jax.process_count()} hangs: {seen.name} has taken "
            f"{lasted_s:.0f} s."
        )
        own_error = self._own_error()
        if own_error is not None:
            exit_now(1, f"{what} Another process of the run failed: {own_error}")
        exit_now(
            EXIT_CODE,
            f"{what} Perhaps {suspect} hangs; the stacks above show what this "
            f"process waits for. If it was only slow, raise --hang-timeout-s ({timeout_s:g}). "
            f"Exit code {EXIT_CODE}: the same command, in every process, continues from the last "
            "complete checkpoint.",
        )
