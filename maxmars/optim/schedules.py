"""Learning-rate schedules as shapes in [0, 1]: functions of the step that multiply a peak rate."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def warmup_cosine(warmup_steps: int, decay_steps: int, final_fraction: float) -> Schedule:
    """Linear warmup from zero at step 0, then a cosine down to `final_fraction` (nanoGPT's
    schedule).

    Args:
      warmup_steps: step at which the peak is reached; 0 starts at the peak.
      decay_steps: step at which `final_fraction` is reached; constant from there on.
      final_fraction: value at the end, as a fraction of the peak.
    """

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, float)
        warmup = step / max(warmup_steps, 1)
        progress = (step - warmup_steps) / max(decay_steps - warmup_steps, 1)
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0, 1)))
        decayed = final_fraction + (1 - final_fraction) * cosine
        return jnp.where(step < warmup_steps, warmup, decayed)

    return schedule
