r"""Newton-Schulz orthogonalisation: a matrix to its nearest semi-orthogonal one, by products alone.

For M = U Σ Vᵀ, odd polynomials of its singular values drive all of them towards one, so that
the result approximates U Vᵀ:

    X = M / (‖M‖_F + ε)
    A = X Xᵀ,   X ← a X + (b A + c A²) X        with (a, b, c) of each step

Sources: Muon (kellerjordan.github.io/posts/muon), Polar Express (arXiv 2505.16932), CANS
(arXiv 2506.10935).
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from maxmars.optim._rules import check_numbers

Triple = tuple[float, float, float]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]

COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    # One polynomial, iterated: steep at zero, and content with singular values in [0.7, 1.2].
    "keller": ((3.4445, -4.7750, 2.0315),),
    # The paper's method for exactly five steps, as modded-nanogpt trains with it. The numbers hold
    # the safety factor, 1.02: rounding may push a singular value over the interval's end.
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # Remez polynomials of degree five on an adapted interval.
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
}
"""Presets: one triple (a, b, c) for every step, or one a step; fewer steps take the first ones."""


def newton_schulz(
    x: Float[Array, "*batch rows cols"],
    *,
    steps: int | jax.Array = 5,
    coefficients: Coefficients = "keller",
    eps: float | jax.Array = 1e-7,
    dtype: Any = jnp.bfloat16,
) -> Float[Array, "*batch rows cols"]:
    """Orthogonalise each matrix of x; the plain form, beside the sharded one in `orthogonalize`.

    Args:
      x: matrices; all leading axes stack independent ones.
      steps: number of iterations; a traced number makes a loop, whose steps beyond the last triple
        repeat it.
      coefficients: a preset of `COEFFICIENTS`, one triple (a, b, c) or a triple for each step.
      eps: added to the Frobenius norm, so that a zero matrix gives zero.
      dtype: dtype of the products' operands. Below float32 they accumulate in float32; float32 and
        float64 are computed as such on every backend.

    Returns:
      Matrices close to U Vᵀ, in x's dtype.

    Raises:
      ValueError: unknown or too few coefficients, `eps` is not positive, or JAX has no such dtype.
    """
    check_ns_dtype(dtype)
    triples = triples_of(coefficients, steps)
    check_numbers("be positive", eps=eps)
    wide = jnp.promote_types(dtype, jnp.float32)
    # The norm is that of x before the cast, as in the official code.
    exact = x.astype(jnp.promote_types(x.dtype, wide))
    norm = jnp.sqrt(jnp.sum(jnp.square(exact), axis=(-2, -1), keepdims=True))
    # X itself stays wide: rounding it in every step would cost more than all products do.
    y = x.astype(dtype).astype(wide) / (norm + eps).astype(wide)
    tall = x.shape[-2] > x.shape[-1]
    y = _in_rows(y.mT if tall else y)  # the products XXᵀ and A² are then the small ones
    if isinstance(steps, int):
        for triple in triples:
            y = _step(y, triple, dtype)
    else:
        table = jnp.asarray(triples, y.dtype)

        def step(i: jax.Array, y: jax.Array) -> jax.Array:
            return _step(y, table[jnp.minimum(i, len(triples) - 1)], dtype)

        y = jax.lax.fori_loop(0, steps, step, y)
    return (y.mT if tall else y).astype(x.dtype)


def check_ns_dtype(dtype: Any) -> None:
    """Raise ValueError unless JAX computes in this dtype: without JAX_ENABLE_X64 it would take
    float32 for float64, in the few bits that an accelerator may multiply it in."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"ns_dtype={dtype} must be a floating-point type, such as bfloat16.")
    if jnp.finfo(dtype).nexp < 8:
        raise ValueError(
            f"ns_dtype={jnp.dtype(dtype)} has too small a range: momentum below 1e-5 loses its "
            "bits in it; take bfloat16 or float32."
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"ns_dtype={jnp.dtype(dtype)} needs 64-bit JAX: set the environment variable "
            "JAX_ENABLE_X64=1, or take float32."
        )


def triples_of(coefficients: Coefficients, steps: int | jax.Array) -> tuple[Triple, ...]:
    """The triple (a, b, c) of each step; all that there are where `steps` is not known.

    Raises:
      ValueError: the preset is unknown, an entry is not a triple, or there are fewer than `steps`.
    """
    if isinstance(coefficients, str) and coefficients not in COEFFICIENTS:
        known = ", ".join(COEFFICIENTS)
        raise ValueError(
            f"coefficients={coefficients!r} is no preset; take one of {known}, or give a triple "
            "(a, b, c) or one for each step."
        )
    table = COEFFICIENTS[coefficients] if isinstance(coefficients, str) else coefficients
    rows = np.atleast_2d(np.asarray(table, float)).tolist()
    if any(len(row) != 3 for row in rows):
        raise ValueError(f"coefficients={coefficients} must be a triple (a, b, c), or several.")
    if not isinstance(steps, int):
        steps = len(rows)
    rows = rows * steps if len(rows) == 1 else rows
    if len(rows) < steps:
        raise ValueError(
            f"steps={steps} is more than the {len(rows)} triples of coefficients={coefficients!r}; "
            f"take at most {len(rows)} steps, or give a triple for each."
        )
    return tuple((a, b, c) for a, b, c in rows[:steps])


def _in_rows(x: jax.Array) -> jax.Array:
    """x, on a CPU written out with each row in one piece: products of transposed factors are slow
    there, and XLA would else fuse the last transpose into the sum of the last step."""
    rows = Layout(tuple(range(x.ndim)))
    return jax.lax.platform_dependent(
        x, cpu=lambda x: with_layout_constraint(x, rows), default=lambda x: x
    )


def _step(x: jax.Array, triple: Triple | jax.Array, dtype: Any) -> jax.Array:
    """One iteration: operands in `dtype`, all else in x's dtype."""
    a, b, c = triple
    gram = _product("...ik,...jk->...ij", x, x, dtype)
    polynomial = b * gram + c * _product("...ik,...kj->...ij", gram, gram, dtype)
    return _in_rows(a * x + _product("...ik,...kj->...ij", polynomial, x, dtype))


def _product(formula: str, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """x y or x yᵀ, by the `einsum` formula, of operands rounded to `dtype`, summed in x's dtype."""
    multiply = functools.partial(jnp.einsum, formula, preferred_element_type=x.dtype)
    if x.dtype == dtype:
        # By default an accelerator may multiply float32 in fewer bits.
        return multiply(x, y, precision=jax.lax.Precision.HIGHEST)

    def narrow(x: jax.Array, y: jax.Array) -> jax.Array:
        return multiply(x.astype(dtype), y.astype(dtype))

    def rounded(x: jax.Array, y: jax.Array) -> jax.Array:
        # XLA's emulation of narrow products is slow, and fails on some transposes of them.
        bits = jnp.finfo(dtype)
        return multiply(*(jax.lax.reduce_precision(v, bits.nexp, bits.nmant) for v in (x, y)))

    is_fast = jnp.dtype(dtype) == jnp.bfloat16 and cpu_multiplies_bfloat16()
    return jax.lax.platform_dependent(x, y, cpu=narrow if is_fast else rounded, default=narrow)


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this machine's CPU has instructions for products of bfloat16 (AVX512_BF16).

    XLA then takes half the time for bfloat16 x bfloat16 -> float32 in rows (JAX 0.10 and 0.12).
    """
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text().split()
    except OSError:  # not Linux
        return False
