"""Several processes as one run: joining, the primary process, barriers, agreement.

In a run of one process every function here returns at once, so callers need no case for it. Work of
one process for all (reading a directory, taking a lock) is done in `text_from_primary`: the others
get the result, or fail with it, instead of waiting in a collective for ever.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import socket
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxmars.config.errors import EXTERNAL_ERRORS, in_words, pip_install

_LOGGER = logging.getLogger(__name__)
_HEARTBEAT_TIMEOUT_S = 60  # silence after which JAX takes a process for lost, and aborts
_SHUTDOWN_TIMEOUT_S = 60  # between the end of the first process and of the last
_PREEMPTION_SERVICE = "jax_enable_preemption_service"
_FLAGS = "--coordinator, --num-processes and --process-id"


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: float = 300.0,
) -> str | None:
    """Join the processes of one run; to be called before any other use of JAX's devices.

    Without arguments JAX detects the cluster: TPU pods and slices, SLURM, Open MPI, and Kubernetes
    if JAX's extra `k8s` is installed. Without a cluster, or with `num_processes=1` alone, the run
    is this process alone. JAX aborts a process (exit code 134) whose peers do not join in time.

    JAX's coordinator in process 0 has no authentication. So it listens only at the address of
    `coordinator` if that is this machine's, and at 127.0.0.1 in a SLURM step of one node; else at
    JAX_COORDINATOR_BIND_ADDRESS, by default on every interface.

    Args:
      coordinator: `host:port` of process 0, reachable from every process.
      num_processes: number of processes of the run.
      process_id: number of this process, in [0, num_processes).
      timeout_s: seconds to wait for all processes.

    Returns:
      A warning for the primary process if it listens on every interface; else None.

    Raises:
      ValueError: only some arguments are given, or one is out of range; or the environment turns
        off JAX's preemption service.
      OSError: the processes cannot meet, for example because the port is taken.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    present = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    if present == "num_processes=1":
        return None
    if present:
        if coordinator is None or num_processes is None or process_id is None:
            raise ValueError(
                f"{present} is not enough: a run of several processes needs {_FLAGS}, and a run of "
                "one process needs none of them."
            )
        if not re.fullmatch(r".+:\d{1,5}", coordinator):
            raise ValueError(f"coordinator={coordinator} must be HOST:PORT of process 0.")
        if not 0 <= process_id < num_processes:
            raise ValueError(
                f"process_id={process_id} must lie in [0, {num_processes}): "
                f"the {num_processes} processes are numbered from 0."
            )
    else:
        coordinator = _coordinator_on_this_node()
    bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if bind_address is None and coordinator is not None and is_process_zero(process_id):
        bind_address = _bind_address(coordinator)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            local_device_ids=_local_device_ids(),
            cluster_detection_method="deactivate" if present else None,
            coordinator_bind_address=bind_address,
            initialization_timeout=max(int(timeout_s), 1),
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_S,
        )
    except ValueError as error:
        # JAX has found no cluster, and has no way to say so but this error.
        if present or str(error) != "coordinator_address should be defined.":
            raise
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise OSError(
            f"the processes of the run cannot meet ({reason}); give {_FLAGS}, or "
            "--num-processes 1 to train on this host alone."
        ) from error
    if not jax.distributed.is_initialized():
        return None
    if not getattr(jax.config, _PREEMPTION_SERVICE):
        raise ValueError(
            f"{_PREEMPTION_SERVICE.upper()}=false turns off what lets all processes of a run stop "
            "after the same step, and save; unset it."
        )
    if bind_address is not None:
        return None
    return (
        "JAX's coordinator in process 0 listens on every interface, without authentication: let "
        "none but the run's hosts reach its port, or set JAX_COORDINATOR_BIND_ADDRESS=ADDRESS:PORT"
    )


def check_accelerators() -> None:
    """Check, after `initialize`, that JAX uses the accelerators of this process.

    Without JAX_PLATFORMS, JAX falls back to the CPU if a plugin, driver or free device is missing.

    Raises:
      OSError: JAX cannot use the platform of JAX_PLATFORMS, or has only CPUs where SLURM gave GPUs.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    try:
        has_only_cpus = jax.default_backend() == "cpu"
    except (RuntimeError, AssertionError) as error:  # the second where there is no NVIDIA GPU
        reason = next(iter(str(error).splitlines()), "there is no such device")
        raise OSError(f"JAX has no device of JAX_PLATFORMS={platforms}: {reason}") from error
    if has_only_cpus and platforms.partition(",")[0] not in ("", "cpu"):
        raise OSError(
            f"JAX_PLATFORMS={platforms}, and JAX finds only CPUs here; see whether `nvidia-smi` "
            "lists GPUs, or set JAX_PLATFORMS=cpu."
        )
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if has_only_cpus and not platforms and gpus != "0":
        raise OSError(
            f"SLURM gave this step GPUs (SLURM_GPUS_ON_NODE={gpus}), and JAX would train on CPUs: "
            f"see whether `nvidia-smi` lists them; {pip_install('cuda')} installs CUDA's JAX. "
            "JAX_PLATFORMS=cpu trains on CPUs all the same."
        )


def is_process_zero(process_id: int | None) -> bool | None:
    """Whether this is process 0, before it has met the others: by `process_id`, or by variables of
    SLURM, Open MPI or GKE's TPU slices. None if only JAX can find out."""
    if process_id is not None:
        return process_id == 0
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "TPU_WORKER_ID"):
        if name in os.environ:  # TPU_WORKER_ID counts within a slice; the others have no slices
            return os.environ[name] == os.environ.get("MEGASCALE_SLICE_ID", "0") == "0"
    return None


