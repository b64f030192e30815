import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxmars.optim import MatrixSpec, describe, resolve_specs

C_ATTN = {"batch": (0,), "rows": (1,), "cols": (2, 3, 4)}  # layers, embed, qkv, heads, head_dim


@pytest.mark.parametrize(
    ("split", "stack", "block_cols"),
    [((), (0,), (2, 3, 4)), ((2,), (0, 2), (3, 4)), ((2, 3), (0, 2, 3), (4,))],
)
def test_split_axes_stack_blocks(split, stack, block_cols):
    spec = MatrixSpec(**C_ATTN, split=split)
    assert spec.stack == stack
    assert spec.block_rows == (1,)
    assert spec.block_cols == block_cols
    assert spec.inner == (1, 2, 3, 4)  # what the clip sees


def test_resolving_keeps_split_and_partition():
    spec = MatrixSpec(rows=(0,), cols=(1, 2), split=(1,), partition=PartitionSpec("fsdp"))
    params = {"a": {"x": np.ones((2, 3, 4))}, "b": np.ones(3)}
    resolved = resolve_specs({"a": spec, "b": None}, params)
    assert resolved["a"]["x"] == spec
    assert not resolved["b"].is_matrix
    assert jax.tree.structure(resolved) == jax.tree.structure(params)


PARAMS = {
    "attn": {"kernel": jax.ShapeDtypeStruct((12, 768, 3, 12, 64), jnp.float32)},
    "gain": jnp.ones(768),
    "scale": jnp.ones([]),
    "wte": jax.ShapeDtypeStruct((50304, 768), jnp.float32),
}
SPECS = {
    "attn": MatrixSpec(batch=(0,), rows=(1,), cols=(2, 3, 4), split=(2,)),
    "gain": None,
    "scale": None,
    "wte": MatrixSpec(rows=(1,), cols=(0,), embedding=True),
}


def test_a_row_for_each_parameter():
    rule = {"attn": {"kernel": "soap"}, "gain": "adamw", "scale": "adamw", "wte": "adamw"}
    assert describe(PARAMS, SPECS, rule=rule, decay=jax.tree.map(lambda _: 0.1, rule)) == (
        "parameter    shape           kind       matrix           rule   decay\n"
        "attn.kernel  12x768x3x12x64  matrix     36 of 768 x 768  soap   0.1\n"
        "gain         768             vector                      adamw  0.1\n"
        "scale        1               vector                      adamw  0.1\n"
        "wte          50304x768       embedding  768 x 50304      adamw  0.1"
    )


def test_without_specs_every_parameter_of_two_axes_is_a_matrix():
    rows = [line.split() for line in describe(PARAMS).splitlines()]
    assert [row[2] for row in rows] == ["kind", "vector", "vector", "vector", "matrix"]
