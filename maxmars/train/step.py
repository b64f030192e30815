"""The train step: a pure function of a `TrainState` and a batch, jitted over a mesh.

`train` runs the step, `plan` compiles it for absent hardware, and tests call it. In reading order:
the state; making and restoring it; the jitted step; `_step`, which computes all; gradients; random
numbers; the guard; metrics.

The state is donated: the new state takes its memory. The step knows no optimizer by name: those
that need more gradients request them (`GradientRequest`). A skipped step changes only step count
and guard. The peak learning rate is in the state, so that a change compiles nothing anew.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Key, Shaped

from maxmars.checkpoint import Checkpoint
from maxmars.checkpoint.digest import leaf_paths, leaf_types
from maxmars.checkpoint.reader import in_float32
from maxmars.config import GPT2Config, GuardConfig, OptaxConfig, TrainConfig
from maxmars.config.mesh import check_mesh
from maxmars.data.batches import batch_types
from maxmars.data.windows import Types
from maxmars.distributed import sharding
from maxmars.model.language_model import check_model, make_model, mean_loss, takes_dropout
from maxmars.model.parameters import COMPONENTS, Parameters, init_params
from maxmars.optim import GradientRequest, requests_of
from maxmars.train.compiler_options import compiler_options
from maxmars.train.norms import (
    at_least_float32,
    frobenius_norms,
    global_norm,
    measure_matrices,
    root_mean_squares,
    spectral_norms,
    squared_norms,
)
from maxmars.train.optimizer import (
    check_initial_params,
    evaluated_in_words,
    follows_rate,
    make_optimizer,
    make_schedule,
    opt_state_shardings,
    own_evaluation_params,
)

Metrics = dict[str, jax.Array]


SKIP_REASONS = (
    "",
    "not finite",
    "a spike of the loss",
    "a spike of the gradient norm",
    "the mask counts none of its targets",
)
"""Reasons of skipped steps, by `train/skip_reason`; 0 means that the step is not skipped."""
NO_TARGETS = SKIP_REASONS.index("the mask counts none of its targets")


class RunningStats(NamedTuple):
    """Exponential moving mean and variance, over about the last `guard.history` values."""

    count: Any
    """Number of finite values so far, int32 []."""
    mean: Any
    """float32 []."""
    variance: Any
    """float32 []."""


class Guard(NamedTuple):
    """State of the guard, from earlier steps; see `check_step`."""

    num_skipped: Any
    """Number of skipped steps, int32 []."""
    consecutive_skips: Any
    """Number of skipped steps since the last step that was not skipped, int32 []."""
    num_losses: Any
    """Number of finite losses so far, int32 []."""
    loss_mean: Any
    """Running mean of the loss, float32 []."""
    loss_variance: Any
    """Running variance of the loss, float32 []."""
    norms: RunningStats | None = None
    """Statistics of the gradient norm; None if it has no threshold."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a train step reads and writes."""

    step: Any
    """Number of steps taken, int32 [], from which the schedule gives the learning rate."""
    params: Any
    """Parameters, a nested dict."""
    opt_state: Any
    """State of the optimizer; its arrays have the parameters' shardings."""
    prev_params: Any
    """Parameters of the step before, for an optimizer that requests a gradient there (exact MARS);
    else None."""
    hyperparams: Any
    """`learning_rate` [], an array, so that another rate does not recompile the step."""
    guard: Guard
    evaluation_params: Any = None
    """Parameters for evaluation and export, if other than `params`: the EMA with `ema_decay`; in a
    checkpoint also those that a user's own optimizer names. Shardings are those of `params`, dtypes
    float32 or wider."""


# --- making and restoring a state ----------------------------------------------------------------


def abstract_train_state(config: TrainConfig, parameters: Parameters) -> TrainState:
    """Shapes, dtypes and shardings of the state, as `jax.ShapeDtypeStruct`s.

    Args:
      config: what to train.
      parameters: parameters of the model, on the mesh.

    Raises:
      ValueError: the mesh does not divide the model or the batch.
    """
    check_mesh(config, parameters.mesh.shape)
    check_model(parameters)
    abstract = jax.eval_shape(
        lambda params, hyperparams: _initial_state(config, parameters, params, hyperparams),
        parameters.abstract,
        _hyperparams(config, parameters),
    )
    opt_state = opt_state_shardings(config.optimizer, parameters, abstract.opt_state)
    shardings = sharding.like_params(abstract, parameters.sharded)
    return sharding.with_shardings(abstract, dataclasses.replace(shardings, opt_state=opt_state))