def _coordinator_on_this_node() -> str | None:
    """The coordinator of a SLURM step of one node, at 127.0.0.1 instead of the node's name."""
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not tasks.isdecimal() or "JAX_COORDINATOR_ADDRESS" in os.environ:
        return None
    port = 61440 + int(os.environ["SLURM_JOB_ID"]) % 4096  # JAX's own choice
    return f"127.0.0.1:{os.environ.get('JAX_COORDINATOR_PORT', port)}"


def _bind_address(coordinator: str) -> str | None:
    """`coordinator` if its host surely is this machine; None for every interface.

    Raises:
      OSError: process 0 cannot listen there; jaxlib 0.10 crashes at a port that is taken.
    """
    host, _, port = coordinator.rpartition(":")
    own = _own_addresses(host.strip("[]"))  # IPv6 addresses have brackets
    try:
        for address, family in (own or {"": socket.AF_INET}).items():
            socket.create_server((address, int(port)), family=family).close()
    except (OSError, OverflowError) as error:
        raise OSError(
            f"process 0 cannot listen at port {port} of {coordinator} ({error}); give a free port "
            "in --coordinator HOST:PORT to all processes."
        ) from error
    return coordinator if own else None


def _own_addresses(host: str) -> dict[str, socket.AddressFamily]:
    """The addresses of a host and their families; empty if one may not be this machine's."""
    own: dict[str, socket.AddressFamily] = {}
    try:
        for family, _, _, _, (address, *_) in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            ip = ipaddress.ip_address(str(address))
            # Other hosts know a name by another address than this host's loopback (127.0.1.1).
            if ip.is_unspecified or (ip.is_loopback and host not in ("localhost", address)):
                return {}
            socket.create_server((address, 0), family=family).close()
            own[str(address)] = family
    except OSError:  # a name that DNS does not know yet, or another machine's address
        return {}
    return own


def _local_device_ids() -> list[int] | None:
    """`[]` for all devices that the process sees; None for JAX's own choice."""
    # In SLURM JAX gives process i of a node device i. That is wrong for a process that is alone on
    # its node, and where SLURM has given each process devices of its own.
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE")
    if tasks is None or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    alone = all(int(count) == 1 for count in re.findall(r"(?:^|,)(\d+)", tasks))  # of 8(x2),4
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [] if alone or (visible and "," not in visible) else None


def shutdown() -> None:
    """Leave the run that `initialize` joined, if it joined one; all processes must call."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def is_primary() -> bool:
    """Whether this is process 0, which alone prints and changes shared files."""
    return jax.process_index() == 0


def warn_once(text: str | None) -> None:
    """Log a warning, if there is one, in the primary process alone."""
    if text is not None and is_primary():
        _LOGGER.warning(text)


def barrier(name: str) -> None:
    """Wait until every process has reached the barrier of this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def all_processes(ok: bool) -> bool:
    """Whether `ok` is True in every process; all must call, and all get the same answer."""
    if jax.process_count() == 1:
        return ok
    return bool(np.all(multihost_utils.process_allgather(np.array(ok))))


def from_primary(value: Any) -> Any:
    """The primary process's value, which must be JSON; all processes must call."""
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode()
    text = text.ljust(64 * -(-len(text) // 64))  # few lengths, each of which compiles a broadcast
    length = multihost_utils.broadcast_one_to_all(np.array(len(text), np.int32))
    padded = np.zeros(int(length), np.uint8)
    if is_primary():
        padded[:] = np.frombuffer(text, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())


def text_from_primary(read: Callable[[], str | None]) -> str | None:
    """The result of `read`, which only the primary process calls, in all processes; all must call.

    Raises:
      ValueError: `read` failed in the primary process, which itself raises the original error.
    """
    text, failure = None, None
    if is_primary():
        try:
            text = read()
        except EXTERNAL_ERRORS as error:
            failure = error
    text, reason = from_primary([text, None if failure is None else in_words(failure)])
    if reason is not None:
        raise failure or ValueError(f"process 0 cannot go on: {reason}")
    return text


def first_mismatch(text: str) -> tuple[int, str, str] | None:
    """The first process whose text differs from that of process 0, with both texts; None if all are
    equal. All processes must call, and all get the same answer."""
    first, *others = texts_of_all(text)
    return next(((i, other, first) for i, other in enumerate(others, 1) if other != first), None)


def texts_of_all(text: str) -> list[str]:
    """The short texts of all processes, in order of processes; all processes must call."""
    if jax.process_count() == 1:
        return [text]
    content = text.encode()
    sizes = multihost_utils.process_allgather(np.array(len(content), np.int32))
    padded = np.zeros(max(*sizes.tolist(), 1), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]
