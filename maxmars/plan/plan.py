"""The plan of a run: memory, traffic and time on a topology, as a value, as JSON and as tables.

`make_plan` compiles the train step that `train` runs, and the evaluation step, for devices that
need not be there, and takes memory, collectives and time from the compiled programs. Microbatches
and the policy of rematerialisation are those that `train` would choose there.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import rich
import rich.box
from jax.sharding import Mesh
from rich.table import Column, Table

from maxmars import __version__
from maxmars.config import (
    MarsConfig,
    ModuleConfig,
    MuonConfig,
    OptimizerConfig,
    TrainConfig,
    to_dict,
)
from maxmars.config.chips import Network
from maxmars.data.batches import batch_types
from maxmars.model.attention import choose_attention
from maxmars.model.parameters import Parameters
from maxmars.optim import MatrixGroup, orthogonalization_groups
from maxmars.plan.clock import ATTENTION_SHARE, LAUNCH_S, MEMORY_SHARE, PRODUCTS, PRODUCTS_SHARE
from maxmars.plan.collectives import Collective, Phase, wire_bytes
from maxmars.plan.compile import (
    ChipMemory,
    Compiled,
    CompiledTrainStep,
    chip_memory,
    compile_eval_step,
    compile_train_step,
    soap_exchanged_bytes,
)
from maxmars.plan.topology import Topology
from maxmars.train.auto import less_memory, less_memory_hint, slow_network_warning
from maxmars.train.optimizer import summarize_rules, update_rules
from maxmars.train.resolve import Resolved, resolve_config
from maxmars.train.step import make_train_step

_TPU_CLOCK = (
    "no step was timed on a TPU: the clock is the compiler's, which charges bfloat16 elementwise "
    "work as float32; at the memory's rate it takes the time of its bytes; loops of windowed "
    "einsums are overcharged by 32 to 81% where measured"
)
_GPU_CLOCK = (
    f"the clock: products run at {PRODUCTS_SHARE:.0%} of the published FLOP/s, attention at "
    f"{ATTENTION_SHARE:.0%}, all else at {MEMORY_SHARE:.0%} of the memory's rate, and no kernel in "
    f"under {1e6 * LAUNCH_S:.1f} us, as on an H200, whose measured steps (2026-11-28, JAX 0.11.2) "
    "differ by up to 7%; no other GPU was measured; collectives run at the networks' published "
    "rates, beside what runs meanwhile"
)
_NO_CLOCK = (
    "the cycles a second of this chip are unknown, so there is no clock: the times are those of "
    "the matrix products at the published bfloat16 FLOP/s, and lower bounds"
)
_NOT_COUNTED = "evaluation, checkpoints, compilation and restarts are not counted"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The collectives of one step with the same operation, axes, network and phase."""

    op: str
    axes: tuple[str, ...] | None
    """Mesh axes; None if the groups of devices fit no axes."""
    network: Network
    phase: Phase
    count: int
    """Number of executions."""
    bytes: int
    """Bytes of the results on one chip (reduce-scatter: of the operands)."""
    wire_bytes: float
    """Bytes that a chip sends, on rings."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one step over all chips."""

    model: int
    """6 N + 12 L d T a token, the numerator of MFU (`model.Parameters.flops_per_token`)."""
    hardware: int
    """FLOPs of all matrix products, recomputation and optimizer included."""
    optimizer: int
    """The part of `hardware` in the optimizer."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory, traffic and time of a run on a topology; see `make_plan`."""

    config: TrainConfig
    """The config with the `num_microbatches`, `remat` and `compute_dtype` that `train` chooses."""
    topology: Topology
    mesh: Mesh
    num_parameters: int
    memory: ChipMemory
    collectives: tuple[Traffic, ...]
    """Collectives of one train step."""
    exchange: tuple[MatrixGroup, ...]
    """Equal matrices that go to their owners together; empty without orthogonalisation."""
    flops: Flops
    price: float | None
    """Price of a chip for an hour, in any currency."""
    train_step: CompiledTrainStep
    eval_step: Compiled | None
    """None if the config never evaluates, or by `make_plan(..., evaluate=False)`."""
    fits: bool
    """Whether the step fits in the memory that it may use."""
    less_memory: tuple[str, ...]
    """Words of a command line to try next if the step does not fit."""
    messages: tuple[str, ...] = ()
    """Lines about choices of the resolved config, and warnings."""

    @property
    def compute_bound_seconds(self) -> float:
        """Seconds of a step's matrix products at the published FLOP/s; `inf` for fake devices."""
        if self.topology.chip is None:
            return math.inf
        return self.flops.hardware / (self.mesh.size * self.topology.chip.peak_flops)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step by the clock; without a clock, its compute bound."""
        clock = self.train_step.clock
        return self.compute_bound_seconds if clock is None else clock.seconds

    @property
    def at_memory_rate_seconds(self) -> float | None:
        """Seconds of a step by a TPU's clock, at the memory's rate; None without such a clock."""
        clock, chip = self.train_step.clock, self.topology.chip
        return clock.at_memory_rate_seconds if clock and chip and chip.is_tpu else None

    def mfu(self, seconds: float) -> float:
        """Model FLOPs of a step of `seconds`, divided by the chips' peak FLOPs in this time."""
        assert self.topology.chip is not None
        return self.flops.model / (self.mesh.size * self.topology.chip.peak_flops * seconds)

    @property
    def tokens_per_day(self) -> float:
        return self.config.tokens_per_step / self.step_seconds * 86400

    @property
    def days(self) -> float:
        """Days for all steps of the config."""
        return self.step_seconds * self.config.num_steps / 86400

    @property
    def cost(self) -> float | None:
        """Price of a chip and hour times chips times hours; None without a price."""
        chip = self.topology.chip
        if self.price is None or chip is None:
            return None
        num_chips = self.mesh.size / chip.devices  # a chip may be two devices of JAX
        return self.price * num_chips * self.days * 24

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of matrices on a device that go to their owners and back in a step."""
        optimizer = self.config.optimizer
        if not isinstance(optimizer, MarsConfig | MuonConfig):
            return 0
        elements = sum(group.transfer_elements for group in self.exchange)
        return jnp.dtype(optimizer.ns_dtype).itemsize * elements

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions of the plan's times, in words."""
        chip = self.topology.chip
        if chip is None:
            return ()
        clock = _TPU_CLOCK if chip.is_tpu else _GPU_CLOCK
        return (_NO_CLOCK if self.train_step.clock is None else clock, _NOT_COUNTED)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready values; bytes are of one device and one step."""
        chip, exchange, step = self.topology.chip, self.exchange, self.eval_step
        clock = self.train_step.clock
        return {
            "maxmars": __version__,
            "jax": jax.__version__,
            "config": to_dict(self.config),
            "topology": self.topology.name,
            "num_slices": self.topology.num_slices,
            "num_devices": self.mesh.size,
            "device_kind": self.mesh.devices.flat[0].device_kind,
            "chip": None if chip is None else dataclasses.asdict(chip),
            "mesh": dict(self.mesh.shape),
            "num_parameters": self.num_parameters,
            "memory": dataclasses.asdict(self.memory),
            "collectives": [dataclasses.asdict(row) for row in self.collectives],
            "orthogonalization": None
            if not exchange
            else {
                "elements": sum(group.elements for group in exchange),
                "padded_elements": sum(group.padded_elements for group in exchange),
                "transfer_bytes": self.exchanged_bytes,
            },
            "flops": dataclasses.asdict(self.flops),
            "time": self._time_json(),
            "clock": None if clock is None else dataclasses.asdict(clock),
            "assumptions": list(self.assumptions),
            "eval": None
            if step is None
            else {
                "peak_bytes": step.peak_bytes,
                "compiler": step.memory,
                "collectives": [
                    dataclasses.asdict(row)
                    for row in traffic(step.collectives, self.mesh, self.topology)
                ],
                "lower_time_s": step.lower_s,
                "compile_time_s": step.compile_s,
            },
            "lower_time_s": self.train_step.lower_s,
            "compile_time_s": self.train_step.compile_s,
        }

    def _time_json(self) -> dict[str, Any] | None:
        if self.topology.chip is None:
            return None
        at_memory_rate = self.at_memory_rate_seconds
        return {
            "step_time_s": self.step_seconds,
            "step_time_at_memory_rate_s": at_memory_rate,
            "compute_bound_s": self.compute_bound_seconds,
            "mfu": self.mfu(self.step_seconds),
            "mfu_at_memory_rate": None if at_memory_rate is None else self.mfu(at_memory_rate),
            "tokens_per_day": self.tokens_per_day,
            "days": self.days,
            "cost": self.cost,
        }


def make_plan(
    config: TrainConfig,
    topology: Topology,
    *,
    price: float | None = None,
    evaluate: bool = True,
    memory_bytes: int | None = None,
) -> Plan:
    """Compile a run's programs for a topology and plan memory, traffic and time from them.

    Args:
      config: the run; its mesh must fit the topology.
      topology: from `get_topology`.
      price: price of a chip for an hour, in any currency.
      evaluate: whether to compile the evaluation step as well.
      memory_bytes: memory of a chip that the step may use, by which `train` would choose
        microbatches and policy; None is the memory that JAX gives to programs.

    Raises:
      ValueError: the mesh fits neither the devices nor the model and its batch.
      DoesNotFitError: the compiler refuses a program that the chip has no memory for.
    """
    resolved = resolve_on(config, topology, memory_bytes)
    config, parameters, messages = resolved.config, resolved.parameters, [*resolved.messages]
    mesh, types = parameters.mesh, batch_types(config.data, config.model)
    train_step = make_train_step(config, parameters, types)
    chip, step = topology.chip, compile_train_step(train_step, topology)
    rows = traffic(step.collectives, mesh, topology)
    if chip is not None and not chip.is_tpu:
        # Gradients must cross the slow network (`data`); weights and activations need not.
        crossing_bytes = sum(
            row.wire_bytes
            for row in rows
            if row.network == "DCN" and (row.axes is None or {"fsdp", "tensor"} & {*row.axes})
        )
        sent = f"{crossing_bytes / 1e9:.1f} GB a GPU and step"
        networks = topology.networks(list(mesh.devices.flat))
        warning = slow_network_warning(config, mesh, networks, topology.name, sent)
        messages += [] if warning is None else [warning]
    if exchanged := soap_exchanged_bytes(step.state.opt_state):
        owners = mesh.shape["fsdp"] * mesh.shape["tensor"]
        messages.append(
            f"SOAP: {_mb(exchanged)} MB of its state on a chip go to the owners of whole matrices "
            f"and back in each step, as mesh.fsdp x mesh.tensor = {owners} does not divide a stack "
            "of layers; where it does, they stay with their owners"
        )
    limit = memory_bytes or topology.memory_bytes
    fits = limit is None or step.peak_bytes <= limit
    if limit is not None and not fits:
        messages.append(
            f"warning: the step takes {step.peak_bytes / 1e9:.2f} GB of a chip, and may take "
            f"{limit / 1e9:.2f} GB: {less_memory_hint(config, parameters)}"
        )
    memory = chip_memory(step, chip)
    flops = Flops(
        model=parameters.flops_per_token * config.tokens_per_step,
        hardware=step.flops.total(),
        optimizer=step.flops["optimizer"],
    )
    eval_step = None
    if evaluate and config.eval.every is not None:
        eval_step = compile_eval_step(config, step.state.params, mesh, topology)
    return Plan(
        config=config,
        topology=topology,
        mesh=mesh,
        num_parameters=parameters.count,
        memory=memory,
        collectives=rows,
        exchange=_exchange(config.optimizer, parameters),
        flops=flops,
        price=price,
        train_step=step,
        eval_step=eval_step,
        fits=fits,
        less_memory=() if fits else tuple(less_memory(config, parameters)),
        messages=tuple(messages),
    )


def traffic(
    collectives: Iterable[Collective], mesh: Mesh, topology: Topology
) -> tuple[Traffic, ...]:
    """Sum collectives by operation, axes, network and phase; most bytes come first."""
    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for c in collectives:
        groups[c.op, c.axes, topology.network(c, mesh), c.phase].append(c)
    rows = [
        Traffic(
            op=op,
            axes=axes,
            network=network,
            phase=phase,
            count=sum(c.count for c in members),
            bytes=sum(c.bytes for c in members),
            wire_bytes=sum(map(wire_bytes, members)),
        )
        for (op, axes, network, phase), members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def resolve_on(
    requested: TrainConfig, topology: Topology, memory_bytes: int | None = None
) -> Resolved:
    """Resolve a config as `train` would on a topology; see `make_plan`."""
    parameters = Parameters(requested.model, topology.mesh(requested))
    return resolve_config(requested, parameters, memory_bytes=memory_bytes or topology.memory_bytes)


def _exchange(optimizer: OptimizerConfig, parameters: Parameters) -> tuple[MatrixGroup, ...]:
    """The matrices that the optimizer exchanges; none if it orthogonalises none."""
    if not isinstance(optimizer, MarsConfig | MuonConfig):
        return ()
    rules = jax.tree.leaves(update_rules(optimizer, parameters))
    specs = jax.tree.leaves(parameters.split_specs(optimizer.qkv))
    orthogonalized = [
        (leaf, spec)
        for leaf, rule, spec in zip(jax.tree.leaves(parameters.sharded), rules, specs, strict=True)
        if rule.orthogonalizes
    ]
    if not orthogonalized:
        return ()
    matrices, specs = map(list, zip(*orthogonalized, strict=True))
    mesh = parameters.mesh
    axes = mesh.axis_names if optimizer.own_over_data else None  # None: fsdp and tensor
    return orthogonalization_groups(matrices, specs, mesh=mesh, ownership_axes=axes)


def print_plan(plan: Plan) -> None:
    """Print memory, traffic, FLOPs and time of a plan."""
    config, topology, exchange = plan.config, plan.topology, plan.exchange
    axes = " ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    slices = f", {topology.num_slices} slices" if topology.num_slices > 1 else ""
    chip = "fake CPU device" if topology.chip is None else topology.chip.name
    if isinstance(config.model, ModuleConfig):
        model = f"model {config.model.make!r}, remat {config.model.remat}"
    else:
        attention = choose_attention(config.model, plan.mesh.devices.flat[0].platform)
        model = f"remat {config.model.remat}, attention {attention.implementation}"
    print(
        f"{config.name}: {plan.num_parameters / 1e6:.1f}M parameters on {topology.name}"
        f"{slices} = {plan.mesh.size} x {chip} ({axes})\n"
        f"{config.tokens_per_step:,} tokens a step, microbatches: {config.microbatches} of "
        f"{config.microbatch_size} sequences, {model}\n"
        f"{summarize_rules(config.optimizer, plan.train_step.parameters)}"
    )
    for message in plan.messages:
        print(message)
    memory = _table("Memory of one chip", "train step", _right("MB"))
    for name, size in _memory_rows(plan):
        memory.add_row(name, _mb(size), style="bold" if name.startswith("peak") else None)
    rich.print(memory, _traffic_table(plan))
    if plan.exchanged_bytes:
        elements = sum(group.elements for group in exchange)
        padded = sum(group.padded_elements for group in exchange)
        print(
            f"Newton-Schulz: {elements:,} elements of matrices, {padded:,} with padding "
            f"({padded / elements:.3f} times), {_mb(plan.exchanged_bytes)} MB to their owners and "
            "back."
        )
    numbers = _table("Arithmetic and time", "", _right(""))
    numbers.show_header = False
    for row in _number_rows(plan):
        numbers.add_row(*row)
    rich.print(numbers)
    _print_clock(plan)
    if plan.assumptions:
        print("These times assume:", *(f"  - {line}" for line in plan.assumptions), sep="\n")


def _print_clock(plan: Plan) -> None:
    """Print the step's time by kind and by operation; nothing without a clock."""
    clock = plan.train_step.clock
    if clock is None:
        return
    # Only a TPU's clock has a second figure, at the memory's rate.
    is_tpu, total = plan.at_memory_rate_seconds is not None, clock.seconds

    def row(seconds: float, at_memory_rate: float | None = None) -> list[str]:
        numbers = [f"{1e3 * seconds:,.1f}", f"{100 * seconds / total:.1f}"]
        rate = "" if at_memory_rate is None else f"{1e3 * at_memory_rate:,.1f}"
        return [*numbers, rate] if is_tpu else numbers

    columns = ("ms", "%", "at memory's rate") if is_tpu else ("ms", "%")
    title = (
        "The compiler's clock" if is_tpu else "The clock: kernels at an H200's shares of the rates"
    )
    shares = _table(title, "", *map(_right, columns))
    for kind, share in clock.kinds.items():
        shares.add_row(kind, *row(share.seconds, share.at_memory_rate_seconds))
        if kind == PRODUCTS:
            shares.add_row("  their compute bound", *row(share.compute_bound_seconds))
    shares.add_row("a step", *row(total, clock.at_memory_rate_seconds), style="bold")
    shares.add_row("  its compute bound", *row(plan.compute_bound_seconds))
    largest = _table("The most expensive operations", "", *map(_right, ("count", "ms", "%")))
    for operation in clock.largest:
        name = f"{operation.kind}: {operation.name} {operation.shape}"
        name = name.replace("[", r"\[")  # which rich would take for its markup
        largest.add_row(name, f"{operation.count:,}", *row(operation.seconds)[:2])
    rich.print(shares, largest)
    if (recomputed := clock.recomputed).count:
        print(
            f"warning: memory is short: XLA computes {recomputed.count:,} operations of a step "
            f"again, {recomputed.seconds / total:.1%} of it by the clock; more microbatches may be "
            "faster"
        )
    if clock.guessed:
        names = ", ".join(clock.guessed)
        print(f"not measured: {names} (kernels: by their bytes; loops: one iteration)")


