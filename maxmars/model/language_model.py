"""What every model is to training, evaluation and generation: parameters, named axes, loss.

A model is `GPT2`, or a module of the user's own inside an `OwnModel`. Both have `hidden`,
`output_embedding` and `logits`, and a `config` with `vocab_size` and `max_seq_len`. Parameters are
nested dicts of arrays.

Shape letters: B batch, T length, D embed, V padded vocabulary, P parts of the batch.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Shaped

from maxmars.config import GPT2Config, ModelConfig
from maxmars.distributed.sharding import RULES, batch_shards, copies
from maxmars.model import cross_entropy
from maxmars.model.gpt2 import GPT2
from maxmars.model.kv_cache import decode, prefill
from maxmars.model.own_model import OwnModel, make_module
from maxmars.optim.nnx import given_specs

LanguageModel = GPT2 | OwnModel
Window = Int[Array, "B window"]
"""Rows of T + 1 numbers: T inputs, and each but the first a target."""


# --- parameters -----------------------------------------------------------------------------------


def _make_module(config: ModelConfig, seed: int | jax.Array) -> nnx.Module:
    rngs = nnx.Rngs(jax.random.key(seed))
    return GPT2(config, rngs=rngs) if isinstance(config, GPT2Config) else make_module(config, rngs)


@functools.cache
def _abstract_module(config: ModelConfig) -> nnx.Module:
    return nnx.eval_shape(lambda: _make_module(config, 0))


@functools.cache
def graph_and_abstract_params(config: ModelConfig) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The static part of the module, and its parameters as a nested dict of
    `jax.ShapeDtypeStruct`.

    Raises:
      FileNotFoundError, ValueError: a module of the user's own is not as it should be; see
        `own_model.make_module`.
    """
    graph, state = nnx.split(_abstract_module(config), nnx.Param)
    # Under `jax.set_mesh` the shapes carry shardings on an abstract mesh, and the result is cached
    # for callers under other meshes.
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), nnx.to_pure_dict(state))
    return graph, shapes


def make_model(config: ModelConfig, params: Any) -> LanguageModel:
    """The model with these parameters, a nested dict of arrays; also inside `jax.jit`."""
    module = nnx.merge(graph_and_abstract_params(config)[0], params)
    return module if isinstance(config, GPT2Config) else OwnModel(config, module)


def init_params(config: ModelConfig, seed: int | jax.Array) -> dict[str, Any]:
    """Initial parameters as a nested dict; `jax.jit` it with shardings for a large model."""
    return nnx.to_pure_dict(nnx.state(_make_module(config, seed), nnx.Param))


@functools.cache
def logical_axes(config: ModelConfig) -> dict[str, Any]:
    """The names of each parameter's axes: a nested dict whose leaves are tuples of str or None.

    Names: layers, embed, qkv, heads, head_dim, mlp, vocab, positions, norm.
    """
    flat = nnx.to_flat_state(nnx.state(_abstract_module(config), nnx.Param))
    return nnx.traversals.unflatten_mapping(
        {path: tuple(variable.get_metadata("axes")) for path, variable in flat}
    )


def given_matrix_specs(config: ModelConfig) -> dict[tuple[Any, ...], Any]:
    """What of a model's parameters their axes' names do not tell; see
    `maxmars.optim.nnx.given_specs`."""
    return given_specs(_abstract_module(config))


