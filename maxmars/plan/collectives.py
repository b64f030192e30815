"""The collectives of a compiled program: their bytes, and the mesh axes that they run over.

`collectives` walks the text of an optimised HLO module from the entry computation through loops,
calls, fusions and conditionals, and multiplies by each loop's trip count. (The compiler's own cost
analysis counts a loop's body once, and knows no networks.)

The file goes from the whole to the parts: the collectives, the walk, the trip counts of loops, the
groups of devices.

Compilers have four habits that need care:
* libtpu writes no trip counts. `trip_count` works them out from the loop's condition and body.
* libtpu spreads one asynchronous collective over several fusions, which all repeat it under the
  same `chain_id`. It writes a reduce-scatter as a fusion `all-reduce-scatter` of an all-reduce.
* Replica groups come in three notations; see `_replica_groups`.
* For several slices libtpu writes the program of one slice. An exchange between slices is a `send`
  to its runtime ("MegaScale"), whose attributes name the collective.

Other `send` and `recv` pairs are not counted, nor are custom calls that communicate on their own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from maxmars.plan.hlo import Computation, Instruction, Module, parse, shape_bytes, tuple_elements

OPS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
SCOPES = ("model", "clip", "optimizer")
"""Names of the train step's parts, set by `jax.named_scope`."""

Phase = Literal["model", "optimizer", "mixed"]
"""Phase of the step that a collective serves. `model` includes the norm of the gradient for the
clip. `mixed` are collectives that the compiler merged from both phases, or that have no name."""


@dataclass(frozen=True)
class Collective:
    """One collective instruction, over all its executions in one run of the program."""

    op: str
    """One of `OPS`; asynchronous forms have the name of the synchronous one."""
    bytes: int
    """Bytes of the result on one device (reduce-scatter: of the operand) times `count`."""
    count: int
    """Executions: the product of the trip counts of the loops around it."""
    axes: tuple[str, ...] | None
    """Mesh axes of the groups of devices, in mesh order; None if no axes fit, or without a mesh."""
    group_size: int
    """Number of devices in one exchange; 2 for a permute."""
    name: str
    """Name of the instruction."""
    scopes: frozenset[str]
    """The `SCOPES` served: several if the compiler merged collectives; empty outside of them."""
    between_slices: bool = False
    """Whether data go from slice to slice, over the data center's network."""

    @property
    def phase(self) -> Phase:
        """Phase of the step, by the scopes."""
        if self.scopes == {"optimizer"}:
            return "optimizer"
        return "model" if self.scopes and "optimizer" not in self.scopes else "mixed"


