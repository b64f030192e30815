"""Writing safetensors files array by array; see `safetensors_files` for the format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxmars.hf.safetensors_files import DTYPES, INDEX, WEIGHTS

_METADATA = {"format": "pt"}  # transformers refuses a file that does not say so
_ALIGNMENT = 8  # of the first array


@dataclass(frozen=True, kw_only=True)
class ArrayPlan:
    """An array that is to be written."""

    name: str
    shape: tuple[int, ...]


def write_arrays(
    directory: Path,
    plans: Sequence[ArrayPlan],
    arrays: Iterable[np.ndarray],
    *,
    dtype: str,
    max_file_bytes: int,
) -> list[Path]:
    """Write `model.safetensors` or, above a size, several files and `model.safetensors.index.json`.

    Args:
      directory: to write into.
      plans: names and shapes of all arrays.
      arrays: the arrays in this order, of any floating-point type; one is held at a time.
      dtype: type in the file, a key of `safetensors_files.DTYPES`.
      max_file_bytes: begin another file before the arrays of one take more.

    Returns:
      The files of arrays.

    Raises:
      OSError: they cannot be written.
      ValueError: a finite number is not one in `dtype`.
    """
    groups = _split(plans, dtype, max_file_bytes)
    if len(groups) == 1:
        paths = [directory / WEIGHTS]
    else:
        count = len(groups)
        paths = [directory / f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        _write_index(directory / INDEX, paths, groups, dtype)
    stream = iter(arrays)
    for path, group in zip(paths, groups, strict=True):
        with path.open("wb") as file:
            file.write(_header(group, dtype))
            for plan in group:
                file.write(_to_bytes(next(stream), plan, dtype))
    return paths


def num_bytes(plan: ArrayPlan, dtype: str) -> int:
    """Size of an array in a file."""
    return math.prod(plan.shape) * DTYPES[dtype].itemsize


def _split(plans: Sequence[ArrayPlan], dtype: str, max_file_bytes: int) -> list[list[ArrayPlan]]:
    groups: list[list[ArrayPlan]] = [[]]
    used = 0
    for plan in plans:
        size = num_bytes(plan, dtype)
        if groups[-1] and used + size > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(plan)
        used += size
    return groups


def _header(plans: Sequence[ArrayPlan], dtype: str) -> bytes:
    header: dict[str, object] = {"__metadata__": _METADATA}
    end = 0
    for plan in plans:
        start, end = end, end + num_bytes(plan, dtype)
        header[plan.name] = {"dtype": dtype, "shape": plan.shape, "data_offsets": [start, end]}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    return len(content).to_bytes(8, "little") + content


def _to_bytes(array: np.ndarray, plan: ArrayPlan, dtype: str) -> memoryview:
    assert array.shape == plan.shape, (plan, array.shape)
    with np.errstate(over="ignore"):  # what it warns of is found below
        stored = np.ascontiguousarray(array.astype(DTYPES[dtype], copy=False))
    if stored.dtype.itemsize < array.dtype.itemsize:
        lost = ~np.isfinite(stored) & np.isfinite(array)
        if lost.any():
            raise ValueError(
                f"{plan.name} holds {array[lost].flat[0]:.4g}, which is beyond the range of "
                f"{stored.dtype.name}; use another dtype."
            )
    return stored.reshape(-1).view(np.uint8).data


def _write_index(
    path: Path, files: Sequence[Path], groups: Sequence[Sequence[ArrayPlan]], dtype: str
) -> None:
    total = sum(num_bytes(plan, dtype) for group in groups for plan in group)
    pairs = zip(files, groups, strict=True)
    weight_map = {plan.name: file.name for file, group in pairs for plan in group}
    fields = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path.write_text(json.dumps(fields, indent=2) + "\n")
