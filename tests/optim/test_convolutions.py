"""Convolutions in groups: a matrix for each group, wherever it lies on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxmars.optim import (
    MatrixSpec,
    clip_by_matrix_norm,
    mars,
    soap,
)
from maxmars.optim.nnx import matrix_specs_of

SPEC = MatrixSpec(batch=(2,), rows=(0, 1), cols=(3,), unfold=((2, 3),))  # [3, 2, 4 groups x 3]


def matrices_of(kernel):
    """[groups, in, out], the slow way."""
    blocks = np.split(np.asarray(kernel), 4, axis=-1)
    return np.stack([block.reshape(-1, block.shape[-1]) for block in blocks])


def test_a_depthwise_kernel_is_a_vector():
    depthwise = nnx.Conv(6, 12, (3,), feature_group_count=6, rngs=nnx.Rngs(0))
    of_one_channel = nnx.Conv(1, 12, (3,), rngs=nnx.Rngs(0))
    for layer, is_matrix in ((depthwise, False), (of_one_channel, True)):
        specs = nnx.to_pure_dict(matrix_specs_of(layer))
        assert specs["kernel"].is_matrix == is_matrix
    tx = mars(0.1, variant="shampoo", matrix_specs=matrix_specs_of(depthwise))
    params = nnx.state(depthwise, nnx.Param)
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(np.abs(updates["kernel"][...]), 0.1, rtol=1e-4)  # AdamW's first


def kernels(steps=3):
    rng = np.random.default_rng(0)
    return [{"w": rng.standard_normal((3, 2, 12)).astype("f")} for _ in range(steps)]


def test_the_clip_is_of_each_group():
    (kernel,), clip = kernels(1), clip_by_matrix_norm(2.0, {"w": SPEC})
    kernel["w"][..., :3] *= 0.1
    clipped, state = jax.jit(clip.update)(kernel, clip.init(kernel))
    parts, ours = matrices_of(kernel["w"]), matrices_of(clipped["w"])
    norms = np.linalg.norm(parts, axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(ours, parts / np.maximum(1, norms / 2), rtol=1e-6)
    assert state.clip_fraction == 0.75


def updates_of(tx, trees, put=lambda x: x):
    params, *grads = (jax.tree.map(put, tree) for tree in trees)
    state, update = tx.init(params), jax.jit(tx.update)
    for g in grads:
        updates, state = jax.block_until_ready(update(g, state, params))
    return updates["w"], state


MAKERS = {
    "shampoo": lambda **options: mars(0.1, variant="shampoo", ns_dtype="float32", **options),
    "soap": lambda **options: soap(0.1, precondition_frequency=1, **options),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_kernel_of_groups_equals_separate_matrices(make):
    together, _ = updates_of(make(matrix_specs={"w": SPEC}), kernels())
    stacks = [{"w": matrices_of(tree["w"])} for tree in kernels()]
    stacked = MatrixSpec(batch=(0,), rows=(1,), cols=(2,))
    alone, _ = updates_of(make(matrix_specs={"w": stacked}), stacks)
    np.testing.assert_allclose(matrices_of(together), alone, atol=1e-5)


WHOLE = PartitionSpec(None, None, "fsdp")  # two groups on a device
CUT = PartitionSpec(None, "fsdp", "tensor")  # blocks on three devices, so that all travel


@pytest.mark.parametrize(
    ("name", "axis_type", "partition"),
    [
        ("shampoo", AxisType.Explicit, CUT),
        ("soap", AxisType.Auto, CUT),
        ("shampoo", AxisType.Auto, WHOLE),
    ],
)
def test_a_mesh_changes_nothing(name, axis_type, partition):
    make = MAKERS[name]
    devices = jax.devices()[:6]
    mesh = jax.make_mesh((2, 3), ("fsdp", "tensor"), axis_types=(axis_type,) * 2, devices=devices)
    sharding = NamedSharding(mesh, partition)
    spec = MatrixSpec(batch=(2,), rows=(0, 1), cols=(3,), unfold=((2, 3),), partition=partition)
    with jax.set_mesh(mesh):
        tx = make(matrix_specs={"w": spec}, mesh=mesh)
        ours, state = updates_of(tx, kernels(), lambda x: jax.device_put(x, sharding))
    expected, plain = updates_of(make(matrix_specs={"w": SPEC}), kernels())
    np.testing.assert_allclose(np.asarray(ours), expected, atol=1e-5)
    shapes, plain_shapes = (jax.tree.map(jnp.shape, s) for s in (state, plain))
    assert shapes == plain_shapes
