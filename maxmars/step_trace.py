"""A trace of a few steps of a run, and which of its operations took the time.

The trace is JAX's (xprof: TensorBoard and Perfetto open it). It names operations as the compiled
program does; what each is for, the model forward or backward, the clip or the optimizer, is said by
the text of the program.
"""

from __future__ import annotations

import io
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Column, Table

from maxmars.hlo import SCOPES
from maxmars.hlo.text import Instruction, parse

PHASES = ("forward", "backward", "clip", "optimizer", "other")
_TABLE_WIDTH = 120
_CONTAINERS = ("while", "conditional", "call")  # what is in them is in the trace as well


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of the program over the traced steps, on one device on average."""

    name: str
    """Its name in the compiled program."""
    phase: str
    """One of `PHASES`; `other` is what the compiler added of its own or merged of several."""
    source: str
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


class StepTracer:
    """Traces some steps of a run into a directory, and then says what took the time."""

    def __init__(self, first: int, last: int, directory: Path) -> None:
        """Trace the steps from `first` to `last`, counted from 1 as in the metrics."""
        self.first, self.last = first, last
        self._directory = directory
        self._running = False

    def begin(self, step: int) -> None:
        """Step `step` comes next."""
        if step == self.first:
            start_trace(self._directory)
            self._running = True

    def end(self, result: Any, program: Callable[[], str]) -> str:
        """Stop after the last step, and say what took the time, also in `operations.txt`.

        Args:
          result: arrays of the last step, to wait for.
          program: makes the text of the compiled step.
        """
        jax.block_until_ready(result)
        self.close()
        trace = read_trace(self._directory, program())
        text = format_trace(trace, steps=self.last - self.first + 1)
        (self._directory / "operations.txt").write_text(text)
        return f"{text}trace of steps {self.first} to {self.last} in {self._directory}"

    def close(self) -> None:
        """Stop tracing, if that has not been done."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


