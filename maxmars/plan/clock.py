"""How long one run of a compiled program takes on a chip, operation by operation, and on what.

Instructions run one after the other in the order of the text, loops as often as their trip counts
say, asynchronous transfers beside them; whoever waits for one waits until it is over. What one
instruction takes is

* on TPUs, whose compiler writes `"estimated_cycles"` beside most instructions, those cycles;
* of a kernel of attention on TPUs, `KERNELS`, the measured cycles of one block;
* on GPUs, of a matrix product or of cuDNN's attention, the time of its arithmetic at
  `PRODUCTS_SHARE` or `ATTENTION_SHARE` of the published FLOP/s, or of its bytes if that is longer;
* of a collective, the bytes that it sends over the chip's links, all of them, in one direction;
* of everything else, its bytes at the memory's rate, on GPUs at `MEMORY_SHARE` of it;
* of each kernel of a GPU, `LAUNCH_S` at least.

How far to trust it: on TPUs products and float32 streams agree with the rates of the chip to 2 to
30 %. Elementwise work in bfloat16 is charged there as if it were float32, about 2.5 times the
memory's time, so there is a second figure, at the memory's rate: all but products, kernels and
collectives then takes the time of its bytes, where that is less. Exchanges between slices are not
counted. On GPUs the three shares are those of one card, an H200; networks were not measured.
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
    read_collective,
    scopes_of,
    trip_count,
    visit,
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
"""Shares of a GPU's published rates, of FLOP/s and of memory, that operations reach on an H200 (JAX
0.11.2, cuDNN 9). In a profile of GPT-2 small's step, 24 rows a microbatch, matrix products reached
0.72, attention of 1,024 tokens and heads of 64 (its masked half counts nothing) 0.23, AdamW's
update 0.61 of the memory's rate. Each is 3 to 5 % less here, for the time between kernels and
because the profile is of the best of three steps: so the median step comes out."""

LAUNCH_S = 1.6e-6
"""Least time of a GPU's kernel. Of that profile's 24.1 ms for 12 rows, products took 12.8 and
attention 3.6, and at AdamW's share all else takes 7.2. The rest, 0.5 ms (given to 0.1), lies
between the 638 kernels of the 24 rows: 1.6 us each, give or take 0.5. Long kernels have it in the
shares: added to every kernel it would count twice, as microbatches of 12 rows, which have 569
kernels, took 0.1 to 0.5 ms more than half of 24 rows, and their bytes alone say 0.5."""

TF32_SLOWER, FLOAT32_SLOWER = 2, 15
"""How many times as long as bfloat16's a float32 product takes, by NVIDIA's data sheet of the H100:
in TF32, which is XLA's default, and at JAX's precision `highest`."""

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
"""Cycles of one block of 512 x 512 logits, by `Chip.name` and the beginning of the kernel's name:
of a head in splash, of a tile in flat attention, which is one head of 128 or two of 64.

They are the length of the machine code (bundles, about one a cycle) that libtpu 0.0.42.1 makes for
a row of 1,024 tokens, which has 3 causal blocks, or the time of its products in the matrix units
where that is longer. Splash's backward kernel computes all 4 blocks."""


@dataclass(frozen=True)
class Operation:
    """One instruction, over all its executions; or several that are alike."""

    kind: str
    """One of `KINDS`."""
    name: str
    """End of JAX's name of it, or the instruction's own."""
    shape: str
    """Of the result, or the first of several, without layout."""
    count: int
    seconds: float
    at_memory_rate_seconds: float
    """At the memory's rate, where that is less and it is no product, kernel or collective."""
    compute_bound_seconds: float
    """Of its matrix products, at the chip's published FLOP/s; 0 without products."""
    recomputed: bool
    """Whether XLA computes it once more because memory is short."""


@dataclass(frozen=True, kw_only=True)
class KindClock:
    """All operations of one kind; the fields are those of `Operation`."""

    count: int
    seconds: float
    at_memory_rate_seconds: float
    compute_bound_seconds: float


@dataclass(frozen=True, kw_only=True)
class StepClock:
    """The time of one run of a program on one chip."""

    seconds: float
    at_memory_rate_seconds: float
    """With all but products, kernels and collectives at the memory's rate, padding included; on
    GPUs the same as `seconds`."""
    kinds: dict[str, KindClock]
    """By all of `KINDS`; they sum to the whole."""
    recomputed: KindClock
    """Of the operations that XLA computes once more because memory is short; `kinds` holds them
    too."""
    largest: tuple[Operation, ...]
    """The ten that take most time."""
    guessed: tuple[str, ...]
    """Names of kernels that are charged by their bytes, and of loops that are counted once because
    their trip count depends on data."""


