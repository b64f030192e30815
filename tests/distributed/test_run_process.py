"""Requests to stop, of a run and of the comparison that makes it."""

import os
import signal
import threading

import pytest
from running import run_python

from maxmars.distributed.run_process import RunProcess

SIGNALS = [
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
]


@pytest.fixture(autouse=True)
def hangup():
    """SIGHUP as a terminal leaves it: `nohup` has all its programs ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_after_the_start_asks_for_a_stop(number):
    before = signal.getsignal(number)
    with RunProcess() as process:
        process.started()
        process.started()  # of a comparison, and of its run
        assert not process.stop_due()
        os.kill(os.getpid(), number)
        assert process.stop_due()
    assert signal.getsignal(number) == before
    with RunProcess() as another:
        another.started()
        assert not another.stop_due()


@pytest.mark.parametrize("number", [n for n in SIGNALS if n != signal.SIGINT])
def test_a_signal_before_the_start_ends_the_process(number):
    program = f"""
import os, time
from maxmars.distributed.run_process import RunProcess

with RunProcess("maxmars train"):
    os.kill(os.getpid(), {int(number)})
    time.sleep(60)
"""
    run_python("-c", program, code=75)


def test_a_second_interrupt_ends_the_process_at_once():
    program = """
import os, signal, time
from maxmars.distributed.run_process import RunProcess

with RunProcess("maxmars train") as process:
    process.started()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
    run_python("-c", program, code=128 + signal.SIGINT)


def test_a_program_that_trains_keeps_its_signals_until_the_run_has_started():
    received = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    _, write = os.pipe()
    os.set_blocking(write, False)
    woken = signal.set_wakeup_fd(write)
    try:
        with RunProcess() as process:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert received == [signal.SIGUSR2]
            process.started()
            os.kill(os.getpid(), signal.SIGUSR2)
            assert process.stop_due()
        assert signal.set_wakeup_fd(write) == write
        os.kill(os.getpid(), signal.SIGUSR2)
        assert received == [signal.SIGUSR2] * 2
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGUSR2, before)


def test_outside_the_main_thread_signals_act_as_they_do():
    codes = []

    def run():
        with RunProcess("maxmars train") as process:
            process.started()
            codes.append(process.end(done=not process.stop_due()))

    before = [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert codes == [0]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_lost_terminal_stops_no_run_that_was_started_to_ignore_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with RunProcess() as process:
            process.started()
            os.kill(os.getpid(), signal.SIGHUP)
            assert not process.stop_due()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
