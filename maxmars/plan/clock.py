"""The time of one run of a compiled program on a chip, operation by operation.

Instructions run one after the other in the order of the text, the body of a loop as often as its
trip count says. Asynchronous transfers run beside them; their `done` waits for the end. The time of
an instruction is

* on TPUs, whose compiler writes `"estimated_cycles"` beside most instructions, these cycles;
* for a TPU's kernel of attention, the cycles of one block (`KERNELS`) times the blocks;
* for a GPU's matrix product or cuDNN attention, its FLOPs at `PRODUCTS_SHARE` or `ATTENTION_SHARE`
  of the published FLOP/s, or the time of its bytes if that is longer;
* for a collective, the bytes that a chip sends at the rate of all its links in one direction;
* for everything else, its bytes at the memory's rate, on GPUs at `MEMORY_SHARE` of this rate;
* for each kernel of a GPU, `LAUNCH_S` at least.

Accuracy: on TPUs products and float32 streams agree with the rates of the chip to 2 to 30 %.
The compiler charges elementwise work in bfloat16 as float32, about 2.5 times the memory's time, so
there is a second figure, at the memory's rate: all but products, kernels and collectives then takes
the time of its bytes, where that is less. Exchanges between slices are not counted. On GPUs the
three shares were measured on one card, an H200; no network was measured.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import Mesh

from maxmars.config.chips import Chip
from maxmars.plan.collectives import (
    OPS,
    Collective,
    Frame,
    find_collectives,
    parse_collective,
    scopes_of,
    trip_count,
    wire_bytes,
)
from maxmars.plan.hlo import Instruction, parse, shape_bytes, tuple_elements

PRODUCTS = "products of the layers"
ATTENTION = "kernels of attention"
LOSS_PRODUCTS = "products of the loss"
LOSS_ELEMENTWISE = "elementwise work of the loss"
QKV = "q, k, v around attention: copies, sums"
CASTS = "casts, as of the weights"
LAYOUTS = "other layouts: copies, transposes"
ELEMENTWISE = "norms and elementwise work"
OPTIMIZER = "optimizer and clip"
COLLECTIVES = "collectives that nothing hides"
KINDS = (
    *(PRODUCTS, ATTENTION, QKV, LOSS_PRODUCTS, LOSS_ELEMENTWISE),
    *(CASTS, LAYOUTS, ELEMENTWISE, OPTIMIZER, COLLECTIVES),
)

PRODUCTS_SHARE = 0.69
ATTENTION_SHARE = 0.22
MEMORY_SHARE = 0.59
"""Shares of a GPU's published FLOP/s and memory rate that operations reach on an H200 (JAX 0.11.2,
cuDNN 9). In a profile of GPT-2 small's step, 24 rows a microbatch, matrix products reached
0.72, attention of 1,024 tokens and heads of 64 (its masked half not counted) 0.23, AdamW's update
0.61 of the memory's rate. Each share is 3 to 5 % less here, so that the sum is the median step: the
profile lacks the time between kernels, and is of the best of three steps."""

LAUNCH_S = 1.6e-6
"""Least time of a GPU's kernel. Of that profile's 24.1 ms for 12 rows, products took 12.8 and
attention 3.6, and at AdamW's share all else takes 7.2. The rest, 0.5 ms (known to 0.1), lies
between the 638 kernels of the 24 rows: 1.6 us each, give or take 0.5. It is a minimum and not added
to every kernel, as the shares of long kernels contain it: a microbatch of 12 rows, which has 569
kernels, took 0.1 to 0.5 ms more than half of 24 rows, and the bytes alone give 0.5 ms."""

TF32_SLOWER, FLOAT32_SLOWER = 2, 15
"""Time of a float32 product over that of a bfloat16 product, by NVIDIA's data sheet of the H100: in
TF32, which is XLA's default, and at JAX's precision `highest`."""

BLOCK = 512
KERNELS = {
    "TPU v5e": {
        "splash_mha_fwd": 5370 / 3,
        "splash_mha_dkv": 11180 / 4,
        "flat_attention_forward_64": 5840 / 3,
        "flat_attention_backward_64": 11035 / 3,
        "flat_attention_forward_128": 4450 / 3,
        "flat_attention_backward_128": 9130 / 3,
    },
    "TPU v5p": {  # of one core; a chip's two share the grid
        "splash_mha_fwd": 5800 / 3 / 2,
        "splash_mha_dkv": 11180 / 4 / 2,
        "flat_attention_forward_64": 5940 / 3 / 2,
        "flat_attention_backward_64": 11035 / 3 / 2,
        "flat_attention_forward_128": 4570 / 3 / 2,
        "flat_attention_backward_128": 9130 / 3 / 2,
    },
    "TPU v6e": {
        "splash_mha_fwd": 3990 / 3,
        "splash_mha_dkv": 6440 / 4,
        "flat_attention_forward_64": 4490 / 3,
        "flat_attention_backward_64": 7850 / 3,
        "flat_attention_forward_128": 3290 / 3,
        "flat_attention_backward_128": 5380 / 3,
    },
}
"""Cycles of one block of 512 x 512 logits, by `Chip.name` and the prefix of the kernel's name. A
block belongs to a head in splash, and to a tile in flat attention: one head of 128 or two of 64.

