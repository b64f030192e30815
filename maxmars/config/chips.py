"""The table of chips: what each has of arithmetic, memory and networks, by its data sheet.

Training measures MFU by it, `maxmars plan` estimates times, `maxmars launch` counts chips.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Network = Literal["ICI", "NVLink", "DCN", "host"]

GiB = 2**30
GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Chip:
    """One chip. Bandwidths are bytes a second that leave the chip, in one direction."""

    name: str
    device_kind: str
    """Regular expression that finds the chip's name in `jax.Device.device_kind`."""
    peak_flops: float
    """Dense bfloat16 FLOP/s."""
    memory_bytes: int
    """Capacity of its high-bandwidth memory."""
    memory_bandwidth: float
    """Bytes a second from and to its memory."""
    network: Network
    """The fast network: inside a slice of TPUs, or between the GPUs of one host."""
    network_bandwidth: float
    dcn_bandwidth: float
    """Between slices, or between hosts with GPUs: this chip's share of its host's interfaces."""
    topology_axes: int | None = None
    """Axes of the torus of a TPU slice; None for GPUs."""


# TPUs: Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e" give memory, FLOP/s,
# memory bandwidth and the sum of both directions of a chip's ICI links (v4 600, v5e 400, v5p 1200,
# v6e 800 GB/s), of which half counts here. DCN: v5e 6.4 and v6e 25.6 Tbit/s a pod of 256 chips, v5p
# 50 Gbit/s a chip; v4's is not published and taken to be v5p's.
# GPUs: NVIDIA's data sheets of the H100 SXM and H200 SXM (NVLink 900 GB/s, both directions); DCN is
# one 400 Gbit/s interface a GPU, as in DGX H100 and H200.
CHIPS = {
    # name, device kind, FLOP/s, memory and its bytes/s, network and its bytes/s, DCN, axes
    "v4": Chip("TPU v4", r"^TPU v4$", 275e12, 32 * GiB, 1228e9, "ICI", 300e9, 6.25e9, 3),
    "v5e": Chip("TPU v5e", r"^TPU v5( lite|e)$", 197e12, 16 * GiB, 819e9, "ICI", 200e9, 3.125e9, 2),
    "v5p": Chip("TPU v5p", r"^TPU v5p?$", 459e12, 95 * GiB, 2765e9, "ICI", 600e9, 6.25e9, 3),
    "v6e": Chip("TPU v6e", r"^TPU v6( lite|e)$", 918e12, 32 * GiB, 1640e9, "ICI", 400e9, 12.5e9, 2),
    "h100": Chip("H100 SXM", r"\bG?H100\b", 989e12, 80 * GiB, 3350e9, "NVLink", 450e9, 50e9),
    "h200": Chip("H200 SXM", r"\bG?H200\b", 989e12, 141 * 10**9, 4800e9, "NVLink", 450e9, 50e9),
}

# Other GPUs that MFU is known for; the first pattern found counts.
_OTHER_PEAK_FLOPS = {
    r"\bA100\b": 312e12,
    r"\bH100 PCIe\b": 756e12,
    r"\bH100 NVL\b": 835e12,
    r"\bB200\b": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device (`jax.Device.device_kind`); None where unknown, as of a
    CPU or of a part of a GPU (MIG)."""
    if re.search(r"\bMIG\b", device_kind):
        return None
    known = _OTHER_PEAK_FLOPS | {chip.device_kind: chip.peak_flops for chip in CHIPS.values()}
    return next((f for pattern, f in known.items() if re.search(pattern, device_kind)), None)
