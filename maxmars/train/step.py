"""The train step: a pure function of a `TrainState` and a batch, jitted over a mesh.

`train` runs it, `plan` compiles it for hardware that is not there, and tests call it. In reading
order: the state, how a state is made, the jitted step, what the step computes, and its parts
(gradients over microbatches, the clip, the guard).
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
from maxmars.config import (
    GPT2Config,
    GuardConfig,
    OptaxConfig,
    TrainConfig,
)
from maxmars.config.mesh import check_mesh
from maxmars.data.batches import batch_types
from maxmars.data.windows import Types
from maxmars.distributed import sharding
from maxmars.model.language_model import check_model, make_model, mean_loss, takes_dropout
from maxmars.model.parameters import COMPONENTS, Parameters, init_params
from maxmars.optim import GradientRequest, requests_of
from maxmars.train.compiler_options import compiler_options
from maxmars.train.norms import (
    frobenius_norms,
    global_norm,
    of_matrices,
    root_mean_squares,
    spectral_norms,
    squared_norms,
    widened,
)
from maxmars.train.optimizer import (
    check_start,
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
"""Why a step is skipped, by `train/skip_reason`; the first is that of a step which is not."""
NO_TARGETS = SKIP_REASONS.index("the mask counts none of its targets")


class Running(NamedTuple):
    """A running mean and variance, which weigh the last `guard.history` numbers most."""

    count: Any
    """Finite numbers seen, int32 []."""
    mean: Any
    """float32 []."""
    variance: Any
    """float32 []."""


class Guard(NamedTuple):
    """What the guard remembers of earlier steps; see `check_step`."""

    num_skipped: Any
    """Steps skipped in all, int32 []."""
    consecutive_skips: Any
    """Steps skipped since the last step that was not, int32 []."""
    num_losses: Any
    """Finite losses seen, int32 []."""
    loss_mean: Any
    """Running mean of the loss, float32 []."""
    loss_variance: Any
    """Running variance of the loss, float32 []."""
    norms: Running | None = None
    """Of the norm of the gradient; None where no threshold of it is set."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a train step reads and writes: nested dicts of arrays, and the optimizer's state."""

    step: Any
    """Number of steps taken, int32 []. The learning rate's schedule follows it."""
    params: Any
    """Parameters."""
    opt_state: Any
    """State of the optimizer; its arrays have the parameters' shardings."""
    prev_params: Any
    """Parameters of the step before, of an optimizer that requests a gradient there (exact MARS);
    None for others."""
    hyperparams: Any
    """`learning_rate` [], an array, so that another rate does not recompile the step."""
    guard: Guard
    evaluation_params: Any = None
    """The parameters that are evaluated and exported, where these are not `params`: their average
    with `ema_decay`, and in a checkpoint those that a user's own optimizer names. They have the
    parameters' shardings, and are in float32 at least."""


# --- making a state ------------------------------------------------------------------------------


