"""One of two processes dies, fails or never comes: the other ends. Three are in distributed."""

import signal

import pytest
from running import finish, free_port, start, start_two, wait_for_steps, write_config

from maxmars.distributed.exits import EXIT_CODE, OWN_ERROR

pytestmark = pytest.mark.multiprocess

CONFIG = """
    num_steps=48,
    global_batch_size=64,
    model=dataclasses.replace(MODEL, num_layers=1),
    optimizer=ADAMW,
    num_microbatches=1,
    eval=EvalConfig(every=None),
    checkpoint=CheckpointConfig(every=16),
"""


@pytest.fixture
def folder(tmp_path):
    return write_config(tmp_path, CONFIG)


@pytest.mark.seconds
def test_one_is_killed_in_the_middle_of_training(folder):
    other, victim = start_two(folder, "run")
    wait_for_steps(folder / "run", 6, other)
    victim.kill()
    code, output = finish(other, timeout_s=60)
    assert code == EXIT_CODE, output
    assert "process 0 of 2 has lost another process of the run" in output
    finish(victim)


@pytest.mark.slow
def test_an_error_of_one_process_alone_is_its_exit_code(folder):
    """Launchers do not start a run again that ended with 78."""
    shared = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", 2, "--process-id"]
    good = start(folder, "run", *shared, "0", devices=1)
    (folder / "file").touch()
    bad = start(folder, "file", *shared, "1", devices=1)  # a workdir that is none
    code, output = finish(bad)
    assert code == OWN_ERROR, output
    assert "maxmars: error: " in output.splitlines()[-1]
    assert finish(good)[0] in (EXIT_CODE, -signal.SIGABRT)


@pytest.mark.slow
def test_a_missing_peer_ends_the_start(folder):
    """JAX aborts, and only the note of this start is written."""
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    process = start(folder, "run", *place, "--process-id", "0", "--start-timeout-s", "3")
    code, output = finish(process, timeout_s=60)
    assert code == -signal.SIGABRT, output
    assert "DEADLINE_EXCEEDED" in output
    assert [path.name for path in (folder / "run").iterdir()] == ["starts.json"]
