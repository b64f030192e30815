"""`maxmars plan`: what a run needs on chips that need not be there."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from maxmars.cli.parse import ConfigArguments, parse_arguments
from maxmars.config import GPT2Config
from maxmars.config.checks import NotNegative, Positive, Rule, UsageError


@dataclass(frozen=True, kw_only=True)
class PlanArguments(ConfigArguments):
    """Print what a run needs on chips that need not be there: memory, traffic and time.

    Compiles the train step and the evaluation step, and says what each chip holds in memory, what
    it sends over which network, and how long a step takes at best. No chip of this machine is used,
    and several plans may run at once.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars plan gpt2:size=small,optimizer=mars --topology cpu:8 --mesh.fsdp 8",
        "maxmars plan gpt2:size=xl,optimizer=mars --topology v5p:2x2x4 --price 4.2",
    )
    FIRST: ClassVar[tuple[str, ...]] = (
        "topology",
        "num-slices",
        "max-memory",
        "price",
        "output",
        "global-batch-size",
        "num-microbatches",
        "model.remat",
        "mesh.data",
        "mesh.fsdp",
    )

    topology: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The chips: a TPU slice such as v5e:4x4, GPUs such as h100:8, or cpu:8. TPU slices (v4:2x2x4,
    v5e:4x4, v5p:4x4x8, v6e:8x8) need the extra `tpu`, GPUs, eight to a host (h100:8, h200:16), the
    extra `cuda`; cpu:8 is eight fake CPU devices, whose compiler keeps more in float32."""
    num_slices: Annotated[Positive[int], tyro.conf.arg(metavar="N")] = 1
    """TPU slices of that shape, joined by the data center's network, which only `data` crosses."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the plan to this JSON file."""
    hlo: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the text of the compiled train step to this file; compressed if it ends in .gz."""
    price: Annotated[NotNegative[float] | None, tyro.conf.arg(metavar="MONEY")] = None
    """Price of one chip for an hour, in any currency; gives the cost of the run."""
    max_memory: Annotated[
        float | Literal["chip"] | None,
        Rule(lambda size: size == "chip" or size > 0, "must be a positive number of GB, or chip"),
        tyro.conf.arg(metavar="GB|chip"),
    ] = None
    """Search for the cheapest rematerialisation and the largest microbatch that fit in so many GB a
    chip; `chip` is what JAX gives to programs, a TPU's whole memory, three quarters of a GPU's."""
    faster: bool = True
    """Also compile the step for one or two other meshes, fewer microbatches, matrices owned over
    `data` and, where `remat` was set, its other policies, and name what is over 5 % faster."""


def run(argv: list[str]) -> int:
    """Run `maxmars plan`."""
    arguments = parse_arguments(PlanArguments, argv, prog="maxmars plan", example="gpt2")
    if arguments.topology is None:
        raise UsageError("maxmars plan needs --topology NAME: which chips? Such as v5e:4x4, cpu:8.")
    _choose_devices(arguments.topology)
    if arguments.max_memory is not None:  # compilers log pages about a program that does not fit
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    from maxmars.distributed.files import write_json
    from maxmars.distributed.progress import Progress

    log = functools.partial(print, flush=True)
    config, step, overrides, faster = arguments.config, None, [], None
    with Progress(quiet=True) as progress:
        with progress.waiting(f"compiling for {arguments.topology}"):
            from maxmars.plan import get_topology, make_plan  # loads JAX
            from maxmars.plan.compile import compile_prepared
            from maxmars.plan.faster import find_faster
            from maxmars.plan.plan import print_plan

            topology = get_topology(arguments.topology, arguments.num_slices)
            if arguments.max_memory is not None:
                limit = _max_bytes(arguments.max_memory, topology.memory_bytes)
                config, step = compile_prepared(config, topology, max_bytes=limit, log=log)
                overrides = ["--num-microbatches", str(config.num_microbatches)]
                if isinstance(config.model, GPT2Config):
                    overrides += ["--model.remat", str(config.model.remat)]
            plan = make_plan(config, topology, price=arguments.price, train_step=step, log=log)
        print_plan(plan)
        if overrides:
            print(f"use: {' '.join(overrides)}")
        if arguments.faster and step is None:
            with progress.waiting("looking for a faster one"):
                faster = find_faster(config, plan, log=log)
    if faster is not None:
        print(f"faster: {faster}")
    if arguments.output is not None:
        others = {"overrides": overrides, "faster": None if faster is None else faster.to_json()}
        write_json(arguments.output, plan.to_json() | others)
    if arguments.hlo is not None:
        opened = gzip.open if arguments.hlo.suffix == ".gz" else open
        with opened(arguments.hlo, "wt", encoding="utf-8") as file:
            file.write(plan.train_step.executable.as_text() or "")
    print(f"next, on those chips: {_train_command(argv, overrides)}")
    return 0


def _train_command(words: list[str], overrides: list[str]) -> str:
    """The command that trains what was planned: without the options of `plan` alone."""
    own = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(PlanArguments)}
    own.update(overrides[::2])
    kept, rest = [], iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") not in own:
            kept.append(word)
        elif not equals:
            next(rest)
    return shlex.join(["maxmars", "train", *kept, *overrides])


def _choose_devices(topology: str) -> None:
    """Keep JAX away from this machine's accelerators, and give it fake CPU devices if asked."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if match := re.fullmatch(r"cpu:(\d+)", topology):
        flag = f"--xla_force_host_platform_device_count={match[1]}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def _max_bytes(size: float | Literal["chip"], chip_bytes: int | None) -> int:
    if size != "chip":
        return round(size * 1e9)
    if chip_bytes is None:
        raise UsageError("--max-memory needs a number of GB: a fake CPU device has no memory.")
    return chip_bytes
