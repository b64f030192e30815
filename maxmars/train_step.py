"""The train step: a pure function of a `TrainState` and a batch, jitted over a mesh.

`train` runs it, `plan` compiles it for hardware that is not there, and the tests call it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from maxmars import sharding
from maxmars.config import TrainConfig
from maxmars.gradients import Gradients, mean_loss_and_grads
from maxmars.guard import Guard, check_step, new_guard
from maxmars.mesh_checks import check_mesh
from maxmars.model import (
    graph_and_abstract_params,
    init_params,
    logical_axes,
    mean_loss,
    mean_loss_of_drawn,
)
from maxmars.model_parts import norms_array, parameter_parts, squared_norms
from maxmars.optim import needs_sampled_grads, sophia_state
from maxmars.optimizer_config import MarsConfig, SophiaConfig
from maxmars.optimizer_factory import (
    make_optimizer,
    make_schedule,
    opt_state_shardings,
)

Metrics = dict[str, jax.Array]
Squares = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that a training step reads and writes; nested dicts of arrays, optimizer state aside."""

    step: Any
    """Number of steps taken, int32 []. Drives the schedule and the data position."""
    params: Any
    """Parameters."""
    opt_state: Any
    """Optimizer state; its arrays have the parameters' shardings."""
    prev_params: Any
    """Parameters of the step before in exact MARS; None otherwise."""
    hyperparams: Any
    """What a sweep varies, as arrays, so that changing it never recompiles: `learning_rate` []."""
    guard: Guard
    """Which steps were skipped, and the recent loss."""


def abstract_train_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """The state's shapes, dtypes and shardings; nothing is allocated.

    Raises:
      ValueError: the mesh does not divide the model or the batch.
    """
    check_mesh(config, mesh.shape)
    abstract = jax.eval_shape(lambda: _initial_state(config, mesh, 0))
    params = sharding.with_shardings(
        abstract.params, sharding.tree_shardings(mesh, logical_axes(config.model))
    )
    shardings = dataclasses.replace(
        sharding.like_params(abstract, params),
        opt_state=opt_state_shardings(
            config.optimizer, config.model, abstract.opt_state, params, mesh
        ),
    )
    return sharding.with_shardings(abstract, shardings)


def init_train_state(
    config: TrainConfig, mesh: Mesh, given: Mapping[str, Any] | None = None
) -> TrainState:
    """A new state, created in place on its devices; its values do not depend on the mesh.

    Args:
      config: what to train.
      mesh: where the state goes.
      given: fields of the state that are there already, in the mesh's shardings, by name; only the
        others are created.

    Raises:
      ValueError: the mesh does not divide the model or the batch.
    """
    given = given or {}
    created = make_initializer(config, mesh, tuple(given))(config.seed)
    return TrainState(**given, **created)


def make_initializer(
    config: TrainConfig, mesh: Mesh, given: Collection[str] = ()
) -> Callable[[int], dict[str, Any]]:
    """A function from a seed to the fields of a new state, those named in `given` aside.

    It compiles once for all seeds; the learning rate is the config's (see `make_hyperparams`).

    Raises:
      ValueError: the mesh does not divide the model or the batch.
    """
    abstract = vars(abstract_train_state(config, mesh))
    missing = {name: field for name, field in abstract.items() if name not in given}

    def create(seed: jax.Array) -> dict[str, Any]:
        state = _initial_state(config, mesh, seed)
        return {name: getattr(state, name) for name in missing}

    jitted = jax.jit(create, out_shardings=_shardings(missing))

    def initialize(seed: int) -> dict[str, Any]:
        with jax.set_mesh(mesh):
            return jitted(np.uint32(seed))

    return initialize


def make_hyperparams(config: TrainConfig, mesh: Mesh) -> dict[str, jax.Array]:
    """`TrainState.hyperparams` as the config says."""
    with jax.set_mesh(mesh):
        return jax.jit(lambda: _hyperparams(config), out_shardings=sharding.replicated(mesh))()


