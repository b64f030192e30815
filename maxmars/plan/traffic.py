"""What a program moves between chips, by operation, mesh axes, network and phase of the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jax.sharding import Mesh

from maxmars.hlo import Collective, wire_bytes
from maxmars.plan.chips import Network
from maxmars.plan.topology import Topology

Phase = Literal["model", "optimizer", "mixed"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind, in one step."""

    op: str
    axes: tuple[str, ...] | None
    """Mesh axes; None where the groups of devices fit none."""
    network: Network
    phase: Phase
    """`model` includes the norm of the gradient that the clip needs; `mixed` is what the compiler
    merged of both phases, or named after nothing."""
    count: int
    """Executions."""
    bytes: int
    """Bytes of the results on one chip (reduce-scatter: of the operands)."""
    wire_bytes: float
    """Bytes that a chip sends where rings carry them."""


def traffic(found: Iterable[Collective], mesh: Mesh, topology: Topology) -> tuple[Traffic, ...]:
    """Rows by kind, most bytes first."""
    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for c in found:
        groups[c.op, c.axes, topology.network(c, mesh), phase_of(c)].append(c)
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


def phase_of(collective: Collective) -> Phase:
    """The phase of the step that a collective serves."""
    if collective.scopes == {"optimizer"}:
        return "optimizer"
    return "model" if collective.scopes and "optimizer" not in collective.scopes else "mixed"


def largest_bytes(found: Iterable[Collective], phase: Phase) -> int:
    """Bytes of the largest single execution of a collective of a phase."""
    return max((c.bytes // c.count for c in found if c.count and phase_of(c) == phase), default=0)
