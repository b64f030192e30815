"""Learning-rate schedules as shapes in [0, 1]: functions of the step that multiply a peak rate."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def warmup_cosine(warmup_steps: int, decay_steps: int, final_fraction: float) -> Schedule:
    """Linear warmup, then half a cosine (nanoGPT's and the MARS paper's schedule).

    Args:
      warmup_steps: step at which the peak is reached, from zero at step 0; 0 starts at the peak.
      decay_steps: step at which `final_fraction` is reached; constant from there on.
      final_fraction: value at the end, as a fraction of the peak.
    """
    return _warmup_then(
        lambda progress: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
        warmup_steps,
        decay_steps,
        final_fraction,
    )


def warmup_linear(warmup_steps: int, decay_steps: int, final_fraction: float) -> Schedule:
    """Linear warmup, then a straight line; arguments as in `warmup_cosine`."""
    return _warmup_then(lambda progress: 1 - progress, warmup_steps, decay_steps, final_fraction)


def warmup_exponential(warmup_steps: int, decay_steps: int, final_fraction: float) -> Schedule:
    """Linear warmup, then 0.9^(100 progress), the official MARS code's `exp`.

    Arguments as in `warmup_cosine`. Just before the end it is 2.7e-5 above `final_fraction`.
    """
    return _warmup_then(
        lambda progress: 0.9 ** (100 * progress), warmup_steps, decay_steps, final_fraction
    )


def warmup_stable_decay(
    warmup_steps: int, decay_steps: int, final_fraction: float, decay_fraction: float
) -> Schedule:
    """Linear warmup, the peak, then a straight line over the last `decay_fraction` of the steps.

    Known as WSD (arXiv 2404.06395) or trapezoidal. Arguments as in `warmup_cosine`.
    """
    start = 1 - decay_fraction * decay_steps / max(decay_steps - warmup_steps, 1)
    start = max(start, 0.0)
    return _warmup_then(
        lambda progress: jnp.clip((1 - progress) / (1 - start), 0, 1),
        warmup_steps,
        decay_steps,
        final_fraction,
    )


def _warmup_then(
    shape: Callable[[jax.Array], jax.Array],
    warmup_steps: int,
    decay_steps: int,
    final_fraction: float,
) -> Schedule:
    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, float)
        warmup = step / max(warmup_steps, 1)
        progress = (step - warmup_steps) / max(decay_steps - warmup_steps, 1)
        coefficient = shape(jnp.clip(progress, 0, 1))
        decayed = final_fraction + (1 - final_fraction) * coefficient
        decayed = jnp.where(step > decay_steps, final_fraction, decayed)
        return jnp.where(step < warmup_steps, warmup, decayed)

    return schedule