@dataclass(frozen=True)
class TrainStep:
    """The jitted step on its mesh. Calling it donates (uses up) the state."""

    mesh: Mesh
    jitted: Any
    """`jax.jit` function of (TrainState, tokens)."""
    abstract_state: TrainState
    abstract_tokens: jax.ShapeDtypeStruct

    def __call__(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        """One optimizer step.

        Args:
          state: the state; its buffers are reused for the new one.
          tokens: int32 [microbatches, rows, max_seq_len + 1].

        Returns:
          The new state and the metrics `train/loss` (nats a token), `train/grad_norm` (before the
          clip), `train/learning_rate`, `train/skipped` and `train/skipped_in_a_row` (steps whose
          update was not applied), `train/update_rms/KIND` for linear, embedding and vector (0 where
          it was not), with a clip `train/grad_clipped` (whether it was active), with one per matrix
          `train/clip_fraction`, `train/orthogonality_error` if measured, and with `log.norms`
          `train/norms`, whose names `model_parts.named_norms` knows: of gradients, of parameters
          after the step, and of updates.
        """
        with jax.set_mesh(self.mesh):
            return self.jitted(state, tokens)

    def trace(self) -> jax.stages.Traced:
        """The step traced ahead of time, from shapes alone."""
        with jax.set_mesh(self.mesh):
            return self.jitted.trace(self.abstract_state, self.abstract_tokens)

    def lower(self) -> jax.stages.Lowered:
        """The step lowered ahead of time, from shapes alone."""
        with jax.set_mesh(self.mesh):
            return self.trace().lower()

    def text(self) -> str:
        """The step compiled ahead of time, as text, in which a trace's operations are found."""
        text = self.lower().compile().as_text()
        assert text is not None  # every backend of JAX has one
        return text


def make_train_step(config: TrainConfig, mesh: Mesh) -> TrainStep:
    """Build the step for a config and a mesh.

    Raises:
      ValueError: the mesh does not divide the model or the batch.
    """
    abstract_state = abstract_train_state(config, mesh)
    shape = (config.num_microbatches, config.microbatch_size, config.model.max_seq_len + 1)
    tokens_sharding = sharding.batch_sharding(mesh)
    shardings = _shardings(abstract_state)
    jitted = jax.jit(
        lambda state, tokens: _step(config, mesh, shardings.params, state, tokens),
        donate_argnums=0,
        in_shardings=(shardings, tokens_sharding),
        out_shardings=(shardings, sharding.replicated(mesh)),
    )
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=tokens_sharding)
    return TrainStep(mesh, jitted, abstract_state, tokens)


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _is_exact(config: TrainConfig) -> bool:
    """Whether the optimizer compares gradients at the parameters of the step before."""
    return isinstance(config.optimizer, MarsConfig) and config.optimizer.exact


def _optimizer(
    config: TrainConfig, learning_rate: Any, mesh: Mesh
) -> optax.GradientTransformationExtraArgs:
    return make_optimizer(
        config.optimizer,
        config.model,
        learning_rate,
        batch_tokens=config.tokens_per_step,
        mesh=mesh,
    )


def _hyperparams(config: TrainConfig) -> dict[str, jax.Array]:
    return {"learning_rate": jnp.asarray(config.optimizer.learning_rate, config.model.param_dtype)}


def _initial_state(config: TrainConfig, mesh: Mesh, seed: Any) -> TrainState:
    params = init_params(config.model, seed)
    tx = _optimizer(config, config.optimizer.learning_rate, mesh)
    return TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=tx.init(params),
        # Never read: the first step's last gradient is zero by definition.
        prev_params=jax.tree.map(jnp.zeros_like, params) if _is_exact(config) else None,
        hyperparams=_hyperparams(config),
        guard=new_guard(),
    )


def _step(
    config: TrainConfig,
    mesh: Mesh,
    param_shardings: Any,
    state: TrainState,
    tokens: Int[Array, "microbatches rows window"],
) -> tuple[TrainState, Metrics]:
    learning_rate = state.hyperparams["learning_rate"] * make_schedule(config)(state.step)

    parts = parameter_parts(config.model)
    gradients_at = functools.partial(_gradients, config, param_shardings, tokens)
    loss, gradients = gradients_at(state.params)
    given = {"grads": gradients}
    if _is_exact(config):
        _, given["prev_grads"] = gradients_at(state.prev_params)
    sampled = {}
    if isinstance(config.optimizer, SophiaConfig):
        sampled["sampled_grads"] = _sampled_gradients(config, config.optimizer, state, tokens)
    apply, guard = check_step(config.guard, state.guard, loss, [g.norm for g in given.values()])

    def update() -> tuple[_Written, Squares]:
        tx = _optimizer(config, learning_rate, mesh)
        clipped = {name: found.clipped() for name, found in given.items()}
        updates, opt_state = tx.update(
            clipped.pop("grads"), state.opt_state, state.params, **clipped, **sampled
        )
        written = _Written(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            prev_params=state.params if _is_exact(config) else None,
        )
        return written, squared_norms(parts, updates)

    def keep() -> tuple[_Written, Squares]:
        old = _Written(state.params, state.opt_state, state.prev_params)
        return old, jax.tree.map(jnp.zeros_like, of_gradients)

    of_gradients = gradients.squares(parts)
    with jax.named_scope("optimizer"):
        written, of_updates = _cond(mesh, apply, update, keep)
        # Of the new ones: were the old still read here, XLA's CPU backend would copy them.
        of_params = squared_norms(parts, written.params)
    measured = _update_metrics(parts, state.params, of_updates, written.opt_state)
    if config.log.norms:
        measured["train/norms"] = norms_array(of_gradients, of_params, of_updates)
    if config.gradient_clip_norm is not None:
        measured["train/grad_clipped"] = gradients.norm > config.gradient_clip_norm
    new_state = dataclasses.replace(state, step=state.step + 1, guard=guard, **written._asdict())
    metrics = {
        "train/loss": loss,
        "train/grad_norm": gradients.norm,
        "train/learning_rate": learning_rate,
        "train/skipped": guard.num_skipped,
        "train/skipped_in_a_row": guard.skipped_in_a_row,
        **measured,
    }
    return new_state, metrics


