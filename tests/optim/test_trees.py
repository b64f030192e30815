"""Trees of parameters: without specs, with too few of them, and those of other libraries."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from refusals import refused

from maxmars.optim import (
    MatrixSpec,
    clip_by_matrix_norm,
    describe,
    mars,
    mars_over,
    moonlight,
    muon,
    scale_by_mars,
    scale_by_orthogonalization,
    scale_by_soap,
    soap,
    sophia,
)

PARAMS = {
    "layers": {"kernel": jnp.ones((3, 4, 6)), "norm": jnp.ones((3, 4))},
    "query": jnp.ones((4, 2, 3)),
    "bias": jnp.ones(4),
}
SPECS = {
    "layers": {
        "kernel": MatrixSpec(batch=(0,), rows=(1,), cols=(2,)),
        "norm": MatrixSpec(batch=(0,), rows=(), cols=(1,)),
    },
    "query": MatrixSpec(rows=(0,), cols=(1, 2)),
    "bias": None,
}
MAKERS = {
    "mars": functools.partial(mars, 0.1),
    "shampoo": functools.partial(mars, 0.1, variant="shampoo"),
    "vectors": functools.partial(mars, 0.1, variant="m", optimize_vectors=True),
    "muon": functools.partial(muon, 0.1),
    "moonlight": functools.partial(moonlight, 0.1),
    "soap": functools.partial(soap, 0.1),
    "mars over": functools.partial(mars_over, optax.scale_by_adam()),
    "scale by mars": scale_by_mars,
    "scale by soap": scale_by_soap,
    "clip": clip_by_matrix_norm,
    "orthogonalization": scale_by_orthogonalization,
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
a_warning_is_an_error = pytest.mark.filterwarnings("error")


@every_maker
@a_warning_is_an_error
def test_parameters_of_many_axes_without_a_spec_are_told_once(make):
    tx = make()
    with pytest.warns(UserWarning, match="matrix_specs") as told:
        state = tx.init(PARAMS)
    assert len(told) == 1
    lines = str(told[0].message).splitlines()
    many = {"layers.kernel": PARAMS["layers"]["kernel"], "query": PARAMS["query"]}
    assert set(describe(many).splitlines()) <= set(lines)
    assert not any(line.startswith(("bias", "layers.norm")) for line in lines)
    jax.eval_shape(tx.update, PARAMS, state, PARAMS)


@every_maker
@a_warning_is_an_error
@pytest.mark.parametrize("specs", [SPECS, lambda params: SPECS, SPECS | {"layers": None}])
def test_with_specs_nothing_is_told(make, specs):
    jax.eval_shape(make(matrix_specs=specs).init, PARAMS)


@every_maker
@a_warning_is_an_error
def test_two_axes_need_no_spec(make):
    jax.eval_shape(make().init, {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)})


# --- incomplete trees -----------------------------------------------------------------------------

INCOMPLETE = {"layers": {"kernel": SPECS["layers"]["kernel"]}, "query": SPECS["query"]}
MISSING = "bias, layers.norm"


@every_maker
@pytest.mark.parametrize(
    ("specs", "named"),
    [
        (INCOMPLETE, MISSING),
        (lambda params: INCOMPLETE, MISSING),
        (SPECS | {"heads": None}, "heads"),
    ],
)
def test_incomplete_specs_are_named(make, specs, named):
    with refused(ValueError, "matrix_specs", named):
        make(matrix_specs=specs).init(PARAMS)


@pytest.mark.parametrize(
    "make",
    [mars, muon, soap, functools.partial(sophia, batch_tokens=1.0)],
    ids=["mars", "muon", "soap", "sophia"],
)
def test_an_incomplete_mask_is_named(make):
    mask = {"layers": {"kernel": True}, "query": True}
    options = {} if "sophia" in str(make) else {"matrix_specs": SPECS}
    for given in (mask, lambda params: mask):
        with refused(ValueError, "mask", MISSING):
            make(0.1, weight_decay=0.1, mask=given, **options).init(PARAMS)
    make(0.1, weight_decay=0.1, mask={"bias": False, **mask, "layers": True}, **options).init(
        PARAMS
    )


# --- prev_grads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        mars(0.1),
        mars(0.1, gamma=0.0),
        mars(0.1, variant="lion", clip_threshold=None, memory_efficient=True),
        muon(0.1),
        mars_over(optax.adam(0.1)),
        scale_by_mars(),
    ],
)
def test_prev_grads_without_exact_are_refused(tx):
    params = {"w": jnp.ones((2, 3))}
    with refused(ValueError, "prev_grads", "exact=True"):
        tx.update(params, tx.init(params), params, prev_grads=params)


def test_prev_grads_belong_to_the_outer_correction():
    """Exact MARS over an optimizer that corrects by itself, and so would refuse them."""
    params, grads = {"w": jnp.eye(2, 3)}, {"w": jnp.ones((2, 3))}
    tx = mars_over(muon(0.1), exact=True, first_step="plain_gradient")
    state = tx.update(grads, tx.init(params), params, prev_grads=grads)[1]
    same, other = (
        tx.update(grads, state, params, prev_grads=prev)[0]["w"] for prev in (grads, params)
    )
    assert not np.allclose(same, other)


# --- other libraries' trees -----------------------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "activation", "bias"],
    meta_fields=["name"],
)
@dataclasses.dataclass
class Module:
    """As Equinox has them: a tree whose leaves may be functions."""

    weight: object
    activation: object
    bias: object
    name: str = "module"


def filtered(module):
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, module)


@pytest.mark.parametrize(
    "make",
    [mars, muon, soap, functools.partial(mars_over, optax.adamw(0.1)), scale_by_mars, optax.adamw],
    ids=["mars", "muon", "soap", "mars over adamw", "scale by mars", "adamw"],
)
def test_update_takes_a_module_with_functions_where_there_is_no_gradient(make):
    tx = make() if make is scale_by_mars or isinstance(make, functools.partial) else make(0.1)
    module = Module(jnp.ones((2, 3)), jax.nn.relu, jnp.ones(2))
    grads, params = filtered(module), {"weight": module.weight, "bias": module.bias}
    state, plain = tx.init(filtered(module)), tx.init(params)
    for _ in range(2):  # SOAP's first step is none
        updates, state = tx.update(grads, state, module)
        expected, plain = tx.update(params, plain, params)
    assert updates.activation is None
    np.testing.assert_array_equal(updates.weight, expected["weight"])
    np.testing.assert_array_equal(updates.bias, expected["bias"])


def test_a_real_equinox_module():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
    tx = mars(1e-2, weight_decay=0.1)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    x = jnp.ones((3, 4))

    @eqx.filter_jit
    def step(model, state):
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        updates, state = tx.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for _ in range(20):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


# --- meshes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(mars, variant="shampoo"),
        *(pytest.param(make, marks=pytest.mark.slow) for make in (muon, soap)),
    ],
    ids=["shampoo", "muon", "soap"],
)
@pytest.mark.parametrize("in_context", [True, False])
def test_explicit_axes_say_the_mesh(make, in_context):
    """Those of `jax.make_mesh`, whatever their names are."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    rng = np.random.default_rng(0)
    local = {k: rng.standard_normal(s).astype("f") for k, s in {"w": (8, 16), "b": (16,)}.items()}
    placed = {
        "w": NamedSharding(mesh, PartitionSpec("data", "model")),
        "b": NamedSharding(mesh, PartitionSpec()),
    }

    def run(params):
        tx = make(0.1, eps=1e-2)
        state, update = tx.init(params), jax.jit(tx.update)
        for _ in range(2):  # SOAP's first step is none
            updates, state = jax.block_until_ready(update(params, state, params))
        return updates

    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        params = jax.device_put(local, placed)
        updates = run(params)
    assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)
    for name, expected in run(local).items():
        np.testing.assert_allclose(np.asarray(updates[name]), expected, rtol=2e-2, atol=1e-5)
