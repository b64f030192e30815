"""What the parameters of a model are: shapes, named axes, shardings, matrices, kinds and count.

`Parameters` derives each of them once, from shapes alone. Whoever opens a run, a plan or a model
makes one and hands it on. The matrix of a parameter, its kind and its part of the model follow from
the names of its axes, never from its number of dimensions or its path.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import NamedSharding

from maxmars.config import GPT2Config, ModelConfig
from maxmars.distributed.sharding import RULES, with_shardings
from maxmars.model import own_model
from maxmars.model.gpt2 import GPT2, LAYERS
from maxmars.optim import MatrixSpec
from maxmars.optim.nnx import given_specs, stacked

PARTS = ("embedding", "attention", "mlp", "vector")
"""Embeddings, matrices with an axis of heads, other matrices, and norms and biases."""

_Names = tuple[str | None, ...]


def init_params(config: ModelConfig, seed: int | jax.Array) -> dict[str, Any]:
    """Initial parameters as a nested dict; `jax.jit` it with shardings for a large model."""
    return nnx.to_pure_dict(nnx.state(_make_module(config, seed), nnx.Param))


@functools.cache
def abstract_module(config: ModelConfig) -> nnx.Module:
    """A model's module, whose arrays are `jax.ShapeDtypeStruct`s.

    Raises:
      FileNotFoundError, ValueError: a module of the user's own is not as it should be; see
        `own_model.make_module`.
    """
    return nnx.eval_shape(lambda: _make_module(config, 0))


def _make_module(config: ModelConfig, seed: int | jax.Array) -> nnx.Module:
    rngs = nnx.Rngs(jax.random.key(seed))
    if isinstance(config, GPT2Config):
        return GPT2(config, rngs=rngs)
    return own_model.make_module(config, rngs)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model. Trees are nested dicts like the parameters.

    They are the same for any `compute_dtype` and `remat`, which a run may still have to choose.

    Raises, where something is asked for the first time:
      FileNotFoundError, ValueError: a module of the user's own is not as it should be.
    """

    model: ModelConfig
    mesh: Any = None
    """The `Mesh` that they lie on; None of one device."""

    @functools.cached_property
    def abstract(self) -> dict[str, Any]:
        """A `jax.ShapeDtypeStruct` of each, without sharding."""
        state = nnx.to_pure_dict(nnx.state(abstract_module(self.model), nnx.Param))
        # Under `jax.set_mesh` the shapes carry shardings on an abstract mesh.
        return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), state)

    @functools.cached_property
    def axes(self) -> dict[str, Any]:
        """The names of the axes of each, a tuple of str or None.

        Names: layers, embed, qkv, heads, head_dim, mlp, vocab, positions, norm.
        """
        flat = nnx.to_flat_state(nnx.state(abstract_module(self.model), nnx.Param))
        return nnx.traversals.unflatten_mapping(
            {path: tuple(variable.get_metadata("axes")) for path, variable in flat}
        )

    @functools.cached_property
    def shardings(self) -> dict[str, Any]:
        """The `NamedSharding` of each over the mesh, which there must be, by `sharding.RULES`.

        Raises:
          ValueError: the mesh does not divide a parameter.
        """

        def sharding(path: Any, shape: jax.ShapeDtypeStruct, axes: _Names) -> NamedSharding:
            spec = RULES.spec(*axes)
            for size, name, parts in zip(shape.shape, axes, spec, strict=True):
                if parts is not None and size % self.mesh.shape[parts]:
                    raise ValueError(
                        f"mesh.{parts}={self.mesh.shape[parts]} does not divide the axis {name} of "
                        f"{jax.tree_util.keystr(path, simple=True, separator='.')}, whose shape is "
                        f"{list(shape.shape)}; choose another mesh.{parts} or another size."
                    )
            return NamedSharding(self.mesh, spec)

        return jax.tree.map_with_path(sharding, self.abstract, self.axes)

    @functools.cached_property
    def on_mesh(self) -> dict[str, Any]:
        """`abstract` with `shardings`."""
        return with_shardings(self.abstract, self.shardings)

    @functools.cached_property
    def specs(self) -> dict[str, Any]:
        """The `MatrixSpec` of each, with its partition by `sharding.RULES` if there is a mesh.

        It follows from the names of the axes, `layers` aside:

        * an axis `vocab` or `positions` and others: an embedding, which maps from the others in a
          head;
        * `embed` first or last, and others: a matrix, which maps from `embed` or to it;
        * one axis, or only qkv, heads and head_dim (a bias of attention): a vector.

        A parameter of the user's own may say it by its metadata `matrix_spec`, as for
        `maxmars.optim.nnx.matrix_specs_of`; there and here a convolution in groups is a matrix for
        each group, and a depthwise one a vector.

        Raises:
          ValueError: the names do not say it, and neither does `matrix_spec`.
        """
        return self.split_specs("fused")

    def split_specs(self, qkv: Literal["fused", "qkv", "heads"]) -> dict[str, Any]:
        """`specs` where the attention's input projection is one matrix ("fused"), three for
        queries, keys and values ("qkv"), or three for each head ("heads")."""
        split_names = {"fused": (), "qkv": ("qkv",), "heads": ("qkv", "heads")}[qkv]
        given = given_specs(abstract_module(self.model))

        def spec(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct, axes: _Names) -> MatrixSpec:
            keys = tuple(key.key for key in path)
            partition = None if self.mesh is None else RULES.spec(*axes)
            if (found := given.get(keys)) is not None:
                return dataclasses.replace(stacked(found, len(axes)), partition=partition)
            batch, rows, cols = _vector(axes) if keys in given else _matrix(axes, keys)
            embedding = bool(rows) and axes[cols[0]] in _TABLES
            width = shape.shape[cols[0]]
            split = [i for i, name in enumerate(axes) if name in split_names]
            return MatrixSpec(
                batch=batch,
                rows=rows,
                cols=cols,
                partition=partition,
                split=tuple(split) if rows and "qkv" in axes else (),
                embedding=embedding,
                padding=width - self.model.vocab_size if embedding and "vocab" in axes else 0,
            )

        return jax.tree.map_with_path(spec, self.abstract, self.axes)

    @functools.cached_property
    def kinds(self) -> dict[str, Any]:
        """The kind of each: matrix, embedding or vector."""
        return jax.tree.map(lambda spec: spec.kind, self.specs)

    @functools.cached_property
    def parts(self) -> dict[str, Any]:
        """The part of the model that each belongs to, one of `PARTS`."""

        def part(kind: str, axes: _Names) -> str:
            if kind != "matrix":
                return kind
            return "attention" if "heads" in axes else "mlp"

        return jax.tree.map(part, self.kinds, self.axes)

    @functools.cached_property
    def count(self) -> int:
        """How many numbers they are, tied embeddings counted once, vocabulary padding included."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract))

    @functools.cached_property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward pass a token: 6 N + 12 A T, as in PaLM (2204.02311, B).

        N are all parameters; of several tables of the vocabulary only the largest counts, since the
        input embedding of a model with a head of its own multiplies nothing. T is `max_seq_len`. A,
        the width of attention summed over the layers (L d in GPT-2), is that of the parameters
        whose axes end with heads, head_dim, embed; attention without such a projection counts
        nothing.
        """
        tables, width = [0], 0
        names = jax.tree.leaves(self.axes, is_leaf=lambda x: isinstance(x, tuple))
        for leaf, axes in zip(jax.tree.leaves(self.abstract), names, strict=True):
            if "vocab" in axes and len(axes) > 1:
                tables.append(leaf.size)
            if axes[-3:] == ("heads", "head_dim", "embed"):
                width += math.prod(leaf.shape[:-1])
        counted = self.count - sum(tables) + max(tables)
        return 6 * counted + 12 * width * self.model.max_seq_len


_TABLES = ("vocab", "positions")
_Axes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _vector(axes: _Names) -> _Axes:
    """Axes that stack layers, no rows, and all others."""
    layers = int(axes[:1] == (LAYERS,) and len(axes) > 1)
    return tuple(range(layers)), (), tuple(range(layers, max(len(axes), 1)))


def _matrix(axes: _Names, keys: tuple[Any, ...]) -> _Axes:
    """Axes that stack layers, input axes and output axes, by the rules of `Parameters.specs`."""
    layers, _, others = _vector(axes)
    names = axes[len(layers) :]
    if len(names) <= 1 or set(names) <= {"qkv", "heads", "head_dim"}:
        return layers, (), others
    for i, name in zip(others, names, strict=True):
        if name in _TABLES:
            return layers, tuple(axis for axis in others if axis != i), (i,)
    if names[0] == "embed":
        return layers, others[:1], others[1:]
    if names[-1] == "embed":
        return layers, others[:-1], others[-1:]
    raise ValueError(
        f"the axes {list(axes)} of {'.'.join(map(str, keys))} do not say whether it is a matrix: "
        "neither the first nor the last one is embed; say so in the parameter's metadata, "
        "matrix_spec=MatrixSpec(...), or matrix_spec=None for a vector."
    )