def param_shardings(config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """The sharding of each parameter over a mesh by `sharding.RULES`, as a nested dict.

    Raises:
      ValueError: the mesh does not divide a parameter.
    """

    def sharding(path: Any, shape: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> Any:
        spec = RULES.spec(*axes)
        for size, name, parts in zip(shape.shape, axes, spec, strict=True):
            if parts is not None and size % mesh.shape[parts]:
                raise ValueError(
                    f"mesh.{parts}={mesh.shape[parts]} does not divide the axis {name} of "
                    f"{jax.tree_util.keystr(path, simple=True, separator='.')}, whose shape is "
                    f"{list(shape.shape)}; choose another mesh.{parts} or another size."
                )
        return NamedSharding(mesh, spec)

    _, shapes = graph_and_abstract_params(config)
    return jax.tree.map_with_path(sharding, shapes, logical_axes(config))


def num_parameters(config: ModelConfig) -> int:
    """Number of parameters, tied embeddings counted once, vocabulary padding included."""
    _, params = graph_and_abstract_params(config)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def flops_per_token(config: ModelConfig) -> int:
    """FLOPs of forward and backward pass a token: 6 N + 12 A T, as in PaLM (2204.02311, App. B).

    N are all parameters; of several tables of the vocabulary only the largest counts, since the
    input embedding of a model with a head of its own multiplies nothing. T is `max_seq_len`. A, the
    width of attention summed over the layers (L d in GPT-2), is that of the parameters whose axes
    end with heads, head_dim, embed; attention without such a projection counts nothing.
    """
    _, shapes = graph_and_abstract_params(config)
    counted, tables, width = 0, [0], 0
    leaves = jax.tree.leaves(logical_axes(config), is_leaf=lambda x: isinstance(x, tuple))
    for leaf, axes in zip(jax.tree.leaves(shapes), leaves, strict=True):
        counted += leaf.size
        if "vocab" in axes and len(axes) > 1:
            tables.append(leaf.size)
        if axes[-3:] == ("heads", "head_dim", "embed"):
            width += math.prod(leaf.shape[:-1])
    counted -= sum(tables) - max(tables)
    return 6 * counted + 12 * width * config.max_seq_len


@functools.cache
def check_model(config: ModelConfig, mesh: Mesh) -> None:
    """Find by shapes alone whether a module of the user's own can be trained on a mesh.

    Raises:
      FileNotFoundError, ValueError: it is not as it should be, or the mesh does not divide it. Any
        other exception was raised by the user's code.
    """
    if isinstance(config, GPT2Config):
        return
    param_shardings(config, mesh)
    _, params = graph_and_abstract_params(config)
    tokens = jax.ShapeDtypeStruct((batch_shards(mesh), config.max_seq_len), jnp.int32)

    def outputs(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = make_model(config, params)
        rows = tokens[:, 0]
        decode(model, rows, prefill(model, tokens, rows, config.max_seq_len)[1])
        x = model.hidden(tokens)
        return x, model.output_embedding(x.dtype)

    with jax.set_mesh(mesh):
        x, embedding = jax.eval_shape(outputs, params, tokens)
    if x.shape[-1] != embedding.shape[-1]:
        raise ValueError(
            f"model.make={config.make!r}: the hidden states have {x.shape[-1]} columns, and the "
            f"output_embedding {embedding.shape[-1]}; both must have the same."
        )
    if embedding.shape[0] % mesh.shape["tensor"]:
        raise ValueError(
            f"mesh.tensor={mesh.shape['tensor']} does not divide the {embedding.shape[0]} rows of "
            f"the output_embedding of model.make={config.make!r}; pad them to a multiple of "
            f"{mesh.shape['tensor']}: rows from vocab_size on are masked."
        )


# --- loss -----------------------------------------------------------------------------------------


def token_losses(
    model: LanguageModel,
    tokens: Window,
    *,
    segment_ids: Window | None = None,
    positions: Window | None = None,
) -> Float[Array, "B window-1"]:
    """Loss of each token but the first of a row, in nats; see `mean_loss` for the arguments."""
    x, tables = _hidden_and_tables(model, tokens, segment_ids, positions)
    size, cap = model.config.vocab_size, _cap(model)
    with jax.named_scope("loss"):
        return cross_entropy.token_losses(x, tables, tokens[:, 1:], size, cap=cap)


def mean_loss(
    model: LanguageModel,
    tokens: Window,
    *,
    mask: Shaped[Array, "B window"] | None = None,
    segment_ids: Window | None = None,
    positions: Window | None = None,
    uniforms: Float[Array, "B window-1"] | None = None,
) -> Float[Array, ""]:
    """Mean of `token_losses` times `mask`, with a cheaper gradient.

    Args:
      model: the model.
      tokens: each token but the first of a row is predicted from those before it.
      mask: factor of each token's loss; that of a row's first token is not used. The mean is over
        all predicted tokens, so a mask whose mean is 1 gives the mean over the tokens that count.
        None counts all.
      segment_ids: see `GPT2.hidden`. They do not change the mask: the first token of a segment is
        predicted from the segment before it, and counts unless the mask says otherwise.
      positions: see `GPT2.hidden`.
      uniforms: random numbers from [0, 1), by which the targets are then drawn from the model's own
        predictions, which count as constants, and are not `tokens`. Sophia estimates the diagonal
        of the Gauss-Newton matrix with that.
    """
    x, tables = _hidden_and_tables(model, tokens, segment_ids, positions)
    size, wide = model.config.vocab_size, jnp.promote_types(x.dtype, jnp.float32)
    targets, cap = tokens[:, 1:], _cap(model)
    if uniforms is not None:
        constants = jax.lax.stop_gradient((x, tables))
        targets = cross_entropy.draw_targets(*constants, uniforms, size, cap=cap)
    weights = None if mask is None else mask[:, 1:].astype(wide)
    with jax.named_scope("loss"):  # by which `maxmars plan` tells the loss from the layers
        return cross_entropy.mean_loss(x, tables, targets, size, cap=cap, weights=weights)


def _cap(model: LanguageModel) -> cross_entropy.Cap | None:
    return model.cap_logits if isinstance(model, OwnModel) else None


def _hidden_and_tables(
    model: LanguageModel, tokens: Window, segment_ids: Window | None, positions: Window | None
) -> tuple[Float[Array, "B window-1 D"], Float[Array, "P V D"]]:
    """The hidden states of all tokens but the last of a row, which predicts nothing, and the output
    head for each part of the batch."""
    segment_ids, positions = (None if a is None else a[:, :-1] for a in (segment_ids, positions))
    rows: Any = {"segment_ids": segment_ids, "positions": positions}
    if isinstance(model, OwnModel):
        x = model.hidden(tokens[:, :-1], **rows)
        return x, copies(model.output_embedding(x.dtype))
    # GPT-2's look-up uses the copies, too, so that one gradient of its table crosses devices.
    tables = copies(model.output_embedding(model.config.compute_dtype))
    return model.hidden(tokens[:, :-1], **rows, tables=tables), tables
