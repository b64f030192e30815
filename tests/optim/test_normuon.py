"""NorMuon: Newton-Schulz with rows of even size, in NumPy and on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gpt2_matrices import make_mesh
from jax.sharding import NamedSharding, PartitionSpec
from refusals import refused

from maxmars.optim import (
    MatrixSpec,
    RowNormalizationState,
    mars,
    muon,
    newton_schulz,
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
SCALES = {"c_attn": np.array([1e-4, 1e4])[:, None, None, None, None], "mlp": 1, "square": 1}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s) * SCALES.get(k, 1) for k, s in SHAPES.items()}


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


def trained(steps, mesh=None, start=None, **options):
    """Parameters, state and program after the steps `steps`, from a pair or from the start."""
    tx = optimizer(mesh, **options)
    layout = mesh and {name: NamedSharding(mesh, PARTITION[name]) for name in SHAPES}
    put = (lambda tree: tree) if mesh is None else lambda tree: jax.device_put(tree, layout)
    params = put(draw(0) if start is None else start[0])
    state, update = tx.init(params), jax.jit(tx.update)
    state = state if start is None else start[1]
    for step in steps:
        updates, state = jax.block_until_ready(update(put(gradients(step)), state, params))
        params = optax.apply_updates(params, updates)
    return params, state, update.lower(params, state, params).compile()


def blocks(x):
    """The matrices of each leaf, [count, in, out]."""
    return {
        "c_attn": np.moveaxis(x["c_attn"], 2, 1).reshape(6, 8, 8),
        "mlp": x["mlp"],
        "square": x["square"][None],
    }


def test_it_is_the_papers_in_numpy(x64):
    params, state, _ = trained(range(STEPS), vector_learning_rate_scale=0.5)
    expected, mean, moment = blocks(draw(0)), {}, {}
    for step in range(STEPS):
        for name, grads in blocks(gradients(step)).items():
            mean[name] = MOMENTUM * mean.get(name, 0) + (1 - MOMENTUM) * grads
            m = MOMENTUM * mean[name] + (1 - MOMENTUM) * grads
            eps = 1e-7 * (1 - MOMENTUM)
            u = np.asarray(newton_schulz(jnp.asarray(m), eps=eps, dtype="float64"))
            square = np.mean(u**2, axis=1, keepdims=True)  # of each output
            moment[name] = B2 * moment.get(name, 0) + (1 - B2) * square
            even = u / (np.sqrt(moment[name]) + 1e-10)
            norms = [np.linalg.norm(x, axis=(1, 2), keepdims=True) for x in (u, even)]
            even = even * norms[0] / (norms[1] + 1e-10)
            scale = np.sqrt(max(1, u.shape[2] / u.shape[1]))
            p = expected[name]
            expected[name] = p - 0.02 * (even * scale + 0.1 * p)
    for name, matrices in blocks(params).items():
        np.testing.assert_allclose(matrices, expected[name], rtol=0, atol=1e-12, err_msg=name)
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
    expected, expected_state, _ = trained(range(6))
    params, state, program = trained(range(6), mesh)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12),
        (params, moments(state)),
        (expected, moments(expected_state)),
    )
    for name, v in moments(state).items():
        if name != "bias":
            whole = [
                None if n == 1 else axes for n, axes in zip(v.shape, PARTITION[name], strict=False)
            ]
            assert v.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*whole)), v.ndim)
    rows = sum(v.size for v in jax.tree.leaves(moments(state)))
    others = [c.bytes for c in collectives(program, mesh) if c.op != "all-to-all"]
    assert sum(others) <= 8 * (rows + 40)  # and some norms, in float64

    other = make_mesh((2, 4, 1))  # a resume
    half = trained(range(3), mesh)[:2]
    half = jax.tree.map(np.asarray, half)
    resumed = trained(range(3, 6), other, half)[0]
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12), resumed, expected
    )


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