def init_train_state(
    config: TrainConfig, parameters: Parameters, given: Mapping[str, Any] | None = None
) -> TrainState:
    """Create a state on its devices, with values that do not depend on the mesh.

    Args:
      config: what to train.
      parameters: parameters of the model, on the mesh of the state.
      given: fields of the state that exist already, by name, on the mesh; they include `params`.
        Other fields, and abstract leaves of these, are created to go with `params`.

    Raises:
      ValueError: the mesh does not divide the model or the batch, or a parameter would never change
        under the optimizer.
    """
    if given is None:
        create_all = make_initializer(config, parameters)
        hyperparams = make_hyperparams(config, parameters)
        state = TrainState(**create_all(np.uint32(config.seed), hyperparams))
        check_initial_params(config.optimizer, parameters, state.params)
        return state
    state = TrainState(**vars(abstract_train_state(config, parameters)) | dict(given))
    check_initial_params(config.optimizer, parameters, state.params)
    leaves, structure = jax.tree.flatten(state)
    missing = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)}

    def create(params: Any, hyperparams: dict[str, jax.Array]) -> dict[int, jax.Array]:
        # A jitted function returns an unchanged argument itself, such as `prev_params`. The state
        # will be donated, so no two of its fields may share an array: copy.
        new = _initial_state(config, parameters, jax.tree.map(jnp.copy, params), hyperparams)
        created = jax.tree.leaves(new)
        return {i: created[i] for i in missing}

    if missing:
        hyperparams = make_hyperparams(config, parameters)
        create_missing = jax.jit(create, out_shardings=_shardings(missing))
        for i, leaf in create_missing(state.params, hyperparams).items():
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def abstract_saved_state(
    train_step: TrainStep, saved: Checkpoint, *, new_optimizer_state: bool = False
) -> TrainState:
    """The abstract state in the checkpoint `saved`, whose guard and optimizer may differ from the
    step's, for `restore_state`; with `new_optimizer_state` without the optimizer's state."""
    state, config = train_step.abstract_state, train_step.config
    before = dataclasses.replace(config, guard=saved.config.guard)
    # The former code of a user's own optimizer may be gone; `resume` has compared its arrays.
    if not new_optimizer_state and not isinstance(config.optimizer, OptaxConfig):
        before = dataclasses.replace(before, optimizer=saved.config.optimizer)
    if before != config:
        state = abstract_train_state(before, train_step.parameters)
    evaluation_params = in_float32(state.params) if saved.has_evaluation_params else None
    state = dataclasses.replace(state, evaluation_params=evaluation_params)
    if new_optimizer_state:
        state = dataclasses.replace(state, opt_state=None, prev_params=None)
    return state


def restore_state(train_step: TrainStep, state: TrainState) -> TrainState:
    """Adapt a state from a checkpoint to the step's config: its learning rate, guard, optimizer and
    EMA. Arrays that the checkpoint lacks are new, an EMA equal to the parameters."""
    config, parameters = train_step.config, train_step.parameters
    fields = match_by_type(vars(state), vars(train_step.abstract_state))
    fields["hyperparams"] = make_hyperparams(config, parameters)
    return init_train_state(config, parameters, fields)


def match_by_type(old: Any, new: Any) -> Any:
    """Replace the leaves of the tree `new` by those of `old`, where both trees have the array.

    Switching a clip or a metric on or off changes the positions in an optax chain. So elements of
    plain tuples are matched by type, not by position, if both have as many of the type.
    """
    if leaf_types(old) == leaf_types(new):
        leaves = dict(zip(leaf_paths(old), jax.tree.leaves(old), strict=True))
        return jax.tree.unflatten(jax.tree.structure(new), [leaves[p] for p in leaf_paths(new)])
    if isinstance(new, dict) and isinstance(old, dict):
        return {key: match_by_type(old.get(key), value) for key, value in new.items()}
    if type(new) is not type(old) or not isinstance(new, tuple):
        return new
    if hasattr(new, "_fields"):
        return type(new)(*map(match_by_type, old, new))
    # A chain, such as (Clip, Adam, Decay) -> (Adam, Decay): the i-th of a type goes to the i-th.
    num_old, num_new = (collections.Counter(map(type, chain)) for chain in (old, new))
    of_type = {kind: iter([x for x in old if type(x) is kind]) for kind in num_old & num_new}
    return tuple(
        match_by_type(next(of_type[type(x)]), x) if num_old[type(x)] == num_new[type(x)] else x
        for x in new
    )


