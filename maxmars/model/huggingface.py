"""Hugging Face's GPT-2: directories with `config.json` and safetensors, read and written.

A parameter of ours has the name of Hugging Face's up to the layer, whose number is part of Hugging
Face's names and the first axis of our stacked parameters. Hugging Face's linear layers (`Conv1D`)
store kernels [in, out] as we do, so a layer's parameter is Hugging Face's array in another shape:
`attn.c_attn` [D, 3 D] is our [D, 3, H, K], and `attn.c_proj` [D, D] is our [H, K, D]. The output
head is the token embedding in both.

A model is one file `model.safetensors`, or several files and `model.safetensors.index.json`, which
names the file of each array. Pickles (`pytorch_model.bin`) are never opened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import stat
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding

from maxmars.config import GPT2Config
from maxmars.config.checks import from_json
from maxmars.config.errors import about
from maxmars.distributed import processes
from maxmars.distributed.files import read_json_object, write_json
from maxmars.model.parameters import Parameters

Dtype = Literal["float32", "bfloat16", "float16"]
MAX_FILE_BYTES = 5_000_000_000
_CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PREFIX = "transformer."
_HEAD, _EMBEDDING = "lm_head.weight", "wte.weight"
_NO_PARAMETERS = (".attn.bias", ".attn.masked_bias")  # the causal mask, in files of old versions
_FLOATS = ("F64", "F32", "F16", "BF16")

# --- config.json ---------------------------------------------------------------------------------

_FIELDS = {
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "embed_dim": "n_embd",
    "max_seq_len": "n_positions",
    "vocab_size": "vocab_size",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "scale_attn_by_inverse_layer_idx": "scale_attn_by_inverse_layer_idx",
}
"""Fields of GPT2Config and their names in config.json."""
_DEFAULTS = {"layer_norm_epsilon": 1e-5, "scale_attn_by_inverse_layer_idx": False}
_OURS = "maxmars"
"""Key in config.json of the fields of GPT2Config that Hugging Face's GPT-2 does not have."""
_OUR_FIELDS = ("use_bias", "vocab_pad_multiple")
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # apart by 1e-12
# Any other value of these fields is a model with other logits.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": _GELU_TANH,
    "scale_attn_weights": (True,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
}


def is_hf_directory(path: str | Path) -> bool:
    """Whether a local directory is a Hugging Face model's: it holds weights, in safetensors or as a
    pickle, or a `config.json` with a `model_type`."""
    directory = Path(path)
    if any(next(directory.glob(f"{n}*"), None) for n in (WEIGHTS, "pytorch_model")):
        return True
    try:
        return "model_type" in read_json_object(directory / _CONFIG)
    except (OSError, ValueError, TypeError):
        return False


def read_config(directory: str | Path) -> GPT2Config:
    """The model that the `config.json` of a Hugging Face directory describes.

    Its matrix products are in float32, as Hugging Face computes by default. `use_bias`
    and `vocab_pad_multiple` come from the part `maxmars` of a model that `maxmars export` wrote.

    Raises:
      FileNotFoundError: the directory has no config.json.
      ValueError: config.json is malformed, or describes a model other than our `GPT2`.
    """
    path = Path(directory) / _CONFIG
    with about(path):
        return _config_of(_DEFAULTS | read_json_object(path))


def _config_of(fields: dict[str, Any]) -> GPT2Config:
    for name, allowed in _FIXED.items():
        value = fields.get(name, allowed[0])
        if value not in allowed:
            wanted = " or ".join(map(json.dumps, allowed))
            raise ValueError(
                f"{name} is {json.dumps(value)}, but maxmars reads models with {wanted} only."
            )
    # Old files also, or only, call the context n_ctx.
    if "n_ctx" in fields and fields.setdefault("n_positions", fields["n_ctx"]) != fields["n_ctx"]:
        raise ValueError(
            f"n_positions is {fields['n_positions']} and n_ctx {fields['n_ctx']}; the context must "
            "be the same in both."
        )
    if fields.get("n_inner") not in (None, 4 * fields["n_embd"]):
        raise ValueError(
            f"n_inner is {fields['n_inner']!r}, but maxmars reads models whose MLP is four times "
            f"as wide as n_embd ({fields['n_embd']}) only."
        )
    ours = from_json(dict[str, Any], fields.get(_OURS, {}))
    # As in `config.train.from_dict`: a removed field that was not in use is as if it never was.
    ours = {name: value for name, value in ours.items() if value is not None}
    if not ours.keys() <= set(_OUR_FIELDS):
        raise ValueError(f"{_OURS} holds {', '.join(ours)}, not {', '.join(_OUR_FIELDS)} alone.")
    values = {name: fields[theirs] for name, theirs in _FIELDS.items()}
    return from_json(GPT2Config, {**values, **ours, "compute_dtype": "float32"})


