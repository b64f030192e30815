"""`maxmars launch gke`: a JobSet on a cluster with TPU or GPU nodes.

The checkout travels in a ConfigMap, so that any image with a Python will do; one that has the
packages already starts faster. Labels and names are those of XPK, whose `workload list` shows it.
Exit codes 1 and 2 of the run, errors that a restart would meet again, fail the JobSet; everything
else, such as a node that is taken away or the 75 of a run that was told to stop, restarts it.
"""

from __future__ import annotations

import base64
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxmars.launch import tools
from maxmars.launch.job import Job
from maxmars.launch.machines import Nodes
from maxmars.launch.source import CONSTRAINTS

LONGEST_NAME = 40
"""A pod's name, of at most 63 letters, has the run's and a suffix."""

_REPLICATED_JOB = "slice-job"
_CONTAINER = "maxmars"
_PORT = 8476
_MAX_CONFIG_MAP_BYTES = 1_000_000
_USERS_ERRORS = [1, 2]


@dataclass(frozen=True, kw_only=True)
class Gke:
    """Where and how the JobSet runs."""

    nodes: Nodes
    image: str
    namespace: str = "default"
    num_slices: int = 1
    spot: bool = False
    xpk: bool = False
    """Queue in the cluster of `xpk cluster create`: its LocalQueue and a priority."""
    claims: Mapping[str, str]
    """Names of PersistentVolumeClaims and where they are mounted."""
    max_restarts: int
    service_account: str | None = None


def parse_claims(texts: tuple[str, ...]) -> dict[str, str]:
    """Claims and mount points of `CLAIM:/PATH` each.

    Raises:
      ValueError: one is not of that form.
    """
    pattern = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?:/[^\s:]+"
    example = "datasets:/data, a PersistentVolumeClaim and where to mount it"
    pairs = [tools.check_word(text, "--claim", pattern, example).split(":") for text in texts]
    return dict(pairs)


def jobset(gke: Gke, job: Job) -> dict[str, Any]:
    """The manifest of the JobSet."""
    labels = {"xpk.google.com/workload": job.name}
    queue = {"kueue.x-k8s.io/queue-name": "multislice-queue"} if gke.xpk else {}
    rule = {"name": "usersError", "action": "FailJobSet"}
    rule |= {"onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": job.name,
            "namespace": gke.namespace,
            "labels": queue | labels,
            "annotations": {
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
            }
            if gke.nodes.has_tpu
            else {},
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": gke.max_restarts,
                "rules": [rule],
            },
            "replicatedJobs": [
                {
                    "name": _REPLICATED_JOB,
                    "replicas": gke.num_slices,
                    "template": {"spec": _slice(gke, job, labels)},
                }
            ],
        },
    }


def _slice(gke: Gke, job: Job, labels: dict[str, str]) -> dict[str, Any]:
    """The Job of one slice: a pod on each of its hosts."""
    codes = {"containerName": _CONTAINER, "operator": "In", "values": _USERS_ERRORS}
    return {
        "parallelism": gke.nodes.hosts,
        "completions": gke.nodes.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # JobSet restarts all pods, not Job one of them
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"metadata": {"labels": labels}, "spec": _pod(gke, job)},
    }


