"""The table of chips: FLOP/s, memory and networks of each by its data sheet, and shapes of slices.

By it training measures MFU, `maxmars plan` estimates times, and `maxmars launch` counts hosts. A
row has the figures of one JAX device: of half a chip for a TPU7x, which has two. The name
`v5p:4x4x8` counts chips; Google's `v5p-256` is the same slice by its cores.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass
from typing import Literal

from maxmars.config.checks import UsageError

Network = Literal["ICI", "NVLink", "DCN", "host"]

GiB = 2**30
GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Chip:
    """One chip, or one of its cores where JAX shows each as a device. Bandwidths of networks are in
    bytes a second that leave the device, in one direction."""

    name: str
    device_kind: str
    """Regular expression that finds the chip's name in `jax.Device.device_kind`."""
    peak_flops: float
    """Dense bfloat16 FLOP/s."""
    memory_bytes: int
    """Capacity of the high-bandwidth memory."""
    memory_bandwidth: float
    """Bytes a second between chip and memory."""
    network: Network
    """The fast network: inside a slice of TPUs, or between the GPUs of one host."""
    network_bandwidth: float
    dcn_bandwidth: float
    """Bandwidth between slices, or between hosts with GPUs: the chip's share of its host's."""
    topology_axes: int | None = None
    """Axes of the torus of a TPU slice; None for GPUs."""
    most_chips: int | None = None
    """Most chips in one slice; None for GPUs."""
    devices: int = 1
    """JAX devices of one chip; the figures above are those of one device."""

    @property
    def is_tpu(self) -> bool:
        return self.topology_axes is not None

    @property
    def clock_hz(self) -> float | None:
        """Cycles a second of a TPU; None where unknown, and for a GPU."""
        return _CLOCKS_HZ.get(self.name)

    def bandwidth(self, network: Network) -> float:
        """Bytes a second that leave the chip over a network, in one direction."""
        return self.dcn_bandwidth if network == "DCN" else self.network_bandwidth


# TPUs: Google Cloud's pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)" give
# memory, FLOP/s, memory bandwidth and the sum of both directions of a chip's ICI links (v4 600, v5e
# 400, v5p 1200, v6e 800, tpu7x 1200 GB/s), of which half counts here. DCN: v5e 6.4 and v6e 25.6
# Tbit/s a pod of 256 chips, v5p 50 and tpu7x 100 Gbit/s a chip; v4's is not published and taken to
# be v5p's.
# GPUs: NVIDIA's data sheets of the A100, H100 and H200 SXM and of the HGX B200 (NVLink 600, 900,
# 900 and 1800 GB/s, both directions). DCN is one interface a GPU: of 400 Gbit/s, as in DGX H100,
# H200 and B200, or 200, as in DGX A100; h100-mega is Google's A3 Mega, with 1,600 Gbit/s for eight.
# Other hosts may have less: Google's A2 machines 100 Gbit/s for eight GPUs, A3 High 800.
CHIPS = {
    # name, device kind, FLOP/s, memory and its bytes/s, network and its bytes/s, DCN, axes, chips
    "v4": Chip("TPU v4", r"^TPU v4$", 275e12, 32 * GiB, 1228e9, "ICI", 300e9, 6.25e9, 3, 4096),
    "v5e": Chip(
        "TPU v5e", r"^TPU v5( lite|e)$", 197e12, 16 * GiB, 819e9, "ICI", 200e9, 3.125e9, 2, 256
    ),
    "v5p": Chip("TPU v5p", r"^TPU v5p?$", 459e12, 95 * GiB, 2765e9, "ICI", 600e9, 6.25e9, 3, 6144),
    "v6e": Chip(
        "TPU v6e", r"^TPU v6( lite|e)$", 918e12, 32 * GiB, 1640e9, "ICI", 400e9, 12.5e9, 2, 256
    ),
    "tpu7x": Chip(
        "TPU7x core", r"^TPU7x$", 1153.5e12, 96 * GiB, 3690e9, "ICI", 300e9, 6.25e9, 3, 9216, 2
    ),
    "a100": Chip("A100 SXM 40GB", r"\bA100\b", 312e12, 40 * GiB, 1555e9, "NVLink", 300e9, 25e9),
    "a100-80gb": Chip("A100 SXM", r"\bA100\b", 312e12, 80 * GiB, 2039e9, "NVLink", 300e9, 25e9),
    "h100": Chip("H100 SXM", r"\bG?H100\b", 989e12, 80 * GiB, 3350e9, "NVLink", 450e9, 50e9),
    "h100-mega": Chip("H100 SXM", r"\bG?H100\b", 989e12, 80 * GiB, 3350e9, "NVLink", 450e9, 25e9),
    "h200": Chip("H200 SXM", r"\bG?H200\b", 989e12, 141 * 10**9, 4800e9, "NVLink", 450e9, 50e9),
    "b200": Chip("B200 SXM", r"\bB200\b", 2250e12, 180 * 10**9, 8000e9, "NVLink", 900e9, 50e9),
}