def abstract_train_state(config: TrainConfig, parameters: Parameters) -> TrainState:
    """The state's shapes, dtypes and shardings; nothing is allocated.

    Args:
      config: what to train.
      parameters: of its model, on a mesh.

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
    """A new state, created in place on its devices; its values do not depend on the mesh.

    Args:
      config: what to train.
      parameters: of its model, on the mesh where the state goes.
      given: fields of the state that exist already, in the mesh's shardings, by name, `params`
        among them; only the others, and what is abstract in these, are created, for these
        parameters.

    Raises:
      ValueError: the mesh does not divide the model or the batch, or the optimizer cannot move a
        parameter.
    """
    if given is None:
        create_all = make_initializer(config, parameters)
        hyperparams = make_hyperparams(config, parameters)
        state = TrainState(**create_all(np.uint32(config.seed), hyperparams))
        check_start(config.optimizer, parameters, state.params)
        return state
    state = TrainState(**vars(abstract_train_state(config, parameters)) | dict(given))
    check_start(config.optimizer, parameters, state.params)
    leaves, structure = jax.tree.flatten(state)
    missing = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)}

    def create(params: Any, hyperparams: dict[str, jax.Array]) -> dict[int, jax.Array]:
        # Copied, as a jitted function returns an unchanged argument itself: the state is donated,
        # so no two of its fields may share an array.
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
    """The state of the step as the checkpoint `saved` has it, for `continued_state`.

    With `new_optimizer_state` it has none of the optimizer.
    """
    state, config, stored = train_step.abstract_state, train_step.config, saved.config
    before = dataclasses.replace(config, guard=stored.guard)
    if not new_optimizer_state and not isinstance(config.optimizer, OptaxConfig):
        before = dataclasses.replace(before, optimizer=stored.optimizer)
    if before != config:
        state = abstract_train_state(before, train_step.parameters)
    named = in_float32(state.params) if saved.has_evaluation_params else None
    state = dataclasses.replace(state, evaluation_params=named)
    if new_optimizer_state:
        state = dataclasses.replace(state, opt_state=None, prev_params=None)
    return state


def continued_state(train_step: TrainStep, state: TrainState) -> TrainState:
    """A state from a checkpoint as the step goes on with it: at the config's learning rate, and
    with the guard, the optimizer and the average that the config asks for; what these lack is made
    anew, an average from the present parameters."""
    config, parameters = train_step.config, train_step.parameters
    fields = carried_over(vars(state), vars(train_step.abstract_state))
    fields["hyperparams"] = make_hyperparams(config, parameters)
    return init_train_state(config, parameters, fields)


def carried_over(old: Any, new: Any) -> Any:
    """The tree `new` with the leaves of `old` where that has the same array; the others stay.

    A clip, a correction or a measurement more or less moves the parts of an optimizer's chain. So
    the parts of a tuple are those of the same type, if both have equally many of it.
    """
    if leaf_types(old) == leaf_types(new):
        named = dict(zip(leaf_paths(old), jax.tree.leaves(old), strict=True))
        return jax.tree.unflatten(jax.tree.structure(new), [named[n] for n in leaf_paths(new)])
    if isinstance(new, dict) and isinstance(old, dict):
        return {key: carried_over(old.get(key), part) for key, part in new.items()}
    if type(new) is not type(old) or not isinstance(new, tuple):
        return new
    if hasattr(new, "_fields"):
        return type(new)(*map(carried_over, old, new))
    before, now = (collections.Counter(map(type, parts)) for parts in (old, new))
    parts = {kind: iter([part for part in old if type(part) is kind]) for kind in before & now}
    return tuple(
        carried_over(next(parts[kind]), part) if before[kind] == now[kind] else part
        for kind, part in zip(map(type, new), new, strict=True)
    )


def make_initializer(config: TrainConfig, parameters: Parameters) -> Any:
    """A `jax.jit` function from a seed (uint32) and `make_hyperparams` to the fields of a new
    state, by name.

    So its program, which the compilation cache keeps, is one for all seeds and learning rates.

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
    """`TrainState.hyperparams` as the config says."""
    place = jax.jit(lambda values: values, out_shardings=sharding.replicated(parameters.mesh))
    return place(_hyperparams(config, parameters))


