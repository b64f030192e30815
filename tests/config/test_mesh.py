"""The mesh and the numbers of microbatches that a config and so many devices allow."""

import dataclasses

import pytest
from refusals import refused
from tiny import tiny_config

from maxmars.config import GPT2Config, MeshConfig
from maxmars.config.mesh import check_mesh, choose_mesh, mesh_shape, possible_microbatches


@pytest.mark.parametrize(
    ("mesh", "model", "network_size", "expected"),
    [
        ({}, GPT2Config.small(), 8, {"fsdp": 8}),
        ({}, GPT2Config.small(), 1, {"fsdp": 1}),
        ({"tensor": 2}, GPT2Config.small(), 8, {"fsdp": 4, "tensor": 2}),
        ({"tensor": 16}, GPT2Config.small(), 8, {"fsdp": 1, "tensor": 16}),
        ({}, GPT2Config.xl(), 256, {"fsdp": 16}),  # 1,600 / 16 = 100 rows; 1,600 / 64 = 25
        ({}, GPT2Config.small(), 64, {"fsdp": 32}),  # 24 rows, where 64 leave 12
        ({}, GPT2Config(embed_dim=12, num_heads=2), 8, {"fsdp": 1}),  # no part has 8 rows
        ({"fsdp": 16}, GPT2Config.small(), 8, {"fsdp": 16}),
        ({"data": 16}, GPT2Config.small(), 8, {"data": 16}),
    ],
)
def test_an_unset_mesh_stays_within_a_fast_network(mesh, model, network_size, expected):
    chosen = choose_mesh(MeshConfig(**mesh), model, network_size)
    assert chosen == MeshConfig(**expected)


def test_data_crosses_between_networks():
    chosen = choose_mesh(MeshConfig(), GPT2Config.small(), 8)
    assert mesh_shape(chosen, 32) == {"data": 4, "fsdp": 8, "tensor": 1}


def test_microbatches_that_divide():
    assert possible_microbatches(480, 16) == [1, 2, 3, 5, 6, 10, 15, 30]
    assert possible_microbatches(480, 32) == [1, 3, 5, 15]
    assert possible_microbatches(480, 64) == []


def test_a_batch_that_does_not_divide_is_refused():
    shape = {"data": 2, "fsdp": 8, "tensor": 1}
    config = tiny_config(global_batch_size=480, num_microbatches=None)
    check_mesh(config, shape)
    with refused(ValueError, "1, 2, 3, 5, 6, 10, 15, 30"):
        check_mesh(dataclasses.replace(config, num_microbatches=12), shape)
    with refused(ValueError, "global_batch_size=480", "64 devices"):
        check_mesh(config, {"data": 8, "fsdp": 8, "tensor": 1})