def collectives(
    program: Any, mesh: Mesh | AbstractMesh | None = None, *, num_slices: int = 1
) -> tuple[Collective, ...]:
    """List the collectives of a compiled program, in the order of its text.

    An asynchronous pair counts once, and a conditional as its branch that moves the most bytes.
    Bytes are counted by the logical shape, without padding to tiles.

    Args:
      program: a `jax.stages.Compiled`, or its `as_text()`.
      mesh: the mesh that the program was compiled for. Replica groups number the devices in the
        order of `mesh.devices.flat`, whatever their ids are.
      num_slices: number of TPU slices that the mesh's first axis spans. An exchange between slices
        counts with the bytes sent, padding to tiles included.

    Raises:
      ValueError: the text is not HLO, or the trip count of a loop with collectives is unknown; the
        message names the loop.
    """
    module = parse(program)
    entry = Frame(module, module.computations[module.entry])
    if mesh is None or num_slices == 1:
        return tuple(find_collectives(entry, mesh, set()))
    # The program is that of one slice, whose mesh has a shorter first axis.
    first, *rest = mesh.axis_names
    shape = (mesh.shape[first] // num_slices, *(mesh.shape[name] for name in rest))
    slice_mesh = AbstractMesh(shape, mesh.axis_names)
    return tuple(
        dataclasses.replace(c, axes=(first,), group_size=num_slices) if c.between_slices else c
        for c in find_collectives(entry, slice_mesh, set())
    )


def total_bytes(
    collectives: Iterable[Collective], *, op: str | None = None, axes: tuple[str, ...] | None = None
) -> int:
    """Sum of the bytes of the collectives with operation `op` and `axes`; None stands for any."""
    return sum(c.bytes for c in collectives if op in (None, c.op) and axes in (None, c.axes))


def wire_bytes(collective: Collective) -> float:
    """Bytes that one device sends in a collective, on rings."""
    if collective.op in ("collective-permute", "collective-broadcast"):
        return float(collective.bytes)
    n = collective.group_size
    return collective.bytes * (2 if collective.op == "all-reduce" else 1) * (n - 1) / n


# The walk through a program.


@dataclass(frozen=True, eq=False)
class Frame:
    """A computation and its callers: a stack of calls."""

    module: Module
    computation: Computation
    outer: tuple[Frame, Instruction] | None = None
    """The calling frame and instruction; None for the entry computation."""
    state: dict[tuple[int, ...], int] | None = None
    """For the body or condition of a loop whose trips are being counted: the known integers of the
    loop's state, by their path in the tuple."""

    def enter(self, caller: Instruction, name: str, state: Any = None) -> Frame:
        """The frame of computation `name`, which an instruction of this computation calls."""
        return Frame(self.module, self.module.computations[name], (self, caller), state)

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        return self.computation.instructions[instruction.operands[index]]


def find_collectives(frame: Frame, mesh: Any, seen: set[tuple[str, str]]) -> Iterator[Collective]:
    """Find the collectives of a computation, and of the computations that it calls.

    `seen` holds the chain and the channel of each collective that libtpu repeats.
    """
    for instruction in frame.computation.instructions.values():
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in OPS:
            attributes = instruction.attributes
            # Each fusion of an asynchronous collective holds a copy of it: the first one counts.
            chain = re.search(r'chain_id="(\w+)"', attributes.get("frontend_attributes", ""))
            key = chain and (chain[1], attributes.get("channel_id", ""))
            if key not in seen:
                yield parse_collective(frame, instruction, mesh)
            if key is not None:
                seen.add(key)
        elif opcode == "send" and "_xla_megascale_transfer_type" in instruction.rest:
            yield _parse_exchange_between_slices(frame, instruction)
        elif opcode == "while":
            body_and_condition = [
                list(find_collectives(frame.enter(instruction, name), mesh, set()))
                for name in instruction.called("body", "condition")
            ]
            if any(body_and_condition):  # a loop without collectives may run as long as it likes
                trips = trip_count(frame, instruction)
                # The condition runs once more than the body: the last time it is false.
                for collectives, times in zip(body_and_condition, (trips, trips + 1), strict=True):
                    for c in collectives:
                        yield dataclasses.replace(c, bytes=c.bytes * times, count=c.count * times)
        elif opcode == "conditional":
            names = instruction.called(
                "branch_computations", "true_computation", "false_computation"
            )
            branches = [
                list(find_collectives(frame.enter(instruction, n), mesh, set())) for n in names
            ]
            yield from max(branches, key=total_bytes)
        elif opcode in ("call", "fusion", "async-start", "custom-call"):
            # Only fusions of one computation repeat a collective.
            seen_inside = seen if opcode == "fusion" else set()
            for name in instruction.called("calls", "to_apply", "called_computations"):
                yield from find_collectives(frame.enter(instruction, name), mesh, seen_inside)


def parse_collective(frame: Frame, instruction: Instruction, mesh: Any) -> Collective:
    """The collective of an instruction, for one execution."""
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
        pairs = _explicit_groups(instruction.attributes["source_target_pairs"])
        group_size, axes = 2, None if mesh is None else _axes_of_pairs(pairs, mesh)
    else:
        text = instruction.attributes.get("replica_groups", "{}")
        groups = _replica_groups(text, frame.module.num_devices)
        group_size = max(map(len, groups))
        axes = None if mesh is None else _axes_of_groups(groups, mesh)
    scopes = _scopes(frame, instruction)
    return Collective(op, size, 1, axes, group_size, instruction.name, scopes)


def _parse_exchange_between_slices(frame: Frame, send: Instruction) -> Collective:
    attributes = send.attributes.get("frontend_attributes", "")
    match = re.search(r'_xla_megascale_transfer_type="(\w+)"', attributes)
    op = match[1].lower().replace("_", "-") if match else "collective-permute"
    size = shape_bytes(tuple_elements(send.shape)[0])
    # A send has no path of its own, so the instructions that made its operand give the scopes.
    scopes = _nearest_scopes(frame, frame.operand(send, 0), "operands")
    if not scopes and frame.outer is not None:
        scopes = _scopes(*frame.outer)
    return Collective(op, size, 1, None, 0, send.name, scopes, between_slices=True)


def _scopes(frame: Frame, instruction: Instruction) -> frozenset[str]:
    """The scopes in an instruction's path; without a path, the scopes of its users or its caller.

    An instruction without a path was made by the compiler, or has the name of an argument.
    """
    # A collective that the compiler inserted, such as the all-gather of a parameter, serves the
    # users of its result. The users of the root of a fusion or a loop stand outside of it.
    scopes = _nearest_scopes(frame, instruction, "users")
    if not scopes and not instruction.path and frame.outer is not None:
        return _scopes(*frame.outer)
    return scopes


def _nearest_scopes(
    frame: Frame, start: Instruction, towards: Literal["users", "operands"]
) -> frozenset[str]:
    """The scopes in the nearest paths, from an instruction towards its users or operands."""
    computation, scopes, todo, seen = frame.computation, set(), [start], set()
    while todo:
        current = todo.pop()
        if current.name in seen:
            continue
        seen.add(current.name)
        scopes |= scopes_of(current.path)
        if not current.path and towards == "users":
            todo += computation.users[current.name]
        elif not current.path:
            todo += [computation.instructions[name] for name in current.operands]
    return frozenset(scopes)


def scopes_of(path: str) -> set[str]:
    """The `SCOPES` in the path of an operation; several if the compiler merged operations."""
    # A merged instruction has a path `a/(b/c:d/e)`; `jit(clip)` is jnp.clip and not a scope.
    paths = re.sub(r"jit\([^()]*\)", "", path).split(":")
    scopes = [[name for name in re.findall(r"\w+", p) if name in SCOPES] for p in paths]
    return {of_path[0] for of_path in scopes if of_path}


# Trip counts. libtpu writes none, so a loop is run here, with nothing but the integers that its
# condition depends on. A loop over the layers of a model looks like this, without its arrays:
#
#   condition (state) { i = get-tuple-element(state), index=0
#                       n = constant(48)
#                       ROOT compare(i, n), direction=LT }
#   body (state)      { i = get-tuple-element(state), index=0
#                       one = constant(1)
#                       next = add(i, one)
#                       ROOT tuple(next, ...) }
#   while(start), condition=condition, body=body
#
# `_value` evaluates the root of the condition, which needs element 0 of the state: at first that of
# `start`, later that of the body's root, by `_advance`. The known elements are a dict from their
# path in the tuple to the integer. In other programs the bound is an element of the state too,
# which no iteration changes (`_invariant`).

_MAX_TRIPS = 10_000  # a loop that never ends must not take long here
_PASS_THROUGH = ("copy", "bitcast", "reshape", "convert", "copy-start", "copy-done", "opt-barrier")
_ARITHMETIC = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
}