def _initial_state(
    config: TrainConfig, parameters: Parameters, params: Any, hyperparams: Mapping[str, Any]
) -> TrainState:
    zero, zero_loss = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.float32)
    tx = _optimizer(config, parameters, hyperparams["learning_rate"])
    needs_previous = any(request.at == "prev_params" for request in requests_of(tx))
    return TrainState(
        step=zero,
        params=params,
        opt_state=tx.init(params),
        # The first step also takes a gradient here, and the guard checks it, but MARS's correction
        # does not use it. At zeros a model's gradient may not be finite.
        prev_params=params if needs_previous else None,
        hyperparams=hyperparams,
        guard=Guard(
            num_skipped=zero,
            consecutive_skips=zero,
            num_losses=zero,
            loss_mean=zero_loss,
            loss_variance=zero_loss,
            norms=Running(zero, zero_loss, zero_loss) if _watches_norms(config) else None,
        ),
        evaluation_params=None if config.ema_decay is None else jax.tree.map(widened, params),
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


def _watches_norms(config: TrainConfig) -> bool:
    return config.guard.grad_norm_spike_threshold is not None


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


# --- the jitted step -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainStep:
    """The jitted step on its mesh. Calling it donates (uses up) the state."""

    config: TrainConfig
    parameters: Parameters
    """Of the model, on the mesh."""
    jitted: Any
    """`jax.jit` function of (TrainState, batch)."""
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    evaluation_params: Any
    """`jax.jit` function from the optimizer's state and the parameters to
    `TrainState.evaluation_params`, where a user's own optimizer names them; else None."""

    @property
    def evaluated(self) -> str | None:
        """The parameters that are evaluated, in words; None if they are those that are trained."""
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
          state: the state; its buffers are reused for the new one.
          batch: `tokens`, int32 [microbatches, rows, max_seq_len + 1], and any of `mask`,
            `segment_ids` and `positions` (see `model.mean_loss`) in that shape. The loss is the
            mean over those targets of all microbatches that the mask counts.

        Returns:
          The new state, and these metrics, each a scalar unless it says otherwise:

          * `train/loss` in nats a token; `train/learning_rate`, unless the optimizer is a user's
            own that leaves it aside;
          * `train/grad_norm` before the clip, and with a clip `train/grad_clipped`: whether the
            clip was active;
          * `train/skipped` and `train/consecutive_skips`: steps whose update was not applied;
          * `train/skip_reason`: why it was not, the index of one of `SKIP_REASONS`;
          * `train/update_rms/KIND` for linear, embedding and vector; 0 where the update was not
            applied;
          * `train/clip_fraction` of optimizers that clip each matrix;
          * with `log.norms` the array `train/norms` [3, components]: norms of gradients, of
            parameters after the step, and of updates; with `layers` also `train/layer_norms` [3,
            matrices] of `norms.LAYER_NORMS`. `norms.named_norms` names them.
        """
        with jax.set_mesh(self.mesh):
            return self.jitted(state, batch)

    def trace(self) -> jax.stages.Traced:
        """The step traced ahead of time, from shapes alone."""
        with jax.set_mesh(self.mesh):
            return self.jitted.trace(self.abstract_state, self.abstract_batch)

    def lower(self) -> jax.stages.Lowered:
        """The step lowered ahead of time, from shapes alone."""
        with jax.set_mesh(self.mesh):
            return self.trace().lower()

    def text(self) -> str:
        """The compiled step as text, by which a trace names its operations."""
        text = self.lower().compile().as_text()
        assert text is not None  # every backend of JAX has one
        return text


def make_train_step(
    config: TrainConfig, parameters: Parameters, types: Types | None = None
) -> TrainStep:
    """Build the step for a config and a mesh.

    Args:
      config: what to train.
      parameters: of its model, on a mesh.
      types: of a batch's arrays, for `abstract_batch`; see `DataSplit.types`. By default
        `batch_types` of the config.

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
    named = own_evaluation_params(config.optimizer, parameters)
    if named is not None:
        function = named
        named = jax.jit(
            lambda opt_state, params: jax.tree.map(widened, function(opt_state, params)),
            out_shardings=parameters.shardings,
        )
    return TrainStep(config, parameters, jitted, abstract_state, batch, named)


def saved_state(train_step: TrainStep, state: TrainState) -> TrainState:
    """The state as a checkpoint has it: also with the parameters that a user's own optimizer names
    to be evaluated, so that who reads them need not run the optimizer's code."""
    if train_step.evaluation_params is None:
        return state
    with jax.set_mesh(train_step.mesh):
        named = train_step.evaluation_params(state.opt_state, state.params)
    return dataclasses.replace(state, evaluation_params=named)


def evaluated_params(train_step: TrainStep, state: TrainState) -> Any:
    """The parameters that are evaluated, in the types and shardings of `state.params`."""
    named = saved_state(train_step, state).evaluation_params
    if named is None:
        return state.params
    return jax.tree.map(lambda x, param: x.astype(param.dtype), named, state.params)


class _Written(NamedTuple):
    """The fields of the state that a skipped step leaves as they were."""

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
    batch, mask_mean = _with_mean_mask_one(batch)
    if takes_dropout(config.model):
        batch = {**batch, "dropout_keys": _dropout_keys(config, state)}
    rate_fraction = make_schedule(config)(state.step)
    learning_rate = state.hyperparams["learning_rate"] * rate_fraction
    components, specs = parameters.components, parameters.specs

    # Estimates of curvature square the gradients on drawn labels, and need them as a mean.
    multipliers = {"data": config.gradient_multiplier, "sampled": 1.0}

    def gradient_at(params: Any, targets: str) -> tuple[jax.Array, Any, jax.Array]:
        rows = batch if targets == "data" else {**batch, "uniforms": _uniforms(config, state)}
        with jax.named_scope("model"):
            loss, grads = mean_loss_and_grads(
                lambda params, rows: mean_loss(make_model(config.model, params), **rows),
                params,
                rows,
                parameters.shardings,
                rows_apart=_has_rows_apart(config),
            )
        with jax.named_scope("clip"):
            norm = multipliers[targets] * global_norm(grads)
        if targets == "sampled" and "mask" in batch:
            grads = _as_of_all_targets(grads, batch["mask"])
        return loss, grads, norm

    def requested(request: GradientRequest) -> Gradients:
        def compute() -> tuple[Any, jax.Array]:
            params = _params_at(request, parameters, state)
            return gradient_at(params, request.targets)[1:]

        def zeros() -> tuple[Any, jax.Array]:
            return jax.tree.map(jnp.zeros_like, state.params), jnp.zeros_like(gradients.norm)

        due = request.due
        grads, norm = (
            compute() if due is None else jax.lax.cond(due(state.opt_state), compute, zeros)
        )
        return Gradients(grads, norm, multipliers[request.targets], config.gradient_clip_norm)

    loss, grads, norm = gradient_at(state.params, "data")
    gradients = Gradients(grads, norm, multipliers["data"], config.gradient_clip_norm)
    further = {request.name: requested(request) for request in requests}
    norms = [some.norm for some in (gradients, *further.values())]
    reason, guard = check_step(config.guard, state.guard, loss, norms)
    reason = jnp.where(mask_mean == 0, NO_TARGETS, reason)
    apply = reason == 0
    of_gradients = {
        component: config.gradient_multiplier**2 * square
        for component, square in squared_norms(components, gradients.unscaled).items()
    }

    def measured(updates: Any) -> tuple[Metrics, jax.Array | None]:
        of_layers = None
        if config.log.norms == "layers":
            measures = (root_mean_squares, spectral_norms)
            of_layers = jnp.stack([of_matrices(measure, specs, updates) for measure in measures])
        return squared_norms(components, updates), of_layers

    def update() -> tuple[_Written, Any]:
        tx = _optimizer(config, parameters, learning_rate, rate_fraction)
        updates, opt_state = tx.update(
            gradients.clipped(),
            state.opt_state,
            state.params,
            **{name: some.clipped() for name, some in further.items()},
        )
        params = optax.apply_updates(state.params, updates)
        written = _Written(
            params=params,
            opt_state=opt_state,
            prev_params=None if state.prev_params is None else state.params,
            evaluation_params=_averaged(config, state, params),
        )
        return written, measured(updates)

    def skip() -> tuple[_Written, Any]:
        old = _Written(*(getattr(state, name) for name in _Written._fields))
        return old, jax.tree.map(jnp.zeros_like, jax.eval_shape(measured, state.params))

    with jax.named_scope("optimizer"):
        if parameters.mesh.devices.flat[0].platform == "cpu":
            # XLA's CPU backend copies the arrays of a select, which halves the speed or worse.
            written, (of_updates, layers) = jax.lax.cond(apply, update, skip)
        else:
            # A select fuses into the update, which reads the old values anyway.
            written, (of_updates, layers) = jax.tree.map(
                lambda new, old: jnp.where(apply, new, old), update(), skip()
            )
        of_params = squared_norms(components, written.params)
    metrics = {
        "train/loss": loss,
        "train/grad_norm": gradients.norm,
        "train/skipped": guard.num_skipped,
        "train/consecutive_skips": guard.consecutive_skips,
        "train/skip_reason": reason,
        **_update_metrics(components, state.params, of_updates, written.opt_state),
    }
    if follows_rate(config.optimizer, parameters):
        metrics["train/learning_rate"] = learning_rate
    if config.log.norms:
        # One array rather than twelve scalars: each output of the step costs the host time.
        squares = [
            [of[component] for component in COMPONENTS]
            for of in (of_gradients, of_params, of_updates)
        ]
        metrics["train/norms"] = jnp.sqrt(jnp.stack([*map(jnp.stack, squares)])).astype(jnp.float32)
    if layers is not None:
        of_grads = of_matrices(frobenius_norms, specs, gradients.unscaled)
        norms_of_layers = [config.gradient_multiplier * of_grads[None], layers]
        metrics["train/layer_norms"] = jnp.concatenate(norms_of_layers)
    if config.gradient_clip_norm is not None:
        metrics["train/grad_clipped"] = gradients.norm > config.gradient_clip_norm
    new_state = dataclasses.replace(state, step=state.step + 1, guard=guard, **written._asdict())
    return new_state, metrics


def _averaged(config: TrainConfig, state: TrainState, params: Any) -> Any:
    """The average of the parameters of all updates up to these ones, the t-th.

    It is the exponential moving average from zero over 1 - decay^t (Adam's correction of the bias),
    written as a step from the average before: the first one takes it to the parameters.
    """
    decay, average = config.ema_decay, state.evaluation_params
    if decay is None:
        return None
    t = state.step - state.guard.num_skipped + 1
    weight = (1 - decay) / -jnp.expm1(t * math.log(decay))
    moved = optax.incremental_update(params, average, weight)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), moved, average)


