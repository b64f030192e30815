"""TPU slices and GPU nodes: their names at Google, hosts, and chips a host.

Sources: Google's pages "TPU software versions" and "Plan TPUs in GKE", and GKE's on GPUs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_RUNTIMES = {
    "v6e": "v2-alpha-tpuv6e",
    "v5p": "v2-alpha-tpuv5",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v4": "tpu-ubuntu2204-base",
}
_TPUS = {  # GKE's label, dimensions of a topology
    "v6e": ("tpu-v6e-slice", 2),
    "v5p": ("tpu-v5p-slice", 3),
    "v5e": ("tpu-v5-lite-podslice", 2),
    "v4": ("tpu-v4-podslice", 3),
}
_GPUS = {
    "a100": "nvidia-tesla-a100",
    "a100-80gb": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
    "h100-mega": "nvidia-h100-mega-80gb",
    "h200": "nvidia-h200-141gb",
    "b200": "nvidia-b200",
}
_GPUS_A_NODE = 8


def runtime_version(accelerator: str) -> str:
    """The software of the TPU VMs of an accelerator type such as v5p-128.

    Raises:
      ValueError: no such type.
    """
    match = re.fullmatch(r"(\w+)-(\d+)", accelerator)
    if match is None or match[1] not in _RUNTIMES or int(match[2]) < 1:
        kinds = ", ".join(f"{kind}-N" for kind in _RUNTIMES)
        raise ValueError(
            f"--accelerator={accelerator!r} must be one of {kinds}, such as v5p-128 (64 chips: N "
            "counts cores for v4 and v5p, chips for the others)."
        )
    return _RUNTIMES[match[1]]


def num_chips(accelerator: str) -> int:
    """Chips of an accelerator type such as v5p-128, which counts the cores of v4 and v5p.

    Raises:
      ValueError: no such type, or half a chip.
    """
    runtime_version(accelerator)
    kind, _, size = accelerator.partition("-")
    cores = 2 if kind in ("v4", "v5p") else 1
    if int(size) % cores:
        raise ValueError(f"--accelerator={accelerator!r}: a chip of {kind} has {cores} cores.")
    return int(size) // cores


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """What a JobSet asks of each slice or group of nodes."""

    labels: dict[str, str]
    """Node labels to select by."""
    resource: str
    """`google.com/tpu` or `nvidia.com/gpu`."""
    hosts: int
    """Nodes of a slice, and so processes."""
    chips_a_host: int

    @property
    def has_tpu(self) -> bool:
        """Whether the chips are TPUs."""
        return self.resource == "google.com/tpu"


def parse_topology(topology: str) -> Nodes:
    """Nodes of `v5p:4x4x4` (chips along each axis of a TPU slice) or `h100:16` (number of GPUs).

    Raises:
      ValueError: no such kind, or no such shape.
    """
    kind, _, shape = topology.partition(":")
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"\d+(x\d+)*", shape) else []
    chips = math.prod(sizes)
    if kind in _TPUS and chips:
        label, dimensions = _TPUS[kind]
        if len(sizes) == dimensions:
            a_host = chips if dimensions == 2 and chips <= 8 else 4
            if chips % a_host == 0:
                labels = {
                    "cloud.google.com/gke-tpu-accelerator": label,
                    "cloud.google.com/gke-tpu-topology": shape,
                }
                return Nodes(
                    labels=labels,
                    resource="google.com/tpu",
                    hosts=chips // a_host,
                    chips_a_host=a_host,
                )
    if kind in _GPUS and len(sizes) == 1 and chips:
        a_host = min(chips, _GPUS_A_NODE)
        if chips % a_host == 0:
            return Nodes(
                labels={"cloud.google.com/gke-accelerator": _GPUS[kind]},
                resource="nvidia.com/gpu",
                hosts=chips // a_host,
                chips_a_host=a_host,
            )
    raise ValueError(
        f"--topology={topology!r} must be a TPU slice such as v5p:4x4x4, v4:2x2x4, v5e:4x4 or "
        f"v6e:8x8, or a number of GPUs in whole nodes of {_GPUS_A_NODE}, such as h100:16 "
        f"({', '.join(_GPUS)})."
    )
