"""Specs of parameters: which axes form a matrix, a stack of matrices, or vectors.

A `MatrixSpec` is all that an optimizer knows of a parameter beside its array. `resolve_specs` makes
one for each parameter from what a user gives: nothing, a prefix of the tree, a function, or optax's
`MuonDimensionNumbers`. `describe` shows them in a table.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers


@dataclass(frozen=True, kw_only=True)
class MatrixSpec:
    """The axes of a parameter that form one matrix.

    A dense layer's kernel [in, out] is `MatrixSpec(rows=(0,), cols=(1,))`; the same for a stack of
    layers [layers, in, out] is `MatrixSpec(batch=(0,), rows=(1,), cols=(2,))`; a fused projection
    stored [layers, embed, 3, heads, head_dim] has `cols=(2, 3, 4)`. Every rule that is per matrix
    (the clip, an orthogonalisation) is then applied to each matrix of the stack by itself.

    Without rows it describes vectors: a stack of biases [layers, width] is
    `MatrixSpec(batch=(0,), rows=(), cols=(1,))`.

    `split` cuts each matrix into blocks that are orthogonalised by themselves, while every other
    rule still sees the whole matrix. For the fused projection above: `()` keeps it whole, `(2,)`
    makes three blocks (queries, keys, values), `(2, 3)` makes three for each head.
    """

    batch: tuple[int, ...] = ()
    """Axes that stack independent matrices."""
    rows: tuple[int, ...]
    """Input axes."""
    cols: tuple[int, ...]
    """Output axes."""
    partition: PartitionSpec | None = None
    """Partition of the parameter over the mesh, which a traced array does not know."""
    split: tuple[int, ...] = ()
    """Axes of `rows` or `cols` that stack blocks when the matrix is orthogonalised."""
    embedding: bool = False
    """Whether the parameter is a table of vectors, which matrix rules may leave to AdamW."""
    padding: int = 0
    """Number of padding entries at the end of the output axis, such as tokens that fill up a
    vocabulary. They do not count where the shape of a matrix scales its update."""

    def __post_init__(self) -> None:
        """Reject axes that stand twice, are missing or cannot be split."""
        axes = (*self.batch, *self.rows, *self.cols)
        if sorted(axes) != list(range(len(axes))):
            raise ValueError(
                f"{self} must name each axis from 0 to {len(axes) - 1} exactly once, "
                "in batch, rows or cols."
            )
        if not self.cols:
            raise ValueError(f"{self} has no output axes: put at least one axis into cols.")
        if not set(self.split) <= set(self.inner) or len(set(self.split)) < len(self.split):
            raise ValueError(
                f"split={self.split} of {self} must name axes of rows or cols, each once; an axis "
                "that stacks whole matrices belongs into batch."
            )
        if self.split and not (self.block_rows and self.block_cols):
            raise ValueError(
                f"split={self.split} of {self} leaves no rows or no cols in a block; keep at least "
                "one axis of each out of split."
            )
        if self.padding and (len(self.cols) > 1 or self.split):
            raise ValueError(
                f"padding={self.padding} of {self} needs a single axis in cols and no split."
            )
        if self.partition is not None and len(self.partition) > self.ndim:
            raise ValueError(
                f"partition={self.partition} of {self} has {len(self.partition)} entries for "
                f"{self.ndim} axes; give at most one entry per axis."
            )

    @property
    def is_matrix(self) -> bool:
        """Whether the axes form matrices, not vectors."""
        return bool(self.rows)

    @property
    def kind(self) -> Literal["matrix", "embedding", "vector"]:
        """Kind of the parameter, by which optimizers choose a rule."""
        if not self.is_matrix:
            return "vector"
        return "embedding" if self.embedding else "matrix"

    @property
    def inner(self) -> tuple[int, ...]:
        """The axes of one matrix (or vector)."""
        return (*self.rows, *self.cols)

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes that stack blocks; each block is orthogonalised by itself."""
        return (*self.batch, *self.split)

    @property
    def block_rows(self) -> tuple[int, ...]:
        """The input axes of a block."""
        return tuple(axis for axis in self.rows if axis not in self.split)

    @property
    def block_cols(self) -> tuple[int, ...]:
        """The output axes of a block."""
        return tuple(axis for axis in self.cols if axis not in self.split)

    @property
    def ndim(self) -> int:
        """Number of axes of the parameter."""
        return len(self.batch) + len(self.inner)


