"""NorMuon: Newton-Schulz with rows of even size, in NumPy and on meshes."""

import jax
import numpy as np
import pytest
import reference
from gpt2_matrices import make_mesh
from jax.sharding import NamedSharding, PartitionSpec
from refusals import refused
from trees import assert_close, compiled_update, put, random_tree, take_steps

from maxmars.optim import (
    MatrixSpec,
    RowNormalizationState,
    mars,
    muon,
    scale_by_orthogonalization,
)
from maxmars.plan.collectives import collectives

MOMENTUM, B2, STEPS = 0.95, 0.95, 50
PARTITION = {
    "c_attn": PartitionSpec(None, "fsdp", None, "tensor"),
    "mlp": PartitionSpec(None, ("tensor", "fsdp")),
    "square": PartitionSpec("fsdp", "tensor"),
    "bias": PartitionSpec(),
}
SPECS = {
    "c_attn": MatrixSpec(
        batch=(0,), rows=(1,), cols=(2, 3, 4), split=(2,), partition=PARTITION["c_attn"]
    ),
    "mlp": MatrixSpec(batch=(0,), rows=(1,), cols=(2,), partition=PARTITION["mlp"]),
    "square": MatrixSpec(rows=(0,), cols=(1,), partition=PARTITION["square"]),
    "bias": MatrixSpec(rows=(), cols=(0,)),
}
SHAPES = {"c_attn": (2, 8, 3, 2, 4), "mlp": (3, 16, 6), "square": (8, 8), "bias": (8,)}
SCALES = {"c_attn": np.array([1e-4, 1e4])[:, None, None, None, None]}


def draw(seed):
    arrays = random_tree(seed, SHAPES, dtype="float64")
    return arrays | {name: arrays[name] * scale for name, scale in SCALES.items()}


def gradients(step):
    """Zeros first; an output row that never has a gradient, and one coordinate without."""
    grads = draw(1 + step)
    grads["mlp"][:, :, 2] = 0
    grads["square"][3, 5] = 0
    return jax.tree.map(lambda g: g * (step > 0), grads)


def optimizer(mesh=None, make=muon, **options):
    return make(
        0.02,
        matrix_specs=SPECS,
        mesh=mesh,
        weight_decay=0.1,
        ns_dtype="float64",
        row_normalization=B2,
        **options,
    )


def trained(steps, mesh=None, start=(None, None), **options):
    """Parameters and state after the steps `steps`, from a pair or from the start."""
    params, state = start
    params = put(draw(0) if params is None else params, mesh, PARTITION)
    grads = [put(gradients(step), mesh, PARTITION) for step in steps]
    after = take_steps(optimizer(mesh, **options), params, grads, state=state)
    return after.params[-1], after.state


def blocks(x):
    """The matrices of each leaf, [count, in, out]."""
    return {
        "c_attn": np.moveaxis(x["c_attn"], 2, 1).reshape(6, 8, 8),
        "mlp": x["mlp"],
        "square": x["square"][None],
    }


def test_it_is_the_papers_in_numpy(x64):
    params, state = trained(range(STEPS), vector_learning_rate_scale=0.5)
    grads = [blocks(gradients(step)) for step in range(STEPS)]
    for name, matrices in blocks(draw(0)).items():
        for i, matrix in enumerate(matrices):
            directions = reference.normuon([g[name][i] for g in grads], MOMENTUM, B2)
            *_, expected = reference.descend(matrix, directions, 0.02, 0.1)
            found = blocks(params)[name][i]
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12, err_msg=name)
    np.testing.assert_array_equal(
        np.delete(moments(state)["mlp"], 2, axis=2) > 0, np.ones((3, 1, 5))
    )
    assert not moments(state)["mlp"][:, :, 2].any()


def moments(state):
    """The state of NorMuon, wherever in a chain it stands."""
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, RowNormalizationState))
    (own,) = [x for x in found if isinstance(x, RowNormalizationState)]
    return own.row_moment


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2), (1, 4, 2)])
def test_a_mesh_changes_nothing_and_moves_one_number_a_row(x64, shape):
    mesh = make_mesh(shape)
    expected, expected_state = trained(range(6))
    params, state = trained(range(6), mesh)
    assert_close(params, expected, rtol=1e-11, atol=1e-12)
    assert_close(moments(state), moments(expected_state), rtol=1e-11, atol=1e-12)
    for name, v in moments(state).items():
        if name != "bias":
            whole = [
                None if n == 1 else axes for n, axes in zip(v.shape, PARTITION[name], strict=False)
            ]
            assert v.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*whole)), v.ndim)
    rows = sum(v.size for v in jax.tree.leaves(moments(state)))
    program = compiled_update(optimizer(mesh), params, state)
    others = [c.bytes for c in collectives(program, mesh) if c.op != "all-to-all"]
    assert sum(others) <= 8 * (rows + 40)  # and some norms, in float64

    other = make_mesh((2, 4, 1))  # a resume
    half = jax.tree.map(np.asarray, trained(range(3), mesh))
    resumed, _ = trained(range(3, 6), other, half)
    assert_close(resumed, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("variant", ["m", "shampoo"])
def test_mars_takes_it_too(x64, variant):
    """After the first update every row is of the same size, and the matrix of the size without."""
    options = {"variant": variant, "matrix_specs": SPECS, "ns_dtype": "float64"}
    updates = []
    for row_normalization in (None, B2):
        tx = mars(0.02, row_normalization=row_normalization, **options)
        updates.append(jax.jit(tx.update)(gradients(1), tx.init(draw(0)), draw(0))[0])
    for plain, even in zip(*map(blocks, updates), strict=True):
        without, u = blocks(updates[0])[plain], blocks(updates[1])[even]
        norms = [np.linalg.norm(x, axis=(1, 2)) for x in (without, u)]
        np.testing.assert_allclose(norms[1], norms[0], rtol=1e-9)
        rows = np.linalg.norm(u, axis=1)
        np.testing.assert_allclose(
            rows[rows > 0],
            np.broadcast_to(rows.max(1, keepdims=True), rows.shape)[rows > 0],
            rtol=1e-6,
        )


def test_what_it_cannot_do_is_refused():
    with refused(ValueError, "row_normalization", "adamw"):
        mars(0.1, row_normalization=0.95)
    for wrong in (1.0, -0.5):
        with refused(ValueError, "row_normalization", wrong):
            scale_by_orthogonalization(row_normalization=wrong)