def make_initializer(config: TrainConfig, parameters: Parameters) -> Any:
    """Make a `jax.jit` function from a seed (uint32) and hyperparams to the fields of a new state,
    by name: one program in the compilation cache for all seeds and learning rates.

    Raises:
      ValueError: the mesh does not divide the model or the batch.
    """
    return jax.jit(
        lambda seed, hyperparams: vars(
            _initial_state(config, parameters, init_params(config.model, seed), hyperparams)
        ),
        out_shardings=_shardings(vars(abstract_train_state(config, parameters))),
    )


def make_hyperparams(config: TrainConfig, parameters: Parameters) -> dict[str, jax.Array]:
    """`TrainState.hyperparams` of a config, on the mesh."""
    replicate = jax.jit(lambda values: values, out_shardings=sharding.replicated(parameters.mesh))
    return replicate(_hyperparams(config, parameters))


def _initial_state(
    config: TrainConfig, parameters: Parameters, params: Any, hyperparams: Mapping[str, Any]
) -> TrainState:
    zero, zero_loss = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.float32)
    tx = _optimizer(config, parameters, hyperparams["learning_rate"])
    needs_previous = any(request.at == "prev_params" for request in requests_of(tx))
    watches_norms = config.guard.grad_norm_spike_threshold is not None
    return TrainState(
        step=zero,
        params=params,
        opt_state=tx.init(params),
        # MARS's correction ignores the first gradient at `prev_params`, but the guard checks it,
        # and at zeros the gradient of a model may not be finite.
        prev_params=params if needs_previous else None,
        hyperparams=hyperparams,
        guard=Guard(
            num_skipped=zero,
            consecutive_skips=zero,
            num_losses=zero,
            loss_mean=zero_loss,
            loss_variance=zero_loss,
            norms=RunningStats(zero, zero_loss, zero_loss) if watches_norms else None,
        ),
        evaluation_params=None
        if config.ema_decay is None
        else jax.tree.map(at_least_float32, params),
    )


def _hyperparams(config: TrainConfig, parameters: Parameters) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves(parameters.abstract)
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in leaves))
    return {"learning_rate": np.asarray(config.optimizer.learning_rate, dtype)}


def _optimizer(
    config: TrainConfig, parameters: Parameters, learning_rate: Any, rate_fraction: Any = 1.0
) -> optax.GradientTransformationExtraArgs:
    return make_optimizer(
        config.optimizer,
        parameters,
        learning_rate,
        rate_fraction=rate_fraction,
        batch_tokens=config.tokens_per_step,
    )


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


