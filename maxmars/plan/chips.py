"""What one chip of each kind has: memory, arithmetic and networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Network = Literal["ICI", "NVLink", "DCN", "host"]

GiB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip. Bandwidths are bytes a second out of the chip, in one direction."""

    name: str
    memory_bytes: int
    """Capacity of its high-bandwidth memory."""
    peak_flops: float
    """Dense bfloat16 FLOP/s."""
    memory_bandwidth: float
    """Bytes a second from and to its memory."""
    network: Network
    """The fast network, of a slice of TPUs or of the GPUs of one host."""
    network_bandwidth: float
    dcn_bandwidth: float
    """Between slices, or between hosts with GPUs: this chip's share of its host's interfaces."""


# TPUs: Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e" give memory, FLOP/s,
# memory bandwidth and the sum of both directions of a chip's ICI links (v4 600, v5e 400, v5p 1200,
# v6e 800 GB/s), of which half counts here. DCN: v5e 6.4 and v6e 25.6 Tbit/s a pod of 256 chips, v5p
# 50 Gbit/s a chip; v4's is not published and taken to be v5p's.
# GPUs: NVIDIA's data sheets of the H100 SXM and H200 SXM (NVLink 900 GB/s, both directions); DCN is
# one 400 Gbit/s interface a GPU, as in DGX H100 and H200.
CHIPS = {
    "v4": Chip(
        name="TPU v4",
        memory_bytes=32 * GiB,
        peak_flops=275e12,
        memory_bandwidth=1228e9,
        network="ICI",
        network_bandwidth=300e9,
        dcn_bandwidth=6.25e9,
    ),
    "v5e": Chip(
        name="TPU v5e",
        memory_bytes=16 * GiB,
        peak_flops=197e12,
        memory_bandwidth=819e9,
        network="ICI",
        network_bandwidth=200e9,
        dcn_bandwidth=3.125e9,
    ),
    "v5p": Chip(
        name="TPU v5p",
        memory_bytes=95 * GiB,
        peak_flops=459e12,
        memory_bandwidth=2765e9,
        network="ICI",
        network_bandwidth=600e9,
        dcn_bandwidth=6.25e9,
    ),
    "v6e": Chip(
        name="TPU v6e",
        memory_bytes=32 * GiB,
        peak_flops=918e12,
        memory_bandwidth=1640e9,
        network="ICI",
        network_bandwidth=400e9,
        dcn_bandwidth=12.5e9,
    ),
    "h100": Chip(
        name="H100 SXM",
        memory_bytes=80 * GiB,
        peak_flops=989e12,
        memory_bandwidth=3350e9,
        network="NVLink",
        network_bandwidth=450e9,
        dcn_bandwidth=50e9,
    ),
    "h200": Chip(
        name="H200 SXM",
        memory_bytes=141 * 10**9,
        peak_flops=989e12,
        memory_bandwidth=4800e9,
        network="NVLink",
        network_bandwidth=450e9,
        dcn_bandwidth=50e9,
    ),
}
