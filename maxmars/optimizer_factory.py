"""Config to optimizer: which parameter is what, and which rule, rate and decay it gets.

What a parameter is follows from the names of its axes (`model.logical_axes`), never from its number
of dimensions or its path.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
import optax.contrib
from jax.sharding import Mesh

from maxmars.config import GPT2Config, TrainConfig
from maxmars.model import LAYERS, logical_axes
from maxmars.optim import (
    MatrixSpec,
    mars,
    muon,
    soap,
    soap_shardings,
    sophia,
    warmup_cosine,
    warmup_exponential,
    warmup_linear,
    warmup_stable_decay,
)
from maxmars.optim.schedules import Schedule
from maxmars.optimizer_config import (
    AdamWConfig,
    AdoptConfig,
    LionConfig,
    MarsConfig,
    MuonConfig,
    OptimizerConfig,
    SoapConfig,
    SophiaConfig,
)
from maxmars.sharding import RULES, like_params

# Number of leading input axes of every matrix, by the names of its axes (layers aside).
_LINEAR_INPUTS: dict[tuple[str, ...], int] = {
    ("embed", "qkv", "heads", "head_dim"): 1,
    ("heads", "head_dim", "embed"): 2,
    ("embed", "mlp"): 1,
    ("mlp", "embed"): 1,
}
_EMBEDDINGS = {("vocab", "embed"), ("positions", "embed")}

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
        return "embedding" if inner in _EMBEDDINGS else "vector"

    return _map_axes(kind, config)


def matrix_specs(config: GPT2Config, *, qkv: str = "fused", mesh: Mesh | None = None) -> Any:
    """The `MatrixSpec` of each parameter, as a nested dict.

    Args:
      config: the model.
      qkv: whether the attention's input projection is orthogonalised whole ("fused"), as queries,
        keys and values ("qkv"), or head by head ("heads").
      mesh: if there is one, the specs say how `sharding.RULES` partitions each parameter.
    """
    split_names = {"fused": (), "qkv": ("qkv",), "heads": ("qkv", "heads")}[qkv]

    def spec(axes: tuple[str, ...]) -> MatrixSpec:
        inner = _without_layers(axes)
        first = len(axes) - len(inner)
        inputs = first + _LINEAR_INPUTS.get(inner, 0)
        rows, cols = range(first, inputs), range(inputs, len(axes))
        if inner in _EMBEDDINGS:
            rows, cols = cols[1:], cols[:1]  # a table [tokens, embed] is its head's map to tokens
        split = [i for i, name in enumerate(axes) if name in split_names]
        return MatrixSpec(
            batch=tuple(range(first)),
            rows=tuple(rows),
            cols=tuple(cols),
            partition=None if mesh is None else RULES.spec(*axes),
            split=tuple(split) if rows and "qkv" in axes else (),
            embedding=inner in _EMBEDDINGS,
        )

    return _map_axes(spec, config)


def parameter_groups(optimizer: OptimizerConfig, model: GPT2Config) -> Any:
    """The `ParameterGroup` of each parameter, as a nested dict."""
    return jax.tree.map(
        lambda kind, spec: _group(optimizer, kind, spec),
        parameter_kinds(model),
        matrix_specs(model, qkv=getattr(optimizer, "qkv", "fused")),
    )


def _decays(optimizer: OptimizerConfig, kind: Kind) -> bool:
    """Whether a kind of parameter takes the optimizer's `weight_decay`."""
    if kind == "embedding":
        return isinstance(optimizer, MarsConfig) and optimizer.decay_embeddings
    return kind == "linear"


def _group(  # noqa: C901, a table
    optimizer: OptimizerConfig, kind: Kind, spec: MatrixSpec
) -> ParameterGroup:
    decay = optimizer.weight_decay if _decays(optimizer, kind) else 0.0
    scale = 1.0
    match optimizer:
        case AdamWConfig():
            rule = "adamw"
        case LionConfig():
            rule = "lion"
        case AdoptConfig():
            rule = "adopt"
        case SophiaConfig():
            rule = "sophia"
        case SoapConfig() if kind == "linear":
            rule = "soap"
        case SoapConfig():
            rule, scale = "adamw", optimizer.vector_learning_rate_scale
            decay = optimizer.vector_weight_decay
        case MarsConfig(variant="adamw" | "lion" as variant) if kind != "vector":
            rule = f"mars-{variant}"
        case MarsConfig() if kind == "linear":
            rule = f"mars-{optimizer.variant}"
        case MarsConfig(embeddings="orthogonalize") if kind == "embedding":
            rule = f"mars-{optimizer.variant}"
        case MarsConfig(optimize_vectors=True) if kind == "vector":
            rule = "mars-lion" if optimizer.variant == "lion" else "mars-adamw"
        case MuonConfig() if kind == "linear":
            rule = "muon"
        case MarsConfig() | MuonConfig():
            rule, scale = "adamw", optimizer.vector_learning_rate_scale
            decay = optimizer.vector_weight_decay if kind == "vector" else decay
    return ParameterGroup(
        kind=kind, rule=rule, learning_rate_scale=scale, weight_decay=decay, spec=spec
    )


