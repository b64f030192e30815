"""The environment of a run: versions, devices and mesh of a run."""

import pytest

from maxmars.checkpoint.environment import environment
from maxmars.config import MeshConfig
from maxmars.distributed.sharding import make_mesh

pytestmark = pytest.mark.smoke


def test_environment_says_versions_devices_and_mesh():
    found = environment(make_mesh(MeshConfig(fsdp=2, tensor=2)))
    assert found["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert found["num_devices"] == 8
    assert found["num_processes"] == 1
    assert found["platform"] == "cpu"
    for package in ("python", "maxmars", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"):
        assert found[package]
