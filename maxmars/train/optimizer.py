"""The optax optimizer of a config, by the kind of each parameter.

`rule_of` of the optimizer's config maps a kind (`Parameters.kinds`: matrix, embedding, vector) to
an update rule, a rate and a weight decay. The package's own optimizers take these as masks and
specs. A user's own optimizer (`OptaxConfig`) is any optax function: it is called with the arguments
that its signature names, and checked on abstract arrays before a run begins.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal

from maxmars.checkpoint.digest import leaf_types
from maxmars.config import (
    AdamWConfig,
    LionConfig,
    MarsConfig,
    MuonConfig,
    NAdamWConfig,
    OptaxConfig,
    OptimizerConfig,
    SoapConfig,
    TrainConfig,
)
from maxmars.config.optimizer import UpdateRule
from maxmars.distributed.sharding import like_params
from maxmars.model.parameters import COMPONENTS, Parameters
from maxmars.optim import (
    GradientRequest,
    WeightUpdate,
    descend,
    describe,
    kernel_preset,
    mars,
    momentum_kernel,
    muon,
    requests_of,
    scale_by_adam_of,
    soap,
    soap_shardings,
)


def update_rules(optimizer: OptimizerConfig, parameters: Parameters) -> Any:
    """The `UpdateRule` of each parameter, as a nested dict."""
    return jax.tree.map(optimizer.rule_of, parameters.kinds)


def describe_parameters(optimizer: OptimizerConfig, parameters: Parameters) -> str:
    """A table of the parameters: matrix, rule, rate (a multiple of the run's) and decay. For a
    user's own optimizer, its numeric options follow."""
    rules = update_rules(optimizer, parameters)

    def column(field: str) -> Any:
        def cell(rule: UpdateRule) -> Any:
            value = getattr(rule, field)
            return "its own" if value is None else value

        return jax.tree.map(cell, rules)

    table = describe(
        parameters.abstract,
        parameters.split_specs(getattr(optimizer, "qkv", "fused")),
        rule=column("name"),
        rate=column("learning_rate_scale"),
        decay=column("weight_decay"),
    )
    if not isinstance(optimizer, OptaxConfig):
        return table
    numbers = [f"{k}={v!r}" for k, v in optimizer.options.items() if isinstance(v, int | float)]
    name = optimizer.source.spec
    return f"{table}\n\noptions of {name}: {', '.join(numbers)}" if numbers else table


def note_on_package(optimizer: OptimizerConfig) -> str | None:
    """A note on the limits of an installed package's optimizer; None for others."""
    if not isinstance(optimizer, OptaxConfig) or optimizer.source.file:
        return None
    return (
        f"{optimizer.source.spec} gets the layers stacked in one array: a norm of an array is "
        "over all layers. What it trains is what is evaluated; for others (schedule-free) take a "
        "FILE.py:NAME that names them"
    )


def summarize_rules(optimizer: OptimizerConfig, parameters: Parameters) -> str:
    """Number of parameters by rule, as `mars-adamw for 836,608, adamw for 1,152 parameters`."""
    sizes: dict[str, int] = {}
    rules = jax.tree.leaves(update_rules(optimizer, parameters))
    for leaf, rule in zip(jax.tree.leaves(parameters.abstract), rules, strict=True):
        sizes[rule.name] = sizes.get(rule.name, 0) + leaf.size
    return ", ".join(f"{rule} for {size:,}" for rule, size in sizes.items()) + " parameters"


def make_optimizer(
    optimizer: OptimizerConfig,
    parameters: Parameters,
    learning_rate: optax.ScalarOrSchedule,
    *,
    rate_fraction: Any = 1.0,
    batch_tokens: int = 1,
) -> optax.GradientTransformationExtraArgs:
    """Make the optax optimizer of a model's parameters (a nested dict).

    Args:
      optimizer: config of the optimizer, with its hyperparameters.
      parameters: kinds, specs and shardings of the parameters.
      learning_rate: replaces the config's rate: a traced scalar (the step's rate) or a schedule.
      rate_fraction: the learning rate over its peak, by which a coupled decay scales.
      batch_tokens: number of targets in a step, an argument that a user's own optimizer may have.
    """
    rules, mesh = update_rules(optimizer, parameters), parameters.mesh
    decays = jax.tree.map(lambda rule: bool(rule.weight_decay), rules)
    weight_update, kernel = _weight_update(optimizer, rate_fraction), _kernel(optimizer)
    match optimizer:
        case AdamWConfig() | NAdamWConfig() | LionConfig():
            make, scale_by = {
                AdamWConfig: (optax.adamw, optax.scale_by_adam),
                NAdamWConfig: (optax.nadamw, functools.partial(optax.scale_by_adam, nesterov=True)),
                LionConfig: (optax.lion, optax.scale_by_lion),
            }[type(optimizer)]
            if weight_update is None and kernel is None:
                tx = make(learning_rate, mask=decays, **_options(optimizer))
            else:
                if isinstance(optimizer, AdamWConfig) and kernel is not None:
                    direction = scale_by_adam_of(kernel, b2=optimizer.b2, eps=optimizer.eps)
                else:  # a chain like that of optax.adamw, so that its saved state fits
                    direction = scale_by(**_options(optimizer, "weight_decay"))
                tx = optax.chain(
                    direction,
                    descend(
                        learning_rate,
                        optimizer.weight_decay,
                        decays,
                        weight_update=weight_update,
                        matrix_specs=parameters.specs,
                    ),
                )
        case SoapConfig():
            tx = soap(
                learning_rate,
                mask=decays,
                weight_update=weight_update,
                matrix_specs=parameters.specs,
                mesh=mesh if mesh is not None and mesh.size > 1 else None,
                momentum_kernel=kernel,
                **_options(optimizer),
            )
        case MarsConfig() | MuonConfig():
            make = mars if isinstance(optimizer, MarsConfig) else muon
            tx = make(
                learning_rate,
                mask=decays,
                weight_update=weight_update,
                matrix_specs=parameters.split_specs(optimizer.qkv),
                mesh=mesh,
                momentum_kernel=kernel,
                ownership_axes=mesh.axis_names if mesh and optimizer.own_over_data else None,
                **_options(optimizer, "decay_embeddings", "qkv", "own_over_data"),
            )
        case OptaxConfig():
            tx, _ = _own_optimizer(optimizer, parameters, learning_rate, batch_tokens)
    return optax.with_extra_args_support(tx)


def _weight_update(optimizer: OptimizerConfig, rate_fraction: Any = 1.0) -> WeightUpdate | None:
    """Changes of the weight update in a config; None without changes."""
    if isinstance(optimizer, OptaxConfig) or not optimizer.weight_update.enabled:
        return None
    hooks = vars(optimizer.weight_update)
    return WeightUpdate(
        **hooks | {"coupled_decay": rate_fraction if hooks["coupled_decay"] else None}
    )


def check_initial_params(optimizer: OptimizerConfig, parameters: Parameters, params: Any) -> None:
    """Let the optimizer's `init` check the values of a run's first parameters.

    Raises:
      ValueError: a parameter would never change under the optimizer.
    """
    tx = make_optimizer(optimizer, parameters, optimizer.learning_rate)
    # Under jit parameters are tracers, without values. Here they are constants, and `eval_shape`
    # allocates nothing for the state.
    jax.eval_shape(lambda: tx.init(params))


def _kernel(optimizer: OptimizerConfig) -> optax.GradientTransformation | None:
    """The momentum kernel of a config; None where the optimizer has its own momentum."""
    config = getattr(optimizer, "momentum_kernel", None)
    if config is None or not config.is_on:
        return None
    # Bias correction changes the scale of momentum, which these divide by a second moment.
    # Newton-Schulz and sign ignore the scale.
    needs_debias = isinstance(optimizer, AdamWConfig | SoapConfig)
    needs_debias |= isinstance(optimizer, MarsConfig) and optimizer.variant == "adamw"
    kernel: dict[str, Any] = {"decays": config.decays, "weights": config.weights}
    if config.preset is None:
        kernel |= {"gradient_weight": config.gradient_weight}
    else:
        steps = {"switch_step": config.switch_step, "end_step": config.end_step}
        kernel = kernel_preset(config.preset, **steps, **(kernel if config.decays else {}))
    kernel.setdefault("debias", needs_debias)
    return momentum_kernel(**kernel)


def own_evaluation_params(
    optimizer: OptimizerConfig, parameters: Parameters
) -> Callable[[Any, Any], Any] | None:
    """A user's function from optimizer state and parameters to the parameters for evaluation and
    export; None where the trained parameters serve."""
    if not isinstance(optimizer, OptaxConfig):
        return None
    return _own_optimizer(optimizer, parameters, optimizer.learning_rate)[1]


def evaluated_in_words(config: TrainConfig) -> str:
    """Name of the evaluated parameters, in a run where these are not the trained ones."""
    if config.ema_decay is not None:
        return f"the average of the parameters (ema_decay={config.ema_decay})"
    assert isinstance(config.optimizer, OptaxConfig)  # others evaluate what they train
    return f"the parameters that {config.optimizer.source.spec} names"


def _own_optimizer(
    optimizer: OptaxConfig,
    parameters: Parameters,
    learning_rate: optax.ScalarOrSchedule,
    batch_tokens: int = 1,
) -> tuple[optax.GradientTransformation, Callable[[Any, Any], Any] | None]:
    """Call the user's function; return the optimizer, and `evaluation_params` or None.

    Raises:
      FileNotFoundError, ValueError: there is no such function, the function does not take the
        arguments, or it returns another type. Other errors are the function's.
    """
    make = optimizer.source.load(field="optimizer.make")
    signature = inspect.signature(make)
    named = signature.parameters
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in named.values())
    # These two also go to a function with `**kwargs`; those below only to one that names them.
    to_all = {"matrix_specs": parameters.specs, "mesh": parameters.mesh}
    arguments = {n: value for n, value in to_all.items() if has_kwargs or n in named}
    decays = jax.tree.map(lambda kind: kind == "matrix", parameters.kinds)
    by_name = {"mask": decays, "weight_decay_mask": decays, "batch_tokens": batch_tokens}
    arguments |= {n: value for n, value in by_name.items() if n in named}
    if "muon_weight_dimension_numbers" in named:
        raise ValueError(
            f"optimizer.make={optimizer.make!r} would orthogonalise the embeddings and give Adam "
            "to every kernel, as layers are stacked. Take optimizer=muon of gpt2 or quickstart, or "
            "a FILE.py:NAME that gives it muon_weight_dimension_numbers."
        )
    arguments |= optimizer.options
    try:
        signature.bind(learning_rate, **arguments)
    except TypeError as error:
        raise ValueError(
            f"optimizer.make={optimizer.make!r} cannot be called with "
            f"{', '.join(['learning_rate', *arguments])} ({error}); it is make(learning_rate, "
            "**options) with the keys of optimizer.options, and matrix_specs, mesh, mask and "
            "batch_tokens if it wants."
        ) from None
    try:
        result = make(learning_rate, **arguments)
    except Exception as error:
        if optimizer.source.file:
            raise  # the traceback shows the user's own file
        raise ValueError(
            f"optimizer.make={optimizer.make!r} makes no optimizer: {error}."
        ) from error
    match result:
        case optax.GradientTransformation():
            return result, None
        case (optax.GradientTransformation() as tx, function) if callable(function):
            return tx, function
    raise ValueError(
        f"optimizer.make={optimizer.make!r} returned a {type(result).__name__}; it must return an "
        "optax.GradientTransformation, or a pair of one and a function "
        "evaluation_params(opt_state, params)."
    )


