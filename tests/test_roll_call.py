"""Processes meet, or are told who is missing; threads stand for processes."""

import json
import re
import socket
import threading
import time

import pytest

from maxmars import roll_call as module
from maxmars.roll_call import roll_call

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "_RETRY_S", 0.02)
    monkeypatch.setattr(module, "_PORT_S", 0.1)
    monkeypatch.setattr(module, "_HELLO_S", 0.3)


@pytest.fixture
def address():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{server.getsockname()[1]}"


def meet(address, processes, timeout_s=5.0):
    """What each call of (process, count) ended with: None, or its error."""
    results = [None] * len(processes)

    def run(index, process, count):
        try:
            roll_call(address, count, process, timeout_s)
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(i, *who), daemon=True) for i, who in enumerate(processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def test_all_come_and_the_port_is_free_again(address):
    assert meet(address, [(2, 4), (1, 4), (0, 4), (3, 4)]) == [None] * 4
    with socket.socket() as server:  # no SO_REUSEADDR: nothing may linger
        server.bind(("0.0.0.0", int(address.split(":")[1])))


def test_every_process_that_came_says_who_is_missing(address):
    errors = meet(address, [(0, 6), (2, 6), (5, 6)], timeout_s=0.5)
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert "3 of 6 processes came to" in str(error)
        assert "missing: 1, 3-4." in str(error)
    assert str(errors[1]).startswith("process 2: ")


def test_without_process_0_the_others_say_so(address):
    (error,) = meet(address, [(1, 2)], timeout_s=0.2)
    assert isinstance(error, TimeoutError)
    assert re.search(
        r"process 1 of 2 did not reach process 0 at .* \(Connection refused\)", f"{error}"
    )


def test_contradictions_are_named_at_once(address):
    started = time.monotonic()
    first, second = meet(address, [(0, 3), (1, 2)], timeout_s=10.0)
    assert "process 1 was started as one of 2, process 0 as one of 3" in str(first)
    assert str(second) == f"process 1: {first}"
    first, *others = meet(address, [(0, 4), (1, 4), (1, 4)], timeout_s=10.0)
    assert "two processes say that they are number 1 of 4" in str(first)
    assert all(isinstance(error, ValueError) for error in others)
    assert time.monotonic() - started < 5


def test_strangers_and_the_restarted_do_not_count(address):
    def visit(text):
        for _ in range(200):
            try:
                one = socket.create_connection(tuple(address.split(":")), 1)
                break
            except OSError:
                time.sleep(0.01)
        one.sendall(text)
        return one

    results = []
    server = threading.Thread(target=lambda: results.extend(meet(address, [(0, 2)])), daemon=True)
    server.start()
    stranger = visit(b"PRI * HTTP/2.0\r\n\r\n")
    dead = visit(json.dumps({"process": 1, "of": 2}).encode()[:-1])  # ends while it speaks
    dead.close()
    assert meet(address, [(1, 2)]) == [None]
    server.join(5)
    assert results == [None]
    stranger.close()


def test_a_taken_port_and_a_wrong_address(address):
    with socket.create_server(("", int(address.split(":")[1]))):
        with pytest.raises(OSError, match=r"cannot listen on port .* choose another port"):
            roll_call(address, 2, 0, 5.0)
        (error,) = meet(address, [(1, 2)], timeout_s=0.5)
        assert "something else answers there" in str(error)
    for wrong in ("host", ":80", "host:http", "host:70000"):
        with pytest.raises(ValueError, match="must be HOST:PORT"):
            roll_call(wrong, 2, 0, 1.0)
