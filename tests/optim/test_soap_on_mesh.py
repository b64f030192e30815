import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from trees import mesh_of, put, random_tree, take_steps

from maxmars.optim import MatrixSpec, scale_by_soap, soap, soap_shardings

# With the limit of 36, of `c_attn`, `odd` and the table one side is preconditioned.
LIMIT = 36
LEAVES = {  # shape, input axes, output axes, partition; other axes stack matrices
    "c_attn": ((8, 16, 3, 4, 4), (1,), (2, 3, 4), (None, "fsdp", None, "tensor")),
    "attn_proj": ((3, 4, 4, 16), (1, 2), (3,), (None, "tensor", None, "fsdp")),
    "wte": ((100, 16), (0,), (1,), ("tensor", "fsdp")),  # 8 devices do not divide 100 rows
    "odd": ((3, 40, 6), (1,), (2,), (None, ("tensor", "fsdp"))),  # nor sides of 6
    "layers": ((8, 6, 6), (1,), (2,), ("fsdp",)),
}
PARTITIONS = {name: PartitionSpec(*leaf[3]) for name, leaf in LEAVES.items()} | {
    "bias": PartitionSpec()
}
SPECS = {
    name: MatrixSpec(
        batch=() if rows[0] == 0 else (0,), rows=rows, cols=cols, partition=PartitionSpec(*cuts)
    )
    for name, (_, rows, cols, cuts) in LEAVES.items()
} | {"bias": None}
MESH_SHAPES = {name: leaf[0] for name, leaf in LEAVES.items()} | {"bias": (3, 16)}


def run_on_mesh(mesh, steps=4):
    tx = soap(
        0.01,
        eps=1e-2,  # without it the first update is a sign, and rounding can flip that
        precondition_frequency=3,
        max_precondition_dim=LIMIT,
        matrix_specs=SPECS,
        mesh=mesh,
        vector_weight_decay=0.1,
    )
    trees = (random_tree(i, MESH_SHAPES, dtype="float64") for i in range(steps + 1))
    params, *gradients = (put(tree, mesh, PARTITIONS) for tree in trees)
    after = take_steps(tx, params, gradients)
    return after.params[-1], after.state


@pytest.mark.seconds
def test_a_mesh_changes_nothing(x64):
    mesh = mesh_of(1, 4, 2)
    expected, expected_state = run_on_mesh(None)
    params, state = run_on_mesh(mesh)
    for name, x in params.items():
        np.testing.assert_allclose(x, expected[name], rtol=0, atol=1e-12, err_msg=name)
        wanted = NamedSharding(mesh, PARTITIONS[name])
        assert x.sharding.is_equivalent_to(wanted, x.ndim), name
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, expected_state)
    check_shardings(state, soap_shardings(state, mesh, SPECS))


def check_shardings(state, shardings):
    """The state is where `soap_shardings` says, and divided over the devices like its leaf."""

    def check(x, wanted):
        assert wanted is None or x.sharding.is_equivalent_to(wanted, x.ndim)

    def pieces(x):
        return x.size // int(np.prod(x.sharding.shard_shape(x.shape)))

    jax.tree.map(check, state, shardings)
    state = state.inner_states["matrix"].inner_state[0]
    for name in LEAVES:
        mesh = state.mu[name].sharding.mesh
        axes = jax.tree.leaves(tuple(PARTITIONS[name]))
        wanted = int(np.prod([mesh.shape[axis] for axis in axes]))
        assert pieces(state.mu[name]) == pieces(state.nu[name]) == wanted, name
        for tree in (state.row_gram, state.col_gram, state.row_basis, state.col_basis):
            # A Gram matrix that cannot be divided is copied.
            if tree[name] is not None and name != "odd":
                assert pieces(tree[name]) == wanted, name


def lone_leaf(name, mesh):
    """A parameter in its partition, and the optimizer of it alone."""
    x = put(random_tree(0, MESH_SHAPES), mesh, PARTITIONS)[name]
    return x, scale_by_soap(matrix_specs=SPECS[name], mesh=mesh, max_precondition_dim=LIMIT)


@pytest.mark.parametrize(("name", "exchanges"), [("c_attn", 2), ("attn_proj", 14)])
def test_traffic(name, exchanges):
    # Two devices divide 8 layers, so owners keep the state: gradients come and updates go. They
    # do not divide 3, so the six arrays of the state come and go too.
    grads, tx = lone_leaf(name, mesh_of(2, 2, 2))
    update = jax.jit(tx.update)
    state = tx.init(grads)
    text = update.lower(grads, state).compile().as_text()
    assert text.count(" all-to-all(") == exchanges
    for operation in ("all-gather", "all-reduce", "collective-permute", "reduce-scatter"):
        assert f" {operation}(" not in text


def test_shapes_are_enough():
    axes = ("data", "fsdp", "tensor")
    mesh = AbstractMesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in MESH_SHAPES.items()}
    tx = soap(0.1, matrix_specs=SPECS, mesh=mesh, max_precondition_dim=LIMIT)
    state = jax.eval_shape(tx.init, params)
    known = jax.tree.map(lambda x, s: s is not None, state, soap_shardings(state, mesh, SPECS))
    inner = known.inner_states["matrix"].inner_state[0]
    assert all(jax.tree.leaves(inner._replace(count=True)))
    assert not any(jax.tree.leaves(known.inner_states["vector"]))
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.map(jnp.shape, (updates, after)) == jax.tree.map(jnp.shape, (params, state))
