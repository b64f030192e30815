"""The `gcloud` commands for one TPU and its hosts, and what its state means.

A TPU is one slice, a node of Google's, or several of one queued resource, which the data center's
network joins: each host's metadata then says which slice it is of, as libtpu and `cluster` read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from maxmars.launch import tools
from maxmars.launch.machines import runtime_version

Phase = Literal["missing", "coming", "ready", "leaving", "gone", "failed"]
Worker = Literal["all", "0"]

_NODE: dict[str, Phase] = {
    "READY": "ready",
    "PREEMPTED": "gone",
    "TERMINATED": "gone",
    "DELETING": "leaving",
    "STOPPING": "leaving",
    "HIDING": "leaving",
    "STOPPED": "failed",
    "HIDDEN": "failed",
}
_WORST: tuple[Phase, ...] = ("ready", "coming", "missing", "leaving", "gone", "failed")
_QUEUED: dict[str, Phase] = {
    "SUSPENDED": "gone",
    "SUSPENDING": "leaving",
    "DELETING": "leaving",
    "FAILED": "failed",
}


@dataclass(frozen=True)
class State:
    """Where a TPU stands."""

    phase: Phase
    text: str
    """Google's own word, and its reason if it gives one."""
    num_hosts: int = 0
    """Of all slices."""


