"""`maxmars launch`: start a run on TPU VMs, a GKE cluster or SLURM, and look after it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from maxmars.cli.config_file import UsageError, parse_arguments
from maxmars.cli.train_arguments import TrainArguments
from maxmars.launch import gke, slurm, tools, tpu_vm
from maxmars.launch.job import Job, check_shared_workdir, take_environment
from maxmars.launch.machines import num_chips, parse_topology
from maxmars.launch.source import pack
from maxmars.launch.tpu_commands import TpuVm
from maxmars.mesh_checks import check_mesh, mesh_shape

_USAGE = """\
usage: maxmars launch tpu-vm CONFIG --name NAME --workdir DIR --zone ZONE --accelerator TYPE
       maxmars launch tpu-vm status|logs|stop|delete --name NAME --zone ZONE
       maxmars launch gke CONFIG --name NAME --workdir DIR --topology TOPOLOGY
       maxmars launch gke status|logs|delete --name NAME
       maxmars launch slurm CONFIG --name NAME --workdir DIR --nodes N --gpus-per-node N
       maxmars launch slurm status|stop --name NAME

Start a run on other machines by your own gcloud, kubectl or sbatch. The checkout that this maxmars
runs from goes along, at its present state. After a preemption the run continues in its --workdir.
What follows -- goes to `maxmars train`; --dry-run prints every command and file, and runs nothing.

  maxmars launch tpu-vm configs/gpt2.py:size=xl,optimizer=mars --name run1 --zone us-east5-a \\
    --accelerator v5p-128 --spot --queued --setup mount.sh --workdir /mnt/runs/run1 \\
    -- --mesh.fsdp 64 --data.path /mnt/openwebtext

`maxmars launch PLATFORM --help` lists the options, `maxmars launch PLATFORM ACTION --help` those of
an action."""

_DryRun = Annotated[bool, arg(help="Print every command and file, and run nothing.")]


@dataclass(frozen=True, kw_only=True)
class _Start:
    config: Annotated[str, Positional, arg(metavar="CONFIG")]
    """A config file with its choices, as for `maxmars train`."""
    name: Annotated[str, arg(metavar="NAME")]
    """Name of the run, and of what is created for it."""
    workdir: Annotated[str, arg(metavar="DIR")]
    """Directory of the run's metrics and checkpoints, which every host must reach under this path:
    on gs://, or on a file system that they share, mounted by --setup or --claim for example."""
    env: Annotated[tuple[str, ...], arg(metavar="NAME")] = ()
    """Variables of your environment that the run gets, such as WANDB_API_KEY. Their values are
    shown nowhere."""
    setup: Annotated[Path | None, arg(metavar="FILE.sh")] = None
    """A bash script to run on each host before, for example to mount a bucket with the data."""
    max_restarts: int = 100
    """How often the run may be started again, after preemptions and lost hosts."""
    dry_run: _DryRun = False


@dataclass(frozen=True, kw_only=True)
class _Tpu:
    name: Annotated[str, arg(metavar="NAME")]
    """Name of the run, which is that of its TPU."""
    zone: Annotated[str, arg(metavar="ZONE")]
    """Zone of the TPU, such as us-east5-a."""
    project: Annotated[str | None, arg(metavar="ID")] = None
    """Google Cloud project; None takes gcloud's own."""


@dataclass(frozen=True, kw_only=True)
class _StartTpu(_Start, _Tpu):
    """Train on a TPU. Creates it if need be; run again, takes up where things stand."""

    accelerator: Annotated[str, arg(metavar="TYPE")]
    """Kind and size: v5p-128, v5litepod-16, v6e-64, v4-32."""
    num_slices: int = 1
    """TPUs of this kind that train as one, each a slice; needs --queued, and mesh.data (the only
    axis between slices) a multiple of it."""
    spot: bool = False
    """Cheaper, and may be taken away at any time; it is then created anew."""
    queued: bool = False
    """Ask by a queued resource, which waits until there is capacity."""
    runtime_version: Annotated[str | None, arg(metavar="VERSION")] = None
    """Software of the hosts; None takes Google's choice for JAX on this kind."""
    delete_when_done: bool = False
    """Delete the TPU when all steps are done; it costs until it is deleted."""


@dataclass(frozen=True, kw_only=True)
class _JobSet:
    name: Annotated[str, arg(metavar="NAME")]
    """Name of the run, which is that of its JobSet."""
    namespace: Annotated[str, arg(metavar="NAMESPACE")] = "default"
    """Kubernetes namespace."""


@dataclass(frozen=True, kw_only=True)
class _StartGke(_Start, _JobSet):
    """Train on the nodes of a GKE cluster, by a JobSet. The cluster needs JobSet, as XPK's have."""

    topology: Annotated[str, arg(metavar="TOPOLOGY")]
    """A TPU slice such as v5p:4x4x4 or v5e:4x4, or a number of GPUs such as h100:16."""
    num_slices: int = 1
    """TPU slices of this topology."""
    image: Annotated[str, arg(metavar="IMAGE")] = "python:3.12"
    """Container image with bash and Python; with the packages in it, pods start faster."""
    claim: Annotated[tuple[str, ...], arg(metavar="CLAIM:/PATH")] = ()
    """PersistentVolumeClaims to mount, with the data for example."""
    spot: bool = False
    """Use spot nodes, which may be taken away at any time."""
    xpk: bool = False
    """Queue the run where `xpk cluster create` made the cluster."""
    service_account: Annotated[str | None, arg(metavar="NAME")] = None
    """Kubernetes service account of the pods; None takes that of the namespace."""


