"""What a compiled program moves between devices, and what it keeps in memory.

`collectives` reads the text of an optimised HLO module: it walks from the entry computation through
loops, calls, fusions and conditionals, multiplying by each loop's trip count. The compiler's own
cost analysis counts loop bodies once and is of no use here.

Three habits of compilers need care. libtpu writes no trip counts, so they are worked out from the
loop's condition and body. libtpu also spreads one asynchronous collective over several fusions,
which each repeat it under one `chain_id`, and writes a reduce-scatter as a fusion
`all-reduce-scatter` that holds an all-reduce. And replica groups come in three notations.

For several slices libtpu writes the program of one slice, in which each exchange between slices is
a `send` to its runtime ("MegaScale") whose attributes name the collective.

What is not seen: other `send`/`recv` pairs and custom calls that communicate on their own.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from maxmars.hlo.arrays import ArrayShape as ArrayShape
from maxmars.hlo.arrays import arrays as arrays
from maxmars.hlo.groups import axes_of_groups, axes_of_pairs, explicit_groups, replica_groups
from maxmars.hlo.loops import Frame, trip_count
from maxmars.hlo.text import Instruction, parse, shape_bytes, tuple_elements

OPS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_LEAVES = ("constant", "parameter")  # what their parentheses hold are no operands
SCOPES = ("model", "clip", "optimizer")
"""Names that the train step gives its parts with `jax.named_scope`."""


@dataclass(frozen=True)
class Collective:
    """One collective instruction, over all its executions in one run of the program."""

    op: str
    """One of `OPS`; asynchronous forms carry the name of the synchronous one."""
    bytes: int
    """Bytes of the result on one device (reduce-scatter: of the operand) times `count`."""
    count: int
    """Executions: the product of the trip counts of the loops around it."""
    axes: tuple[str, ...] | None
    """Mesh axes that it runs over, in mesh order; None if no set of axes fits, or without mesh."""
    group_size: int
    """Devices that take part in one exchange; 2 for a permute."""
    name: str
    """Name of the instruction."""
    scopes: frozenset[str]
    """Those of `SCOPES` that it serves: several where the compiler merged, none outside of all."""
    between_slices: bool = False
    """Whether it goes from slice to slice, over the data center's network."""

    @property
    def scope(self) -> str | None:
        """Its one scope; `mixed` for several, None for none."""
        return "mixed" if len(self.scopes) > 1 else next(iter(self.scopes), None)


@dataclass(frozen=True)
class Memory:
    """Memory of a compiled program on one device, in bytes."""

    argument_bytes: int
    output_bytes: int
    """Outputs, including those that take the place of arguments."""
    alias_bytes: int
    """Outputs that take the place of donated arguments."""
    temp_bytes: int
    generated_code_bytes: int
    peak_bytes: int | None
    """Most memory in use at one time, arguments included; None where the backend has no such
    figure. Whether a program fits is decided by this and not by argument + temp, which may count
    memory twice, or leave out what kernels allocate (temp was 0 for a splash attention)."""

    def most_bytes(self, *, tpu: bool) -> int:
        """Most memory in use: the TPU compiler's own figure; elsewhere arguments, outputs that take
        the place of none, and temporaries. XLA's peak of a CPU program leaves these out."""
        if tpu and self.peak_bytes:
            return self.peak_bytes
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes


