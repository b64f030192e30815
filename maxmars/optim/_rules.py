"""Common parts of the optimizers: rules by kind of parameter, the end of a chain, dtypes, checks.

`by_kind` makes an optimizer from a `Rule` for each kind of parameter (matrix, embedding, vector).
`descend` is the end of each chain, −η (u + λ p), with the changes of a `WeightUpdate`. Two wrappers
go around all: `per_matrix` resolves specs and masks once the parameters are known, and `in_float32`
computes in float32 at least.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxmars.optim._matrices import (
    MatrixSpec,
    check_prefix,
    is_function,
    named_leaves,
    resolve_specs,
    warn_without_specs,
)

Scalar = float | jax.Array
ScalarOrSchedule = optax.ScalarOrSchedule
Tree = Any  # a pytree of arrays like the parameters
# By the words that end a message: "b1=1.5 must lie in [0, 1)".
REQUIREMENTS: dict[str, Callable[[float], bool]] = {
    "lie in [0, 1)": lambda x: 0 <= x < 1,
    "lie in (0, 1)": lambda x: 0 < x < 1,
    "be positive": lambda x: x > 0,
}


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner`, calculated in float32 at least: float16 has no 1e-8, and 0.999 is 1 in bfloat16.

    `inner` gets gradients, parameters and state in the wider dtype. The new state has the dtypes of
    the old one (for float16 parameters, those of float32 ones), and updates have the dtypes of the
    parameters, or of the gradients where no parameters are given. Parameters without a gradient may
    be anything: an Equinox module has functions.
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
    """The parameters, with None in place of each that has no update."""
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
    """Function from resolved specs to the transformation of those parameters alone."""


def per_matrix(
    make: Callable[..., optax.GradientTransformation], matrix_specs: Any, *masks: Any
) -> PerMatrix:
    """Resolve specs and masks by all parameters, in init and in update, and warn of missing specs.

    In update the gradients stand in for parameters that are not given.

    Args:
      make: from the `MatrixSpec` of each parameter, and each mask, to a transformation.
      matrix_specs: see `resolve_specs`.
      masks: trees of bools, prefixes of the parameters; or functions from these to such a tree.
    """

    # Called in init and again in update, as a state holds arrays and no specs.
    def resolved(params: Tree) -> optax.GradientTransformationExtraArgs:
        specs = resolve_specs(matrix_specs, params)
        made = make(specs, *(_resolved_mask(mask, params) for mask in masks))
        return optax.with_extra_args_support(made)

    def init_fn(params: Tree) -> Any:
        transformation = resolved(params)
        warn_without_specs(matrix_specs, params)
        return transformation.init(params)

    def update_fn(
        updates: Tree, state: Any, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, Any]:
        params = where_updated(updates, params)
        tree = updates if params is None else params
        return resolved(tree).update(updates, state, params, **extra_args)

    transformation = PerMatrix(init_fn, update_fn)
    # `by_kind` makes each part for the parameters of one kind, from specs already resolved.
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


# Equal only to itself: kinds that share a `Rule` object share a chain and its state.
@dataclass(frozen=True, eq=False)
class Rule:
    """The update −η (u + λ p), where the chain `direction` gives u."""

    direction: Sequence[optax.GradientTransformation]
    weight_decay: ScalarOrSchedule
    learning_rate: ScalarOrSchedule


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """Changes of the update −η (u + λ p). Norms are those of each matrix of a stack by itself.

    Raises:
      ValueError: a field is out of range, or `hyperball` is not alone.
    """

    hyperball: bool = False
    """p′ = p − η u ‖p‖ / ‖u‖, then p ← p′ ‖p‖ / ‖p′‖ (arXiv 2606.16899): every norm stays, so
    nothing decays. A matrix of zeros would never move, and is refused: by `init`, which sees no
    values under jit, and by `check_no_zero_matrix`."""
    floor: Scalar | None = None
    """Scale u up to ‖u‖ = floor ‖p‖ where u is shorter; 0.35 in modded-nanogpt, without decay."""
    cautious_decay: bool = False
    """Decay a coordinate only where u p ≥ 0 (arXiv 2510.12402)."""
    coupled_decay: ScalarOrSchedule | None = None
    """A factor of λ: η as a fraction of its peak (AdamC, arXiv 2506.02285)."""
    kinds: tuple[str, ...] = ("matrix",)
    """Kinds of parameters that are changed so: "matrix", "embedding", "vector"."""

    def __post_init__(self) -> None:
        check_numbers("be positive", floor=self.floor)
        for kind in self.kinds:
            check_choice("WeightUpdate.kinds", kind, ("matrix", "embedding", "vector"))
        others = {
            "floor": self.floor is not None,
            "cautious_decay": self.cautious_decay,
            "coupled_decay": self.coupled_decay is not None,
        }
        if self.hyperball and any(others.values()):
            names = ", ".join(name for name, given in others.items() if given)
            raise ValueError(
                f"hyperball=True sets every norm and decays nothing; leave out {names}."
            )


def check_no_zero_matrix(
    params: Tree, weight_update: WeightUpdate, matrix_specs: Any = None
) -> None:
    """Refuse matrices of zeros, which `hyperball` would never move.

    Call it on parameters that were made under jit, where `init` sees no values.

    Args:
      params: arrays; traced and abstract ones are not checked.
      weight_update: of the optimizer.
      matrix_specs: see `resolve_specs`.

    Raises:
      ValueError: a matrix is zero; the message names it.
    """
    if not weight_update.hyperball:
        return
    specs = jax.tree.leaves(resolve_specs(matrix_specs, params))
    concrete = [
        (name, param, spec)
        for (name, param), spec in zip(named_leaves(params), specs, strict=True)
        if isinstance(param, jax.Array | np.ndarray) and not isinstance(param, jax.core.Tracer)
        if param.size and spec.kind in weight_update.kinds
    ]
    arrays, kinds = [x for _, x, _ in concrete], [spec for *_, spec in concrete]
    with jax.ensure_compile_time_eval():  # concrete values, also where a caller is traced
        lengths = jax.jit(lambda arrays: [*map(norms, arrays, kinds)])(arrays)
    for (name, *_), length in zip(concrete, lengths, strict=True):
        if (is_zero := np.asarray(length) == 0).any():
            where = f" (number {np.argmax(is_zero)} of the stack)" if is_zero.size > 1 else ""
            raise ValueError(
                f"{name}{where} is zero, and hyperball keeps every norm, so it would never move; "
                "initialise it otherwise, or leave hyperball out."
            )


def norms(x: jax.Array, spec: MatrixSpec) -> jax.Array:
    """‖x‖_F of each matrix or vector of the stack; its axes have the size 1."""
    axes = spec.inner if x.ndim else ()
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))


class DescendState(NamedTuple):
    """State of `descend`: the counts of schedules."""

    decay: Any
    coupling: Any
    rate: Any


def descend(
    learning_rate: ScalarOrSchedule,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Any = None,
    *,
    weight_update: WeightUpdate | None = None,
    matrix_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The end of a chain: −η (u + λ p) of a direction u, changed as `weight_update` says.

    ```python
    adam_h = optax.chain(
        optax.scale_by_adam(), descend(3e-3, weight_update=WeightUpdate(hyperball=True))
    )
    ```

    Args:
      learning_rate: η, a float, a traced scalar or a schedule.
      weight_decay: λ, a float or a schedule.
      mask: which parameters decay, a tree of bools or a function from parameters to one.
      weight_update: None is −η (u + λ p) itself.
      matrix_specs: `MatrixSpec`s, see `resolve_specs`.

    Raises:
      ValueError: in init, `hyperball` meets a matrix of zeros.
    """
    rule = Rule([], weight_decay, learning_rate)

    def make(specs: Tree, decays: Any) -> optax.GradientTransformation:
        return in_float32(optax.chain(*descent(rule, weight_update, specs, decays)))

    return per_matrix(make, matrix_specs, mask)