# The published FLOP/s divided by 2 FLOPs a cycle for each multiplier of the matrix units: v5e has
# four units of 128 x 128, v5p eight, v6e four of 256 x 256.
_CLOCKS_HZ = {"TPU v5e": 1.5e9, "TPU v5p": 1.75e9, "TPU v6e": 1.75e9}

# Google's types of TPU VMs: the chip, and by how much the number in a name such as v5p-128 counts
# it: by its two cores for v4 and v5p. GKE alone has tpu7x.
TPU_TYPES = {"v6e": ("v6e", 1), "v5p": ("v5p", 2), "v5litepod": ("v5e", 1), "v4": ("v4", 2)}

# Peak FLOP/s of GPUs that have no row above; these patterns come before those of the rows, as
# "H100 PCIe" matches the one of "H100", too.
_OTHER_PEAK_FLOPS = {r"\bH100 PCIe\b": 756e12, r"\bH100 NVL\b": 835e12}


@dataclass(frozen=True)
class Shape:
    """Chips of one kind: a TPU slice, or GPUs."""

    kind: str
    """Key of `CHIPS`."""
    sizes: tuple[int, ...]
    """Chips along each axis of a slice; for GPUs their number alone."""

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def num_chips(self) -> int:
        return math.prod(self.sizes)

    @property
    def num_devices(self) -> int:
        """Number of JAX devices."""
        return self.num_chips * self.chip.devices

    @property
    def name(self) -> str:
        """The text that `parse_shape` reads as this shape: v5p:4x4x8, h100:16."""
        return f"{self.kind}:{'x'.join(map(str, self.sizes))}"

    @property
    def tpu_type(self) -> str | None:
        """Google's type of TPU VMs with this slice, such as v5p-128; None if there is none."""
        for kind, (chip, cores) in TPU_TYPES.items():
            if chip == self.kind and self == _slice_of_type(kind, self.num_chips * cores):
                return f"{kind}-{self.num_chips * cores}"
        return None

    @property
    def chips_per_host(self) -> int:
        if not self.chip.is_tpu:
            return min(self.num_chips, GPUS_PER_HOST)
        is_one_host = self.chip.topology_axes == 2 and self.num_chips <= 8  # of v5e or v6e
        return self.num_chips if is_one_host else 4

    @property
    def num_hosts(self) -> int:
        return self.num_chips // self.chips_per_host

    @property
    def network_size(self) -> int:
        """Number of JAX devices that one fast network joins: a slice, or a host with GPUs."""
        return self.num_devices if self.chip.is_tpu else self.chips_per_host

    def check_slices(self, num_slices: int) -> None:
        """Check that Google Cloud can join `num_slices` slices of this shape to train as one.

        Raises:
          UsageError: Google Cloud cannot; the message says why.
        """
        if num_slices < 1:
            raise UsageError(f"--num-slices {num_slices} must be at least 1.")
        if num_slices > 1 and not self.chip.is_tpu:
            raise UsageError(
                f"--num-slices {num_slices} needs devices that come in slices, which {self.kind} "
                "devices do not; leave it out, and name the number of all GPUs, such as h100:16."
            )
        if num_slices > 1 and self.num_hosts == 1:
            raise UsageError(
                f"--num-slices {num_slices}: Google Cloud joins only slices of several hosts, and "
                f"{self.num_chips} chips of {self.kind} are one host; take larger slices."
            )


