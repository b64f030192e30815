"""The arrays that a compiled program writes to memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from maxmars.hlo.text import Module, parse, tuple_elements

_CALLERS = {
    "while": ("body", "condition"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "call": ("to_apply",),
    "async-start": ("calls",),
}


@dataclass(frozen=True)
class ArrayShape:
    """An array on one device."""

    dtype: str
    """As HLO writes it, for example f32 or bf16."""
    dims: tuple[int, ...]
    instruction: str
    """Name of the instruction that makes it or takes it from another."""


def arrays(compiled_or_text: Any) -> tuple[ArrayShape, ...]:
    """The arrays of a compiled program, on one device.

    What a fusion computes on its way is never written, and not there; nor is the inside of a
    kernel (custom call).

    Args:
      compiled_or_text: a `jax.stages.Compiled`, or its `as_text()`.

    Raises:
      ValueError: the text is not HLO.
    """
    text = compiled_or_text if isinstance(compiled_or_text, str) else compiled_or_text.as_text()
    module = parse(text)
    return tuple(array for name in _run(module) for array in _made_in(module, name))


def _run(module: Module) -> Iterator[str]:
    """Names of the computations that run on their own: neither fused nor a reduction's."""
    todo, seen = [module.entry], {module.entry}
    while todo:
        name = todo.pop()
        yield name
        for instruction in module.computations[name].instructions.values():
            called = set(instruction.called(*_CALLERS.get(instruction.opcode, ()))) - seen
            todo += sorted(called)
            seen |= called


def _made_in(module: Module, name: str) -> Iterator[ArrayShape]:
    for instruction in module.computations[name].instructions.values():
        for shape in _leaves(instruction.shape):
            if found := re.match(r"(\w+)\[([\d,<=]*)\]", shape):
                dims = tuple(int(n.lstrip("<=")) for n in found[2].split(",") if n)
                yield ArrayShape(found[1], dims, instruction.name)


def _leaves(shape: str) -> Iterator[str]:
    if shape.startswith("("):
        for element in tuple_elements(shape):
            yield from _leaves(element)
    else:
        yield shape
