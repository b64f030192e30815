import importlib.util

import pytest
from tiny import tiny_config

from maxmars.config import MeshConfig
from maxmars.config.chips import CHIPS
from maxmars.distributed.cycles import (
    ATTENTION,
    COLLECTIVES,
    ELEMENTWISE,
    KERNELS,
    KINDS,
    LAYOUTS,
    LOSS_ELEMENTWISE,
    LOSS_PRODUCTS,
    OPTIMIZER,
    PRODUCTS,
    step_clock,
)
from maxmars.plan import get_topology, make_plan

V5E = CHIPS["v5e"]
CYCLES_A_BYTE = V5E.clock_hz / V5E.memory_bandwidth


def module(body, *computations):
    """A program of four devices with these instructions."""
    entry = "\n".join(f"  {line}" for line in (body if isinstance(body, list) else [body]))
    header = "HloModule m, is_scheduled=true, num_partitions=4"
    return "\n\n".join((header, *computations, f"ENTRY %main {{\n{entry}\n}}")) + "\n"


def estimated(cycles, path=""):
    metadata = f'metadata={{op_name="{path}"}}, ' if path else ""
    return f'{metadata}backend_config={{"estimated_cycles":"{cycles}"}}'


ADD = """%adds {
  %p = f32[1024,128]{1,0} parameter(0)
  ROOT %sum = f32[1024,128]{1,0} add(%p, %p)
}"""
ARGUMENT = "%x = f32[1024,128]{1,0} parameter(0)"
STREAM = 2 * 4 * 1024 * 128 * CYCLES_A_BYTE


def fusion(name, operand, cycles, path, shape="f32[1024,128]{1,0}", calls="adds"):
    call = f"fusion(%{operand}), kind=kLoop, calls=%{calls}, {estimated(cycles, path)}"
    return f"%{name} = {shape} {call}"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("jit(f)/model/jvp()/add", ELEMENTWISE),
        ("jit(f)/model/jvp(loss)/exp", LOSS_ELEMENTWISE),
        ("jit(f)/model/jvp()/transpose", LAYOUTS),
        ("jit(f)/optimizer/mul", OPTIMIZER),
        ("jit(f)/clip/mul", OPTIMIZER),
    ],
)
def test_kinds_and_low_cycles_of_elementwise_work(path, kind):
    clock = step_clock(module([ARGUMENT, fusion("f", "x", 5000, path)], ADD), V5E)
    assert clock.cycles == clock.kinds[kind].cycles == 5000
    assert clock.low_cycles == pytest.approx(STREAM)
    assert clock.seconds == pytest.approx(5000 / 1.5e9)


def test_padding_and_other_memories():
    fast = "f32[1024,128]{1,0:T(8,128)S(1)}"
    clock = step_clock(module([ARGUMENT, fusion("f", "x", 5000, "jit(f)/add", fast)], ADD), V5E)
    assert clock.low_cycles == pytest.approx(STREAM / 2)
    narrow = ARGUMENT.replace("128]", "64]")
    thin = fusion("f", "x", 5000, "jit(f)/add", "f32[1024,64]{1,0}")
    assert step_clock(module([narrow, thin], ADD), V5E).low_cycles == pytest.approx(STREAM)


PRODUCT = """%multiplies {
  %p = bf16[256,128]{1,0} parameter(0)
  %q = bf16[128,512]{1,0} parameter(1)
  ROOT %c = bf16[256,512]{1,0} convolution(%p, %q), dim_labels=bf_io->bf
}"""


@pytest.mark.parametrize(("scope", "kind"), [("", PRODUCTS), ("loss", LOSS_PRODUCTS)])
def test_products(scope, kind):
    body = [
        "%p = bf16[256,128]{1,0} parameter(0)",
        "%q = bf16[128,512]{1,0} parameter(1)",
        "ROOT %f = bf16[256,512]{1,0} fusion(%p, %q), kind=kOutput, calls=%multiplies, "
        + estimated(1000, f"jit(f)/model/jvp({scope})/dot_general"),
    ]
    share = step_clock(module(body, PRODUCT), V5E).kinds[kind]
    assert (share.cycles, share.low_cycles) == (1000, 1000)
    assert share.bound_cycles == 2 * 256 * 128 * 512 / 131072


LOOP = """%condition {
  %s = (s32[], f32[1024,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(12)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body {
  %s = (s32[], f32[1024,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one), BACKEND
  %v = f32[1024,128]{1,0} get-tuple-element(%s), index=1
  FUSION
  ROOT %t = (s32[], f32[1024,128]{1,0}) tuple(%next, %f)
}""".replace("BACKEND", estimated(1))


