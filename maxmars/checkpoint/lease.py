"""Ownership of a directory in an object store: a small object that its owner keeps rewriting.

The store's generations decide, not clocks and not the object's contents. Every write names the
generation that it replaces, or that there is none, so of two that want it one is refused. An owner
writes every quarter of the lease's duration; whoever watches the generation stand still for a whole
duration, on its own clock, may take over. An owner that could not renew for that long, or finds
another one's object, has lost it and must not start another save. (A save that it had begun before
can still end: no object store has a way to prevent that.)
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from typing import Any

from maxmars.workdir import open_store, reporting

_LOGGER = logging.getLogger(__name__)
_KEY = "owner.json"
_DURATION_S = 60.0


def owner_record(**fields: Any) -> str:
    """JSON that tells others who owns a directory."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since} | fields)


def describe_owner(record: str | bytes) -> str:
    """Who wrote an `owner_record`."""
    try:
        fields = json.loads(record)
        return f"process {fields['pid']} on {fields['host']} (since {fields['since']})"
    except (ValueError, KeyError, TypeError):
        return "another run"


def in_use(directory: Any, record: str | bytes) -> ValueError:
    """The error that a directory has another owner, who wrote `record`."""
    return ValueError(
        f"{directory} is being written by {describe_owner(record)}: two runs in one directory "
        "would overwrite each other's checkpoints. Wait until it ends or stop it, or choose "
        "another --workdir."
    )


class Lease:
    """Ownership of a TensorStore key-value store, whose writes are conditional on generations."""

    def __init__(self, store: Any, name: str, duration_s: float = _DURATION_S) -> None:
        """Own the store, if need be after watching a dead owner's object for `duration_s`.

        Args:
          store: a `tensorstore.KvStore` at the directory.
          name: the directory's, for messages.
          duration_s: of the lease.

        Raises:
          ValueError: it has a living owner.
          OSError: it cannot be read or written.
        """
        self._store, self._name, self._duration_s = store, name, duration_s
        self._token = uuid.uuid4().hex
        self._record = owner_record(token=self._token)
        self._generation = self._acquire()
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_stopped, daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, directory: Any, duration_s: float = _DURATION_S) -> Lease:
        """Own a directory like `gs://bucket/run/checkpoints`; arguments as above.

        Raises:
          ValueError: it has a living owner.
          OSError: it cannot be read or written.
        """
        return cls(open_store(directory), str(directory), duration_s)

    def check(self) -> None:
        """Raise OSError if it is no longer certain that nobody else is the owner."""
        if self._lost or time.monotonic() - self._renewed > self._duration_s:
            raise OSError(
                f"this run lost its ownership of {self._name} (another run took over, or the store "
                "could not be reached for too long), so it must not write there any more."
            )

    def release(self) -> None:
        """Let others have it at once."""
        self._stop.set()
        self._thread.join()
        if not self._lost:
            try:
                self._store.write(_KEY, None, if_equal=self._generation).result()
            except Exception as error:
                _LOGGER.warning("%s stays owned until the lease expires: %s", self._name, error)

    def _acquire(self) -> bytes:
        watched, since = None, 0.0
        while True:
            found = self._read()
            generation = found.stamp.generation
            if found.state == "missing" or (
                generation == watched and time.monotonic() - since > self._duration_s
            ):
                taken = self._write(generation)
                if taken:
                    return taken
            elif watched is None:
                watched, since = generation, time.monotonic()
                _LOGGER.warning(
                    "%s: waiting up to %.0f s to see whether its owner, %s, is alive",
                    *(self._name, self._duration_s, describe_owner(found.value)),
                )
            elif generation != watched:
                raise in_use(self._name, found.value)
            time.sleep(self._duration_s / 20)

    def _write(self, generation: bytes) -> bytes:
        """Write if the object still has this generation; the new one, or b"" if it has not."""
        started = time.monotonic()
        with reporting(self._name):
            stamp = self._store.write(_KEY, self._record, if_equal=generation).result()
        written = stamp.generation
        if written:
            self._renewed = started
        return written

    def _read(self) -> Any:
        with reporting(self._name):
            return self._store.read(_KEY).result()

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(self._duration_s / 4):
            try:
                self._renew()
            except Exception as error:  # the store may be back in time
                _LOGGER.warning("the lease of %s could not be renewed: %s", self._name, error)
            if self._lost:
                _LOGGER.error("another run took over %s", self._name)
                return

    def _renew(self) -> None:
        written = self._write(self._generation)
        if not written:  # unless it was our own write, of which only the answer was lost
            found = self._read()
            self._lost = _token(found.value) != self._token
            written = found.stamp.generation
        self._generation = written


def _token(value: bytes) -> str | None:
    try:
        return json.loads(value)["token"]
    except (ValueError, KeyError, TypeError):
        return None