def check_optimizer(
    optimizer: OptimizerConfig, parameters: Parameters, ema_decay: float | None = None
) -> None:
    """Check a user's own optimizer on abstract arrays: whether updates, and the parameters that it
    names for evaluation or requests, are like the model's; whether its state can be saved.

    Raises:
      FileNotFoundError, ValueError: see `OptaxConfig`.
    """
    if not isinstance(optimizer, OptaxConfig):
        return
    label = f"the optimizer of optimizer.make={optimizer.make!r}"
    params = parameters.abstract
    tx, function = _own_optimizer(optimizer, parameters, optimizer.learning_rate)
    try:
        update, (rate, before) = _own_update(optimizer, parameters)
        updates, after = jax.eval_shape(update, rate, before)
    except Exception as error:
        # Python's TypeError for an `update` with further required arguments.
        needs_more = isinstance(error, TypeError) and " missing " in str(error)
        if optimizer.source.file and not needs_more:
            raise  # the traceback shows the user's own file
        raise ValueError(
            f"{label} makes no updates of gradients, state and parameters alone ({error}); take "
            "one whose update needs nothing else, or other optimizer.options; a further gradient "
            "is requested by maxmars.optim.with_requests."
        ) from error
    if not _is_like(updates, params):
        raise ValueError(
            f"{label} makes updates of another structure or shape than the parameters."
        )
    _check_state(label, before, after)
    _check_requests(label, requests_of(tx), before, params)
    if function is not None and ema_decay is not None:
        raise ValueError(
            f"{label} names the parameters to evaluate, and ema_decay={ema_decay} their average; "
            "set ema_decay to None, or return the optimizer alone."
        )
    if function is not None and not _is_like(jax.eval_shape(function, before, params), params):
        raise ValueError(
            f"{label} has an evaluation_params whose result is of another structure or shape than "
            "the parameters."
        )
    # A rate in the state would stay that of `init`.
    if optax.tree.get_all_with_path(before, "learning_rate"):
        raise ValueError(
            f"{label} keeps learning_rate in its state, as optax.inject_hyperparams does, so it "
            "would follow no schedule; give inject_hyperparams static_args='learning_rate', or "
            "leave it out."
        )


