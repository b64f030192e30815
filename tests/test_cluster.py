"""What clusters say about a process's place in its run."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from maxmars import cluster
from maxmars.cluster import detect

pytestmark = pytest.mark.smoke

SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "gpu[007-009,12],b1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}


def test_alone():
    assert detect({}) is None
    assert detect(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert detect(batch) is None  # the batch script itself, or salloc's shell


def test_slurm():
    found = detect(SLURM)
    assert found.coordinator == f"gpu007:{61440 + 70001 % 4096}"
    assert (found.num_processes, found.process_id, found.local_device_ids) == (4, 2, None)
    several = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3"}
    assert detect(several).local_device_ids == (3,)
    assert detect(several | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}).local_device_ids == (3,)
    assert detect(several | {"CUDA_VISIBLE_DEVICES": "3"}).local_device_ids is None  # its own
    with pytest.raises(ValueError, match="SLURM_PROCID='x' in the environment must be a number"):
        detect(SLURM | {"SLURM_PROCID": "x"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a7", "a7"), ("a7,b1", "a7"), ("a[1-2]", "a1"), ("n-a[03,7]-x,b", "n-a03-x")],
)
def test_the_first_node_of_slurm(nodes, first):
    assert detect(SLURM | {"SLURM_STEP_NODELIST": nodes}).coordinator.split(":")[0] == first


def test_kubernetes():
    ours = {
        "JAX_COORDINATOR_ADDRESS": "run-slice-job-0-0.run:8476",
        "NNODES": "2",
        "JOB_COMPLETION_INDEX": "1",
    }
    found = detect(ours)
    assert found.coordinator == "run-slice-job-0-0.run:8476"
    assert (found.num_processes, found.process_id) == (2, 1)
    xpk = {"JAX_COORDINATOR_ADDRESS": "a-0.a", "JAX_COORDINATOR_PORT": "3389", "NODE_RANK": "0"}
    assert detect(xpk | {"NNODES": "2"}).coordinator == "a-0.a:3389"


@pytest.fixture
def tpu(monkeypatch):
    monkeypatch.setattr(cluster, "_has_tpu", lambda environ: True)


def test_tpu_pod_on_gke(tpu):
    environ = {"TPU_WORKER_HOSTNAMES": "t-0.t,t-1.t", "TPU_WORKER_ID": "1"}
    found = detect(environ)
    assert found.coordinator == "t-0.t:8482"
    assert (found.num_processes, found.process_id) == (2, 1)
    slices = {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "t-0.t:8080",
    }
    found = detect(environ | slices)
    assert found.coordinator == "t-0.t:8482"
    assert (found.num_processes, found.process_id) == (4, 3)
    assert detect({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}) is None


@pytest.fixture
def metadata(tpu):
    """Serves attributes of a TPU VM; the environment that points there."""
    attributes = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            value = attributes.get(self.path.rpartition("/")[2])
            good = self.headers["Metadata-Flavor"] == "Google" and value is not None
            self.send_response(200 if good else 404)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield attributes, {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}
    server.shutdown()
    server.server_close()


def test_tpu_vm(metadata):
    attributes, environ = metadata
    assert detect(environ) is None  # no attributes at all
    attributes["worker-network-endpoints"] = "unknown:unknown:10.0.0.5,unknown:unknown:10.0.0.6"
    attributes["agent-worker-number"] = "1"
    found = detect(environ)
    assert (found.coordinator, found.num_processes, found.process_id) == ("10.0.0.5:8482", 2, 1)
    attributes["tpu-env"] = (
        "ACCELERATOR_TYPE: 'v5p-16'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
        "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.1'\n"
    )
    found = detect(environ)
    assert (found.coordinator, found.num_processes, found.process_id) == ("10.0.0.1:8482", 4, 3)


def test_a_tpu_vm_without_metadata(tpu):
    with pytest.raises(ValueError, match=r"this host has a TPU, but .* Give --coordinator"):
        detect({"GCE_METADATA_IP": "127.0.0.1:1"})


def test_no_tpu_is_looked_for_on_other_platforms():
    assert not cluster._has_tpu({"JAX_PLATFORMS": "cpu"})
