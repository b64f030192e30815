"""`maxmars plan`: memory, traffic and time of a run on chips that this machine need not have.

`maxmars.plan` compiles the step ahead of time. Before the first import of JAX the environment is
set here, so that JAX leaves this machine's accelerators alone, and has fake CPU devices for cpu:N.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from maxmars.cli.output import why_no_output
from maxmars.cli.parse import ConfigArguments, parse_arguments
from maxmars.config.checks import NotNegative, Positive, Rule, UsageError

if TYPE_CHECKING:
    from maxmars.plan import Topology

_FAKE = "--xla_force_host_platform_device_count"


@dataclass(frozen=True, kw_only=True)
class PlanArguments(ConfigArguments):
    """Print memory, traffic and time of a run on chips that this machine need not have.

    Compiles the train step and the evaluation step, and shows the memory of each chip, the bytes
    that it sends over each network, and the shortest time of a step. No chip of this machine is
    used, and several plans may run at once.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars plan gpt2:size=small,optimizer=mars --topology cpu:8 --mesh.fsdp 8",
        "maxmars plan gpt2:size=xl,optimizer=mars --topology v5p:2x2x4 --price 4.2",
    )
    FIRST: ClassVar[tuple[str, ...]] = (
        "topology",
        "num-slices",
        "remat",
        "max-memory",
        "price",
        "global-batch-size",
        "num-microbatches",
        "model.remat",
        "mesh.data",
        "mesh.fsdp",
    )

    topology: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Chips of the run (required): a TPU slice such as v5e:4x4, GPUs such as h100:8, or cpu:8. TPU
    slices (v4:2x2x4, v5e:4x4, v5p:4x4x8, v6e:8x8) need the extra `tpu`; GPUs, eight in a host
    (h100:8, h200:16), need the extra `cuda`; cpu:8 is eight fake CPU devices, whose compiler keeps
    more arrays in float32."""
    num_slices: Annotated[Positive[int], tyro.conf.arg(metavar="N")] = 1
    """Number of TPU slices of this shape; only `data` crosses the network between them."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSON file for the plan."""
    hlo: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the HLO text of the compiled train step; gzipped if the name ends in .gz."""
    price: Annotated[NotNegative[float] | None, tyro.conf.arg(metavar="MONEY")] = None
    """Price of one chip for an hour, in any currency; the plan then has the cost of the run."""
    max_memory: Annotated[
        float | Literal["chip"] | None,
        Rule(lambda size: size == "chip" or size > 0, "must be a positive number of GB, or chip"),
        tyro.conf.arg(metavar="GB|chip"),
    ] = None
    """Memory of a chip for the step, in GB; --num-microbatches None and --model.remat auto are
    chosen by it. None and `chip` are the memory that JAX gives to programs: a TPU's whole memory,
    three quarters of a GPU's."""
    remat: Literal["all"] | None = None
    """`all` compiles the step under every policy of rematerialisation, and prints a row for each,
    for a TPU in a minute or two. One policy is chosen by --model.remat."""


def run(argv: list[str]) -> int:
    """Run `maxmars plan`."""
    arguments = parse_arguments(PlanArguments, argv, prog="maxmars plan", example="gpt2")
    if arguments.topology is None:
        raise UsageError("maxmars plan needs --topology NAME: which chips? Such as v5e:4x4, cpu:8.")
    if arguments.remat is not None and arguments.hlo is not None:
        raise UsageError(
            "--hlo writes one program; name its policy with --model.remat, not --remat."
        )
    if problem := why_no_output(arguments.output):
        raise UsageError(problem)
    _choose_devices(arguments.topology)
    # Compilers log pages about a program that does not fit in memory.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    from maxmars.distributed.files import write_json
    from maxmars.distributed.progress import Progress

    compiling = f"compiling for {arguments.topology}"
    with Progress(quiet=True) as progress, progress.waiting(compiling):
        from maxmars.plan import get_topology  # loads JAX

        topology = get_topology(arguments.topology, arguments.num_slices)
        limit = _max_bytes(arguments.max_memory, topology.memory_bytes)
        plan = _plan_policies if arguments.remat == "all" else _plan
        report, overrides = plan(arguments, topology, limit)
    if arguments.output is not None:
        write_json(arguments.output, report | {"overrides": overrides})
    path = getattr(arguments.config.data, "path", None)  # a plan reads no data
    if path is not None and "://" not in path and not Path(path).exists():
        print(f"The tokens, {path}, are not on this machine; --data.path names others.")
    where, variables = ", on those chips", ""
    if topology.chip is None:
        where, variables = "", f"JAX_PLATFORMS=cpu XLA_FLAGS={_FAKE}={len(topology.devices)} "
    print(f"next{where}: {variables}{_train_command(argv, overrides)}")
    return 0


def _plan(
    arguments: PlanArguments, topology: Topology, limit: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Print the plan of a run; returns it as JSON values, and further options for `train`."""
    from maxmars.plan import make_plan
    from maxmars.plan.plan import print_plan

    config = arguments.config
    plan = make_plan(config, topology, price=arguments.price, memory_bytes=limit)
    print_plan(plan)
    if arguments.hlo is not None:
        opened = gzip.open if arguments.hlo.suffix == ".gz" else open
        with opened(arguments.hlo, "wt", encoding="utf-8") as file:
            file.write(plan.train_step.executable.as_text() or "")
    words = {}
    if arguments.max_memory is not None:  # `train` knows no --max-memory, so it gets the choices
        if config.num_microbatches is None:
            words["--num-microbatches"] = str(plan.config.microbatches)
        if config.model.remat == "auto":
            words["--model.remat"] = str(plan.config.model.remat)
    words |= dict(zip(plan.less_memory[::2], plan.less_memory[1::2], strict=True))
    return plan.to_json(), [word for item in words.items() for word in item]


def _plan_policies(
    arguments: PlanArguments, topology: Topology, limit: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Print a row for each policy of rematerialisation; returns the rows as JSON values, and the
    options with which `train` takes the fastest policy."""
    from maxmars.plan.policies import HEADER, best_policy, plan_policies

    print(HEADER, flush=True)
    policies = []
    for policy in plan_policies(arguments.config, topology, memory_bytes=limit):
        print(policy, flush=True)
        policies.append(policy)
    best = best_policy(policies)
    if not best.fits:
        raise ValueError(
            f"{best.config.name} fits on {topology.name} under no policy; raise --num-microbatches "
            "or --mesh.fsdp, or take more or larger chips."
        )
    return {"policies": [policy.to_json() for policy in policies]}, best.overrides


def _train_command(words: list[str], overrides: list[str]) -> str:
    """The command that trains what was planned: without the options that only `plan` has."""
    removed = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(PlanArguments)}
    removed.update(overrides[::2])  # which take the place of the user's
    train_words, rest = [], iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") not in removed:
            train_words.append(word)
        elif not equals:
            next(rest)  # its value, which every option of `plan` takes
    return shlex.join(["maxmars", "train", *train_words, *overrides])


def _choose_devices(topology: str) -> None:
    """Keep JAX away from this machine's accelerators, and give it fake CPU devices if asked."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if match := re.fullmatch(r"cpu:(\d+)", topology):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FAKE}={match[1]}".strip()


def _max_bytes(size: float | Literal["chip"] | None, chip_bytes: int | None) -> int | None:
    if size is None:
        return chip_bytes
    if size != "chip":
        return round(size * 1e9)
    if chip_bytes is None:
        raise UsageError("--max-memory needs a number of GB: a fake CPU device has no memory.")
    return chip_bytes