@dataclass(frozen=True, kw_only=True)
class _StartSlurm(_Start):
    """Train under SLURM. The job is queued again before its time ends, until all steps are done."""

    nodes: int = 1
    """Number of nodes."""
    gpus_per_node: int = 0
    """GPUs of each node."""
    process_per: Literal["node", "gpu"] = "node"
    """Whether a process takes all GPUs of its node, or one."""
    cpus_per_task: int | None = None
    """Cores for each process."""
    mem: str | None = None
    """Memory of each node."""
    time: str | None = None
    """Time limit, such as 24:00:00; the run saves before, and continues in a new job."""
    partition: str | None = None
    """SLURM's partition."""
    account: str | None = None
    """SLURM's account."""
    qos: str | None = None
    """SLURM's quality of service."""
    constraint: str | None = None
    """Features of the nodes."""


@dataclass(frozen=True, kw_only=True)
class _SlurmJob:
    name: Annotated[str, arg(metavar="NAME")]
    """Name of the run, which is that of its jobs."""


def run(argv: list[str]) -> int:
    """Run `maxmars launch`."""
    platform, rest = (argv[0], argv[1:]) if argv else ("", [])
    if platform in ("-h", "--help"):
        print(_USAGE)
        sys.exit(0)
    if platform not in _PLATFORMS:
        raise UsageError(
            f"maxmars launch needs one of {', '.join(_PLATFORMS)}, not {platform!r}. "
            "See `maxmars launch --help`."
        )
    start, actions = _PLATFORMS[platform]
    if rest and rest[0] in actions:
        kind, act = actions[rest[0]]
        prog = f"maxmars launch {platform} {rest[0]}"
        return act(tyro.cli(kind, args=rest[1:], prog=prog)) or 0
    kind, act = start
    own, train = _split(rest)
    return act(tyro.cli(kind, args=own, prog=f"maxmars launch {platform}"), train) or 0


