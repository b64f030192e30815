"""What the compilers of absent chips make of the train step, where a small change of the model once
cost a chip several per cent; needs libtpu (extra `tpu`) or XLA's GPU compiler (extra `cuda`)."""

import importlib.util
import re

import pytest
from tiny import tiny_config

from maxmars.config import GPT2Config, MeshConfig
from maxmars.plan import make_plan
from maxmars.plan.clock import OPTIMIZER
from maxmars.plan.hlo import parse
from maxmars.plan.topology import get_topology

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("uncached")]
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu (extra `tpu`) is not installed"
)
needs_cuda = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("jax_plugins", "jax_plugins.xla_cuda13"))),
    reason="jax-cuda13-pjrt (extra `cuda`) is not installed",
)


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


@needs_libtpu
def test_no_array_of_tokens_is_transposed_for_a_kernels_gradient():
    step = step_on("v5e:2x2", 120, num_heads=12, embed_dim=768, **TWO_LAYERS)
    program = step.executable.as_text()
    assert "bf16[30,1024,768]" in program
    assert not re.findall(r"= bf16\[768,30720\]\S* (?:copy|transpose)\(", program)


@needs_libtpu
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


@needs_cuda
def test_a_gpu_writes_no_logits_copies_no_heads_and_starts_few_kernels():
    small = {"num_layers": 12, "num_heads": 12, "embed_dim": 768}
    recipe = {"vocab_size": 50304, "use_bias": False, "remat": None, "attention": "cudnn"}
    step = step_on("h100:1", 24, **small, **recipe)
    module = parse(step.executable)
    computations = module.computations.values()
    fused = {
        name
        for computation in computations
        for instruction in computation.instructions.values()
        for name in instruction.called("calls", "to_apply")
        if instruction.opcode != "call"
    }
    written = [
        instruction
        for computation in computations
        if computation.name not in fused
        for instruction in computation.instructions.values()
    ]
    assert any(re.search(r"bf16\[\d+,50304\]", i.shape) for i in written)
    assert not [i.name for i in written if re.search(r"f32\[\d+,50304\]", i.shape)]
    moved = [i for i in written if i.opcode in ("copy", "concatenate", "transpose")]
    assert not [i.name for i in moved if re.search(r"\[24,1024,(12,64|768|2304)\]", i.shape)]
    kinds = step.clock.kinds
    assert sum(kind.count for name, kind in kinds.items() if name != OPTIMIZER) <= 610
