"""Several processes as one: starting `jax.distributed`, the primary process, barriers, agreement.

Everything here does nothing in a single process, so callers need not ask how many there are.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxmars.cluster import Membership, detect
from maxmars.lost_peers import AbortWatch
from maxmars.roll_call import roll_call

_HEARTBEATS_S = 60  # a process that sends none for so long counts as lost
_LEAVING_S = 60  # for the last to leave after the first

_abort_watch: AbortWatch | None = None


def initialize(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    timeout_s: float = 300.0,
) -> None:
    """Join the processes of one run; call it before anything else asks JAX for its devices.

    Args:
      coordinator: `host:port` of process 0, reachable from every process.
      num_processes: number of processes of the run.
      process_id: this process's number, in [0, num_processes).
      timeout_s: seconds to wait for all processes.

    With all three None the cluster is asked (see `cluster.detect`); where there is none, and with
    `num_processes` 1 alone, the run is this process alone.

    Raises:
      ValueError: some are given and others are not, `process_id` is out of range, or the processes
        contradict each other.
      TimeoutError: not all processes came; says how many did, and which are missing.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if num_processes == 1 and len(missing) == 2:
        return
    if num_processes is None or process_id is None or coordinator is None:
        if len(missing) == len(given):
            membership = detect()
            if membership is not None:
                _join(membership, timeout_s)
            return
        present = ", ".join(f"{k}={v}" for k, v in given.items() if v is not None)
        raise ValueError(
            f"{present} was given without {' and '.join(missing)}: a run of several processes "
            "needs coordinator, num_processes and process_id, and a run of one needs none of them."
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id={process_id} must lie in [0, {num_processes}): "
            f"the {num_processes} processes are numbered from 0."
        )
    membership = Membership(
        coordinator=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        found_by="the command line",
    )
    _join(membership, timeout_s)


def _join(membership: Membership, timeout_s: float) -> None:
    coordinator, count = membership.coordinator, membership.num_processes
    roll_call(coordinator, count, membership.process_id, timeout_s)
    # CPU processes talk through gloo, which is JAX's default (jax_cpu_collectives_implementation).
    global _abort_watch
    _abort_watch = AbortWatch(f"process {membership.process_id} of {count}")
    failure = f"not all {count} processes came to {coordinator} within {timeout_s:g} s."
    with _abort_watch.joining(failure):
        jax.distributed.initialize(
            coordinator,
            num_processes=count,
            process_id=membership.process_id,
            local_device_ids=membership.local_device_ids,
            cluster_detection_method="deactivate",  # it would take one device a process in SLURM
            initialization_timeout=int(timeout_s),
            heartbeat_timeout_seconds=_HEARTBEATS_S,
            shutdown_timeout_seconds=_LEAVING_S,
        )


def leaves_with_error() -> None:
    """This process ends with an error of its own: JAX may end it before the others have left, and
    its exit code is 1 all the same."""
    if _abort_watch is not None:
        _abort_watch.failed()


def shutdown() -> None:
    """Leave the run that `initialize` joined; does nothing if it joined none."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def is_primary() -> bool:
    """Whether this is process 0, the one that writes logs and tidies directories."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process has come to the barrier of this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def everywhere(ok: bool) -> bool:
    """Whether `ok` holds in every process; all of them must ask, and all get the same answer."""
    if jax.process_count() == 1:
        return ok
    return bool(np.all(multihost_utils.process_allgather(np.array(ok))))


def from_primary(numbers: list[int]) -> list[int]:
    """The primary process's list of integers below 2**31; all processes must call."""
    if jax.process_count() == 1:
        return numbers
    length = multihost_utils.broadcast_one_to_all(np.array(len(numbers), np.int32))
    padded = np.zeros(int(length), np.int32)
    if is_primary():
        padded[:] = numbers
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).tolist()
