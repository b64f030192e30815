"""The `gcloud` commands for one TPU and its hosts, and what its state means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from maxmars.launch import tools
from maxmars.launch.machines import runtime_version

Phase = Literal["missing", "coming", "ready", "leaving", "gone", "failed"]

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

    def create(self) -> list[str]:
        """Create the TPU, or the request for it."""
        assert self.accelerator is not None
        version = self.runtime_version or runtime_version(self.accelerator)
        spot = ["--spot"] if self.spot else []
        if self.queued:
            options = [f"--node-id={self.name}", f"--runtime-version={version}"]
            words = ["queued-resources", "create", self.name, *options]
        else:
            words = ["tpu-vm", "create", self.name, f"--version={version}"]
        return self._gcloud(*words, f"--accelerator-type={self.accelerator}", *spot, "--quiet")

    def describe(self) -> list[str]:
        """Print the TPU as JSON."""
        return self._gcloud("tpu-vm", "describe", self.name, "--format=json")

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
        return self._gcloud("tpu-vm", "scp", *files, f"{self.name}:", "--worker=all", "--quiet")

    def ssh(self, command: str, *, worker: str = "all") -> list[str]:
        """Run a command on a host, by default on all hosts at once."""
        alive = "--ssh-flag=-oServerAliveInterval=30"  # notices that a host is gone
        target = [self.name, f"--worker={worker}", f"--command={command}", alive, "--quiet"]
        return self._gcloud("tpu-vm", "ssh", *target)

    def _gcloud(self, *words: str) -> list[str]:
        project = [] if self.project is None else [f"--project={self.project}"]
        return ["gcloud", "compute", "tpus", *words, f"--zone={self.zone}", *project]

    def state(self) -> State:
        """Ask where the TPU stands, and its queued resource if it has one.

        Raises:
          ValueError: gcloud cannot tell.
        """
        queued = None if self.queued is False else _describe(self.describe_queued())
        node = _describe(self.describe())
        if queued is not None:
            word = queued.get("state", {}).get("state", "UNKNOWN")
            if word != "ACTIVE":
                text = f"{word}{_reason(queued)}"
                return State(_QUEUED.get(word, "coming"), f"queued resource {text}")
            if node is None:
                return State("gone", "queued resource ACTIVE without a TPU")
        if node is None:
            return State("missing", "not there")
        word = node.get("state", "UNKNOWN")
        hosts = len(node.get("networkEndpoints") or [])
        return State(_NODE.get(word, "coming"), f"TPU {word}", max(hosts, 1))

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