# --- gradients -----------------------------------------------------------------------------------


def _with_mean_mask_one(
    batch: dict[str, jax.Array],
) -> tuple[dict[str, jax.Array], jax.Array | float]:
    """The batch with its mask, if it has one, divided by the mean over all targets of the step;
    and that mean.

    The mean over microbatches and devices of the masked loss is then the mean over the targets that
    count, however these are divided. Where none counts, mask and loss are NaN, and the guard skips
    the step.
    """
    if "mask" not in batch:
        return batch, 1.0
    mask = batch["mask"].astype(jnp.float32)
    mean = mask[..., 1:].mean()
    return {**batch, "mask": jnp.where(mean > 0, mask / mean, jnp.nan)}, mean


class Gradients(NamedTuple):
    """Gradients and their scale, which is applied where they are used, to fuse with that use."""

    unscaled: Any
    norm: Float[Array, ""]
    """Global norm after the multiplier and before the clip."""
    multiplier: float
    max_norm: float | None
    """Global norm to clip to; None does not clip."""

    def clipped(self) -> Any:
        """The gradients times the multiplier, scaled by min(1, max_norm / (norm + 1e-6)): the rule
        of PyTorch's `clip_grad_norm_`."""
        scale: Any = self.multiplier
        if self.max_norm is not None:
            scale = scale * jnp.minimum(1.0, self.max_norm / (self.norm + 1e-6))
        return jax.tree.map(lambda g: g * jnp.asarray(scale, g.dtype), self.unscaled)