The cycles are the length of the machine code (bundles, about one a cycle) that libtpu 0.0.42.1
makes for a row of 1,024 tokens, which has 3 causal blocks, or the time of its products in the
matrix units where that is longer. Splash's backward kernel computes all 4 blocks."""


@dataclass(frozen=True)
class Operation:
    """One instruction, or several that are alike, over all executions."""

    kind: str
    """One of `KINDS`."""
    name: str
    """Last two parts of JAX's name of the operation, or the instruction's own name."""
    shape: str
    """Shape of the result, or of the first of several results, without layout."""
    count: int
    """Number of executions."""
    seconds: float
    at_memory_rate_seconds: float
    """Seconds of the bytes at the memory's rate, where that is less and this is no product, kernel
    or collective; else `seconds`."""
    compute_bound_seconds: float
    """Seconds of its matrix products at the chip's published FLOP/s; 0 without products."""
    recomputed: bool
    """Whether XLA repeats the operation because memory is short."""


@dataclass(frozen=True, kw_only=True)
class KindClock:
    """Sums of fields of `Operation` over several operations."""

    count: int
    seconds: float
    at_memory_rate_seconds: float
    compute_bound_seconds: float


@dataclass(frozen=True, kw_only=True)
class StepClock:
    """The time of one run of a program on one chip."""

    seconds: float
    at_memory_rate_seconds: float
    """Seconds with all but products, kernels and collectives at the memory's rate, with padding; on
    GPUs the same as `seconds`."""
    kinds: dict[str, KindClock]
    """The sums of each of `KINDS`, which add up to the whole."""
    recomputed: KindClock
    """The sums of the operations that XLA repeats because memory is short; `kinds` has them too."""
    largest: tuple[Operation, ...]
    """The ten operations that take most time."""
    guessed: tuple[str, ...]
    """Names of kernels whose time is that of their bytes, and of loops that count once because
    their trip count depends on data."""