def start_trace(directory: Path) -> None:
    """Begin to trace what the devices do, and little of what Python does; slows small steps."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2  # operations of a CPU device are host events
    jax.profiler.start_trace(str(directory), profiler_options=options)


def read_trace(directory: Path, program: str) -> StepTrace:
    """The newest trace in a directory, as far as it is of one program.

    Args:
      directory: what `start_trace` was given, after `jax.profiler.stop_trace`.
      program: text of the compiled program, which tells the phases.

    Raises:
      ValueError: there is no trace, or no operation of the program in it.
    """
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        raise ValueError(f"{directory} holds no trace (*.xplane.pb).")
    module = parse(program)
    known = {n: i for c in module.computations.values() for n, i in c.instructions.items()}
    with warnings.catch_warnings():
        # Of the types that JAX 0.12 makes for a trace; raised there, it would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = jax.profiler.ProfileData.from_file(str(files[-1])).planes
        events = [e for plane in planes for line in plane.lines for e in _events(plane, line)]
    events = [event for event in events if event.name in known]
    # Other programs have operations of the same names, but of fewer of them.
    programs: dict[Any, set[str]] = defaultdict(set)
    for event in events:
        programs[event.program].add(event.name)
    if not programs:
        raise ValueError(f"{files[-1]} holds no operation of the train step.")
    step = max(programs, key=lambda program: len(programs[program]))
    devices: dict[tuple[str, int], list[_Event]] = defaultdict(list)
    for event in events:
        if event.program == step:
            devices[event.device].append(event)
    busy = sum(map(_covered, devices.values()))
    return StepTrace(
        operations=_operations(devices.values(), known),
        busy_seconds=busy * 1e-9 / len(devices),
    )


@dataclass(frozen=True, kw_only=True)
class _Event:
    name: str
    program: Any
    device: tuple[str, int]
    start_ns: float
    duration_ns: float


def _events(plane: Any, line: Any) -> Iterable[_Event]:
    """Executions of programs' operations.

    A TPU has them on a line of their own; all CPU devices share a plane, and say which they are.
    """
    of_tpu = line.name == "XLA Ops"
    for event in line.events:
        stats = {} if event.name.startswith("end: ") else dict(event.stats)
        name = stats.get("hlo_op", event.name.split(" = ")[0] if of_tpu else None)
        if name is not None:
            yield _Event(
                name=str(name).lstrip("%"),
                program=stats.get("program_id"),
                device=(plane.name, int(str(stats.get("device_ordinal", 0)))),
                start_ns=event.start_ns,
                duration_ns=event.duration_ns,
            )


def _covered(events: Iterable[_Event]) -> float:
    """Nanoseconds in which at least one of the events lasts."""
    covered, end = 0.0, 0.0
    for event in sorted(events, key=lambda e: e.start_ns):
        stop = event.start_ns + event.duration_ns
        covered += max(0.0, stop - max(end, event.start_ns))
        end = max(end, stop)
    return covered


def _operations(
    devices: Collection[list[_Event]], known: dict[str, Instruction]
) -> tuple[Operation, ...]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for events in devices:
        for event in events:
            sums[event.name][0] += event.duration_ns * 1e-9 / len(devices)
            sums[event.name][1] += 1 / len(devices)
    found = []
    for name, (seconds, count) in sums.items():
        path = _path(known[name])
        if known[name].opcode not in _CONTAINERS:
            source = _source(path) or known[name].opcode
            found.append(
                Operation(
                    name=name, phase=phase_of(path), source=source, seconds=seconds, count=count
                )
            )
    return tuple(sorted(found, key=lambda operation: -operation.seconds))


def _path(instruction: Instruction) -> str:
    match = re.search(r'op_name="([^"]*)"', instruction.attributes.get("metadata", ""))
    return match[1] if match else ""


def phase_of(path: str) -> str:
    """The phase that an operation's path, such as `jit(f)/model/jvp()/dot_general`, belongs to."""
    words = set(re.findall(r"\w+", re.sub(r"jit\([^()]*\)", "", path)))
    scopes = words & set(SCOPES)
    if len(scopes) != 1:
        return "other"
    (scope,) = scopes
    if scope == "model":
        return "backward" if "transpose(" in path or "rematted_computation" in words else "forward"
    return scope


def _source(path: str) -> str:
    """The end of a path, with the equation of an einsum."""
    if ":" in path:
        return "several"
    *_, before, last = ("", *path.split("/"))
    return f"{before}/{last}" if "->" in before else last


def format_trace(trace: StepTrace, *, steps: int, top: int = 20) -> str:
    """Tables of the phases and of the operations that took most of the time, per step."""
    text = io.StringIO()
    console = Console(file=text, width=_TABLE_WIDTH)
    phases = Table("phase", _right("ms"), _right("share"), title="Device time a step, by phase")
    for phase, seconds in trace.seconds_of_phases().items():
        share = seconds / trace.busy_seconds
        phases.add_row(phase, f"{1e3 * seconds / steps:.3f}", f"{share:.1%}")
    phases.add_section()
    phases.add_row("all", f"{1e3 * trace.busy_seconds / steps:.3f}", "")
    console.print(phases)
    total = sum(operation.seconds for operation in trace.operations)
    shown = trace.operations[:top]
    table = Table(
        *(Column(name, overflow="fold") for name in ("operation", "phase", "made from")),
        *(_right(name) for name in ("times a step", "ms a step", "share")),
        title=f"The {len(shown)} operations that took most, of {len(trace.operations)}",
    )
    for op in shown:
        times, ms = f"{op.count / steps:g}", f"{1e3 * op.seconds / steps:.3f}"
        table.add_row(op.name, op.phase, op.source, times, ms, f"{op.seconds / total:.1%}")
    console.print(table)
    return text.getvalue()


def _right(name: str) -> Column:
    return Column(name, justify="right")