def _pod(gke: Gke, job: Job) -> dict[str, Any]:
    chips = {gke.nodes.resource: gke.nodes.chips_a_host}
    volumes = [
        {"name": "source", "configMap": {"name": f"{job.name}-source"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "source", "mountPath": "/maxmars-source"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for number, (claim, path) in enumerate(gke.claims.items()):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": gke.image,
        "command": ["bash", "-c", container_script(gke, job)],
        "env": _environment(gke, job),
        "ports": [{"containerPort": _PORT}],
        "resources": {"requests": chips, "limits": chips},
        "volumeMounts": mounts,
    }
    if job.environment:
        container["envFrom"] = [{"secretRef": {"name": f"{job.name}-environment"}}]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 300,  # to save; a spot node gives 25 s
        "nodeSelector": dict(gke.nodes.labels),
        "containers": [container],
        "volumes": volumes,
    }
    if gke.nodes.has_tpu:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if gke.spot:
        pod["nodeSelector"]["cloud.google.com/gke-spot"] = "true"
        toleration = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
        pod["tolerations"] = [toleration | {"effect": "NoSchedule"}]
    if gke.xpk:
        pod["priorityClassName"] = "medium"
    if gke.service_account is not None:
        pod["serviceAccountName"] = gke.service_account
    return pod


def _environment(gke: Gke, job: Job) -> list[dict[str, str]]:
    """GKE tells the hosts of a TPU slice who they are; those with GPUs are told here."""
    if gke.nodes.has_tpu:
        return [{"name": "PYTHONUNBUFFERED", "value": "1"}]
    coordinator = f"{job.name}-{_REPLICATED_JOB}-0-0.{job.name}:{_PORT}"
    values = {
        "PYTHONUNBUFFERED": "1",
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "NNODES": str(gke.nodes.hosts),
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",  # GKE's driver
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def container_script(gke: Gke, job: Job) -> str:
    """What each container runs."""
    extra = "tpu" if gke.nodes.has_tpu else "cuda"
    pip = "python3 -m pip install --quiet --root-user-action=ignore --disable-pip-version-check"
    lines = [
        "set -euo pipefail",
        "mkdir -p /maxmars",
        "tar -xzf /maxmars-source/source.tar.gz -C /maxmars",
        "cd /maxmars",
        f"{pip} -c {CONSTRAINTS} '.[{extra},gcs]' || exit 75  # an index that does not answer",
        *([] if job.source.setup is None else [f"bash {job.source.setup}"]),
        f"exec {shlex.join(job.train_command('python3'))}",
    ]
    return "\n".join(lines) + "\n"


def config_map(gke: Gke, job: Job) -> dict[str, Any]:
    """The manifest of the ConfigMap with the checkout.

    Raises:
      ValueError: it is too large for one.
    """
    archive = job.source.archive
    if len(archive) > _MAX_CONFIG_MAP_BYTES:
        raise ValueError(
            f"the checkout packs to {len(archive) / 1e6:.1f} MB, and a ConfigMap holds 1 MB; list "
            "what the run does not need in .gitignore."
        )
    text = base64.b64encode(archive).decode()
    return _object("ConfigMap", f"{job.name}-source", gke) | {"binaryData": {"source.tar.gz": text}}


def secret(gke: Gke, job: Job) -> dict[str, Any]:
    """The manifest of the Secret with the run's environment."""
    values = {"stringData": dict(job.environment)}
    return _object("Secret", f"{job.name}-environment", gke) | values


def _object(kind: str, name: str, gke: Gke) -> dict[str, Any]:
    metadata = {"name": name, "namespace": gke.namespace}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata}


def to_yaml(manifest: dict[str, Any]) -> str:
    """A manifest as text, written by a YAML library that quotes what needs it."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def string(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, string)
    return yaml.dump(manifest, Dumper=Dumper, sort_keys=False, width=1000)


def describe(gke: Gke, job: Job) -> str:
    """The JobSet, as YAML, with the commands that create what it needs as comments."""
    where = f"--namespace={shlex.quote(gke.namespace)}"
    size_kb = len(job.source.archive) / 1000
    lines = [
        "# What `maxmars launch gke` creates; this was a dry run.",
        f"# kubectl create configmap {job.name}-source --from-file=source.tar.gz {where}",
        f"#   ({job.source.num_files} files of the checkout, {size_kb:.0f} kB)",
    ]
    if job.environment:
        names = " ".join(f"--from-literal={name}=..." for name in job.environment)
        lines.append(f"# kubectl create secret generic {job.name}-environment {names} {where}")
    lines.append(f"# kubectl create --filename={job.name}.yaml, which is:")
    return "\n".join(lines) + "\n" + to_yaml(jobset(gke, job))


def launch(gke: Gke, job: Job, *, say: Callable[[str], None] = print) -> None:
    """Create the JobSet and what it needs.

    Raises:
      FileNotFoundError: there is no kubectl.
      ValueError: a JobSet of this name is there, or kubectl fails.
    """
    tools.require("kubectl")
    if tools.run(_kubectl("get", f"jobset/{job.name}", gke.namespace)).code == 0:
        raise ValueError(
            f"there is a JobSet {job.name} already; `maxmars launch gke delete --name {job.name}` "
            "deletes it (not its results), and the same command then continues the run."
        )
    manifests = [config_map(gke, job), jobset(gke, job)]
    if job.environment:
        manifests.insert(1, secret(gke, job))
    tools.run(_delete_files(job.name, gke.namespace))
    for manifest in manifests:
        # By a file only the user can read: not on a command line, and no copy in an annotation.
        with tempfile.TemporaryDirectory(prefix="maxmars-launch-") as folder:
            path = Path(folder) / f"{manifest['kind'].lower()}.yaml"
            path.touch(mode=0o600)
            path.write_text(to_yaml(manifest))
            tools.run_or_fail(["kubectl", "create", f"--filename={path}"])
        say(f"created {manifest['kind']} {manifest['metadata']['name']}")
    say(f"see `maxmars launch gke status|logs|delete --name {job.name}`")


def status(name: str, namespace: str) -> list[str]:
    """The command that shows the JobSet and its pods."""
    selector = f"--selector=jobset.sigs.k8s.io/jobset-name={name}"
    return ["kubectl", "get", "pods", selector, f"--namespace={namespace}", "--output=wide"]


def restarts(name: str, namespace: str) -> list[str]:
    """The command that shows the JobSet's state."""
    return _kubectl("get", f"jobset/{name}", namespace)


def logs(name: str, namespace: str) -> list[str]:
    """The command that follows the first host's log."""
    index = "batch.kubernetes.io/job-completion-index=0"
    job = "jobset.sigs.k8s.io/job-index=0"
    selector = f"--selector=jobset.sigs.k8s.io/jobset-name={name},{job},{index}"
    options = ["--follow", "--tail=-1", f"--container={_CONTAINER}"]
    return ["kubectl", "logs", selector, f"--namespace={namespace}", *options]


def delete(name: str, namespace: str) -> None:
    """Delete the JobSet, which stops the run, and what it needed.

    Raises:
      ValueError: kubectl fails, as where there is none.
    """
    tools.run_or_fail(_kubectl("delete", f"jobset/{name}", namespace))
    tools.run_or_fail(_delete_files(name, namespace))


def _delete_files(name: str, namespace: str) -> list[str]:
    targets = [f"configmap/{name}-source", f"secret/{name}-environment"]
    return ["kubectl", "delete", *targets, f"--namespace={namespace}", "--ignore-not-found"]


def _kubectl(verb: str, target: str, namespace: str) -> list[str]:
    return ["kubectl", verb, target, f"--namespace={namespace}"]
