import dataclasses

import jax
import numpy as np
import pytest
from absent_chips import for_tpus
from tiny import tiny_config

from maxmars.config import MeshConfig
from maxmars.config.chips import CHIPS
from maxmars.plan import get_topology, make_plan
from maxmars.plan.clock import (
    ATTENTION,
    ATTENTION_SHARE,
    CASTS,
    COLLECTIVES,
    ELEMENTWISE,
    KERNELS,
    KINDS,
    LAUNCH_S,
    LAYOUTS,
    LOSS_ELEMENTWISE,
    LOSS_PRODUCTS,
    MEMORY_SHARE,
    OPTIMIZER,
    PRODUCTS,
    PRODUCTS_SHARE,
    QKV,
    step_clock,
)

pytestmark = pytest.mark.smoke

V5E, H100 = CHIPS["v5e"], CHIPS["h100"]


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
ARRAY = 4 * 1024 * 128
STREAM = 2 * ARRAY / V5E.memory_bandwidth


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
def test_kinds_and_low_times_of_elementwise_work(path, kind):
    clock = step_clock(module([ARGUMENT, fusion("f", "x", 5000, path)], ADD), V5E)
    assert clock.seconds == clock.kinds[kind].seconds == pytest.approx(5000 / 1.5e9)
    assert clock.at_memory_rate_seconds == pytest.approx(STREAM)


def test_padding_and_other_memories():
    fast = "f32[1024,128]{1,0:T(8,128)S(1)}"
    clock = step_clock(module([ARGUMENT, fusion("f", "x", 5000, "jit(f)/add", fast)], ADD), V5E)
    assert clock.at_memory_rate_seconds == pytest.approx(STREAM / 2)
    narrow = "f32[1024,64]{1,0:T(8,128)}"
    body = [f"%x = {narrow} parameter(0)", fusion("f", "x", 5000, "jit(f)/add", narrow)]
    assert step_clock(module(body, ADD), V5E).at_memory_rate_seconds == pytest.approx(STREAM)


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
    assert share.seconds == share.at_memory_rate_seconds == pytest.approx(1000 / 1.5e9)
    assert share.compute_bound_seconds == 2 * 256 * 128 * 512 / V5E.peak_flops


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
    assert clock.seconds == clock.kinds[LOSS_ELEMENTWISE].seconds
    assert clock.seconds == pytest.approx(12 * 5001 / 1.5e9)
    assert [(row.name, row.shape, row.count) for row in clock.largest] == [
        ("f", "f32[1024,128]", 12),
        ("next", "s32[]", 12),
    ]


def test_a_collective_waits_for_what_nothing_hides():
    permute = "collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}"
    pair = "(f32[1024,128]{1,0}, f32[1024,128]{1,0})"
    sent = ARRAY / V5E.network_bandwidth
    for cycles in (1000, 5000):
        hidden = cycles / 1.5e9
        body = [
            ARGUMENT,
            f"%c = {pair} {permute}",
            fusion("f", "x", cycles, "jit(f)/add"),
            "ROOT %d = f32[1024,128]{1,0} collective-permute-done(%c)",
        ]
        clock = step_clock(module(body, ADD), V5E)
        assert clock.kinds[COLLECTIVES].seconds == pytest.approx(max(0, sent - hidden))
        assert clock.seconds == pytest.approx(max(sent, hidden))
    gather = "all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}"
    clock = step_clock(module([ARGUMENT, f"ROOT %g = f32[2048,128]{{1,0}} {gather}"]), V5E)
    assert clock.seconds == pytest.approx(sent)  # synchronous


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
    called = 'custom-call(%mask, %x), custom_call_target="tpu_custom_call"'
    mask, x = "%mask = s8[1,1,1,1] parameter(0)", f"%x = {shape} parameter(1)"
    body = [mask, x, f"ROOT %{name} = {shape} {called}"]
    for chip in (V5E, CHIPS["v5p"]):
        clock = step_clock(module(body), chip)
        table = KERNELS[chip.name]
        cycles = next(table[key] for key in table if name.startswith(key))
        assert clock.kinds[ATTENTION].seconds == pytest.approx(blocks * cycles / chip.clock_hz)
        assert clock.guessed == ()


def test_a_tpu_whose_cycles_a_second_are_unknown_has_no_clock():
    assert step_clock(module([ARGUMENT]), CHIPS["v4"]) is None


