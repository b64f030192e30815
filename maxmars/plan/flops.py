"""FLOPs of a traced step: its matrix products, counted in the program as JAX traced it.

Unlike a compiler's cost analysis this counts each iteration of a loop, and it does not depend on
the device. Recomputation in the backward pass is there, since it is traced. Elementwise arithmetic
is left out: it is bound by memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from maxmars.hlo import SCOPES


def matmul_flops(closed_jaxpr: Any) -> Counter[str]:
    """FLOPs of one execution over all devices, by the `jax.named_scope` around them.

    The scopes are those of `hlo.SCOPES`; what lies outside them counts under "". Of a conditional
    the branch with the most counts, and a loop without a known number of iterations counts once.
    """
    return _count(closed_jaxpr, "", 1)


def _count(jaxpr: Any, outer: str, times: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        path = str(eqn.source_info.name_stack).replace("(", "/").replace(")", "/").split("/")
        scope = next((name for name in path if name in SCOPES), outer)
        if eqn.primitive.name == "dot_general":
            found[scope] += times * _dot_flops(eqn)
        elif eqn.primitive.name == "cond":
            branches = [_count(branch, scope, times) for branch in eqn.params["branches"]]
            found += max(branches, key=Counter.total)
        else:
            repeats = times * _repeats(eqn)
            for inner in _jaxprs(eqn.params):
                found += _count(inner, scope, repeats)
    return found


def _repeats(eqn: Any) -> int:
    """How often an equation runs what it holds, over all devices."""
    match eqn.primitive.name:
        case "scan":
            return eqn.params["length"]
        case "shard_map":  # its shapes are one device's
            return math.prod(eqn.params["mesh"].shape.values())
        case "pallas_call":  # a kernel, run once for each place of its grid, the skipped ones too
            return math.prod(eqn.params["grid_mapping"].grid)
        case _:
            return 1


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item


def _dot_flops(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
