"""Devices that need not be there: TPU slices, GPU hosts, fake CPU devices.

XLA compiles ahead of time for descriptions of devices. libtpu describes its slices itself; for GPUs
the description is written here, from the table of chips and each architecture's limits; fake CPU
devices are those of this process. `Topology.network` gives the network that a collective uses.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from maxmars.config import TrainConfig
from maxmars.config.checks import UsageError
from maxmars.config.chips import Chip, Network, Shape, parse_shape
from maxmars.config.errors import pip_install
from maxmars.distributed import sharding
from maxmars.plan.collectives import Collective

# XLA's GPU compiler needs the limits of the device, which NVIDIA gives by compute capability.
_GPU_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {capability} minor: 0 }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {block_memory}
  shared_memory_per_core: {core_memory}
  l2_cache_size: {l2_bytes}
  clock_rate_ghz: {ghz}
  memory_bandwidth: {memory_bandwidth:.0f}
  device_memory_size: {memory_bytes}
}}
platform_name: "CUDA"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {name}"
"""
_AMPERE = {"capability": 8, "cores": 108, "fpus": 64, "ghz": 1.41, "l2_bytes": 41943040}
_AMPERE |= {"core_memory": 167936, "block_memory": 166912}
_HOPPER = {"capability": 9, "cores": 132, "fpus": 128, "ghz": 1.98, "l2_bytes": 52428800}
_HOPPER |= {"core_memory": 233472, "block_memory": 232448}
_BLACKWELL = _HOPPER | {"capability": 10, "cores": 148, "ghz": 1.965, "l2_bytes": 132644864}
_LIMITS = {"a100": _AMPERE, "a100-80gb": _AMPERE, "b200": _BLACKWELL}  # others: Hopper


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Chips to compile for, and the networks that join them."""

    name: str
    """The kind and shape, such as `v5e:4x4`."""
    devices: Sequence[jax.Device]
    num_slices: int
    chip: Chip | None
    """None for fake CPU devices, whose memory and speed are not modelled."""

    def networks(self, devices: Sequence[jax.Device]) -> list[int]:
        """Number of the fast network of each device."""
        if self.chip is not None and not self.chip.is_tpu:
            # JAX numbers the hosts of absent GPUs as processes, and knows no fast networks of them.
            return [device.process_index for device in devices]
        return sharding.fast_networks(devices)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a chip that JAX gives to programs (on GPUs three quarters, its default); None
        for fake devices."""
        if self.chip is None:
            return None
        return int(self.chip.memory_bytes * (1 if self.chip.is_tpu else 0.75))

    def mesh(self, config: TrainConfig) -> Mesh:
        """The mesh that `train` takes on these devices."""
        return sharding.training_mesh(
            config.mesh, config.model, self.devices, self.networks(self.devices)
        )

    def network(self, collective: Collective, mesh: Mesh) -> Network:
        """The slowest network that a collective of a program for `mesh` uses."""
        if self.chip is None:
            return "host"
        if collective.between_slices:
            return "DCN"
        if not self.chip.is_tpu:
            networks = self.networks(list(mesh.devices.flat))
            for axis in mesh.axis_names:
                may_use = collective.axes is None or axis in collective.axes
                if may_use and sharding.crosses(mesh, axis, networks):
                    return "DCN"
        return self.chip.network


def get_topology(name: str, num_slices: int = 1) -> Topology:
    """Make the devices that `name` describes.

    Args:
      name: `v5p:4x4x8` or `v6e:8x16` (chips along the axes of a TPU slice), `v5p-256` (the first of
        these as Google names it), `h100:8` or `b200:16` (GPUs, eight to a host) or `cpu:8` (fake
        devices); `config.chips` has the kinds.
      num_slices: number of TPU slices of this shape, joined by the data center's network.

    Raises:
      ValueError: there is no such topology, or it cannot have slices.
      ImportError: its compiler is not installed; the message names the extra.
    """
    kind, _, size = name.partition(":")
    if kind == "cpu":
        if not re.fullmatch(r"[1-9]\d*", size):
            raise UsageError(f"--topology {name} must be cpu:N, N fake devices.")
        if num_slices != 1:
            raise UsageError(f"--num-slices {num_slices} needs a TPU topology such as v5e:4x4.")
        devices = _cpu_devices(int(size))
        return Topology(name=name, devices=devices, num_slices=1, chip=None)
    shape = parse_shape(name)
    name = shape.name
    shape.check_slices(num_slices)
    if not shape.chip.is_tpu:
        devices = _gpu_devices(name, shape)
    else:
        devices = _tpu_devices(name, shape, num_slices)
        assert len(devices) == num_slices * shape.num_devices
    return Topology(name=name, devices=devices, num_slices=num_slices, chip=shape.chip)


def _cpu_devices(count: int) -> list[jax.Device]:
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"--topology cpu:{count} needs {count} fake CPU devices, but this process has "
            f"{len(devices)}; set XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        )
    return devices[:count]


def _tpu_devices(name: str, shape: Shape, num_slices: int) -> Sequence[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f"--topology {name} needs the TPU compiler, libtpu: {pip_install('tpu')}."
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # this host need not have a TPU
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # else libtpu guesses, and logs it
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several plans at once
    options: dict[str, Any] = {"num_slices": num_slices} if num_slices > 1 else {}
    if shape.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if shape.kind == "v4":
        options["chip_config_name"] = "megacore"  # one device a chip, as where TPU v4 trains
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"--topology {name} is no slice that libtpu knows: {str(error).splitlines()[0]}"
        ) from error
    return topology.devices


def _gpu_devices(name: str, gpus: Shape) -> Sequence[jax.Device]:
    # The outer package comes first: without it, find_spec of the inner one raises.
    names = ("jax_plugins", "jax_plugins.xla_cuda13")
    if not all(importlib.util.find_spec(package) for package in names):
        raise ImportError(
            f"--topology {name} needs XLA's GPU compiler: {pip_install('cuda')} (of it, the wheels "
            "jax-cuda13-pjrt, jax-cuda13-plugin and nvidia-cudnn-cu13 suffice)."
        )
    shape = f"1x{gpus.num_hosts}x{gpus.chips_per_host}"
    target = _GPU_TARGET.format(**vars(gpus.chip), **_LIMITS.get(gpus.kind, _HOPPER))
    return topologies.get_topology_desc(
        platform="cuda", topology_name=shape, topology=shape, target_config=target
    ).devices