def follows_rate(optimizer: OptimizerConfig, parameters: Parameters) -> bool:
    """Whether updates or state depend on the run's learning rate: a user's own optimizer may have a
    schedule of its own instead."""
    if not isinstance(optimizer, OptaxConfig):
        return True
    update, (rate, state) = _own_update(optimizer, parameters)
    program = jax.make_jaxpr(update)(rate, state).jaxpr
    dependent = {program.invars[0]}  # variables that depend on the rate
    for operation in program.eqns:
        if any(not isinstance(v, Literal) and v in dependent for v in operation.invars):
            dependent.update(operation.outvars)
    return any(not isinstance(v, Literal) and v in dependent for v in program.outvars)


def _own_update(
    optimizer: OptaxConfig, parameters: Parameters
) -> tuple[Callable[[Any, Any], tuple[Any, Any]], tuple[Any, Any]]:
    """Make a function from rate and state to updates and next state, with zeros for gradients and
    parameters; return it with its abstract arguments."""
    params = parameters.abstract

    def init(params: Any) -> Any:
        return make_optimizer(optimizer, parameters, optimizer.learning_rate).init(params)

    def update(rate: Any, state: Any) -> tuple[Any, Any]:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        tx = make_optimizer(optimizer, parameters, rate)
        further = {request.name: zeros for request in requests_of(tx)}
        return tx.update(zeros, state, zeros, **further)

    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(params)))
    return update, (jax.ShapeDtypeStruct((), dtype), jax.eval_shape(init, params))