def config_fields(config: GPT2Config) -> dict[str, Any]:
    """The fields of `config.json` for a model of ours, which `read_config` reads back."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": _GELU_TANH[0],
        **{name: getattr(config, ours) for ours, name in _FIELDS.items()},
        "n_ctx": config.max_seq_len,  # llama.cpp's converter reads no other name of the context
        "n_inner": None,
        "scale_attn_weights": True,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        **dict.fromkeys(("embd_pdrop", "resid_pdrop"), config.dropout),
        "attn_pdrop": config.dropout if config.attention == "plain" else 0.0,
        _OURS: {name: getattr(config, name) for name in _OUR_FIELDS},
    }


# --- names and layouts ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HFLayout:
    """A parameter of ours in Hugging Face's names and shapes."""

    path: tuple[str, ...]
    """Keys of the parameter in our nested dict."""
    names: tuple[str, ...]
    """Hugging Face's names without the prefix `transformer.`: one a layer if stacked, else one."""
    shape: tuple[int, ...]
    """Shape of each of these arrays, without vocabulary padding."""
    stacked: bool
    """Whether our parameter has a leading axis of layers."""

    @property
    def is_bias(self) -> bool:
        """Whether our parameter is a bias, which a model without `use_bias` lacks."""
        return self.path[-1] == "bias"


def hf_layouts(config: GPT2Config) -> Iterator[HFLayout]:
    """The layout of every parameter of a model, in the order of our tree.

    Biases are included even where `use_bias` is false, because Hugging Face's model always has
    them.
    """
    config = dataclasses.replace(config, use_bias=True)
    params = Parameters(config).abstract
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = tuple(key.key for key in keys)
        stacked = path[0] == "h"
        prefix, kind = path[:-1], "bias" if path[-1] == "bias" else "weight"
        prefixes = [prefix]
        if stacked:
            prefixes = [(prefix[0], str(layer), *prefix[1:]) for layer in range(config.num_layers)]
        shape = leaf.shape[1:] if stacked else leaf.shape
        match path:
            case ("wte", _):
                shape = config.vocab_size, config.embed_dim
            case (*_, "attn", "c_proj", "kernel"):
                shape = math.prod(shape[:2]), shape[2]
            case (*_, "kernel"):
                shape = shape[0], math.prod(shape[1:])
            case (*_, "bias"):
                shape = (math.prod(shape),)
        names = tuple(".".join((*each, kind)) for each in prefixes)
        yield HFLayout(path=path, names=names, shape=shape, stacked=stacked)


# --- loading -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """An array in a safetensors file."""

    path: Path
    name: str
    dtype: str
    """Name of the dtype in safetensors, such as F32."""
    shape: tuple[int, ...]

    def read(self, *index: slice) -> np.ndarray:
        """Read these slices of the first axes, or without slices the whole array, into host memory.

        Raises:
          ValueError: the file is damaged.
        """
        # Opened for each array: the pages of an open file's memory map stay in this process.
        with _open(self.path) as file:
            return file.get_slice(self.name)[index or ...]