def step_clock(
    program: Any,
    chip: Chip,
    mesh: Mesh | None = None,
    bandwidth: Callable[[Collective], float] | None = None,
) -> StepClock | None:
    """The clock of a compiled program; None for a TPU whose cycles a second are not known.

    Args:
      program: a `jax.stages.Compiled`, or its `as_text()`.
      chip: the chip that the program was compiled for.
      mesh: the mesh of its devices, which gives `bandwidth` the axes of a collective.
      bandwidth: bytes a second that a chip sends in a collective; None takes the fast network's.

    Raises:
      ValueError: the text is not HLO.
    """
    if chip.is_tpu and chip.clock_hz is None:
        return None
    module, guessed = parse(program), set[str]()
    walk = _Walk(chip, mesh, bandwidth or (lambda _: chip.network_bandwidth), guessed)
    operations = list(walk.operations(Frame(module, module.computations[module.entry])))
    alike = defaultdict[tuple[str, str, str], list[Operation]](list)
    for operation in operations:
        alike[operation.kind, operation.name, operation.shape].append(operation)
    merged = [dataclasses.replace(group[0], **_sums(group)) for group in alike.values()]
    kinds = {kind: KindClock(**_sums(o for o in operations if o.kind == kind)) for kind in KINDS}
    return StepClock(
        seconds=math.fsum(kind.seconds for kind in kinds.values()),
        at_memory_rate_seconds=math.fsum(kind.at_memory_rate_seconds for kind in kinds.values()),
        kinds=kinds,
        recomputed=KindClock(**_sums(o for o in operations if o.recomputed)),
        largest=tuple(sorted(merged, key=lambda o: -o.seconds)[:10]),
        guessed=tuple(sorted(guessed)),
    )


def _sums(operations: Iterable[Operation]) -> dict[str, Any]:
    listed = list(operations)
    seconds = {key: math.fsum(getattr(o, key) for o in listed) for key in _SECONDS}
    return {"count": sum(o.count for o in listed), **seconds}


_SECONDS = ("seconds", "at_memory_rate_seconds", "compute_bound_seconds")
_CUBLAS = 'custom_call_target="__cublas'
_FREE = (  # which move no data
    *("get-tuple-element", "constant", "parameter", "tuple", "bitcast"),
    *("partition-id", "after-all", "opt-barrier"),
)
_READS_A_PART = ("slice", "dynamic-slice", "gather")
_MOVES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")
_LAYOUT_OPCODES = ("copy", "transpose", "reshape")
_LAYOUT_NAME = re.compile(r"transpose|slice_bitcast|copy|bitcast_fusion")
_LAYOUT_PATH = re.compile(r"(transpose|squeeze|/slice)$")


