"""Momentum kernels: mixtures of EMAs of the gradient, in place of an optimizer's one momentum.

    m_k ← β_k m_k + (1 − β_k) c,   k = 1..K, from zero
    u = w_0 c + Σ_k w_k m_k

A preconditioner gets u in place of c. With one EMA u is

    the heavy ball's momentum               w_0 = 0,       w_1 = 1
    Nesterov's                              w_0 = 1 − β,   w_1 = β
    approximate MARS's, without its clip    w_0 = γ,       w_1 = 1 − γ    (arXiv 2411.10438)
    quasi-hyperbolic                        w_0 = 1 − ν,   w_1 = ν        (arXiv 1810.06801)

Under Adam u is the numerator, and v averages c². All is elementwise, so a mesh transfers nothing.
`kernel_preset` has the kernels of records and of AdEMAMix by name.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxmars.optim._rules import (
    ScalarOrSchedule,
    Tree,
    cast_like,
    check_choice,
    check_numbers,
    widened,
)


class MomentumKernelState(NamedTuple):
    """State of `momentum_kernel`."""

    ema: Tree
    """The first EMA m, like the parameters; stored as w m / β where its decay β and weight w are
    constants and its bias is not corrected."""
    other_emas: tuple[Tree, ...]
    """The other EMAs."""
    count: Any
    """Number of updates, int32; None without schedules."""
    sums: Tree
    """Sum of the weights of the gradients in each EMA, 1 − βᵗ where its decay is a constant; None
    where its bias is not corrected."""


def momentum_kernel(
    decays: Sequence[ScalarOrSchedule],
    weights: Sequence[ScalarOrSchedule],
    gradient_weight: ScalarOrSchedule = 0.0,
    *,
    debias: bool | Sequence[bool] = False,
    accumulator_dtype: Any = None,
) -> optax.GradientTransformation:
    """The momentum w_0 c + Σ w_k m_k of the gradient c and any number of its EMAs m_k.

    ```python
    muon(0.02, momentum_kernel=momentum_kernel((0.85, 0.98), (0.4, 0.5), 0.1))
    optax.chain(momentum_kernel(**kernel_preset("two_ema")), scale_by_orthogonalization())
    ```

    Args:
      decays: β_k, each a number in (0, 1) or a schedule of the update count.
      weights: w_k, as many numbers or schedules. Their sum with w_0 scales the momentum, which
        Newton-Schulz and sign undo and Adam does not.
      gradient_weight: w_0, a number or a schedule.
      debias: whether to divide each EMA by the sum of the weights of the gradients in it, as Adam
        does; one bool for all, or one for each.
      accumulator_dtype: dtype of the EMAs; None keeps the parameter's.

    Raises:
      ValueError: a decay is out of range, or there are not as many weights.
    """
    decays, weights = tuple(decays), tuple(weights)
    debiased = (debias,) * len(decays) if isinstance(debias, bool) else tuple(debias)
    if not decays or not len(decays) == len(weights) == len(debiased):
        raise ValueError(f"weights={weights} must be as many as decays={decays}, one at least.")
    for decay in decays:
        check_numbers("lie in (0, 1)", decays=decay)
    scheduled = any(map(callable, (*decays, *weights, gradient_weight)))

    def init_fn(params: Tree) -> MomentumKernelState:
        ema, *other_emas = (optax.tree.zeros_like(params, dtype=accumulator_dtype) for _ in decays)
        count = jnp.zeros([], jnp.int32) if scheduled else None
        sums = tuple(jnp.zeros([], float) if corrected else None for corrected in debiased)
        return MomentumKernelState(ema, tuple(other_emas), count, sums)

    def update_fn(
        updates: Tree, state: Any, params: Tree = None
    ) -> tuple[Tree, MomentumKernelState]:
        del params
        wide, emas, sums, ema_weights = widened(updates), [], [], []
        old = zip(widened((state.ema, *state.other_emas)), state.sums, strict=True)
        for decay, weight, (ema, total) in zip(decays, weights, old, strict=True):
            b, w = _value_at(state.count, decay), _value_at(state.count, weight)
            gradient_factor, ema_weight = 1 - b, w
            if total is not None:
                total = b * total + gradient_factor
                ema_weight = w / total
            elif not callable(decay) and not callable(weight):
                # With s = w m / β stored, s ← β s + w (1 − β) / β c and w m = β s: β s is computed
                # anyway, so a product is saved.
                gradient_factor, ema_weight = w * gradient_factor / b, b
            add = functools.partial(_weighted_sum, (b, gradient_factor))
            emas.append(jax.tree.map(add, ema, wide))
            sums.append(total)
            ema_weights.append(ema_weight)
        weights_now = (_value_at(state.count, gradient_weight), *ema_weights)
        momentum = jax.tree.map(functools.partial(_weighted_sum, weights_now), wide, *emas)
        count = None if state.count is None else jnp.asarray(optax.safe_increment(state.count))
        new = MomentumKernelState(emas[0], tuple(emas[1:]), count, tuple(sums))
        return cast_like(momentum, updates), cast_like(new, state)

    return optax.GradientTransformation(init_fn, update_fn)


def _value_at(count: Any, value: ScalarOrSchedule) -> Any:
    return value(count) if callable(value) else value


def _weighted_sum(weights: Sequence[Any], *arrays: jax.Array) -> jax.Array:
    return functools.reduce(operator.add, (w * x for w, x in zip(weights, arrays, strict=True)))


# --- kernels by name -----------------------------------------------------------------------------

NESTEROV = 0.95  # share of the EMAs in the records' kernels; also the decay of the one EMA before
RECORDS = {  # number of EMAs, mean ages of their mixture at the switch and at the end, both steps
    "two_ema": (2, 30.0, 30.0, 1000, 3250),
    "six_ema": (6, 50.0, 22.0, 750, 3125),
    "eight_ema": (8, 58.0, 26.0, 1000, 3250),
}
PRESETS = (*RECORDS, "ademamix")


def kernel_preset(
    name: str,
    *,
    switch_step: int | None = None,
    end_step: int | None = None,
    decays: Sequence[float] = (0.9, 0.9999),
    weights: Sequence[float] = (1.0, 8.0),
) -> dict[str, Any]:
    """The arguments of `momentum_kernel` that make a named kernel.

    "two_ema", "six_ema" and "eight_ema" are from records of modded-nanogpt's Track 3 in the summer
    of 2026: 0.05 of the gradient and 0.95 of a mixture of EMAs. Up to and including a switch step,
    counted from 0, all EMAs have the decay 0.95. Afterwards the two have 0.85 and 0.98, mixed
    0.4385 : 0.5615. The six and the eight then have mean ages τ = β / (1 − β) from 3 to 64 at equal
    ratios, and their weights move linearly from a mixture with a mean age of 50 steps to one of 22
    (six), or from 58 to 26 (eight). In a mixture the weights grow as 1, 2, 3, ... up to the last
    but one, and the last weight makes the mean age.

    "ademamix" is the numerator of AdEMAMix (arXiv 2409.03137), for Adam: a fast EMA with bias
    correction, and slow EMAs without. The weights of the slow ones grow linearly from 0, and their
    half-lives from the fast one's.

    Args:
      name: of the kernel.
      switch_step: of a record's kernel; None is its own: 1,000, and 750 for "six_ema".
      end_step: step at which a record's last mixture is reached; None is its own: 3,250, and 3,125
        for "six_ema". "ademamix" requires it: the steps over which weights and decays grow, in the
        paper those of the run; with 1 they are full-grown from the start.
      decays: those of "ademamix" at the end, the fast one's first.
      weights: those of "ademamix" at the end.

    Raises:
      ValueError: the name is unknown, or "ademamix" has no end_step.
    """
    check_choice("preset", name, PRESETS)
    if name == "ademamix":
        if end_step is None:
            raise ValueError("preset='ademamix' needs end_step, such as the number of steps.")
        return _warmed_up(decays, weights, end_step)
    number, first, last, switch, end = RECORDS[name]
    switch = switch if switch_step is None else switch_step
    end = end if end_step is None else end_step
    if name == "two_ema":
        own, mixtures = np.array([0.85, 0.98]), [np.array([0.4385, 0.5615])] * 2
    else:
        ages = np.geomspace(3, 64, number)
        own, mixtures = ages / (ages + 1), [_mixture(ages, age) for age in (first, last)]

    def decay(after: float, count: jax.typing.ArrayLike) -> jax.Array:
        return jnp.where(jnp.asarray(count) <= switch, NESTEROV, after)

    def weight(before: float, after: float, count: jax.typing.ArrayLike) -> jax.Array:
        done = (jnp.asarray(count, float) - switch) / max(end - switch, 1)
        return before + jnp.clip(done, 0, 1) * (after - before)

    pairs = NESTEROV * np.transpose(mixtures)
    return {
        "decays": [functools.partial(decay, after) for after in own.tolist()],
        "weights": [functools.partial(weight, *pair) for pair in pairs.tolist()],
        "gradient_weight": 1 - NESTEROV,
    }


def _mixture(ages: np.ndarray, mean_age: float) -> np.ndarray:
    """Weights a, 2 a, 3 a, ... and a last one, with the sum 1 and this mean age."""
    ranks = np.arange(1, len(ages))
    # Solved for a: Σ a k τ_k + (1 − Σ a k) τ_last = mean_age, the sums over all but the last.
    a = (ages[-1] - mean_age) / (ranks.sum() * ages[-1] - ranks @ ages[:-1])
    return np.append(a * ranks, 1 - a * ranks.sum())


def _warmed_up(decays: Sequence[float], weights: Sequence[float], steps: int) -> dict[str, Any]:
    def fraction(count: jax.typing.ArrayLike) -> jax.Array:
        return jnp.minimum((jnp.asarray(count, float) + 1) / steps, 1.0)

    def decay(last: float, count: jax.typing.ArrayLike) -> jax.Array:
        grown = fraction(count)
        # Half-lives are ln ½ / ln β, so a linear one is linear in 1 / ln β.
        return jnp.exp(1 / ((1 - grown) / math.log(decays[0]) + grown / math.log(last)))

    def weight(last: float, count: jax.typing.ArrayLike) -> jax.Array:
        return last * fraction(count)

    return {
        "decays": [decays[0], *(functools.partial(decay, last) for last in decays[1:])],
        "weights": [weights[0], *(functools.partial(weight, last) for last in weights[1:])],
        "debias": [k == 0 for k in range(len(decays))],
    }
