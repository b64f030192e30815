"""The operations of a few traced steps, and which took the time; `bench_train.py` prints them.

The trace is JAX's (xprof and Perfetto open it). It names operations as the compiled program does;
the program's text says which part of the step each operation serves.
"""

from __future__ import annotations

import io
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Column, Table

from maxmars.plan.collectives import scopes_of
from maxmars.plan.hlo import parse

PHASES = ("forward", "backward", "clip", "optimizer", "other")
_CONTAINERS = ("while", "conditional", "call")  # the trace holds the operations in them as well


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of the program over the traced steps, on one device on average."""

    name: str
    """Its name in the compiled program, or the name of a library's kernel."""
    phase: str
    """One of `PHASES`; `other` if the compiler added it, or merged it from several phases."""
    jax_name: str
    """The JAX operation that it was made from; of a fusion, its last one."""
    seconds: float
    count: float
    """Executions."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What the devices of this process did in the traced steps."""

    operations: tuple[Operation, ...]
    """Most time first. Operations that ran at the same time count each."""
    busy_seconds: float
    """Time in which at least one operation ran, on one device on average."""

    def seconds_of_phases(self) -> dict[str, float]:
        """`busy_seconds` split between `PHASES`, in proportion to their operations' times."""
        sums = dict.fromkeys(PHASES, 0.0)
        for operation in self.operations:
            sums[operation.phase] += operation.seconds
        total = sum(sums.values()) or 1.0
        return {phase: self.busy_seconds * seconds / total for phase, seconds in sums.items()}


def read_trace(directory: Path, program: str) -> StepTrace:
    """Read one program's operations from the newest trace in a directory.

    Args:
      directory: where `jax.profiler` wrote the trace. On CPUs the trace must have been started with
        `host_tracer_level` 2, since a CPU device's operations are events of the host.
      program: text of the compiled program.

    Raises:
      ValueError: there is no trace, or no operation of the program in it.
    """
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        raise ValueError(f"{directory} holds no trace (*.xplane.pb).")
    module = parse(program)
    known = {n: i for c in module.computations.values() for n, i in c.instructions.items()}
    with warnings.catch_warnings():
        # JAX 0.12 warns of the types that it makes for a trace; an error there ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = jax.profiler.ProfileData.from_file(str(files[-1])).planes
        events = [e for plane in planes for line in plane.lines for e in _events(plane, line)]
    # Where devices have planes of their own, the host's only tell when their work was started.
    events = [e for e in events if e.device[0].startswith("/device:")] or events
    # Other programs have operations of the same names, but fewer of them.
    programs: dict[Any, set[str]] = defaultdict(set)
    for event in events:
        if event.name in known:
            programs[event.program].add(event.name)
    if not programs:
        raise ValueError(f"{files[-1]} holds no operation of the train step.")
    step = max(programs, key=lambda program: len(programs[program]))
    # Averages over devices: each ran the same program, so that a sum would say how many there are.
    devices: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start_ns):
        if event.program == step and (event.name in known or event.in_graph):
            devices[event.device].append(event)
    seconds: dict[tuple[str, str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str, str], float] = defaultdict(float)
    for of_device in devices.values():
        phase = "other"
        for event in of_device:
            instruction = known.get(event.name)
            if instruction is None:
                # A library's kernel or a copy: it serves what the kernel before it does.
                row = event.name, phase, "library or copy"
            elif instruction.opcode in _CONTAINERS:
                continue
            else:
                phase = phase_of(instruction.op_name)
                row = event.name, phase, _jax_name(instruction.op_name) or instruction.opcode
            seconds[row] += event.duration_ns * 1e-9 / len(devices)
            counts[row] += 1 / len(devices)
    operations = [
        Operation(name=name, phase=phase, jax_name=source, seconds=taken, count=counts[row])
        for row, taken in sorted(seconds.items(), key=lambda item: -item[1])
        for name, phase, source in [row]
    ]
    return StepTrace(
        operations=tuple(operations),
        busy_seconds=sum(map(busy_ns, devices.values())) * 1e-9 / len(devices),
    )


