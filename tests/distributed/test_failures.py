"""Requests to stop, of a block within another one: a run of a comparison."""

import os
import signal

import pytest

from maxmars.distributed.failures import StopRequests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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
