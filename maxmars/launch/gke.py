"""`maxmars launch gke`: a JobSet on a cluster with TPU or GPU nodes.

The files that go along are in a ConfigMap, so that any image with Python will do; one that has the
packages starts faster. Labels and names are those of XPK, whose `workload list` shows the run.
Exit codes 1, 2 and 78 of the run, errors that a restart would meet again, fail the JobSet. Anything
else restarts all pods, such as a node that is taken away, or exit code 75 of a run that saved.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar

import yaml
from tyro.conf import arg

from maxmars.config.checks import UsageError
from maxmars.config.chips import Shape, parse_shape
from maxmars.launch import wheel
from maxmars.launch.job import (
    CONSTRAINTS,
    SETUP,
    Job,
    RunOptions,
    check_name,
    check_word,
    log,
    run_or_fail,
    run_program,
)

_REPLICATED_JOB = "slice-job"
_CONTAINER = "maxmars"
_PORT = 8476
_PIP = "python3 -m pip install --quiet --root-user-action=ignore --disable-pip-version-check"
_SPOT = "cloud.google.com/gke-spot"
_MAX_CONFIG_MAP_BYTES = 1_000_000  # Kubernetes takes 1 MiB

# Values of the node labels of accelerators, by Google's page "Plan TPUs in GKE" and its pages on
# GPUs.
_ACCELERATORS = {
    "tpu7x": "tpu7x",
    "v6e": "tpu-v6e-slice",
    "v5p": "tpu-v5p-slice",
    "v5e": "tpu-v5-lite-podslice",
    "v4": "tpu-v4-podslice",
    "a100": "nvidia-tesla-a100",
    "a100-80gb": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
    "h100-mega": "nvidia-h100-mega-80gb",
    "h200": "nvidia-h200-141gb",
    "b200": "nvidia-b200",
}


@dataclass(frozen=True, kw_only=True)
class JobSet:
    """A JobSet by the name of its run: show it, follow its log, delete it."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars launch gke status --name run1",
        "maxmars launch gke delete --name run1",
    )

    name: Annotated[str, arg(metavar="NAME")]
    """Name of the run, and of its JobSet."""
    namespace: Annotated[str, arg(metavar="NAMESPACE")] = "default"
    """Kubernetes namespace."""

    def check(self) -> None:
        """Check the words that go to kubectl.

        Raises:
          UsageError: a word is invalid; the message names the option.
        """
        check_name(self.name)
        pattern = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
        check_word(self.namespace, "--namespace", pattern, "default")

    def kubectl(self, *words: str) -> list[str]:
        """A kubectl command in the namespace."""
        return ["kubectl", *words, f"--namespace={self.namespace}"]

    def show_status(self) -> int:
        """Show the JobSet and its pods; returns kubectl's exit code."""
        selector = f"--selector=jobset.sigs.k8s.io/jobset-name={self.name}"
        jobset = self.kubectl("get", f"jobset/{self.name}")
        pods = self.kubectl("get", "pods", selector, "--output=wide")
        return max(subprocess.run(command).returncode for command in (jobset, pods))

    def show_logs(self) -> int:
        """Follow the log of the first host; returns kubectl's exit code."""
        first = "jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
        selector = f"--selector=jobset.sigs.k8s.io/jobset-name={self.name},{first}"
        options = ["--follow", "--tail=-1", f"--container={_CONTAINER}"]
        return subprocess.run(self.kubectl("logs", selector, *options)).returncode

    def delete(self) -> None:
        """Delete the JobSet, its ConfigMap and its Secret, which ends the run.

        Raises:
          ValueError: kubectl fails, for example because there is no such JobSet.
        """
        run_or_fail(self.kubectl("delete", f"jobset/{self.name}"))
        run_or_fail(self.delete_files())
        log(f"deleted JobSet {self.name}")

    def delete_files(self) -> list[str]:
        """The command that deletes the ConfigMap and the Secret, if they exist."""
        files = [f"configmap/{self.name}-source", f"secret/{self.name}-environment"]
        return self.kubectl("delete", *files, "--ignore-not-found")