def open_weights(directory: Path, config: GPT2Config) -> dict[str, StoredArray]:
    """Every array that the model needs, by name without prefix; see `load_params`.

    Only headers are read, and arrays whose values must be checked (`lm_head`, biases that must be
    zero).
    """
    stored = _stored_arrays(directory)
    by_name = {name.removeprefix(_PREFIX): array for name, array in stored.items()}
    if len(by_name) < len(stored):
        raise ValueError(f"{directory} has arrays twice, with and without the prefix {_PREFIX!r}.")
    layers = {name.split(".")[1] for name in by_name if name.startswith("h.")}
    if len(layers) < config.num_layers:  # before arrays of so many layers are listed
        raise ValueError(
            f"{directory} holds {len(layers)} layers, but its config.json or the configuration "
            f"describes {config.num_layers}."
        )
    head = by_name.pop(_HEAD, None)
    layouts = list(hf_layouts(config))
    shapes = {name: layout.shape for layout in layouts for name in layout.names}
    biases = {name for layout in layouts if layout.is_bias for name in layout.names}
    needed = shapes if config.use_bias else shapes.keys() - biases
    missing = [name for name in shapes if name in needed and name not in by_name]
    unknown = [n for n in by_name if n not in shapes and not n.endswith(_NO_PARAMETERS)]
    for verb, names in (("lacks", missing), ("also has", unknown)):
        if names:
            raise ValueError(
                f"{directory} {verb} {len(names)} arrays, first {names[0]}: it does not hold the "
                f"GPT-2 of {config.num_layers} layers that its config.json or the configuration "
                "describes."
            )
    weights = {name: by_name[name] for name in shapes if name in by_name}
    for name, array in weights.items():
        if array.shape != shapes[name]:
            raise ValueError(
                f"{name} in {array.path} has shape {list(array.shape)}, but the model's is "
                f"{list(shapes[name])}; its config.json or the configuration does not fit."
            )
        if array.dtype not in _FLOATS:
            raise ValueError(
                f"{name} in {array.path} has type {array.dtype}, but only {', '.join(_FLOATS)} are "
                "read; convert the model to float32 (quantised ones cannot be imported)."
            )
    if head is not None:
        embedding = weights[_EMBEDDING]
        if head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read()):
            raise ValueError(
                f"{_HEAD} in {head.path} differs from {_EMBEDDING}: maxmars reads models whose "
                "output head is the token embedding only."
            )
    if not config.use_bias:
        for name in sorted(biases & weights.keys()):
            bias = weights.pop(name)
            if bias.read().any():
                raise ValueError(
                    f"{bias.name} in {bias.path} is not zero, but the model has no biases; set "
                    "use_bias to true, in the configuration or the `maxmars` part of its "
                    "config.json."
                )
    return weights


def load_params(directory: str | Path, config: GPT2Config, abstract_params: Any) -> Any:
    """The parameters in a Hugging Face directory, in our names and shapes.

    The names may have the prefix `transformer.`. Weights in float64, float16 and bfloat16 are
    converted. Each process reads the rows that its devices take. Beside the result, the host holds
    its part of one parameter at a time (2 GB for the largest one of GPT-2 XL on one device).

    Args:
      directory: with `model.safetensors`, or several such files and their index.
      config: the model, usually from `read_config`. It may have another `vocab_pad_multiple`
        (padding rows are zero), and `use_bias=False` where all biases are zero.
      abstract_params: `maxmars.model.Parameters(config).abstract`, whose leaves may carry
        shardings; leaves without go to the first device of this process.

    Returns:
      A nested dict of arrays like `abstract_params`, on the devices.

    Raises:
      FileNotFoundError: there are no weights.
      ValueError: they are in another format, damaged, not finite, or of another model.
    """
    weights = open_weights(Path(directory), config)
    layouts = {layout.path: layout for layout in hf_layouts(config)}
    leaves: dict[Any, Any] = flatten_dict(abstract_params)
    params, problem = {}, None
    try:
        params = {path: _load(layouts[path], weights, leaf) for path, leaf in leaves.items()}
    except ValueError as error:
        problem = error
    devices = {d for leaf in leaves.values() if leaf.sharding for d in leaf.sharding.device_set}
    is_shared = len({device.process_index for device in devices}) > 1
    # One process alone may have the rows in which a number is not finite.
    if is_shared and not processes.all_processes(problem is None) and problem is None:
        problem = ValueError(f"another process could not read its part of {directory}.")
    if problem is not None:
        raise problem
    return unflatten_dict(params)