@dataclass
class _Transfers:
    """Asynchronous transfers beside the instructions of one computation."""

    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Second at which the engine `links` or `memory` has finished all its transfers."""
    ends: dict[str, float] = field(default_factory=dict)
    """Second at which each transfer ends, by the name of the instruction that started it."""

    def start(self, name: str, engine: str, now: float, seconds: float) -> None:
        self.ends[name] = self.free[engine] = max(now, self.free[engine]) + seconds


@dataclass(frozen=True)
class _Walk:
    """The walk through a program, with the arguments of `step_clock`."""

    chip: Chip
    mesh: Mesh | None
    bandwidth: Callable[[Collective], float]
    guessed: set[str]

    def operations(self, frame: Frame) -> Iterator[Operation]:
        """The operations of a computation, whose seconds add up to its time."""
        now, transfers, seen = 0.0, _Transfers(), set[tuple[str, str]]()
        for instruction in frame.computation.instructions.values():
            for operation in self._operations(frame, instruction, now, transfers, seen):
                now += operation.seconds
                yield operation

    def _operations(
        self, frame: Frame, i: Instruction, now: float, transfers: _Transfers, seen: set
    ) -> Iterator[Operation]:
        base = i.opcode.removesuffix("-start")
        is_async = i.opcode != base or "async-collective-start" in i.name
        if i.opcode in _FREE:
            return
        if i.opcode == "while":
            yield from self._loop(frame, i)
        elif i.opcode == "call":
            yield from self.operations(frame.enter(i, i.called("to_apply")[0]))
        elif i.opcode == "conditional":
            keys = ("branch_computations", "true_computation", "false_computation")
            branches = [list(self.operations(frame.enter(i, name))) for name in i.called(*keys)]
            # The slowest branch: a plan must hold for each step.
            yield from max(branches, key=lambda branch: sum(o.seconds for o in branch))
        elif base in _MOVES and is_async:
            is_update = base == "dynamic-update-slice"
            # From and to: of a slice the smaller one moves, of an update the update.
            shapes = [frame.operand(i, 1).shape] if is_update else tuple_elements(i.shape)[:2]
            size = float(min(map(shape_bytes, shapes)))
            transfers.start(i.name, "memory", now, self._memory_s(size))
        elif i.opcode.endswith("-done") or "async-collective-done" in i.name:
            # A fusion has its start's name; other instructions have the start as their operand.
            start = i.name.replace("done", "start") if i.opcode == "fusion" else i.operands[0]
            wait = transfers.ends.pop(start, now) - now
            if wait > 0:
                kind = LAYOUTS if i.opcode.removesuffix("-done") in _MOVES else COLLECTIVES
                yield _operation(kind, i, wait, wait)
        elif base in OPS:
            seconds = self._links_s([parse_collective(frame, i, self.mesh)])
            if is_async:
                transfers.start(i.name, "links", now, seconds)
            else:
                yield _operation(COLLECTIVES, i, seconds, seconds)
        else:
            frames = [frame.enter(i, name) for name in i.called("calls")]
            seconds = self._links_s(c for f in frames for c in find_collectives(f, self.mesh, seen))
            if "async-collective-start" in i.name:
                transfers.start(i.name, "links", now, seconds)
                return
            if seconds:
                yield _operation(COLLECTIVES, i, seconds, seconds)
            yield self._arithmetic(frame, i)

    def _loop(self, frame: Frame, i: Instruction) -> Iterator[Operation]:
        """The operations of a loop's body, each multiplied by the trip count."""
        try:
            trips = trip_count(frame, i)
        except ValueError:
            trips = 1
            self.guessed.add(i.name)
        for o in self.operations(frame.enter(i, i.called("body")[0])):
            seconds: dict[str, Any] = {key: trips * getattr(o, key) for key in _SECONDS}
            yield dataclasses.replace(o, count=trips * o.count, **seconds)

    def _arithmetic(self, frame: Frame, i: Instruction) -> Operation:
        """The operation of an instruction that computes or copies; see the top of the file."""
        if 'custom_call_target="__cudnn$fmha' in i.rest:
            return self._cudnn_attention(frame, i)
        if i.opcode == "custom-call" and _CUBLAS not in i.rest:
            # A TPU's other calls allocate buffers and the like; a GPU's are kernels of libraries.
            is_kernel = "tpu_custom_call" in i.rest or not self.chip.is_tpu
            seconds = self._kernel_s(frame, i) if is_kernel else 0.0
            return _operation(ATTENTION if self.chip.is_tpu else ELEMENTWISE, i, seconds, seconds)
        memory_s, products = self._memory_s(_streamed_bytes(frame, i)), [*_products(frame, i)]
        bound_s = sum(_product_flops(*p) for p in products) / self.chip.peak_flops
        estimate = re.search(r'"estimated_cycles":"(\d+)"', i.rest)
        if not self.chip.is_tpu:
            slowdown = max((_slowdown(*p) for p in products), default=1)
            seconds = max(slowdown * bound_s / PRODUCTS_SHARE, memory_s)
        elif estimate:
            seconds = self._cycles_s(float(estimate[1]))
        else:
            seconds = memory_s
        at_memory_rate_s = seconds if bound_s else min(seconds, memory_s)
        kind = _kind(frame, i, has_products=bound_s > 0)
        return _operation(kind, i, seconds, at_memory_rate_s, bound_s)

    def _cudnn_attention(self, frame: Frame, i: Instruction) -> Operation:
        batch, length, heads, width = _dims(frame.operand(i, 0).shape)
        keys = _dims(frame.operand(i, 1).shape)[1]
        # The backward pass computes the logits again. A causal mask spares half of all products.
        products = 5 if "Backward" in i.rest else 2
        flops = products * 2 * batch * heads * length * keys * width
        flops /= 2 if '"CAUSAL"' in i.rest else 1
        bound_s = flops / self.chip.peak_flops
        seconds = max(bound_s / ATTENTION_SHARE, self._memory_s(_streamed_bytes(frame, i)))
        return _operation(ATTENTION, i, seconds, seconds, bound_s)

    def _kernel_s(self, frame: Frame, i: Instruction) -> float:
        table = KERNELS.get(self.chip.name, {})
        prefix = next((prefix for prefix in table if i.name.startswith(prefix)), None)
        if prefix is None:
            self.guessed.add(re.sub(r"\.\d+$", "", i.name))
            return self._memory_s(_streamed_bytes(frame, i))
        operands = [frame.operand(i, k).shape for k in range(len(i.operands))]
        queries = next(_dims(x) for x in operands if re.match(r"b?f\d+\[\d+,\d+,", x))
        *others, length, width = queries  # of splash [B, H, T, K], of flat attention [B, T, H K]
        tiles = math.prod(others) * (1 if prefix.startswith("splash") else math.ceil(width / 128))
        # Causal attention in n x n blocks skips the blocks above the diagonal, in which no query
        # sees a key. Only splash's backward kernel computes them too.
        n = math.ceil(length / BLOCK)
        blocks = n * n if prefix == "splash_mha_dkv" else n * (n + 1) // 2
        return self._cycles_s(tiles * blocks * table[prefix])

    def _cycles_s(self, cycles: float) -> float:
        assert self.chip.clock_hz is not None
        return cycles / self.chip.clock_hz

    def _memory_s(self, size: float) -> float:
        if self.chip.is_tpu:
            return size / self.chip.memory_bandwidth
        return max(LAUNCH_S, size / (MEMORY_SHARE * self.chip.memory_bandwidth))

    def _links_s(self, collectives: Iterable[Collective]) -> float:
        return math.fsum(wire_bytes(c) / self.bandwidth(c) for c in collectives)


