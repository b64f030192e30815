"""What the optimizers share: one rule for each kind of parameter, rates, checks and arithmetic."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import optax

from maxmars.optim._matrices import (
    MatrixSpec,
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
Optimizer = TypeVar("Optimizer", bound=Callable[..., optax.GradientTransformationExtraArgs])


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
        if params is not None:
            params = jax.tree.map(
                lambda g, p: None if g is None else p, updates, params, is_leaf=lambda g: g is None
            )
        wide = (widened(tree) for tree in (updates, state, params))
        new_updates, new_state = inner.update(*wide, **extra_args)
        like = updates if params is None else params
        return cast_like(new_updates, like), cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


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


def stepped(
    direction: Sequence[optax.GradientTransformation],
    weight_decay: ScalarOrSchedule,
    mask: Any,
    learning_rate: ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    """−η (u + λ p), where the chain `direction` gives u and `mask` says which parameters decay."""
    return optax.chain(
        *direction,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def asks_whole_tree(make: Optimizer) -> Optimizer:
    """The optimizer `make`; functions `matrix_specs` and `mask` are called with all parameters, in
    an update without them with all updates, and init checks that the mask covers these.

    The parts of `by_kind` have `MaskedNode`s for the parameters of other kinds.
    """

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
        # Example: of the parameters {"kernel": Array, "bias": Array} optax.partition, within the
        # optimizer, shows the rule of the vectors {"kernel": MaskedNode(), "bias": Array}. A mask
        # by the names or the shapes of both must therefore be called here, before it.
        mask = options.get("mask")
        trees: dict[str, Any] = {"matrix_specs": options.get("matrix_specs"), "mask": mask}
        functions = {name: tree for name, tree in trees.items() if is_function(tree)}
        # The specs and masks are not known before init or update hand over the parameters, so the
        # optimizer is made anew there; it has no state of its own, and `jit` makes it once. Made
        # here, too, it says at once which of its arguments are wrong.
        plain = make(*args, **options | dict.fromkeys(functions))

        def of(tree: Tree) -> optax.GradientTransformationExtraArgs:
            if not functions or not jax.tree.leaves(tree):  # optax.tree.map_params has no leaves
                return plain
            return make(*args, **options | {name: f(tree) for name, f in functions.items()})

        def init_fn(params: Tree) -> Tree:
            if mask is not None and jax.tree.leaves(params):
                check_prefix("mask", mask(params) if "mask" in functions else mask, params)
            return of(params).init(params)

        def update_fn(
            updates: Tree, state: Tree, params: Tree = None, **extra_args: Any
        ) -> tuple[Tree, Tree]:
            tree = updates if params is None else params
            return of(tree).update(updates, state, params, **extra_args)

        return optax.GradientTransformationExtraArgs(init_fn, update_fn)

    return cast(Optimizer, made)


def by_kind(
    rules: Mapping[str, optax.GradientTransformation], matrix_specs: Any
) -> optax.GradientTransformationExtraArgs:
    """One rule for each kind of parameter; kinds with the same rule share a state. Warns of missing
    specs, so that the rules need not: theirs are `default_specs` then.

    Args:
      rules: the rule of each kind: "matrix", "vector" and, unless embeddings are matrices like any
        other, "embedding".
      matrix_specs: `MatrixSpec`s as a pytree prefix, see `resolve_specs`.
    """
    names = {rule: name for name, rule in reversed(list(rules.items()))}

    def label(spec: MatrixSpec) -> str:
        return names[rules.get(spec.kind, rules["matrix"])]

    def labels(params: Tree) -> Any:
        return jax.tree.map(label, resolve_specs(matrix_specs, params))

    by_name: dict[Any, Any] = {name: rule for rule, name in names.items()}
    partition = optax.partition(by_name, labels, mask_compatible_extra_args=True)

    def init_fn(params: Tree) -> Tree:
        warn_without_specs(matrix_specs, params)
        return partition.init(params)

    return optax.GradientTransformationExtraArgs(init_fn, partition.update)


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
