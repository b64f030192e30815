"""`maxmars launch`: start a run on TPU VMs, a GKE cluster or SLURM, and look after it.

The platforms are rows of `_PLATFORMS`; their commands and files are in `maxmars.launch`. Here a
command line is split at `--`, and the part for `maxmars train` is parsed as `train` would, so that
a wrong option, mesh or path is refused before anything is rented.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxmars.cli.help import HELP, has_option
from maxmars.cli.parse import choice_hint, parse_arguments, parse_options, translate_option
from maxmars.cli.train import TrainArguments
from maxmars.config import TrainConfig
from maxmars.config.checks import UsageError
from maxmars.config.load import load_config
from maxmars.config.mesh import check_mesh, choose_mesh, mesh_shape
from maxmars.config.user_code import sources_in
from maxmars.launch import gke, job, preflight, slurm, tpu_vm

_USAGE = """\
usage: maxmars launch tpu-vm CONFIG --name NAME --workdir DIR
                             --zone ZONE --accelerator TYPE
       maxmars launch tpu-vm status|logs|stop|delete --name NAME --zone ZONE
       maxmars launch gke CONFIG --name NAME --workdir DIR --topology TOPOLOGY
       maxmars launch gke status|logs|delete --name NAME
       maxmars launch slurm CONFIG --name NAME --workdir DIR
                            --nodes N --gpus-per-node N
       maxmars launch slurm status|stop --name NAME

Start a run on other machines by your own gcloud, kubectl or sbatch. The
command copies this maxmars to them as a wheel, with CONFIG, your own files that
CONFIG names, and those of --include; all must be in the current folder. After a
preemption the run continues in its --workdir. Options after -- go to
`maxmars train`; --dry-run prints the script or the JobSet, and runs nothing.

  maxmars launch slurm gpt2 --name run1 --workdir /shared/run1 \\
    --nodes 2 --gpus-per-node 8 -- --data.path /shared/openwebtext
  maxmars launch tpu-vm gpt2:size=xl,optimizer=mars --name run1 \\
    --zone us-east5-a --accelerator v5p-128 --spot --queued \\
    --setup mount.sh --workdir /mnt/runs/run1 \\
    -- --global-batch-size 512 --data.path /mnt/openwebtext

