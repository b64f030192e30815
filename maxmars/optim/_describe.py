"""Which parameter is what to an optimizer, as a table for people."""

import math
import warnings
from typing import Any

import jax

from maxmars.optim._matrices import MatrixSpec, resolve_specs


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
    flat = jax.tree.leaves_with_path(params)
    values = [jax.tree.structure(params).flatten_up_to(column) for column in columns.values()]
    for (path, leaf), spec, *row in zip(flat, specs, *values, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = "x".join(map(str, leaf.shape)) or "1"
        rows.append([name, shape, spec.kind, _matrix(spec, leaf.shape), *map(str, row)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _matrix(spec: MatrixSpec, shape: tuple[int, ...]) -> str:
    """What is orthogonalised by itself, such as `12 of 768 x 2304`; nothing for vectors."""
    if not spec.is_matrix:
        return ""
    view = spec.view(shape)
    stack, rows, cols = (
        math.prod(view[axis] for axis in axes)
        for axes in (spec.stack, spec.block_rows, spec.block_cols)
    )
    return f"{rows} x {cols}" if stack == 1 else f"{stack} of {rows} x {cols}"


def warn_without_specs(matrix_specs: Any, params: Any) -> None:
    """Warn of parameters of more than two axes for which no spec says what they are."""
    if matrix_specs is not None:
        return
    flat = jax.tree.leaves_with_path(params)
    many = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in flat
        if leaf.ndim > 2
    }
    if many:
        warnings.warn(
            "without matrix_specs these parameters count as vectors, and all of two axes as "
            f"matrices, stacked norms and biases too:\n{describe(many)}\nGive matrix_specs, a "
            "MatrixSpec for each parameter or None for a vector; describe(params, matrix_specs) "
            "shows what they say.",
            stacklevel=1,
        )