def _split(words: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """Own options, and what follows the first `--`."""
    if "--" not in words:
        return words, ()
    end = words.index("--")
    return words[:end], tuple(words[end + 1 :])


def _job(
    arguments: _Start, train: tuple[str, ...], workdir: str, *, chips: int = 0, slices: int = 1
) -> Job:
    """The run, checked as `maxmars train` would: before anything is rented."""
    prog = "the part after --: maxmars train"
    parsed = parse_arguments(TrainArguments, [arguments.config, *train], prog=prog)
    given = (parsed.workdir, parsed.coordinator, parsed.num_processes, parsed.process_id)
    if any(value is not None for value in given):
        raise UsageError(
            "--workdir goes before --, and who the processes are is found on the machines: leave "
            "--workdir, --coordinator, --num-processes and --process-id out after --."
        )
    if chips:
        shape = mesh_shape(parsed.config.mesh, chips, slices)
        check_mesh(parsed.config, shape)
    if arguments.max_restarts < 0:
        raise UsageError(f"--max-restarts={arguments.max_restarts} must be at least 0.")
    return Job(
        name=arguments.name,
        source=pack(arguments.config, setup=arguments.setup),
        workdir=workdir,
        train_arguments=train,
        environment=take_environment(arguments.env),
    )


def _start_tpu(arguments: _StartTpu, train: tuple[str, ...]) -> int:
    vm = TpuVm(
        name=arguments.name,
        zone=arguments.zone,
        project=arguments.project,
        accelerator=arguments.accelerator,
        runtime_version=arguments.runtime_version,
        spot=arguments.spot,
        queued=arguments.queued,
        num_slices=arguments.num_slices,
    )
    workdir = check_shared_workdir(arguments.workdir)
    slices = arguments.num_slices
    chips = slices * num_chips(arguments.accelerator)
    job = _job(arguments, train, workdir, chips=chips, slices=slices)
    if arguments.dry_run:
        print(tpu_vm.describe(vm, job), end="")
        return 0
    launcher = tpu_vm.Launcher(
        vm,
        job,
        max_restarts=arguments.max_restarts,
        delete_when_done=arguments.delete_when_done,
        say=_say,
    )
    try:
        return launcher.run()
    except KeyboardInterrupt:
        _say(
            "\nno longer watching; the run goes on, but is not restarted after a preemption. The "
            "same command watches again; `maxmars launch tpu-vm stop` ends the run."
        )
        return 130


def _tpu(arguments: _Tpu) -> TpuVm:
    tools.require("gcloud")
    vm = TpuVm(name=arguments.name, zone=arguments.zone, project=arguments.project)
    return vm.as_it_is()


def _tpu_status(arguments: _Tpu) -> None:
    vm = _tpu(arguments)
    state = vm.state()
    _say(f"{vm.name}: {state.text}")
    if state.phase == "ready":
        for host, words in sorted(tpu_vm.ask_hosts(vm, "status").items()):
            _say(f"{host}: {words}")


def _tpu_logs(arguments: _Tpu) -> int:
    vm = _tpu(arguments)
    if not tpu_vm.FollowedLog(vm, _say).follow():
        raise ValueError(
            f"the connection to {vm.name} ended; `maxmars launch tpu-vm status` tells."
        )
    return 0


def _tpu_stop(arguments: _Tpu) -> None:
    for host, words in sorted(tpu_vm.ask_hosts(_tpu(arguments), "stop").items()):
        _say(f"{host}: {words}")


def _tpu_delete(arguments: _Tpu) -> None:
    vm = _tpu(arguments)
    _say(f"{vm.name}: {'deleted' if vm.remove() else 'there is none'}")


def _start_gke(arguments: _StartGke, train: tuple[str, ...]) -> None:
    workdir = check_shared_workdir(arguments.workdir)
    nodes, slices = parse_topology(arguments.topology), arguments.num_slices
    chips = slices * nodes.hosts * nodes.chips_a_host
    job = _job(arguments, train, workdir, chips=chips, slices=slices)
    _check_jobset(arguments)
    cluster = gke.Gke(
        nodes=nodes,
        image=arguments.image,
        namespace=arguments.namespace,
        num_slices=slices,
        spot=arguments.spot,
        xpk=arguments.xpk,
        claims=gke.parse_claims(arguments.claim),
        max_restarts=arguments.max_restarts,
        service_account=arguments.service_account,
    )
    if arguments.dry_run:
        print(gke.describe(cluster, job), end="")
    else:
        gke.launch(cluster, job, say=_say)


def _check_jobset(arguments: _JobSet) -> None:
    tools.check_name(arguments.name, gke.LONGEST_NAME)
    tools.check_word(
        arguments.namespace, "--namespace", r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "default"
    )


def _gke_shows(commands: Callable[[str, str], Sequence[list[str]]]) -> Callable[[Any], int]:
    """An action that runs commands whose output is the user's to see."""

    def act(arguments: _JobSet) -> int:
        _check_jobset(arguments)
        tools.require("kubectl")
        found = [_show(command) for command in commands(arguments.name, arguments.namespace)]
        return max(found)

    return act


def _gke_delete(arguments: _JobSet) -> None:
    _check_jobset(arguments)
    tools.require("kubectl")
    gke.delete(arguments.name, arguments.namespace)
    _say(f"deleted JobSet {arguments.name}")


def _start_slurm(arguments: _StartSlurm, train: tuple[str, ...]) -> None:
    slurm.check_slurm_name(arguments.name)
    asked = slurm.Slurm(
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        process_per=arguments.process_per,
        partition=arguments.partition,
        account=arguments.account,
        qos=arguments.qos,
        constraint=arguments.constraint,
        time=arguments.time,
        cpus_per_task=arguments.cpus_per_task,
        mem=arguments.mem,
        max_restarts=arguments.max_restarts,
    )
    workdir = slurm.check_workdir(arguments.workdir)
    chips = arguments.nodes * arguments.gpus_per_node
    job = _job(arguments, train, workdir, chips=chips)
    if arguments.dry_run:
        print(slurm.script(asked, job, directory=Path.cwd()), end="")
    else:
        slurm.launch(asked, job, directory=Path.cwd(), say=_say)


def _slurm_shows(command: Callable[[str], list[str]]) -> Callable[[Any], int]:
    def act(arguments: _SlurmJob) -> int:
        tools.require("sbatch")
        return _show(command(slurm.check_slurm_name(arguments.name)))

    return act


def _show(command: list[str]) -> int:
    """Run a command with this terminal."""
    return subprocess.run(command).returncode


def _say(text: str) -> None:
    print(text, flush=True)


Action = tuple[type[Any], Callable[..., int | None]]

_PLATFORMS: Mapping[str, tuple[Action, Mapping[str, Action]]] = {
    "tpu-vm": (
        (_StartTpu, _start_tpu),
        {
            "status": (_Tpu, _tpu_status),
            "logs": (_Tpu, _tpu_logs),
            "stop": (_Tpu, _tpu_stop),
            "delete": (_Tpu, _tpu_delete),
        },
    ),
    "gke": (
        (_StartGke, _start_gke),
        {
            "status": (_JobSet, _gke_shows(lambda n, s: [gke.restarts(n, s), gke.status(n, s)])),
            "logs": (_JobSet, _gke_shows(lambda n, s: [gke.logs(n, s)])),
            "delete": (_JobSet, _gke_delete),
        },
    ),
    "slurm": (
        (_StartSlurm, _start_slurm),
        {
            "status": (_SlurmJob, _slurm_shows(slurm.status)),
            "stop": (_SlurmJob, _slurm_shows(slurm.stop)),
        },
    ),
}
