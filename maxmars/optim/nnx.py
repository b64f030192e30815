"""What the parameters of a Flax NNX model are, from the layers that they belong to."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from maxmars.optim._matrices import MatrixSpec

_NORMS = nnx.LayerNorm | nnx.RMSNorm | nnx.BatchNorm | nnx.GroupNorm | nnx.InstanceNorm
# Of a table [tokens, width] as of the head's map from width to tokens.
_TABLE = MatrixSpec(rows=(1,), cols=(0,), embedding=True)


def matrix_specs_of(model: nnx.Module, wrt: Any = nnx.Param) -> Any:
    """One `MatrixSpec` per parameter of a model, for the `matrix_specs` of the optimizers.

    Known are Flax's linear, attention, convolution, embedding and norm layers. The default of the
    optimizers (each 2-D leaf is a matrix) would take the kernels of attention [width, heads,
    head_dim] and convolutions for vectors, and the biases of attention [heads, head_dim] for
    matrices. A parameter of your own with more than one axis says what it is:

    ```python
    self.mix = nnx.Param(values, matrix_spec=MatrixSpec(rows=(0,), cols=(1,)))
    self.gains = nnx.Param(values, matrix_spec=None)  # one vector
    ```

    and so may that of a layer (`nnx.Linear(..., kernel_metadata={"matrix_spec": ...})`). Leading
    axes beyond those of a layer or of such a spec stack layers, as `nnx.vmap` does.

    Args:
      model: the model, or its abstract form from `nnx.eval_shape`.
      wrt: which variables are optimized, as in `nnx.Optimizer`.

    Returns:
      A tree like `nnx.state(model, wrt)`; `nnx.to_pure_dict` makes it one of plain dicts.

    Raises:
      ValueError: a parameter of a layer that is not known here does not say what it is.
    """
    flat = [
        (path, _spec(model, path, variable))
        for path, variable in nnx.to_flat_state(nnx.state(model, wrt))
    ]
    return nnx.from_flat_state(flat)


def _spec(model: nnx.Module, path: tuple[Any, ...], variable: nnx.Variable) -> MatrixSpec:
    layer: Any = model
    for key in path[:-1]:
        layer = getattr(layer, key) if _has_attribute(layer, key) else layer[key]
    ndim, metadata = variable.ndim, variable.get_metadata()
    if "matrix_spec" in metadata:
        spec = metadata["matrix_spec"]
        return _vector(max(ndim, 1)) if spec is None else stacked(spec, ndim)
    if path[-1] == "kernel" and (spec := _kernel(layer)) is not None:
        return stacked(spec, ndim)
    if path[-1] == "embedding" and isinstance(layer, nnx.Embed):
        return stacked(_TABLE, ndim)
    if path[-1] in ("bias", "scale") and (axes := _vector_axes(layer)) is not None:
        return stacked(axes, ndim)
    if ndim > 1:
        name = ".".join(map(str, path))
        raise ValueError(
            f"{name} has shape {variable.shape} and belongs to a {type(layer).__name__}, so it is "
            "not known which of its axes form a matrix; say so by the variable's metadata, "
            "matrix_spec=MatrixSpec(...), or matrix_spec=None for a vector."
        )
    return _vector(1)


def _has_attribute(layer: Any, key: Any) -> bool:
    """A dict of layers may have a key `items`, which is no layer as an attribute."""
    return isinstance(key, str) and not isinstance(layer, dict) and hasattr(layer, key)


def _kernel(layer: Any) -> MatrixSpec | None:
    """The kernel of a layer that is not stacked; None for an unknown layer."""
    match layer:
        case nnx.Linear():
            return _matrix(0, 1, 1)
        case nnx.LinearGeneral():
            return _matrix(len(layer.batch_axis), len(layer.axis), len(layer.out_features))
        case nnx.ConvTranspose() if layer.transpose_kernel:  # [*space, out, in]
            *space, out, inputs = range(len(layer.kernel_size) + 2)
            return MatrixSpec(rows=(*space, inputs), cols=(out,))
        case nnx.Conv() | nnx.ConvTranspose():  # [*space, in, out]
            return _matrix(0, len(layer.kernel_size) + 1, 1)
    return None


def _vector_axes(layer: Any) -> MatrixSpec | None:
    """The bias or scale of a layer that is not stacked; None for an unknown layer."""
    if isinstance(layer, nnx.LinearGeneral):
        return _matrix(len(layer.batch_axis), 0, len(layer.out_features))
    if isinstance(layer, nnx.Linear | nnx.Conv | nnx.ConvTranspose | _NORMS):
        return _vector(1)
    return None


def _matrix(batch: int, rows: int, cols: int) -> MatrixSpec:
    """So many leading axes of each."""
    axes = range(batch + rows + cols)
    return MatrixSpec(
        batch=tuple(axes[:batch]),
        rows=tuple(axes[batch : batch + rows]),
        cols=tuple(axes[batch + rows :]),
    )


def _vector(ndim: int) -> MatrixSpec:
    return _matrix(0, 0, ndim)


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