@dataclass(frozen=True, kw_only=True)
class TpuVm:
    """A TPU, there or not, that has the name of its run."""

    name: str
    zone: str
    project: str | None = None
    accelerator: str | None = None
    """Such as v5p-128; None where it is not to be created."""
    runtime_version: str | None = None
    """Software of the hosts; None takes what suits the accelerator."""
    spot: bool = False
    queued: bool | None = None
    """Whether to ask by a queued resource, which waits for capacity; None where that is not known
    of a TPU that is there."""
    num_slices: int = 1
    """Nodes of the queued resource."""

    def __post_init__(self) -> None:
        """Reject what cannot be a name, a zone, a project or a type."""
        tools.check_name(self.name, 40)
        zone = r"[a-z]+-[a-z]+[0-9]+-[a-z]"
        tools.check_word(self.zone, "--zone", zone, "us-east5-a, a zone that has TPUs")
        if self.project is not None:
            project = r"[a-z][-a-z0-9.:]*[a-z0-9]"
            tools.check_word(self.project, "--project", project, "my-project, a project's ID")
        if self.accelerator is not None:
            runtime_version(self.accelerator)
        if self.runtime_version is not None:
            version = r"[a-z0-9][-a-z0-9._]*"
            tools.check_word(self.runtime_version, "--runtime-version", version, "v2-alpha-tpuv5")
        if self.num_slices < 1:
            raise ValueError(f"--num-slices={self.num_slices} must be at least 1.")
        if self.num_slices > 1 and self.queued is False:
            raise ValueError(
                f"--num-slices={self.num_slices} needs --queued: only a queued resource joins "
                "slices to one TPU."
            )

    def create(self) -> list[str]:
        """Create the TPU, or the request for it."""
        assert self.accelerator is not None
        version = self.runtime_version or runtime_version(self.accelerator)
        spot = ["--spot"] if self.spot else []
        if self.queued:
            nodes = [f"--node-id={self.name}"]
            if self.num_slices > 1:  # they get the names NAME-0, NAME-1, ...
                nodes = [f"--node-count={self.num_slices}", f"--node-prefix={self.name}"]
            options = [*nodes, f"--runtime-version={version}"]
            words = ["queued-resources", "create", self.name, *options]
        else:
            words = ["tpu-vm", "create", self.name, f"--version={version}"]
        return self._gcloud(*words, f"--accelerator-type={self.accelerator}", *spot, "--quiet")

    def describe(self, node: str | None = None) -> list[str]:
        """Print the TPU, or one of its slices, as JSON."""
        return self._gcloud("tpu-vm", "describe", node or self.name, "--format=json")

    def describe_queued(self) -> list[str]:
        """Print the queued resource as JSON."""
        return self._gcloud("queued-resources", "describe", self.name, "--format=json")

    def delete(self) -> list[str]:
        """Delete the TPU."""
        return self._gcloud("tpu-vm", "delete", self.name, "--quiet")

    def delete_queued(self) -> list[str]:
        """Delete the queued resource and its TPU."""
        return self._gcloud("queued-resources", "delete", self.name, "--force", "--quiet")

    def copy(self, files: Sequence[str]) -> list[str]:
        """Copy files to the home directory on every host."""
        return self._gcloud(*self._hosts("scp", *files, f"{self.name}:"), "--quiet")

    def ssh(self, command: str, *, worker: Worker = "all") -> list[str]:
        """Run a command on a host, by default on all hosts at once."""
        alive = "--ssh-flag=-oServerAliveInterval=30"  # notices that a host is gone
        words = self._hosts("ssh", self.name, worker=worker)
        return self._gcloud(*words, f"--command={command}", alive, "--quiet")

    def _hosts(self, verb: str, *words: str, worker: Worker = "all") -> list[str]:
        """A verb for all hosts, or for the first of the first slice."""
        if self.num_slices == 1:
            return ["tpu-vm", verb, *words, f"--worker={worker}"]
        return ["queued-resources", verb, *words, f"--node={worker}", f"--worker={worker}"]

    def _gcloud(self, *words: str) -> list[str]:
        project = [] if self.project is None else [f"--project={self.project}"]
        return ["gcloud", "compute", "tpus", *words, f"--zone={self.zone}", *project]

    def as_it_is(self) -> TpuVm:
        """The same TPU with what Google knows of it: by a queued resource or not, its slices.

        Raises:
          ValueError: gcloud cannot tell.
        """
        queued = _describe(self.describe_queued())
        if queued is None:
            return dataclasses.replace(self, queued=False)
        return dataclasses.replace(self, queued=True, num_slices=max(1, len(_nodes(queued))))

    def state(self) -> State:
        """Ask where the TPU stands, and its queued resource if it has one.

        Raises:
          ValueError: gcloud cannot tell, or it has another number of slices.
        """
        queued = None if self.queued is False else _describe(self.describe_queued())
        nodes = [self.name] if queued is None else _nodes(queued) or [self.name]
        if queued is not None:
            if len(nodes) != self.num_slices:
                raise ValueError(
                    f"--num-slices={self.num_slices}, but {self.name} is there with {len(nodes)}; "
                    "name that number, or delete it by `maxmars launch tpu-vm delete` first."
                )
            word = queued.get("state", {}).get("state", "UNKNOWN")
            if word != "ACTIVE":
                text = f"{word}{_reason(queued)}"
                return State(_QUEUED.get(word, "coming"), f"queued resource {text}")
        states = [
            _node_state(_describe(self.describe(node)), "TPU" if len(nodes) == 1 else node)
            for node in nodes
        ]
        if queued is not None and any(state.phase == "missing" for state in states):
            which = "a TPU" if len(nodes) == 1 else "all its slices"
            return State("gone", f"queued resource ACTIVE without {which}")
        worst = max(states, key=lambda state: _WORST.index(state.phase))
        ready = len(nodes) > 1 and worst.phase == "ready"
        text = f"{len(nodes)} slices READY" if ready else worst.text
        return State(worst.phase, text, sum(state.num_hosts for state in states))

    def remove(self) -> bool:
        """Delete the TPU and its queued resource; whether there was one.

        Raises:
          ValueError: gcloud cannot delete it.
        """
        if self.queued is not False and _describe(self.describe_queued()) is not None:
            tools.run_or_fail(self.delete_queued())
            return True
        if _describe(self.describe()) is None:
            return False
        tools.run_or_fail(self.delete())
        return True


def _nodes(queued: dict[str, Any]) -> list[str]:
    """Names of the slices of a queued resource."""
    return [spec["nodeId"] for spec in queued.get("tpu", {}).get("nodeSpec", [])]


def _node_state(node: dict[str, Any] | None, name: str) -> State:
    if node is None:
        return State("missing", "not there")
    word = node.get("state", "UNKNOWN")
    hosts = len(node.get("networkEndpoints") or [])
    return State(_NODE.get(word, "coming"), f"{name} {word}", max(hosts, 1))


def _describe(command: list[str]) -> dict[str, Any] | None:
    done = tools.run(command)
    if done.code == 0:
        return json.loads(done.output)
    if "NOT_FOUND" in done.errors or "was not found" in done.errors:
        return None
    raise ValueError(f"`{' '.join(command[:5])} ...` failed: {done.problem}")


def _reason(queued: dict[str, Any]) -> str:
    """What Google says of a request that failed."""
    data = queued.get("state", {}).get("failedData", {}).get("error", {})
    return f": {data['message']}" if "message" in data else ""
