"""Parameters from a Hugging Face directory, one array at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from maxmars.config import GPT2Config
from maxmars.hf.layout import HFLayout, hf_layouts
from maxmars.hf.safetensors_files import StoredArray, open_arrays

_PREFIX = "transformer."
_HEAD, _EMBEDDING = "lm_head.weight", "wte.weight"
_NO_PARAMETERS = (".attn.bias", ".attn.masked_bias")  # the causal mask, in files of old versions


def load_params(directory: str | Path, config: GPT2Config, abstract_params: Any) -> Any:
    """The parameters in a Hugging Face directory, as our model has them.

    Names may begin with `transformer.` or not; weights in float64, float16 and bfloat16 are
    converted. The host holds one array of the file at a time (of GPT-2 XL 320 MB at most).

    Args:
      directory: with `model.safetensors`, or several such files and their index.
      config: the model; `load_config` tells the one that fits. Another `vocab_pad_multiple` may be
        chosen (padding rows are zero), and `use_bias=False` where all biases are zero.
      abstract_params: `maxmars.model.graph_and_abstract_params(config)[1]`, whose leaves may carry
        shardings; those without come to the first of this process's devices.

    Returns:
      A nested dict of arrays like `abstract_params`, on the devices.

    Raises:
      FileNotFoundError: there are no weights.
      ValueError: they are in another format, cut short, or not those of this model.
    """
    weights = open_weights(Path(directory), config)
    params: dict[str, Any] = {}
    for layout in hf_layouts(config):
        if layout.is_bias and not config.use_bias:
            continue
        abstract, parent = abstract_params, params
        for key in layout.path[:-1]:
            abstract, parent = abstract[key], parent.setdefault(key, {})
        parent[layout.path[-1]] = _load(layout, weights, abstract[layout.path[-1]])
    return params


def open_weights(directory: Path, config: GPT2Config) -> dict[str, StoredArray]:
    """Name without prefix -> place, of every array that the model needs; see `load_params`."""
    stored = open_arrays(directory)
    found = {name.removeprefix(_PREFIX): array for name, array in stored.items()}
    if len(found) < len(stored):
        raise ValueError(f"{directory} has arrays twice, with and without the prefix {_PREFIX!r}.")
    head = found.pop(_HEAD, None)
    layouts = list(hf_layouts(config))
    shapes = {name: layout.shape for layout in layouts for name in layout.names}
    biases = {name for layout in layouts if layout.is_bias for name in layout.names}
    needed = shapes if config.use_bias else shapes.keys() - biases
    missing = [name for name in shapes if name in needed and name not in found]
    unknown = [n for n in found if n not in shapes and not n.endswith(_NO_PARAMETERS)]
    for what, names in (("lacks", missing), ("also has", unknown)):
        if names:
            raise ValueError(
                f"{directory} {what} {len(names)} arrays, first {names[0]}: it does not hold the "
                f"GPT-2 of {config.num_layers} layers that its config.json or the configuration "
                "describes."
            )
    weights = {name: found[name] for name in shapes if name in found}
    for name, array in weights.items():
        if array.shape != shapes[name]:
            raise ValueError(
                f"{name} in {array.path} has shape {list(array.shape)}, but the model's is "
                f"{list(shapes[name])}; its config.json or the configuration does not fit."
            )
    if head is not None:
        _check_tied(head, weights[_EMBEDDING])
    if not config.use_bias:
        for name in biases & weights.keys():
            _check_zero(weights.pop(name))
    return weights


def _check_tied(head: StoredArray, embedding: StoredArray) -> None:
    if head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read()):
        raise ValueError(
            f"{_HEAD} in {head.path} differs from {_EMBEDDING}: maxmars reads models whose output "
            "head is the token embedding only."
        )


def _check_zero(bias: StoredArray) -> None:
    if bias.read().any():
        raise ValueError(
            f"{bias.name} in {bias.path} is not zero, but the model has no biases; set use_bias to "
            "true, in the configuration or the `maxmars` part of its config.json."
        )


def _load(
    layout: HFLayout, weights: dict[str, StoredArray], abstract: jax.ShapeDtypeStruct
) -> jax.Array:
    """One parameter: a single array, or one a layer, written into their stack on the devices."""
    sharding = abstract.sharding or SingleDeviceSharding(jax.local_devices()[0])
    if not layout.stacked:
        whole = _read(layout.names[0], weights, abstract.shape, abstract.dtype)
        return _to_devices(whole, sharding)
    one_layer = _without_layers(sharding)
    zeros, set_layer = _stack_functions(abstract.shape, abstract.dtype, sharding)
    stack = zeros()
    for i, name in enumerate(layout.names):
        values = _read(name, weights, abstract.shape[1:], abstract.dtype)
        stack = set_layer(stack, _to_devices(values, one_layer), np.int32(i))
        stack.block_until_ready()  # else the host could be many arrays ahead
    return stack


def _read(
    name: str, weights: dict[str, StoredArray], shape: tuple[int, ...], dtype: Any
) -> np.ndarray:
    values = weights[name].read().astype(dtype, copy=False)
    if name == _EMBEDDING and len(values) < shape[0]:
        values = np.pad(values, ((0, shape[0] - len(values)), (0, 0)))
    return values.reshape(shape)


def _to_devices(values: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _without_layers(sharding: Sharding) -> Sharding:
    """The sharding of one layer of a stack."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


@functools.cache
def _stack_functions(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding
) -> tuple[Callable[[], jax.Array], Callable[..., jax.Array]]:
    """Functions that make a stack of zeros, and that replace one of its layers in place."""
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    set_layer = jax.jit(
        lambda stack, layer, i: jax.lax.dynamic_update_index_in_dim(stack, layer, i, 0),
        donate_argnums=0,
        out_shardings=sharding,
    )
    return zeros, set_layer
