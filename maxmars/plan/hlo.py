"""The text of an optimised HLO module, as `jax.stages.Compiled.as_text()` gives it.

A module is a list of computations, a computation a list of lines
`%name = shape opcode(operands), key=value, ...`. `parse` splits a text into these; operands and
attributes of an instruction are parsed at their first use, since most are never used. The text is
that of XLA's compilers for CPUs, GPUs and TPUs, which differ in details.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# What a module looks like (names and attributes shortened):
#
#   HloModule jit_step, is_scheduled=true, num_partitions=4
#
#   %add (x: f32[], y: f32[]) -> f32[] {                               _HEADER
#     %x = f32[] parameter(0)
#     ROOT %sum = f32[] add(f32[] %x, f32[] %y)                        _INSTRUCTION
#   }                                                                  _END
#
#   ENTRY %main (p: f32[8,16]) -> f32[8,16] {
#     %p = f32[8,16]{1,0} parameter(0), metadata={op_name="params"}
#     ROOT %all-reduce.1 = f32[8,16]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3}},
#          to_apply=%add, metadata={op_name="jit(step)/model/psum"}    on one line
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:.* )?\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_END = re.compile(r"\}(, execution_thread=.*)?$")
# A quoted text, which may hold brackets; or a bracket or comma.
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    """For example `f32[2,3]{1,0}`, or `(s32[], bf16[8]{0:T(128)})` for a tuple."""
    opcode: str
    arguments: str
    """The text in the parentheses: operands, a constant's value, a parameter's number."""
    rest: str
    """The text after the parentheses: attributes."""

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands; some printers put a shape before each."""
        if self.opcode in ("constant", "parameter"):
            return ()
        return tuple(item.split()[-1].lstrip("%") for item in _split(self.arguments))

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """Texts of the attributes by name, such as `dimensions` or `metadata`."""
        attributes: dict[str, str] = {}
        for item in _split(self.rest):
            key, _, value = item.partition("=")
            if key == "device_ids":  # the second half of the mesh notation of replica groups
                attributes["replica_groups"] += f" {value}"
            else:
                attributes[key] = value
        return attributes

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's name of the traced operation or argument; "" if the compiler made it."""
        match = re.search(r'op_name="([^"]*)"', self.attributes.get("metadata", ""))
        return match[1] if match else ""

    @property
    def path(self) -> str:
        """`op_name` of an operation, such as `jit(f)/model/jvp()/dot_general`, else ""."""
        return self.op_name if "/" in self.op_name else ""

    def called(self, *keys: str) -> list[str]:
        """Names of the computations that these attributes list."""
        values = [self.attributes.get(key, "") for key in keys]
        return [name for value in values for name in re.findall(r"[\w.\-]+", value)]


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that have each instruction as an operand."""
        users = defaultdict(list)
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                users[operand].append(instruction)
        return users


@dataclass(frozen=True)
class Module:
    """A whole program."""

    computations: dict[str, Computation]
    entry: str
    """Name of the computation that a run starts with."""
    num_devices: int


def parse(program: Any) -> Module:
    """Parse a program, given as a `jax.stages.Compiled` or as its `as_text()`.

    Raises:
      ValueError: the text is not HLO.
    """
    text = program if isinstance(program, str) else program.as_text()
    computations, entry, name, body, root = {}, None, None, {}, None
    for line in _lines(text):
        if name is None:
            header = None if line.startswith("HloModule") else _HEADER.match(line)
            if header:
                name, body, root = header[2], {}, None
                entry = name if header[1] else entry
        elif _END.match(line):
            if body:
                computations[name] = Computation(name, body, root or list(body.values())[-1])
            name = None
        elif match := _INSTRUCTION.match(line):
            body[match[2]] = _instruction(match[2], line[match.end() :])
            root = body[match[2]] if match[1] else root
    if entry not in computations:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY computation.")
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    return Module(computations, entry, math.prod(map(int, counts)))


def tuple_elements(shape: str) -> list[str]:
    """Shapes of the elements of a tuple; for an array, its own shape alone."""
    return _split(shape[1:-1]) if shape.startswith("(") else [shape]


def shape_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays in a tuple, without padding to tiles."""
    if shape.startswith("("):
        return sum(map(shape_bytes, tuple_elements(shape)))
    dtype, _, dims = shape.partition("[")
    bits = re.search(r"\d+", dtype)  # bf16, f8e4m3fn, s4; a token has none
    size = math.prod(int(n.lstrip("<=")) for n in dims.partition("]")[0].split(",") if n)
    return math.ceil((8 if dtype == "pred" else int(bits[0]) if bits else 0) * size / 8)


def _lines(text: str) -> Iterator[str]:
    """The lines of a module; an attribute with line breaks, as a kernel's, becomes one line."""
    joined = ""
    for line in text.splitlines():
        if joined.startswith("  ") and not (line.startswith("  ") or _END.match(line)):
            joined += line
        else:
            yield joined
            joined = line
    yield joined


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opening = text.index("(", end)
    closing = _closing(text, opening)
    arguments, rest = text[opening + 1 : closing - 1], text[closing:].lstrip(", ")
    return Instruction(name, text[:end], text[end:opening].strip(), arguments, rest)


def _closing(text: str, start: int) -> int:
    """Position after the bracket that closes the one at `start`."""
    depth = 0
    for token in _TOKENS.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0:
            return token.end()
    raise ValueError(f"unbalanced brackets in HLO text: {text[:200]}")


def _split(text: str) -> list[str]:
    """Items of a list between its outermost commas, without comments."""
    # `f32[2,3] %x, {0,1}, "a,b"` has three items: a comma counts at depth 0 only.
    items, depth, start = [], 0, 0
    for token in _TOKENS.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0 and token[0] == ",":
            items.append(text[start : token.start()])
            start = token.end()
    items = [re.sub(r"/\*.*?\*/", "", item).strip() for item in (*items, text[start:])]
    return [item for item in items if item]