def _is_like(tree: Any, params: Any) -> bool:
    """Whether a tree has the structure and shapes of the parameters."""
    return jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, params)


def _check_state(label: str, before: Any, after: Any) -> None:
    """Check that an optimizer's abstract state can be saved, and that an update keeps its types."""
    types, types_after = leaf_types(before), leaf_types(after)
    for name, leaf in zip(types, jax.tree.leaves(before), strict=True):
        is_real = not jnp.issubdtype(leaf.dtype, jax.dtypes.extended) and leaf.dtype.kind != "c"
        if not is_real or not leaf.size:
            raise ValueError(
                f"{label} has a state that cannot be saved: {name} is {types[name]}; keep arrays "
                "of real numbers with an element or more (a PRNG key as jax.random.key_data(key))."
            )
    names = types | types_after
    changed = [name for name in names if types.get(name) != types_after.get(name)]
    if not changed and jax.tree.structure(before) == jax.tree.structure(after):
        return
    what = "its containers are others after"
    if changed:
        a, b = (some.get(changed[0], "absent") for some in (types, types_after))
        what = f"{changed[0]} is {a} before and {b} after"
    raise ValueError(
        f"{label} changes the type of its state in update: {what}. Return what init makes, and "
        "cast it back, as by x.astype(old.dtype)."
    )


