"""What a run chooses by itself: `model.compute_dtype` and `model.remat`, where they are `auto`, and
`num_microbatches`, where it is None; and a warning of a mesh that slows the run down. `resolve.py`
makes the choices by these rules.

Each choice follows from a rule: nothing is compiled or measured, so that a start compiles the train
step once, and all processes choose the same. `maxmars plan --remat all` compiles the step under
every policy of rematerialisation, to see what the rule is worth. The policies give the same loss
and gradients but for rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxmars.config import GPT2Config, MeshConfig, TrainConfig
from maxmars.config.mesh import choose_mesh, mesh_shape, possible_microbatches
from maxmars.config.numbers import short
from maxmars.distributed import processes, sharding
from maxmars.model.attention import choose_attention
from maxmars.model.parameters import Parameters
from maxmars.optim import requests_of
from maxmars.train.optimizer import make_optimizer
from maxmars.train.step import TrainState, TrainStep

ComputeDtype = Literal["auto", "bfloat16", "float32", "float64"]

Remat = str | None
Estimate = Callable[[TrainConfig], int]
"""Bytes that a step needs on one device; see `make_estimate`."""
USABLE = 0.95
"""Share of a device's memory that a step may take; the rest is for batches that are read ahead."""

# Vectors of embed_dim numbers: that each layer keeps of a token, and that the layer at work takes.
_VECTORS_KEPT = {"full": 1, "attention": 9, "dots": 11, None: 36}
_VECTORS_KEPT_BY_GPUS = 18  # under None: 16.3 in GPT-2 small and 16.7 in XL, on an H200
_VECTORS_AT_WORK = 30

_LEAST_WIDTH_KEPT = 1600  # XL's; by the clock attention is slower at 768, faster at 1600


def choose_precision(
    config: TrainConfig, mesh: Mesh, log: Callable[[str], None] = lambda _: None
) -> TrainConfig:
    """The config with `model.compute_dtype` chosen, if it is `auto`: bfloat16 on accelerators,
    float32 on CPUs. `log` gets the choice in one line."""
    if not isinstance(config.model, GPT2Config) or config.model.compute_dtype != "auto":
        return config
    platform = mesh.devices.flat[0].platform
    dtype = auto_dtype(platform)
    log(f"model.compute_dtype=auto: {dtype}, as the devices are of platform {platform}")
    return with_compute_dtype(config, dtype)


def auto_dtype(platform: str) -> Literal["bfloat16", "float32"]:
    """The type of matrix products for `auto` on a platform (`jax.Device.platform`)."""
    # CPUs with AVX512_BF16 are faster in bfloat16, but numbers are to be close on all CPUs.
    return "float32" if platform == "cpu" else "bfloat16"


def with_compute_dtype(config: TrainConfig, dtype: ComputeDtype) -> TrainConfig:
    """The config with this type of matrix products."""
    assert isinstance(config.model, GPT2Config)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype=dtype))


def device_memory_bytes(device: jax.Device) -> int | None:
    """Memory of a device that programs may use; None where it is not known, as of a CPU."""
    if device.platform == "cpu":
        return None
    return (device.memory_stats() or {}).get("bytes_limit")


def check_memory(config: TrainConfig, mesh: Mesh, state: TrainState) -> None:
    """Check that the state of a run alone, and its batches alone, do not exceed the memory; the
    step needs more.

    Args:
      config: what to train.
      mesh: its devices.
      state: its abstract state.

    Raises:
      ValueError: they do. XLA's own error would be an abort of the process, or come after minutes.
    """
    model, way_out = config.model, "take a smaller model, or divide it over more devices with "
    way_out += "mesh.fsdp. `maxmars plan` says what fits"
    needs = [("parameters and optimizer state need", sharding.bytes_on_chip(state), way_out)]
    width = model.embed_dim if isinstance(model, GPT2Config) else 0
    for name, rows, of_token in (
        ("global_batch_size", config.global_batch_size, 4),  # its id
        ("eval.batch_size", config.eval.batch_size or 0, 4 + 2 * width),  # and its hidden state
    ):
        size = rows // sharding.batch_shards(mesh) * model.max_seq_len * of_token
        needs.append((f"the batches of {name}={rows} need", size, f"lower {name}"))
    device = mesh.local_devices[0]
    limit, where = device_memory_bytes(device), f"a {device.device_kind} has"
    if device.platform == "cpu":
        needs = [(what, len(mesh.local_devices) * size, way) for what, size, way in needs]
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        where = "this machine has"
    for what, size, way_out in needs:
        if limit is not None and size > limit:
            raise ValueError(f"{what} {short(size)}B, and {where} {short(limit)}B: {way_out}.")