def _load(
    layout: HFLayout, weights: dict[str, StoredArray], abstract: jax.ShapeDtypeStruct
) -> jax.Array:
    """One parameter: a single array, or the arrays of all layers, stacked."""
    sharding = abstract.sharding or SingleDeviceSharding(jax.local_devices()[0])
    parts: dict[str, np.ndarray] = {}  # by their indices, as devices may hold the same one

    def part(index: Any) -> np.ndarray:
        key, dtype = str(index), abstract.dtype
        if key not in parts and layout.stacked:
            parts[key] = np.empty(sharding.shard_shape(abstract.shape), dtype)
            for layer, name in zip(parts[key], layout.names, strict=True):
                layer[...] = _read_part(weights[name], abstract.shape[1:], index[1:], dtype)
        elif key not in parts:
            parts[key] = _read_part(weights[layout.names[0]], abstract.shape, index, dtype)
        return parts[key]

    # Wait: the host would else read many parameters ahead, and hold them.
    return jax.block_until_ready(jax.make_array_from_callback(abstract.shape, sharding, part))


def _read_part(
    stored: StoredArray, shape: tuple[int, ...], index: tuple[slice, ...], dtype: Any
) -> np.ndarray:
    """A part of one of Hugging Face's arrays, by its index in our shape."""
    start, stop, _ = index[0].indices(shape[0])
    num_rows = stored.shape[0]
    # An entry of our first axis is several rows of theirs where it is one of two axes (heads).
    rows_in_ours = -(-num_rows // shape[0])  # 1 too where ours has padding at its end
    first, last = (min(row * rows_in_ours, num_rows) for row in (start, stop))
    rows = slice(first, last) if first < last else slice(0)
    if shape[1:] == stored.shape[1:]:
        values, others = stored.read(rows, *index[1:]), ()
    else:
        values, others = stored.read(rows), index[1:]
    with np.errstate(over="ignore"):  # reported below, by name
        values = values.astype(dtype, copy=False)
    if num_bad := values.size - np.count_nonzero(np.isfinite(values)):
        raise ValueError(
            f"{stored.name} in {stored.path} has {num_bad:,} of {values.size:,} numbers that are "
            f"NaN or infinite in {np.dtype(dtype).name}: the model diverged, or its file is "
            "damaged; download it again, or take one from before."
        )
    if others:
        values = values.reshape(-1, *shape[1:])[:, *others]
    if padding := stop - start - len(values):
        values = np.pad(values, [(0, padding), *[(0, 0)] * (values.ndim - 1)])
    return values


@contextlib.contextmanager
def _open(path: Path) -> Generator[Any]:
    """Open a safetensors file, with bfloat16 arrays as NumPy's of the dtype that JAX registers."""
    try:
        with safetensors.safe_open(path, "np") as file:
            yield file
    except safetensors.SafetensorError as error:  # not a ValueError
        raise ValueError(f"{path}: {error}; copy or download it again.") from error


def _stored_arrays(directory: Path) -> dict[str, StoredArray]:
    """Every array of a model, from one file or several, by name."""
    if (directory / WEIGHTS).is_file():
        return _arrays_of_file(directory / WEIGHTS)
    index = directory / INDEX
    if not index.is_file():
        raise _no_weights(directory)
    with about(index):
        files = from_json(dict[str, str], read_json_object(index)["weight_map"])
        for file in files.values():
            if Path(file).name != file or not file.endswith("safetensors"):
                raise ValueError(f"{file!r} is no safetensors file beside it.")
        headers = {file: _arrays_of_file(directory / file) for file in sorted(set(files.values()))}
        return {name: headers[file][name] for name, file in files.items()}


def _arrays_of_file(path: Path) -> dict[str, StoredArray]:
    with _open(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, no iterator
        return {
            name: StoredArray(
                path=path, name=name, dtype=lazy.get_dtype(), shape=tuple(lazy.get_shape())
            )
            for name, lazy in slices.items()
        }


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


# --- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HFModel:
    """A model as it is written for Hugging Face's libraries."""

    fields: dict[str, Any]
    """Fields of `config.json`, without the dtype of the weights; `bos_token_id` and `eos_token_id`
    may be left out."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of every array, by name."""
    arrays: Iterable[np.ndarray]
    """The arrays in the order of `shapes`, of any dtype."""

    @property
    def architecture(self) -> str:
        """The class in `transformers`."""
        return self.fields["architectures"][0]

    def num_bytes(self, dtype: Dtype) -> int:
        """Size of the weights in the files."""
        return sum(map(math.prod, self.shapes.values())) * np.dtype(dtype).itemsize


def gpt2_model(config: GPT2Config, load: Callable[[HFLayout], Iterable[np.ndarray]]) -> HFModel:
    """A GPT-2 in Hugging Face's names and shapes.

    Args:
      config: the model.
      load: function from a parameter to its arrays, one a layer if it is stacked, in our
        shapes or Hugging Face's. A model without biases gets zeros, and no call for them.
    """

    def arrays() -> Iterator[np.ndarray]:
        for layout in hf_layouts(config):
            if layout.is_bias and not config.use_bias:
                yield from (np.zeros(layout.shape, np.float32) for _ in layout.names)
                continue
            for values in load(layout):
                yield values.reshape(-1, *layout.shape[1:])[: layout.shape[0]]

    shapes = {
        f"{_PREFIX}{name}": layout.shape for layout in hf_layouts(config) for name in layout.names
    }
    return HFModel(fields=config_fields(config), shapes=shapes, arrays=arrays())


def write_model(
    directory: Path,
    model: HFModel,
    *,
    dtype: Dtype,
    ends_of_text: tuple[int, int] | None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write weights and `config.json`, which `from_pretrained` of `transformers` loads.

    The host holds the arrays of one file at a time.

    Args:
      directory: to write into.
      model: what to write.
      dtype: type of the weights in the files.
      ends_of_text: ids of the tokens that begin a text and that end it, if they are known.
      max_file_bytes: where the weights take more, they are split into files of this size at most
        and an index.

    Returns:
      The files of weights.

    Raises:
      OSError: they cannot be written.
      ValueError: a weight is beyond the range of `dtype`.
    """
    kind = np.dtype(dtype)
    files: list[dict[str, int]] = [{}]  # for each file, array name -> bytes
    for name, shape in model.shapes.items():
        size = math.prod(shape) * kind.itemsize
        if files[-1] and sum(files[-1].values()) + size > max_file_bytes:
            files.append({})
        files[-1][name] = size
    paths = [directory / WEIGHTS]
    if len(files) > 1:
        count = len(files)
        paths = [directory / f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        index = {
            "metadata": {"total_size": model.num_bytes(dtype)},
            "weight_map": {
                name: path.name for path, file in zip(paths, files, strict=True) for name in file
            },
        }
        write_json(directory / INDEX, index)
    arrays = iter(model.arrays)
    for path, file in zip(paths, files, strict=True):
        path.touch()
        mode = stat.S_IMODE(path.stat().st_mode)
        try:
            # transformers refuses a file without this format.
            safetensors.numpy.save_file(
                {name: _converted(name, next(arrays), kind) for name in file},
                path,
                metadata={"format": "pt"},
            )
        except safetensors.SafetensorError as error:
            raise OSError(f"{path} cannot be written ({error}); make room on its disk.") from error
        path.chmod(mode)  # safetensors lets none but the owner read it, whatever the umask says
    begin, end = ends_of_text or (None, None)
    ends = {"bos_token_id": begin, "eos_token_id": end}
    write_json(directory / _CONFIG, {**ends, **model.fields, "dtype": dtype})
    return paths


def _converted(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A weight in the dtype of the file; ValueError if a finite number becomes infinite."""
    with np.errstate(over="ignore"):  # reported below, by name
        stored = np.ascontiguousarray(array.astype(dtype, copy=False))
    if dtype.itemsize < array.dtype.itemsize:
        lost = ~np.isfinite(stored) & np.isfinite(array)
        if lost.any():
            raise ValueError(
                f"{name} holds {array[lost].flat[0]:.4g}, which is beyond the range of "
                f"{dtype.name}; use another dtype."
            )
    return stored
