"""What a step costs on the networks, the least time that it takes at the published rates of chips
and networks, and how measured steps compare with `step_clock`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jax.sharding import Mesh

from maxmars.config.chips import Chip, Network
from maxmars.distributed.collectives import Collective, Phase, wire_bytes
from maxmars.distributed.step_clock import (
    ATTENTION_SHARE,
    LAUNCH_S,
    MEMORY_SHARE,
    PRODUCTS_SHARE,
    StepClock,
)
from maxmars.plan.compile import ChipMemory
from maxmars.plan.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of one kind in one step."""

    op: str
    axes: tuple[str, ...] | None
    """Mesh axes; None if the groups of devices fit no axes."""
    network: Network
    phase: Phase
    count: int
    """Executions."""
    bytes: int
    """Bytes of the results on one chip (reduce-scatter: of the operands)."""
    wire_bytes: float
    """Bytes that a chip sends if rings carry them."""


def traffic(
    collectives: Iterable[Collective], mesh: Mesh, topology: Topology
) -> tuple[Traffic, ...]:
    """Collectives summed by operation, axes, network and phase; most bytes first."""
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


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one step over all chips."""

    model: int
    """6 N + 12 L d T a token, as MFU is measured (`model.Parameters.flops_per_token`)."""
    hardware: int
    """Matrix products that run, recomputation and optimizer included."""
    optimizer: int
    """The optimizer's share of `hardware`."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How measured steps compare with `step_clock`; `tools/gpu_acceptance.py --table` finds it."""

    measured: str
    """Date, hardware and versions."""
    error: float
    """Largest error of the scaled clock among the measured steps."""
    scale: float = 1.0
    """Time of a measured step over that of the clock."""


CALIBRATIONS: dict[str, Calibration] = {
    "H200 SXM": Calibration(measured="2026-11-28, NVIDIA H200, JAX 0.11.2", error=0.07),
}
"""By `Chip.name`; a chip that is not here was never measured."""

BOUND_ASSUMPTIONS = (
    "best rates: matrix products run at the chip's published bfloat16 peak, elementwise work "
    "counts nothing, the optimizer reads and writes parameters and state once",
    "best rates: rings carry collectives over all links of the chip, in one direction; they wait "
    "for arithmetic, or hide behind it",
)
TPU_ASSUMPTIONS = (
    "the clock is the compiler's, which charges bfloat16 elementwise work as float32; at low: the "
    "memory's rate; loops of windowed einsums are overcharged by 32 to 81% where measured",
)
GPU_ASSUMPTIONS = (
    f"the clock: products run at {PRODUCTS_SHARE:.0%} of the published FLOP/s, attention at "
    f"{ATTENTION_SHARE:.0%}, all else at {MEMORY_SHARE:.0%} of the memory's rate, and no kernel in "
    f"under {1e6 * LAUNCH_S:.1f} us, as on an H200; "
    "collectives at the networks' published rates, beside what runs meanwhile",
)
LAST_ASSUMPTION = "evaluation, checkpoints, compilation and restarts are not counted"


def assumptions(
    chip: Chip, calibration: Calibration | None, *, clock: StepClock | None = None
) -> tuple[str, ...]:
    """What the times assume, in words; the first line says what they were compared with."""
    if calibration is None:
        first = "not calibrated: no step was measured on this chip"
        first += "; times are lower bounds" if clock is None else ""
    else:
        scaled = "" if calibration.scale == 1 else f" times {calibration.scale:.2f}"
        first = (
            f"the clock{scaled} differs by up to {calibration.error:.0%} from measured steps of "
            f"one chip ({calibration.measured})"
        )
    of_clock = TPU_ASSUMPTIONS if chip.is_tpu else GPU_ASSUMPTIONS
    return (first, *BOUND_ASSUMPTIONS, *(of_clock if clock is not None else ()), LAST_ASSUMPTION)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The least that one step takes, in seconds, at the published rates; see `assumptions`."""

    model_compute_s: float
    optimizer_s: float
    communication_s: dict[str, float]
    """By network."""
    step_time_s: float
    overlapped_step_time_s: float


def bound(
    flops: Flops, memory: ChipMemory, rows: Iterable[Traffic], chip: Chip, num_chips: int
) -> Bound:
    """The least that a step takes at the rates of `chip`.

    Args:
      flops: of a step.
      memory: on one chip.
      rows: traffic of a step.
      chip: its rates.
      num_chips: how many JAX devices there are.
    """
    rate = num_chips * chip.peak_flops
    state = sum(memory.optimizer_state_bytes.values()) + memory.previous_parameters_bytes
    moved = 2 * (memory.parameters_bytes + state) + memory.parameters_bytes
    model_s = (flops.hardware - flops.optimizer) / rate
    optimizer_s = flops.optimizer / rate + moved / chip.memory_bandwidth
    communication: dict[str, float] = {}
    for row in rows:
        seconds = row.wire_bytes / chip.bandwidth(row.network)
        communication[row.network] = communication.get(row.network, 0.0) + seconds
    compute_s = model_s + optimizer_s
    return Bound(
        model_compute_s=model_s,
        optimizer_s=optimizer_s,
        communication_s=communication,
        step_time_s=compute_s + sum(communication.values()),
        overlapped_step_time_s=max(compute_s, *communication.values(), 0.0),
    )