# --- the jitted step -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainStep:
    """The jitted step on its mesh. A call donates (uses up) the state."""

    config: TrainConfig
    parameters: Parameters
    """Parameters of the model, on the mesh."""
    jitted: Any
    """`jax.jit` function of (TrainState, batch)."""
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    evaluation_params: Any
    """`jax.jit` function from optimizer state and parameters to `TrainState.evaluation_params`,
    where a user's own optimizer names them; else None."""

    @property
    def evaluated(self) -> str | None:
        """Name of the evaluated parameters, such as the EMA; None for the trained parameters."""
        if self.config.ema_decay is None and self.evaluation_params is None:
            return None
        return evaluated_in_words(self.config)

    @property
    def mesh(self) -> Mesh:
        return self.parameters.mesh

    def __call__(
        self, state: TrainState, batch: Mapping[str, jax.Array]
    ) -> tuple[TrainState, Metrics]:
        """Take one optimizer step.

        Args:
          state: the state, whose buffers the new state takes.
          batch: `tokens`, int32 [microbatches, rows, max_seq_len + 1], and any of `mask`,
            `segment_ids` and `positions` (see `model.mean_loss`) in that shape. The loss is the
            mean over all targets of the step that the mask counts.

        Returns:
          The new state, and these metrics, scalars unless a shape is given:

          * `train/loss`, nats a token; `train/learning_rate`, unless a user's own optimizer ignores
            the run's rate;
          * `train/grad_norm` before the clip; with a clip, `train/grad_clipped`: whether the norm
            exceeded it;
          * `train/skipped` and `train/consecutive_skips`: numbers of steps without an update;
          * `train/skip_reason`: index into `SKIP_REASONS`;
          * `train/update_rms/KIND` for linear, embedding and vector; 0 in a skipped step;
          * `train/clip_fraction` of optimizers that clip each matrix;
          * with `log.norms`, `train/norms` [3, components]: norms of gradients, of parameters after
            the step, and of updates; with `layers` also `train/layer_norms` [3, matrices], see
            `norms.LAYER_NORMS`. `norms.named_norms` names the elements.
        """
        with jax.set_mesh(self.mesh):
            return self.jitted(state, batch)

    def trace(self) -> jax.stages.Traced:
        """Trace the step for abstract arguments."""
        with jax.set_mesh(self.mesh):
            return self.jitted.trace(self.abstract_state, self.abstract_batch)

    def lower(self) -> jax.stages.Lowered:
        """Lower the step for abstract arguments."""
        with jax.set_mesh(self.mesh):
            return self.trace().lower()

    def text(self) -> str:
        """Text of the compiled step, with the names of operations as in a trace."""
        text = self.lower().compile().as_text()
        assert text is not None  # every backend of JAX has one
        return text


def make_train_step(
    config: TrainConfig, parameters: Parameters, types: Types | None = None
) -> TrainStep:
    """Make the train step of a config.

    Args:
      config: what to train.
      parameters: parameters of the model, on the mesh.
      types: dtypes of a batch's arrays, see `DataSplit.types`; None takes `batch_types` of the
        config.

    Raises:
      ValueError: the mesh does not divide the model or the batch.
    """
    mesh, abstract_state = parameters.mesh, abstract_train_state(config, parameters)
    shape = (config.microbatches, config.microbatch_size, config.model.max_seq_len + 1)
    batch_sharding, replicated = sharding.batch_sharding(mesh), sharding.replicated(mesh)
    shardings = _shardings(abstract_state)
    requests = requests_of(_optimizer(config, parameters, config.optimizer.learning_rate))
    jitted = jax.jit(
        lambda state, batch: _step(config, parameters, requests, state, batch),
        donate_argnums=0,
        in_shardings=(shardings, batch_sharding),
        out_shardings=(shardings, replicated),
        compiler_options=compiler_options(config, mesh.devices.flat[0].platform),
    )
    types = types or batch_types(config.data, config.model)
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding)
        for name, dtype in types.items()
    }
    evaluation_params = None
    if (function := own_evaluation_params(config.optimizer, parameters)) is not None:
        evaluation_params = jax.jit(
            lambda opt_state, params: jax.tree.map(at_least_float32, function(opt_state, params)),
            out_shardings=parameters.shardings,
        )
    return TrainStep(config, parameters, jitted, abstract_state, batch, evaluation_params)


def saved_state(train_step: TrainStep, state: TrainState) -> TrainState:
    """The state for a checkpoint, with the evaluated parameters of a user's own optimizer, so that
    readers need not run the optimizer's code."""
    if train_step.evaluation_params is None:
        return state
    with jax.set_mesh(train_step.mesh):
        params = train_step.evaluation_params(state.opt_state, state.params)
    return dataclasses.replace(state, evaluation_params=params)


def evaluated_params(train_step: TrainStep, state: TrainState) -> Any:
    """The evaluated parameters, in the dtypes and shardings of `state.params`."""
    params = saved_state(train_step, state).evaluation_params
    if params is None:
        return state.params
    return jax.tree.map(lambda x, param: x.astype(param.dtype), params, state.params)


class _Updated(NamedTuple):
    """Fields of the state that a skipped step does not change."""

    params: Any
    opt_state: Any
    prev_params: Any
    evaluation_params: Any


