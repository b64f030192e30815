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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": (0,)}, r"split=\(0,\) .* must name axes of rows or cols"),
        ({"split": (7,)}, "must name axes of rows or cols"),
        ({"split": (2, 2)}, "each once"),
        ({"split": (2, 3, 4)}, "keep at least one axis of each out of split"),
        ({"split": (1,)}, "leaves no rows or no cols"),
        ({"partition": PartitionSpec(*"abcdef")}, "has 6 entries for 5 axes"),
    ],
)
def test_bad_specs(options, message):
    with pytest.raises(ValueError, match=message):
        MatrixSpec(**C_ATTN, **options)


@pytest.mark.parametrize(
    ("axes", "unfold", "message"),
    [
        ({"rows": (0,), "cols": (1,)}, ((1, 4),), "with the next one among the 2"),
        ({"rows": (0,), "cols": (1, 2)}, ((1, 0),), "a positive size"),
        ({"rows": (0,), "cols": (1, 2, 3)}, ((2, 2), (1, 4)), "of rising axes"),
        ({"rows": (0,), "cols": (1, 2)}, ((1, 5),), "do not divide their axis .* shape .4, 12"),
    ],
)
def test_bad_unfolding(axes, unfold, message):
    with pytest.raises(ValueError, match=message):
        resolve_specs(MatrixSpec(**axes, unfold=unfold), np.ones((4, 12)))


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
