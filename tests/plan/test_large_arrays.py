"""What GPT-2's programs for TPUs never write to memory; needs the compiler of the extra `tpu`."""

import dataclasses
import importlib.util
import math
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tiny import MODEL, sophia, tiny_config

from maxmars.config import AdamWConfig, MarsConfig, MeshConfig
from maxmars.model.parameters import Parameters
from maxmars.plan import get_topology, make_plan
from maxmars.plan.hlo import parse

ROOT = Path(__file__).parents[2]


def on_tpus(test):
    reason = "libtpu (extra `tpu`) is not installed"
    without = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason=reason)
    return pytest.mark.slow(pytest.mark.usefixtures("uncached")(without(test)))


CALLED = {
    "while": ("body", "condition"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "call": ("to_apply",),
    "async-start": ("calls",),
}


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """An array on one device, and the instruction that makes it or takes it from another."""

    dtype: str
    dims: tuple[int, ...]
    instruction: str


def arrays(program):
    """The arrays that a compiled program writes to memory: none inside a fusion or a kernel."""
    module = parse(program)
    todo, seen, written = [module.entry], {module.entry}, []
    while todo:  # computations that run by themselves: neither fused nor a reduction's
        for instruction in module.computations[todo.pop()].instructions.values():
            called = set(instruction.called(*CALLED.get(instruction.opcode, ()))) - seen
            todo += sorted(called)
            seen |= called
            for dtype, dims in re.findall(r"(\w+)\[([\d,<=]*)\]", instruction.shape):
                sizes = tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)
                written.append(ArrayShape(dtype, sizes, instruction.name))
    return written


def large_arrays(program, config, mesh):
    """Arrays of length x length for each head, and float32 logits of a device's tokens."""
    model, length = config.model, config.model.max_seq_len
    rows = config.microbatch_size // (mesh["data"] * mesh["fsdp"])
    heads, vocab = model.num_heads // mesh["tensor"], model.padded_vocab_size // mesh["tensor"]
    large = []
    for array in arrays(program):
        others = [n for n in array.dims if n != length]
        if array.dims.count(length) >= 2 and {heads, rows * heads} & set(others):
            large.append(array)
        many = math.prod(array.dims) >= rows * length * vocab
        if many and vocab in array.dims and array.dtype == "f32":
            large.append(array)
    return large


CONFIG = tiny_config(num_microbatches=1, mesh=MeshConfig(fsdp=8))
MESH = {"data": 1, "fsdp": 8, "tensor": 1}


@pytest.mark.parametrize(
    ("is_large", "shapes"),
    [
        (True, [(2, 4, 16, 16), (8, 16, 16), (3, 4, 2, 16, 16), (2, 16, 264)]),
        (False, [(2, 16, 32), (16, 16), (3, 2, 16, 128), (16, 264)]),
    ],
)
def test_large_arrays_are_found(is_large, shapes):
    for dims in shapes:
        program = jax.jit(lambda x: jnp.sin(x)).lower(jax.ShapeDtypeStruct(dims, jnp.float32))
        assert bool(large_arrays(program.compile(), CONFIG, MESH)) == is_large, dims


def gpt2(size, optimizer="mars", **changes):
    """480 x 1,024 tokens at once, on 16 chips."""
    get_config = runpy.run_path(str(ROOT / "configs" / "gpt2.py"))["get_config"]
    config = get_config(size=size, optimizer=optimizer)
    model = dataclasses.replace(config.model, num_layers=2, **{"remat": "full", **changes})
    return dataclasses.replace(
        config, model=model, num_microbatches=1, mesh=MeshConfig(data=1, fsdp=16)
    )


@on_tpus
@pytest.mark.parametrize(
    "change", [{"remat": None}, {"optimizer": sophia(10).make}], ids=["no remat", "sophia"]
)
def test_gpt2_small_writes_none_on_tpus(change):
    config = gpt2("small", **change)
    plan = make_plan(config, get_topology("v5e:4x4"), evaluate="remat" in change)
    for step in filter(None, (plan.train_step, plan.eval_step)):
        text = step.executable.as_text()
        assert "flat_attention_forward" in text
        assert large_arrays(text, config, plan.mesh.shape) == []


@on_tpus
def test_plain_attention_writes_them():
    config = gpt2("small", attention="plain", remat="full")
    plan = make_plan(config, get_topology("v5e:4x4"), evaluate=False)
    assert large_arrays(plan.train_step.executable, config, plan.mesh.shape)


@on_tpus
@pytest.mark.parametrize("optimizer", [AdamWConfig(), MarsConfig()], ids=["adamw", "mars"])
def test_no_parameter_is_copied_on_tpus(optimizer):
    """Neither transposed nor in another layout, with one microbatch of few tokens: only bfloat16
    pieces of a layer or of the table are, on their way between chips. Besides its state a step
    holds one float32 tree of gradients, and without rematerialisation the gathered layers."""
    model = dataclasses.replace(
        MODEL, num_layers=6, num_heads=8, embed_dim=1024, max_seq_len=128, vocab_size=1024
    )
    model = dataclasses.replace(model, compute_dtype="bfloat16", attention="plain")
    config = tiny_config(
        optimizer=optimizer,
        model=model,
        num_microbatches=1,
        global_batch_size=4,
        mesh=MeshConfig(fsdp=4),
    )
    step = make_plan(config, get_topology("v5e:2x2"), evaluate=False).train_step.executable
    copies = [
        array
        for array in arrays(step)
        if re.match(r"(copy|transpose)(\.\d+)?$", array.instruction)
        and array.dtype == "f32"
        and math.prod(array.dims) >= 256 * 1024  # a device's part of the smallest kernel of a layer
    ]
    assert copies == []
    shards, gathered = 4 * Parameters(model).count / 4, 2 * Parameters(model).count
    assert step.memory_analysis().temp_size_in_bytes < 1.5 * shards + gathered