@dataclass(frozen=True, kw_only=True)
class Event:
    """One execution of an operation on one device."""

    name: str
    program: Any
    device: tuple[str, int]
    start_ns: float
    duration_ns: float
    in_graph: bool = False
    """Whether it is a kernel of a CUDA graph, of which XLA names only those that it made itself."""


def _events(plane: Any, line: Any) -> Iterator[Event]:
    """A TPU's operations have a line of their own, a GPU's kernels one for each stream. All CPU
    devices share a plane, and each event says which device it is of."""
    of_tpu = line.name == "XLA Ops"
    for event in line.events:
        stats = {} if event.name.startswith("end: ") else dict(event.stats)
        name = stats.get("hlo_op", event.name.split(" = ")[0] if of_tpu else None)
        in_graph = "cuda_graph_id" in stats
        if in_graph:  # here `hlo_op` is the graph, and the kernel of fusion.3 is named fusion_3
            name = re.sub(r"_(\d+)$", r".\1", event.name)
        if name is not None:
            yield Event(
                name=str(name).lstrip("%"),
                program=stats.get("program_id"),
                device=(plane.name, int(str(stats.get("device_ordinal", 0)))),
                start_ns=event.start_ns,
                duration_ns=event.duration_ns,
                in_graph=in_graph,
            )


def busy_ns(events: Collection[Event]) -> float:
    """Nanoseconds in which at least one of the events lasts."""
    # Events on several streams overlap: of 0-4, 2-6, 3-5 and 8-9 the device was busy for 6 + 1.
    covered, end = 0.0, 0.0
    for event in sorted(events, key=lambda e: e.start_ns):
        stop = event.start_ns + event.duration_ns
        covered += max(0.0, stop - max(end, event.start_ns))
        end = max(end, stop)
    return covered


def phase_of(path: str) -> str:
    """The phase that an operation's path, such as `jit(f)/model/jvp()/dot_general`, belongs to."""
    scopes = scopes_of(path)
    if len(scopes) != 1:
        return "other"
    if scopes == {"model"}:
        backward = "transpose(" in path or "rematted_computation" in path
        return "backward" if backward else "forward"
    return scopes.pop()


def _jax_name(path: str) -> str:
    """The end of a path, with the equation of an einsum."""
    if ":" in path:
        return "several"
    *_, before, last = ("", *path.split("/"))
    return f"{before}/{last}" if "->" in before else last


def format_trace(trace: StepTrace, *, steps: int) -> str:
    """Tables of the phases and of the operations that took most of the time, per step."""
    text = io.StringIO()
    console = Console(file=text, width=80)
    phases = Table("phase", *map(_right, ("ms", "share")), title="Device time a step, by phase")
    for phase, seconds in trace.seconds_of_phases().items():
        share = seconds / trace.busy_seconds
        phases.add_row(phase, f"{1e3 * seconds / steps:.3f}", f"{share:.1%}")
    phases.add_section()
    phases.add_row("all", f"{1e3 * trace.busy_seconds / steps:.3f}", "")
    console.print(phases)
    total = sum(operation.seconds for operation in trace.operations)
    shown = trace.operations[:20]
    table = Table(
        *(Column(name, overflow="fold") for name in ("operation", "phase", "made from")),
        *map(_right, ("times", "ms", "share")),
        title=f"The {len(shown)} operations that took most a step, of {len(trace.operations)}",
    )
    for op in shown:
        times, ms = f"{op.count / steps:g}", f"{1e3 * op.seconds / steps:.3f}"
        table.add_row(op.name[:40], op.phase, op.jax_name, times, ms, f"{op.seconds / total:.1%}")
    console.print(table)
    return text.getvalue()


def _right(name: str) -> Column:
    return Column(name, justify="right")