def make_optimizer(
    optimizer: OptimizerConfig,
    model: GPT2Config,
    learning_rate: optax.ScalarOrSchedule,
    *,
    batch_tokens: int = 1,
    mesh: Mesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a model's parameters (a nested dict).

    Args:
      optimizer: which one, with its hyperparameters.
      model: the model, whose axis names say what is a matrix and what decays.
      learning_rate: in place of the config's; a traced scalar (this step's rate) or a schedule.
      batch_tokens: tokens a step, which scale Sophia's estimate.
      mesh: the mesh that the parameters lie on by `sharding.RULES`; None for one device.
    """
    decays = jax.tree.map(lambda kind: _decays(optimizer, kind), parameter_kinds(model))
    match optimizer:
        case AdamWConfig():
            tx = optax.adamw(learning_rate, mask=decays, **_options(optimizer))
        case LionConfig():
            tx = optax.lion(learning_rate, mask=decays, **_options(optimizer))
        case AdoptConfig():
            tx = optax.chain(
                optax.contrib.scale_by_adopt(optimizer.b1, optimizer.b2, optimizer.eps),
                optax.add_decayed_weights(optimizer.weight_decay, decays),
                optax.scale_by_learning_rate(learning_rate),
            )
        case SophiaConfig():
            tx = sophia(
                learning_rate,
                mask=decays,
                batch_tokens=float(batch_tokens),
                **_options(optimizer),
            )
        case SoapConfig():
            tx = soap(
                learning_rate,
                mask=decays,
                matrix_specs=_soap_specs(model, mesh),
                mesh=_if_several(mesh),
                **_options(optimizer),
            )
        case MarsConfig() | MuonConfig():
            make = mars if isinstance(optimizer, MarsConfig) else muon
            tx = make(
                learning_rate,
                mask=decays,
                matrix_specs=matrix_specs(model, qkv=optimizer.qkv, mesh=mesh),
                mesh=mesh,
                ownership_axes=mesh.axis_names if mesh and optimizer.own_over_data else None,
                **_options(optimizer, "decay_embeddings", "qkv", "own_over_data"),
            )
    return optax.with_extra_args_support(tx)


def _options(optimizer: OptimizerConfig, *without: str) -> dict[str, Any]:
    """The fields of a config that are arguments of the same name."""
    names = {f.name for f in dataclasses.fields(optimizer)} - {"learning_rate", *without}
    return {name: getattr(optimizer, name) for name in names}


def _soap_specs(model: GPT2Config, mesh: Mesh | None) -> Any:
    """Embeddings are AdamW's, so to SOAP they are vectors."""
    specs = matrix_specs(model, mesh=mesh)
    return jax.tree.map(lambda spec: None if spec.embedding else spec, specs)


def _if_several(mesh: Mesh | None) -> Mesh | None:
    return None if mesh is None or mesh.size == 1 else mesh


def opt_state_shardings(
    optimizer: OptimizerConfig, model: GPT2Config, opt_state: Any, params: Any, mesh: Mesh
) -> Any:
    """NamedShardings of an (abstract) optimizer state, given parameters that carry theirs.

    State takes its parameter's sharding, except in SOAP, whose bases lie with their owners.
    """
    like = like_params(opt_state, params)
    if not isinstance(optimizer, SoapConfig) or _if_several(mesh) is None:
        return like
    own = soap_shardings(opt_state, mesh, _soap_specs(model, mesh))
    return jax.tree.map(lambda a, b: a if b is None else b, like, own)


def make_schedule(config: TrainConfig) -> Schedule:
    """The learning rate's shape in [0, 1] as a function of the step."""
    schedule = config.schedule
    common = (schedule.warmup_steps, config.decay_steps, schedule.final_fraction)
    match schedule.decay:
        case "cosine":
            return warmup_cosine(*common)
        case "linear":
            return warmup_linear(*common)
        case "exponential":
            return warmup_exponential(*common)
        case "wsd":
            return warmup_stable_decay(*common, schedule.wsd_decay_fraction)


def _without_layers(axes: tuple[str, ...]) -> tuple[str, ...]:
    return axes[1:] if axes[0] == LAYERS else axes


def _map_axes(function: Any, config: GPT2Config) -> Any:
    return jax.tree.map(function, logical_axes(config), is_leaf=lambda x: isinstance(x, tuple))