def _memory_rows(plan: Plan) -> Iterator[tuple[str, int]]:
    memory = plan.memory
    yield "parameters", memory.parameters_bytes
    for name, size in memory.optimizer_state_bytes.items():
        if size >= 1000:  # smaller ones are counters
            yield f"optimizer state: {name}", size
    if memory.previous_parameters_bytes:
        yield "previous parameters", memory.previous_parameters_bytes
    yield "batch, counters", memory.other_arguments_bytes
    yield "padding of these in memory", memory.padding_bytes
    yield "gradients", memory.gradients_bytes
    yield "activations, temporaries", memory.temporaries_bytes
    yield "peak", memory.peak_bytes
    if plan.eval_step is not None:
        yield "peak of the evaluation step", plan.eval_step.peak_bytes
    if memory.capacity_bytes is not None and memory.headroom_bytes is not None:
        yield "memory of the chip", memory.capacity_bytes
        yield "headroom", memory.headroom_bytes


def _traffic_table(plan: Plan) -> Table:
    names = ("operation", "mesh axes", "network", "phase")
    table = _table(
        "Traffic of one chip and train step",
        *(Column(name, no_wrap=name != "mesh axes") for name in names),
        *map(_right, ("count", "MB", "MB sent")),
    )
    table.collapse_padding, table.pad_edge = True, False  # seven columns
    for row in plan.collectives:
        axes = "?" if row.axes is None else " ".join(row.axes) or "-"
        numbers = (str(row.count), _mb(row.bytes), _mb(row.wire_bytes))
        table.add_row(row.op, axes, row.network, row.phase, *numbers)
    return table


