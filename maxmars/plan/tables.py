"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

import rich.box
import rich.console
import rich.table

from maxmars.attention import choose_attention
from maxmars.plan import Plan
from maxmars.plan.estimate import ASSUMPTIONS
from maxmars.plan.memory import peak_bytes


def print_plan(plan: Plan, console: rich.console.Console) -> None:
    """Print memory, traffic, arithmetic and time of a plan."""
    config = plan.config
    axes = " ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    slices = f", {plan.topology.num_slices} slices" if plan.topology.num_slices > 1 else ""
    chip = "fake CPU device" if plan.topology.chip is None else plan.topology.chip.name
    attention = choose_attention(config.model, plan.mesh.devices.flat[0].platform)
    lines = [
        f"{config.name}: {plan.num_parameters / 1e6:.1f}M parameters on {plan.topology.name}"
        f"{slices} = {plan.mesh.size} x {chip} ({axes})",
        f"{config.tokens_per_step:,} tokens a step in {config.num_microbatches} microbatches of "
        f"{config.microbatch_size} sequences, remat {config.model.remat}, attention "
        f"{attention.implementation}",
    ]
    if attention.reason is not None:
        lines.append(f"attention is plain and slower: {attention.reason}")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    for table in (_memory_table(plan), _traffic_table(plan)):
        console.print(table)
    console.print(_exchange_text(plan), highlight=False, soft_wrap=True, end="")
    console.print(_numbers_table(plan))
    if plan.estimate is not None:
        notes = "\n".join(f"  - {line}" for line in ASSUMPTIONS)
        console.print(f"The estimate assumes:\n{notes}", highlight=False, soft_wrap=True)


def _memory_table(plan: Plan) -> rich.table.Table:
    table = rich.table.Table(
        title="Memory of one chip", title_justify="left", box=rich.box.SIMPLE_HEAD
    )
    table.add_column("train step")
    table.add_column("MB", justify="right")
    for name, size in _memory_rows(plan):
        table.add_row(name, _mb(size), style="bold" if name.startswith("peak") else None)
    return table


def _memory_rows(plan: Plan) -> Iterator[tuple[str, int]]:
    memory = plan.memory
    yield "parameters", memory.parameters_bytes
    for name, size in memory.optimizer_state_bytes.items():
        if size >= 1000:  # counters
            yield f"optimizer state: {name}", size
    if memory.previous_parameters_bytes:
        yield "previous parameters", memory.previous_parameters_bytes
    yield "batch, counters", memory.other_arguments_bytes
    yield "padding of these in memory", memory.padding_bytes
    yield "gradients", memory.gradients_bytes
    yield "activations, temporaries", memory.temporaries_bytes
    yield "peak", memory.peak_bytes
    if plan.eval_step is not None:
        yield "peak of the evaluation step", peak_bytes(plan.eval_step.memory, plan.topology.chip)
    if memory.capacity_bytes is not None and memory.headroom_bytes is not None:
        yield "memory of the chip", memory.capacity_bytes
        yield "headroom", memory.headroom_bytes


def _traffic_table(plan: Plan) -> rich.table.Table:
    table = rich.table.Table(
        title="Traffic of one chip and train step",
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for name in ("operation", "mesh axes", "network", "phase"):
        table.add_column(name, no_wrap=name != "mesh axes")
    for name in ("count", "MB", "MB sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.collectives:
        axes = "?" if row.axes is None else " ".join(row.axes) or "-"
        numbers = (str(row.count), _mb(row.bytes), _mb(row.wire_bytes))
        table.add_row(row.op, axes, row.network, row.phase, *numbers)
    return table


def _exchange_text(plan: Plan) -> str:
    exchange = plan.exchange
    if exchange is None or not exchange.transfer_bytes():
        return ""
    padding = exchange.padded_elements / exchange.elements
    return (
        f"Newton-Schulz: {exchange.elements:,} elements of matrices, {exchange.padded_elements:,} "
        f"with padding ({padding:.3f} times), {_mb(exchange.transfer_bytes())} MB to their owners "
        "and back.\n"
    )


def _numbers_table(plan: Plan) -> rich.table.Table:
    table = rich.table.Table(
        title="Arithmetic and time",
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    flops = plan.flops
    table.add_row("model TFLOP a step, all chips", f"{flops.model / 1e12:,.4g}")
    table.add_row("matrix products that run, TFLOP", f"{flops.hardware / 1e12:,.4g}")
    table.add_row("of these the optimizer's", f"{flops.optimizer / 1e12:,.4g}")
    found = plan.estimate
    if found is not None:
        table.add_row("model arithmetic, s", f"{found.model_compute_s:.4f}")
        table.add_row("optimizer, s", f"{found.optimizer_s:.4f}")
        for network, seconds in found.communication_s.items():
            table.add_row(f"{network}, s", f"{seconds:.4f}")
        table.add_row("step time at best rates, s", f"{found.step_time_s:.4f}")
        table.add_row("with communication hidden, s", f"{found.overlapped_step_time_s:.4f}")
        table.add_row("MFU, at most", f"{found.mfu:.1%} to {found.overlapped_mfu:.1%}")
        table.add_row("tokens a day, billions", f"{found.tokens_per_day / 1e9:,.2f}")
        table.add_row(f"days for {plan.config.num_steps:,} steps", f"{found.days:,.2f}")
        if found.cost is not None:
            table.add_row("cost to finish", f"{found.cost:,.0f}")
    seconds = plan.train_step.lower_s + plan.train_step.compile_s
    if plan.eval_step is not None:
        seconds += plan.eval_step.lower_s + plan.eval_step.compile_s
    table.add_row("time to compile here, s", f"{seconds:.1f}")
    return table


def _mb(size: int | float) -> str:
    return f"{size / 1e6:,.3f}" if abs(size) < 1e6 else f"{size / 1e6:,.1f}"
