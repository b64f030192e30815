"""`MatrixSpec`s of a Flax NNX model's parameters, from the layers that they belong to.

What a matrix is follows from a layer's class and the parameter's name; a parameter's own metadata
comes before that, and a caller's `overrides` before all.

Under `nnx.Optimizer`, exact MARS keeps the parameters of the previous step in a clone of the model:

```python
optimizer = nnx.Optimizer(model, mars(3e-3, exact=True), wrt=nnx.Param)
previous = nnx.clone(model)
gradient = nnx.grad(loss)
for batch in batches:
    grads, prev_grads = gradient(model, batch), gradient(previous, batch)
    nnx.update(previous, nnx.state(model))
    optimizer.update(model, grads, prev_grads=prev_grads)
```
"""

import dataclasses
import fnmatch
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from maxmars.optim._matrices import MatrixSpec, named_leaves, vector_spec

_CONVOLUTIONS = nnx.Conv | nnx.ConvTranspose
_NORMS = nnx.LayerNorm | nnx.RMSNorm | nnx.BatchNorm | nnx.GroupNorm | nnx.InstanceNorm
_WITH_VECTORS = nnx.Linear | _CONVOLUTIONS | _NORMS
# A table [tokens, width] is also a head, which maps from width to tokens.
_TABLE = MatrixSpec(rows=(1,), cols=(0,), embedding=True)


def matrix_specs_of(
    model: Any,
    wrt: Any = nnx.Param,
    *,
    overrides: Mapping[str, MatrixSpec | None] | None = None,
    fallback: Callable[[str, Any], MatrixSpec | None] | None = None,
) -> Any:
    """Make one `MatrixSpec` per parameter of a model, for the `matrix_specs` of the optimizers.

    Flax NNX's linear, attention, convolution, embedding and norm layers are known. The default of
    the optimizers (each 2-D leaf is a matrix) would take the kernels of attention [width, heads,
    head_dim] and of convolutions for vectors, and the biases of attention [heads, head_dim] for
    matrices. The kernel of a grouped convolution counts as a vector, which AdamW takes. Give a
    parameter of your own with more than one axis its spec as metadata:

    ```python
    self.mix = nnx.Param(values, matrix_spec=MatrixSpec(rows=(0,), cols=(1,)))
    self.gains = nnx.Param(values, matrix_spec=None)  # one vector
    ```

    A layer's parameter can have it too (`nnx.Linear(..., kernel_metadata={"matrix_spec": ...})`).
    Leading axes beyond those of a layer or of such a spec stack layers, as `nnx.vmap` does.

    For other layers, and for trees of arrays such as those of Flax Linen or Equinox, give specs
    by path: `overrides` come first of all, `fallback` last.

    ```python
    specs = matrix_specs_of(  # Equinox: a linear layer's weight is [out, in]
        module,
        overrides={"embedding.weight": MatrixSpec(rows=(1,), cols=(0,), embedding=True)},
        fallback=lambda path, array: MatrixSpec(rows=(1,), cols=(0,)),
    )
    ```

    Args:
      model: the model, or its abstract form from `nnx.eval_shape`; or any tree of arrays.
      wrt: which variables of an NNX model are optimized, as in `nnx.Optimizer`.
      overrides: a spec, or None for a vector, by path in the model ("layers.0.kernel"), which may
        have the wildcards of `fnmatch`. Of several that match, the first counts.
      fallback: function from a path and its array (or variable), which has more than one axis and
        no spec yet, to its spec, or None for a vector.

    Returns:
      A tree like `nnx.state(model, wrt)`, which `nnx.to_pure_dict` turns into plain dicts. For a
      tree of arrays, a tree like it, with None for all but arrays of real numbers.

    Raises:
      ValueError: nothing says what a parameter is, or an override is of none.
    """
    overrides, used, names = overrides or {}, set(), []

    def spec(name: str, leaf: Any, known: MatrixSpec | None, owner: str = "") -> MatrixSpec:
        # All patterns that match count as used, also those behind the first.
        matching = [pattern for pattern in overrides if fnmatch.fnmatchcase(name, pattern)]
        used.update(matching)
        names.append(name)
        if matching:
            return _given(overrides[matching[0]], leaf.ndim)
        if known is not None or leaf.ndim <= 1:
            return known or vector_spec(1)
        if fallback is not None:
            return _given(fallback(name, leaf), leaf.ndim)
        raise ValueError(
            f"{name} has shape {leaf.shape}{owner}, so it is not known which of its axes form a "
            f"matrix; say so by overrides={{{name!r}: MatrixSpec(...)}}, None for a vector, or by "
            "a fallback, or in NNX by the variable's metadata, matrix_spec=MatrixSpec(...)."
        )

    def of_leaf(name: str, leaf: Any) -> MatrixSpec | None:
        if not hasattr(leaf, "ndim") or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return None
        return spec(name, leaf, None)

    if isinstance(model, nnx.Pytree):
        given = given_specs(model, wrt)
        flat = []
        for path, variable in nnx.to_flat_state(nnx.state(model, wrt)):
            layer = _layer(model, path)
            if path in given:
                known = _given(given[path], variable.ndim)
            else:
                known = _layer_spec(layer, path[-1], variable.ndim)
            owner = f" and belongs to a {type(layer).__name__}"
            flat.append((path, spec(".".join(map(str, path)), variable, known, owner)))
        specs = nnx.from_flat_state(flat)
    else:
        each = [of_leaf(name, leaf) for name, leaf in named_leaves(model)]
        specs = jax.tree.unflatten(jax.tree.structure(model), each)
    if unused := [pattern for pattern in overrides if pattern not in used]:
        raise ValueError(
            f"overrides names {', '.join(unused)}, but the parameters are {', '.join(names)}."
        )
    return specs


