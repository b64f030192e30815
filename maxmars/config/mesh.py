"""Which mesh a run takes, and whether it fits the devices, the model and the batch; without JAX, as
a launch asks too.

A fast network joins the devices of one TPU slice, or the GPUs of one host by NVLink. Between these
lies a slower one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from maxmars.config import MeshConfig, ModelConfig, ModuleConfig, TrainConfig

Shape = Mapping[str, int]
"""Sizes of the axes `data`, `fsdp` and `tensor`."""


def choose_mesh(mesh: MeshConfig, model: ModelConfig, network_size: int) -> MeshConfig:
    """The mesh with `fsdp` chosen, if neither it nor `data` is set: the devices of a fast network.

    Of these it takes as many as divide GPT-2's `embed_dim` into parts that fill the tiles in which
    TPUs keep and multiply them; `data` gets the others.

    Args:
      mesh: of the config.
      model: whose parameters `fsdp` splits.
      network_size: devices that a fast network joins; 1 where there is nothing to gain, as on CPUs.
    """
    if mesh.data is not None or mesh.fsdp is not None:
        return mesh
    inside = network_size // mesh.tensor if network_size % mesh.tensor == 0 else 1
    fsdp = inside
    if not isinstance(model, ModuleConfig):
        common = math.gcd(inside, model.embed_dim)
        fits = (n for n in range(common, 1, -1) if common % n == 0 and _fills(model.embed_dim // n))
        fsdp = next(fits, 1)
    return dataclasses.replace(mesh, fsdp=fsdp)


def _fills(rows: int) -> bool:
    """Whether so many rows take little more than themselves in tiles of 8 rows: of XL's 1,600, a
    64th part, 25 rows, would take 32."""
    return -(-rows // 8) * 8 <= 1.05 * rows


def mesh_shape(config: MeshConfig, num_devices: int, num_slices: int = 1) -> dict[str, int]:
    """Sizes of the axes over so many devices.

    Raises:
      ValueError: the axis sizes do not multiply to the number of devices, or `data` is no multiple
        of the number of slices.
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
      ValueError: it does not; the message names the sizes that work.
    """
    check_mesh_divides_model(config.model, shape)
    shards, batch = shape["data"] * shape["fsdp"], config.global_batch_size
    counts = possible_microbatches(batch, shards)
    if config.num_microbatches is None and not counts:
        raise ValueError(
            f"global_batch_size={batch} does not divide over {shards} devices (mesh data x fsdp); "
            f"make it a multiple of {shards}."
        )
    if config.num_microbatches is not None and config.num_microbatches not in counts:
        fits = ", ".join(map(str, counts))
        way_out = f"num_microbatches may be {fits}, or None, which takes one of them"
        raise ValueError(
            f"a microbatch of {config.microbatch_size} sequences (global_batch_size={batch} / "
            f"num_microbatches={config.num_microbatches}) does not divide over {shards} devices "
            f"(mesh data x fsdp); {way_out if counts else f'make it a multiple of {shards}'}."
        )


def possible_microbatches(global_batch_size: int, shards: int) -> list[int]:
    """The numbers of microbatches that divide over so many devices, ascending; maybe none."""
    rows, rest = divmod(global_batch_size, shards)
    small = [] if rest else [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
    return sorted({*small, *(rows // n for n in small)})


def check_mesh_divides_model(model: ModelConfig, shape: Shape) -> None:
    """Check that the mesh divides the axes of GPT-2's parameters that are split over it; those of a
    module of the user's own are not known here (see `model.parameters.Parameters.shardings`).

    Raises:
      ValueError: it does not; the message names the sizes that work.
    """
    if isinstance(model, ModuleConfig):
        return
    for axis, name, size in (
        ("tensor", "model.num_heads", model.num_heads),
        ("fsdp", "model.embed_dim", model.embed_dim),
    ):
        if size % shape[axis]:
            largest = min(size, math.prod(shape.values()))
            fits = ", ".join(str(n) for n in range(1, largest + 1) if size % n == 0)
            raise ValueError(
                f"mesh.{axis}={shape[axis]} does not divide {name}={size}; mesh.{axis} may be "
                f"{fits}."
            )
    if model.padded_vocab_size % shape["tensor"]:
        raise ValueError(
            f"mesh.tensor={shape['tensor']} does not divide the vocabulary of "
            f"{model.padded_vocab_size}; set model.vocab_pad_multiple to a multiple of "
            f"{shape['tensor']}."
        )
