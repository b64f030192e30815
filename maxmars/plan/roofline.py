"""What a step costs on the networks and in time: traffic by network, and a roofline estimate.

The estimate says how long a step takes if chips and networks run at their published rates, or at
the share of them that was measured on a chip of this kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from maxmars.config import TrainConfig
from maxmars.config.chips import Chip, Network
from maxmars.distributed.collectives import Collective, Phase, wire_bytes
from maxmars.distributed.cycles import StepClock
from maxmars.model.parameters import Parameters
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
    """What steps reached of a chip's published rates; `tools/gpu_acceptance.py --table` fits it."""

    measured: str
    """Date, hardware and versions."""
    arithmetic: tuple[tuple[int, float], ...]
    """(parameters of the model, share of the peak FLOP/s that its forward and backward pass reach,
    elementwise work included), ascending."""
    memory: float
    """Share of the memory's rate that AdamW's update reaches."""
    error: float
    """Largest error of the estimated step time among the measured steps, where the share of each
    size was taken from the other sizes."""
    clock: float = 1.0
    """Time of a measured step over that of the compiler's clock, which only TPUs have."""

    def share(self, num_parameters: int) -> float:
        """Share of the peak FLOP/s; between the measured sizes by the logarithm of the size."""
        sizes, shares = zip(*self.arithmetic, strict=True)
        return float(np.interp(np.log(num_parameters), np.log(sizes), shares))


CALIBRATIONS: dict[str, Calibration] = {
    "H200 SXM": Calibration(
        measured="2026-11-28, NVIDIA H200, JAX 0.11.2",
        arithmetic=((124373760, 0.44), (1556840000, 0.499)),
        memory=0.614,
        error=0.134,
    ),
}
"""By `Chip.name`; a chip that is not here was never measured."""

ASSUMPTIONS = (
    "matrix products run at the chip's published bfloat16 peak; real ones reach 40 to 80% of it",
    "the model is bound by arithmetic: its elementwise work and its memory traffic count nothing",
    "the optimizer reads and writes parameters and state once, and reads the gradient",
    "rings carry collectives, over all links of the chip at their published rate, one direction",
    "step_time_s: communication waits for arithmetic; overlapped_step_time_s: it hides behind it",
    "evaluation, checkpoints, compilation and restarts are not counted",
)

CLOCK_ASSUMPTIONS = (
    "the compiler's clock charges bfloat16 elementwise work as float32; at low: the memory's rate",
    "the compiler's clock overcharges loops of windowed einsums, by 32 to 81% where measured",
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Times of one step in seconds, from published or calibrated rates; see `assumptions`."""

    model_compute_s: float
    optimizer_s: float
    communication_s: dict[str, float]
    """By network."""
    step_time_s: float
    overlapped_step_time_s: float
    mfu: float
    """Model FLOPs divided by the FLOPs that the chips could do in `step_time_s`."""
    overlapped_mfu: float
    tokens_per_day: float
    days: float
    """For all steps of the config."""
    cost: float | None
    """Price of a chip and hour times chips times hours; None without a price."""
    calibration: Calibration | None
    """The measured shares of the rates; None where the published rates were taken."""


def assumptions(
    calibration: Calibration | None, *, clock: StepClock | None = None
) -> tuple[str, ...]:
    """What an estimate assumes, in words; the first line says what it was calibrated with, the last
    ones how far to trust the compiler's clock, if there is one."""
    trust = () if clock is None else CLOCK_ASSUMPTIONS
    if calibration is None:
        line = "not calibrated: no step was measured on this chip; times are lower bounds"
        return (line, *ASSUMPTIONS, *trust)
    line = (
        f"calibrated on {calibration.measured}; error of a step on one chip "
        f"±{calibration.error:.0%}; networks are not calibrated"
    )
    if clock is not None:
        trust = (
            f"steps took {calibration.clock:.2f} times what the compiler's clock says of them",
        )
    return (line, *ASSUMPTIONS[2:], *trust)


def estimate(
    config: TrainConfig,
    flops: Flops,
    memory: ChipMemory,
    rows: Iterable[Traffic],
    chip: Chip,
    num_chips: int,
    price: float | None,
    calibration: Calibration | None = None,
) -> Estimate:
    """How long a step takes at the rates of `chip`.

    Args:
      config: what is trained.
      flops: of a step.
      memory: on one chip.
      rows: traffic of a step.
      chip: its rates.
      num_chips: how many JAX devices there are.
      price: of a chip for an hour, in any currency.
      calibration: shares of these rates that were measured; None takes the rates themselves.
    """
    rate = num_chips * chip.peak_flops
    arithmetic = memory_share = 1.0
    if calibration is not None:
        arithmetic = calibration.share(Parameters(config.model).count)
        memory_share = calibration.memory
    state = sum(memory.optimizer_state_bytes.values()) + memory.previous_parameters_bytes
    moved = 2 * (memory.parameters_bytes + state) + memory.parameters_bytes
    model_s = (flops.hardware - flops.optimizer) / (rate * arithmetic)
    moved_s = moved / (chip.memory_bandwidth * memory_share)
    optimizer_s = flops.optimizer / (rate * arithmetic) + moved_s
    communication: dict[str, float] = {}
    for row in rows:
        bandwidth = chip.dcn_bandwidth if row.network == "DCN" else chip.network_bandwidth
        seconds = row.wire_bytes / bandwidth
        communication[row.network] = communication.get(row.network, 0.0) + seconds
    compute_s = model_s + optimizer_s
    step_s = compute_s + sum(communication.values())
    overlapped_s = max(compute_s, *communication.values(), 0.0)
    days = step_s * config.num_steps / 86400
    return Estimate(
        model_compute_s=model_s,
        optimizer_s=optimizer_s,
        communication_s=communication,
        step_time_s=step_s,
        overlapped_step_time_s=overlapped_s,
        mfu=flops.model / (rate * step_s),
        overlapped_mfu=flops.model / (rate * overlapped_s),
        tokens_per_day=config.tokens_per_step / step_s * 86400,
        days=days,
        cost=None if price is None else price * num_chips / chip.devices * days * 24,
        calibration=calibration,
    )