`maxmars launch PLATFORM --help` lists the options, and
`maxmars launch PLATFORM ACTION --help` those of an action."""

_PASSTHROUGH_OPTIONS = ("--sbatch", "--srun", "--gcloud-flag")  # their values begin with -- too
_SET_BY_LAUNCHER = ("coordinator", "num_processes", "process_id")  # no hint leads to these
_LARGE = 20_000_000
"""Number of parameters above which a run without GPUs is probably a mistake."""


def run(argv: list[str]) -> int:
    """Run `maxmars launch`."""
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in HELP:
        print(_USAGE)
        return 0
    if name not in _PLATFORMS:
        raise UsageError(
            f"maxmars launch needs one of {', '.join(_PLATFORMS)}, not {name!r}. "
            "See `maxmars launch --help`."
        )
    platform = _PLATFORMS[name]
    if rest and rest[0] in platform.actions:
        target = parse_options(platform.target, rest[1:], prog=f"maxmars launch {name} {rest[0]}")
        target.check()
        job.require_program(platform.program)
        try:
            return platform.actions[rest[0]](target) or 0
        except KeyboardInterrupt:
            if rest[0] != "logs":
                raise
            job.log("\nno longer showing the log; the run goes on")
            return 130
    others = {action for other in _PLATFORMS.values() for action in other.actions}
    if rest and rest[0] in others:
        raise UsageError(
            f"maxmars launch {name} has no action {rest[0]}; its actions are "
            f"{', '.join(platform.actions)}. A CONFIG in that place starts a run."
        )
    end = rest.index("--") if "--" in rest else len(rest)
    options = parse_options(
        platform.options,
        _join_passthrough(rest[:end]),
        prog=f"maxmars launch {name}",
        hint=functools.partial(_suggest_train_option, f"maxmars launch {name}"),
    )
    return _start(platform, options, tuple(rest[end + 1 :]))


def _suggest_train_option(
    prog: str, options: job.RunOptions, word: str, value: str | None
) -> str | None:
    """A hint for an option of `maxmars train`, or a choice of CONFIG, that stands before --."""
    train = TrainArguments(config=load_config(options.config))
    option, _ = translate_option(train, word) or (word.lstrip("-"), "")
    field = option.replace("-", "_")
    if has_option(train, option) and field not in _SET_BY_LAUNCHER:
        is_switch = isinstance(getattr(train, field, None), bool)
        example = f"--{option}" if is_switch else f"--{option} VALUE"
        return f"`maxmars train` has --{option}, which goes after --: `... -- {example}`."
    return choice_hint(prog, options.config, word, value)


def _join_passthrough(words: list[str]) -> list[str]:
    """Join each option of another program to the option of ours that passes it on, as in
    --sbatch=--gres=gpu:8, so that tyro takes it for a value."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in _PASSTHROUGH_OPTIONS and word.startswith("-"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _start(platform: _Platform, options: Any, train: tuple[str, ...]) -> int:
    """Check a run before anything is rented, as `maxmars train` would and more; then start it."""
    options.check()
    workdir, machines = options.shared_workdir(), platform.machines(options)
    environment = job.capture_environment(options.env)
    sources = sources_in(load_config(options.config))
    try:
        parsed = parse_arguments(TrainArguments, [options.config, *train], prog="maxmars train")
    except UsageError as error:
        raise UsageError(f"after --: {error}") from error
    placement = (parsed.workdir, parsed.coordinator, parsed.num_processes, parsed.process_id)
    if any(value is not None for value in placement):
        raise UsageError(
            "--workdir goes before --, and the launcher gives each process its number: leave "
            "--workdir, --coordinator, --num-processes and --process-id out after --."
        )
    # By their names: files are packed by path, and a `Source` equals its copy at another path.
    if (parsed_sources := list(map(repr, sources_in(parsed.config)))) != list(map(repr, sources)):
        raise UsageError(
            f"the functions {', '.join(parsed_sources)} are not those that {options.config} names, "
            "whose files go along; name them in the config file."
        )
    if machines.devices:  # else the mesh is that of the hosts' CPUs
        mesh = choose_mesh(parsed.config.mesh, parsed.config.model, machines.network_size)
        check_mesh(parsed.config, mesh_shape(mesh, machines.devices, machines.slices))
    code = job.pack(
        options.config, sources=sources, scripts=options.scripts, include=options.include
    )
    platform.check(options, parsed.config, code)
    if not options.dry_run:
        job.require_program(platform.program)
    new_job = job.Job(
        name=options.name,
        code=code,
        workdir=workdir,
        train_arguments=train,
        environment=environment,
    )
    job.print_size(options.name, machines.hosts, machines.chips, machines.kind, options.price)
    if options.dry_run:
        print(platform.describe(options, new_job), end="")  # alone on stdout, for `> run.yaml`
        values = f" and the values of {', '.join(environment)}" if environment else ""
        job.print_stderr(
            f"dry run: nothing was started. What is printed lacks the {code.size}{values}; the "
            "same command without --dry-run brings all to the hosts."
        )
        return 0
    return platform.launch(options, new_job) or 0


class _Machines(NamedTuple):
    """The machines that a run asks for."""

    hosts: int
    chips: int
    kind: str
    devices: int
    """Number of JAX devices; 0 if unknown here, as without GPUs under SLURM."""
    network_size: int
    """Number of devices that one fast network joins."""
    slices: int = 1


def _slice_machines(options: tpu_vm.TpuOptions | gke.GkeOptions) -> _Machines:
    shape, slices = options.slice, options.num_slices
    return _Machines(
        hosts=slices * shape.num_hosts,
        chips=slices * shape.num_chips,
        kind=shape.chip.name,
        devices=slices * shape.num_devices,
        network_size=shape.network_size,
        slices=slices,
    )


def _slurm_machines(options: slurm.SlurmOptions) -> _Machines:
    gpus = options.nodes * options.gpus_per_node
    return _Machines(
        hosts=options.nodes,
        chips=gpus or options.nodes,  # without GPUs, --price is that of a node
        kind="GPU" if gpus else "CPU",
        devices=gpus,
        network_size=options.gpus_per_node,
    )


def _check_tpu(options: tpu_vm.TpuOptions, config: TrainConfig, code: job.PackedCode) -> None:
    way_out = "mount or copy it by --setup FILE.sh"
    preflight.check_data(config, options, code, mounts=(), way_out=way_out)
    preflight.check_packages(config, options, shares_packages=False)