def _gradients(
    config: TrainConfig, param_shardings: Any, tokens: jax.Array, params: Any
) -> tuple[jax.Array, Gradients]:
    """Loss and gradients at some parameters."""
    with jax.named_scope("model"):
        loss, grads = mean_loss_and_grads(_loss_function(config), params, tokens)
        # Left to itself the partitioner keeps gradients of scanned layers whole over fsdp.
        grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, param_shardings)
    with jax.named_scope("clip"):
        return loss, Gradients.of(
            grads, multiplier=config.gradient_multiplier, max_norm=config.gradient_clip_norm
        )


def _sampled_gradients(
    config: TrainConfig, optimizer: SophiaConfig, state: TrainState, tokens: jax.Array
) -> Any:
    """Gradient of the loss on labels that the model itself draws, where Sophia is due for one.

    Clipped to global norm 1, as in the official code; zeros in between.
    """
    graph, _ = graph_and_abstract_params(config.model)

    def loss(params: Any, microbatch: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, key = microbatch
        return mean_loss_of_drawn(nnx.merge(graph, params), rows, key)

    def sampled(params: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        keys = jax.random.split(key, config.num_microbatches)
        _, grads = mean_loss_and_grads(loss, params, (tokens, keys))
        return Gradients.of(grads, max_norm=1.0).clipped()

    count = sophia_state(state.opt_state).count
    due = needs_sampled_grads(count, optimizer.update_hessian_every)
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    with jax.named_scope("model"):
        return jax.lax.cond(due, sampled, zeros, state.params)


class _Written(NamedTuple):
    """What an update that is not applied leaves as it was."""

    params: Any
    opt_state: Any
    prev_params: Any


def _update_metrics(parts: Any, params: Any, squares: Squares, opt_state: Any) -> Metrics:
    """Root mean square of each kind of parameter's update, and what the optimizer measures."""
    sizes: collections.Counter[str] = collections.Counter()
    for part, param in zip(jax.tree.leaves(parts), jax.tree.leaves(params), strict=True):
        sizes[part] += param.size
    kinds = {"linear": ("attention", "mlp"), "embedding": ("embedding",), "vector": ("vector",)}
    metrics = {}
    for kind, of in kinds.items():
        total = sum(squares[part] for part in of)
        metrics[f"train/update_rms/{kind}"] = jnp.sqrt(total / sum(sizes[part] for part in of))
    for name in ("clip_fraction", "orthogonality_error"):
        found = optax.tree.get_all_with_path(opt_state, name)
        given = [value for _, value in found if value is not None]
        if given:
            metrics[f"train/{name}"] = given[0]
    return metrics


def _loss_function(config: TrainConfig) -> Callable[[Any, jax.Array], jax.Array]:
    graph, _ = graph_and_abstract_params(config.model)

    def loss(params: Any, tokens: Int[Array, "rows window"]) -> Float[Array, ""]:
        return mean_loss(nnx.merge(graph, params), tokens)

    return loss


def _cond(
    mesh: Mesh, condition: jax.Array, true: Callable[[], Any], false: Callable[[], Any]
) -> Any:
    if mesh.devices.flat[0].platform == "cpu":
        # A select makes XLA's CPU backend copy arrays, at half the speed or less.
        return jax.lax.cond(condition, true, false)
    # Elsewhere an elementwise select fuses into the update, which reads the old values anyway.
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), true(), false())
