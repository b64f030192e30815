"""Trip counts of loops, for compilers that do not write them down.

The loop is run, with nothing but the integers that its condition depends on.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

from maxmars.hlo.text import Computation, Instruction, Module

_MOST_TRIPS = 10_000  # running a loop that never ends must not take long
_SAME = ("copy", "bitcast", "reshape", "convert", "copy-start", "copy-done", "opt-barrier")
_ARITHMETIC = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
}


@dataclass(frozen=True, eq=False)
class Frame:
    """A computation, and who called it, which tells what its arguments are."""

    module: Module
    computation: Computation
    outer: tuple[Frame, Instruction] | None = None
    """The calling frame and instruction; None for the entry."""
    state: dict[tuple[int, ...], int] | None = None
    """In a loop that is being run: known parts of its state, by their path in the tuple."""

    def enter(self, caller: Instruction, name: str, state: Any = None) -> Frame:
        """The frame of a computation that an instruction of this one calls."""
        return Frame(self.module, self.module.computations[name], (self, caller), state)

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        """The instruction that makes an operand."""
        return self.computation.instructions[instruction.operands[index]]


class _UnknownError(Exception):
    """A number depends on data; names the instruction."""


def trip_count(frame: Frame, loop: Instruction) -> int:
    """How often the body of a loop runs.

    Raises:
      ValueError: that depends on data; the message names the loop.
    """
    pattern = r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)'
    if known := re.search(pattern, loop.attributes.get("backend_config", "")):
        return int(known[1])
    state: dict[tuple[int, ...], int] = {}
    try:
        for trips in range(_MOST_TRIPS):
            condition = frame.enter(loop, loop.called("condition")[0], state)
            if not _value(condition, condition.computation.root):
                return trips
            state = _advance(frame, loop, state)
        reason = f"it is still running after {_MOST_TRIPS} iterations"
    except _UnknownError as error:
        reason = f"{error} is not known"
    raise ValueError(f"cannot tell how often the loop {loop.name!r} runs: {reason}.")


def _advance(frame: Frame, loop: Instruction, state: dict[Any, int]) -> dict[Any, int]:
    """The state after one more iteration; what it depends on is added to both at the first."""
    body = frame.enter(loop, loop.called("body")[0], state)
    new: dict[Any, int] = {}
    while len(new) < len(state):
        for path in state.keys() - new.keys():
            new[path] = _value(body, body.computation.root, path)
    return new


def _unchanged(frame: Frame, loop: Instruction, path: tuple[int, ...]) -> int:
    """A part of a loop's state that the first iteration, and so every one, leaves as it is."""
    state = {path: _value(frame, frame.operand(loop, 0), path)}
    if _advance(frame, loop, state) != state:
        raise _UnknownError(f"a counter of the loop {loop.name!r} around it")
    return state[path]


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
            return _unchanged(frame, instruction, path)
        case "parameter" if frame.outer is not None:
            return _argument(frame, *frame.outer, int(instruction.arguments), path)
        case opcode if opcode in _SAME:
            return _value(frame, frame.operand(instruction, 0), path)
        case opcode if opcode in _ARITHMETIC or opcode == "compare":
            sides = [_value(frame, frame.operand(instruction, i)) for i in (0, 1)]
            relation = instruction.attributes.get("direction", "").lower()
            return int((_ARITHMETIC.get(opcode) or getattr(operator, relation))(*sides))
    raise _UnknownError(f"{instruction.opcode} {instruction.name!r}")


def _argument(
    frame: Frame, parent: Frame, caller: Instruction, index: int, path: tuple[int, ...]
) -> int:
    if caller.opcode != "while":
        return _value(parent, parent.operand(caller, index), path)
    if frame.state is None:
        return _unchanged(parent, caller, path)
    if path not in frame.state:
        frame.state[path] = _value(parent, parent.operand(caller, 0), path)
    return frame.state[path]