def step_clock(
    program: Any,
    chip: Chip,
    mesh: Mesh | None = None,
    bandwidth: Callable[[Collective], float] | None = None,
) -> StepClock | None:
    """The clock of a compiled program; None of a TPU whose cycles a second are not known.

    Args:
      program: a `jax.stages.Compiled`, or its `as_text()`.
      chip: what it was compiled for.
      mesh: of its devices, for the axes of the collectives that `bandwidth` is asked of.
      bandwidth: bytes a second that a chip sends of a collective; None is the chip's fast network.

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
_FREE = (
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
    """Transfers that run beside the instructions of one computation, by their start's name."""

    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """When each of `links` and `memory` has carried all that was given to it."""
    ends: dict[str, float] = field(default_factory=dict)

    def start(self, name: str, engine: str, now: float, seconds: float) -> None:
        self.ends[name] = self.free[engine] = max(now, self.free[engine]) + seconds


@dataclass(frozen=True)
class _Walk:
    chip: Chip
    mesh: Mesh | None
    bandwidth: Callable[[Collective], float]
    guessed: set[str]

    def operations(self, frame: Frame) -> Iterator[Operation]:
        """The operations of a computation, which runs from second 0; they sum to its end."""
        now, transfers, chains = 0.0, _Transfers(), set[tuple[str, str]]()
        for instruction in frame.computation.instructions.values():
            for operation in self._operations(frame, instruction, now, transfers, chains):
                now += operation.seconds
                yield operation

    def _operations(
        self, frame: Frame, i: Instruction, now: float, transfers: _Transfers, chains: set
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
            yield from max(branches, key=lambda branch: sum(o.seconds for o in branch))
        elif base in _MOVES and is_async:
            is_update = base == "dynamic-update-slice"
            ends = [frame.operand(i, 1).shape] if is_update else tuple_elements(i.shape)[:2]
            moved = float(min(map(shape_bytes, ends)))
            transfers.start(i.name, "memory", now, self._memory(moved))
        elif i.opcode.endswith("-done") or "async-collective-done" in i.name:
            start = i.name.replace("done", "start") if i.opcode == "fusion" else i.operands[0]
            wait = transfers.ends.pop(start, now) - now
            if wait > 0:
                kind = LAYOUTS if i.opcode.removesuffix("-done") in _MOVES else COLLECTIVES
                yield _operation(kind, i, wait, wait)
        elif base in OPS:
            sent = self._links([read_collective(frame, i, self.mesh)])
            if is_async:
                transfers.start(i.name, "links", now, sent)
            else:
                yield _operation(COLLECTIVES, i, sent, sent)
        else:
            inside = [frame.enter(i, name) for name in i.called("calls")]
            sent = self._links(c for inner in inside for c in visit(inner, self.mesh, chains))
            if "async-collective-start" in i.name:
                transfers.start(i.name, "links", now, sent)
                return
            if sent:
                yield _operation(COLLECTIVES, i, sent, sent)
            yield self._arithmetic(frame, i)

    def _loop(self, frame: Frame, i: Instruction) -> Iterator[Operation]:
        try:
            trips = trip_count(frame, i)
        except ValueError:
            trips = 1
            self.guessed.add(i.name)
        for o in self.operations(frame.enter(i, i.called("body")[0])):
            seconds: dict[str, Any] = {key: trips * getattr(o, key) for key in _SECONDS}
            yield dataclasses.replace(o, count=trips * o.count, **seconds)

    def _arithmetic(self, frame: Frame, i: Instruction) -> Operation:
        path = _path(frame, i)
        if 'custom_call_target="__cudnn$fmha' in i.rest:
            return self._cudnn_attention(frame, i)
        if i.opcode == "custom-call" and _CUBLAS not in i.rest:
            # A TPU's other calls allocate buffers and the like; a GPU's are kernels of libraries.
            is_kernel = "tpu_custom_call" in i.rest or not self.chip.is_tpu
            seconds = self._kernel(frame, i) if is_kernel else 0.0
            return _operation(ATTENTION if self.chip.is_tpu else ELEMENTWISE, i, seconds, seconds)
        streamed, products = self._memory(_streamed_bytes(frame, i)), [*_products(frame, i)]
        bound = sum(_product_flops(*p) for p in products) / self.chip.peak_flops
        estimate = re.search(r'"estimated_cycles":"(\d+)"', i.rest)
        if not self.chip.is_tpu:
            slower = max((_times_slower(*p) for p in products), default=1)
            seconds = max(slower * bound / PRODUCTS_SHARE, streamed)
        elif estimate:
            seconds = self._cycles(float(estimate[1]))
        else:
            seconds = streamed
        in_loss = re.search(r"\bloss\b", path) is not None
        if {"optimizer", "clip"} & scopes_of(path):
            kind = OPTIMIZER
        elif bound:
            kind = LOSS_PRODUCTS if in_loss else PRODUCTS
        elif in_loss:
            kind = LOSS_ELEMENTWISE
        elif _is_beside_attention(frame, i):
            kind = QKV
        elif _only_casts(frame, i):
            kind = CASTS
        elif (
            i.opcode in _LAYOUT_OPCODES
            or _LAYOUT_NAME.search(i.name)
            or _LAYOUT_PATH.search(i.op_name)
        ):
            kind = LAYOUTS
        else:
            kind = ELEMENTWISE
        return _operation(kind, i, seconds, seconds if bound else min(seconds, streamed), bound)

    def _cudnn_attention(self, frame: Frame, i: Instruction) -> Operation:
        batch, length, heads, width = _dims(frame.operand(i, 0).shape)
        keys = _dims(frame.operand(i, 1).shape)[1]
        # The backward pass computes the logits again. A causal mask spares half of all products.
        products = 5 if "Backward" in i.rest else 2
        flops = products * 2 * batch * heads * length * keys * width
        flops /= 2 if '"CAUSAL"' in i.rest else 1
        bound = flops / self.chip.peak_flops
        seconds = max(bound / ATTENTION_SHARE, self._memory(_streamed_bytes(frame, i)))
        return _operation(ATTENTION, i, seconds, seconds, bound)

    def _kernel(self, frame: Frame, i: Instruction) -> float:
        table = KERNELS.get(self.chip.name, {})
        name = next((name for name in table if i.name.startswith(name)), None)
        if name is None:
            self.guessed.add(re.sub(r"\.\d+$", "", i.name))
            return self._memory(_streamed_bytes(frame, i))
        operands = [frame.operand(i, k).shape for k in range(len(i.operands))]
        queries = next(_dims(x) for x in operands if re.match(r"b?f\d+\[\d+,\d+,", x))
        *others, length, width = queries  # of splash [B, H, T, K], of flat attention [B, T, H K]
        tiles = math.prod(others) * (1 if name.startswith("splash") else math.ceil(width / 128))
        # Causal attention in n x n blocks skips those above the diagonal, in which no query sees a
        # key. One kernel computes them nevertheless.
        n = math.ceil(length / BLOCK)
        blocks = n * n if name == "splash_mha_dkv" else n * (n + 1) // 2
        return self._cycles(tiles * blocks * table[name])

    def _cycles(self, cycles: float) -> float:
        assert self.chip.clock_hz is not None
        return cycles / self.chip.clock_hz

    def _memory(self, size: float) -> float:
        if self.chip.is_tpu:
            return size / self.chip.memory_bandwidth
        return max(LAUNCH_S, size / (MEMORY_SHARE * self.chip.memory_bandwidth))

    def _links(self, collectives: Iterable[Collective]) -> float:
        return math.fsum(wire_bytes(c) / self.bandwidth(c) for c in collectives)


def _operation(
    kind: str, i: Instruction, seconds: float, at_memory_rate: float, compute_bound: float = 0.0
) -> Operation:
    name = "/".join(i.op_name.split("/")[-2:]) or i.name
    shape = re.sub(r"\{.*", "", tuple_elements(i.shape)[0])
    # XLA writes .remat, .remat2, .remat_uncompressed; .rematerialized is what it fills anew.
    recomputed = re.search(r"\.remat(?!erialized)", i.name) is not None
    return Operation(kind, name, shape, 1, seconds, at_memory_rate, compute_bound, recomputed)


def _is_beside_attention(frame: Frame, i: Instruction) -> bool:
    """Whether a kernel of attention reads its result, or makes what it reads."""
    made, users = frame.computation.instructions, frame.computation.users

    def is_near(near: Iterable[Instruction], further: Callable[[Instruction], Any]) -> bool:
        return any(
            re.search(r'"(tpu_custom_call|__cudnn\$fmha)', x.rest)
            or (x.opcode in ("bitcast", "get-tuple-element") and is_near(further(x), further))
            for x in near
        )

    def before(x: Instruction) -> list[Instruction]:
        return [made[name] for name in x.operands]

    def after(x: Instruction) -> list[Instruction]:
        return users[x.name]

    return is_near(before(i), before) or is_near(after(i), after)


def _only_casts(frame: Frame, i: Instruction) -> bool:
    """Whether it converts what it reads, or parts of it, and does nothing else."""
    inside = [frame.enter(i, name) for name in i.called("calls")]
    opcodes = {x.opcode for f in inside for x in f.computation.instructions.values()} or {i.opcode}
    return "convert" in opcodes and opcodes <= {"convert", *_READS_A_PART, *_FREE}


def _path(frame: Frame, i: Instruction) -> str:
    """An instruction's path; the caller's if the compiler made it and gave it none."""
    if i.path or frame.outer is None:
        return i.path
    return _path(*frame.outer)


# Bytes that an instruction moves from and to memory.


def _streamed_bytes(frame: Frame, i: Instruction) -> float:
    """Operands and result; where only a slice or rows are read or written, these."""
    operands = [frame.operand(i, k) for k in range(len(i.operands))]
    if i.opcode == "dynamic-update-slice":
        return 2 * _padded_bytes(operands[1].shape)
    if i.opcode == "scatter":
        return _padded_bytes(operands[1].shape) + 3 * _padded_bytes(operands[2].shape)
    if i.opcode in _READS_A_PART:
        return 2 * _padded_bytes(i.shape)
    if i.opcode not in ("fusion", "fusion-start"):
        # A library's kernel returns its working space as well, as an array of bytes.
        results = (x for x in tuple_elements(i.shape) if not x.startswith(("s8[", "u8[")))
        return math.fsum(map(_padded_bytes, (*results, *(x.shape for x in operands))))
    # An asynchronous fusion starts with the shapes of (operands, result, context).
    shape = i.shape if i.opcode == "fusion" else tuple_elements(i.shape)[1]
    inside = frame.enter(i, i.called("calls")[0])
    instructions = inside.computation.instructions.values()
    parameters = {x.arguments: x.name for x in instructions if x.opcode == "parameter"}
    read = math.fsum(
        _read_bytes(inside, parameters[f"{k}"], x.shape) for k, x in enumerate(operands)
    )
    while (root := inside.computation.root).opcode == "fusion":
        inside = inside.enter(root, root.called("calls")[0])
    writes = inside.computation.instructions.values()
    updates = [inside.operand(x, 1).shape for x in writes if x.opcode == "dynamic-update-slice"]
    # Rows of a table are read and written.
    updates += 2 * [inside.operand(x, 2).shape for x in writes if x.opcode == "scatter"]
    return read + sum(map(_padded_bytes, updates or [shape]))


def _read_bytes(frame: Frame, name: str, shape: str) -> float:
    """Bytes that a fusion reads of an argument of this shape, through the fusions within it."""
    whole, size = _padded_bytes(shape), 0.0
    for user in frame.computation.users[name]:
        position = user.operands.index(name)
        if user.opcode in _READS_A_PART and not position:
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
        elif user.opcode not in ("dynamic-update-slice", "scatter") or position:
            return whole
    return min(whole, size)


def _padded_bytes(shape: str) -> float:
    """Bytes in the chip's main memory; what lies in another (`S(1)`) is 0. An array in tiles,
    `T(8,128)`, as on TPUs, takes whole tiles."""
    if shape.startswith("("):
        return math.fsum(map(_padded_bytes, tuple_elements(shape)))
    match = re.match(r"(\w+)\[[\d,]+\](?:\{([\d,]*)(:[^}]*)?\})?", shape)
    if not match or "S(" in (match[3] or ""):
        return 0.0
    if "T(" not in (match[3] or ""):
        return float(shape_bytes(shape))
    sizes = _dims(shape)
    order = [int(n) for n in (match[2] or "").split(",") if n] or [*range(len(sizes))][::-1]
    from_minor = [sizes[axis] for axis in order]
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


def _times_slower(frame: Frame, i: Instruction) -> int:
    """How many times as long as one of bfloat16 a product takes on a GPU."""
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
    # Example: a row of 5 with 1 of padding on each side, a kernel of 3 and a stride of 2. Output o
    # and kernel entry k meet at input 2 o + k - 1, which for o, k in 0..2 is
    #
    #   -1 0 1 | 1 2 3 | 3 4 5
    #
    # of which 7 lie in the row: 7 products of 9.
    for axis in range(len(lefts) - 2):  # those that lie in the padding are not computed
        stride, apart, dilation = (
            int(window[key].split("x")[axis]) if key in window else 1
            for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        before = int(window["pad"].split("x")[axis].split("_")[0]) if "pad" in window else 0
        label = str(axis)
        results = np.arange(out[outs.index(label)])[:, None] * stride
        index = results + np.arange(right[rights.index(label)]) * dilation - before
        end = (left[lefts.index(label)] - 1) * apart
        products *= int(((index >= 0) & (index <= end) & (index % apart == 0)).sum())
    groups = int(i.attributes.get("feature_group_count", 1))
    batch = left[lefts.index("b")] // int(i.attributes.get("batch_group_count", 1))
    return 2 * left[lefts.index("f")] // groups * right[rights.index("o")] * batch * products