class _UnknownError(Exception):
    """A number depends on data; the message names the instruction."""


def trip_count(frame: Frame, loop: Instruction) -> int:
    """Number of iterations of a loop.

    Raises:
      ValueError: the number depends on data; the message names the loop.
    """
    pattern = r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)'
    if known := re.search(pattern, loop.attributes.get("backend_config", "")):
        return int(known[1])
    state: dict[tuple[int, ...], int] = {}
    try:
        for trips in range(_MAX_TRIPS):
            condition = frame.enter(loop, loop.called("condition")[0], state)
            if not _value(condition, condition.computation.root):
                return trips
            state = _advance(frame, loop, state)
        reason = f"it is still running after {_MAX_TRIPS} iterations"
    except _UnknownError as error:
        reason = f"{error} is not known"
    raise ValueError(f"cannot tell how often the loop {loop.name!r} runs: {reason}.")


def _advance(frame: Frame, loop: Instruction, state: dict[Any, int]) -> dict[Any, int]:
    """The state after one more iteration. The first call adds to `state` all integers on which the
    known integers depend."""
    body = frame.enter(loop, loop.called("body")[0], state)
    new: dict[Any, int] = {}
    # An element may depend on another that was not needed before. `_argument` then adds that other
    # to `state` while this loop runs, and it too needs a value for the next iteration.
    while len(new) < len(state):
        for path in state.keys() - new.keys():
            new[path] = _value(body, body.computation.root, path)
    return new


def _value(frame: Frame, instruction: Instruction, path: tuple[int, ...] = ()) -> int:
    """The integer that an instruction results in, at `path` within a tuple."""
    match instruction.opcode:
        case "constant" if re.fullmatch(r"-?\d+|true|false", instruction.arguments):
            return int({"true": 1, "false": 0}.get(instruction.arguments, instruction.arguments))
        case "get-tuple-element":
            path = (int(instruction.attributes["index"]), *path)
            return _value(frame, frame.operand(instruction, 0), path)
        case "tuple" if path:
            return _value(frame, frame.operand(instruction, path[0]), path[1:])
        case "fusion" | "call":
            inside = frame.enter(instruction, instruction.called("calls", "to_apply")[0])
            return _value(inside, inside.computation.root, path)
        case "while":
            return _invariant(frame, instruction, path)
        case "parameter" if frame.outer is not None:
            return _argument(frame, *frame.outer, int(instruction.arguments), path)
        case opcode if opcode in _PASS_THROUGH:
            return _value(frame, frame.operand(instruction, 0), path)
        case opcode if opcode in _ARITHMETIC or opcode == "compare":
            sides = [_value(frame, frame.operand(instruction, i)) for i in (0, 1)]
            relation = instruction.attributes.get("direction", "").lower()
            return int((_ARITHMETIC.get(opcode) or getattr(operator, relation))(*sides))
    raise _UnknownError(f"{instruction.opcode} {instruction.name!r}")


