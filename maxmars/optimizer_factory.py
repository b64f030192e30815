"""Config to optimizer: which parameter is what, and which rule, rate and decay it gets.

What a parameter is follows from the names of its axes (`model.logical_axes`), never from its number
of dimensions or its path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from maxmars.config import AdamWConfig, GPT2Config, MarsConfig, OptimizerConfig, TrainConfig
from maxmars.model import LAYERS, logical_axes
from maxmars.optim import MatrixSpec, mars, warmup_cosine
from maxmars.optim.schedules import Schedule

# Number of leading input axes of every matrix, by the names of its axes (layers aside).
_LINEAR_INPUTS: dict[tuple[str, ...], int] = {
    ("embed", "qkv", "heads", "head_dim"): 1,
    ("heads", "head_dim", "embed"): 2,
    ("embed", "mlp"): 1,
    ("mlp", "embed"): 1,
}
_EMBEDDING_INPUTS: dict[tuple[str, ...], int] = {("vocab", "embed"): 1, ("positions", "embed"): 1}

Kind = Literal["linear", "embedding", "vector"]


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """How one parameter is optimized."""

    kind: Kind
    """A linear layer's kernel, an embedding table, or a norm's or bias's vector."""
    rule: str
    """Name of the update rule."""
    learning_rate_scale: float
    """Its learning rate as a multiple of the peak rate times the schedule."""
    weight_decay: float
    """Its decoupled weight decay."""
    spec: MatrixSpec
    """Its matrix, or its stack of matrices or vectors."""


def parameter_kinds(config: GPT2Config) -> Any:
    """The kind of each parameter, as a nested dict of strings."""

    def kind(axes: tuple[str, ...]) -> Kind:
        inner = _without_layers(axes)
        if inner in _LINEAR_INPUTS:
            return "linear"
        return "embedding" if inner in _EMBEDDING_INPUTS else "vector"

    return _map_axes(kind, config)


def matrix_specs(config: GPT2Config) -> Any:
    """The `MatrixSpec` of each parameter, as a nested dict."""

    def spec(axes: tuple[str, ...]) -> MatrixSpec:
        inner = _without_layers(axes)
        first = len(axes) - len(inner)
        inputs = (_LINEAR_INPUTS | _EMBEDDING_INPUTS).get(inner, 0)
        rows = tuple(range(first, first + inputs))
        cols = tuple(range(first + inputs, len(axes)))
        return MatrixSpec(batch=tuple(range(first)), rows=rows, cols=cols)

    return _map_axes(spec, config)


def parameter_groups(optimizer: OptimizerConfig, model: GPT2Config) -> Any:
    """The `ParameterGroup` of each parameter, as a nested dict."""

    def group(kind: Kind, spec: MatrixSpec) -> ParameterGroup:
        decay = optimizer.weight_decay if kind == "linear" else 0.0
        scale, rule = 1.0, "adamw"
        match optimizer:
            case MarsConfig() if kind == "vector" and not optimizer.optimize_vectors:
                scale = optimizer.vector_learning_rate_scale
                decay = optimizer.vector_weight_decay
            case MarsConfig():
                rule = "mars"
        return ParameterGroup(
            kind=kind, rule=rule, learning_rate_scale=scale, weight_decay=decay, spec=spec
        )

    return jax.tree.map(group, parameter_kinds(model), matrix_specs(model))


def make_optimizer(
    optimizer: OptimizerConfig, model: GPT2Config, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a model's parameters (a nested dict).

    Args:
      optimizer: which one, with its hyperparameters.
      model: the model, whose axis names say what is a matrix and what decays.
      learning_rate: in place of the config's; a traced scalar (this step's rate) or a schedule.
    """
    decays = jax.tree.map(lambda kind: kind == "linear", parameter_kinds(model))
    match optimizer:
        case AdamWConfig():
            tx = optax.adamw(
                learning_rate,
                b1=optimizer.b1,
                b2=optimizer.b2,
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                mask=decays,
            )
            return optax.with_extra_args_support(tx)
        case MarsConfig():
            return mars(
                learning_rate,
                b1=optimizer.b1,
                b2=optimizer.b2,
                eps=optimizer.eps,
                gamma=optimizer.gamma,
                weight_decay=optimizer.weight_decay,
                mask=decays,
                clip_threshold=optimizer.clip_threshold,
                amsgrad=optimizer.amsgrad,
                optimize_vectors=optimizer.optimize_vectors,
                vector_learning_rate_scale=optimizer.vector_learning_rate_scale,
                vector_b1=optimizer.vector_b1,
                vector_b2=optimizer.vector_b2,
                vector_weight_decay=optimizer.vector_weight_decay,
                matrix_specs=matrix_specs(model),
            )


def make_schedule(config: TrainConfig) -> Schedule:
    """The learning rate's shape in [0, 1] as a function of the step."""
    return warmup_cosine(
        config.schedule.warmup_steps, config.decay_steps, config.schedule.final_fraction
    )


def _without_layers(axes: tuple[str, ...]) -> tuple[str, ...]:
    return axes[1:] if axes[0] == LAYERS else axes


def _map_axes(function: Any, config: GPT2Config) -> Any:
    return jax.tree.map(function, logical_axes(config), is_leaf=lambda x: isinstance(x, tuple))
