"""The flat attention kernel against the plain formula: alone, in GPT-2, and on meshes.

On a CPU Pallas's interpreter runs it. It fills what a block reads beyond an array with NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_chips import for_tpus
from attention_results import assert_close, random_segments, result_and_gradients
from jax.sharding import PartitionSpec
from tiny import random_params, tiny_config
from trees import mesh_of

from maxmars.config import GPT2Config, MeshConfig
from maxmars.model import gpt2
from maxmars.model.attention import causal_attention, flat_attention_on_mesh
from maxmars.model.flat_attention import flat_attention
from maxmars.model.language_model import make_model

# In float32 only the order of sums differs. In bfloat16 weights and slopes are rounded by 2^-9.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


def inputs(rows, length, heads, head_dim, dtype="float32"):
    rng = np.random.default_rng(0)
    shape = (rows, length, heads * head_dim)
    q, k, v = (rng.normal(size=shape).astype("f") for _ in range(3))
    return [x.astype(jnp.dtype(dtype)) for x in (q / 8, k, v)]


def plain(q, k, v, segment_ids, *, head_dim):
    heads = [x.reshape(*x.shape[:2], -1, head_dim) for x in (q, k, v)]
    return causal_attention(*heads, jnp.float32(1), segment_ids).reshape(q.shape)


@pytest.mark.parametrize(
    ("length", "heads", "head_dim", "dtype", "masked", "block"),
    [
        (128, 2, 64, "float32", False, 512),
        (200, 3, 64, "float32", True, 128),  # two blocks; half a tile is garbage
        (300, 1, 128, "bfloat16", True, 128),
    ],
)
def test_it_equals_the_plain_formula(length, heads, head_dim, dtype, masked, block):
    arrays = inputs(2, length, heads, head_dim, dtype)
    segment_ids = random_segments(2, length) if masked else None
    flat = functools.partial(
        flat_attention, head_dim=head_dim, residual_name="attention", block=block, interpret=True
    )
    result = result_and_gradients(flat, *arrays, segment_ids)
    assert {x.dtype for x in result} == {jnp.dtype(dtype)}
    wide = [x.astype("float32") for x in arrays]
    expected = result_and_gradients(functools.partial(plain, head_dim=head_dim), *wide, segment_ids)
    assert_close(result, expected, TOLERANCE[dtype])


def test_it_runs_on_each_devices_rows_and_heads():
    arrays, segment_ids = inputs(4, 128, 6, 64), random_segments(4, 128)  # one and a half tiles
    expected = result_and_gradients(functools.partial(plain, head_dim=64), *arrays, segment_ids)
    on_mesh = functools.partial(flat_attention_on_mesh, 64, interpret=True)
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tensor=2)):
        result = result_and_gradients(on_mesh, *arrays, segment_ids)
    assert_close(result, expected, TOLERANCE["float32"])


# --- GPT-2's module ------------------------------------------------------------------------------

MODEL = GPT2Config(
    num_layers=2,
    num_heads=3,
    embed_dim=192,
    max_seq_len=128,
    vocab_size=257,
    scale_attn_by_inverse_layer_idx=True,
    compute_dtype="float32",
)


def attention_of_a_layer(flat, x, params):
    """One attention layer, the third, whose heads are scaled by more than √K."""
    module = make_model(MODEL, params).module.h.attn
    layer = jax.tree.map(lambda leaf: leaf[0], module)
    scale_of = jnp.asarray(2, jnp.int32)
    if flat:
        attend = gpt2.FlatAttend(
            functools.partial(flat_attention_on_mesh, MODEL.head_dim, interpret=True)
        )
    else:
        attend = causal_attention
    return layer(x, scale_of, attend)


def test_a_layer_of_gpt2_is_the_same_by_either_form():
    """The scale goes into the queries' weights and biases in place of the queries."""
    rng = np.random.default_rng(0)
    params = random_params(MODEL)
    x = jnp.asarray(rng.normal(size=(2, 128, 192)), jnp.float32)

    def gradients(flat):
        def loss(x, params):
            y = attention_of_a_layer(flat, x, params)
            return (y * jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum(), y

        (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, params)
        return jax.tree.leaves((y, grads[0], grads[1]["h"]["attn"]))

    with jax.set_mesh(mesh_of()):
        result, expected = gradients(True), gradients(False)
    for a, b in zip(result, expected, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


# --- compiled for TPUs that are not there --------------------------------------------------------


@for_tpus
@pytest.mark.parametrize(
    ("name", "heads", "head_dim", "dtype"),
    [
        ("v5e:2x2", 25, 64, "bfloat16"),
        ("v5p:2x2x1", 12, 64, "bfloat16"),
        ("v6e:2x2", 16, 128, "bfloat16"),
        ("v5e:2x2", 3, 128, "float32"),
    ],
)
def test_it_compiles_for_tpus(name, heads, head_dim, dtype):
    from maxmars.plan import get_topology

    mesh = get_topology(name).mesh(tiny_config(mesh=MeshConfig(fsdp=4)))
    rows = jax.sharding.NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    shape = jax.ShapeDtypeStruct((8, 1024, heads * head_dim), dtype, sharding=rows)

    def gradients(q, k, v):
        def total(*arrays):
            return flat_attention_on_mesh(head_dim, *arrays).astype(jnp.float32).sum()

        return jax.grad(total, (0, 1, 2))(q, k, v)

    with jax.set_mesh(mesh):
        text = jax.jit(gradients).lower(shape, shape, shape).compile().as_text()
    assert "flat_attention_forward" in text
    assert "flat_attention_backward" in text