def _operation(
    kind: str, i: Instruction, seconds: float, at_memory_rate: float, compute_bound: float = 0.0
) -> Operation:
    name = "/".join(i.op_name.split("/")[-2:]) or i.name
    shape = re.sub(r"\{.*", "", tuple_elements(i.shape)[0])
    # XLA writes .remat, .remat2, .remat_uncompressed; a .rematerialized buffer is filled anew.
    recomputed = re.search(r"\.remat(?!erialized)", i.name) is not None
    return Operation(kind, name, shape, 1, seconds, at_memory_rate, compute_bound, recomputed)


def _kind(frame: Frame, i: Instruction, *, has_products: bool) -> str:
    path = _path(frame, i)
    in_loss = re.search(r"\bloss\b", path) is not None
    if {"optimizer", "clip"} & scopes_of(path):
        return OPTIMIZER
    if has_products:
        return LOSS_PRODUCTS if in_loss else PRODUCTS
    if in_loss:
        return LOSS_ELEMENTWISE
    if _is_beside_attention(frame, i):
        return QKV
    if _only_casts(frame, i):
        return CASTS
    changes_layout = (
        i.opcode in _LAYOUT_OPCODES or _LAYOUT_NAME.search(i.name) or _LAYOUT_PATH.search(i.op_name)
    )
    return LAYOUTS if changes_layout else ELEMENTWISE


def _is_beside_attention(frame: Frame, i: Instruction) -> bool:
    """Whether the result goes into a kernel of attention, or an operand comes from one."""
    by_name, users = frame.computation.instructions, frame.computation.users
    directions: tuple[Callable[[Instruction], list[Instruction]], ...] = (
        lambda x: [by_name[name] for name in x.operands],
        lambda x: [*users[x.name]],
    )
    for neighbours in directions:
        todo = neighbours(i)
        while todo:
            x = todo.pop()
            if re.search(r'"(tpu_custom_call|__cudnn\$fmha)', x.rest):
                return True
            if x.opcode in ("bitcast", "get-tuple-element"):  # views of an array
                todo += neighbours(x)
    return False


def _only_casts(frame: Frame, i: Instruction) -> bool:
    """Whether an instruction converts dtypes of its operands, or of slices of them, and no more."""
    inside = [frame.enter(i, name) for name in i.called("calls")]
    opcodes = {x.opcode for f in inside for x in f.computation.instructions.values()} or {i.opcode}
    return "convert" in opcodes and opcodes <= {"convert", *_READS_A_PART, *_FREE}


