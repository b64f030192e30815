"""Reading safetensors files: each array by itself, and nothing that a header says is believed.

A file is eight bytes with the header's length n (little-endian), n bytes of JSON, and the arrays'
bytes one after the other:

    {"wte.weight": {"dtype": "F32", "shape": [50257, 768], "data_offsets": [0, 154389504]}, ...}

Offsets count from the end of the header. A model is one file `model.safetensors`, or several with
`model.safetensors.index.json`, which says the file of each array. Format:
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
}
_OTHER_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4}
_OTHER_BYTES |= {"I64": 8, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | _OTHER_BYTES
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """Where an array is."""

    path: Path
    name: str
    dtype: str
    """As the format names it, such as F32."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the file."""

    def read(self) -> np.ndarray:
        """The array, in memory.

        Raises:
          ValueError: it holds no floating-point numbers, or the file ends before it does.
        """
        if self.dtype not in DTYPES:
            raise ValueError(
                f"{self.name} in {self.path} has type {self.dtype}, but only {', '.join(DTYPES)} "
                "are read; convert the model to float32 (quantised ones cannot be imported)."
            )
        count = math.prod(self.shape)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            array = np.fromfile(file, DTYPES[self.dtype], count)
        if array.size != count:
            raise ValueError(f"{self.path} was cut short while it was read; copy it again.")
        return array.reshape(self.shape)


def open_arrays(directory: Path) -> dict[str, StoredArray]:
    """Name -> place of every array of a model, from one file or several. No array is read.

    Raises:
      FileNotFoundError: there are no weights, or one of several files is missing.
      ValueError: there are weights in another format only, or a file is not what it should be.
    """
    if (directory / WEIGHTS).is_file():
        return read_header(directory / WEIGHTS)
    if not (directory / INDEX).is_file():
        raise _no_weights(directory)
    files = _read_index(directory / INDEX)
    headers = {file: read_header(directory / file) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in headers[file]:
            raise ValueError(
                f"{directory / INDEX} says that {name} is in {file}, which does not hold it; "
                "download or export the model again."
            )
    return {name: headers[file][name] for name, file in files.items()}


def read_header(path: Path) -> dict[str, StoredArray]:
    """Name -> place of every array of one file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is cut short, or its header is none: arrays must follow one another
        without gap or overlap from the header's end to that of the file.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; {path.with_name(INDEX)} names it. Download all files again."
        )
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= _MAX_HEADER_BYTES:
            raise _broken(path, f"its header would have {header_bytes} bytes")
        if num_bytes < 8 + header_bytes:
            raise _cut_short(path, num_bytes, 8 + header_bytes)
        header = _parse_header(path, file.read(header_bytes))
    start, end, arrays = 8 + header_bytes, 0, {}
    for name, entry in sorted(header.items(), key=lambda item: _offsets(path, *item)):
        (first, last), dtype, shape = _offsets(path, name, entry), entry["dtype"], entry["shape"]
        if first != end:
            raise _broken(path, f"{name} begins at byte {first} and not at {end}")
        if last - first != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise _broken(path, f"{name} has {last - first} bytes, which are not {dtype}{shape}")
        arrays[name] = StoredArray(
            path=path, name=name, dtype=dtype, shape=tuple(shape), offset=start + first
        )
        end = last
    if num_bytes < start + end:
        raise _cut_short(path, num_bytes, start + end)
    if num_bytes > start + end:
        raise _broken(path, f"{num_bytes - start - end} bytes follow the last array")
    return arrays


def _parse_header(path: Path, content: bytes) -> dict[str, Any]:
    try:
        pairs = json.loads(content, object_pairs_hook=lambda pairs: pairs)
        names = [name for name, _ in pairs]
        header = {name: dict(entry) for name, entry in pairs}
    except (ValueError, TypeError, RecursionError) as error:
        raise _broken(path, f"its header cannot be read ({type(error).__name__})") from error
    if len(header) < len(names):
        raise _broken(path, "its header names an array twice")
    header.pop("__metadata__", None)
    return header


def _offsets(path: Path, name: str, entry: dict[str, Any]) -> tuple[int, int]:
    """First and last byte of an array, counted from the end of the header."""
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise _broken(path, f"{name} has the unknown type {dtype!r}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise _broken(path, f"{name} has shape {shape!r} and offsets {offsets!r}")
    return offsets[0], offsets[1]


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _read_index(path: Path) -> dict[str, str]:
    """Name of each array -> name of its file, which lies beside the index."""
    try:
        files = json.loads(path.read_bytes())["weight_map"]
        known = {str(name): str(file) for name, file in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no index of safetensors files ({type(error).__name__}); download or export "
            "the model again."
        ) from error
    for file in known.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{path} names the file {file!r}; it may only name safetensors files beside it."
            )
    return known


def _no_weights(directory: Path) -> Exception:
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    if not pickles:
        return FileNotFoundError(f"{directory} has no weights: neither {WEIGHTS} nor {INDEX}.")
    return ValueError(
        f"{directory} has {pickles[0]} but no {WEIGHTS}. A .bin file is a pickle, which can run "
        "any program, so none is read. Convert it, where transformers and torch are installed, by "
        f'`python -c "from transformers import GPT2LMHeadModel as M; M.from_pretrained('
        f"'{directory}').save_pretrained('{directory}-safetensors')\"` and copy the tokenizer's "
        "files."
    )


def _cut_short(path: Path, found: int, needed: int) -> ValueError:
    return ValueError(
        f"{path} is cut short: it has {found:,} bytes and needs at least {needed:,}; copy or "
        "download it again."
    )


def _broken(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is no sound safetensors file: {reason}; copy or download it again.")