def memory_bytes_of(mesh: Mesh) -> int | None:
    """Memory of one device that a step may count on, the same in all processes; None where it is
    not known. Devices of a CPU share half of the machine's."""
    device, count = mesh.local_devices[0], len(mesh.local_devices)
    limit = device_memory_bytes(device)
    if device.platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 // count
    limits = [int(text) for text in processes.texts_of_all(str(limit or 0))]
    return min(limits) or None


def choose_memory(
    config: TrainConfig,
    parameters: Parameters,
    estimate: Estimate | None,
    memory_bytes: int | None,
    log: Callable[[str], None],
) -> TrainConfig:
    """The config with `model.remat` chosen, if it is `auto`, and `num_microbatches`, if it is None:
    of `remat_rule` the first policy that fits by the estimate, and the fewest microbatches.

    Args:
      config: what to train; it fits the mesh, and `model.compute_dtype` is chosen.
      parameters: of its model, on its devices.
      estimate: see `make_estimate`; without one, what is chosen first is taken to fit.
      memory_bytes: memory of a device; None, which is not known, holds everything.
      log: gets each choice and its reason, in one line, unless it is one microbatch.
    """
    policies, counts = [config.model.remat], [config.num_microbatches]
    platform = parameters.mesh.devices.flat[0].platform
    if config.model.remat == "auto":
        policies = remat_rule(parameters, platform)
    if config.num_microbatches is None:
        counts = possible_microbatches(
            config.global_batch_size, sharding.batch_shards(parameters.mesh)
        )
    usable = math.inf if memory_bytes is None else int(USABLE * memory_bytes)
    needed, chosen = 0, config
    choices = list(itertools.product(policies, counts))
    if platform == "tpu":  # each microbatch gathers all parameters: the fewest come first
        choices.sort(key=lambda choice: choice[1] or 1)
    for remat, count in choices:
        chosen = dataclasses.replace(with_remat(config, remat), num_microbatches=count)
        needed = 0 if estimate is None else estimate(chosen)
        if needed <= usable:
            break
    about = f"a step needs about {needed / 1e9:.3f} of {usable / 1e9:.3f} GB a device"
    fits = needed <= usable
    if config.model.remat == "auto":
        log(f"model.remat=auto: {chosen.model.remat}, by the rule for {platform}")
    if config.num_microbatches is None and chosen.microbatches > 1:
        verdict = "the fewest that fit" if fits else "of which not even the last fits"
        log(f"num_microbatches={chosen.microbatches}, {verdict}: {about}")
    return chosen


def remat_rule(parameters: Parameters, platform: str) -> Sequence[Remat]:
    """The policies that `model.remat=auto` chooses from on a platform: the first that fits.

    By the clock, a TPU computes a narrow block again sooner than it writes and reads what it would
    keep; from XL's width on, attention and its inputs are worth keeping, but no further microbatch.
    A GPU computes as little again as fits. See plan/README.md. A CPU computes nothing again.
    """
    policies, model = parameters.remat_policies, parameters.model
    match platform:
        case "cpu":
            return policies[:1]
        case "tpu":
            is_wide = isinstance(model, GPT2Config) and model.embed_dim >= _LEAST_WIDTH_KEPT
            return ("attention", "full") if is_wide else policies[-1:]
        case _:
            return policies


def less_memory(config: TrainConfig, parameters: Parameters) -> list[str]:
    """The words of a command line for a step of less memory: the next policy of rematerialisation
    or, after the last, the next number of microbatches; none where both are at their ends."""
    policies = parameters.remat_policies
    if (remat := config.model.remat) in policies[:-1]:
        return ["--model.remat", str(policies[policies.index(remat) + 1])]
    shards = sharding.batch_shards(parameters.mesh)
    counts = possible_microbatches(config.global_batch_size, shards)
    more = [str(count) for count in counts if count > config.microbatches]
    return ["--num-microbatches", more[0]] if more else []


def less_memory_hint(config: TrainConfig, parameters: Parameters) -> str:
    """What to do about a step that does not fit, in words."""
    words = " ".join(less_memory(config, parameters))
    return f"{f'add {words}, or ' if words else ''}divide it over more devices with mesh.fsdp"