def _path(frame: Frame, i: Instruction) -> str:
    """Path of an instruction; the caller's where the compiler gave it none."""
    if i.path or frame.outer is None:
        return i.path
    return _path(*frame.outer)


# Bytes that an instruction moves from and to memory. Where an operand is only sliced, or a result
# only updated in place, the bytes of the slice or the update count: a loop over layers carries
# arrays of all layers and touches one layer an iteration.


def _streamed_bytes(frame: Frame, i: Instruction) -> float:
    """Bytes of operands and result of an instruction; of their slices where only these move."""
    operands = [frame.operand(i, k) for k in range(len(i.operands))]
    if i.opcode == "dynamic-update-slice":  # reads the update, writes it in place
        return 2 * _padded_bytes(operands[1].shape)
    if i.opcode == "scatter":  # reads indices, updates and the rows of the table, writes the rows
        return _padded_bytes(operands[1].shape) + 3 * _padded_bytes(operands[2].shape)
    if i.opcode in _READS_A_PART:
        return 2 * _padded_bytes(i.shape)
    if i.opcode not in ("fusion", "fusion-start"):
        # A library's kernel returns its working space as well, as an array of bytes.
        results = (x for x in tuple_elements(i.shape) if not x.startswith(("s8[", "u8[")))
        return math.fsum(map(_padded_bytes, (*results, *(x.shape for x in operands))))
    # The shape of an asynchronous fusion is (operands, result, context).
    shape = i.shape if i.opcode == "fusion" else tuple_elements(i.shape)[1]
    inside = frame.enter(i, i.called("calls")[0])
    instructions = inside.computation.instructions.values()
    parameters = {x.arguments: x.name for x in instructions if x.opcode == "parameter"}
    read_bytes = math.fsum(
        _read_bytes(inside, parameters[f"{k}"], x.shape) for k, x in enumerate(operands)
    )
    # The root may be a fusion itself, whose root updates an array in place.
    while (root := inside.computation.root).opcode == "fusion":
        inside = inside.enter(root, root.called("calls")[0])
    writes = inside.computation.instructions.values()
    updates = [inside.operand(x, 1).shape for x in writes if x.opcode == "dynamic-update-slice"]
    # A scatter reads the rows of its table and writes them.
    updates += 2 * [inside.operand(x, 2).shape for x in writes if x.opcode == "scatter"]
    return read_bytes + sum(map(_padded_bytes, updates or [shape]))


def _read_bytes(frame: Frame, name: str, shape: str) -> float:
    """Bytes that a fusion reads of its parameter `name`; fusions within it are searched too."""
    whole, size = _padded_bytes(shape), 0.0
    for user in frame.computation.users[name]:
        position = user.operands.index(name)
        if user.opcode in _READS_A_PART and not position:  # operand 0 is sliced, others are indices
            size += _padded_bytes(user.shape)
        elif user.opcode in ("bitcast", "convert") and frame.computation.users[user.name]:
            ratio = shape_bytes(shape) / max(1, shape_bytes(user.shape))
            size += ratio * _read_bytes(frame, user.name, user.shape)
        elif user.opcode == "fusion":
            inside = frame.enter(user, user.called("calls")[0])
            parameter = next(
                x
                for x in inside.computation.instructions.values()
                if x.opcode == "parameter" and x.arguments == f"{position}"
            )
            size += _read_bytes(inside, parameter.name, shape)
        # Operand 0 of these two is updated in place, and not read.
        elif user.opcode not in ("dynamic-update-slice", "scatter") or position:
            return whole
    return min(whole, size)