def _number_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    flops = plan.flops
    yield "model TFLOP a step, all chips", f"{flops.model / 1e12:,.4g}"
    yield "matrix products that run, TFLOP", f"{flops.hardware / 1e12:,.4g}"
    yield "of these the optimizer's", f"{flops.optimizer / 1e12:,.4g}"
    if plan.topology.chip is not None:
        # Without a clock the compute bound stands in, which makes the MFU an upper bound.
        at_memory_rate, known = plan.at_memory_rate_seconds, plan.train_step.clock is not None
        name = "a step by the clock below, s" if known else "compute bound of a step, s"
        yield name, f"{plan.step_seconds:.4f}"
        mfu = f"{plan.mfu(plan.step_seconds):.1%}"
        mfu += "" if at_memory_rate is None else f" .. {plan.mfu(at_memory_rate):.1%}"
        yield "MFU" if known else "MFU, at most", mfu
        yield "tokens a day, billions", f"{plan.tokens_per_day / 1e9:,.2f}"
        yield f"days for {plan.config.num_steps:,} steps", f"{plan.days:,.2f}"
        if plan.cost is not None:
            yield "cost to finish", f"{plan.cost:,.0f}"
    steps = [step for step in (plan.train_step, plan.eval_step) if step is not None]
    yield "time to compile here, s", f"{sum(step.lower_s + step.compile_s for step in steps):.1f}"


def _table(title: str, *columns: Column | str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)


def _right(name: str) -> Column:
    return Column(name, justify="right", no_wrap=True)


def _mb(size: int | float) -> str:
    return f"{size / 1e6:,.3f}" if abs(size) < 1e6 else f"{size / 1e6:,.1f}"
