"""`maxmars launch`: start a run on TPU VMs, a GKE cluster or SLURM, and look after it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxmars.cli.help import HELP, has_option
from maxmars.cli.parse import parse_arguments, parse_options, suggest_choice, translate_option
from maxmars.cli.train import TrainArguments
from maxmars.config import TrainConfig
from maxmars.config.checks import UsageError
from maxmars.config.load import load_config
from maxmars.config.mesh import check_mesh, choose_mesh, mesh_shape
from maxmars.config.user_code import sources_in
from maxmars.launch import gke, slurm, tpu_vm
from maxmars.launch.beforehand import (
    check_data_reach,
    check_gpus_reach,
    check_packages_reach,
    data_places,
    parameters,
)
from maxmars.launch.gke import GkeOptions, JobSet
from maxmars.launch.job import (
    Job,
    PackedCode,
    RunOptions,
    log,
    pack,
    remark,
    require,
    say_size,
    take_environment,
)
from maxmars.launch.slurm import SlurmName, SlurmOptions
from maxmars.launch.tpu_vm import TpuOptions, TpuVm

_USAGE = """\
usage: maxmars launch tpu-vm CONFIG --name NAME --workdir DIR
                             --zone ZONE --accelerator TYPE
       maxmars launch tpu-vm status|logs|stop|delete --name NAME --zone ZONE
       maxmars launch gke CONFIG --name NAME --workdir DIR --topology TOPOLOGY
       maxmars launch gke status|logs|delete --name NAME
       maxmars launch slurm CONFIG --name NAME --workdir DIR
                            --nodes N --gpus-per-node N
       maxmars launch slurm status|stop --name NAME

Start a run on other machines by your own gcloud, kubectl or sbatch. This
maxmars goes along as a wheel, with CONFIG, the files of your own that it names
and those of --include, all in the current folder. After a preemption the run
continues in its --workdir. What follows -- goes to `maxmars train`; --dry-run
prints the script or the JobSet, and runs nothing.

  maxmars launch slurm gpt2 --name run1 --workdir /shared/run1 \\
    --nodes 2 --gpus-per-node 8 -- --data.path /shared/openwebtext
  maxmars launch tpu-vm gpt2:size=xl,optimizer=mars --name run1 \\
    --zone us-east5-a --accelerator v5p-128 --spot --queued \\
    --setup mount.sh --workdir /mnt/runs/run1 \\
    -- --global-batch-size 512 --data.path /mnt/openwebtext