@dataclass(frozen=True, kw_only=True)
class GkeOptions(RunOptions, JobSet):
    """Train on the nodes of a GKE cluster, by a JobSet. The cluster needs the JobSet controller,
    which clusters of XPK have.

    Options after -- go to `maxmars train`.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars launch gke gpt2 --name run1 --workdir gs://bucket/run1 \\",
        "  --topology v6e:4x4 -- --data.path gs://bucket/tokens",
    )
    FIRST: ClassVar[tuple[str, ...]] = (
        "name",
        "workdir",
        "topology",
        "num-slices",
        "image",
        "spot",
        "claim",
        "env",
        "service-account",
        "dry-run",
    )

    topology: Annotated[str, arg(metavar="TOPOLOGY")]
    """A TPU slice such as v5p:4x4x4 or v5e:4x4, or a number of GPUs such as h100:16."""
    num_slices: int = 1
    """Number of TPU slices of this topology that train together."""
    image: Annotated[str, arg(metavar="IMAGE")] = "python:3.12"
    """Container image with bash and Python; if it has the packages too, pods start faster."""
    install: bool = True
    """Install the packages in each pod at each start. With --no-install the image must have them,
    and pip, as maxmars itself is always installed."""
    claim: Annotated[tuple[str, ...], arg(metavar="CLAIM:/PATH ...")] = ()
    """PersistentVolumeClaims to mount, for example with the data; for several pods their
    accessModes must have ReadWriteMany."""
    spot: bool = False
    """Use spot nodes, which may be taken away at any time."""
    patch: Annotated[Path | None, arg(metavar="FILE.yaml")] = None
    """YAML file to merge into the JobSet, with a reservation, tolerations, a queue or network
    interfaces. Mappings are merged at every depth, lists of items with names (replicatedJobs,
    containers, env, volumes) by name, volumeMounts by mountPath, tolerations by key; any other list
    or value is replaced. launch/README.md has an example."""
    service_account: Annotated[str | None, arg(metavar="NAME")] = None
    """Kubernetes service account of the pods; None takes the default of the namespace."""

    @functools.cached_property
    def slice(self) -> Shape:
        """Shape of one slice, or of all GPUs.

        Raises:
          UsageError: there is no such shape.
        """
        return parse_shape(self.topology)

    @property
    def has_tpu(self) -> bool:
        return self.slice.chip.is_tpu

    @property
    def node_labels(self) -> dict[str, str]:
        """Labels by which nodes are selected."""
        name, prefix = _ACCELERATORS[self.slice.kind], "cloud.google.com/gke"
        if not self.has_tpu:
            return {f"{prefix}-accelerator": name}
        topology = "x".join(map(str, self.slice.sizes))
        return {f"{prefix}-tpu-accelerator": name, f"{prefix}-tpu-topology": topology}

    def check(self) -> None:
        super().check()
        for claim in self.claim:
            pattern = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?:/[^\s:]+"
            example = "datasets:/data, a PersistentVolumeClaim and where to mount it"
            check_word(claim, "--claim", pattern, example)
        if self.patch is not None:
            _read_patch(self.patch)
        self.slice.check_slices(self.num_slices)
        if not self.has_tpu and self.slice.num_hosts > 1 and self.patch is None:
            raise UsageError(
                f"--topology {self.topology} is {self.slice.num_hosts} nodes, whose GPUs reach "
                "each other at full speed only with the cluster's network interfaces, NCCL plugin "
                "and NCCL's variables. Start it by `xpk workload create`, which writes them, or "
                "copy them from AI-Hypercomputer/gpu-recipes (networking.gke.io/interfaces) into "
                "--patch FILE.yaml, or take the GPUs of one node."
            )


def jobset(options: GkeOptions, job: Job) -> dict[str, Any]:
    """The manifest of the JobSet, merged with --patch.

    Raises:
      UsageError: --patch is no mapping in YAML.
    """
    workload = {"xpk.google.com/workload": job.name}
    # A slice of several hosts is a node pool of its own in GKE, which two Jobs must not share.
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    users_errors = {"containerName": _CONTAINER, "operator": "In", "values": [1, 2, 78]}
    job_of_slice = {
        "parallelism": options.slice.num_hosts,
        "completions": options.slice.num_hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # JobSet restarts all pods, Job would restart one
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": users_errors}]},
        "template": {"metadata": {"labels": workload}, "spec": _pod(options, job)},
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": job.name,
            "namespace": options.namespace,
            "labels": workload,
            "annotations": exclusive if options.has_tpu else {},
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": options.max_restarts,
                "rules": [
                    {
                        "name": "usersError",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": _REPLICATED_JOB,
                    "replicas": options.num_slices,
                    "template": {"spec": job_of_slice},
                }
            ],
        },
    }
    return manifest if options.patch is None else _merge(manifest, _read_patch(options.patch))


def _read_patch(path: Path) -> dict[str, Any]:
    try:
        patch = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UsageError(f"--patch {path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(patch, dict):
        raise UsageError(f"--patch {path} must be a mapping, such as a part of a JobSet.")
    return patch


def _merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merge(old.get(key), value) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list):
        for key in ("mountPath", "name", "key"):
            if all(isinstance(item, dict) and key in item for item in old + new):
                merged = {item[key]: item for item in old}
                for item in new:
                    merged[item[key]] = _merge(merged.get(item[key]), item)
                return list(merged.values())
    return new


def _pod(options: GkeOptions, job: Job) -> dict[str, Any]:
    chips = {
        "google.com/tpu" if options.has_tpu else "nvidia.com/gpu": options.slice.chips_per_host
    }
    volumes: list[dict[str, Any]] = [
        {"name": "source", "configMap": {"name": f"{job.name}-source"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # by default 64 MB, too few for NCCL
    ]
    mounts = [
        {"name": "source", "mountPath": "/maxmars-source"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for number, claim_text in enumerate(options.claim):
        claim, path = claim_text.split(":")
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    environment = [{"name": "PYTHONUNBUFFERED", "value": "1"}]
    if "JAX_PLATFORMS" not in job.environment:  # JAX would else take CPUs where it finds no chip
        platforms = "tpu,cpu" if options.has_tpu else "cuda,cpu"
        environment.append({"name": "JAX_PLATFORMS", "value": platforms})
    if not options.has_tpu:  # GKE's driver
        environment.append({"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"})
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": options.image,
        # Kubernetes replaces $(NAME) and $$ in a command; a dollar more keeps them.
        "command": ["bash", "-c", re.sub(r"\$(?=[$(])", "$$", _container_script(options, job))],
        "env": environment,
        "ports": [{"containerPort": _PORT}],
        "resources": {"requests": chips, "limits": chips},
        "volumeMounts": mounts,
    }
    if job.environment:
        container["envFrom"] = [{"secretRef": {"name": f"{job.name}-environment"}}]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 300,  # to save; a spot node gives 25 s
        "nodeSelector": options.node_labels,
        "containers": [container],
        "volumes": volumes,
    }
    if options.has_tpu:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if options.spot:
        pod["nodeSelector"] |= {_SPOT: "true"}
        taint = {"key": _SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        pod["tolerations"] = [taint]
    if options.service_account is not None:
        pod["serviceAccountName"] = options.service_account
    return pod


def _container_script(options: GkeOptions, job: Job) -> str:
    extra = "tpu" if options.has_tpu else "cuda"
    setup = "# no --setup" if options.setup is None else f"bash {SETUP}"
    ranks = ""  # GKE tells the hosts of a TPU slice their place in the run
    if not options.has_tpu:
        ranks = f" --num-processes {options.slice.num_hosts}"
        if options.slice.num_hosts > 1:
            coordinator = f"{job.name}-{_REPLICATED_JOB}-0-0.{job.name}:{_PORT}"
            ranks = f' --coordinator {coordinator}{ranks} --process-id "$JOB_COMPLETION_INDEX"'
    install = f"""\