def _has_rows_apart(config: TrainConfig) -> bool:
    """A module of the user's own may join rows, or name the mesh axis `data`."""
    return isinstance(config.model, GPT2Config)


def mean_loss_and_grads(
    loss: Callable[[Any, Any], jax.Array],
    params: Any,
    batch: Any,
    shardings: Any,
    *,
    rows_apart: bool,
) -> tuple[jax.Array, Any]:
    """Loss and gradient, averaged over the microbatches on the first axis of `batch`'s arrays.

    With `rows_apart`, gradients of several microbatches are summed on the devices that computed
    them, and cross `data` once.

    Args:
      loss: of parameters and a microbatch; a mean over its rows.
      params: the parameters.
      batch: a tree of arrays [microbatches, rows, ...].
      shardings: NamedShardings of the gradients.
      rows_apart: whether the loss computes each row by itself, and names no mesh axis `data`.
    """
    count = jax.tree.leaves(batch)[0].shape[0]
    places = jax.sharding.get_abstract_mesh().shape["data"] if rows_apart else 1
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)

    def value_and_grad(params: Any, microbatch: Any) -> tuple[jax.Array, Any]:
        value, grads = jax.value_and_grad(loss)(params, microbatch)
        # Left to itself the partitioner keeps gradients of scanned layers whole over fsdp.
        return value, jax.tree.map(jax.lax.with_sharding_constraint, grads, specs)

    def sum_over_microbatches(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        # In float32 at least: a sum in bfloat16 stands still at 256 terms, and XLA's CPU backend
        # knows none over devices.
        def of_microbatch(microbatch: Any) -> tuple[jax.Array, Any]:
            return jax.tree.map(widened, value_and_grad(params, microbatch))

        def add(total: Any, microbatch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, of_microbatch(microbatch)), None

        first = jax.tree.map(lambda x: x[0], batch)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(of_microbatch, first))
        total, _ = jax.lax.scan(add, zeros, batch)
        return jax.lax.psum(total, "data") if places > 1 else total

    if count == 1:
        return value_and_grad(params, jax.tree.map(lambda x: x[0], batch))
    if places > 1:
        # Where `data` is Manual, the partitioner cannot sum over it in each microbatch.
        sum_over_microbatches = jax.shard_map(
            sum_over_microbatches,
            in_specs=(PartitionSpec(), PartitionSpec(None, "data")),
            out_specs=PartitionSpec(),
            axis_names={"data"},
            check_vma=False,
        )
    value, grads = jax.tree.map(
        lambda x: x / (count * places), sum_over_microbatches(params, batch)
    )
    return value, jax.tree.map(lambda x, p: x.astype(p.dtype), grads, params)


