"""Products in the forms of CPUs: the same numbers, and none that XLA would convert."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL
from trees import mesh_of

from maxmars.model.language_model import make_model, mean_loss
from maxmars.model.parameters import init_params
from maxmars.model.products import cpu_linear, wide_product

ONE = mesh_of()


def normal(seed, shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def close(result, expected, dtype):
    result, expected = (np.asarray(x, np.float64) for x in (result, expected))
    error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
    assert error < {"float32": 1e-6, "bfloat16": 4e-3}[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("inputs", "outputs"), [((24,), (3, 2, 4)), ((3, 8), (16,)), ((5,), (7,))])
def test_a_linear_map_and_its_gradients(inputs, outputs, dtype):
    x, kernel = normal(0, (20, *inputs), dtype), normal(1, (*inputs, *outputs), dtype)
    slopes = normal(2, (20, *outputs), dtype)

    def products(function, *arrays):
        y, vjp = jax.vjp(function, *arrays)
        return y, *vjp(slopes.astype(y.dtype))

    with jax.set_mesh(ONE):
        ours = jax.jit(functools.partial(products, cpu_linear))(x, kernel)
    assert {y.dtype for y in ours} == {jnp.dtype(dtype)}
    plain = functools.partial(jnp.tensordot, axes=len(inputs))
    with jax.enable_x64(True):
        exact = products(plain, *(np.asarray(a, np.float64) for a in (x, kernel)))
    for y, expected in zip(ours, exact, strict=True):
        close(y, expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("transposed", ["", "a", "b"])
def test_a_wide_product(transposed, batch, dtype):
    a, b = normal(0, (*batch, 6, 4), dtype), normal(1, (*batch, 4, 5), dtype)
    given = a.mT if transposed == "a" else a, b.mT if transposed == "b" else b
    form = {"transpose_a": transposed == "a", "transpose_b": transposed == "b"}
    with jax.set_mesh(ONE):
        y = jax.jit(functools.partial(wide_product, **form))(*given)
    assert y.dtype == jnp.float32
    close(y, np.asarray(a, np.float64) @ np.asarray(b, np.float64), "float32")


def equations(jaxpr):
    """All equations of a traced program, those of its loops and functions included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for item in value if isinstance(value, list | tuple) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def test_a_step_in_bfloat16_has_only_products_that_cpus_have():
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    tokens = jax.ShapeDtypeStruct((4, model.max_seq_len + 1), jnp.int32)

    def loss(params, tokens):
        return mean_loss(make_model(model, params), tokens)

    with jax.set_mesh(ONE):
        params = jax.eval_shape(lambda: init_params(model, 0))
        program = jax.make_jaxpr(jax.grad(loss))(params, tokens)
    products = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) > 10
    for product in products:
        left, right, result = (v.aval for v in (*product.invars, *product.outvars))
        (contracted, _), _ = product.params["dimension_numbers"]
        assert (left.dtype, right.dtype, result.dtype) == ("bfloat16", "bfloat16", "float32")
        assert contracted == (*range(left.ndim - len(contracted), left.ndim),)