def _step(
    config: TrainConfig,
    parameters: Parameters,
    requests: Sequence[GradientRequest],
    state: TrainState,
    batch: dict[str, Shaped[Array, "microbatches rows window"]],
) -> tuple[TrainState, Metrics]:
    """The step itself, see `TrainStep.__call__`: gradients, guard, update, metrics."""
    batch, mask_mean = _normalize_mask(batch)
    if takes_dropout(config.model):
        batch = {**batch, "dropout_keys": _dropout_keys(config, state)}
    rate_fraction = make_schedule(config)(state.step)
    learning_rate = state.hyperparams["learning_rate"] * rate_fraction
    components, specs = parameters.components, parameters.specs
    loss, gradients, further = _gradients(config, parameters, requests, state, batch)
    norms = [some.norm for some in (gradients, *further.values())]
    reason, guard = check_step(config.guard, state.guard, loss, norms)
    reason = jnp.where(mask_mean == 0, NO_TARGETS, reason)
    apply = reason == 0
    grad_squares = {
        component: config.gradient_multiplier**2 * square
        for component, square in squared_norms(components, gradients.unscaled).items()
    }

    def update_norms(updates: Any) -> tuple[Metrics, jax.Array | None]:
        layers = None
        if config.log.norms == "layers":
            measures = (root_mean_squares, spectral_norms)
            layers = jnp.stack([measure_matrices(measure, specs, updates) for measure in measures])
        return squared_norms(components, updates), layers

    def update() -> tuple[_Updated, Any]:
        tx = _optimizer(config, parameters, learning_rate, rate_fraction)
        updates, opt_state = tx.update(
            gradients.clipped(),
            state.opt_state,
            state.params,
            **{name: some.clipped() for name, some in further.items()},
        )
        params = optax.apply_updates(state.params, updates)
        updated = _Updated(
            params=params,
            opt_state=opt_state,
            prev_params=None if state.prev_params is None else state.params,
            evaluation_params=_update_ema(config, state, params),
        )
        return updated, update_norms(updates)

    def skip() -> tuple[_Updated, Any]:
        old = _Updated(*(getattr(state, name) for name in _Updated._fields))
        return old, jax.tree.map(jnp.zeros_like, jax.eval_shape(update_norms, state.params))

    with jax.named_scope("optimizer"):
        if parameters.mesh.devices.flat[0].platform == "cpu":
            # XLA's CPU backend copies the arrays of a select, which halves the speed or worse.
            updated, (update_squares, layers) = jax.lax.cond(apply, update, skip)
        else:
            # Elsewhere a select fuses into the update, which reads the old values anyway.
            updated, (update_squares, layers) = jax.tree.map(
                lambda new, old: jnp.where(apply, new, old), update(), skip()
            )
        param_squares = squared_norms(components, updated.params)
    metrics = {
        "train/loss": loss,
        "train/grad_norm": gradients.norm,
        "train/skipped": guard.num_skipped,
        "train/consecutive_skips": guard.consecutive_skips,
        "train/skip_reason": reason,
        **_update_metrics(components, state.params, update_squares, updated.opt_state),
    }
    if follows_rate(config.optimizer, parameters):
        metrics["train/learning_rate"] = learning_rate
    if config.log.norms:
        # One array rather than twelve scalars: each output of the step costs the host time.
        squares = [
            [quantity[component] for component in COMPONENTS]
            for quantity in (grad_squares, param_squares, update_squares)
        ]
        metrics["train/norms"] = jnp.sqrt(jnp.stack([*map(jnp.stack, squares)])).astype(jnp.float32)
    if layers is not None:
        grad_norms = measure_matrices(frobenius_norms, specs, gradients.unscaled)
        layer_norms = [config.gradient_multiplier * grad_norms[None], layers]
        metrics["train/layer_norms"] = jnp.concatenate(layer_norms)
    if config.gradient_clip_norm is not None:
        metrics["train/grad_clipped"] = gradients.norm > config.gradient_clip_norm
    new_state = dataclasses.replace(state, step=state.step + 1, guard=guard, **updated._asdict())
    return new_state, metrics


