"""Requests to stop, of a block within another one: a run of a comparison."""

import os
import signal

import pytest

from maxmars.distributed.failures import StopRequests

SIGNALS = [
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_of_a_comparison_stops_where_the_comparison_was_signalled(number):
    with StopRequests() as comparison:
        os.kill(os.getpid(), number)
        with StopRequests() as run:
            assert run.due()
        assert comparison.due()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_comparison_stops_where_a_run_was_signalled_too_late_to_ask(number):
    with StopRequests() as comparison:
        with StopRequests() as run:
            assert not run.due()
            os.kill(os.getpid(), number)
        assert comparison.due()
    with StopRequests() as another:
        assert not another.due()


def test_a_lost_terminal_stops_no_run_that_was_started_to_ignore_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequests() as run:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not run.due()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