def _padded_bytes(shape: str) -> float:
    """Bytes of a shape in the chip's main memory; 0 for an array in another memory, `S(1)`. An
    array in tiles, `T(8,128)`, as on TPUs, takes whole tiles."""
    if shape.startswith("("):
        return math.fsum(map(_padded_bytes, tuple_elements(shape)))
    match = re.match(r"(\w+)\[[\d,]+\](?:\{([\d,]*)(:[^}]*)?\})?", shape)
    if not match or "S(" in (match[3] or ""):
        return 0.0
    if "T(" not in (match[3] or ""):
        return float(shape_bytes(shape))
    sizes = _dims(shape)
    minor_to_major = [int(n) for n in (match[2] or "").split(",") if n]
    from_minor = [sizes[axis] for axis in minor_to_major or reversed(range(len(sizes)))]
    for axis, tile in zip(range(len(from_minor)), (128, 8), strict=False):
        from_minor[axis] = math.ceil(from_minor[axis] / tile) * tile
    return math.prod(from_minor) * shape_bytes(f"{match[1]}[8]") / 8


def _dims(shape: str) -> list[int]:
    match = re.match(r"\w+\[([\d,]*)\]", shape)
    return [int(n) for n in match[1].split(",") if n] if match else []


# Matrix products, which libtpu writes as convolutions, and XLA for GPUs as calls of cuBLAS or as
# fusions around one.


def _products(frame: Frame, i: Instruction) -> Iterator[tuple[Frame, Instruction]]:
    if i.opcode in ("convolution", "dot") or _CUBLAS in i.rest:
        yield frame, i
    elif i.opcode in ("fusion", "call"):
        for name in i.called("calls", "to_apply"):
            inside = frame.enter(i, name)
            for instruction in inside.computation.instructions.values():
                yield from _products(inside, instruction)


def _slowdown(frame: Frame, i: Instruction) -> int:
    """Time of a product on a GPU over that of the same product in bfloat16."""
    if not frame.operand(i, 0).shape.startswith("f32"):
        return 1
    highest = re.search(r"operand_precision\W+highest", i.rest, re.IGNORECASE)
    return FLOAT32_SLOWER if highest else TF32_SLOWER


def _product_flops(frame: Frame, i: Instruction) -> int:
    shapes = frame.operand(i, 0).shape, frame.operand(i, 1).shape, tuple_elements(i.shape)[0]
    left, right, out = map(_dims, shapes)
    if i.opcode != "convolution":
        key = r"lhs_contracting_dim(?:ension)?s\W+([\d,\" ]*)"  # of a dot, and of cuBLAS
        match = re.search(key, i.rest)
        assert match is not None
        axes = re.findall(r"\d+", match[1])
        return 2 * math.prod(out) * math.prod(left[int(axis)] for axis in axes)
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", i.attributes["dim_labels"])
    assert labels is not None
    lefts, rights, outs = labels.groups()
    window = dict(re.findall(r"(\w+)=([\w\-]+)", i.attributes.get("window", "")))
    products = 1
    # Products with padding are not computed. Example: a row of 5 with 1 of padding on each side, a
    # kernel of 3 and a stride of 2. Output o and kernel entry k meet at input 2 o + k - 1, which
    # for o, k in 0..2 is
    #
    #   -1 0 1 | 1 2 3 | 3 4 5
    #
    # of which 7 lie in the row: 7 products of 9.
    for axis in range(len(lefts) - 2):
        stride, lhs_dilation, rhs_dilation = (
            int(window[key].split("x")[axis]) if key in window else 1
            for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        padding = int(window["pad"].split("x")[axis].split("_")[0]) if "pad" in window else 0
        label = str(axis)
        starts = np.arange(out[outs.index(label)])[:, None] * stride - padding
        inputs = starts + np.arange(right[rights.index(label)]) * rhs_dilation
        end = (left[lefts.index(label)] - 1) * lhs_dilation
        products *= int(((inputs >= 0) & (inputs <= end) & (inputs % lhs_dilation == 0)).sum())
    groups = int(i.attributes.get("feature_group_count", 1))
    batch = left[lefts.index("b")] // int(i.attributes.get("batch_group_count", 1))
    return 2 * left[lefts.index("f")] // groups * right[rights.index("o")] * batch * products