def given_specs(model: Any, wrt: Any = nnx.Param) -> dict[tuple[Any, ...], MatrixSpec | None]:
    """Specs by path that names of axes cannot tell: those in the metadata `matrix_spec` of
    parameters, None for a vector, and vectors for the kernels of grouped convolutions."""
    specs = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, wrt)):
        metadata, layer = variable.get_metadata(), _layer(model, path)
        if "matrix_spec" in metadata:
            specs[path] = metadata["matrix_spec"]
        elif path[-1] == "kernel" and isinstance(layer, _CONVOLUTIONS) and _groups(layer) > 1:
            if _groups(layer) < layer.in_features:  # a depthwise one has nothing of a matrix
                warnings.warn(
                    f"{'.'.join(map(str, path))} is the kernel of a convolution in "
                    f"{_groups(layer)} groups, which is no matrix: AdamW takes it, unless it has a "
                    "MatrixSpec of its own (overrides, or the variable's matrix_spec).",
                    stacklevel=2,
                )
            specs[path] = vector_spec(len(layer.kernel_size) + 2)
    return specs


def _given(spec: MatrixSpec | None, ndim: int) -> MatrixSpec:
    return vector_spec(ndim) if spec is None else stacked(spec, ndim)


def _layer(model: Any, path: tuple[Any, ...]) -> Any:
    """The layer that a variable belongs to."""
    layer = model
    for key in path[:-1]:
        layer = getattr(layer, key) if _has_attribute(layer, key) else layer[key]
    return layer


def _layer_spec(layer: Any, name: Any, ndim: int) -> MatrixSpec | None:
    """The spec of a layer's parameter of this name; None for an unknown layer."""
    match name, layer:
        case "kernel", nnx.Linear():
            spec = _matrix(0, 1, 1)
        case "kernel", nnx.LinearGeneral():
            spec = _matrix(len(layer.batch_axis), len(layer.axis), len(layer.out_features))
        case "kernel", nnx.Conv() | nnx.ConvTranspose():
            spec = _convolution(layer)
        case "embedding", nnx.Embed():
            spec = _TABLE
        case "bias", nnx.LinearGeneral():  # a bias for each batch, with all output axes
            spec = _matrix(len(layer.batch_axis), 0, len(layer.out_features))
        case "bias" | "scale", _ if isinstance(layer, _WITH_VECTORS):
            spec = vector_spec(1)
        case _:
            return None
    return stacked(spec, ndim)


def _has_attribute(layer: Any, key: Any) -> bool:
    """Whether a key is an attribute of a layer; a dict of layers may have the key `items`."""
    return isinstance(key, str) and not isinstance(layer, dict) and hasattr(layer, key)


def _groups(layer: Any) -> int:
    return getattr(layer, "feature_group_count", 1)  # Flax 0.12's ConvTranspose has none


def _convolution(layer: Any) -> MatrixSpec:
    """The kernel [*space, in, out], or [*space, out, in] where it is transposed."""
    *space, inner, last = range(len(layer.kernel_size) + 2)
    rows, cols = (last, inner) if getattr(layer, "transpose_kernel", False) else (inner, last)
    return MatrixSpec(rows=(*space, rows), cols=(cols,))


def _matrix(batch: int, rows: int, cols: int) -> MatrixSpec:
    """The spec with this many axes each of `batch`, `rows` and `cols`, in this order."""
    axes = range(batch + rows + cols)
    return MatrixSpec(
        batch=tuple(axes[:batch]),
        rows=tuple(axes[batch : batch + rows]),
        cols=tuple(axes[batch + rows :]),
    )


def stacked(spec: MatrixSpec, ndim: int) -> MatrixSpec:
    """The spec of a parameter that has further axes before those of `spec`."""
    extra = max(ndim - spec.ndim, 0)

    def shifted(axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(axis + extra for axis in axes)

    partition = spec.partition
    if partition is not None:
        partition = PartitionSpec(*[None] * extra, *partition)
    return dataclasses.replace(
        spec,
        batch=(*range(extra), *shifted(spec.batch)),
        rows=shifted(spec.rows),
        cols=shifted(spec.cols),
        split=shifted(spec.split),
        partition=partition,
    )
