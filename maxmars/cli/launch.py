"""`maxmars launch`: start a run on TPU VMs, a GKE cluster or SLURM, and look after it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxmars.cli.parse import (
    HELP,
    choice_meant,
    options_of,
    parse_arguments,
    parse_options,
    split_positionals,
)
from maxmars.cli.train import TrainArguments
from maxmars.config import TrainConfig
from maxmars.config.checks import UsageError
from maxmars.config.load import load_config, named_configs
from maxmars.config.mesh import check_mesh, choose_mesh, mesh_shape
from maxmars.config.user_code import sources_in
from maxmars.launch import gke, slurm, tpu_vm
from maxmars.launch.beforehand import (
    check_data_reach,
    check_trackers_reach,
    parameters,
    token_directories,
)
from maxmars.launch.gke import GkeOptions, JobSet
from maxmars.launch.job import (
    Job,
    PackedCheckout,
    RunOptions,
    check_shared_workdir,
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

Start a run on other machines by your own gcloud, kubectl or sbatch. The
checkout that this maxmars runs from goes along, at its present state. After a
preemption the run continues in its --workdir. What follows -- goes to
`maxmars train`; --dry-run prints every command and file, and runs nothing.

  maxmars launch slurm gpt2 --name run1 --workdir /shared/run1 \\
    --nodes 2 --gpus-per-node 8 -- --data.path /shared/openwebtext
  maxmars launch tpu-vm gpt2:size=xl,optimizer=mars --name run1 \\
    --zone us-east5-a --accelerator v5p-128 --spot --queued \\
    --setup mount.sh --workdir /mnt/runs/run1 \\
    -- --global-batch-size 512 --data.path /mnt/openwebtext

`maxmars launch PLATFORM --help` lists the options, and
`maxmars launch PLATFORM ACTION --help` those of an action."""

_HANDING_ON = ("--sbatch", "--srun", "--gcloud-flag")
_MOST_NAMED = 20
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
        try:
            return platform.actions[rest[0]](target) or 0
        except KeyboardInterrupt:
            if rest[0] != "logs":
                raise
            log("\nno longer showing the log; the run goes on")
            return 130
    _refuse_other_action(name, rest[:1])
    end = rest.index("--") if "--" in rest else len(rest)
    given = _with_values(rest[:end])

    def meant(word: str, value: str | None) -> str:
        """A hint at an option of `maxmars train`, or a choice of CONFIG, that stands before --."""
        spec = next(iter(split_positionals(given)[0]), "")
        try:
            config = load_config(spec)
        except UsageError:
            return ""
        if word in options_of(TrainArguments, TrainArguments(config=config)):
            return f" (an option of `maxmars train`, which goes after --: `... -- {word} VALUE`)"
        return choice_meant(f"maxmars launch {name}", spec, word, value)

    prog = f"maxmars launch {name}"
    options = parse_options(platform.options, given, prog=prog, meant=meant)
    return platform.start(options, tuple(rest[end + 1 :])) or 0


def _refuse_other_action(name: str, first: list[str]) -> None:
    """Refuse a word in the place of CONFIG that is no config, but like an action of a platform."""
    actions = {action for platform in _PLATFORMS.values() for action in platform.actions}
    known = named_configs()
    for word in first:
        closest = difflib.get_close_matches(word, [*known, *sorted(actions)], n=1)
        if word.isalpha() and word not in known and actions.intersection(closest):
            raise UsageError(
                f"maxmars launch {name} has no action {word}; its actions are "
                f"{', '.join(_PLATFORMS[name].actions)}. A CONFIG in that place starts a run."
            )