def _update_ema(config: TrainConfig, state: TrainState, params: Any) -> Any:
    """The EMA of the parameters after this update, the t-th that is applied; None without EMA.

    The EMA starts at zero and is divided by 1 - decay^t (Adam's bias correction). Written as a step
    from the corrected EMA before, its weight is (1 - decay) / (1 - decay^t): 1 for t = 1.
    """
    decay, ema = config.ema_decay, state.evaluation_params
    if decay is None:
        return None
    t = state.step - state.guard.num_skipped + 1
    weight = (1 - decay) / -jnp.expm1(t * math.log(decay))
    moved = optax.incremental_update(params, ema, weight)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), moved, ema)


# --- gradients -----------------------------------------------------------------------------------


def _normalize_mask(
    batch: dict[str, jax.Array],
) -> tuple[dict[str, jax.Array], jax.Array | float]:
    """Divide a batch's mask by its mean over all targets of the step; return batch and mean.

    The masked loss, averaged over microbatches and devices, is then the mean over all targets that
    the mask counts, however these are distributed. If the mask counts none, mask and loss are NaN,
    and the guard skips the step.
    """
    if "mask" not in batch:
        return batch, 1.0
    mask = batch["mask"].astype(jnp.float32)
    mean = mask[..., 1:].mean()
    return {**batch, "mask": jnp.where(mean > 0, mask / mean, jnp.nan)}, mean


class Gradients(NamedTuple):
    """Gradients with their scale, which is applied late, so that XLA fuses it into the use."""

    unscaled: Any
    norm: Float[Array, ""]
    """Global norm after the multiplier and before the clip."""
    multiplier: float
    max_norm: float | None
    """Global norm to clip to; None does not clip."""

    def clipped(self) -> Any:
        """The gradients times multiplier and min(1, max_norm / (norm + 1e-6)), as in PyTorch's
        `clip_grad_norm_`."""
        scale: Any = self.multiplier
        if self.max_norm is not None:
            scale = scale * jnp.minimum(1.0, self.max_norm / (self.norm + 1e-6))
        return jax.tree.map(lambda g: g * jnp.asarray(scale, g.dtype), self.unscaled)


def _gradients(
    config: TrainConfig,
    parameters: Parameters,
    requests: Sequence[GradientRequest],
    state: TrainState,
    batch: dict[str, Any],
) -> tuple[jax.Array, Gradients, dict[str, Gradients]]:
    """The loss, its gradients, and the gradients that an optimizer requests, by name; zeros for a
    request that is not due."""
    # Gradients on sampled labels are squared, to estimate curvature, which takes the plain mean.
    multipliers = {"data": config.gradient_multiplier, "sampled": 1.0}

    def gradients_at(params: Any, targets: str) -> tuple[jax.Array, Any, jax.Array]:
        rows = batch if targets == "data" else {**batch, "uniforms": _uniforms(config, state)}
        with jax.named_scope("model"):
            loss, grads = mean_loss_and_grads(
                lambda params, rows: mean_loss(make_model(config.model, params), **rows),
                params,
                rows,
                parameters.shardings,
                # A user's own module may mix rows, or name the mesh axis `data`.
                rows_independent=isinstance(config.model, GPT2Config),
            )
        with jax.named_scope("clip"):
            norm = multipliers[targets] * global_norm(grads)
        if targets == "sampled" and "mask" in batch:
            grads = _rescale_to_all_targets(grads, batch["mask"])
        return loss, grads, norm

    def requested(request: GradientRequest) -> Gradients:
        def compute() -> tuple[Any, jax.Array]:
            params = _params_at(request, parameters, state)
            return gradients_at(params, request.targets)[1:]

        def zeros() -> tuple[Any, jax.Array]:
            return jax.tree.map(jnp.zeros_like, state.params), jnp.zeros_like(gradients.norm)

        due = request.due
        grads, norm = (
            compute() if due is None else jax.lax.cond(due(state.opt_state), compute, zeros)
        )
        return Gradients(grads, norm, multipliers[request.targets], config.gradient_clip_norm)

    loss, grads, norm = gradients_at(state.params, "data")
    gradients = Gradients(grads, norm, multipliers["data"], config.gradient_clip_norm)
    return loss, gradients, {request.name: requested(request) for request in requests}


