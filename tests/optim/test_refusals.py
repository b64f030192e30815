"""What the optimizers and their parts refuse, and what each refusal names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from optax.contrib import MuonDimensionNumbers
from refusals import refused

from maxmars.optim import (
    GradientRequest,
    MatrixSpec,
    WeightUpdate,
    describe,
    kernel_preset,
    mars,
    mars_over,
    momentum_kernel,
    muon,
    newton_schulz,
    orthogonalize,
    scale_by_orthogonalization,
    soap,
)

PARAMS = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
STACK = MatrixSpec(batch=(0,), rows=(1,), cols=(2,))
C_ATTN = functools.partial(MatrixSpec, batch=(0,), rows=(1,), cols=(2, 3, 4))
EMA = momentum_kernel((0.9,), (1.0,))
mars_m = functools.partial(mars, 0.1, variant="m")
both_rates = {"vector_learning_rate": 0.1, "vector_learning_rate_scale": 0.2}


def update(tx, **extra):
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS, **extra)


def masked(tx):
    return optax.masked(tx, lambda params: jax.tree.map(lambda x: x.ndim > 1, params))


def on_a_mesh(*partition, shape=(8, 8), **options):
    """`orthogonalize` of one matrix, on a mesh of three axes."""
    spec = MatrixSpec(rows=(0,), cols=(1,), partition=PartitionSpec(*partition))
    mesh = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"))
    tree = {"w": np.ones(shape, "f")}
    return orthogonalize(tree, {"w": spec}, mesh=mesh, **options)


def soap_on_mesh(**options):
    mesh = AbstractMesh((1, 2, 1), ("data", "fsdp", "tensor"))
    return soap(0.1, mesh=mesh, **options).init({"w": np.ones((2, 2), "f")})


REFUSED = [
    # numbers and names
    (lambda: mars(0.1, b1=1.0), "b1=1.0"),
    (lambda: mars(0.1, b1=1.0, matrix_specs=lambda params: None), "b1=1.0"),
    (lambda: mars(0.1, b2=-0.1), "b2=-0.1"),
    (lambda: mars(0.1, vector_b1=2.0), "vector_b1=2.0"),
    (lambda: mars(0.1, clip_threshold=0.0), "clip_threshold=0.0"),
    (lambda: mars(0.1, memory_efficient=True), "memory_efficient=True", "'adamw'"),
    (lambda: mars_m(memory_efficient=True), "memory_efficient=True", "clip_threshold=1.0"),
    (lambda: mars_m(amsgrad=True), "amsgrad=True", "'m'"),
    (lambda: mars_m(ns_steps=0), "ns_steps=0"),
    (lambda: mars_m(ns_steps=6, ns_coefficients="cans"), "steps=6", "5 triples", "'cans'"),
    (lambda: mars_m(ns_coefficients="quick"), "'quick'"),
    (lambda: mars_m(ns_scale="big"), "ns_scale='big'"),
    (lambda: mars_m(ns_dtype="float16"), "ns_dtype=float16"),
    (lambda: mars_m(ns_dtype="int8"), "ns_dtype=int8"),
    (lambda: mars_m(ns_dtype="float64"), "ns_dtype=float64", "JAX_ENABLE_X64=1"),
    (lambda: muon(0.1, momentum=0.0), "momentum=0.0"),
    (lambda: muon(0.1, momentum=1.5), "momentum=1.5"),
    (lambda: soap(0.1, b1=1.0), "b1=1.0"),
    (lambda: soap(0.1, b2=-0.1), "b2=-0.1"),
    (lambda: soap(0.1, shampoo_beta=1.0), "shampoo_beta=1.0"),
    (lambda: soap(0.1, vector_b2=1.0), "vector_b2=1.0"),
    (lambda: soap(0.1, eps=0.0), "eps=0.0"),
    (lambda: soap(0.1, precondition_frequency=0), "precondition_frequency=0"),
    (lambda: soap(0.1, max_precondition_dim=0), "max_precondition_dim=0"),
    (lambda: GradientRequest(name="other", at="previous"), "at='previous'", "'prev_params'"),
    (lambda: GradientRequest(name="other", targets="drawn"), "targets='drawn'", "'sampled'"),
    (lambda: newton_schulz(PARAMS["w"], coefficients=(1.0, 2.0)), "(1.0, 2.0)"),
    (lambda: newton_schulz(PARAMS["w"], eps=0.0), "eps=0.0"),
    (lambda: newton_schulz(PARAMS["w"], dtype=jnp.float64), "ns_dtype=float64"),
    (lambda: orthogonalize({"w": np.ones((3, 4), "f")}, scale="spectrum"), "scale='spectrum'"),
    (lambda: orthogonalize(PARAMS, row_normalization=0.95), "row_normalization=0.95"),
    (lambda: mars(0.1, row_normalization=0.95), "row_normalization=0.95", "adamw"),
    (lambda: scale_by_orthogonalization(row_normalization=1.0), "row_normalization=1.0"),
    (lambda: scale_by_orthogonalization(row_normalization=-0.5), "row_normalization=-0.5"),
    (lambda: WeightUpdate(hyperball=True, floor=0.35), "hyperball", "floor"),
    (lambda: WeightUpdate(floor=-1.0), "floor", "-1.0"),
    (lambda: WeightUpdate(kinds=("norms",)), "norms", "vector"),
    # momentum kernels
    (lambda: momentum_kernel((0.0,), (1.0,)), "decays=0.0"),
    (lambda: momentum_kernel((0.9, 1.0), (0.5, 0.5)), "decays=1.0"),
    (lambda: momentum_kernel((0.9, 0.99), (1.0,)), "weights=(1.0,)", "(0.9, 0.99)"),
    (lambda: momentum_kernel((0.9,), (1.0,), debias=(True, False)), "decays=(0.9,)"),
    (lambda: momentum_kernel((), ()), "decays=()"),
    (lambda: kernel_preset("three_ema"), "'three_ema'", "'two_ema'"),
    (lambda: kernel_preset("ademamix"), "end_step"),
    (
        lambda: mars_m(clip_threshold=None, memory_efficient=True, momentum_kernel=EMA),
        "momentum_kernel",
    ),
    # rates of vectors
    (lambda: mars(0.1, **both_rates), *both_rates),
    (lambda: soap(0.1, **both_rates), *both_rates),
    (lambda: mars(lambda n: 0.1, vector_learning_rate=0.01), "vector_learning_rate=0.01"),
    (lambda: soap(lambda n: 0.1, vector_learning_rate=0.01), "vector_learning_rate=0.01"),
    # specs
    (lambda: MatrixSpec(batch=(0,), rows=(0,), cols=(1,)), "from 0 to 2"),
    (lambda: MatrixSpec(rows=(0,), cols=()), "cols=()"),
    (lambda: MatrixSpec(rows=(0,), cols=(1, 2), padding=1), "padding=1 of"),
    (lambda: C_ATTN(split=(0,)), "split=(0,) of"),
    (lambda: C_ATTN(split=(7,)), "split=(7,) of"),
    (lambda: C_ATTN(split=(2, 2)), "split=(2, 2) of"),
    (lambda: C_ATTN(split=(2, 3, 4)), "split=(2, 3, 4) of"),
    (lambda: C_ATTN(split=(1,)), "split=(1,) of"),
    (lambda: C_ATTN(partition=PartitionSpec(*"abcdef")), "6 entries", "5 axes"),
    (lambda: mars(0.1, matrix_specs=STACK).init(PARAMS["w"]), "3 axes", "(2, 2)"),
    (lambda: soap(0.1, matrix_specs=STACK).init(PARAMS["w"]), "3 axes", "(2, 2)"),
    (lambda: mars(0.1, matrix_specs={"w": True, "b": None}).init(PARAMS), "True", "(2, 2)"),
    (lambda: describe(PARAMS, {"w": MuonDimensionNumbers(0, 2), "b": None}), "(2,)", "3 axes"),
    (lambda: describe(PARAMS, rule={"w": "soap"}), "['w']"),
    # parameters and gradients
    (lambda: mars(0.1).init({"w": {"x": 1j * PARAMS["w"]}}), "w.x", "split_real_and_imaginary"),
    (lambda: update(mars(0.1, exact=True)), "prev_grads="),
    *(
        (lambda tx=tx: update(tx, prev_grads=PARAMS), "prev_grads", "exact=True")
        for tx in (mars(0.1), mars(0.1, gamma=0.0), muon(0.1), mars_over(optax.adam(0.1)))
    ),
    (
        lambda: update(masked(mars(0.1, exact=True)), prev_grads=PARAMS),
        "mask_compatible_extra_args",
    ),
    # meshes
    (lambda: on_a_mesh("model"), "w names 'model'", "data, fsdp, tensor"),
    (lambda: on_a_mesh("model", "expert"), "'model', 'expert'"),
    (lambda: on_a_mesh(ownership_axes=("x", "y")), "'x', 'y'"),
    (lambda: on_a_mesh("fsdp", shape=(6, 8)), "w of shape (6, 8)", "(4, 1)"),
    (lambda: on_a_mesh(max_batch_bytes=0), "max_batch_bytes=0"),
    (lambda: soap_on_mesh(), "w is a matrix", "partition"),
    (
        lambda: soap_on_mesh(
            matrix_specs={"w": MatrixSpec(rows=(0,), cols=(1,), partition=PartitionSpec("expert"))}
        ),
        "'expert'",
    ),
]
# optax.inject_hyperparams traces numbers, and takes a mesh for a schedule.
INJECTED = [(muon, "mesh"), (soap, "mesh"), (soap, "max_precondition_dim")]


@pytest.mark.parametrize(("cause", "named"), [(cause, named) for cause, *named in REFUSED])
def test_refusals(own_checks_only, cause, named):
    with refused(ValueError, *named):
        cause()


@pytest.mark.parametrize(("make", "name"), INJECTED)
def test_what_cannot_be_injected(own_checks_only, make, name):
    value = jax.make_mesh((1,), ("data",)) if name == "mesh" else 5
    tx = optax.inject_hyperparams(make)(0.1, **{name: value})
    with refused(ValueError, f"static_args=('{name}',)"):
        tx.init(PARAMS)
