"""Waits until every process of a run has come, or says how many have and which are missing.

Processes meet on the coordinator's port, before JAX's distributed service takes it over: that
service ends a process whose peers stay away without saying how many came.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any, NoReturn

_RETRY_S = 0.5
_HELLO_S = 5.0  # for a process that has connected to say who it is
_GRACE_S = 10.0  # that process 0 may be later than the others
_PORT_S = 30.0  # for a run that has just ended here to free its port
_MAX_LINE = 65536


def roll_call(coordinator: str, num_processes: int, process_id: int, timeout_s: float) -> None:
    """Return when all processes have called this.

    Args:
      coordinator: `host:port` of process 0; the port is free again on return.
      num_processes: number of processes of the run.
      process_id: this one's, in [0, num_processes).
      timeout_s: seconds to wait for the others.

    Raises:
      ValueError: the processes do not agree on their number, two have the same, or `coordinator`
        is no `host:port`.
      TimeoutError: not all came; says in every process that did come how many there are.
      OSError: process 0 cannot listen on the port.
    """
    host, colon, port = coordinator.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"coordinator={coordinator} must be HOST:PORT of process 0.")
    deadline = time.monotonic() + timeout_s
    if process_id == 0:
        _Roll(coordinator, num_processes, timeout_s, deadline).call(int(port))
    else:
        _answer(coordinator, num_processes, process_id, timeout_s, deadline)


class _Roll:
    """Process 0's side: who has come, and the connection to each."""

    def __init__(self, coordinator: str, count: int, timeout_s: float, deadline: float):
        self._coordinator, self._count = coordinator, count
        self._timeout_s, self._deadline = timeout_s, deadline
        self._here: dict[int, socket.socket] = {}

    def call(self, port: int) -> None:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(_listen(port, self._deadline))
            stack.callback(self._hang_up)
            while len(self._here) < self._count - 1:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._fail(TimeoutError(self._missing()))
                server.settimeout(min(left, _RETRY_S))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                self._meet(connection)
                if len(self._here) == self._count - 1:
                    self._drop_the_gone()
            self._tell({"go": True})

    def _meet(self, connection: socket.socket) -> None:
        hello = _read_line(connection, _HELLO_S)
        if hello is None or not isinstance(hello.get("process"), int):
            connection.close()  # not one of ours
            return
        process, count = hello["process"], hello.get("of")
        with contextlib.suppress(OSError):
            _send(connection, {"here": True})
        if count != self._count:
            self._here[process] = connection  # so that it is told
            self._fail(
                ValueError(
                    f"process {process} was started as one of {count}, process 0 as one of "
                    f"{self._count}: give every process the same --num-processes."
                )
            )
        if process in self._here and not _is_closed(self._here[process]):
            self._here[-1] = connection
            self._fail(
                ValueError(f"two processes say that they are number {process} of {self._count}.")
            )
        self._here[process] = connection  # one that was started again replaces itself

    def _drop_the_gone(self) -> None:
        self._here = {n: one for n, one in self._here.items() if not _is_closed(one)}

    def _missing(self) -> str:
        self._drop_the_gone()
        here = {0, *self._here}
        gone = sorted(set(range(self._count)) - here)
        return (
            f"{len(here)} of {self._count} processes came to {self._coordinator} within "
            f"{self._timeout_s:g} s; missing: {_ranges(gone)}. Start every process with the same "
            "--coordinator and --num-processes, and see the logs of the missing; "
            "--start-timeout-s waits longer."
        )

    def _fail(self, error: Exception) -> NoReturn:
        self._tell({"error": str(error), "timeout": isinstance(error, TimeoutError)})
        raise error

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in self._here.values():
            with contextlib.suppress(OSError):
                _send(connection, message)
        for connection in self._here.values():  # let them close first: the port is free at once
            _read_line(connection, 1.0)

    def _hang_up(self) -> None:
        for connection in self._here.values():
            connection.close()


def _answer(coordinator: str, count: int, process: int, timeout_s: float, deadline: float) -> None:
    """Another process's side: come, and wait for the verdict."""
    problem: str | None = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            host, _, port = coordinator.rpartition(":")
            connection = socket.create_connection((host.strip("[]"), int(port)), min(left, 10))
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            with connection:
                problem = _attend(connection, count, process, left + timeout_s + _GRACE_S)
            if problem is None:
                return
        time.sleep(_RETRY_S)
    raise TimeoutError(
        f"process {process} of {count} did not reach process 0 at {coordinator} within "
        f"{timeout_s:g} s ({problem}). Process 0 must run there, and its port be open to this host."
    )


def _attend(connection: socket.socket, count: int, process: int, patience_s: float) -> str | None:
    """None when all have come, or what is wrong with this connection."""
    with contextlib.suppress(OSError):
        _send(connection, {"process": process, "of": count})
    if _read_line(connection, _HELLO_S) != {"here": True}:
        return "something else answers there"
    verdict = _read_line(connection, patience_s)
    if verdict is None:
        return "process 0 ended while it waited for the others"
    if "error" in verdict:
        error = TimeoutError if verdict.get("timeout") else ValueError
        raise error(f"process {process}: {verdict['error']}")
    return None


def _listen(port: int, deadline: float) -> socket.socket:
    deadline = min(deadline, time.monotonic() + _PORT_S)
    while True:
        try:
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
                )
            return socket.create_server(("", port), backlog=1024)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise OSError(
                    f"process 0 cannot listen on port {port} ({error.strerror}): another run may "
                    "have it; choose another port in --coordinator."
                ) from error
            time.sleep(_RETRY_S)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read_line(connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """The next line as JSON; None if there is none, or it is something else."""
    connection.settimeout(max(timeout_s, 0.1))
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < _MAX_LINE:
            byte = connection.recv(1)
            if not byte:
                return None
            line += byte
        message = json.loads(line)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers, shortened: 1, 4-7, 9."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