def mean_loss_and_grads(
    loss: Callable[[Any, Any], jax.Array],
    params: Any,
    batch: Any,
    shardings: Any,
    *,
    rows_independent: bool,
) -> tuple[jax.Array, Any]:
    """Loss and gradient, averaged over the microbatches on the first axis of `batch`'s arrays.

    With `rows_independent`, each device sums its gradients over microbatches, and one all-reduce
    over `data` follows, instead of one for each microbatch.

    Args:
      loss: function of parameters and a microbatch; a mean over the rows.
      params: the parameters.
      batch: a tree of arrays [microbatches, rows, ...].
      shardings: NamedShardings of the gradients.
      rows_independent: whether the loss is computed row by row, without naming the axis `data`.
    """
    count = jax.tree.leaves(batch)[0].shape[0]
    data_size = jax.sharding.get_abstract_mesh().shape["data"] if rows_independent else 1
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)

    def value_and_grad(params: Any, microbatch: Any) -> tuple[jax.Array, Any]:
        value, grads = jax.value_and_grad(loss)(params, microbatch)
        # Without the constraint, the partitioner replicates gradients of scanned layers over fsdp.
        return value, jax.tree.map(jax.lax.with_sharding_constraint, grads, specs)

    def sum_over_microbatches(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        # In float32 at least: a sum in bfloat16 stops growing at 256 terms, and XLA's CPU backend
        # has no all-reduce in bfloat16.
        def of_microbatch(microbatch: Any) -> tuple[jax.Array, Any]:
            return jax.tree.map(at_least_float32, value_and_grad(params, microbatch))

        def add(total: Any, microbatch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, of_microbatch(microbatch)), None

        first = jax.tree.map(lambda x: x[0], batch)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(of_microbatch, first))
        total, _ = jax.lax.scan(add, zeros, batch)
        return jax.lax.psum(total, "data") if data_size > 1 else total

    if count == 1:
        return value_and_grad(params, jax.tree.map(lambda x: x[0], batch))
    if data_size > 1:
        # With `data` as a Manual axis, the partitioner inserts no all-reduce for each microbatch.
        sum_over_microbatches = jax.shard_map(
            sum_over_microbatches,
            in_specs=(PartitionSpec(), PartitionSpec(None, "data")),
            out_specs=PartitionSpec(),
            axis_names={"data"},
            check_vma=False,
        )
    value, grads = jax.tree.map(
        lambda x: x / (count * data_size), sum_over_microbatches(params, batch)
    )
    return value, jax.tree.map(lambda x, p: x.astype(p.dtype), grads, params)


def _params_at(request: GradientRequest, parameters: Parameters, state: TrainState) -> Any:
    """The parameters at which an optimizer requests a gradient, in the dtypes and shardings of
    `state.params`."""
    match request.at:
        case "params":
            return state.params
        case "prev_params":
            return state.prev_params
        case at:
            params = jax.tree.map(
                lambda x, param: x.astype(param.dtype),
                at(state.opt_state, state.params),
                state.params,
            )
            return jax.lax.with_sharding_constraint(params, parameters.shardings)


# --- random numbers -------------------------------------------------------------------------------
# All are functions of seed, step and row: the same after a resume, and on any mesh.


def _dropout_keys(config: TrainConfig, state: TrainState) -> Key[Array, "microbatches rows"]:
    """A key for the dropout of each row."""
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    return jax.random.split(
        jax.random.fold_in(key, 1), (config.microbatches, config.microbatch_size)
    )


def _uniforms(config: TrainConfig, state: TrainState) -> Float[Array, "microbatches rows length"]:
    """Uniform numbers in [0, 1), by which the model's labels are sampled."""
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    shape = (config.microbatches, config.microbatch_size, config.model.max_seq_len)
    return jax.random.uniform(key, shape, state.hyperparams["learning_rate"].dtype)


def _rescale_to_all_targets(grads: Any, mask: jax.Array) -> Any:
    """Rescale a gradient on sampled labels under a mask of mean 1 to the size that it would have if
    the mask counted all targets. Its square times the targets of a step estimates curvature."""
    root = jax.lax.rsqrt(jnp.square(mask[..., 1:]).mean())
    return jax.tree.map(lambda g: (root * g).astype(g.dtype), grads)


