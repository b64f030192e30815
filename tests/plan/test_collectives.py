import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from refusals import refused
from tiny import ADAMW, MODEL, sophia, tiny_config

from maxmars.config import MeshConfig
from maxmars.distributed import sharding
from maxmars.model.parameters import Parameters
from maxmars.plan.collectives import Collective, collectives, total_bytes, wire_bytes
from maxmars.train.step import make_train_step

AXES = sharding.AXES
SETS = [axes for size in (1, 2, 3) for axes in itertools.combinations(AXES, size)]
LOCAL = 8 * 16 * 4
"""Bytes of the [8, 16] float32 array that each device holds."""


def mesh_222(order=range(8)):
    devices = np.array(jax.devices())[list(order)].reshape(2, 2, 2)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def compile_on(mesh, function):
    """Compile a function of each device's own [8, 16] array."""
    spec = P(AXES)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((64, 16), jnp.float32)).compile()


def without_trip_counts(text):
    assert "known_trip_count" in text
    return text.replace("known_trip_count", "unknown")


def psum(x, axes="fsdp"):
    return jnp.sin(jax.lax.psum(x, axes))


def ring(x, axes):
    size = 2 ** len(axes)
    return jax.lax.ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)])


OPERATIONS = {
    "all-gather": lambda x, axes: jax.lax.all_gather(x, axes, tiled=True),
    "all-reduce": lambda x, axes: jax.lax.psum(x, axes),
    "reduce-scatter": lambda x, axes: jax.lax.psum_scatter(x, axes, tiled=True),
    "all-to-all": lambda x, axes: jax.lax.all_to_all(x, axes, 0, 1, tiled=True),
    "collective-permute": ring,
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_operation_bytes_and_axes(op):
    # Device numbers in replica groups are places in the mesh, so its order must not matter.
    mesh = mesh_222((3, 1, 6, 0, 7, 2, 5, 4))
    compiled = compile_on(mesh, lambda x: tuple(OPERATIONS[op](x, axes) for axes in SETS))
    moved = collectives(compiled, mesh)
    assert sorted(c.axes for c in moved) == sorted(SETS)
    for c in moved:
        devices = 2 ** len(c.axes)
        assert c.op == op
        assert (c.count, c.scopes) == (1, frozenset())
        assert c.bytes == LOCAL * (devices if op == "all-gather" else 1)
        assert c.group_size == (2 if op == "collective-permute" else devices)
    assert {c.axes for c in collectives(compiled)} == {None}


def test_combined_collectives_sum_their_parts():
    mesh = mesh_222()
    compiled = compile_on(mesh, lambda x: jnp.concatenate(jax.lax.psum((x, x[:4] + 1), "data")))
    assert total_bytes(collectives(compiled, mesh), op="all-reduce") == LOCAL * 1.5


def scan(function, length):
    return lambda x: jax.lax.scan(lambda x, _: (function(x), None), x, length=length)[0]


def bound_from_arrays(x):
    bound = jnp.arange(4).sum()  # an array while tracing, a constant once compiled
    return jax.lax.fori_loop(0, bound, lambda _, x: psum(x), x)


def countdown(x):
    def body(state):
        return state[0] - 2, psum(state[1])

    return jax.lax.while_loop(lambda state: state[0] >= 1, body, (11, x))[1]


def limit_in_state(x):
    def body(state):
        limit, i, x = state
        return limit, i + 3, psum(x)

    return jax.lax.while_loop(lambda s: s[1] < s[0], body, (jnp.int32(10), 1, x))[2]


LOOPS = {
    "nested scans": (scan(scan(scan(psum, 2), 3), 4), 24),
    "bound from arrays": (bound_from_arrays, 6),
    "countdown": (countdown, 6),
    "limit in state": (limit_in_state, 3),
    "one trip or none": (lambda x: scan(psum, 7)(scan(psum, 0)(scan(psum, 1)(x))), 8),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_multiply(name):
    function, count = LOOPS[name]
    mesh = mesh_222()
    text = compile_on(mesh, function).as_text()
    for known in (text, without_trip_counts(text)):
        moved = collectives(known, mesh)
        assert sum(c.count for c in moved) == count
        assert total_bytes(moved, op="all-reduce", axes=("fsdp",)) == count * LOCAL
        assert total_bytes(moved) == count * LOCAL


def until(function):
    return lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 1, function, x)


def triangle(x):
    return jax.lax.fori_loop(0, 4, lambda i, x: jax.lax.fori_loop(0, i, lambda _, x: psum(x), x), x)


@pytest.mark.parametrize("loop", [until(psum), triangle], ids=["until", "triangle"])
def test_loops_whose_length_depends_on_data_are_named(loop):
    with refused(ValueError, "while"):
        collectives(compile_on(mesh_222(), loop))


def test_a_loop_without_collectives_may_run_until_something_happens():
    compiled = compile_on(mesh_222(), lambda x: psum(until(jnp.cos)(x)))
    assert [c.count for c in collectives(compiled)] == [1]


def test_the_larger_branch_counts():
    def branches(x):
        def gather(x):
            return jax.lax.all_gather(x, "data", tiled=True)[4:12]

        return jax.lax.cond(jax.lax.axis_index("tensor") == 0, psum, gather, x)

    moved = collectives(compile_on(mesh_222(), branches), mesh_222())
    assert [(c.op, c.bytes) for c in moved] == [("all-gather", 2 * LOCAL)]


def test_scopes():
    def scoped(x):
        with jax.named_scope("model"):
            x = jax.grad(lambda x: psum(x, "data").sum())(x)
        with jax.named_scope("clip"):
            x = psum(x, "fsdp")
        with jax.named_scope("optimizer"):
            x = scan(functools.partial(psum, axes="tensor"), 3)(jnp.clip(x, -1, 1))
        return psum(jnp.clip(x, -1, 1), AXES)

    mesh = mesh_222()
    moved = {tuple(c.scopes): c for c in collectives(compile_on(mesh, scoped), mesh)}
    assert {scopes: (c.axes, c.phase) for scopes, c in moved.items()} == {
        ("model",): (("data",), "model"),
        ("clip",): (("fsdp",), "model"),
        ("optimizer",): (("tensor",), "optimizer"),
        (): (AXES, "mixed"),
    }
    assert moved["optimizer",].count == 3


@pytest.mark.seconds
def test_collectives_of_the_train_step():
    config = tiny_config(mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    step = make_train_step(config, Parameters(config.model, sharding.make_mesh(config.mesh)))
    text = step.lower().compile().as_text()
    moved = collectives(text, step.mesh)
    assert collectives(without_trip_counts(text), step.mesh) == moved
    # XLA joins the norms of the gradients with those of parameters and updates.
    alone = {scope for c in moved if len(c.scopes) == 1 for scope in c.scopes}
    assert alone == {"model", "clip", "optimizer"}
    model = [c for c in moved if c.scopes == {"model"}]
    rest = [c for c in moved if c.scopes != {"model"}]
    assert {c.op for c in rest} == {"all-reduce"}
    assert total_bytes(rest) < 1000  # norms

    d, repeats = MODEL.embed_dim, config.model.num_layers * config.num_microbatches
    kernels = 12 * d * d * 4 // 2  # of a layer, in bytes, split over tensor: 3 + 1 + 4 + 4 squares
    biases = 2 * d * 4  # of the two projections; the others are split over heads or not at all
    tables = (MODEL.padded_vocab_size // 2 + MODEL.max_seq_len) * d * 4
    rows = config.microbatch_size // 4
    # Of the logits, two numbers a token, from which its loss follows: that of its target, and the
    # sum of the exponentials.
    over_tensor = [c for c in model if c.axes == ("tensor",)]
    assert {c.op for c in over_tensor} == {"all-reduce"}
    numbers = rows * MODEL.max_seq_len
    of_loss = [c for c in over_tensor if c.bytes == c.count * numbers * 4]
    assert sum(c.count for c in of_loss) == 2 * config.num_microbatches
    gathers = [c for c in model if c.op == "all-gather"]
    assert {c.axes for c in gathers} == {("fsdp",)}
    # Kernels are gathered in every layer and microbatch, and without rematerialisation stay until
    # the backward pass; the tables are gathered once.
    assert sorted({c.count for c in gathers}) == [1, repeats]
    assert total_bytes(c for c in gathers if c.count > 1) == repeats * (kernels + biases)
    assert total_bytes(c for c in gathers if c.count == 1) == tables

    # Gradients of kernels and small parameters are summed over fsdp, which is a reduce-scatter on
    # other chips than CPUs; those of the tables go to their shards, from look-up and head.
    in_layers = kernels + (4 * d + 2 * d + 3 * d // 2 + 4 * d // 2) * 4  # norms, biases
    outside = (2 * d + 1) * 4  # norm, loss
    of_model = functools.partial(total_bytes, model)
    sums = repeats * in_layers + config.num_microbatches * outside
    assert of_model(op="all-reduce", axes=("fsdp",)) == sums
    assert of_model(op="all-to-all", axes=("fsdp",)) == config.num_microbatches * tables
    activations = rows * MODEL.max_seq_len * d * 4
    # Two in a block forward, two backward; one each at the token table and its output head.
    large = [c for c in model if c.axes == ("tensor",) and c.bytes // c.count == activations]
    assert sum(c.count for c in large) == 4 * repeats + 2 * config.num_microbatches


@pytest.mark.seconds
@pytest.mark.parametrize("optimizer", [ADAMW, pytest.param(sophia(10), marks=pytest.mark.slow)])
def test_gradients_cross_data_once_a_step(optimizer):
    config = tiny_config(
        model=dataclasses.replace(MODEL, num_layers=2),
        mesh=MeshConfig(data=2, fsdp=2),
        optimizer=optimizer,
        global_batch_size=20,
        num_microbatches=5,
    )
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:4])
    step = make_train_step(config, Parameters(config.model, mesh))
    moved = collectives(step.lower().compile(), step.mesh)
    over_data = total_bytes(c for c in moved if "data" in (c.axes or ()))
    trees = 1 if optimizer is ADAMW else 2  # that of drawn labels
    gradients = trees * sharding.bytes_on_chip(step.abstract_state.params)
    assert gradients <= over_data < gradients + 1000  # loss and norms


MESH = AbstractMesh((2, 4), ("data", "fsdp"))

# Asynchronous collectives as GPU programs write them; operands with shapes, as older printers do.
ASYNC = """HloModule jit_f, is_scheduled=true, replica_count=1, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x, %y)
}

%async_wrapped (p.1: f32[16,4]) -> f32[4,4] {
  %p.1 = f32[16,4]{1,0} parameter(0)
  ROOT %inner = f32[4,4]{1,0} reduce-scatter(%p.1), replica_groups=[2,4]<=[8], to_apply=%add
}

ENTRY %main (p: f32[16,4], q: bf16[3]) -> f32[4,4] {
  %p = f32[16,4]{1,0} parameter(0)
  %q = bf16[3]{0} parameter(1)
  %ags = ((f32[16,4]{1,0}, bf16[3]{0}), (f32[64,4]{1,0}, bf16[12]{0})) all-gather-start(f32[16,4]{1,0} %p, bf16[3]{0} %q), replica_groups=[2,4]<=[8], dimensions={0}
  %agd = (f32[64,4]{1,0}, bf16[12]{0}) all-gather-done(%ags)
  %ars = (f32[16,4]{1,0}, /*index=1*/bf16[3]{0}) all-reduce-start(%p, /*index=1*/%q), replica_groups={}, to_apply=%add
  %ard = (f32[16,4]{1,0}, bf16[3]{0}) all-reduce-done(%ars)
  %cps = (f32[16,4]{1,0}, f32[16,4]{1,0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,4},{4,0}}
  %cpd = f32[16,4]{1,0} collective-permute-done(%cps)
  %ats = ((f32[16,4]{1,0}), f32[16,4]{1,0}) all-to-all-start(%p), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %atd = f32[16,4]{1,0} all-to-all-done(%ats)
  %rss = ((f32[16,4]{1,0}), f32[4,4]{1,0}) async-start(%cpd), calls=%async_wrapped, metadata={op_name="jit(f)/(model/x:clip/y)"}
  %rsu = ((f32[16,4]{1,0}), f32[4,4]{1,0}) async-update(%rss), calls=%async_wrapped
  ROOT %rsd = f32[4,4]{1,0} async-done(%rsu), calls=%async_wrapped
}
"""  # noqa: E501


def test_asynchronous_pairs_count_once():
    moved = {c.name: c for c in collectives(ASYNC, MESH)}
    p, q = 16 * 4 * 4, 3 * 2
    assert {name: (c.op, c.bytes, wire_bytes(c), c.axes) for name, c in moved.items()} == {
        "ags": ("all-gather", 4 * (p + q), 4 * (p + q) * 3 / 4, ("fsdp",)),
        "ars": ("all-reduce", p + q, (p + q) * 2 * 7 / 8, ("data", "fsdp")),
        "cps": ("collective-permute", p, p, ("data",)),
        "ats": ("all-to-all", p, p / 2, ("data",)),
        "inner": ("reduce-scatter", p, p * 3 / 4, ("fsdp",)),
    }
    assert {c.count for c in moved.values()} == {1}
    # The permute has no path of its own; the instruction that uses it has one.
    assert {c.name for c in moved.values() if len(c.scopes) > 1} == {"cps", "inner"}
    assert total_bytes(moved.values(), axes=("data",)) == 2 * p


# The habits of libtpu: tiled layouts, no trip counts, limits that an outer loop hands on, a
# gather that two fusions repeat, a reduce-scatter that is an all-reduce in a fusion.
TPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

FileNames
1 "step.py"

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %s = f32[]{:T(128)} add(%x, %y)
}

%start (p0: bf16[1,16]) -> (bf16[1,16], bf16[8,16], u32[]) {
  %p0 = bf16[1,16]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %gather.1 = bf16[8,16]{1,0:T(8,128)(2,1)} all-gather(%p0), channel_id=5, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, frontend_attributes={chain_id="0"}, metadata={op_name="jit(step)/model/while/body/x"}
  ROOT %cc = (bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, bf16[8,16]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%done (p0.2: bf16[1,16]) -> bf16[8,16] {
  %p0.2 = bf16[1,16]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %gather.3 = bf16[8,16]{1,0:T(8,128)(2,1)} all-gather(%p0.2), channel_id=5, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %cc.1 = bf16[8,16]{1,0:T(8,128)(2,1)} custom-call(%p0.2, %gather.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.7.clone (input: f32[8,16]) -> f32[4,16] {
  %input = f32[8,16]{1,0:T(8,128)} parameter(0)
  %all-reduce.9 = f32[8,16]{1,0:T(8,128)} all-reduce(%input), channel_id=6, replica_groups=mesh['a'=8], device_ids=([2,4]T(1,0)) {'a':(4)2}, to_apply=%sum
  %zero.1 = s32[]{:T(128)} constant(0)
  ROOT %ds = f32[4,16]{1,0:T(8,128)} dynamic-slice(%all-reduce.9, %zero.1, %zero.1), dynamic_slice_sizes={4,16}
}

%plus (a: s32[], b: s32[]) -> s32[] {
  %a = s32[]{:T(128)} parameter(0)
  %b = s32[]{:T(128)} parameter(1)
  ROOT %ab = s32[]{:T(128)} add(%a, %b)
}

%body (state: (s32[], s32[], bf16[1,16], f32[8,16], s32[])) -> (s32[], s32[], bf16[1,16], f32[8,16], s32[]) {
  %state = (s32[]{:T(128)}, s32[]{:T(128)}, bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, f32[8,16]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %limit = s32[]{:T(128)} get-tuple-element(%state), index=1
  %shard = bf16[1,16]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%state), index=2
  %g = f32[8,16]{1,0:T(8,128)} get-tuple-element(%state), index=3
  %stride = s32[]{:T(128)} get-tuple-element(%state), index=4
  %next = s32[]{:T(128)} fusion(%stride, %i), kind=kLoop, calls=%plus
  %f.1 = (bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, bf16[8,16]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) fusion(%shard), kind=kCustom, calls=%start
  %f.3 = bf16[8,16]{1,0:T(8,128)(2,1)} fusion(%shard), kind=kCustom, calls=%done
  %f.4 = f32[4,16]{1,0:T(8,128)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.7.clone, metadata={op_name="jit(step)/clip/reduce_sum"}
  ROOT %out = (s32[]{:T(128)}, s32[]{:T(128)}, bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, f32[8,16]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%next, %limit, %shard, %g, %stride)
}

%cond (state.1: (s32[], s32[], bf16[1,16], f32[8,16], s32[])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, s32[]{:T(128)}, bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, f32[8,16]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %limit.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=1
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %gt = pred[]{:T(512)} compare(%limit.1, %i.1), direction=GT
}

%outer_body (os: (s32[], s32[], bf16[1,16], f32[8,16])) -> (s32[], s32[], bf16[1,16], f32[8,16]) {
  %os = (s32[]{:T(128)}, s32[]{:T(128)}, bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, f32[8,16]{1,0:T(8,128)}) parameter(0)
  %oi = s32[]{:T(128)} get-tuple-element(%os), index=0
  %ol = s32[]{:T(128)} get-tuple-element(%os), index=1
  %oshard = bf16[1,16]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%os), index=2
  %og = f32[8,16]{1,0:T(8,128)} get-tuple-element(%os), index=3
  %one = s32[]{:T(128)} constant(1)
  %two = s32[]{:T(128)} constant(2)
  %from = s32[]{:T(128)} copy(%one)
  %cs = (s32[]{:T(128)S(1)}, s32[]{:T(128)}, u32[]{:S(2)}) copy-start(%ol)
  %cd = s32[]{:T(128)S(1)} copy-done(%cs)
  %init = (s32[]{:T(128)}, s32[]{:T(128)}, bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, f32[8,16]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%from, %cd, %oshard, %og, %two)
  %inner = (s32[]{:T(128)}, s32[]{:T(128)}, bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, f32[8,16]{1,0:T(8,128)}, s32[]{:T(128)}) while(%init), condition=%cond, body=%body
  %kept = s32[]{:T(128)} get-tuple-element(%inner), index=1
  %onext = s32[]{:T(128)} subtract(%oi, %one)
  ROOT %oout = (s32[]{:T(128)}, s32[]{:T(128)}, bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, f32[8,16]{1,0:T(8,128)}) tuple(%onext, %kept, %oshard, %og)
}

%outer_cond (os.1: (s32[], s32[], bf16[1,16], f32[8,16])) -> pred[] {
  %os.1 = (s32[]{:T(128)}, s32[]{:T(128)}, bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, f32[8,16]{1,0:T(8,128)}) parameter(0)
  %oi.1 = s32[]{:T(128)} get-tuple-element(%os.1), index=0
  %zero = s32[]{:T(128)} constant(0)
  ROOT %ne = pred[]{:T(512)} compare(%oi.1, %zero), direction=NE
}

ENTRY %main (shard.1: bf16[1,16], g.1: f32[8,16]) -> s32[] {
  %shard.1 = bf16[1,16]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %g.1 = f32[8,16]{1,0:T(8,128)} parameter(1)
  %three = s32[]{:T(128)} constant(3)
  %six = s32[]{:T(128)} constant(6)
  %oinit = (s32[]{:T(128)}, s32[]{:T(128)}, bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, f32[8,16]{1,0:T(8,128)}) tuple(%three, %six, %shard.1, %g.1)
  %outer = (s32[]{:T(128)}, s32[]{:T(128)}, bf16[1,16]{1,0:T(8,128)(2,1)S(1)}, f32[8,16]{1,0:T(8,128)}) while(%oinit), condition=%outer_cond, body=%outer_body
  ROOT %end = s32[]{:T(128)} get-tuple-element(%outer), index=0
}
"""  # noqa: E501


def test_a_program_in_the_manner_of_libtpu():
    gather, scatter = collectives(TPU, MESH)
    count = 3 * 3  # 3, 2, 1; and 1, 3, 5 below 6
    assert gather == Collective(
        op="all-gather",
        bytes=count * 8 * 16 * 2,
        count=count,
        axes=("data", "fsdp"),
        group_size=8,
        name="gather.1",
        scopes=frozenset({"model"}),
    )
    # Devices 0 4 1 5 2 6 3 7 in pairs: those that differ in `data`.
    assert scatter == Collective(
        op="reduce-scatter",
        bytes=count * 8 * 16 * 4,
        count=count,
        axes=("data",),
        group_size=2,
        name="all-reduce.9",
        scopes=frozenset({"clip"}),
    )


@pytest.mark.parametrize(
    ("text", "old", "new", "named"),
    [
        (TPU, "subtract(%oi, %one)", "add(%oi, %one)", ["'outer'"]),
        (TPU, "%onext, %kept", "%onext, %onext", ["'inner'", "'outer'"]),
        (TPU, "constant(6)", "parameter(2)", ["'inner'", "parameter 'six'"]),
        (TPU, "constant(0)\n  ROOT %ne", "rng()\n  ROOT %ne", ["'outer'", "rng 'zero'"]),
        (ASYNC, "[2,4]<=[8]", "V9(8)", ["V9(8)"]),
        (ASYNC, "ENTRY ", "", ["ENTRY"]),
    ],
)
def test_refusals(text, old, new, named):
    assert old in text
    with refused(ValueError, *named):
        collectives(text.replace(old, new), MESH)


GROUPS = {
    "{{0,1,2,3},{4,5,6,7}}": ("fsdp",),
    "{{0,4},{1,5},{2,6},{3,7}}": ("data",),
    "{}": ("data", "fsdp"),
    "{{0},{1},{2},{3},{4},{5},{6},{7}}": (),
    "{{0,1},{2,3},{4,5},{6,7}}": None,
    "[2,4]<=[8]": ("fsdp",),
    "[4,2]<=[2,4]T(1,0)": ("data",),
    "[1,8]<=[8]": ("data", "fsdp"),
    "mesh['x'=2,'y'=4] {'y'}": ("fsdp",),
    "mesh['x'=2,'y'=4] {'y','x'}": ("data", "fsdp"),
    "mesh['x'=8] {'x':(1)2}": ("data",),
    "mesh['x'=8] {'x':(2)4}": ("fsdp",),
    "mesh['x'=8] {'x':(1)2,'x':(4)2}": None,
    "mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}": ("data",),
    "mesh['x'=4,'y'=2], device_ids=(0,4,1,5,2,6,3,7) {'x'}": ("fsdp",),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_notations_of_replica_groups(groups):
    text = re.sub(r"replica_groups=\[4,2\]\S*(?=, dim)", f"replica_groups={groups}", ASYNC)
    moved = {c.name: c for c in collectives(text, MESH)}
    assert moved["ats"].axes == GROUPS[groups]


# Two slices of four devices: one slice's program, which sends what it has reduced to the other.
SLICES = """HloModule jit_step, is_scheduled=true, num_partitions=4

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

ENTRY %main (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %r = f32[8,128]{1,0:T(8,128)} all-reduce(%p), channel_id=9, replica_groups={{0,1,2,3}}, to_apply=%sum, metadata={op_name="jit(step)/model/grad"}
  %b = f32[8,128]{1,0:T(8,128)} bitcast(%r)
  %after = token[] after-all()
  %send = (f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}, token[]) send(%b, %after), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.1_0",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}, token[]) recv(%after), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=4, is_host_transfer=true
  %got = (f32[8,128]{1,0:T(8,128)}, token[]) recv-done(%recv), channel_id=3, is_host_transfer=true
  ROOT %out = f32[8,128]{1,0:T(8,128)} get-tuple-element(%got), index=0
}
"""  # noqa: E501


def test_exchanges_between_slices_are_the_sends_to_the_runtime():
    mesh = AbstractMesh((2, 4, 1), AXES)
    inside, between = collectives(SLICES, mesh, num_slices=2)
    assert (inside.op, inside.axes, inside.between_slices) == ("all-reduce", ("fsdp",), False)
    assert between == Collective(
        op="all-reduce",
        bytes=8 * 128 * 4,
        count=1,
        axes=("data",),
        group_size=2,
        name="send",
        scopes=frozenset({"model"}),
        between_slices=True,
    )


KERNEL = """  %kernel = (bf16[4,2]{1,0}, f32[4,128]{1,0}) custom-call(%p), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block": "{512}"
}}, metadata={op_name="jit(step)/model/kernel"}
"""


def test_kernels_attributes_have_line_breaks():
    start, agd, rest = ASYNC.partition("  %agd")
    assert collectives(start + KERNEL + agd + rest, MESH) == collectives(ASYNC, MESH)