def _check_requests(
    label: str, requests: Sequence[GradientRequest], opt_state: Any, params: Any
) -> None:
    """Check the results of the functions in an optimizer's requests, on its abstract state."""
    for request in requests:
        at, due = request.at, request.due
        if callable(at) and not _is_like(jax.eval_shape(at, opt_state, params), params):
            raise ValueError(
                f"{label} requests {request.name} at a tree of another structure or shape than the "
                "parameters."
            )
        result = None if due is None else jax.eval_shape(due, opt_state)
        if result is not None and (np.shape(result), jnp.result_type(result)) != ((), bool):
            raise ValueError(
                f"{label} requests {request.name} with a `due` that returns {result}; it must "
                "return a bool []."
            )


def _options(optimizer: OptimizerConfig, *without: str) -> dict[str, Any]:
    """Fields of a config that an optimizer takes as arguments of the same names."""
    separate = {"learning_rate", "momentum_kernel", "weight_update"}
    names = {f.name for f in dataclasses.fields(optimizer)} - {*separate, *without}
    return {name: getattr(optimizer, name) for name in names}


def opt_state_shardings(optimizer: OptimizerConfig, parameters: Parameters, opt_state: Any) -> Any:
    """NamedShardings of an (abstract) optimizer state.

    An array of the state has the sharding of its parameter, except SOAP's bases, which are on the
    devices that own their matrices.
    """
    shardings, mesh = like_params(opt_state, parameters.sharded), parameters.mesh
    if not isinstance(optimizer, SoapConfig) or mesh.size == 1:
        return shardings
    bases = soap_shardings(opt_state, mesh, parameters.specs)
    return jax.tree.map(lambda a, b: a if b is None else b, shardings, bases)


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """The learning rate over its peak, in [0, 1], as a function of the step: a linear warmup from
    0, then the decay to `final_fraction`, which holds from `decay_steps` on."""
    schedule, final = config.schedule, config.schedule.final_fraction
    steps = max(config.decay_steps - schedule.warmup_steps, 1)
    match schedule.decay:
        case "cosine":
            decay = optax.cosine_decay_schedule(1.0, steps, alpha=final)
        case "linear":
            decay = optax.linear_schedule(1.0, final, steps)
        case "exponential":
            decay = _exponential_decay(steps, final)
        case "wsd":  # warmup, stable, decay (arXiv 2404.06395)
            length = round(schedule.wsd_decay_fraction * config.decay_steps)
            length = min(max(length, 1), steps)
            decay = optax.linear_schedule(1.0, final, length, transition_begin=steps - length)
    warmup = optax.linear_schedule(0.0, 1.0, schedule.warmup_steps)
    shape = optax.join_schedules([warmup, decay], [schedule.warmup_steps])
    # From an int32 step optax makes float32, also in a run in float64.
    return lambda step: shape(jnp.asarray(step, float))


def _exponential_decay(steps: int, final: float) -> optax.Schedule:
    """The schedule `exp` of the official MARS code, 0.9^(100 progress), which at the last step is
    2.7e-5 above `final`."""

    def decay(step: jax.typing.ArrayLike) -> jax.Array:
        factor = 0.9 ** (100 * jnp.asarray(step) / steps)
        return final + (1 - final) * jnp.where(jnp.asarray(step) > steps, 0.0, factor)

    return decay


def learning_rate_scales(optimizer: OptimizerConfig, parameters: Parameters) -> dict[str, float]:
    """The learning rate of each component of the model as a multiple of the run's, where not 1."""
    components = jax.tree.leaves(parameters.components)
    rules = dict(zip(components, jax.tree.leaves(update_rules(optimizer, parameters)), strict=True))
    scales = {
        component: rules[component].learning_rate_scale or 1.0
        for component in COMPONENTS
        if component in rules
    }
    return {component: scale for component, scale in scales.items() if scale != 1.0}