def memory(compiled: Any) -> Memory:
    """Memory of a `jax.stages.Compiled`, as the compiler reports it.

    Raises:
      ValueError: the backend reports nothing.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend has no memory analysis of compiled programs.")
    return Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        generated_code_bytes=stats.generated_code_size_in_bytes,
        peak_bytes=getattr(stats, "peak_memory_in_bytes", None),
    )


def collectives(
    compiled_or_text: Any, mesh: Mesh | AbstractMesh | None = None, *, num_slices: int = 1
) -> tuple[Collective, ...]:
    """The collectives of a compiled program, in the order in which it lists them.

    An asynchronous pair counts once. Of a conditional, the branch that moves the most bytes counts.
    A loop's condition runs once more than its body. Bytes are those of the logical shape, without
    padding to tiles.

    Args:
      compiled_or_text: a `jax.stages.Compiled`, or its `as_text()`.
      mesh: the mesh that the program was compiled for. Replica groups number the devices in the
        order of `mesh.devices.flat`, whatever their ids.
      num_slices: TPU slices that the mesh's first axis goes over. Each exchange between them counts
        with the bytes that it sends, padding to tiles included.

    Raises:
      ValueError: the text is not HLO, or the trip count of a loop with collectives is not known and
        cannot be worked out; the message names the loop.
    """
    text = compiled_or_text if isinstance(compiled_or_text, str) else compiled_or_text.as_text()
    module = parse(text)
    if mesh is None or num_slices == 1:
        return tuple(_visit(Frame(module, module.computations[module.entry]), mesh, set()))
    first, *rest = mesh.axis_names
    shape = (mesh.shape[first] // num_slices, *(mesh.shape[name] for name in rest))
    of_slice = AbstractMesh(shape, mesh.axis_names)
    found = _visit(Frame(module, module.computations[module.entry]), of_slice, set())
    return tuple(
        dataclasses.replace(c, axes=(first,), group_size=num_slices) if c.between_slices else c
        for c in found
    )


def total_bytes(
    found: Iterable[Collective],
    *,
    op: str | None = None,
    axes: tuple[str, ...] | None = None,
    scope: str | None = None,
) -> int:
    """Bytes of those with this operation, axes and scope; None stands for any."""
    return sum(
        c.bytes
        for c in found
        if op in (None, c.op) and axes in (None, c.axes) and scope in (None, c.scope)
    )


def wire_bytes(collective: Collective) -> float:
    """Bytes that one device sends when rings carry the collective."""
    n = collective.group_size
    match collective.op:
        case "collective-permute" | "collective-broadcast":
            share = 1.0
        case "all-reduce":
            share = 2 * (n - 1) / n
        case _:
            share = (n - 1) / n
    return collective.bytes * share


def format_table(found: Iterable[Collective]) -> str:
    """A table with one line for each operation, axes and scope, most bytes first."""
    groups: dict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for c in found:
        axes = "?" if c.axes is None else ",".join(c.axes) or "-"
        groups[c.op, axes, c.scope or "-"].append(c)
    rows = [("operation", "axes", "scope", "in text", "executed", "MB")]
    for key, members in sorted(groups.items(), key=lambda item: -total_bytes(item[1])):
        executed = sum(c.count for c in members)
        rows.append((*key, str(len(members)), str(executed), f"{total_bytes(members) / 1e6:,.3f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join(left + right))
    return "\n".join(lines)


def _visit(frame: Frame, mesh: Any, chains: set[tuple[str, str]]) -> Iterator[Collective]:
    for instruction in frame.computation.instructions.values():
        if instruction.opcode.removesuffix("-start") in OPS:
            if _first_of_chain(instruction, chains):
                yield _collective(frame, instruction, mesh)
        elif instruction.opcode == "send" and "_xla_megascale_transfer_type" in instruction.rest:
            yield _collective_between_slices(frame, instruction)
        elif instruction.opcode == "while":
            yield from _visit_while(frame, instruction, mesh)
        elif instruction.opcode == "conditional":
            names = instruction.called(
                "branch_computations", "true_computation", "false_computation"
            )
            yield from max(
                (list(_visit(frame.enter(instruction, n), mesh, set())) for n in names),
                key=total_bytes,
            )
        elif instruction.opcode in ("call", "fusion", "async-start", "custom-call"):
            inside = chains if instruction.opcode == "fusion" else set()
            for name in instruction.called("calls", "to_apply", "called_computations"):
                yield from _visit(frame.enter(instruction, name), mesh, inside)


def _first_of_chain(instruction: Instruction, chains: set[tuple[str, str]]) -> bool:
    attributes = instruction.attributes
    chain = re.search(r'chain_id="(\w+)"', attributes.get("frontend_attributes", ""))
    if chain is None:
        return True
    key = (chain[1], attributes.get("channel_id", ""))
    known = key in chains
    chains.add(key)
    return not known


def _visit_while(frame: Frame, loop: Instruction, mesh: Any) -> Iterator[Collective]:
    (body,), (condition,) = loop.called("body"), loop.called("condition")
    parts = [list(_visit(frame.enter(loop, name), mesh, set())) for name in (body, condition)]
    if any(parts):  # a loop without collectives may run as long as it likes
        trips = trip_count(frame, loop)
        for part, times in zip(parts, (trips, trips + 1), strict=True):
            for c in part:
                yield dataclasses.replace(c, bytes=c.bytes * times, count=c.count * times)


def _collective(frame: Frame, instruction: Instruction, mesh: Any) -> Collective:
    op = instruction.opcode.removesuffix("-start")
    shape = instruction.shape
    if op != instruction.opcode and op != "all-reduce":
        shape = tuple_elements(shape)[1]  # the others start with (operands, results, ...)
    size = shape_bytes(shape)
    if op == "reduce-scatter":
        operands = (frame.operand(instruction, i) for i in range(len(instruction.operands)))
        size = sum(shape_bytes(operand.shape) for operand in operands)
    elif op == "all-reduce" and frame.computation.name.startswith("all-reduce-scatter"):
        op = "reduce-scatter"
    if op == "collective-permute":
        pairs = explicit_groups(instruction.attributes["source_target_pairs"])
        group_size, axes = 2, None if mesh is None else axes_of_pairs(pairs, mesh)
    else:
        text = instruction.attributes.get("replica_groups", "{}")
        groups = replica_groups(text, frame.module.num_devices)
        group_size = max(map(len, groups))
        axes = None if mesh is None else axes_of_groups(groups, mesh)
    scopes = _scopes(frame, instruction)
    return Collective(op, size, 1, axes, group_size, instruction.name, scopes)


def _collective_between_slices(frame: Frame, send: Instruction) -> Collective:
    attributes = send.attributes.get("frontend_attributes", "")
    match = re.search(r'_xla_megascale_transfer_type="(\w+)"', attributes)
    op = match[1].lower().replace("_", "-") if match else "collective-permute"
    size = shape_bytes(tuple_elements(send.shape)[0])
    # Named after nothing itself, it belongs to what made its operand.
    found, todo, seen = set(), [send.operands[0]], set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            current = frame.computation.instructions[name]
            path = _path(current)
            found |= _scopes_of(path)
            todo += [] if path or current.opcode in _LEAVES else current.operands
    if not found and frame.outer is not None:
        found = _scopes(*frame.outer)
    return Collective(op, size, 1, None, 0, send.name, frozenset(found), between_slices=True)


def _scopes(frame: Frame, instruction: Instruction) -> frozenset[str]:
    """The scopes in an instruction's path; if it has none, those of its users or of its caller.

    Instructions without a path were made by the compiler, or named after a program's argument.
    """
    found, todo, seen = set(), [instruction], set()
    while todo:
        current = todo.pop()
        if current.name not in seen:
            seen.add(current.name)
            path = _path(current)
            found |= _scopes_of(path)
            todo += [] if path else frame.computation.users[current.name]
    if not found and not _path(instruction) and frame.outer is not None:
        return _scopes(*frame.outer)
    return frozenset(found)


def _path(instruction: Instruction) -> str:
    match = re.search(r'op_name="([^"]*/[^"]*)"', instruction.attributes.get("metadata", ""))
    return match[1] if match else ""


def _scopes_of(path: str) -> set[str]:
    # A merged instruction has a path `a/(b/c:d/e)`; `jit(clip)` is jnp.clip and not a scope.
    pieces = re.sub(r"jit\([^()]*\)", "", path).split(":")
    words = [[word for word in re.findall(r"\w+", piece) if word in SCOPES] for piece in pieces]
    return {found[0] for found in words if found}