# --- the guard -----------------------------------------------------------------------------------


def check_step(
    config: GuardConfig, guard: Guard, loss: jax.Array, grad_norms: list[jax.Array]
) -> tuple[jax.Array, Guard]:
    """Decide whether to skip a step, and update the guard.

    A step is skipped if loss or gradients are not finite, or if the loss or the gradient norm is a
    spike: more than `threshold` running standard deviations above the running mean. A spike enters
    the statistics clipped to that limit, so that a loss that stays high raises the limit and passes
    in the end.

    Args:
      config: thresholds and history.
      guard: the guard before the step, with `norms` if the gradient norm has a threshold.
      loss: loss of the step, [].
      grad_norms: norms of all gradients of the update, each []. Spikes are of the first alone.

    Returns:
      An index into `SKIP_REASONS`, int32 [], 0 for a step that is not skipped; and the guard.
    """
    finite = jnp.isfinite(loss)
    for norm in grad_norms:
        finite &= jnp.isfinite(norm)
    losses = RunningStats(guard.num_losses, guard.loss_mean, guard.loss_variance)
    losses, is_loss_spike = _update_stats(losses, loss, config.loss_spike_threshold, config.history)
    updated = guard._replace(
        num_losses=losses.count, loss_mean=losses.mean, loss_variance=losses.variance
    )
    reason = jnp.where(is_loss_spike, 2, 0)
    if guard.norms is not None:
        threshold = config.grad_norm_spike_threshold
        norms, is_norm_spike = _update_stats(guard.norms, grad_norms[0], threshold, config.history)
        updated = updated._replace(norms=norms)
        reason = jnp.where(is_norm_spike & ~is_loss_spike, 3, reason)
    reason = jnp.where(finite, reason, 1).astype(jnp.int32)
    # One NaN in a running mean would stay there for ever.
    guard = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, guard)
    guard = guard._replace(
        num_skipped=guard.num_skipped + (reason > 0),
        consecutive_skips=jnp.where(reason > 0, guard.consecutive_skips + 1, 0),
    )
    return reason, guard


def _update_stats(
    stats: RunningStats, value: jax.Array, threshold: float | None, history: int
) -> tuple[RunningStats, jax.Array]:
    """Add a value to the statistics; return them, and whether the value is a spike."""
    value, is_spike = value.astype(jnp.float32), jnp.zeros([], bool)
    if threshold is not None:
        limit = stats.mean + threshold * jnp.sqrt(stats.variance)
        is_spike = (value > limit) & (stats.count >= history)
        value = jnp.where(is_spike, limit, value)
    # The plain mean and variance up to `history` values, then exponential ones.
    weight = 1 / jnp.minimum(stats.count + 1, history).astype(jnp.float32)
    change = value - stats.mean
    return RunningStats(
        count=stats.count + 1,
        mean=stats.mean + weight * change,
        variance=(1 - weight) * (stats.variance + weight * change**2),
    ), is_spike


# --- metrics --------------------------------------------------------------------------------------


def _update_metrics(
    components: Any, params: Any, squares: Mapping[str, jax.Array], opt_state: Any
) -> Metrics:
    """Root mean square of the update for each kind of parameter, from `squares`, the update's sums
    of squares by component; and the optimizer's own metrics."""
    sizes: collections.Counter[str] = collections.Counter()
    for component, param in zip(jax.tree.leaves(components), jax.tree.leaves(params), strict=True):
        sizes[component] += param.size
    kinds = {"linear": ("attention", "mlp"), "embedding": ("embedding",), "vector": ("vector",)}
    metrics = {}
    for kind, of_kind in kinds.items():
        total = sum(squares[component] for component in of_kind)
        size = sum(sizes[component] for component in of_kind) or 1  # a model may lack a kind
        # JAX makes a Python integer an int32, into which a size of 2^31 or more does not fit.
        metrics[f"train/update_rms/{kind}"] = jnp.sqrt(total / float(size))
    for _, value in optax.tree.get_all_with_path(opt_state, "clip_fraction"):
        if value is not None:
            metrics.setdefault("train/clip_fraction", value)
    return metrics