def _check_gke(options: gke.GkeOptions, config: TrainConfig, code: job.PackedCode) -> None:
    mounts = [claim.partition(":")[2] for claim in options.claim]
    way_out = "mount it by --claim CLAIM:/PATH or --setup FILE.sh"
    if options.patch is None:  # a patch may mount anything
        preflight.check_data(config, options, code, mounts=mounts, way_out=way_out)
    if options.install:
        preflight.check_packages(config, options, shares_packages=False)


def _check_slurm(options: slurm.SlurmOptions, config: TrainConfig, code: job.PackedCode) -> None:
    size = options.gpus_per_node
    preflight.check_gpus(options)
    if not options.may_have_other_packages:
        preflight.check_packages(config, options, shares_packages=True)
    for option, path in preflight.data_paths(config):
        if not path.startswith(("gs://", "/")):
            job.print_stderr(
                f"warning: {option} {path} is relative: each node reads {Path.cwd() / path}, "
                "which must be on a disk that they share"
            )
    if not size and (count := preflight.estimate_parameters(config)) > _LARGE:
        job.print_stderr(
            f"warning: {count / 1e6:.0f}M parameters train on CPUs, as --gpus-per-node is 0"
        )
    if size and not options.asks_for_cores:
        job.print_stderr(
            f"warning: no cores are requested, and SLURM's default is one for {size} GPUs; "
            f"add --cpus-per-task, such as {8 * (size if options.process_per == 'node' else 1)}"
        )


def _print_states_after(tpu: tpu_vm.TpuVm, words: str) -> None:
    for host, state in sorted(tpu.run_on_hosts(words).items()):
        job.log(f"{host}: {state}")


def _tpu_status(tpu: tpu_vm.TpuVm) -> None:
    tpu = tpu.as_deployed()
    state = tpu.state()
    job.log(f"{tpu.name}: {state.text}")
    if state.phase == "ready":
        _print_states_after(tpu, "status")


def _tpu_logs(tpu: tpu_vm.TpuVm) -> None:
    ended, _ = tpu.as_deployed().follow_log()
    if not ended:
        raise ValueError(
            f"the connection to {tpu.name} ended; `maxmars launch tpu-vm status` tells."
        )


def _tpu_stop(tpu: tpu_vm.TpuVm) -> None:
    _print_states_after(tpu.as_deployed(), "stop")


def _tpu_delete(tpu: tpu_vm.TpuVm) -> None:
    job.log(f"{tpu.name}: {'deleted' if tpu.as_deployed().remove() else 'there is none'}")


class _Platform(NamedTuple):
    program: str
    """The user's program that must be installed."""
    options: type[job.RunOptions]
    """Options of the command that starts a run."""
    machines: Callable[[Any], _Machines]
    check: Callable[[Any, TrainConfig, job.PackedCode], None]
    """Refuses a run that would fail there, and warns of likely mistakes."""
    describe: Callable[[Any, job.Job], str]
    """Returns the text of a dry run."""
    launch: Callable[[Any, job.Job], int | None]
    target: type[Any]
    """Options of an action, which name its run."""
    actions: Mapping[str, Callable[[Any], int | None]]


_PLATFORMS = {
    "tpu-vm": _Platform(
        "gcloud",
        tpu_vm.TpuOptions,
        _slice_machines,
        _check_tpu,
        tpu_vm.describe,
        tpu_vm.launch,
        tpu_vm.TpuVm,
        {"status": _tpu_status, "logs": _tpu_logs, "stop": _tpu_stop, "delete": _tpu_delete},
    ),
    "gke": _Platform(
        "kubectl",
        gke.GkeOptions,
        _slice_machines,
        _check_gke,
        gke.describe,
        gke.launch,
        gke.JobSet,
        {
            "status": gke.JobSet.show_status,
            "logs": gke.JobSet.show_logs,
            "delete": gke.JobSet.delete,
        },
    ),
    "slurm": _Platform(
        "sbatch",
        slurm.SlurmOptions,
        _slurm_machines,
        _check_slurm,
        slurm.script,
        slurm.launch,
        slurm.SlurmName,
        {"status": slurm.SlurmName.show_status, "stop": slurm.SlurmName.stop},
    ),
}
