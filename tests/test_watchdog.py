"""When the watchdog barks, and when it does not; tests/faults has the real hangs."""

import threading

import pytest

from maxmars import lost_peers, watchdog
from maxmars.watchdog import Watchdog


@pytest.fixture
def barked(monkeypatch):
    """An event that is set where the process would have ended; `.report` is what it would say."""
    event = threading.Event()

    def end(report, code=75, *, wait_s=0.0):
        event.report = report
        event.set()
        threading.Event().wait(0.2)

    monkeypatch.setattr(lost_peers, "end", end)
    return event


def make(tmp_path, timeout_s=0.05):
    (tmp_path / "12").mkdir()
    return Watchdog(timeout_s, tmp_path)


def test_it_barks_at_what_takes_too_long(tmp_path, barked, capfd):
    with make(tmp_path) as dog:
        dog.begin("step 1", "step")
        dog.begin("step 2", "step")
        assert barked.wait(5)
    barked.report()
    errors = capfd.readouterr().err
    assert "test_watchdog.py" in errors  # where this thread is
    assert "process 0 of 1 hangs: step 2 has taken 0 s" in errors
    assert "--hang-timeout-s (0.05)" in errors
    assert (
        "exit code 75: the same command, in every process, continues from the checkpoint of "
        in (errors)
    )
    assert errors.endswith("step 12.\n")


@pytest.mark.parametrize("what", ["first of its kind", "of no kind", "after a slow one", "nothing"])
def test_it_is_patient(tmp_path, barked, what):
    with make(tmp_path) as dog:
        match what:
            case "first of its kind":
                dog.begin("step 1", "step")
            case "of no kind":
                dog.begin("reading")
            case "after a slow one":
                dog.begin("step 1", "step")
                assert not barked.wait(0.1)
                dog.begin("step 2", "step")
            case "nothing":
                dog.begin("step 1", "step")
                dog.begin("step 2", "step")
                dog.rest()
        assert not barked.wait(0.3)
        if what != "nothing":
            assert barked.wait(5)  # in the end it does


def test_it_barks_at_no_chain_of_short_things(tmp_path, barked):
    def items():
        for _ in range(8):
            assert not barked.wait(0.03)
            yield None

    with make(tmp_path, 0.1) as dog:
        assert len(list(dog.over(items(), "batch"))) == 8
        assert not barked.wait(0.3)  # it rests at the end
        with dog.watching("reading"):
            pass
        assert not barked.wait(1.3)


def test_time_for_which_the_process_was_stopped_does_not_count(tmp_path, barked, monkeypatch):
    with make(tmp_path, 10.0) as dog:
        dog.begin("step 1", "step")
        dog.begin("step 2", "step")
        clock = watchdog.time.monotonic
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock() + 1000)
        assert not barked.wait(2.5)  # at least a look at the clock


def test_none_watches_nothing(tmp_path):
    with make(tmp_path, None) as dog:
        dog.begin("step 1", "step")
        assert "watchdog" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), True),
        (RuntimeError("INTERNAL: NCCL operation failed: remote process exited"), True),
        (RuntimeError("UNAVAILABLE: Failed to send RPC to coordination service."), True),
        (RuntimeError("DEADLINE_EXCEEDED: Barrier timed out. Id: orbax_save"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (ValueError("step 3 was skipped: loss nan"), False),
        (KeyboardInterrupt("barrier"), False),
    ],
)
def test_errors_that_say_that_others_are_gone(error, gone):
    assert lost_peers.says_others_are_gone(error) == gone
    wrapped = OSError("a checkpoint could not be written")
    wrapped.__cause__ = error
    assert lost_peers.says_others_are_gone(wrapped) == gone
