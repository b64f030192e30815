"""What the optimizers share: one rule for each kind of parameter, rates, checks and arithmetic."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxmars.optim._matrices import (
    check_prefix,
    is_function,
    resolve_specs,
    warn_without_specs,
)

Scalar = float | jax.Array
ScalarOrSchedule = optax.ScalarOrSchedule
Tree = Any  # a pytree of arrays like the parameters
RULES: dict[str, Callable[[float], bool]] = {
    "lie in [0, 1)": lambda x: 0 <= x < 1,
    "lie in (0, 1)": lambda x: 0 < x < 1,
    "be positive": lambda x: x > 0,
}


def in_float32(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`inner`, calculated in float32 at least: float16 has no 1e-8, and 0.999 is 1 in bfloat16.

    Gradients, parameters and state come to `inner` widened. The state goes back in the dtypes that
    it had, which for float16 parameters are those of float32 ones, and updates in those of the
    parameters, or of the gradients where none are given. Parameters may have anything where there
    is no gradient: an Equinox module has functions.
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: Tree) -> Tree:
        return inner.init(jax.tree.map(_without_float16, params))

    def update_fn(
        updates: Tree, state: Tree, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, Tree]:
        params = where_updated(updates, params)
        wide = (widened(tree) for tree in (updates, state, params))
        new_updates, new_state = inner.update(*wide, **extra_args)
        like = updates if params is None else params
        return cast_like(new_updates, like), cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def where_updated(updates: Tree, params: Tree) -> Tree:
    """The parameters, None in place of those that have no update."""
    if params is None:
        return None
    return jax.tree.map(
        lambda g, p: None if g is None else p, updates, params, is_leaf=lambda g: g is None
    )


def _without_float16(x: Any) -> Any:
    """float32 in place of float16, in which the square of a gradient of 1e-4 is zero."""
    if x.dtype != jnp.float16:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding)
    return x.astype(jnp.float32)


def widened(tree: Tree) -> Tree:
    """The tree with its arrays of numbers in the dtype to calculate in; see `wide_dtype`."""

    def widen(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return x.astype(wide_dtype(x.dtype)) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(widen, tree)


def wide_dtype(dtype: Any) -> Any:
    """The dtype to calculate in: float32, or float64 for a float64 array."""
    return jnp.promote_types(dtype, jnp.float32)


def cast_like(tree: Tree, like: Tree) -> Tree:
    """Each array of `tree` in the dtype of its counterpart."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype) if x.dtype != y.dtype else x, tree, like)


class PerMatrix(optax.GradientTransformationExtraArgs):
    """A transformation that needs the specs of the parameters; see `per_matrix`."""

    make: Callable[..., optax.GradientTransformation]
    """Of resolved specs: the transformation of those parameters alone."""


def per_matrix(
    make: Callable[..., optax.GradientTransformation], matrix_specs: Any, *masks: Any
) -> PerMatrix:
    """The one place where specs and masks are resolved: by all parameters, in init and in update,
    there by all updates where no parameters are given. It warns of missing specs.

    Args:
      make: from the `MatrixSpec` of each parameter, and each mask, to a transformation.
      matrix_specs: see `resolve_specs`.
      masks: trees of bools, prefixes of the parameters; or functions from these to such a tree.
    """

    def of(params: Tree) -> optax.GradientTransformationExtraArgs:
        specs = resolve_specs(matrix_specs, params)
        made = make(specs, *(_resolved_mask(mask, params) for mask in masks))
        return optax.with_extra_args_support(made)

    def init_fn(params: Tree) -> Any:
        transformation = of(params)
        warn_without_specs(matrix_specs, params)
        return transformation.init(params)

    def update_fn(
        updates: Tree, state: Any, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, Any]:
        params = where_updated(updates, params)
        tree = updates if params is None else params
        return of(tree).update(updates, state, params, **extra_args)

    transformation = PerMatrix(init_fn, update_fn)
    transformation.make = make
    return transformation


def _resolved_mask(mask: Any, params: Tree) -> Any:
    if not jax.tree.leaves(params):  # optax.tree.map_params
        return params if is_function(mask) else mask
    if is_function(mask):
        mask = mask(params)
    if mask is not None:
        check_prefix("mask", mask, params)
    return mask


@dataclass(frozen=True, eq=False)
class Rule:
    """The update −η (u + λ p), where the chain `direction` gives u."""

    direction: Sequence[optax.GradientTransformation]
    weight_decay: ScalarOrSchedule
    learning_rate: ScalarOrSchedule


def by_kind(
    rules: Mapping[str, Rule], matrix_specs: Any, mask: Any
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with a rule for each kind of parameter; kinds with the same rule share a state.

    Args:
      rules: the rule of each kind: "matrix", "vector" and, unless embeddings are matrices like any
        other, "embedding".
      matrix_specs: see `resolve_specs`.
      mask: which parameters decay, a tree of bools or a function from parameters to one.
    """
    names = {rule: name for name, rule in reversed(list(rules.items()))}

    def make(specs: Tree, decays: Any) -> optax.GradientTransformation:
        labels = jax.tree.map(lambda spec: names[rules.get(spec.kind, rules["matrix"])], specs)

        def chain(rule: Rule) -> optax.GradientTransformation:
            own = jax.tree.map(
                lambda spec, label: spec if label == names[rule] else optax.MaskedNode(),
                specs,
                labels,
            )
            return optax.chain(
                *(
                    part.make(own) if isinstance(part, PerMatrix) else part
                    for part in rule.direction
                ),
                optax.add_decayed_weights(rule.weight_decay, decays),
                optax.scale_by_learning_rate(rule.learning_rate),
            )

        chains: dict[Any, Any] = {name: chain(rule) for rule, name in names.items()}
        partition = optax.partition(chains, lambda _: labels, mask_compatible_extra_args=True)
        return in_float32(partition)

    return per_matrix(make, matrix_specs, mask)


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


def check_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    """Raise ValueError unless a value is one of the choices."""
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name}={value!r} is unknown; it is one of {known}.")


def check_numbers(rule: str, **values: Any) -> None:
    """Raise ValueError unless each number obeys a rule of `RULES`; what is traced, a schedule or
    None is no number."""
    for name, value in values.items():
        if isinstance(value, int | float) and not RULES[rule](value):
            raise ValueError(f"{name}={value} must {rule}.")


def check_like_gradients(name: str, tree: Tree, grads: Tree) -> None:
    """Raise ValueError unless further gradients are a tree like those that reach an optimizer."""
    if jax.tree.structure(tree) != jax.tree.structure(grads):
        raise ValueError(
            f"{name} is not a tree like the gradients that reach this optimizer; under "
            "optax.masked or optax.partition, give these mask_compatible_extra_args=True."
        )


def bias_correction(decay: Scalar, count: jax.Array) -> jax.Array:
    """1 − decayᵗ; expm1 keeps its relative precision when decay is near one."""
    return -jnp.expm1(count * jnp.log(jnp.asarray(decay, float)))
