"""The mathematics of `gradient_variance.py`: how far an estimate ĉ of a gradient is from ∇F.

F is the loss of all text, so ∇F is not known; what is, is the gradient h of a large held batch,
h = ∇F + δ, whose noise is independent of all that ĉ has seen. Three facts make unbiased estimates:

* E‖h‖² = ‖∇F‖² + E‖δ‖², and the spread of the parts of the held batch tells E‖δ‖², the floor;
* E⟨ĉ, h⟩ = E⟨ĉ, ∇F⟩, so that E‖ĉ − ∇F‖² = E‖ĉ‖² − 2 E⟨ĉ, h⟩ + ‖∇F‖²;
* a twin ĉ′ is the same estimator at the same parameters x_1, ..., x_t on other batches. What the
  two do not share is noise, and what they share is bias: E‖ĉ − ĉ′‖² / 2 is the variance, and
  E⟨ĉ − ∇F, ĉ′ − ∇F⟩ = ‖E ĉ − ∇F‖² the squared bias.

Both are given the parameters, and E‖ĉ − ∇F‖² = variance + bias². The bias of a momentum is its lag
behind a gradient that changes; g has none. For MARS, with κ = γ β₁ / (1 − β₁) and n_t the noise of
batch t,

    c_t − ∇F_t = n_t + κ (n_t − n_{t−1}) + κ (∇F_t − ∇F_{t−1})      approximate
    c_t − ∇F_t = n_t + κ (n_t − n_t at x_{t−1}) + κ (∇F_t − ∇F_{t−1})      exact

which is why approximate MARS, whose two batches are independent, adds to the variance of c. Its
momentum is, after the first steps, γ g_t + (1 − γ) times the momentum of g, a little nearer to the
newest gradient: more variance and less bias, by `noise_gain` and `lag`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxmars.optim import MatrixSpec, correct_gradient

Tree = Any


# --- the estimators -------------------------------------------------------------------------------


class Estimates(NamedTuple):
    """What MARS takes for the gradient; trees like the parameters."""

    gradient: Tree
    """c, the corrected gradient of one step; g where γ = 0."""
    momentum: Tree
    """m, the moving average of c with β₁, divided by 1 − β₁ᵗ as in Adam."""


class Estimator(NamedTuple):
    """`init(params)` makes a state; `update(grads, state, prev_grads)` returns `Estimates` and the
    next state."""

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Estimates, Any]]


def make_estimator(
    b1: float,
    gamma: Any,
    *,
    exact: bool,
    clip: optax.GradientTransformation | None = None,
) -> Estimator:
    """MARS's estimates of the gradient, of the parts that `maxmars.optim.mars` is made of.

    Args:
      b1: β₁, of the correction and of the moving average.
      gamma: γ, a number or a traced scalar.
      exact: compare with `prev_grads`, the gradient of the same batch at the previous parameters,
        in place of the gradient of the step before.
      clip: of c, such as `clip_by_matrix_norm(1.0, specs)`; None does not clip.
    """
    correct = correct_gradient(b1, gamma, exact=exact)
    clip = optax.identity() if clip is None else clip
    average = optax.ema(b1)

    def init(params: Tree) -> Any:
        return correct.init(params), clip.init(params), average.init(params)

    def update(grads: Tree, state: Any, prev_grads: Tree) -> tuple[Estimates, Any]:
        given = {"prev_grads": prev_grads} if exact else {}
        corrected, first = correct.update(grads, state[0], **given)
        clipped, second = clip.update(corrected, state[1])
        momentum, third = average.update(clipped, state[2])
        return Estimates(clipped, momentum), (first, second, third)

    return Estimator(init, update)


def noise_gain(b1: float, gamma: float) -> Estimates:
    """Variance of approximate MARS's c and m, in variances of g, where batches are independent and
    the variance of g stays the same, after many steps.

    c_t has the noise (1 + κ) n_t − κ n_{t−1}; in m_t, n_t has the weight (1 − β₁)(1 + κ), and
    n_{t−k} the weight (1 − γ)(1 − β₁) β₁ᵏ.
    """
    kappa = gamma * b1 / (1 - b1)
    newest = (1 - b1) * (1 + kappa)
    older = ((1 - gamma) * (1 - b1) * b1) ** 2 / (1 - b1**2)
    return Estimates((1 + kappa) ** 2 + kappa**2, newest**2 + older)


def lag(b1: float, gamma: float) -> Estimates:
    """By how many steps c and m are behind a gradient that changes by the same in every step; the
    bias is as many times that change. Negative: ahead. The same for approximate and exact MARS."""
    kappa = gamma * b1 / (1 - b1)
    return Estimates(-kappa, b1 / (1 - b1) - kappa)


# --- products of matrices -------------------------------------------------------------------------


def matrix_products(x: Tree, y: Tree, specs: Tree) -> jax.Array:
    """⟨x, y⟩ of each matrix, float32 [matrices], in the order of the leaves and of their stacks.

    Vectors are left out: MARS leaves them to AdamW.

    Args:
      x: a tree like the parameters.
      y: another one.
      specs: their `MatrixSpec`s.
    """

    def product(a: jax.Array, b: jax.Array, spec: MatrixSpec) -> list[jax.Array]:
        if not spec.is_matrix:
            return []
        return [jnp.sum(a * b, axis=spec.inner, dtype=jnp.float32).ravel()]

    found = jax.tree.map(product, x, y, specs)
    return jnp.concatenate(jax.tree.leaves(found))


def matrix_names(params: Tree, specs: Tree) -> list[str]:
    """The matrices of `matrix_products`: the path of the parameter, with its place in a stack."""
    names: list[str] = []
    specs_by_leaf = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, MatrixSpec))
    for (path, leaf), spec in zip(jax.tree.leaves_with_path(params), specs_by_leaf, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if spec.is_matrix:
            count = 1
            for axis in spec.batch:
                count *= leaf.shape[axis]
            names += [f"{name}[{i}]" for i in range(count)] if spec.batch else [name]
    return names


# --- the held batch -------------------------------------------------------------------------------


class Held(NamedTuple):
    """What a held batch says of ∇F; the arrays are [matrices]."""

    gradient: Tree
    """h, its gradient."""
    signal: jax.Array
    """‖∇F‖², without the floor."""
    floor: jax.Array
    """E‖h − ∇F‖²."""
    noise: jax.Array
    """E‖g − ∇F‖² of a batch as large as one part."""


def held_gradient(
    gradient: Callable[[Tree, Any], Tree], params: Tree, parts: Any, specs: Tree
) -> Held:
    """The gradient of a held batch, and by the spread of its parts how far from ∇F it is.

    Args:
      gradient: of parameters and one part, the mean over its rows.
      params: where.
      parts: arrays with an axis of at least two parts first, equally large and independent.
      specs: `MatrixSpec`s of the parameters.
    """
    count = jax.tree.leaves(parts)[0].shape[0]

    def add(sums: tuple[Tree, jax.Array], part: Any) -> tuple[tuple[Tree, jax.Array], None]:
        found = gradient(params, part)
        total, squares = sums
        products = matrix_products(found, found, specs)
        return (jax.tree.map(jnp.add, total, found), squares + products), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    start = (zeros, jnp.zeros_like(matrix_products(zeros, zeros, specs)))
    (total, squares), _ = jax.lax.scan(add, start, parts)
    mean = jax.tree.map(lambda x: x / count, total)
    square_of_mean = matrix_products(mean, mean, specs)
    noise = (squares / count - square_of_mean) * count / (count - 1)
    floor = noise / count
    return Held(mean, square_of_mean - floor, floor, noise)


# --- errors ---------------------------------------------------------------------------------------


class Moments(NamedTuple):
    """Products of an estimate ĉ, its twin ĉ′ and the held gradient h, of any shape: of matrices,
    or sums or means of these over matrices, steps or both."""

    square: Any
    """‖ĉ‖²"""
    held: Any
    """⟨ĉ, h⟩"""
    twin_square: Any
    """‖ĉ′‖²"""
    twin_held: Any
    """⟨ĉ′, h⟩"""
    twin: Any
    """⟨ĉ, ĉ′⟩"""


def moments(estimate: Tree, twin: Tree, held: Tree, specs: Tree) -> Moments:
    """`Moments` of each matrix, [matrices]."""
    pairs = [(estimate, estimate), (estimate, held), (twin, twin), (twin, held), (estimate, twin)]
    return Moments(*(matrix_products(x, y, specs) for x, y in pairs))


class Errors(NamedTuple):
    """How an estimate ĉ misses ∇F. Each has the shape of the moments."""

    total: Any
    """‖ĉ − ∇F‖²."""
    variance: Any
    """Its part that is the batches' doing; of ĉ and its twin, and without the held batch."""
    bias: Any
    """Its part that other batches would not change, bias²; chance may make a small one negative."""
    direction: Any
    """1 − cos² of the angle to ∇F: the part of ‖∇F‖² that no multiple of ĉ has. Of moments over
    several steps, it is one multiple for all."""
    of_twin: Any
    """‖ĉ′ − ∇F‖². It differs from `total` where it matters that a run's parameters come from the
    batches that ĉ has seen."""


def errors(found: Moments, signal: Any) -> Errors:
    """`Errors` by moments and ‖∇F‖², both summed (or averaged) over the same."""
    return Errors(
        total=found.square - 2 * found.held + signal,
        variance=(found.square + found.twin_square) / 2 - found.twin,
        bias=found.twin - found.held - found.twin_held + signal,
        direction=1 - found.held**2 / (found.square * signal),
        of_twin=found.twin_square - 2 * found.twin_held + signal,
    )