@functools.cache
def slice_sizes(kind: str) -> list[tuple[int, ...]]:
    """Slices of a kind of TPU, as chips along each axis.

    By Google Cloud's page on each TPU: with two axes the listed slices; with three axes parts of a
    cube of 4x4x4 chips, or whole cubes, with the axes in ascending order.
    """
    chip = CHIPS[kind]
    assert chip.most_chips is not None
    if chip.topology_axes == 2:
        return [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
    small = [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
    cubes = itertools.combinations_with_replacement(range(4, 257, 4), 3)
    return [*small, *(sizes for sizes in cubes if math.prod(sizes) <= chip.most_chips)]


def _slice_of_type(kind: str, size: int) -> Shape | None:
    """The slice of a type of TPU VMs: the one of this size that is nearest to a cube, or None."""
    chip, cores = TPU_TYPES[kind]
    shapes = [sizes for sizes in slice_sizes(chip) if math.prod(sizes) * cores == size]
    return Shape(chip, min(shapes, key=max)) if shapes else None


def _parse_type(text: str, option: str) -> Shape:
    """Parse a type of TPU VMs such as v5p-128."""
    kind, _, size = text.partition("-")
    tpu_slice = _slice_of_type(kind, int(size))
    if tpu_slice is None:
        chip, cores = TPU_TYPES[kind]
        sizes = {math.prod(sizes) * cores for sizes in slice_sizes(chip)}
        raise _no_slice(text, option, {f"{kind}-{n}": n / int(size) for n in sorted(sizes)})
    return tpu_slice


def _no_slice(text: str, option: str, ratios: dict[str, float]) -> UsageError:
    """The error for a slice that does not exist; `ratios` compares those that do with its size."""
    nearest = sorted(ratios, key=lambda name: abs(math.log(ratios[name])))[:3]
    return UsageError(
        f"{option} {text}: there is no such slice; the nearest are {', '.join(nearest)}."
    )


def parse_shape(text: str, option: str = "--topology") -> Shape:
    """Parse `v5p:4x4x8` (chips along each axis of a TPU slice), `v5p-256` (the same slice, as
    Google's type of TPU VMs) or `h100:16` (GPUs).

    Args:
      text: the name of a shape.
      option: the option that has it, for errors.

    Raises:
      UsageError: there is no such kind or no such shape; the message names the nearest.
    """
    if re.fullmatch(rf"({'|'.join(TPU_TYPES)})-[1-9]\d*", text):
        return _parse_type(text, option)
    kind, _, size = text.partition(":")
    sizes = tuple(map(int, size.split("x"))) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size) else ()
    if not sizes or kind not in CHIPS or (not CHIPS[kind].is_tpu and len(sizes) > 1):
        tpus = ", ".join(name for name, chip in CHIPS.items() if chip.is_tpu)
        gpus = ", ".join(name for name, chip in CHIPS.items() if not chip.is_tpu)
        raise UsageError(
            f"{option} {text} is unknown; write a TPU slice as v5e:4x4 or v5p:2x2x4 (of {tpus}) or "
            "as Google's type v5p-128 (64 chips: the number counts cores for v4 and v5p, chips for "
            f"{' and '.join(kind for kind, (_, cores) in TPU_TYPES.items() if cores == 1)}), GPUs "
            f"as h100:8 or h200:16 (of {gpus}), and fake devices of `maxmars plan` as cpu:8."
        )
    if not CHIPS[kind].is_tpu:
        if sizes[0] > GPUS_PER_HOST and sizes[0] % GPUS_PER_HOST:
            raise UsageError(
                f"{option} {text} must have up to {GPUS_PER_HOST} GPUs, or a multiple of "
                f"{GPUS_PER_HOST}: there are {GPUS_PER_HOST} in a host."
            )
    elif sizes not in (known := slice_sizes(kind)):
        shapes = [Shape(kind, known_sizes) for known_sizes in known]
        raise _no_slice(text, option, {s.name: s.num_chips / math.prod(sizes) for s in shapes})
    return Shape(kind, sizes)


def chip_name(device_kind: str) -> str | None:
    """The key in `CHIPS` of a device (`jax.Device.device_kind`); None for an unknown one."""
    return next((key for key, c in CHIPS.items() if re.search(c.device_kind, device_kind)), None)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device (`jax.Device.device_kind`); None where unknown, such as for
    a CPU or a part of a GPU (MIG)."""
    if re.search(r"\bMIG\b", device_kind):
        return None
    known = _OTHER_PEAK_FLOPS | {chip.device_kind: chip.peak_flops for chip in CHIPS.values()}
    return next((f for pattern, f in known.items() if re.search(pattern, device_kind)), None)