`maxmars launch PLATFORM --help` lists the options, and
`maxmars launch PLATFORM ACTION --help` those of an action."""

_HANDING_ON = ("--sbatch", "--srun", "--gcloud-flag")
_TOLD_BY_MACHINES = ("coordinator", "num_processes", "process_id")
_LARGE = 20_000_000
"""Parameters from which on a run without GPUs is hardly meant."""


def run(argv: list[str]) -> int:
    """Run `maxmars launch`."""
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in HELP:
        print(_USAGE)
        sys.exit(0)
    if name not in _PLATFORMS:
        raise UsageError(
            f"maxmars launch needs one of {', '.join(_PLATFORMS)}, not {name!r}. "
            "See `maxmars launch --help`."
        )
    platform = _PLATFORMS[name]
    if rest and rest[0] in platform.actions:
        target = parse_options(platform.target, rest[1:], prog=f"maxmars launch {name} {rest[0]}")
        target.check()
        require(platform.program)
        try:
            return platform.actions[rest[0]](target) or 0
        except KeyboardInterrupt:
            if rest[0] != "logs":
                raise
            log("\nno longer showing the log; the run goes on")
            return 130
    others = {action for other in _PLATFORMS.values() for action in other.actions}
    if rest and rest[0] in others:
        raise UsageError(
            f"maxmars launch {name} has no action {rest[0]}; its actions are "
            f"{', '.join(platform.actions)}. A CONFIG in that place starts a run."
        )
    end = rest.index("--") if "--" in rest else len(rest)
    given = _with_values(rest[:end])

    options = parse_options(
        platform.options,
        given,
        prog=f"maxmars launch {name}",
        hint=functools.partial(_of_train, f"maxmars launch {name}"),
    )
    return _start(platform, options, tuple(rest[end + 1 :]))


def _of_train(prog: str, options: RunOptions, word: str, value: str | None) -> str | None:
    """The line for an option of `maxmars train`, or a choice of CONFIG, that stands before --."""
    train = TrainArguments(config=load_config(options.config))
    ours, _ = translate_option(train, word) or (word.lstrip("-"), "")
    field = ours.replace("-", "_")
    if has_option(train, ours) and field not in _TOLD_BY_MACHINES:
        given = f"--{ours}" if isinstance(getattr(train, field, None), bool) else f"--{ours} VALUE"
        return f"`maxmars train` has --{ours}, which goes after --: `... -- {given}`."
    return suggest_choice(prog, options.config, word, value)


def _with_values(words: list[str]) -> list[str]:
    """The words, with another program's option joined to the option that hands it on."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in _HANDING_ON and word.startswith("-"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _start(platform: _Platform, options: Any, train: tuple[str, ...]) -> int:
    """Check a run as `maxmars train` would, and more, before anything is rented; then start it."""
    options.check()
    workdir, machines = options.shared_workdir(), platform.machines(options)
    environment = take_environment(options.env)
    sources = sources_in(load_config(options.config))
    try:
        parsed = parse_arguments(TrainArguments, [options.config, *train], prog="maxmars train")
    except UsageError as error:
        raise UsageError(f"after --: {error}") from error
    given = (parsed.workdir, parsed.coordinator, parsed.num_processes, parsed.process_id)
    if any(value is not None for value in given):
        raise UsageError(
            "--workdir goes before --, and the machines tell each process its place: leave "
            "--workdir, --coordinator, --num-processes and --process-id out after --."
        )
    if (named := list(map(repr, sources_in(parsed.config)))) != list(map(repr, sources)):
        raise UsageError(
            f"the functions {', '.join(named)} are not those that "
            f"{options.config} names, whose files go along; name them in the config file."
        )
    if machines.devices:
        mesh = choose_mesh(parsed.config.mesh, parsed.config.model, machines.network_size)
        check_mesh(parsed.config, mesh_shape(mesh, machines.devices, machines.slices))
    code = pack(options.config, sources=sources, scripts=options.scripts, include=options.include)
    platform.check(options, parsed.config, code)
    if not options.dry_run:
        require(platform.program)
    job = Job(
        name=options.name,
        code=code,
        workdir=workdir,
        train_arguments=train,
        environment=environment,
    )
    say_size(options.name, machines.hosts, machines.chips, machines.kind, options.price)
    if options.dry_run:
        print(platform.describe(options, job), end="")  # alone, as for `> run.yaml`
        values = f" and the values of {', '.join(environment)}" if environment else ""
        remark(
            f"dry run: nothing was started. What is printed lacks the {code.size}{values}; the "
            "same command without --dry-run brings all to the hosts."
        )
        return 0
    return platform.launch(options, job) or 0


class _Machines(NamedTuple):
    """What a run is started on."""

    hosts: int
    chips: int
    kind: str
    devices: int
    """As JAX counts; 0 if only the hosts know."""
    network_size: int
    """Devices that one fast network joins."""
    slices: int = 1


def _slices(options: TpuOptions | GkeOptions) -> _Machines:
    shape, slices = options.slice, options.num_slices
    return _Machines(
        hosts=slices * shape.num_hosts,
        chips=slices * shape.num_chips,
        kind=shape.chip.name,
        devices=slices * shape.num_devices,
        network_size=shape.network_size,
        slices=slices,
    )


def _nodes(options: SlurmOptions) -> _Machines:
    gpus = options.nodes * options.gpus_per_node
    return _Machines(
        hosts=options.nodes,
        chips=gpus or options.nodes,
        kind="GPU" if gpus else "CPU",
        devices=gpus,
        network_size=options.gpus_per_node,
    )