@contextlib.contextmanager
def noting_less_memory(step: TrainStep) -> Iterator[None]:
    """Add to XLA's error of a step out of memory what to try, as a note that the command prints."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            error.add_note(less_memory_hint(step.config, step.parameters))
        raise


def make_estimate(
    config: TrainConfig, parameters: Parameters, state: TrainState
) -> Estimate | None:
    """How much memory a step needs on one device, by arithmetic alone, for any microbatches and
    policy of this config; None for a module of the user's own, of which nothing is known.

    These are the state and the gradients, exactly; what each layer keeps of a token for the
    backward pass, in vectors of `embed_dim` numbers; and what the layer at work takes, by compiled
    programs for TPUs.

    Args:
      config: what to train; `model.compute_dtype` is chosen.
      parameters: of its model, on its devices.
      state: its abstract state.
    """
    model, mesh = config.model, parameters.mesh
    platform = mesh.devices.flat[0].platform
    if not isinstance(model, GPT2Config):
        return None
    shards, tensor = sharding.batch_shards(mesh), mesh.shape["tensor"]
    held, params = (sharding.bytes_on_chip(tree) for tree in (state, state.params))
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    tx = make_optimizer(config.optimizer, parameters, config.optimizer.learning_rate)
    further = len(requests_of(tx))  # gradients that wait for the update beside the usual one
    is_plain = choose_attention(model, platform).implementation == "plain"
    table = model.padded_vocab_size * model.embed_dim * (4 + itemsize)  # whole, and its gradient

    def estimate(config: TrainConfig) -> int:
        remat = config.model.remat
        vectors = _VECTORS_KEPT[remat]
        if remat is None and platform in sharding.GPUS:
            vectors = _VECTORS_KEPT_BY_GPUS
        gradients = params * ((2 if config.microbatches > 1 else 1) + further)
        tokens = config.microbatch_size // shards * model.max_seq_len
        vector = tokens * model.embed_dim * itemsize // tensor
        # Logits in float32 and probabilities of one layer, of each head with every earlier token.
        square = is_plain * tokens * model.max_seq_len * model.num_heads * (4 + itemsize) // tensor
        kept = model.num_layers * (vectors * vector + (remat is None) * square)
        if model.residual_dtype is not None and itemsize < 4:  # each block's input is twice as wide
            kept += model.num_layers * vector
        return held + gradients + kept + _VECTORS_AT_WORK * vector + 2 * square + table

    return estimate


def slow_network_warning(
    config: TrainConfig, mesh: Mesh, networks: Sequence[int], topology: str, sent: str
) -> str | None:
    """A line about a mesh whose `fsdp` or `tensor` goes over the network between hosts of GPUs;
    None where only `data` does.

    Args:
      config: what to train.
      mesh: its devices.
      networks: the number of each device's fast network, in the order of `mesh.devices.flat`.
      topology: the devices, as `maxmars plan` names them.
      sent: what goes over that network, in words.
    """
    axes = [axis for axis in ("fsdp", "tensor") if sharding.crosses(mesh, axis, networks)]
    if not axes:
        return None
    unset = MeshConfig(tensor=1 if "tensor" in axes else config.mesh.tensor)
    better = choose_mesh(unset, config.model, math.gcd(*Counter(networks).values()))
    sizes = mesh_shape(better, mesh.size)
    flags = " ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items())
    return (
        f"warning: {' and '.join(f'mesh.{a}={mesh.shape[a]}' for a in axes)} goes over the slow "
        f"network between {len(set(networks))} hosts: {sent}; compare with `maxmars plan CONFIG "
        f"--topology {topology} {flags}`, or leave --mesh out"
    )


def gathered_bytes(config: TrainConfig, parameters: Parameters) -> int:
    """Bytes that a device sends for `fsdp` in a step, about: each microbatch gathers the weights
    twice, for the forward and the backward pass, and scatters their gradient."""
    model = config.model  # of other modules than GPT-2 only the type of the parameters is known
    dtype = model.compute_dtype if isinstance(model, GPT2Config) else "float32"
    itemsize = jnp.dtype(dtype).itemsize
    parts, tensor = (parameters.mesh.shape[axis] for axis in ("fsdp", "tensor"))
    size = parameters.count * itemsize // tensor
    return 3 * config.microbatches * size * (parts - 1) // parts


def with_remat(config: TrainConfig, remat: Remat) -> TrainConfig:
    """The config with this policy, or `auto`."""
    model: Any = config.model
    return dataclasses.replace(config, model=dataclasses.replace(model, remat=remat))