def _params_at(request: GradientRequest, parameters: Parameters, state: TrainState) -> Any:
    """The parameters at which an optimizer requests a gradient, in the types and shardings of the
    state's."""
    match request.at:
        case "params":
            return state.params
        case "prev_params":
            return state.prev_params
        case at:
            named = jax.tree.map(
                lambda x, param: x.astype(param.dtype),
                at(state.opt_state, state.params),
                state.params,
            )
            return jax.lax.with_sharding_constraint(named, parameters.shardings)


# Random numbers of a step are functions of seed, step and row, so that a resume, another mesh and
# other microbatches draw the same.


def _dropout_keys(config: TrainConfig, state: TrainState) -> Key[Array, "microbatches rows"]:
    """A key for each row, from which the model draws what it drops."""
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    return jax.random.split(
        jax.random.fold_in(key, 1), (config.microbatches, config.microbatch_size)
    )


def _uniforms(config: TrainConfig, state: TrainState) -> Float[Array, "microbatches rows length"]:
    """Numbers from [0, 1), by which labels are drawn."""
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    shape = (config.microbatches, config.microbatch_size, config.model.max_seq_len)
    return jax.random.uniform(key, shape, state.hyperparams["learning_rate"].dtype)


def _as_of_all_targets(grads: Any, mask: jax.Array) -> Any:
    """A gradient on drawn labels, of which a mask of mean 1 counts some, in the size of one that
    counts all: the square of either times the targets of a step estimates the curvature."""
    root = jax.lax.rsqrt(jnp.square(mask[..., 1:]).mean())
    return jax.tree.map(lambda g: (root * g).astype(g.dtype), grads)