H100_BYTE = 1 / (MEMORY_SHARE * H100.memory_bandwidth)
SLOW = dataclasses.replace(H100, memory_bandwidth=H100.memory_bandwidth / 100)
"""A GPU on which small arrays take longer than a kernel's launch."""
SLOW_BYTE = 100 * H100_BYTE
DOT = """%multiplies {
  %p = bf16[4096,1024]{1,0} parameter(0)
  %q = bf16[1024,8192]{1,0} parameter(1)
  ROOT %c = bf16[4096,8192]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""
CUBLAS = (
    "%f = (bf16[4096,8192]{1,0}, s8[33554432]{0}) custom-call(%p, %q), "
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)
FUSED = "%f = bf16[4096,8192]{1,0} fusion(%p, %q), kind=kCustom, calls=%multiplies"


@pytest.mark.parametrize("product", [CUBLAS, FUSED])
def test_products_of_gpus(product):
    body = ["%p = bf16[4096,1024] parameter(0)", "%q = bf16[1024,8192] parameter(1)", product]
    share = step_clock(module(body, DOT), H100).kinds[PRODUCTS]
    assert share.compute_bound_seconds == 2 * 4096 * 1024 * 8192 / H100.peak_flops
    assert (
        share.seconds
        == share.at_memory_rate_seconds
        == pytest.approx(share.compute_bound_seconds / PRODUCTS_SHARE)
    )
    for precision, slower in (("", 2), ("operand_precision={highest,highest}, ", 15)):
        wide = DOT.replace("lhs_con", f"{precision}lhs_con").replace("bf16", "f32")
        call = product.replace("custom_call_target", f"{precision}custom_call_target")
        text = module([line.replace("bf16", "f32") for line in (*body[:2], call)], wide)
        assert step_clock(text, H100).seconds == pytest.approx(slower * share.seconds)
    # Few FLOPs for its bytes: a product with a vector.
    thin = [line.replace("1024,8192]", "1024,1]").replace("4096,8192]", "4096,1]") for line in body]
    dot = DOT.replace("8192]", "1]")
    moved = 2 * (4096 * 1024 + 1024 + 4096)
    assert step_clock(module(thin, dot), H100).seconds == pytest.approx(moved * H100_BYTE)


@pytest.mark.parametrize(
    ("kernel", "mask", "products"),
    [("fmhaSoftmax", "CAUSAL", 2 / 2), ("fmhaSoftmaxBackward", "NO_MASK", 5)],
)
def test_cudnns_attention(kernel, mask, products):
    q, k = "bf16[24,1024,12,64]{3,2,1,0}", "bf16[24,512,12,64]{3,2,1,0}"
    call = f'custom_call_target="__cudnn${kernel}", backend_config={{"mask_type": "{mask}"}}'
    body = [
        *(f"%q = {q} parameter(0)", f"%k = {k} parameter(1)"),
        f"ROOT %a = ({q}, f32[24,12,1024], u8[0]) custom-call(%q, %k, %k), {call}",
    ]
    share = step_clock(module(body), H100).kinds[ATTENTION]
    flops = products * 2 * 24 * 12 * 1024 * 512 * 64
    assert share.compute_bound_seconds == pytest.approx(flops / H100.peak_flops)
    assert share.seconds == pytest.approx(share.compute_bound_seconds / ATTENTION_SHARE)


CAST = """%casts {
  %w = f32[12,1024,128]{2,1,0} parameter(0)
  %part = f32[1,1024,128]{2,1,0} slice(%w), slice={[3:4], [0:1024], [0:128]}
  ROOT %c = bf16[1,1024,128]{2,1,0} convert(%part)
}"""


def test_casts_and_what_is_done_to_q_k_v_are_kinds_of_their_own():
    q, fmha = "bf16[24,1024,12,64]{3,2,1,0}", 'custom_call_target="__cudnn$fmhaSoftmax"'
    body = [
        *("%w = f32[12,1024,128]{2,1,0} parameter(0)", f"%q = {q} parameter(1)"),
        "%cast = bf16[1,1024,128]{2,1,0} fusion(%w), kind=kLoop, calls=%casts",
        *(f"%copied = {q} copy(%q)", f"%view = {q} bitcast(%copied)"),
        f"%a = ({q}, f32[24,12,1024]) custom-call(%view, %view, %view), {fmha}",
        f"%out = {q} get-tuple-element(%a), index=0",
        *(f"%sum = {q} add(%out, %out)", f"ROOT %other = {q} copy(%sum)"),
    ]
    kinds = step_clock(module(body, CAST), H100).kinds
    assert {kind: x.count for kind, x in kinds.items() if x.count} == {
        **{ATTENTION: 1, CASTS: 1, LAYOUTS: 1, QKV: 2}
    }


UPDATE = """%updates {
  %all = f32[12,1024,128]{2,1,0} parameter(0)
  %new = f32[1024,128]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,1024,128]{2,1,0} bitcast(%new)
  ROOT %u = f32[12,1024,128]{2,1,0} dynamic-update-slice(%all, %one, %zero, %zero, %zero)
}"""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_else_of_gpus_takes_the_time_of_its_bytes(asynchronous):
    stack = "f32[12,1024,128]{2,1,0}"
    body = [ARGUMENT, f"%all = {stack} parameter(1)"]
    body += [fusion("f", "x", 10**9, "jit(f)/add")]  # cycles are a TPU's
    if asynchronous:
        pair = f"(({stack}, f32[1024,128]), {stack}, u32[])"
        body += [f"%s = {pair} fusion-start(%all, %f), kind=kLoop, calls=%updates"]
        body += [f"ROOT %u = {stack} fusion-done(%s)"]
    else:
        body += [f"ROOT %u = {stack} fusion(%all, %f), kind=kLoop, calls=%updates"]
    clock = step_clock(module(body, ADD, UPDATE), SLOW)
    assert clock.seconds == clock.at_memory_rate_seconds == pytest.approx(4 * ARRAY * SLOW_BYTE)


def test_no_kernel_of_a_gpu_is_shorter_than_its_launch():
    body = ["%x = f32[8,8]{1,0} parameter(0)", "%view = f32[64]{0} bitcast(%x)"]
    body += ["%copied = f32[64]{0} copy(%view)", "ROOT %sum = f32[64]{0} add(%copied, %copied)"]
    assert step_clock(module(body), H100).seconds == pytest.approx(2 * LAUNCH_S)
    assert step_clock(module(body), V5E).seconds < LAUNCH_S


SLICE = """%slices {
  %all = f32[12,1024,128]{2,1,0} parameter(0)
  ROOT %s = f32[1,1024,128]{2,1,0} slice(%all), slice={[3:4], [0:1024], [0:128]}
}"""
CONVERTED = """%slices {
  %all = f32[12,1024,128]{2,1,0} parameter(0)
  %narrow = bf16[12,1024,128]{2,1,0} convert(%all)
  ROOT %s = bf16[1,1024,128]{2,1,0} slice(%narrow), slice={[3:4], [0:1024], [0:128]}
}"""
WHOLE = CONVERTED.replace("bf16[1,1024,128]{2,1,0} slice", "bf16[12,1024,128]{2,1,0} negate")
FUSED_SLICE = "fusion(%all), kind=kLoop, calls=%slices"


@pytest.mark.parametrize(
    ("part", "computation", "moved"),
    [
        (f"f32[1,1024,128] {FUSED_SLICE}", SLICE, 2 * ARRAY),
        ("f32[1,1024,128] slice(%all), slice={[3:4], [0:1024], [0:128]}", SLICE, 2 * ARRAY),
        ("f32[1,1024,128] gather(%all, %index), offset_dims={1,2}", SLICE, 2 * ARRAY),
        (f"bf16[1,1024,128] {FUSED_SLICE}", CONVERTED, ARRAY + ARRAY / 2),
        (f"bf16[12,1024,128] {FUSED_SLICE}", WHOLE, 12 * (ARRAY + ARRAY / 2)),
    ],
)
def test_of_an_array_that_is_read_in_part_the_part_counts(part, computation, moved):
    body = ["%all = f32[12,1024,128]{2,1,0} parameter(0)", "%index = s32[1] parameter(1)"]
    clock = step_clock(module([*body, f"ROOT %p = {part}"], computation), SLOW)
    assert clock.seconds == pytest.approx(moved * SLOW_BYTE)


SCATTER = """%scatters {
  %table = f32[12288,128]{1,0} parameter(0)
  %rows = f32[1024,128]{1,0} parameter(1)
  %ids = s32[1024,1]{1,0} parameter(2)
  ROOT %s = f32[12288,128]{1,0} SCATTER
}

