"""A model as a directory that `transformers.GPT2LMHeadModel.from_pretrained` loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from maxmars.config import GPT2Config
from maxmars.hf.config_json import CONFIG, config_fields, write_json_object
from maxmars.hf.layout import HFLayout, hf_layouts
from maxmars.hf.safetensors_writer import ArrayPlan, num_bytes, write_arrays

Dtype = Literal["float32", "bfloat16", "float16"]
MAX_FILE_BYTES = 5_000_000_000
_STORED: dict[Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_PREFIX = "transformer."


def write_model(
    directory: Path,
    config: GPT2Config,
    read: Callable[[HFLayout], Iterable[np.ndarray]],
    *,
    dtype: Dtype,
    end_of_text: int | None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write weights, `config.json` and, where the end of a text is known, `generation_config.json`.

    Args:
      directory: to write into.
      config: the model.
      read: the arrays of a parameter, in our shapes or Hugging Face's. It is not asked for the
        biases of a model without, which are zeros in the files.
      dtype: type of the weights in the files.
      end_of_text: id of the token that ends a document.
      max_file_bytes: the weights are split into files of this size at most.

    Returns:
      The files of weights.

    Raises:
      OSError: they cannot be written.
      ValueError: a weight is beyond the range of `dtype`.
    """
    layouts = list(hf_layouts(config))

    def arrays() -> Iterator[np.ndarray]:
        for layout in layouts:
            if layout.is_bias and not config.use_bias:
                yield from (np.zeros(layout.shape, np.float32) for _ in layout.names)
            else:
                for array in read(layout):
                    yield array.reshape(-1, *layout.shape[1:])[: layout.shape[0]]

    files = write_arrays(
        directory,
        _plans(config),
        arrays(),
        dtype=_STORED[dtype],
        max_file_bytes=max_file_bytes,
    )
    fields = config_fields(config, dtype=dtype, end_of_text=end_of_text)
    write_json_object(directory / CONFIG, fields)
    if end_of_text is not None:
        ids = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
        write_json_object(directory / "generation_config.json", ids)
    return files


def model_bytes(config: GPT2Config, dtype: Dtype) -> int:
    """Size of the weights in the files."""
    return sum(num_bytes(plan, _STORED[dtype]) for plan in _plans(config))


def _plans(config: GPT2Config) -> list[ArrayPlan]:
    return [
        ArrayPlan(name=f"{_PREFIX}{name}", shape=layout.shape)
        for layout in hf_layouts(config)
        for name in layout.names
    ]