def descent(
    rule: Rule, weight_update: WeightUpdate | None, specs: Tree, decays: Any
) -> list[optax.GradientTransformation]:
    """`descend` of a rule, with the spec of each parameter."""
    decay = optax.add_decayed_weights(rule.weight_decay, decays)
    rate = optax.scale_by_learning_rate(rule.learning_rate)
    if weight_update is None:
        return [decay, rate]
    changes = weight_update
    factor = 1.0 if changes.coupled_decay is None else changes.coupled_decay
    coupling = optax.scale_by_learning_rate(factor, flip_sign=False)

    def init_fn(params: Tree) -> DescendState:
        check_no_zero_matrix(params, changes, specs)
        return DescendState(*(part.init(params) for part in (decay, coupling, rate)))

    def direction(
        spec: MatrixSpec, u: jax.Array, p: jax.Array, decayed: jax.Array, coupled: jax.Array
    ) -> jax.Array:
        if spec.kind not in changes.kinds:
            return u + decayed
        if changes.hyperball:  # a direction of zeros stays zero
            return u * (norms(p, spec) / jnp.maximum(norms(u, spec), 1e-10))
        if changes.cautious_decay:
            coupled = jnp.where(u * p >= 0, coupled, 0)
        if changes.floor is not None:
            length, weight = (jnp.maximum(norms(x, spec), 1e-8) for x in (u, p))
            u = u * jnp.maximum(changes.floor * weight / length, 1)
        return u + coupled

    def on_sphere(spec: MatrixSpec, update: jax.Array, p: jax.Array) -> jax.Array:
        if spec.kind not in changes.kinds:
            return update
        moved = p + update
        return moved * (norms(p, spec) / jnp.maximum(norms(moved, spec), 1e-10)) - p

    def update_fn(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, DescendState]:
        # λ p alone, of an update of zeros: cautious and coupled decay change it before the sum.
        zeros = optax.tree.zeros_like(updates)
        decayed, decay_state = decay.update(zeros, state.decay, params)
        coupled, coupling_state = coupling.update(decayed, state.coupling)
        updates = jax.tree.map(direction, specs, updates, params, decayed, coupled)
        updates, rate_state = rate.update(updates, state.rate)
        if changes.hyperball:
            updates = jax.tree.map(on_sphere, specs, updates, params)
        return updates, DescendState(decay_state, coupling_state, rate_state)

    return [optax.GradientTransformation(init_fn, update_fn)]


