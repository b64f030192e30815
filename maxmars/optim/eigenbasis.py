"""One step of SOAP for a stack of matrices: Adam in the eigenbases of their Gram matrices.

Equations and sources are in `maxmars.optim.soap`. Every function here is a batch of small dense
products and decompositions over the first axis; who holds which matrices is not its business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmars.optim.decompositions import eigenvectors, orthonormal_columns
from maxmars.optim.rules import Scalar, bias_correction

Grads = Float[Array, "*stack_rows_cols"]  # of another shape where no side is preconditioned
Square = Float[Array, "stack side side"]


class Moments(NamedTuple):
    """What SOAP remembers of a stack of matrices, or what belongs to each of it: arrays, homes,
    shardings. None for a side that keeps the identity."""

    mu: Any
    """First moment in the eigenbases, [stack, rows, cols]."""
    nu: Any
    """Second moment in the eigenbases, [stack, rows, cols]."""
    row_gram: Any
    """Moving average of G Gᵀ, [stack, rows, rows]."""
    col_gram: Any
    """Moving average of Gᵀ G, [stack, cols, cols]."""
    row_basis: Any
    """Eigenvectors of `row_gram` in columns, eigenvalues falling."""
    col_basis: Any
    """Eigenvectors of `col_gram` in columns, eigenvalues falling."""


@dataclass(frozen=True, kw_only=True)
class SoapRule:
    """The hyperparameters of SOAP, see `scale_by_soap`."""

    b1: Scalar
    b2: Scalar
    shampoo_beta: Scalar
    eps: Scalar
    precondition_frequency: int | jax.Array


def soap_step(
    grads: Grads,
    moments: Moments,
    count: Int[Array, ""],
    rule: SoapRule,
    sum_grams: Callable[[jax.Array], jax.Array],
) -> tuple[Grads, Moments]:
    """The direction of every matrix, and what to remember.

    Args:
      grads: gradients, in float32 or float64.
      moments: all in the gradients' dtype.
      count: number of earlier steps.
      rule: the hyperparameters.
      sum_grams: sums Gram matrices over the devices that a matrix is dealt out to.
    """
    moments, directions = _adam(grads, moments, count, rule)
    beta = rule.shampoo_beta
    row_gram, col_gram = moments.row_gram, moments.col_gram
    if row_gram is not None:
        row_gram = beta * row_gram + (1 - beta) * sum_grams(_matmul(grads, grads.mT))
    if col_gram is not None:
        col_gram = beta * col_gram + (1 - beta) * sum_grams(_matmul(grads.mT, grads))
    moments = moments._replace(row_gram=row_gram, col_gram=col_gram)
    if row_gram is not None or col_gram is not None:
        due = count % rule.precondition_frequency == 0
        branch = jnp.where(count == 0, 1, jnp.where(due, 2, 0))
        moments = jax.lax.switch(branch, (lambda m: m, _first_bases, _next_bases), moments)
    return directions, moments


def _adam(
    grads: Grads, moments: Moments, count: Int[Array, ""], rule: SoapRule
) -> tuple[Moments, Grads]:
    """Adam in the eigenbases; nothing in the first step, which has none yet."""
    projected = _to_bases(grads, moments)
    mu = rule.b1 * moments.mu + (1 - rule.b1) * projected
    nu = rule.b2 * moments.nu + (1 - rule.b2) * jnp.square(projected)
    updates = jnp.maximum(count, 1)  # the first step is not one of Adam's
    correction = jnp.sqrt(bias_correction(rule.b2, updates)) / bias_correction(rule.b1, updates)
    scaled = correction.astype(mu.dtype) * mu / (jnp.sqrt(nu) + rule.eps)
    directions = _from_bases(scaled, moments)
    first = count == 0
    mu, nu = jnp.where(first, moments.mu, mu), jnp.where(first, moments.nu, nu)
    return moments._replace(mu=mu, nu=nu), jnp.where(first, 0, directions)


def _to_bases(x: Grads, moments: Moments) -> Grads:
    if moments.row_basis is not None:
        x = _matmul(moments.row_basis.mT, x)
    return x if moments.col_basis is None else _matmul(x, moments.col_basis)


def _from_bases(x: Grads, moments: Moments) -> Grads:
    if moments.row_basis is not None:
        x = _matmul(moments.row_basis, x)
    return x if moments.col_basis is None else _matmul(x, moments.col_basis.mT)


def _first_bases(moments: Moments) -> Moments:
    def basis(gram: jax.Array | None) -> jax.Array | None:
        return None if gram is None else eigenvectors(_normalized(gram))

    return moments._replace(row_basis=basis(moments.row_gram), col_basis=basis(moments.col_gram))


def _next_bases(moments: Moments) -> Moments:
    """A power iteration of each basis, and the moments in the new ones."""
    original, nu = _from_bases(moments.mu, moments), moments.nu
    row_basis, col_basis = moments.row_basis, moments.col_basis
    if row_basis is not None:
        row_basis, order = _power_iteration(moments.row_gram, row_basis)
        nu = jnp.take_along_axis(nu, order[:, :, None], axis=1)
    if col_basis is not None:
        col_basis, order = _power_iteration(moments.col_gram, col_basis)
        nu = jnp.take_along_axis(nu, order[:, None, :], axis=2)
    moments = moments._replace(nu=nu, row_basis=row_basis, col_basis=col_basis)
    return moments._replace(mu=_to_bases(original, moments))


def _power_iteration(gram: Square, basis: Square) -> tuple[Square, Int[Array, "stack side"]]:
    """Q of the QR decomposition of gram @ basis, its columns ordered by estimated eigenvalues
    first; and that order of the old columns."""
    image = _matmul(_normalized(gram), basis)
    eigenvalues = jnp.sum(basis * image, axis=-2)
    order = jnp.argsort(eigenvalues, axis=-1, descending=True)
    return orthonormal_columns(jnp.take_along_axis(image, order[:, None, :], axis=-1)), order


def _normalized(gram: Square) -> Square:
    """The same eigenvectors, out of the reach of underflow: of trace one, unless it is zero."""
    trace = jnp.trace(gram, axis1=-2, axis2=-1)[:, None, None]
    return gram / jnp.where(trace > 0, trace, 1)


def _matmul(
    x: Float[Array, "stack rows inner"], y: Float[Array, "stack inner cols"]
) -> Float[Array, "stack rows cols"]:
    # By default an accelerator may multiply float32 in fewer bits, and eigenvectors need them.
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
