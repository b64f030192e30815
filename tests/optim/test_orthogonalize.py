import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from refusals import refused
from trees import assert_close, mesh_of, random_tree

from maxmars.distributed.sharding import like_params, with_shardings
from maxmars.optim import (
    MatrixSpec,
    mars,
    newton_schulz,
    on_whole_matrices,
    orthogonalization_groups,
    orthogonalize,
)
from maxmars.plan.collectives import collectives, total_bytes

# The matrices of a GPT-2, their specs and meshes.
AXES = ("data", "fsdp", "tensor")
PARTITIONS = {
    "c_attn": PartitionSpec(None, "fsdp", None, "tensor"),  # layers, embed, qkv, heads, head_dim
    "attn_proj": PartitionSpec(None, "tensor", None, "fsdp"),  # layers, heads, head_dim, embed
    "c_fc": PartitionSpec(None, "fsdp", "tensor"),  # layers, embed, mlp
    "mlp_proj": PartitionSpec(None, "tensor", "fsdp"),  # layers, mlp, embed
}
SPLITS = {
    "fused": {},
    "qkv": {"c_attn": (2,)},
    "heads": {"c_attn": (2, 3), "attn_proj": (1,)},
}
XL = {"layers": 48, "embed": 1600, "heads": 25}
LARGE = {"layers": 36, "embed": 1280, "heads": 20}


def shapes(layers, embed, heads):
    return {
        "c_attn": (layers, embed, 3, heads, embed // heads),
        "attn_proj": (layers, heads, embed // heads, embed),
        "c_fc": (layers, embed, 4 * embed),
        "mlp_proj": (layers, 4 * embed, embed),
    }


def specs(split="fused", partitions=PARTITIONS):
    axes = {
        "c_attn": {"rows": (1,), "cols": (2, 3, 4)},
        "attn_proj": {"rows": (1, 2), "cols": (3,)},
        "c_fc": {"rows": (1,), "cols": (2,)},
        "mlp_proj": {"rows": (1,), "cols": (2,)},
    }
    return {
        name: MatrixSpec(
            batch=(0,), **sides, partition=partitions[name], split=SPLITS[split].get(name, ())
        )
        for name, sides in axes.items()
    }


def shardings(mesh):
    return {name: NamedSharding(mesh, partition) for name, partition in PARTITIONS.items()}


def random_matrices(layers, embed=16, heads=4, dtype="float32"):
    return random_tree(layers, shapes(layers, embed, heads), dtype=dtype)


def abstract(size):
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes(**size).items()
    }


def compiled(updates, matrix_specs=None, **options):
    return jax.jit(lambda u: orthogonalize(u, matrix_specs, **options))(updates)


compiled_newton_schulz = jax.jit(newton_schulz, static_argnames="dtype")


# --- on one device -------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("split", "shape"), [("fused", (16, 48)), ("qkv", (16, 16)), ("heads", (16, 4))]
)
def test_each_matrix_or_block_by_itself(split, shape, x64):
    updates = {"c_attn": random_matrices(2, dtype="float64")["c_attn"]}
    spec = {"c_attn": specs(split)["c_attn"]}
    ours = compiled(updates, spec, dtype=jnp.float64, scale=None)["c_attn"]
    rms = compiled(updates, spec, dtype=jnp.float64, scale="rms")["c_attn"]
    x, (qkv, heads) = updates["c_attn"], {"fused": (1, 1), "qkv": (3, 1), "heads": (3, 4)}[split]
    blocks = x.reshape(2, 16, qkv, heads, -1).transpose(0, 2, 3, 1, 4)
    assert blocks.shape[-2:] == shape
    expected = compiled_newton_schulz(jnp.asarray(blocks), dtype=jnp.float64)
    expected = expected.transpose(0, 3, 1, 2, 4).reshape(x.shape)
    np.testing.assert_allclose(ours, expected, atol=1e-12)
    np.testing.assert_allclose(rms, 0.2 * np.sqrt(max(shape)) * expected, atol=1e-12)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("scale", "wide", "tall"), [("spectral", 2.0, 1.0), ("rms", 0.8, 0.8), (None, 1.0, 1.0)]
)
def test_scales_of_matrices_in_x_out_and_of_nothing_else(scale, wide, tall):
    eye = jnp.eye(4, 16)
    one = compiled_newton_schulz(eye, dtype=jnp.float32)
    updates = {"wide": eye, "tall": eye.T, "norm": jnp.arange(6.0), "scalar": jnp.asarray(3.0)}
    ours = compiled(updates, scale=scale, dtype=jnp.float32)
    np.testing.assert_allclose(ours["wide"], wide * one, atol=1e-6)
    np.testing.assert_allclose(ours["tall"], tall * one.T, atol=1e-6)
    for name in ("norm", "scalar"):
        np.testing.assert_array_equal(ours[name], updates[name])


def test_rounds_of_bounded_size_change_nothing(x64):
    updates = random_matrices(7, dtype="float64")

    def in_rounds(u):
        return orthogonalize(u, specs(), dtype="float64", max_batch_bytes=60_000)

    assert " while(" in jax.jit(in_rounds).lower(updates).compile().as_text()
    assert_close(jax.jit(in_rounds)(updates), compiled(updates, specs(), dtype="float64"), 1e-13)