def by_kind(
    rules: Mapping[str, Rule],
    matrix_specs: Any,
    mask: Any,
    weight_update: WeightUpdate | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with a rule for each kind of parameter; kinds with the same rule share a state.

    Args:
      rules: the rule of each kind: "matrix", "vector" and, unless embeddings are matrices like any
        other, "embedding".
      matrix_specs: see `resolve_specs`.
      mask: which parameters decay, a tree of bools or a function from parameters to one.
      weight_update: see `descend`.
    """
    # A rule has the name of its first kind: reversed, since the last of equal keys wins.
    names = {rule: name for name, rule in reversed(list(rules.items()))}

    def make(specs: Tree, decays: Any) -> optax.GradientTransformation:
        labels = jax.tree.map(lambda spec: names[rules.get(spec.kind, rules["matrix"])], specs)

        def chain(rule: Rule) -> optax.GradientTransformation:
            # `optax.partition` hands a chain its own parameters, with these nodes for all others.
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
                *descent(rule, weight_update, own, decays),
            )

        chains: dict[Any, Any] = {name: chain(rule) for rule, name in names.items()}
        # Also `prev_grads`, a tree like the gradients, is to be masked so.
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


def check_numbers(requirement: str, **values: Any) -> None:
    """Raise ValueError unless each number meets one of `REQUIREMENTS`; traced values, schedules and
    None are not checked."""
    for name, value in values.items():
        if isinstance(value, int | float) and not REQUIREMENTS[requirement](value):
            raise ValueError(f"{name}={value} must {requirement}.")


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
