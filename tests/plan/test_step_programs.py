"""What compilers make of the train step, in particular those of absent chips, where a small change
of the model once cost a chip several per cent."""

import dataclasses
import math
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from absent_chips import for_gpus, for_tpus
from tiny import MODEL, sophia, tiny_config

from maxmars.config import AdamWConfig, GPT2Config, MarsConfig, MeshConfig
from maxmars.model.parameters import Parameters
from maxmars.plan import get_topology, make_plan
from maxmars.plan.clock import OPTIMIZER
from maxmars.plan.hlo import parse

ROOT = Path(__file__).parents[2]
CALLED = {
    "while": ("body", "condition"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "call": ("to_apply",),
    "async-start": ("calls",),
}


def written(program):
    """The instructions of a compiled program that write arrays to memory: none inside a fusion, a
    kernel or a reduction."""
    module = parse(program)
    todo, seen, found = [module.entry], {module.entry}, []
    while todo:
        for instruction in module.computations[todo.pop()].instructions.values():
            called = set(instruction.called(*CALLED.get(instruction.opcode, ()))) - seen
            todo += sorted(called)
            seen |= called
            found.append(instruction)
    return found


def arrays(instruction):
    """Types and shapes of the arrays that an instruction writes, on one device."""
    for dtype, dims in re.findall(r"(\w+)\[([\d,<=]*)\]", instruction.shape):
        yield dtype, [int(n.lstrip("<=")) for n in dims.split(",") if n]


def large_arrays(program, config, mesh):
    """Arrays of length x length for each head, and float32 logits of a device's tokens."""
    model, length = config.model, config.model.max_seq_len
    rows = config.microbatch_size // (mesh["data"] * mesh["fsdp"])
    heads, vocab = model.num_heads // mesh["tensor"], model.padded_vocab_size // mesh["tensor"]
    large = []
    for dtype, dims in (array for instruction in written(program) for array in arrays(instruction)):
        others = [n for n in dims if n != length]
        if dims.count(length) >= 2 and {heads, rows * heads} & set(others):
            large.append(dims)
        if math.prod(dims) >= rows * length * vocab and vocab in dims and dtype == "f32":
            large.append(dims)
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


def gpt2_small(optimizer="mars", **changes):
    """480 x 1,024 tokens at once, on 16 chips."""
    get_config = runpy.run_path(str(ROOT / "configs" / "gpt2.py"))["get_config"]
    config = get_config(size="small", optimizer=optimizer)
    model = dataclasses.replace(config.model, num_layers=2, **{"remat": "full", **changes})
    return dataclasses.replace(
        config, model=model, num_microbatches=1, mesh=MeshConfig(data=1, fsdp=16)
    )


@for_tpus
@pytest.mark.parametrize(
    "change", [{"remat": None}, {"optimizer": sophia(10).make}], ids=["no remat", "sophia"]
)
def test_gpt2_small_writes_none_on_tpus(change):
    config = gpt2_small(**change)
    plan = make_plan(config, get_topology("v5e:4x4"), evaluate="remat" in change)
    for step in filter(None, (plan.train_step, plan.eval_step)):
        text = step.executable.as_text()
        assert "flat_attention_forward" in text
        assert large_arrays(text, config, plan.mesh.shape) == []


@for_tpus
def test_plain_attention_writes_them():
    config = gpt2_small(attention="plain", remat="full")
    plan = make_plan(config, get_topology("v5e:4x4"), evaluate=False)
    assert large_arrays(plan.train_step.executable, config, plan.mesh.shape)


@for_tpus
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
    least = 256 * 1024  # a device's part of the smallest kernel of a layer
    copies = [
        instruction.name
        for instruction in written(step)
        if re.match(r"(copy|transpose)(\.\d+)?$", instruction.name)
        and any(t == "f32" and math.prod(dims) >= least for t, dims in arrays(instruction))
    ]
    assert copies == []
    shards, gathered = 4 * Parameters(model).count / 4, 2 * Parameters(model).count
    assert step.memory_analysis().temp_size_in_bytes < 1.5 * shards + gathered


def step_on(topology, rows, **model):
    """The compiled step of a microbatch, split over all devices."""
    mesh = MeshConfig(fsdp={"v5e:2x2": 4, "h100:1": 1}[topology])
    model = GPT2Config(max_seq_len=1024, **model)
    config = tiny_config(model=model, global_batch_size=rows, num_microbatches=1, mesh=mesh)
    return make_plan(config, get_topology(topology), evaluate=False).train_step


TWO_LAYERS = {"num_layers": 2, "vocab_size": 512, "remat": "full"}


def sources(computation, instruction):
    """The instructions of a computation from which one is computed, itself included."""
    found, rest = {}, [instruction]
    while rest:
        instruction = rest.pop()
        if instruction.name not in found:
            found[instruction.name] = instruction
            rest += [computation.instructions[name] for name in instruction.operands]
    return found.values()


def opcodes(module, instructions):
    """Their opcodes, and those of all that they call."""
    for instruction in instructions:
        yield instruction.opcode
        for name in instruction.called("calls", "to_apply"):
            yield from opcodes(module, module.computations[name].instructions.values())


@for_tpus
def test_no_array_of_tokens_is_transposed_for_a_kernels_gradient():
    step = step_on("v5e:2x2", 120, num_heads=12, embed_dim=768, **TWO_LAYERS)
    program = step.executable.as_text()
    assert "bf16[30,1024,768]" in program
    assert not re.findall(r"= bf16\[768,30720\]\S* (?:copy|transpose)\(", program)


@for_tpus
def test_no_gelu_is_computed_within_a_product_that_reads_it():
    step = step_on("v5e:2x2", 32, num_heads=25, embed_dim=1600, **TWO_LAYERS)
    module = parse(step.executable)
    gelus, reading = 0, []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            gelus += instruction.opcode == "tanh"
            if instruction.opcode == "convolution":
                within = opcodes(module, sources(computation, instruction))
                reading += [instruction] if "tanh" in within else []
    assert gelus > 0
    # Products with the slope of the GELU, which give the gradients of c_fc, do compute it.
    assert all("transpose(" in product.path for product in reading)
    assert not [product for product in reading if "[6400,1600" in product.shape]


@for_gpus
def test_a_gpu_writes_no_logits_copies_no_heads_and_starts_few_kernels():
    small = {"num_layers": 12, "num_heads": 12, "embed_dim": 768}
    recipe = {"vocab_size": 50304, "use_bias": False, "remat": None, "attention": "cudnn"}
    step = step_on("h100:1", 24, **small, **recipe)
    program = written(step.executable)
    assert any(re.search(r"bf16\[\d+,50304\]", i.shape) for i in program)
    assert not [i.name for i in program if re.search(r"f32\[\d+,50304\]", i.shape)]
    moved = [i for i in program if i.opcode in ("copy", "concatenate", "transpose")]
    assert not [i.name for i in moved if re.search(r"\[24,1024,(12,64|768|2304)\]", i.shape)]
    kinds = step.clock.kinds
    assert sum(kind.count for name, kind in kinds.items() if name != OPTIMIZER) <= 610
