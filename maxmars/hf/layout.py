"""Which arrays of a Hugging Face GPT-2 a parameter of ours consists of.

Names are the same up to the layer, whose number is a part of Hugging Face's names and the first
axis of ours. Its linear layers (`Conv1D`) store kernels [in, out] as we do, so that a parameter of
a layer is Hugging Face's array in another shape: `c_attn` [D, 3 D] is our [D, 3, H, K], and the
attention's `c_proj` [D, D] our [H, K, D]. The output head is the token embedding in both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from maxmars.config import GPT2Config
from maxmars.model import graph_and_abstract_params


@dataclass(frozen=True, kw_only=True)
class HFLayout:
    """One parameter of ours in Hugging Face's names and shapes."""

    path: tuple[str, ...]
    """Keys of the parameter in our nested dict."""
    names: tuple[str, ...]
    """Hugging Face's names without the prefix `transformer.`, one a layer, or one alone."""
    shape: tuple[int, ...]
    """Of each of these arrays, without vocabulary padding."""
    stacked: bool
    """Whether our parameter has a leading axis of layers."""

    @property
    def is_bias(self) -> bool:
        """Whether a model without biases lacks it."""
        return self.path[-1] == "bias"


def hf_layouts(config: GPT2Config) -> Iterator[HFLayout]:
    """The layout of every parameter of a model, in the order of our tree.

    Biases are there even where the model has none: Hugging Face's always does.
    """
    config = dataclasses.replace(config, use_bias=True)
    _, params = graph_and_abstract_params(config)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = tuple(key.key for key in keys)
        stacked = path[0] == "h"
        shape = leaf.shape[1:] if stacked else leaf.shape
        prefix, kind = path[:-1], "bias" if path[-1] == "bias" else "weight"
        if stacked:
            parts = [(prefix[0], str(layer), *prefix[1:]) for layer in range(config.num_layers)]
        else:
            parts = [prefix]
        yield HFLayout(
            path=path,
            names=tuple(".".join((*part, kind)) for part in parts),
            shape=_hf_shape(path, shape, config),
            stacked=stacked,
        )


def _hf_shape(path: tuple[str, ...], shape: tuple[int, ...], config: GPT2Config) -> tuple[int, ...]:
    match path:
        case ("wte", _):
            return config.vocab_size, config.embed_dim
        case (*_, "attn", "c_proj", "kernel"):
            return math.prod(shape[:2]), shape[2]
        case (*_, "kernel"):
            return shape[0], math.prod(shape[1:])
        case (*_, "bias"):
            return (math.prod(shape),)
    return shape