def _argument(
    frame: Frame, parent: Frame, caller: Instruction, index: int, path: tuple[int, ...]
) -> int:
    # A parameter of a call is the call's operand. The parameter of a loop's body is the loop's
    # state: the current one if its trips are being counted; in a loop around that one, only an
    # element that no iteration changes is known.
    if caller.opcode != "while":
        return _value(parent, parent.operand(caller, index), path)
    if frame.state is None:
        return _invariant(parent, caller, path)
    if path not in frame.state:
        frame.state[path] = _value(parent, parent.operand(caller, 0), path)
    return frame.state[path]


def _invariant(frame: Frame, loop: Instruction, path: tuple[int, ...]) -> int:
    """An integer of a loop's state that no iteration changes, as the first iteration does not."""
    state = {path: _value(frame, frame.operand(loop, 0), path)}
    if _advance(frame, loop, state) != state:
        raise _UnknownError(f"a counter of the loop {loop.name!r} around it")
    return state[path]


# Groups of devices, and their mesh axes. Devices are numbered in the order of `mesh.devices.flat`,
# whatever their ids are.

_Groups = frozenset[frozenset[int]]


@functools.lru_cache(maxsize=4096)
def _replica_groups(text: str, num_devices: int) -> _Groups:
    """Groups of devices; an empty list stands for one group of all.

    Compilers write them in three notations: `{{0,1},{2,3}}`; `[2,2]<=[4]`; or by axes of a mesh of
    their own, `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`, where 'b':(2)2 is the
    part of size 2 of axis b that comes after a part of size 2.

    Raises:
      ValueError: the notation is unknown.
    """
    if text.startswith("{"):
        groups = _explicit_groups(text) or [range(num_devices)]
    elif text.startswith("["):
        dims, _, iota = text.partition("<=")
        groups = _iota(iota).reshape(_numbers(dims)).tolist()
    elif match := re.match(r"mesh\[(.*?)\](?:, device_ids=|\s*)(\(.*\))? ?\{(.*)\}$", text):
        groups = _mesh_groups(*match.groups())
    else:
        raise ValueError(f"unknown notation of replica groups: {text}")
    return frozenset(map(frozenset, groups))


def _explicit_groups(text: str) -> list[list[int]]:
    """Groups, or the pairs of a permute, written out as `{{0,1},{2,3}}`."""
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> list[list[int]]:
    # Each axis is cut where a part begins or ends: 'b'=4 with 'b':(2)2 becomes 2 x 2, and groups
    # run over the second 2.
    named = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
    dims, over = [], []
    for name, size in re.findall(r"'([^']*)'=(\d+)", mesh):
        spans = [(int(b or 1), int(b or 1) * int(s or size)) for n, b, s in named if n == name]
        cuts = sorted({1, int(size)}.union(*spans))
        for low, high in itertools.pairwise(cuts):
            if any(start <= low and high <= end for start, end in spans):
                over.append(len(dims))
            dims.append(high // low)
    devices = np.arange(math.prod(dims))
    if device_ids:
        devices = _iota(device_ids) if "[" in device_ids else np.array(_numbers(device_ids))
    return _groups_over(devices.reshape(dims), over)


def _iota(text: str) -> np.ndarray:
    """Device numbers as `[4,2]T(1,0)` orders them: counted, reshaped, transposed."""
    dims, _, permutation = text.partition("T")
    devices = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return devices.transpose(_numbers(permutation)) if permutation else devices


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _groups_over(devices: np.ndarray, axes: Sequence[int]) -> list[list[int]]:
    """Groups of the devices in a grid that differ in `axes` only."""
    other_axes = [i for i in range(devices.ndim) if i not in axes]
    size = math.prod(devices.shape[i] for i in axes)
    return devices.transpose(*other_axes, *axes).reshape(-1, size).tolist()


@functools.lru_cache(maxsize=4096)
def _axes_of_groups(groups: _Groups, mesh: Mesh | AbstractMesh) -> tuple[str, ...] | None:
    """The mesh axes of groups, in mesh order; None if no set of axes fits."""
    names = [name for name, size in mesh.shape.items() if size > 1]
    devices = np.arange(mesh.size).reshape([mesh.shape[name] for name in names])
    for count in range(len(names) + 1):
        for axes in itertools.combinations(range(len(names)), count):
            if frozenset(map(frozenset, _groups_over(devices, axes))) == groups:
                return tuple(names[i] for i in axes)
    return None


def _axes_of_pairs(pairs: list[list[int]], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The mesh axes in which the two devices of any pair of a permute differ."""
    coordinates = np.array(np.unravel_index(np.array(pairs), tuple(mesh.shape.values())))
    differs = (coordinates[..., 0] != coordinates[..., 1]).any(axis=-1)
    return tuple(name for name, d in zip(mesh.shape, differs, strict=True) if d)
