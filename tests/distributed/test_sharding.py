import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import MODEL, tiny_config

from maxmars.config import MeshConfig
from maxmars.distributed import sharding


def test_a_mesh_takes_the_devices_left_over():
    assert dict(sharding.make_mesh(MeshConfig()).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(sharding.make_mesh(MeshConfig(fsdp=4)).shape) == {"data": 2, "fsdp": 4, "tensor": 1}


def test_only_data_crosses_between_networks():
    networks = [0, 1, 0, 1, 0, 1, 0, 1]  # of devices that are numbered across two hosts
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), networks=networks)
    assert [[d.id % 2 for d in row.flat] for row in mesh.devices] == [[0] * 4, [1] * 4]
    of_mesh = [networks[device.id] for device in mesh.devices.flat]
    crossing = [axis for axis in mesh.axis_names if sharding.crosses(mesh, axis, of_mesh)]
    assert crossing == ["data"]
    wide = sharding.make_mesh(MeshConfig(fsdp=8), networks=networks)
    assert sharding.crosses(wide, "fsdp", sorted(networks))


def test_the_mesh_of_a_run_whose_config_sets_none():
    model = dataclasses.replace(MODEL, embed_dim=64)  # an eighth are 8 rows
    config = tiny_config(num_microbatches=1, model=model)
    shapes = {
        (0,) * 8: (1, 8, 1),
        (0, 0, 0, 0, 1, 1, 1, 1): (2, 4, 1),
        (0, 0, 0, 0, 0, 0, 1, 1): (4, 2, 1),  # blocks of two lie in one network
        None: (8, 1, 1),  # CPU devices
    }
    for networks, shape in shapes.items():
        mesh = sharding.training_mesh(config.mesh, config.model, networks=networks)
        assert tuple(mesh.shape.values()) == shape


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(fsdp=2, tensor=2), MeshConfig(tensor=8)])
def test_one_process_holds_all_rows_and_places_them_in_order(mesh):
    mesh = sharding.make_mesh(mesh)
    rows = sharding.local_rows(mesh, (3, 16))
    np.testing.assert_array_equal(rows, np.arange(48).reshape(3, 16))
    values = rows[:, :, None] * np.ones(5, int)
    placed = sharding.to_device(mesh, values.astype(np.int32), 16)
    np.testing.assert_array_equal(placed, values)
    assert placed.sharding.is_equivalent_to(sharding.batch_sharding(mesh), 3)
    assert sharding.batch_shards(mesh) == mesh.shape["data"] * mesh.shape["fsdp"]


def test_constrain_uses_the_ambient_mesh_and_needs_none():
    x = jnp.ones((4, 2))
    assert sharding.constrain(x, "batch", None) is x
    mesh = sharding.make_mesh(MeshConfig(fsdp=4, tensor=2))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: sharding.constrain(2 * x, "batch", "vocab"))(np.ones((8, 6), np.int8))
    expected = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))
    assert y.sharding.is_equivalent_to(expected, 2)


def test_optimizer_state_takes_the_shardings_of_its_parameters():
    mesh = sharding.make_mesh(MeshConfig(fsdp=8))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))

    def leaf(shape, place=None):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)

    params = {"a": {"w": leaf((16, 2), split)}, "b": {"w": leaf((8,), split)}}
    state = {
        "count": leaf(()),
        "mu": {"a": {"w": leaf((16, 2))}, "b": {"w": leaf((8,))}},
        "row": {"a": {"w": leaf((16,))}},  # another shape: not the parameter's
    }
    result = sharding.like_params(state, params)
    assert result["mu"]["a"]["w"] == result["mu"]["b"]["w"] == split
    assert result["count"] == result["row"]["a"]["w"] == sharding.replicated(mesh)


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_the_gradient_of_a_look_up_counts_tokens_beyond_bfloat16(axes):
    ids = np.zeros((8, 2048), np.int32)
    ids[:, :8] = np.arange(8)
    mesh = sharding.make_mesh(MeshConfig(**axes), jax.devices()[: math.prod(axes.values())])

    def total(table, ids):
        return sharding.look_up(sharding.copies(table), ids).sum()

    with jax.set_mesh(mesh):
        result = jax.jit(jax.grad(total))(jnp.ones((8, 4), jnp.bfloat16), ids)
    counts = np.bincount(ids.ravel(), minlength=8)[:, None]
    assert counts[0] > 16_000  # a sum in bfloat16 would stop at 256
    np.testing.assert_allclose(result.astype(np.float32), counts * np.ones(4), rtol=2**-8)
