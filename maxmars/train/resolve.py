"""Resolving of a requested config: a value for each field that is `auto`, or None to be chosen.

`train`, `plan`, `audit`, `compare` and the benchmarks call `resolve_config` before they train or
compile. A run records the resolved config, with the requested values of the chosen fields under
`asked`. A run that continues on the same hardware takes its recorded choices, so that its bits stay
the same; other choices follow from the rules in `auto.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from maxmars.checkpoint.environment import environment
from maxmars.config import GPT2Config, TrainConfig, differences
from maxmars.model.attention import choose_attention
from maxmars.model.parameters import Parameters
from maxmars.train.auto import (
    choose_memory,
    choose_precision,
    make_estimate,
    memory_bytes_of,
    with_compute_dtype,
    with_remat,
)
from maxmars.train.optimizer import check_optimizer, follows_rate
from maxmars.train.step import abstract_train_state


class Recorded(NamedTuple):
    """Records of the run so far, from a checkpoint or from the first line of a session."""

    config: TrainConfig
    environment: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A resolved config on its devices."""

    config: TrainConfig
    parameters: Parameters
    """Parameters of the model, on the mesh."""
    messages: tuple[str, ...]
    """Each choice with its reason, in one line."""


def resolve_config(
    requested: TrainConfig,
    parameters: Parameters,
    *,
    recorded: Recorded | None = None,
    memory_bytes: int | None = None,
) -> Resolved:
    """Choose precision, microbatches and rematerialisation where a config leaves them open.

    Args:
      requested: what to train.
      parameters: parameters of the model, on the mesh, whose devices may be absent.
      recorded: the run so far. Its compute dtype stays; its microbatches and rematerialisation stay
        on the same mesh and kind of device.
      memory_bytes: memory of a device that programs may use; None takes the devices' own.

    Raises:
      ValueError: the mesh does not divide the model or the batch; or devices, model and optimizer
        do not fit together.
    """
    mesh, config, messages = parameters.mesh, requested, []
    state = abstract_train_state(config, parameters)
    check_optimizer(config.optimizer, parameters, config.ema_decay)
    if not follows_rate(config.optimizer, parameters):
        messages.append(
            "the optimizer leaves optimizer.learning_rate and the schedule aside, so its own rate "
            "is not known: there is no metric train/learning_rate"
        )
    if recorded is not None:
        before = recorded.config
        old, new = before.model, config.model
        # A user's own module has no `compute_dtype`.
        both_gpt2 = isinstance(old, GPT2Config) and isinstance(new, GPT2Config)
        if both_gpt2 and new.compute_dtype == "auto":
            config = with_compute_dtype(config, old.compute_dtype)
        is_same = is_same_hardware(recorded.environment, environment(mesh))
        # Another batch size may have no such microbatches.
        if is_same and before.global_batch_size == config.global_batch_size:
            if config.num_microbatches is None:
                config = dataclasses.replace(config, num_microbatches=before.microbatches)
            if config.model.remat == "auto":
                config = with_remat(config, before.model.remat)
    config = choose_precision(config, mesh, messages.append)
    memory_bytes = memory_bytes or memory_bytes_of(mesh)
    estimate = make_estimate(config, parameters, state)
    config = choose_memory(config, parameters, estimate, memory_bytes, messages.append)
    if isinstance(config.model, GPT2Config):
        attention = choose_attention(config.model, mesh.devices.flat[0].platform)
        if attention.reason is not None:
            messages.append(
                f"attention is {attention.implementation} and slower: {attention.reason}"
            )
    asked = {name: old for name, old, _ in differences(requested, config)}
    config = dataclasses.replace(config, asked=requested.asked | asked)
    return Resolved(config=config, parameters=parameters, messages=tuple(messages))


def is_same_hardware(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two results of `environment` have the same mesh and kinds of devices."""
    return all(before.get(name) == now[name] for name in ("mesh", "device_kinds"))