# --- the guard -----------------------------------------------------------------------------------


def check_step(
    config: GuardConfig, guard: Guard, loss: jax.Array, grad_norms: list[jax.Array]
) -> tuple[jax.Array, Guard]:
    """Why a step is to be skipped, and the guard after the step.

    A step is skipped if its loss or a gradient is not finite, or if its loss, or the norm of its
    gradient, is a spike: above the running mean by that threshold's running standard deviations. A
    spike enters mean and variance cut off at the threshold, so that a loss that stays high raises
    the threshold until it passes.

    Args:
      config: the thresholds and the history.
      guard: the guard before the step; it has statistics of norms if these have a threshold.
      loss: the step's loss, [].
      grad_norms: norms of the gradients that the update is made of, each []; the first is watched.

    Returns:
      An index of `SKIP_REASONS`, int32 [], 0 for a step that is not skipped; and the guard.
    """
    finite = jnp.isfinite(loss)
    for norm in grad_norms:
        finite &= jnp.isfinite(norm)
    losses = Running(guard.num_losses, guard.loss_mean, guard.loss_variance)
    losses, loss_spikes = _seen(losses, loss, config.loss_spike_threshold, config.history)
    seen = guard._replace(
        num_losses=losses.count, loss_mean=losses.mean, loss_variance=losses.variance
    )
    reason = jnp.where(loss_spikes, 2, 0)
    if guard.norms is not None:
        threshold = config.grad_norm_spike_threshold
        norms, norm_spikes = _seen(guard.norms, grad_norms[0], threshold, config.history)
        seen = seen._replace(norms=norms)
        reason = jnp.where(norm_spikes & ~loss_spikes, 3, reason)
    reason = jnp.where(finite, reason, 1).astype(jnp.int32)
    guard = jax.tree.map(lambda new, old: jnp.where(finite, new, old), seen, guard)
    guard = guard._replace(
        num_skipped=guard.num_skipped + (reason > 0),
        consecutive_skips=jnp.where(reason > 0, guard.consecutive_skips + 1, 0),
    )
    return reason, guard


def _seen(
    running: Running, value: jax.Array, threshold: float | None, history: int
) -> tuple[Running, jax.Array]:
    """The statistics with another number, and whether that number is a spike."""
    value, spike = value.astype(jnp.float32), jnp.zeros([], bool)
    if threshold is not None:
        limit = running.mean + threshold * jnp.sqrt(running.variance)
        spike = (value > limit) & (running.count >= history)
        value = jnp.where(spike, limit, value)
    weight = 1 / jnp.minimum(running.count + 1, history).astype(jnp.float32)
    change = value - running.mean
    return Running(
        count=running.count + 1,
        mean=running.mean + weight * change,
        variance=(1 - weight) * (running.variance + weight * change**2),
    ), spike


# --- metrics --------------------------------------------------------------------------------------


def _update_metrics(
    components: Any, params: Any, squares: Mapping[str, jax.Array], opt_state: Any
) -> Metrics:
    """Root mean square of the update of each kind of parameter, and the optimizer's own metrics."""
    sizes: collections.Counter[str] = collections.Counter()
    for component, param in zip(jax.tree.leaves(components), jax.tree.leaves(params), strict=True):
        sizes[component] += param.size
    kinds = {"linear": ("attention", "mlp"), "embedding": ("embedding",), "vector": ("vector",)}
    metrics = {}
    for kind, of in kinds.items():
        total = sum(squares[component] for component in of)
        size = sum(sizes[component] for component in of) or 1  # a model may have none of a kind
        # JAX takes a Python integer for an int32, which a size of 2^31 or more is not.
        metrics[f"train/update_rms/{kind}"] = jnp.sqrt(total / float(size))
    for _, value in optax.tree.get_all_with_path(opt_state, "clip_fraction"):
        if value is not None:
            metrics.setdefault("train/clip_fraction", value)
    return metrics
