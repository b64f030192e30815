"""Which devices exchange data, and which axes of a mesh that is.

Devices are numbered in the order of `mesh.devices.flat`, whatever their ids. Compilers write groups
in three ways: `{{0,1},{2,3}}`; `[2,2]<=[4]`; or by axes of a mesh that they describe,
`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`, where 'b':(2)2 is the part of size 2
of axis b that comes after a part of size 2.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh

Groups = frozenset[frozenset[int]]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def explicit_groups(text: str) -> list[list[int]]:
    """Groups, or the pairs of a permute, written out as `{{0,1},{2,3}}`."""
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _iota(text: str) -> np.ndarray:
    """Device numbers as `[4,2]T(1,0)` orders them: counted, reshaped, transposed."""
    dims, _, order = text.partition("T")
    devices = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return devices.transpose(_numbers(order)) if order else devices


def _groups_over(devices: np.ndarray, axes: Sequence[int]) -> list[list[int]]:
    """Groups of the devices of a grid that differ in these axes only."""
    kept = [i for i in range(devices.ndim) if i not in axes]
    size = math.prod(devices.shape[i] for i in axes)
    return devices.transpose(*kept, *axes).reshape(-1, size).tolist()


@functools.lru_cache(maxsize=4096)
def replica_groups(text: str, num_devices: int) -> Groups:
    """Groups of devices in any notation; an empty list stands for one group of all.

    Raises:
      ValueError: the notation is unknown.
    """
    if text.startswith("{"):
        groups = explicit_groups(text) or [range(num_devices)]
    elif text.startswith("["):
        dims, _, order = text.partition("<=")
        groups = _iota(order).reshape(_numbers(dims)).tolist()
    elif match := re.match(r"mesh\[(.*?)\](?:, device_ids=|\s*)(\(.*\))? ?\{(.*)\}$", text):
        groups = _mesh_groups(*match.groups())
    else:
        raise ValueError(f"unknown notation of replica groups: {text}")
    return frozenset(map(frozenset, groups))


def _mesh_groups(mesh: str, order: str | None, axes: str) -> list[list[int]]:
    parts = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
    dims, over = [], []
    for name, size in re.findall(r"'([^']*)'=(\d+)", mesh):
        spans = [(int(b or 1), int(b or 1) * int(s or size)) for n, b, s in parts if n == name]
        cuts = sorted({1, int(size)}.union(*spans))
        for low, high in itertools.pairwise(cuts):
            if any(start <= low and high <= end for start, end in spans):
                over.append(len(dims))
            dims.append(high // low)
    devices = np.arange(math.prod(dims))
    if order:
        devices = _iota(order) if "[" in order else np.array(_numbers(order))
    return _groups_over(devices.reshape(dims), over)


@functools.lru_cache(maxsize=4096)
def axes_of_groups(groups: Groups, mesh: Mesh | AbstractMesh) -> tuple[str, ...] | None:
    """Mesh axes, in mesh order, within which these are the groups; None if there are none."""
    names = [name for name, size in mesh.shape.items() if size > 1]
    devices = np.arange(mesh.size).reshape([mesh.shape[name] for name in names])
    for count in range(len(names) + 1):
        for axes in itertools.combinations(range(len(names)), count):
            if frozenset(map(frozenset, _groups_over(devices, axes))) == groups:
                return tuple(names[i] for i in axes)
    return None


def axes_of_pairs(pairs: list[list[int]], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Mesh axes along which a permute moves anything."""
    places = np.array(np.unravel_index(np.array(pairs), tuple(mesh.shape.values())))
    differs = (places[..., 0] != places[..., 1]).any(axis=-1)
    return tuple(name for name, d in zip(mesh.shape, differs, strict=True) if d)