def test_a_loop_counts_as_often_as_it_runs():
    loop = LOOP.replace("FUSION", fusion("f", "v", 5000, ""))
    body = [
        ARGUMENT,
        "%zero = s32[] constant(0)",
        "%start = (s32[], f32[1024,128]{1,0}) tuple(%zero, %x)",
        "ROOT %w = (s32[], f32[1024,128]{1,0}) while(%start), condition=%condition, body=%body, "
        'metadata={op_name="jit(f)/model/jvp(loss)/while"}',
    ]
    clock = step_clock(module(body, ADD, loop), V5E)
    assert clock.cycles == clock.kinds[LOSS_ELEMENTWISE].cycles == 12 * 5001
    assert [(row.name, row.shape, row.count) for row in clock.largest] == [
        ("f", "f32[1024,128]", 12),
        ("next", "s32[]", 12),
    ]


def test_a_collective_waits_for_what_nothing_hides():
    permute = "collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}"
    pair = "(f32[1024,128]{1,0}, f32[1024,128]{1,0})"
    sent = 4 * 1024 * 128 / V5E.network_bandwidth * V5E.clock_hz
    for hidden in (1000, 5000):
        body = [
            ARGUMENT,
            f"%c = {pair} {permute}",
            fusion("f", "x", hidden, "jit(f)/add"),
            "ROOT %d = f32[1024,128]{1,0} collective-permute-done(%c)",
        ]
        clock = step_clock(module(body, ADD), V5E)
        assert clock.kinds[COLLECTIVES].cycles == pytest.approx(max(0, sent - hidden))
        assert clock.cycles == pytest.approx(max(sent, hidden))
    gather = "all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}"
    clock = step_clock(module([ARGUMENT, f"ROOT %g = f32[2048,128]{{1,0}} {gather}"]), V5E)
    assert clock.cycles == pytest.approx(sent)  # synchronous


KERNEL = 'custom-call(%x), custom_call_target="tpu_custom_call"'


@pytest.mark.parametrize(
    ("name", "shape", "blocks"),
    [
        ("splash_mha_fwd_residuals.3", "bf16[2,12,1024,64]", 24 * 3),
        ("splash_mha_dkv_no_residuals", "f32[4,128,8]", 4),  # of one row
        ("flat_attention_forward_64", "bf16[2,2048,1600]", 26 * 10),
        ("flat_attention_backward_128", "bf16[2,1000,1024]", 16 * 3),
    ],
)
def test_kernels_of_the_table(name, shape, blocks):
    called = KERNEL.replace("(%x)", "(%mask, %x)")
    mask, x = "%mask = s8[1,1,1,1] parameter(0)", f"%x = {shape} parameter(1)"
    body = [mask, x, f"ROOT %{name} = {shape} {called}"]
    for chip in (V5E, CHIPS["v5p"]):
        clock = step_clock(module(body), chip)
        table = KERNELS[chip.name]
        cycles = next(table[key] for key in table if name.startswith(key))
        assert clock.kinds[ATTENTION].cycles == pytest.approx(blocks * cycles)
        assert clock.guessed == ()


def test_a_kernel_that_was_not_measured_counts_by_its_bytes():
    clock = step_clock(module([ARGUMENT, f"ROOT %mine.4 = f32[1024,128]{{1,0}} {KERNEL}"]), V5E)
    assert clock.cycles == pytest.approx(STREAM)
    assert clock.guessed == ("mine",)


def test_chips_without_a_clock():
    assert step_clock(module([ARGUMENT]), CHIPS["h100"]) is None
    assert step_clock(module([ARGUMENT]), CHIPS["v4"]) is None


@pytest.mark.slow
@pytest.mark.usefixtures("uncached")
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu (extra `tpu`) is not installed"
)
def test_a_step_for_tpus():
    config = tiny_config(mesh=MeshConfig(fsdp=4))
    plan = make_plan(config, get_topology("v5e:2x2"), evaluate=False)
    clock, written = plan.train_step.clock, plan.to_json()["clock"]
    assert set(clock.kinds) == set(KINDS)
    assert sum(kind.cycles for kind in clock.kinds.values()) == pytest.approx(clock.cycles)
    for kind in clock.kinds.values():
        assert kind.bound_cycles <= kind.low_cycles <= kind.cycles
    for name in (PRODUCTS, LOSS_PRODUCTS, LOSS_ELEMENTWISE, OPTIMIZER):
        assert clock.kinds[name].cycles > 0, name
    assert plan.train_step.needs.cycles == clock.cycles
    assert 0 < written["mfu"] <= written["low_mfu"] < 1
    assert len(written["largest"]) == 10