def _check_tpu(options: TpuOptions, config: TrainConfig, code: PackedCode) -> None:
    way = "mount or copy it by --setup FILE.sh"
    check_data_reach(config, options, code, mounts=(), way=way)
    check_packages_reach(config, options, has_package=False)


def _check_gke(options: GkeOptions, config: TrainConfig, code: PackedCode) -> None:
    mounts = [claim.partition(":")[2] for claim in options.claim]
    way = "mount it by --claim CLAIM:/PATH or --setup FILE.sh"
    if options.patch is None:  # which may mount anything
        check_data_reach(config, options, code, mounts=mounts, way=way)
    if options.install:
        check_packages_reach(config, options, has_package=False)


def _check_slurm(options: SlurmOptions, config: TrainConfig, code: PackedCode) -> None:
    size = options.gpus_per_node
    check_gpus_reach(options)
    if not options.may_have_other_packages:
        check_packages_reach(config, options, has_package=True)
    for option, path in data_places(config):
        if not path.startswith(("gs://", "/")):
            remark(
                f"warning: {option} {path} is relative: each node reads {Path.cwd() / path}, "
                "which must be on a disk that they share"
            )
    if not size and (count := parameters(config)) > _LARGE:
        remark(f"warning: {count / 1e6:.0f}M parameters train on CPUs, as --gpus-per-node is 0")
    if size and not options.asks_for_cores:
        remark(
            f"warning: no cores are asked for, and SLURM's default is one for {size} GPUs; "
            f"add --cpus-per-task, such as {8 * (size if options.process_per == 'node' else 1)}"
        )


def _ask_hosts(tpu: TpuVm, words: str) -> None:
    for host, state in sorted(tpu.ask_hosts(words).items()):
        log(f"{host}: {state}")


def _tpu_status(tpu: TpuVm) -> None:
    tpu = tpu.as_it_is()
    state = tpu.state()
    log(f"{tpu.name}: {state.text}")
    if state.phase == "ready":
        _ask_hosts(tpu, "status")


def _tpu_logs(tpu: TpuVm) -> None:
    ended, _ = tpu.as_it_is().follow_log()
    if not ended:
        raise ValueError(
            f"the connection to {tpu.name} ended; `maxmars launch tpu-vm status` tells."
        )


def _tpu_stop(tpu: TpuVm) -> None:
    _ask_hosts(tpu.as_it_is(), "stop")


def _tpu_delete(tpu: TpuVm) -> None:
    log(f"{tpu.name}: {'deleted' if tpu.as_it_is().remove() else 'there is none'}")


class _Platform(NamedTuple):
    program: str
    """The user's own, which does what is asked."""
    options: type[RunOptions]
    """Options that start a run."""
    machines: Callable[[Any], _Machines]
    check: Callable[[Any, TrainConfig, PackedCode], None]
    """Refuses what would fail there, and warns of what is unwise."""
    describe: Callable[[Any, Job], str]
    """What a dry run prints."""
    launch: Callable[[Any, Job], int | None]
    target: type[Any]
    """Options that name what an action is for."""
    actions: Mapping[str, Callable[[Any], int | None]]


_PLATFORMS = {
    "tpu-vm": _Platform(
        "gcloud",
        TpuOptions,
        _slices,
        _check_tpu,
        tpu_vm.describe,
        tpu_vm.launch,
        TpuVm,
        {"status": _tpu_status, "logs": _tpu_logs, "stop": _tpu_stop, "delete": _tpu_delete},
    ),
    "gke": _Platform(
        "kubectl",
        GkeOptions,
        _slices,
        _check_gke,
        gke.describe,
        gke.launch,
        JobSet,
        {"status": JobSet.show_status, "logs": JobSet.show_logs, "delete": JobSet.delete},
    ),
    "slurm": _Platform(
        "sbatch",
        SlurmOptions,
        _nodes,
        _check_slurm,
        slurm.script,
        slurm.launch,
        SlurmName,
        {"status": SlurmName.show_status, "stop": SlurmName.stop},
    ),
}
