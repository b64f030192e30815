import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxmars.optim import MatrixSpec, resolve_specs

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


def test_hashable_and_comparable():
    spec = MatrixSpec(**C_ATTN, split=(2,), partition=PartitionSpec(None, "fsdp", None, "tensor"))
    again = MatrixSpec(**C_ATTN, split=(2,), partition=PartitionSpec(None, "fsdp", None, "tensor"))
    assert spec == again
    assert len({spec, again, MatrixSpec(**C_ATTN)}) == 2


def test_an_axis_may_be_unfolded_twice():
    spec = MatrixSpec(rows=(0,), cols=(1, 2, 3), split=(1, 2), unfold=((1, 8), (2, 2)))
    assert (spec.ndim, spec.view((4, 24))) == (2, (4, 3, 4, 2))


def test_resolving_keeps_split_and_partition():
    spec = MatrixSpec(rows=(0,), cols=(1, 2), split=(1,), partition=PartitionSpec("fsdp"))
    params = {"a": {"x": np.ones((2, 3, 4))}, "b": np.ones(3)}
    resolved = resolve_specs({"a": spec, "b": None}, params)
    assert resolved["a"]["x"] == spec
    assert not resolved["b"].is_matrix
    assert jax.tree.structure(resolved) == jax.tree.structure(params)