# --- on a mesh -----------------------------------------------------------------------------------


@pytest.mark.seconds
@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)])
def test_a_mesh_changes_nothing(x64, shape):
    """Stacks that the devices divide, prime ones, and ones smaller than the mesh."""
    cases = ((16, "fused"), (7, "qkv"), (3, "heads"))
    trees = [random_matrices(layers, dtype="float64") for layers, _ in cases]
    mesh = mesh_of(*shape)

    def program(mesh, trees):
        return [
            orthogonalize(tree, specs(split), dtype="float64", mesh=mesh)
            for tree, (_, split) in zip(trees, cases, strict=True)
        ]

    run = jax.jit(program, static_argnums=0)
    layout = shardings(mesh)
    results = run(mesh, [jax.device_put(tree, layout) for tree in trees])
    assert_close(results, run(None, trees), 1e-13)
    for result in results:
        for name, x in result.items():
            assert x.sharding.is_equivalent_to(layout[name], x.ndim), name


@pytest.mark.parametrize(("shape", "size"), [((1, 8, 1), XL), ((1, 4, 2), LARGE)])
def test_traffic(shape, size, capfd):
    """Of a MARS-Shampoo update of a real GPT-2; nothing is allocated."""
    mesh = mesh_of(*shape)
    params = with_shardings(abstract(size), shardings(mesh))
    tx = mars(1e-3, variant="shampoo", matrix_specs=specs(), mesh=mesh)
    state = jax.eval_shape(tx.init, params)
    state = with_shardings(state, like_params(state, params))
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    update = jax.jit(tx.update, donate_argnums=(0, 1), out_shardings=out)
    program = update.lower(params, state, params).compile()
    groups = orthogonalization_groups(params, specs(), mesh=mesh)
    exchanged, counts, others = [], [], []
    for collective in collectives(program, mesh):
        if collective.op == "all-to-all":
            exchanged.append(collective.bytes)
            counts.append(collective.count)
        else:
            others.append(collective.bytes)
    padded = sum(group.padded_elements for group in groups)
    assert sum(counts) == 2 * len(groups)
    assert sum(exchanged) == 2 * sum(group.transfer_elements for group in groups)
    assert sum(exchanged) <= 1.1 * 2 * 2 * padded / mesh.size
    assert padded <= 1.25 * sum(group.elements for group in groups)
    assert max(others, default=0) < 1e6
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.smoke
def test_owners_among_copies(x64):
    # Four devices hold a copy of each piece. With `data` among the owners each iterates on a
    # quarter of the matrices only, and the results are gathered.
    mesh = mesh_of(4, 2, 1)
    local = random_matrices(6, dtype="float64")
    updates = jax.device_put(local, shardings(mesh))
    over_data = {"mesh": mesh, "ownership_axes": ("fsdp", "data")}
    run = jax.jit(lambda u: orthogonalize(u, specs(), dtype="float64", **over_data))
    assert_close(run(updates), compiled(local, specs(), dtype="float64"), 1e-13)
    moved = collectives(run.lower(updates).compile(), mesh)
    assert {collective.op for collective in moved} == {"all-to-all", "all-gather"}
    groups = orthogonalization_groups(updates, specs(), **over_data)
    assert total_bytes(moved) == 8 * sum(group.transfer_elements for group in groups)
    repeated = orthogonalization_groups(updates, specs(), mesh=mesh)
    for ours, theirs in zip(groups, repeated, strict=True):
        assert ours.slots / ours.owners < theirs.slots / theirs.owners / 2


def triangular(x):
    """(lower triangle of X Xᵀ) X: it needs whole matrices, with rows and columns in order."""
    return jnp.tril(x @ x.mT) @ x


@pytest.mark.smoke
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_function_of_whole_matrices(axis_type, x64):
    mesh = jax.make_mesh((1, 4, 2), AXES, axis_types=(axis_type,) * 3)
    updates = random_matrices(3, dtype="float64") | {"bias": np.arange(16.0)}
    matrix_specs = specs("qkv") | {"bias": None}
    expected = on_whole_matrices(triangular, updates, matrix_specs)
    one = updates["c_attn"][1, :, 2].reshape(16, 16)
    ours = expected["c_attn"][1, :, 2].reshape(16, 16)
    np.testing.assert_allclose(ours, triangular(one[None])[0], atol=1e-12)
    np.testing.assert_array_equal(expected["bias"], updates["bias"])

    layout = shardings(mesh) | {"bias": NamedSharding(mesh, PartitionSpec())}
    sharded = jax.device_put(updates, layout)
    given = mesh if axis_type == AxisType.Auto else None  # types of Explicit axes know it
    with jax.set_mesh(mesh):
        run = jax.jit(lambda u: on_whole_matrices(triangular, u, matrix_specs, given))
        results = run(sharded)
    for name, x in results.items():
        np.testing.assert_allclose(x, expected[name], atol=1e-12, err_msg=name)
        assert x.sharding.is_equivalent_to(layout[name], x.ndim), name
    moved = collectives(run.lower(sharded).compile(), mesh)
    assert {collective.op for collective in moved} == {"all-to-all"}
    assert sum(collective.count for collective in moved) == 2 * 4


