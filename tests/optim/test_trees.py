"""Trees of parameters: without specs, with too few of them, and those of other libraries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refused
from trees import assert_close

from maxmars.optim import (
    MatrixSpec,
    clip_by_matrix_norm,
    describe,
    mars,
    mars_over,
    muon,
    scale_by_mars,
    scale_by_orthogonalization,
    scale_by_soap,
    soap,
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
    "shampoo": functools.partial(mars, 0.1, variant="shampoo"),
    "vectors": functools.partial(mars, 0.1, variant="m", optimize_vectors=True),
    "soap": functools.partial(soap, 0.1),
    "mars over": functools.partial(mars_over, optax.scale_by_adam()),
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
def test_with_specs_or_with_two_axes_nothing_is_told(make):
    for specs in (SPECS, lambda params: SPECS, SPECS | {"layers": None}):
        jax.eval_shape(make(matrix_specs=specs).init, PARAMS)
    jax.eval_shape(make().init, {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)})


# --- incomplete trees -----------------------------------------------------------------------------

INCOMPLETE = {"layers": {"kernel": SPECS["layers"]["kernel"]}, "query": SPECS["query"]}
MISSING = "bias, layers.norm"


@every_maker
def test_incomplete_specs_are_named(make):
    for specs, named in [
        (INCOMPLETE, MISSING),
        (lambda params: INCOMPLETE, MISSING),
        (SPECS | {"heads": None}, "heads"),
    ]:
        with refused(ValueError, "matrix_specs", named):
            make(matrix_specs=specs).init(PARAMS)


@pytest.mark.parametrize("make", [mars, soap], ids=["mars", "soap"])
def test_an_incomplete_mask_is_named(make):
    make = functools.partial(make, 0.1, weight_decay=0.1, matrix_specs=SPECS)
    mask = {"layers": {"kernel": True}, "query": True}
    for given in (mask, lambda params: mask):
        with refused(ValueError, "mask", MISSING):
            make(mask=given).init(PARAMS)
    make(mask={"bias": False, **mask, "layers": True}).init(PARAMS)


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
    [mars, soap, functools.partial(mars_over, optax.adamw(0.1)), scale_by_mars],
    ids=["mars", "soap", "mars over adamw", "scale by mars"],
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


@pytest.mark.parametrize("make", [mars, muon, soap], ids=lambda make: make.__name__)
def test_functions_are_called_once_in_init_and_once_in_update_with_the_parameters(make):
    seen = {"mask": [], "specs": []}
    matrix = MatrixSpec(rows=(0,), cols=(1,))

    def mask(params):
        seen["mask"].append(params["norm"].dtype)
        return {"kernel": params["norm"].dtype == jnp.bfloat16, "norm": False}

    def specs(params):
        seen["specs"].append(params["norm"].dtype)
        return {"kernel": matrix if params["norm"].ndim == 1 else None, "norm": None}

    params = {"kernel": jnp.ones((4, 3), jnp.bfloat16), "norm": jnp.ones(4, jnp.bfloat16)}
    grads = {"kernel": 0.1 * jnp.ones((4, 3)), "norm": jnp.zeros(4)}
    given = {
        "mask": {"kernel": True, "norm": False},
        "matrix_specs": {"kernel": matrix, "norm": None},
    }
    functions = make(0.1, weight_decay=1.0, mask=mask, matrix_specs=specs)
    updates, _ = functions.update(grads, functions.init(params), params)
    assert seen == dict.fromkeys(seen, [jnp.dtype("bfloat16")] * 2)
    same = make(0.1, weight_decay=1.0, **given)
    expected, _ = same.update(grads, same.init(params), params)
    assert_close(updates, expected)
    assert not updates["norm"].any()


@pytest.mark.parametrize(
    "make", [scale_by_orthogonalization, clip_by_matrix_norm], ids=lambda make: make.__name__
)
def test_specs_of_a_transformation_alone_are_those_of_the_parameters(make):
    def specs(params):
        rows = (0,) if params["w"].dtype == jnp.float32 else ()
        return {"w": MatrixSpec(rows=rows, cols=(1,), batch=() if rows else (0,))}

    params, grads = {"w": jnp.eye(2, 3)}, {"w": jnp.full((2, 3), 5.0, jnp.bfloat16)}
    tx, same = make(matrix_specs=specs), make(matrix_specs=specs(params))
    updates, _ = tx.update(grads, tx.init(params), params)
    expected, _ = same.update(grads, same.init(params), params)
    np.testing.assert_array_equal(updates["w"], expected["w"])
