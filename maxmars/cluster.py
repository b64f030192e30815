"""Which process of which run this is, as the cluster tells: SLURM, TPU pods, Kubernetes.

Read from the environment and, on TPU VMs, from Google's metadata server; needs no JAX, so that a
start can be checked before JAX waits for it. JAX's own detection gives one device to each process
under SLURM, even to the only one of a node, and does not say how many processes it waits for.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_TPU_PORT = "8482"  # the TPU's own processes talk on 8471 to 8479
_KUBERNETES_PORT = "8476"
_SLURM = ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID")  # all only under srun


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A process's place among those of its run."""

    coordinator: str
    """`host:port` of process 0."""
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None
    """Devices of the host that this process takes; None for all that it sees."""
    found_by: str
    """Who told, for messages."""


def detect(environ: Mapping[str, str] | None = None) -> Membership | None:
    """The place of this process in a run of several; None where it is alone.

    Args:
      environ: environment variables, by default those of the process.

    Raises:
      ValueError: variables that cannot be meant, or a TPU VM whose metadata cannot be read.
    """
    environ = os.environ if environ is None else environ
    for look in (_slurm, _kubernetes, _tpu):
        found = look(environ)
        if found is not None:
            return found if found.num_processes > 1 else None
    return None


def _slurm(environ: Mapping[str, str]) -> Membership | None:
    values = {name: environ.get(f"SLURM_{name}") for name in _SLURM}
    if None in values.values():
        return None
    number = {name: _integer(environ, f"SLURM_{name}") for name in _SLURM if name != _SLURM[1]}
    port = environ.get("JAX_COORDINATOR_PORT") or str(61440 + number["JOB_ID"] % 4096)
    local = None
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if _several_on_a_node(environ) and ("," in visible or not visible):
        local = (number["LOCALID"],)  # otherwise SLURM has given each task a device of its own
    return Membership(
        coordinator=f"{_first_node(environ['SLURM_STEP_NODELIST'])}:{port}",
        num_processes=number["NTASKS"],
        process_id=number["PROCID"],
        local_device_ids=local,
        found_by="SLURM",
    )


def _several_on_a_node(environ: Mapping[str, str]) -> bool:
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")  # such as 8(x2),4
    return any(int(count) > 1 for count in re.findall(r"(?:^|,)(\d+)", counts))


def _first_node(nodes: str) -> str:
    """The first of SLURM's list: `a7` of `a7,b1`, `a007` of `a[007-009,12],b1`."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^\[,]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} names no host.")
    return "".join(part or "" for part in match.groups())


def _kubernetes(environ: Mapping[str, str]) -> Membership | None:
    """A GPU JobSet of `maxmars launch gke` or XPK; its TPU JobSets are TPU pods."""
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    rank = "NODE_RANK" if "NODE_RANK" in environ else "JOB_COMPLETION_INDEX"
    if address is None or "NNODES" not in environ or rank not in environ:
        return None
    port = environ.get("JAX_COORDINATOR_PORT", _KUBERNETES_PORT)
    return Membership(
        coordinator=address if ":" in address else f"{address}:{port}",
        num_processes=_integer(environ, "NNODES"),
        process_id=_integer(environ, rank),
        found_by="Kubernetes",
    )


def _tpu(environ: Mapping[str, str]) -> Membership | None:
    if not _has_tpu(environ):
        return None
    found_by = "the TPU pod on GKE"
    hosts = [host for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    slices: Mapping[str, str] = environ
    if hosts:
        worker = _integer(environ, "TPU_WORKER_ID")
    else:
        found_by = "the TPU VM's metadata"
        read = _metadata(environ)
        # name:id:address each, or only the address.
        hosts = [part.split(":")[-1] for part in read("worker-network-endpoints").split(",")]
        worker = int(read("agent-worker-number"))
        pairs = re.findall(r"^(\w+): *'?([^'\n]*)'?$", read("tpu-env"), re.MULTILINE)
        slices = dict(pairs) | dict(environ)
    num_slices = int(slices.get("MEGASCALE_NUM_SLICES") or 1)
    slice_id = int(slices.get("MEGASCALE_SLICE_ID") or 0)
    first = hosts[0]
    if num_slices > 1:
        first = slices["MEGASCALE_COORDINATOR_ADDRESS"].split(":")[0]
    return Membership(
        coordinator=f"{first}:{environ.get('JAX_COORDINATOR_PORT', _TPU_PORT)}",
        num_processes=len(hosts) * num_slices,
        process_id=worker + slice_id * len(hosts),
        found_by=found_by,
    )


def _has_tpu(environ: Mapping[str, str]) -> bool:
    platforms = environ.get("JAX_PLATFORMS", "")
    if (platforms and "tpu" not in platforms) or not importlib.util.find_spec("libtpu"):
        return False
    return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def _metadata(environ: Mapping[str, str]) -> Callable[[str], str]:
    """Reads an attribute of this machine; an absent one is empty."""
    host = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by a proxy

    def read(name: str) -> str:
        url = f"http://{host}/computeMetadata/v1/instance/attributes/{name}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        for attempt in range(3):
            try:
                with opener.open(request, timeout=10) as answer:
                    return answer.read().decode().strip()
            except OSError as error:
                if isinstance(error, urllib.error.HTTPError) and error.code == 404:
                    break
                if attempt == 2:
                    raise ValueError(
                        f"this host has a TPU, but {url} does not say which one of its pod it is "
                        f"({error}). Give --coordinator, --num-processes and --process-id, or "
                        "--num-processes 1 to train on this host alone."
                    ) from error
        return "" if name == "tpu-env" else {"agent-worker-number": "0"}.get(name, "localhost")

    return read


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"{name}={value!r} in the environment must be a number.")
    return int(value)
