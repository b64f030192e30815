"""The matrices of a GPT-2, their specs and meshes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from trees import random_tree

from maxmars.distributed.sharding import like_params, with_shardings
from maxmars.optim import (
    MatrixSpec,
    mars,
    orthogonalization_groups,
)

AXES = ("data", "fsdp", "tensor")
PARTITIONS = {
    "c_attn": PartitionSpec(None, "fsdp", None, "tensor"),  # layers, embed, qkv, heads, head_dim
    "attn_proj": PartitionSpec(None, "tensor", None, "fsdp"),  # layers, heads, head_dim, embed
    "c_fc": PartitionSpec(None, "fsdp", "tensor"),  # layers, embed, mlp
    "mlp_proj": PartitionSpec(None, "tensor", "fsdp"),  # layers, mlp, embed
}
SPLITS = {
    "fused": {},
    "qkv": {"c_attn": (2,)},
    "heads": {"c_attn": (2, 3), "attn_proj": (1,)},
}
XL = {"layers": 48, "embed": 1600, "heads": 25}
LARGE = {"layers": 36, "embed": 1280, "heads": 20}


def shapes(layers, embed, heads):
    return {
        "c_attn": (layers, embed, 3, heads, embed // heads),
        "attn_proj": (layers, heads, embed // heads, embed),
        "c_fc": (layers, embed, 4 * embed),
        "mlp_proj": (layers, 4 * embed, embed),
    }


def specs(split="fused", partitions=PARTITIONS):
    axes = {"c_attn": (1, 3), "attn_proj": (2, 1), "c_fc": (1, 1), "mlp_proj": (1, 1)}

    def spec(name):
        rows, cols = axes[name]
        return MatrixSpec(
            batch=(0,),
            rows=tuple(range(1, 1 + rows)),
            cols=tuple(range(1 + rows, 1 + rows + cols)),
            partition=partitions[name],
            split=SPLITS[split].get(name, ()),
        )

    return {name: spec(name) for name in axes}


def make_mesh(shape, axis_type=AxisType.Auto):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, AXES, axis_types=(axis_type,) * 3, devices=devices)


def shardings(mesh):
    return {name: NamedSharding(mesh, partition) for name, partition in PARTITIONS.items()}


def random_matrices(layers, embed=16, heads=4, dtype="float32"):
    return random_tree(layers, shapes(layers, embed, heads), dtype=dtype)


def compiled_update(mesh, size):
    """Plan and program of a MARS-Shampoo update of a real GPT-2; nothing is allocated."""
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings(mesh)[name])
        for name, shape in shapes(**size).items()
    }
    tx = mars(1e-3, variant="shampoo", matrix_specs=specs(), mesh=mesh)
    state = jax.eval_shape(tx.init, params)
    state = with_shardings(state, like_params(state, params))
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    update = jax.jit(tx.update, donate_argnums=(0, 1), out_shardings=out)
    groups = orthogonalization_groups(params, specs(), mesh=mesh)
    return groups, update.lower(params, state, params).compile()
