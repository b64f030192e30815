"""The mesh of a run: its axes over the devices, and checks that it fits the model and the batch.

A fast network joins the devices of one TPU slice, or the GPUs of one host by NVLink; only `data`
should cross the slower network between slices or hosts. Nothing here needs JAX, as `maxmars launch`
checks a mesh before it rents devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from maxmars.config import MeshConfig, ModelConfig, ModuleConfig, TrainConfig

Shape = Mapping[str, int]
"""Sizes of the axes `data`, `fsdp` and `tensor`."""


def choose_mesh(mesh: MeshConfig, model: ModelConfig, network_size: int) -> MeshConfig:
    """Choose `fsdp` where neither `fsdp` nor `data` is set: the devices of a fast network.

    For GPT-2 it is the largest number of these devices that divides `embed_dim` into parts that
    fill the tiles in which TPUs store and multiply arrays; `data` gets the other devices.
    `network_size` is the number of devices that a fast network joins; 1 where none is faster, as on
    CPUs.
    """
    if mesh.data is not None or mesh.fsdp is not None:
        return mesh  # the user has decided
    inside = network_size // mesh.tensor if network_size % mesh.tensor == 0 else 1
    fsdp = inside
    if not isinstance(model, ModuleConfig):
        common = math.gcd(inside, model.embed_dim)
        sizes = (
            n
            for n in range(common, 1, -1)
            if common % n == 0 and _fills_tiles(model.embed_dim // n)
        )
        fsdp = next(sizes, 1)
    return dataclasses.replace(mesh, fsdp=fsdp)


def _fills_tiles(rows: int) -> bool:
    """Whether tiles of 8 rows store this number of rows with at most 5 % padding. A 64th part of
    XL's 1,600 rows does not: its 25 rows take 32."""
    return -(-rows // 8) * 8 <= 1.05 * rows


def mesh_shape(config: MeshConfig, num_devices: int, num_slices: int = 1) -> dict[str, int]:
    """Sizes of the axes over `num_devices` devices in `num_slices` TPU slices.

    Raises:
      ValueError: the product of the sizes is not the number of devices, or `data` is no multiple of
        the number of slices; the message names sizes that work.
    """
    fsdp = config.fsdp or 1
    rest = fsdp * config.tensor
    data = config.data if config.data is not None else num_devices // rest
    if data * rest != num_devices:
        sizes = ", ".join(str(n) for n in range(1, num_devices + 1) if num_devices % n == 0)
        wanted = f"a multiple of {rest}" if config.data is None else str(data * rest)
        raise ValueError(
            f"the mesh data={config.data or '(rest)'} fsdp={fsdp} tensor={config.tensor} "
            f"needs {wanted} devices, but there are {num_devices}. Each of mesh.data, mesh.fsdp "
            f"and mesh.tensor must be one of {sizes}, and their product must be {num_devices}."
        )
    if data % num_slices:
        raise ValueError(
            f"mesh.data={data} must be a multiple of the {num_slices} slices that the "
            f"{num_devices} devices lie in: only `data` may cross the network between slices. With "
            f"mesh.data={num_slices}, mesh.fsdp x mesh.tensor is {num_devices // num_slices}."
        )
    return {"data": data, "fsdp": fsdp, "tensor": config.tensor}


def check_mesh(config: TrainConfig, shape: Shape) -> None:
    """Check that the mesh divides the model and the batch.

    Raises:
      ValueError: the mesh does not; the message names sizes that work.
    """
    check_mesh_divides_model(config.model, shape)
    # `fsdp` splits the batch as well as the parameters.
    shards, batch = shape["data"] * shape["fsdp"], config.global_batch_size
    counts = possible_microbatches(batch, shards)
    if config.num_microbatches is None and not counts:
        raise ValueError(
            f"global_batch_size={batch} does not divide over {shards} devices (mesh data x fsdp); "
            f"make it a multiple of {shards}."
        )
    if config.num_microbatches is not None and config.num_microbatches not in counts:
        allowed = ", ".join(map(str, counts))
        way_out = f"num_microbatches may be {allowed}, or None, which takes one of them"
        raise ValueError(
            f"a microbatch of {config.microbatch_size} sequences (global_batch_size={batch} / "
            f"num_microbatches={config.num_microbatches}) does not divide over {shards} devices "
            f"(mesh data x fsdp); {way_out if counts else f'make it a multiple of {shards}'}."
        )


def possible_microbatches(global_batch_size: int, shards: int) -> list[int]:
    """Numbers of microbatches, ascending, whose sequences divide evenly over `shards` devices;
    empty if even the whole batch does not."""
    rows, rest = divmod(global_batch_size, shards)  # sequences of a device in the whole batch
    small = [] if rest else [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
    return sorted({*small, *(rows // n for n in small)})  # divisors come in pairs


def check_mesh_divides_model(model: ModelConfig, shape: Shape) -> None:
    """Check that the mesh divides the axes of GPT-2's parameters that are split over it. The axes
    of a user's own module are unknown here; `model.parameters.Parameters.shardings` checks them.

    Raises:
      ValueError: the mesh does not; the message names sizes that work.
    """
    if isinstance(model, ModuleConfig):
        return
    for axis, name, size in (
        ("tensor", "model.num_heads", model.num_heads),
        ("fsdp", "model.embed_dim", model.embed_dim),
    ):
        if size % shape[axis]:
            largest = min(size, math.prod(shape.values()))  # no axis has more than all devices
            allowed = ", ".join(str(n) for n in range(1, largest + 1) if size % n == 0)
            raise ValueError(
                f"mesh.{axis}={shape[axis]} does not divide {name}={size}; mesh.{axis} may be "
                f"{allowed}."
            )
    if model.padded_vocab_size % shape["tensor"]:
        raise ValueError(
            f"mesh.tensor={shape['tensor']} does not divide the vocabulary of "
            f"{model.padded_vocab_size}; set model.vocab_pad_multiple to a multiple of "
            f"{shape['tensor']}."
        )
