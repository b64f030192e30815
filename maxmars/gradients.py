"""Loss and gradients over microbatches, and the clip by their global norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from maxmars.model_parts import squared_norms


class Gradients(NamedTuple):
    """Gradients and how they are to be scaled, which fuses into what they are used for."""

    unscaled: Any
    multiplier: float
    max_norm: float | None
    norm: Float[Array, ""]
    """Global norm after the multiplier and before the clip."""

    @classmethod
    def of(cls, grads: Any, *, multiplier: float = 1.0, max_norm: float | None) -> Gradients:
        """Gradients to be multiplied, then clipped to a global norm (None: not clipped)."""
        return cls(grads, multiplier, max_norm, multiplier * optax.tree.norm(grads))

    def clipped(self) -> Any:
        """Multiplied, and scaled by min(1, max_norm / (norm + 1e-6)), PyTorch's rule."""
        scale: Any = self.multiplier
        if self.max_norm is not None:
            scale = scale * jnp.minimum(1.0, self.max_norm / (self.norm + 1e-6))
        return jax.tree.map(lambda g: g * jnp.asarray(scale, g.dtype), self.unscaled)

    def squares(self, parts: Any) -> dict[str, Float[Array, ""]]:
        """Squared norm of each part after the multiplier and before the clip."""
        found = squared_norms(parts, self.unscaled)
        return {part: self.multiplier**2 * square for part, square in found.items()}


def mean_loss_and_grads(
    loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any
) -> tuple[jax.Array, Any]:
    """Loss and gradient, averaged over the microbatches on the first axis of `batch`'s arrays."""
    value_and_grad = jax.value_and_grad(loss)
    count = jax.tree.leaves(batch)[0].shape[0]
    first = jax.tree.map(lambda x: x[0], batch)
    if count == 1:
        return value_and_grad(params, first)

    def accumulate(total: Any, microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, value_and_grad(params, microbatch)), None

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(value_and_grad, params, first))
    total, _ = jax.lax.scan(accumulate, zeros, batch)
    return jax.tree.map(lambda x: x / count, total)