def vector_spec(ndim: int) -> MatrixSpec:
    """The spec of one vector whose parameter has `ndim` axes."""
    return MatrixSpec(rows=(), cols=tuple(range(max(ndim, 1))))  # a scalar is one element


def resolve_specs(specs: Any, params: Any) -> Any:
    """Make one `MatrixSpec` per parameter.

    Args:
      specs: None, which makes each 2-D parameter a matrix [in, out] and any other a vector; or a
        pytree prefix of `params` whose leaves are `MatrixSpec`s, optax's `MuonDimensionNumbers`
        (whose other axes are `batch`), or None for a vector; or a function from parameters to one.
      params: the parameters, arrays or abstract.

    Returns:
      A pytree like `params` of `MatrixSpec`s.

    Raises:
      ValueError: a parameter has no spec, or one of another number of axes, or is complex.
    """
    _refuse_complex(params)
    if not jax.tree.leaves(params):  # `optax.tree.map_params` calls `init` with such a tree
        specs = None
    if is_function(specs):
        specs = specs(params)
    if specs is None:
        matrix = MatrixSpec(rows=(0,), cols=(1,))
        return jax.tree.map(lambda p: matrix if p.ndim == 2 else vector_spec(p.ndim), params)

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, MatrixSpec | MuonDimensionNumbers)

    check_prefix("matrix_specs", specs, params, is_leaf)

    def resolve(spec: Any, subtree: Any) -> Any:
        return jax.tree.map(lambda p: _spec_of(spec, p), subtree)

    return jax.tree.map(resolve, specs, params, is_leaf=is_leaf)


def check_prefix(
    name: str, prefix: Any, params: Any, is_leaf: Callable[[Any], bool] | None = None
) -> None:
    """Raise ValueError unless a tree has a leaf for each parameter, or for a tree of them."""
    try:
        jax.tree.map(lambda *_: None, prefix, params, is_leaf=is_leaf)
    except ValueError as error:
        # JAX names the structures of both trees, which are pages long for a model: find the paths.
        given, wanted = _paths(prefix, is_leaf), _paths(params)
        missing = [path for path in wanted if not any(path[: len(p)] == p for p in given)]
        unknown = [path for path in given if not any(p[: len(path)] == path for p in wanted)]
        if missing:
            problem = f"has nothing for {_listed(missing)}"
        elif unknown:
            problem = f"names {_listed(unknown)}, which the parameters do not have"
        else:
            problem = " ".join(str(error).split())
        raise ValueError(
            f"{name} {problem}; it must be a tree like the parameters, or a prefix of one."
        ) from None


def _paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, ...]]:
    """The names of the keys on the way to each leaf."""
    return [
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for path, _ in jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    ]


def _listed(paths: list[tuple[str, ...]]) -> str:
    return ", ".join(map(".".join, paths))


