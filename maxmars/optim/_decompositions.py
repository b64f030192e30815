"""QR and eigenvectors of stacks of small matrices, where a linear algebra library may block.

On CPU, `jnp.linalg` calls LAPACK. In jaxlib before 0.11.2 such a call waits for work that it hands
to the pool of threads it runs in itself: a program with as many independent calls as the pool has
threads can block for ever (24 QR decompositions on two cores do, and two on two fake devices).
There, these functions use what XLA compiles itself; everywhere else they are `jnp.linalg`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

_LAPACK_MAY_BLOCK = jax.__version_info__ < (0, 11, 2)
_MAX_SWEEPS = 30  # about ten do for a thousand rows

Square = Float[Array, "stack side side"]


def orthonormal_columns(x: Square) -> Square:
    """Q of the QR decomposition of each matrix of a stack."""
    if not _LAPACK_MAY_BLOCK:
        return _library_qr(x)
    return lax.platform_dependent(x, cpu=xla_qr, default=_library_qr)


def eigenvectors(x: Square) -> Square:
    """Eigenvectors of each symmetric matrix of a stack in columns, eigenvalues falling."""
    if not _LAPACK_MAY_BLOCK:
        return _library_eigenvectors(x)
    return lax.platform_dependent(x, cpu=jacobi_eigenvectors, default=_library_eigenvectors)


def _library_qr(x: Square) -> Square:
    return jnp.linalg.qr(x)[0]


def _library_eigenvectors(x: Square) -> Square:
    return jnp.linalg.eigh(x)[1][..., ::-1]


def xla_qr(x: Square) -> Square:
    """Q by the Householder decomposition that XLA expands, as JAX has it do on TPU."""

    def call(target: str, result: Any, *arguments: jax.Array) -> Any:
        call = jax.ffi.ffi_call(
            target,
            result,
            vmap_method="broadcast_all",  # both take any number of stacked axes
            custom_call_api_version=1,
            legacy_backend_config="",
        )
        return call(*arguments)

    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    taus = jax.ShapeDtypeStruct(x.shape[:-1], x.dtype)
    reflectors = call("Qr", (like_x, taus), x)
    q = call("ProductOfElementaryHouseholderReflectors", like_x, *reflectors)
    # A custom call forgets the mesh axes over which x varies; the choice, which is q, knows them.
    return jnp.where(jnp.isnan(x), x, q)


def jacobi_eigenvectors(x: Square) -> Square:
    """Eigenvectors by cyclic Jacobi rotations, as many at once as are independent.

    A round rotates row i of the upper half with row i of the lower half, for every i; then the rows
    change places as players do in a round-robin tournament (Brent and Luk, 1985), so that a sweep
    of `side - 1` rounds lets every two meet and ends with all back in their places.
    """
    side = x.shape[-1]
    even = side + side % 2
    padded = jnp.pad(x, ((0, 0), (0, even - side), (0, even - side)))
    identity = jnp.zeros_like(padded) + jnp.eye(even, dtype=x.dtype)
    seats = _next_seats(even)

    def rotate(_: Any, pair: tuple[Square, Square]) -> tuple[Square, Square]:
        return _rotate(*pair, seats)

    def sweep(state: tuple[Any, ...]) -> tuple[Any, ...]:
        sweeps, matrix, vectors = state
        rotated = lax.fori_loop(0, even - 1, rotate, (matrix, vectors))
        return sweeps + 1, *rotated

    def unfinished(state: tuple[Any, ...]) -> jax.Array:
        return (state[0] < _MAX_SWEEPS) & ~jnp.all(_is_diagonal(state[1]))

    _, matrix, vectors = lax.while_loop(unfinished, sweep, (0, padded, identity))
    eigenvalues = jnp.diagonal(matrix, axis1=1, axis2=2)[:, :side]
    order = jnp.argsort(eigenvalues, axis=-1, descending=True)
    return jnp.take_along_axis(vectors[:, :side, :side].mT, order[:, None, :], axis=-1)


def _next_seats(even: int) -> np.ndarray:
    """Who sits at each place after a round: place 0 stays, the others move on around the table."""
    top, bottom = np.split(np.arange(even), 2)
    if len(top) == 1:
        return np.arange(even)
    return np.concatenate([top[:1], bottom[:1], top[1:-1], bottom[1:], top[-1:]])


def _rotate(matrix: Square, vectors: Square, seats: np.ndarray) -> tuple[Square, Square]:
    """A round: makes the entries (i, i + half) of the matrix zero; vectors are in rows."""
    half = matrix.shape[-1] // 2
    p, q = jnp.split(jnp.diagonal(matrix, axis1=1, axis2=2), 2, axis=-1)
    between = jnp.diagonal(matrix[:, :half, half:], axis1=1, axis2=2)
    coupled = between != 0
    cotangent = (q - p) / jnp.where(coupled, 2 * between, 1)  # of twice the angle
    sign = jnp.where(cotangent >= 0, 1, -1)
    tangent = sign / (jnp.abs(cotangent) + jnp.sqrt(1 + jnp.square(cotangent)))
    tangent = jnp.where(coupled, tangent, 0)
    cos = lax.rsqrt(1 + jnp.square(tangent))[..., None]
    sin = cos * tangent[..., None]

    def rows(x: Square) -> Square:
        top, bottom = x[:, :half], x[:, half:]
        return jnp.concatenate([cos * top - sin * bottom, sin * top + cos * bottom], 1)[:, seats]

    return rows(rows(matrix).mT), rows(vectors)


def _is_diagonal(matrix: Square) -> Bool[Array, " stack"]:
    """Whether what is beside the diagonal is rounding."""
    side = matrix.shape[-1]
    beside = jnp.where(np.eye(side, dtype=bool), 0, matrix)
    norms = [jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2))) for x in (beside, matrix)]
    return norms[0] <= norms[1] * side * jnp.finfo(matrix.dtype).eps
