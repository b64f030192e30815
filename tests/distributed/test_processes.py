"""How processes find each other, and the words for wrong flags."""

import contextlib
import json
import os
import socket
import subprocess
import sys

import jax
import pytest
from refusals import refused
from running import free_port, run_python

from maxmars.distributed import processes
from maxmars.distributed.run_process import is_of_lost_peer

JOIN = """
import json, sys
import jax
from maxmars.distributed import processes

processes.initialize(*json.loads(sys.argv[1]))
ok = processes.all_processes(jax.process_index() == 0)
numbers = processes.from_primary([3, 5] if processes.is_primary() else [])
processes.barrier("end")
print(json.dumps([jax.process_index(), jax.process_count(), jax.local_device_count(), ok, numbers]))
processes.shutdown()
"""
# For each run of one process: whether an address reaches its coordinator, and a warning comes.
LISTEN = """
import json, os, socket, sys
from maxmars.distributed import processes

for arguments, environment, address, port in json.loads(sys.argv[1]):
    os.environ.update(environment)
    warning = processes.initialize(*arguments)
    with socket.socket() as other:
        is_open = other.connect_ex((address, port)) == 0
    print(json.dumps([is_open, warning is not None]))
    processes.shutdown()
"""
PLUGIN = "def initialize(): pass"
SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


def join(arguments, environments):
    """What each process of a run says after it has joined."""
    common = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, json.dumps(arguments)],
            env=common | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    return [json.loads(process.communicate(timeout=60)[0].splitlines()[-1]) for process in started]


@pytest.mark.seconds
@pytest.mark.multiprocess
def test_two_processes_of_slurm_find_each_other_and_agree():
    slurm = SLURM | {"JAX_COORDINATOR_PORT": str(free_port())}
    places = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    said = join([], [slurm | place for place in places])
    assert said == [[i, 2, 3, False, [3, 5]] for i in range(2)]


def test_a_process_alone_asks_no_cluster_and_agrees_with_itself(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    processes.initialize(num_processes=1)
    assert not jax.distributed.is_initialized()
    assert processes.is_primary()
    assert processes.all_processes(True)
    assert not processes.all_processes(False)
    assert processes.from_primary([1, 2]) == [1, 2]
    processes.barrier("nobody else")
    processes.shutdown()


def test_the_coordinator_listens_no_further_than_it_must():
    """At the address that is given; at every one where other hosts may know it by another."""
    own = "127.0.0.3"
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as anyone:
        anyone.connect(("192.0.2.1", 1))  # sends nothing
        own = anyone.getsockname()[0]  # where there is a network
    everywhere, one_node = [True, True], [False, False]
    two_nodes = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    two_nodes["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
    cases = [
        ("127.0.0.1", {}, "127.0.0.1", [True, False]),
        ("127.0.0.1", {}, "127.0.0.2", [False, False]),
        ("localhost", {}, "127.0.0.2", [False, False]),
        (own, {}, own, [True, False]),
        (own, {}, "127.0.0.1", [False, False]),
        (None, two_nodes, "127.0.0.2", everywhere),
        (None, {"SLURM_STEP_TASKS_PER_NODE": "1"}, "127.0.0.2", one_node),
    ]
    runs = []
    for host, environment, address, _ in cases:
        port = free_port()
        arguments = [f"{host}:{port}", 1, 0] if host else []
        runs.append([arguments, environment | {"JAX_COORDINATOR_PORT": str(port)}, address, port])
    command = [sys.executable, "-c", LISTEN, json.dumps(runs)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert [*map(json.loads, printed.splitlines())] == [expected for *_, expected in cases]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((None, 2, None), "num_processes=2"),
        (("a:1", None, 0), "coordinator=a:1, process_id=0"),
        (("a:1", 2, 2), "process_id=2"),
        (("a:1", 2, -1), "process_id=-1"),
        (("a", 2, 0), "coordinator=a"),
    ],
)
def test_wrong_flags(arguments, named):
    with refused(ValueError, named):
        processes.initialize(*arguments)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with refused(OSError, f"port {port}"):
            processes.initialize(f"127.0.0.1:{port}", 1, 0)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), True),
        (RuntimeError("INTERNAL: NCCL operation failed: remote process exited"), True),
        (RuntimeError("UNAVAILABLE: Failed to send RPC to coordination service."), True),
        (RuntimeError("DEADLINE_EXCEEDED: Barrier timed out. Id: orbax_save"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (ValueError("step 3 was skipped: loss nan"), False),
        (ValueError("UNKNOWN: Gloo failed: [external/gloo/pair.cc:5] closed by peer"), True),
        (ValueError("process 0 cannot go on: a start has taken over gs://b/nccl-test, and"), False),
        (OSError("/nfs/gloo/heartbeat/.lock was deleted or moved"), False),
        (KeyboardInterrupt("barrier"), False),
    ],
)
def test_errors_of_a_lost_peer(error, lost):
    assert is_of_lost_peer(error) == lost
    wrapped = OSError("a checkpoint could not be written")
    wrapped.__cause__ = error
    assert is_of_lost_peer(wrapped) == lost


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "value"),
    [("SLURM_GPUS_ON_NODE", "8"), ("JAX_PLATFORMS", "tpu,cpu"), ("JAX_PLATFORMS", "cuda")],
)
def test_train_refuses_a_cpu_in_place_of_what_was_asked_for(name, value, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    if name == "SLURM_GPUS_ON_NODE":  # also with CUDA's wheels, where there is no driver
        (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
        (tmp_path / "jax_plugins" / "xla_cuda13" / "__init__.py").write_text(PLUGIN)
        environment["PYTHONPATH"] = str(tmp_path)
    command = ["-m", "maxmars", "train", "quickstart", "--num-processes", 1]
    command += ["--workdir", tmp_path / "run"]
    done = run_python(*command, code=1, environment=environment | {name: value})
    *_, error = done.stderr.splitlines()
    assert error.startswith("maxmars: error: ")
    assert f"{name}={value}" in error
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