def is_function(x: Any) -> bool:
    """Whether `x` is a function, and not a tree that can be called, such as a module of specs."""
    leaves = jax.tree.leaves(x)
    return bool(leaves) and all(map(callable, leaves))


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths as text: `layers.0.kernel`.

    A box around one array, such as a Variable of Flax, whose only child is `value`, is left out of
    the path.
    """
    flat = jax.tree.leaves_with_path(tree)
    num_leaves = Counter(path[:depth] for path, _ in flat for depth in range(len(path)))
    named = []
    for path, leaf in flat:
        if path and path[-1] == jax.tree_util.GetAttrKey("value") and num_leaves[path[:-1]] == 1:
            path = path[:-1]
        named.append((jax.tree_util.keystr(path, simple=True, separator="."), leaf))
    return named


def _refuse_complex(params: Any) -> None:
    for name, leaf in named_leaves(params):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(
                f"{name} is {leaf.dtype}, but second moments and matrices here are of "
                "real numbers; wrap the optimizer in optax.contrib.split_real_and_imaginary."
            )


def _spec_of(spec: Any, param: Any) -> MatrixSpec:
    if spec is None:
        return vector_spec(param.ndim)
    if isinstance(spec, MuonDimensionNumbers):
        spec = _of_dimension_numbers(spec, param.ndim)
    if not isinstance(spec, MatrixSpec):
        raise ValueError(
            f"matrix_specs has {spec!r} for a parameter of shape {param.shape}; give a MatrixSpec, "
            "or None for a vector."
        )
    vectors = not (spec.batch or spec.rows)
    if spec.ndim != (max(param.ndim, 1) if vectors else param.ndim):  # a scalar is one element
        raise ValueError(
            f"{spec} describes {spec.ndim} axes, but its parameter has shape {param.shape}; "
            "name each of its axes in batch, rows or cols."
        )
    return spec


def _of_dimension_numbers(numbers: MuonDimensionNumbers, ndim: int) -> MatrixSpec:
    rows, cols = (  # optax has an axis or several, also counted from the end
        tuple(axis + ndim if axis < 0 else axis for axis in np.atleast_1d(axes).tolist())
        for axes in numbers
    )
    batch = (axis for axis in range(ndim) if axis not in {*rows, *cols})
    return MatrixSpec(batch=tuple(batch), rows=rows, cols=cols)


def describe(params: Any, matrix_specs: Any = None, **columns: Any) -> str:
    """A table with a row for each parameter: its path, shape, kind and matrix.

    ```python
    print(describe(params, specs, decays=mask))
    ```

    The kind is `matrix`, `embedding` or `vector`, as `mars`, `muon` and `soap` tell them apart. A
    matrix is written rows x cols, its stack before it: [12, 768, 3, 12, 64] with batch (0,), rows
    (1,) and cols (2, 3, 4) is `12 of 768 x 2304`.

    Args:
      params: the parameters, arrays or abstract.
      matrix_specs: what the optimizer is given, see `mars`.
      columns: further columns, each a pytree like `params` of any values.

    Returns:
      The lines of the table, without a line break at its end.

    Raises:
      ValueError: a spec does not describe its parameter, or a column is not like `params`.
    """
    specs = jax.tree.leaves(
        resolve_specs(matrix_specs, params), is_leaf=lambda x: isinstance(x, MatrixSpec)
    )
    rows = [["parameter", "shape", "kind", "matrix", *columns]]
    values = [jax.tree.structure(params).flatten_up_to(column) for column in columns.values()]
    for (name, leaf), spec, *row in zip(named_leaves(params), specs, *values, strict=True):
        shape = "x".join(map(str, leaf.shape)) or "1"
        rows.append([name, shape, spec.kind, _describe_matrix(spec, leaf.shape), *map(str, row)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _describe_matrix(spec: MatrixSpec, shape: tuple[int, ...]) -> str:
    """Number and shape of the blocks, such as `12 of 768 x 2304`; empty for vectors."""
    if not spec.is_matrix:
        return ""
    stack, rows, cols = (
        math.prod(shape[axis] for axis in axes)
        for axes in (spec.stack, spec.block_rows, spec.block_cols)
    )
    return f"{rows} x {cols}" if stack == 1 else f"{stack} of {rows} x {cols}"


def warn_without_specs(matrix_specs: Any, params: Any) -> None:
    """Warn of parameters with more than two axes, which count as vectors without specs."""
    if matrix_specs is not None:
        return
    ambiguous = {name: x for name, x in named_leaves(params) if x.ndim > 2}
    if ambiguous:
        warnings.warn(
            "without matrix_specs these parameters count as vectors, and all of two axes as "
            f"matrices, stacked norms and biases too:\n{describe(ambiguous)}\nGive matrix_specs, a "
            "MatrixSpec for each parameter or None for a vector; describe(params, matrix_specs) "
            "shows what they say.",
            stacklevel=1,
        )