%outer {
  %table = f32[12288,128]{1,0} parameter(0)
  %rows = f32[1024,128]{1,0} parameter(1)
  %ids = s32[1024,1]{1,0} parameter(2)
  ROOT %s = f32[12288,128]{1,0} fusion(%table, %rows, %ids), calls=%scatters
}"""
SCATTERED = "scatter(%table, %ids, %rows), index_vector_dim=1, to_apply=%adds"


@pytest.mark.parametrize(
    "added",
    [SCATTERED, *(f"fusion(%table, %rows, %ids), calls=%{name}" for name in ("scatters", "outer"))],
)
def test_of_a_table_to_which_rows_are_added_these_rows_count(added):
    body = [
        "%table = f32[12288,128]{1,0} parameter(0)",
        "%rows = f32[1024,128]{1,0} parameter(1)",
        "%ids = s32[1024,1]{1,0} parameter(2)",
        f"ROOT %s = f32[12288,128]{{1,0}} {added}",
    ]
    moved = 3 * ARRAY + 4 * 1024  # the rows, read and written in the table, and their numbers
    for chip, byte in ((V5E, 1 / V5E.memory_bandwidth), (SLOW, SLOW_BYTE)):
        clock = step_clock(module(body, SCATTER.replace("SCATTER", SCATTERED)), chip)
        assert clock.seconds == pytest.approx(moved * byte)


def test_an_update_beside_other_work_takes_the_memory_for_its_slice_alone():
    stack, index = "f32[12,1024,128]{2,1,0}", "s32[] constant(0)"
    start = f"(({stack}, f32[1,1024,128], s32[], s32[], s32[]), {stack}, u32[])"
    for cycles in (100, 5000):
        body = [
            *(ARGUMENT, f"%all = {stack} parameter(1)", f"%zero = {index}"),
            "%new = f32[1,1024,128]{2,1,0} bitcast(%x)",
            f"%s = {start} dynamic-update-slice-start(%all, %new, %zero, %zero, %zero)",
            fusion("f", "x", cycles, "jit(f)/add"),
            f"ROOT %d = {stack} dynamic-update-slice-done(%s)",
        ]
        clock = step_clock(module(body, ADD), V5E)
        slice_seconds = ARRAY / V5E.memory_bandwidth
        assert clock.seconds == pytest.approx(max(slice_seconds, cycles / V5E.clock_hz))
        assert clock.kinds[ELEMENTWISE].seconds == pytest.approx(cycles / V5E.clock_hz)


def test_what_xla_computes_again_for_want_of_memory_is_told_apart():
    names = ("f", "f.rematerialized", "f.remat2", "f.remat_uncompressed")
    body = [ARGUMENT, *(fusion(name, "x", 5000, "jit(f)/add") for name in names)]
    clock = step_clock(module(body, ADD), V5E)
    assert (clock.recomputed.count, clock.kinds[ELEMENTWISE].count) == (2, 4)
    assert clock.recomputed.seconds == pytest.approx(clock.seconds / 2)


@pytest.mark.parametrize(
    ("chip", "target", "seconds"),
    [(V5E, "tpu_custom_call", STREAM), (SLOW, "__cub$sort", 2 * ARRAY * SLOW_BYTE)],
)
def test_a_kernel_that_was_not_measured_counts_by_its_bytes(chip, target, seconds):
    call = f'custom-call(%x), custom_call_target="{target}"'
    clock = step_clock(module([ARGUMENT, f"ROOT %mine.4 = f32[1024,128]{{1,0}} {call}"]), chip)
    assert clock.seconds == pytest.approx(seconds)
    assert clock.guessed == ("mine",)


def test_a_collective_takes_the_network_that_it_crosses():
    reduce = "all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%adds"
    text = module([ARGUMENT, f"ROOT %r = f32[1024,128]{{1,0}} {reduce}"], ADD)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))
    asked = []

    def bandwidth(collective):
        asked.append(collective.axes)
        return H100.bandwidth("DCN")

    clock = step_clock(text, H100, mesh, bandwidth)
    assert asked == [("data", "fsdp")]
    assert clock.kinds[COLLECTIVES].seconds == pytest.approx(2 * ARRAY * 3 / 4 / 50e9)
    assert step_clock(text, SLOW).seconds == pytest.approx(2 * ARRAY * 3 / 4 / 450e9)


@for_tpus
def test_a_step_for_tpus():
    config = tiny_config(mesh=MeshConfig(fsdp=4))
    plan = make_plan(config, get_topology("v5e:2x2"), evaluate=False)
    clock, written = plan.train_step.clock, plan.to_json()["clock"]
    assert set(clock.kinds) == set(KINDS)
    assert sum(kind.seconds for kind in clock.kinds.values()) == pytest.approx(clock.seconds)
    for kind in clock.kinds.values():
        assert kind.compute_bound_seconds <= kind.at_memory_rate_seconds <= kind.seconds
    for name in (PRODUCTS, LOSS_PRODUCTS, LOSS_ELEMENTWISE, OPTIMIZER):
        assert clock.kinds[name].seconds > 0, name
    assert clock.seconds == plan.step_seconds
    assert 0 < plan.mfu(clock.seconds) <= plan.mfu(clock.at_memory_rate_seconds) < 1
    assert len(written["largest"]) == 10