def _with_values(words: list[str]) -> list[str]:
    """The words, with another program's option joined to the option that hands it on."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in _HANDING_ON and word.startswith("-"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _job(
    options: RunOptions,
    train: tuple[str, ...],
    workdir: str,
    *,
    chips: int,
    slices: int = 1,
    network_size: int = 1,
    prolog: Path | None = None,
    check: Callable[[TrainConfig, PackedCheckout], None],
) -> Job:
    """The run, checked as `maxmars train` would, and by `check`: before anything is rented."""
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
    if (given := list(map(repr, sources_in(parsed.config)))) != list(map(repr, sources)):
        raise UsageError(
            f"the functions {', '.join(given)} are not those that "
            f"{options.config} names, whose files go along; name them in the config file."
        )
    if chips:
        mesh = choose_mesh(parsed.config.mesh, parsed.config.model, network_size)
        check_mesh(parsed.config, mesh_shape(mesh, chips, slices))
    checkout = pack(
        options.config,
        sources=sources,
        setup=options.setup,
        prolog=prolog,
        include=options.include,
    )
    if files := checkout.untracked:
        more = f" and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
        names = ", ".join(files[:_MOST_NAMED])
        remark(f"git does not track, and goes along: {names}{more}")
    check(parsed.config, checkout)
    return Job(
        name=options.name,
        checkout=checkout,
        workdir=workdir,
        train_arguments=train,
        environment=take_environment(options.env),
    )


def _start_tpu(options: TpuOptions, train: tuple[str, ...]) -> int:
    options.check()
    workdir = check_shared_workdir(options.workdir)
    chips, slices = options.num_chips, options.num_slices

    def check(config: TrainConfig, checkout: PackedCheckout) -> None:
        way = "mount or copy it by --setup FILE.sh"
        check_data_reach(config.data, options, checkout, mounts=(), way=way)
        check_trackers_reach(config.log, options, has_package=False)

    job = _job(
        options,
        train,
        workdir,
        chips=chips,
        slices=slices,
        network_size=chips // slices,
        check=check,
    )
    shape = options.slice
    hosts = slices * shape.num_hosts
    say_size(options.name, hosts, slices * shape.num_chips, shape.chip.name, options.price)
    if options.dry_run:
        print(tpu_vm.describe(options, job), end="")
        return 0
    try:
        return tpu_vm.Launcher(options, job).run()
    except KeyboardInterrupt:
        log(
            "\nno longer watching: the run goes on, but nothing restarts it after a preemption. "
            "The same command watches again; `maxmars launch tpu-vm stop` ends the run."
        )
        return 130


def _found(tpu: TpuVm) -> TpuVm:
    tpu.check()
    require("gcloud")
    return tpu.as_it_is()


def _ask_hosts(tpu: TpuVm, words: str) -> None:
    for host, state in sorted(tpu.ask_hosts(words).items()):
        log(f"{host}: {state}")


def _tpu_status(tpu: TpuVm) -> None:
    tpu = _found(tpu)
    state = tpu.state()
    log(f"{tpu.name}: {state.text}")
    if state.phase == "ready":
        _ask_hosts(tpu, "status")


def _tpu_logs(tpu: TpuVm) -> None:
    ended, _ = _found(tpu).follow_log()
    if not ended:
        raise ValueError(
            f"the connection to {tpu.name} ended; `maxmars launch tpu-vm status` tells."
        )


def _tpu_stop(tpu: TpuVm) -> None:
    _ask_hosts(_found(tpu), "stop")


def _tpu_delete(tpu: TpuVm) -> None:
    log(f"{tpu.name}: {'deleted' if _found(tpu).remove() else 'there is none'}")


def _start_gke(options: GkeOptions, train: tuple[str, ...]) -> None:
    options.check()
    workdir = check_shared_workdir(options.workdir)
    slices, shape = options.num_slices, options.slice
    chips, size = slices * shape.num_devices, shape.network_size

    def check(config: TrainConfig, checkout: PackedCheckout) -> None:
        mounts = [claim.partition(":")[2] for claim in options.claim]
        way = "mount it by --claim CLAIM:/PATH or --setup FILE.sh"
        if options.patch is None:  # which may mount anything
            check_data_reach(config.data, options, checkout, mounts=mounts, way=way)
        if options.install:
            check_trackers_reach(config.log, options, has_package=False)

    job = _job(options, train, workdir, chips=chips, slices=slices, network_size=size, check=check)
    hosts = slices * shape.num_hosts
    say_size(options.name, hosts, slices * shape.num_chips, shape.chip.name, options.price)
    if options.dry_run:
        print(gke.describe(options, job), end="")
    else:
        gke.launch(options, job)


def _start_slurm(options: SlurmOptions, train: tuple[str, ...]) -> None:
    options.check()
    workdir = options.absolute_workdir()
    size = options.gpus_per_node
    chips, prolog = options.nodes * size, options.prolog

    def check(config: TrainConfig, checkout: PackedCheckout) -> None:
        if prolog is None:
            check_trackers_reach(config.log, options, has_package=True)
        for path in token_directories(config.data):
            if not path.startswith(("gs://", "/")):
                remark(
                    f"warning: --data.path {path} is relative: each node reads "
                    f"{Path.cwd() / path}, which must be on a disk that they share"
                )
        if not chips and (count := parameters(config)) > _LARGE:
            remark(f"warning: {count / 1e6:.0f}M parameters train on CPUs, as --gpus-per-node is 0")
        if size and not options.asks_for_cores:
            remark(
                f"warning: no cores are asked for, and SLURM's default is one for {size} GPUs; "
                f"add --cpus-per-task, such as {8 * (size if options.process_per == 'node' else 1)}"
            )

    job = _job(options, train, workdir, chips=chips, network_size=size, prolog=prolog, check=check)
    kind = "GPU" if size else "CPU"
    say_size(options.name, options.nodes, chips or options.nodes, kind, options.price)
    if options.dry_run:
        print(slurm.script(options, job, directory=Path.cwd()), end="")
    else:
        slurm.launch(options, job, directory=Path.cwd())


class _Platform(NamedTuple):
    options: type[RunOptions]
    """Options that start a run."""
    start: Callable[[Any, tuple[str, ...]], int | None]
    """Starts a run; takes the options and the words after `--`."""
    target: type[Any]
    """Options that name what an action is for."""
    actions: Mapping[str, Callable[[Any], int | None]]


_PLATFORMS = {
    "tpu-vm": _Platform(
        TpuOptions,
        _start_tpu,
        TpuVm,
        {"status": _tpu_status, "logs": _tpu_logs, "stop": _tpu_stop, "delete": _tpu_delete},
    ),
    "gke": _Platform(
        GkeOptions,
        _start_gke,
        JobSet,
        {"status": JobSet.show_status, "logs": JobSet.show_logs, "delete": JobSet.delete},
    ),
    "slurm": _Platform(
        SlurmOptions,
        _start_slurm,
        SlurmName,
        {"status": SlurmName.show_status, "stop": SlurmName.stop},
    ),
}
