"""What the optimizers share: one rule for each kind of parameter, rates, checks and arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxmars.optim.matrix_spec import MatrixSpec, resolve_specs

Scalar = float | jax.Array
ScalarOrSchedule = optax.ScalarOrSchedule
Tree = Any  # a pytree of arrays like the parameters


def stepped(
    direction: optax.GradientTransformation,
    weight_decay: ScalarOrSchedule,
    mask: Any,
    learning_rate: ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    """−η (u + λ p), where `direction` gives u and `mask` says which parameters decay."""
    return optax.chain(
        direction,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def by_kind(
    rules: Mapping[str, optax.GradientTransformation], matrix_specs: Any
) -> optax.GradientTransformationExtraArgs:
    """One rule for each kind of parameter; kinds with the same rule share a state.

    Args:
      rules: the rule of each kind: "matrix", "vector" and, unless embeddings are matrices like any
        other, "embedding".
      matrix_specs: `MatrixSpec`s as a pytree prefix, see `resolve_specs`.
    """
    names = {rule: name for name, rule in reversed(list(rules.items()))}

    def label(spec: MatrixSpec) -> str:
        kind = "matrix" if spec.is_matrix else "vector"
        if spec.is_matrix and spec.embedding and "embedding" in rules:
            kind = "embedding"
        return names[rules[kind]]

    def labels(params: Tree) -> Any:
        return jax.tree.map(label, resolve_specs(matrix_specs, params))

    by_name: dict[Any, Any] = {name: rule for rule, name in names.items()}
    return optax.partition(by_name, labels, mask_compatible_extra_args=True)


def vector_rate(
    learning_rate: ScalarOrSchedule, rate: ScalarOrSchedule | None, scale: Scalar | None
) -> ScalarOrSchedule:
    """The learning rate of vectors: `rate`, or `learning_rate` times `scale` (None: one).

    Raises:
      ValueError: both are given, or `rate` is a constant beside a schedule.
    """
    if rate is not None and scale is not None:
        raise ValueError(
            "vector_learning_rate and vector_learning_rate_scale are both given; give one of them."
        )
    if rate is not None:
        if callable(learning_rate) and not callable(rate):
            raise ValueError(
                f"vector_learning_rate={rate} is a constant beside a learning_rate schedule, so "
                "vectors would not follow the schedule; give vector_learning_rate_scale (a "
                "multiple of the schedule) or a schedule."
            )
        return rate
    if scale is None:
        return learning_rate
    if callable(learning_rate):
        return lambda count: learning_rate(count) * scale
    return learning_rate * scale


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; it is one of {', '.join(choices)}.")


def check_fraction(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is traced or lies in [0, 1)."""
    if isinstance(value, int | float) and not 0 <= value < 1:
        raise ValueError(f"{name}={value} must lie in [0, 1).")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is traced or positive."""
    if isinstance(value, int | float) and not value > 0:
        raise ValueError(f"{name}={value} must be positive.")


def wide_dtype(dtype: Any) -> Any:
    """The dtype to calculate in: float32, or float64 for a float64 array."""
    return jnp.promote_types(dtype, jnp.float32)


def bias_correction(decay: Scalar, count: jax.Array) -> jax.Array:
    """1 − decayᵗ; expm1 keeps its relative precision when decay is near one."""
    return -jnp.expm1(count * jnp.log(jnp.asarray(decay, float)))


def widened(tree: Tree) -> Tree:
    """In float32 at least: float16 has no 1e-8, and 0.999 is 1 in bfloat16."""

    def widen(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return x.astype(wide_dtype(x.dtype)) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(widen, tree)


def cast_like(tree: Tree, like: Tree) -> Tree:
    """Each array of `tree` in the dtype of its counterpart."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def written_after(kept: Tree, readers: tuple[Tree, ...], *, fused: bool) -> Tree:
    """The `kept` leaves, computed once every tree of `readers` is.

    Args:
      kept: what is written over arrays that others read.
      readers: what is computed from these arrays.
      fused: whether accelerators compute all of it in one pass, which needs no order.
    """

    def by_barrier(kept: Tree, readers: Tree) -> Tree:
        return jax.lax.optimization_barrier((kept, readers))[0]

    def by_data(kept: Tree, readers: Tree) -> Tree:
        def is_computed(x: jax.Array) -> jax.Array:
            element = x[(0,) * x.ndim]
            return (element <= jnp.inf) | jnp.isnan(element)  # always true

        def write(value: jax.Array, *readers: jax.Array) -> jax.Array:
            if not value.size:
                return value
            computed = functools.reduce(jnp.logical_and, map(is_computed, readers))
            return jnp.where(computed, value, jnp.zeros_like(value))

        return jax.tree.map(write, kept, *(tree for tree in readers if tree is not None))

    # The CPU compiler of JAX 0.10 drops the barrier before it places the copies. Where arrays may
    # be split over devices, reading an element would be communication.
    on_cpus = by_barrier if jax.device_count() > 1 else by_data
    default = (lambda kept, _: kept) if fused else by_barrier
    return jax.lax.platform_dependent(kept, readers, cpu=on_cpus, default=default)
