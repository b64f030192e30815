"""Facts about a model's parameters: shapes, named axes, shardings, matrices, kinds and count.

`Parameters` derives each of them once, from shapes alone. Whoever opens a run, a plan or a model
makes one and hands it on. A parameter's layer says which matrix it is; its kind and its component
of the model follow from that and from the names of its axes, never from its path.
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
from maxmars.config.errors import about
from maxmars.distributed.sharding import RULES, with_shardings
from maxmars.model import own_model
from maxmars.model.gpt2 import GPT2
from maxmars.optim import MatrixSpec
from maxmars.optim.nnx import stacked

COMPONENTS = ("embedding", "attention", "mlp", "vector")
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
    return nnx.eval_shape(lambda: _make_module(config, 0))  # shapes do not depend on the seed


def _make_module(config: ModelConfig, seed: int | jax.Array) -> nnx.Module:
    rngs = nnx.Rngs(jax.random.key(seed))
    if isinstance(config, GPT2Config):
        return GPT2(config, rngs=rngs)
    return own_model.make_module(config, rngs)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model. Trees are nested dicts, with an entry for each parameter.

    They are the same for any `compute_dtype` and `remat`, which a run may still have to choose.

    Raises, at the first access of a property:
      FileNotFoundError, ValueError: a module of the user's own is not as it should be.
    """

    model: ModelConfig
    mesh: Any = None
    """The `Mesh` that the parameters lie on; None for one device."""

    @functools.cached_property
    def abstract(self) -> dict[str, Any]:
        """Shapes and dtypes, as `jax.ShapeDtypeStruct`s without sharding."""
        state = nnx.to_pure_dict(nnx.state(abstract_module(self.model), nnx.Param))
        # Under `jax.set_mesh` the shapes carry shardings on an abstract mesh.
        return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), state)

    @functools.cached_property
    def axes(self) -> dict[str, Any]:
        """Names of the axes, a tuple of str or None for each parameter.

        Names: layers, embed, qkv, heads, head_dim, mlp, vocab, positions, norm.
        """
        flat = nnx.to_flat_state(nnx.state(abstract_module(self.model), nnx.Param))
        return nnx.traversals.unflatten_mapping(
            {path: tuple(variable.get_metadata("axes")) for path, variable in flat}
        )

    @functools.cached_property
    def shardings(self) -> dict[str, Any]:
        """`NamedSharding`s over the mesh, which must be given, by `sharding.RULES`.

        Raises:
          ValueError: the mesh does not divide a parameter.
        """

        def sharding(path: Any, shape: jax.ShapeDtypeStruct, axes: _Names) -> NamedSharding:
            spec = RULES.spec(*axes)
            parameter = jax.tree_util.keystr(path, simple=True, separator=".")
            for size, name, mesh_axis in zip(shape.shape, axes, spec, strict=True):
                if mesh_axis is not None and size % self.mesh.shape[mesh_axis]:
                    raise ValueError(
                        f"mesh.{mesh_axis}={self.mesh.shape[mesh_axis]} does not divide the axis "
                        f"{name} of {parameter}, whose shape is "
                        f"{list(shape.shape)}; choose another mesh.{mesh_axis} or another size."
                    )
            with about(f"{parameter} with the axes {list(axes)}"):
                return NamedSharding(self.mesh, spec)

        return jax.tree.map_with_path(sharding, self.abstract, self.axes)

    @functools.cached_property
    def sharded(self) -> dict[str, Any]:
        """`abstract` with `shardings`."""
        return with_shardings(self.abstract, self.shardings)

    @functools.cached_property
    def specs(self) -> dict[str, Any]:
        """`MatrixSpec`s, as the layers say them; on a mesh with partitions by `sharding.RULES`."""
        flat = nnx.to_flat_state(nnx.state(abstract_module(self.model), nnx.Param))
        by_layer = nnx.traversals.unflatten_mapping(
            {path: stacked(v.get_metadata("matrix_spec"), v.ndim) for path, v in flat}
        )
        if self.mesh is None:
            return by_layer

        def partitioned(spec: MatrixSpec, axes: _Names) -> MatrixSpec:
            return dataclasses.replace(spec, partition=RULES.spec(*axes))

        return jax.tree.map(partitioned, by_layer, self.axes)

    def split_specs(self, qkv: Literal["fused", "qkv", "heads"]) -> dict[str, Any]:
        """`specs` where the attention's input projection is one matrix ("fused"), three for
        queries, keys and values ("qkv"), or three for each head ("heads")."""
        names = {"fused": (), "qkv": ("qkv",), "heads": ("qkv", "heads")}[qkv]

        def split(spec: MatrixSpec, axes: _Names) -> MatrixSpec:
            # A module's own spec may say how its projection is split.
            if not spec.is_matrix or "qkv" not in axes or spec.split:
                return spec
            split_axes = tuple(axis for axis in spec.inner if axes[axis] in names)
            return dataclasses.replace(spec, split=split_axes)

        return jax.tree.map(split, self.specs, self.axes)

    @functools.cached_property
    def kinds(self) -> dict[str, Any]:
        """Kinds: matrix, embedding or vector."""
        return jax.tree.map(lambda spec: spec.kind, self.specs)

    @functools.cached_property
    def components(self) -> dict[str, Any]:
        """Components of the model, each one of `COMPONENTS`."""

        def component(kind: str, axes: _Names) -> str:
            if kind != "matrix":
                return kind
            return "attention" if "heads" in axes else "mlp"

        return jax.tree.map(component, self.kinds, self.axes)

    @functools.cached_property
    def remat_policies(self) -> tuple[str | None, ...]:
        """The policies of rematerialisation of the model, from the least arithmetic to the least
        memory; the first, None, keeps everything."""
        return (None, *getattr(abstract_module(self.model), "remat_policies", ()))

    @functools.cached_property
    def count(self) -> int:
        """Number of parameters, tied embeddings counted once, vocabulary padding included."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract))

    @functools.cached_property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward pass a token: 6 N + 12 A T, as in PaLM (2204.02311, B).

        N is the number of parameters; of several tables of the vocabulary only the largest counts,
        since an input embedding beside an output head is looked up and multiplies nothing. T is
        `max_seq_len`. A is the width of attention, summed over the layers (L d in GPT-2) that have
        a parameter whose axes end with heads, head_dim, embed.
        """
        tables, width = [0], 0
        names = jax.tree.leaves(self.axes, is_leaf=lambda x: isinstance(x, tuple))
        for leaf, axes in zip(jax.tree.leaves(self.abstract), names, strict=True):
            if "vocab" in axes and len(axes) > 1:
                tables.append(leaf.size)
            if axes[-3:] == ("heads", "head_dim", "embed"):
                width += math.prod(leaf.shape[:-1])
        counted = self.count - sum(tables) + max(tables)  # look-ups multiply nothing
        return 6 * counted + 12 * width * self.model.max_seq_len