installed=0
for pause in 0 15 30 60 120; do  # the index may not answer at once
  sleep "$pause"
  if {_PIP} -c {CONSTRAINTS} './{wheel.NAME}[{extra},gcs]'; then installed=1 && break; fi
done
((installed)) || exit 1  # new pods would meet it again
"""
    if not options.install:
        install = "# the image has the packages\n"
    return f"""\
set -euo pipefail
mkdir -p /maxmars
tar -xzf /maxmars-source/source.tar.gz -C /maxmars
cd /maxmars
# In place of another maxmars in the image.
{_PIP} --no-index --no-deps --force-reinstall ./{wheel.NAME}
{install}{setup}
exec python3 {shlex.join(job.python_arguments())}{ranks}
"""


# Texts that PyYAML writes without quotes, and kubectl's parser takes for a number or a truth value.
_NO_TEXT_IN_GO = re.compile(r"[-+]?\.?\d|[yYnN]$")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else "'" if _NO_TEXT_IN_GO.match(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_string)


def describe(options: GkeOptions, job: Job) -> str:
    """The JobSet as YAML. Its pods would wait for a ConfigMap, which only a real launch creates."""
    manifest = jobset(options, job)
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=1000)


def launch(options: GkeOptions, job: Job) -> None:
    """Create the JobSet, with its ConfigMap and Secret.

    Raises:
      ValueError: the files that go along are too large for a ConfigMap, a JobSet of this name
        exists, or kubectl fails.
    """
    archive = job.code.archive
    if len(archive) > _MAX_CONFIG_MAP_BYTES:
        raise ValueError(
            f"what goes along packs to {len(archive) / 1e6:.1f} MB, and a ConfigMap holds 1 MB; "
            "take less by --include, and the rest from a bucket or a --claim."
        )
    name_options = f"--name {job.name}"
    if options.namespace != "default":
        name_options += f" --namespace {options.namespace}"
    if run_program(options.kubectl("get", f"jobset/{job.name}")).returncode == 0:
        raise ValueError(
            f"there is a JobSet {job.name} already; `maxmars launch gke delete {name_options}` "
            "deletes it (not its results), and the same command then continues the run."
        )
    _check_claims(options, job)
    run_program(options.delete_files())
    packed = {"source.tar.gz": base64.b64encode(archive).decode()}
    _create(options, "ConfigMap", f"{job.name}-source", {"binaryData": packed}, note=job.code.size)
    if job.environment:
        values = {"stringData": dict(job.environment)}
        _create(options, "Secret", f"{job.name}-environment", values)
    _create(options, "JobSet", job.name, jobset(options, job))
    log(f"see `maxmars launch gke status|logs|delete {name_options}`")


def _check_claims(options: GkeOptions, job: Job) -> None:
    """Check that the PersistentVolumeClaims exist, and that all pods can mount them.

    Raises:
      ValueError: pods would wait for a volume for ever.
    """
    pods = options.num_slices * options.slice.num_hosts
    for claim_text in options.claim:
        claim, _, mount = claim_text.partition(":")
        query = ["get", f"pvc/{claim}", "--output=jsonpath={.spec.accessModes}"]
        modes = run_or_fail(options.kubectl(*query))
        needed = ["ReadWriteMany"]  # pods write to the workdir; other volumes may be read only
        if not PurePosixPath(job.workdir).is_relative_to(mount):
            needed.append("ReadOnlyMany")
        if pods > 1 and not any(mode in modes for mode in needed):
            raise ValueError(
                f"--claim {claim_text} has accessModes {modes}, and {pods} pods mount it: take one "
                f"with {' or '.join(needed)}, such as Filestore's, or a bucket."
            )


def _create(
    options: GkeOptions, kind: str, name: str, manifest: dict[str, Any], note: str = ""
) -> None:
    metadata = {"name": name, "namespace": options.namespace}
    manifest = {"apiVersion": "v1", "kind": kind, "metadata": metadata} | manifest
    # By a file that only the user can read, as a command line would show a secret. `kubectl apply`
    # would leave a copy in an annotation, unlike `create`.
    with tempfile.TemporaryDirectory(prefix="maxmars-launch-") as folder:
        path = Path(folder) / f"{kind.lower()}.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(manifest))
        run_or_fail(["kubectl", "create", f"--filename={path}"])
    log(f"created {kind} {name}{f' ({note})' if note else ''}")
