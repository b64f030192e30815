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
    describe,
    mars,
    newton_schulz,
    orthogonalize,
    plan_orthogonalization,
    soap,
)
from maxmars.optim.nnx import matrix_specs_of

RNGS = nnx.Rngs(0)


class GroupedTranspose(nnx.ConvTranspose):
    """As Flax's would be with groups, which it lacks."""

    def __init__(self, inputs, outputs, groups, transpose_kernel):
        super().__init__(inputs, outputs, (3,), transpose_kernel=transpose_kernel, rngs=RNGS)
        a, b = (outputs, inputs) if transpose_kernel else (inputs, outputs)
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(0), (3, a // groups, b)))
        self.feature_group_count = groups


GROUPED = {
    "conv": nnx.Conv(8, 12, (3, 2), feature_group_count=4, rngs=RNGS),
    "transposed": GroupedTranspose(8, 12, 4, transpose_kernel=False),
    "transposed kernel": GroupedTranspose(12, 8, 4, transpose_kernel=True),
}


def matrices_of(kernel, transposed=False, groups=4):
    """[groups, in, out], the slow way."""
    blocks = np.split(np.asarray(kernel), groups, axis=-1)
    if transposed:
        blocks = [np.swapaxes(block, -1, -2) for block in blocks]
    return np.stack([block.reshape(-1, block.shape[-1]) for block in blocks])


def test_a_group_is_a_convolution_of_its_own():
    """As `lax` has it: so the matrices are those of the blocks of the kernel's last axis."""
    layer, x = GROUPED["conv"], jax.random.normal(jax.random.key(1), (2, 5, 5, 8))
    parts = zip(jnp.split(x, 4, axis=-1), jnp.split(layer.kernel[...], 4, axis=-1), strict=True)
    one = nnx.Conv(2, 3, (3, 2), use_bias=False, rngs=RNGS)
    expected = []
    for part, kernel in parts:
        one.kernel[...] = kernel
        expected.append(one(part))
    np.testing.assert_allclose(layer(x), jnp.concatenate(expected, -1), atol=1e-5)


@pytest.mark.parametrize("name", GROUPED)
def test_each_group_is_orthogonalised_by_itself(name):
    layer, transposed = GROUPED[name], name == "transposed kernel"
    kernel = {"kernel": layer.kernel[...]}
    spec = {"kernel": nnx.to_pure_dict(matrix_specs_of(layer))["kernel"]}
    plan = plan_orthogonalization(kernel, spec)
    ours = orthogonalize(kernel, plan, dtype=jnp.float32, scale="spectral")["kernel"]
    alone = jnp.asarray(matrices_of(kernel["kernel"], transposed))
    expected = newton_schulz(alone, dtype=jnp.float32)
    scale = np.sqrt(max(1, alone.shape[2] / alone.shape[1]))
    np.testing.assert_allclose(matrices_of(ours, transposed), scale * expected, atol=2e-6)


def test_a_stack_of_layers_has_its_groups_too():
    @nnx.vmap
    def stack(rngs):
        return nnx.Conv(8, 12, (3,), feature_group_count=4, rngs=rngs)

    specs = nnx.to_pure_dict(matrix_specs_of(stack(nnx.Rngs(0).split(5))))
    assert specs["kernel"] == MatrixSpec(batch=(0, 3), rows=(1, 2), cols=(4,), unfold=((3, 3),))
    kernel = {"kernel": jnp.ones((5, 3, 2, 12))}
    table = describe(kernel, {"kernel": specs["kernel"]})
    row = table.splitlines()[1].split(maxsplit=3)
    assert row == ["kernel", "5x3x2x12", "matrix", "20 of 6 x 3"]


def test_a_depthwise_kernel_is_a_vector():
    depthwise = nnx.Conv(6, 12, (3,), feature_group_count=6, rngs=RNGS)
    assert not nnx.to_pure_dict(matrix_specs_of(depthwise))["kernel"].is_matrix
    assert nnx.to_pure_dict(matrix_specs_of(nnx.Conv(1, 12, (3,), rngs=RNGS)))["kernel"].is_matrix
    tx = mars(0.1, variant="shampoo", matrix_specs=matrix_specs_of(depthwise))
    params = nnx.state(depthwise, nnx.Param)
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(np.abs(updates["kernel"][...]), 0.1, rtol=1e-4)  # AdamW's first


SPEC = MatrixSpec(batch=(2,), rows=(0, 1), cols=(3,), unfold=((2, 3),))  # [3, 2, 4 groups x 3]


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
BOTH = PartitionSpec(None, None, ("fsdp", "tensor"))
ON_MESH = [
    ("shampoo", AxisType.Auto, CUT),
    ("shampoo", AxisType.Explicit, CUT),
    ("soap", AxisType.Auto, CUT),
    ("shampoo", AxisType.Auto, WHOLE),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("soap", AxisType.Explicit, CUT),
            ("soap", AxisType.Auto, WHOLE),
            ("shampoo", AxisType.Auto, BOTH),
            ("shampoo", AxisType.Explicit, BOTH),
            ("soap", AxisType.Explicit, BOTH),
        ]
    ),
]


@pytest.mark.parametrize(("name", "axis_type", "partition"), ON_MESH)
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