# --- the plan ------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("shape", "size", "padding"),
    [
        ((1, 1, 1), XL, 1.0),
        ((2, 8, 1), XL, 1.0),
        ((1, 64, 1), XL, 4 / 3),  # 48 layers over 64 owners
        ((1, 4, 4), LARGE, 512 / 432),
    ],
)
def test_padding(shape, size, padding):
    mesh = AbstractMesh(shape, AXES)
    groups = orthogonalization_groups(abstract(size), specs(), mesh=mesh)
    elements = sum(group.elements for group in groups)
    assert sum(group.padded_elements for group in groups) <= padding * elements * (1 + 1e-9)
    assert elements == sum(math.prod(x.shape) for x in abstract(size).values())
    assert sorted(leaf for group in groups for leaf in group.stacks) == [0, 1, 2, 3]
    for group in groups:
        assert size["layers"] * len(group.stacks) <= group.slots
    slots = [group.rows * group.cols for group in groups]
    assert slots == sorted(slots, reverse=True)


@pytest.mark.smoke
def test_equal_matrices_travel_together():
    mesh = AbstractMesh((1, 16, 1), AXES)
    groups = orthogonalization_groups(abstract(XL), specs(), mesh=mesh)
    found = [
        (g.rows, g.cols, g.slots, g.owners, [stack.name for stack in g.stacks.values()])
        for g in groups
    ]
    assert found == [
        (1600, 6400, 96, 16, ["c_fc", "mlp_proj"]),
        (1600, 4800, 48, 16, ["c_attn"]),
        (1600, 1600, 48, 16, ["attn_proj"]),
    ]
    assert 2 * sum(group.transfer_elements for group in groups) == 368_640_000  # in bfloat16


@pytest.mark.smoke
def test_an_embedding_is_a_group_of_its_own():
    mesh = AbstractMesh((1, 64, 1), AXES)
    table = jax.ShapeDtypeStruct((50304, 1600), jnp.float32)
    embedding = MatrixSpec(rows=(0,), cols=(1,), partition=PartitionSpec(None, "fsdp"))
    params, matrix_specs = abstract(XL) | {"wte": table}, specs() | {"wte": embedding}
    groups = orthogonalization_groups(params, matrix_specs, mesh=mesh)
    assert (list(groups[0].stacks), groups[0].slots) == ([4], 64)
    assert groups[0].padded_elements == 64 * 50304 * 1600
    assert groups[1:] == orthogonalization_groups(abstract(XL), specs(), mesh=mesh)


@pytest.mark.smoke
def test_the_partition_of_arrays_that_carry_one():
    mesh = mesh_of(1, 4, 2)
    updates = jax.device_put(random_matrices(4), shardings(mesh))
    bare = specs(partitions=dict.fromkeys(PARTITIONS))
    from_arrays = orthogonalization_groups(updates, bare, mesh=mesh)
    assert from_arrays == orthogonalization_groups(updates, specs(), mesh=mesh)
    with refused(ValueError, "attn_proj is a matrix", "MatrixSpec(partition="):
        jax.eval_shape(lambda u: orthogonalize(u, bare, mesh=mesh), updates)


MESHES = [(a, b, 8 // a // b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) if a * b <= 8]


@st.composite
def cut_stacks(draw):
    """A mesh, the partition of a stack of matrices over it, and the shape of the stack."""
    sizes = draw(st.sampled_from(MESHES))
    axes = draw(st.permutations(list(zip(("data", "fsdp", "tensor"), sizes, strict=True))))
    places = draw(st.tuples(*[st.sampled_from([None, 0, 1, 2])] * 3))
    cuts = [[axis for axis, at in zip(axes, places, strict=True) if at == i] for i in range(3)]
    times = draw(st.tuples(*[st.integers(1, 5)] * 3))
    shape = [n * math.prod(size for _, size in cut) for n, cut in zip(times, cuts, strict=True)]
    return sizes, PartitionSpec(*(tuple(name for name, _ in cut) for cut in cuts)), shape


@pytest.mark.seconds
@hypothesis.settings(max_examples=10, deadline=None, database=None, derandomize=True)
@given(cut_stacks(), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_any_stack_on_any_mesh_comes_to_its_owners_and_back(stack, dtype):
    """Rows and columns turned round need the whole matrix, and every bit of it."""
    sizes, partition, shape = stack
    mesh = mesh_of(*sizes)
    x = jnp.asarray(np.random.default_rng(0).integers(-128, 128, shape), dtype)
    spec = MatrixSpec(batch=(0,), rows=(1,), cols=(2,), partition=partition)
    sharding = NamedSharding(mesh, partition)
    turn = jax.jit(lambda u: on_whole_matrices(lambda y: y[:, ::-1, ::-1], u, spec, mesh))
    moved = turn(jax.device_put(x, sharding))
    np.testing.assert_array_equal(moved, x[:, ::-1, ::-1])
    assert moved.sharding.is_equivalent_to(sharding, 3)
