"""Rules for what a run chooses by itself: `model.compute_dtype` and `model.remat` where a config
says `auto`, `num_microbatches` where it says None. `resolve.py` applies them.

Rules compile and measure nothing: a start compiles the train step once, and all processes choose
the same. Memory is estimated by arithmetic (`make_estimate`). `maxmars plan --remat all` compiles
the step under every policy of rematerialisation, to compare the rule with. Policies give the same
loss and gradients up to rounding. The file also warns of a mesh that slows a run down.
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
"""Function from a config to the bytes of a step on one device; see `make_estimate`."""
USABLE = 0.95
"""Share of a device's memory that a step may take; the rest is for prefetched batches."""

# Activations of a token in vectors of embed_dim numbers: those that each layer saves for the
# backward pass, by policy, and those of the layer that is being computed.
_SAVED_ACTIVATIONS = {"full": 1, "attention": 9, "dots": 11, None: 36}
_SAVED_ON_GPUS = 18  # under None: 16.3 in GPT-2 small and 16.7 in XL, on an H200
_LIVE_ACTIVATIONS = 30

# XL's: by the clock of `plan` the policy `attention` is slower than `full` at 768, faster at 1600.
_MIN_WIDTH_FOR_ATTENTION = 1600


def choose_precision(
    config: TrainConfig, mesh: Mesh, log: Callable[[str], None] = lambda _: None
) -> TrainConfig:
    """Choose `model.compute_dtype`, if it is `auto`: bfloat16 on accelerators, float32 on CPUs.
    `log` gets the choice in one line."""
    if not isinstance(config.model, GPT2Config) or config.model.compute_dtype != "auto":
        return config
    platform = mesh.devices.flat[0].platform
    dtype = auto_dtype(platform)
    log(f"model.compute_dtype=auto: {dtype}, as the devices are of platform {platform}")
    return with_compute_dtype(config, dtype)


def auto_dtype(platform: str) -> Literal["bfloat16", "float32"]:
    """The dtype of matrix products for `auto` on a platform (`jax.Device.platform`)."""
    # CPUs with AVX512_BF16 are faster in bfloat16, but results should agree between CPUs.
    return "float32" if platform == "cpu" else "bfloat16"


def with_compute_dtype(config: TrainConfig, dtype: ComputeDtype) -> TrainConfig:
    """The config with this dtype of matrix products."""
    assert isinstance(config.model, GPT2Config)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype=dtype))


def device_memory_bytes(device: jax.Device) -> int | None:
    """Memory of a device that programs may use; None where unknown, as for CPUs."""
    if device.platform == "cpu":
        return None
    return (device.memory_stats() or {}).get("bytes_limit")


def _machine_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(config: TrainConfig, mesh: Mesh, state: TrainState) -> None:
    """Check that the state alone, and the batches alone, fit into a device's memory. XLA would
    abort the process instead, or report the error after minutes.

    Args:
      config: what to train.
      mesh: devices of the run.
      state: abstract state of the run.

    Raises:
      ValueError: state or batches exceed the memory.
    """
    model, way_out = config.model, "take a smaller model, or divide it over more devices with "
    way_out += "mesh.fsdp. `maxmars plan` says what fits"
    needs = [("parameters and optimizer state need", sharding.bytes_on_chip(state), way_out)]
    width = model.embed_dim if isinstance(model, GPT2Config) else 0
    for name, rows, token_bytes in (
        ("global_batch_size", config.global_batch_size, 4),  # ids
        ("eval.batch_size", config.eval.batch_size or 0, 4 + 2 * width),  # ids and hidden states
    ):
        size = rows // sharding.batch_shards(mesh) * model.max_seq_len * token_bytes
        needs.append((f"the batches of {name}={rows} need", size, f"lower {name}"))
    device = mesh.local_devices[0]
    limit, where = device_memory_bytes(device), f"a {device.device_kind} has"
    if device.platform == "cpu":
        needs = [(what, len(mesh.local_devices) * size, way) for what, size, way in needs]
        limit, where = _machine_memory_bytes(), "this machine has"
    for what, size, way_out in needs:
        if limit is not None and size > limit:
            raise ValueError(f"{what} {short(size)}B, and {where} {short(limit)}B: {way_out}.")


def memory_bytes_of(mesh: Mesh) -> int | None:
    """The least memory of a device over all processes, which must all call; None where unknown. The
    devices of a CPU share half of the machine's memory."""
    device, count = mesh.local_devices[0], len(mesh.local_devices)
    limit = device_memory_bytes(device)
    if device.platform == "cpu":
        limit = _machine_memory_bytes() // 2 // count
    limits = [int(text) for text in processes.texts_of_all(str(limit or 0))]
    return min(limits) or None


def choose_memory(
    config: TrainConfig,
    parameters: Parameters,
    estimate: Estimate | None,
    memory_bytes: int | None,
    log: Callable[[str], None],
) -> TrainConfig:
    """Choose `model.remat`, if it is `auto`, and `num_microbatches`, if it is None: the first of
    `remat_rule`'s policies that fits by the estimate, with the fewest microbatches.

    Args:
      config: what to train; it fits the mesh, and `model.compute_dtype` is not `auto`.
      parameters: parameters of the model, on the mesh.
      estimate: see `make_estimate`; without one, everything fits.
      memory_bytes: memory of a device; None: unknown, everything fits.
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
    step_bytes, chosen = 0, config
    choices = list(itertools.product(policies, counts))
    if platform == "tpu":
        # Under fsdp each microbatch gathers all parameters, which costs more than another policy:
        # every policy is tried with one microbatch, then with two.
        choices.sort(key=lambda choice: choice[1] or 1)
    for remat, count in choices:
        chosen = dataclasses.replace(with_remat(config, remat), num_microbatches=count)
        step_bytes = 0 if estimate is None else estimate(chosen)
        if step_bytes <= usable:
            break
    about = f"a step needs about {step_bytes / 1e9:.3f} of {usable / 1e9:.3f} GB a device"
    fits = step_bytes <= usable
    if config.model.remat == "auto":
        log(f"model.remat=auto: {chosen.model.remat}, by the rule for {platform}")
    if config.num_microbatches is None and chosen.microbatches > 1:
        verdict = "the fewest that fit" if fits else "of which not even the last fits"
        log(f"num_microbatches={chosen.microbatches}, {verdict}: {about}")
    return chosen


def remat_rule(parameters: Parameters, platform: str) -> Sequence[Remat]:
    """The policies for `model.remat=auto` on a platform, in order of preference.

    By the clock of `plan`, a TPU recomputes a narrow block faster than it writes and reads saved
    activations; from XL's width on, saving attention and its inputs is faster, unless it takes more
    microbatches. A GPU recomputes as little as fits, a CPU nothing. See plan/README.md.
    """
    policies, model = parameters.remat_policies, parameters.model
    match platform:
        case "cpu":
            return policies[:1]
        case "tpu":
            is_wide = isinstance(model, GPT2Config) and model.embed_dim >= _MIN_WIDTH_FOR_ATTENTION
            return ("attention", "full") if is_wide else policies[-1:]
        case _:
            return policies


def less_memory(config: TrainConfig, parameters: Parameters) -> list[str]:
    """Command-line options for a step of less memory: the next policy of rematerialisation; after
    the last policy, the next number of microbatches; empty if there is neither."""
    policies = parameters.remat_policies
    if (remat := config.model.remat) in policies[:-1]:
        return ["--model.remat", str(policies[policies.index(remat) + 1])]
    shards = sharding.batch_shards(parameters.mesh)
    counts = possible_microbatches(config.global_batch_size, shards)
    more = [str(count) for count in counts if count > config.microbatches]
    return ["--num-microbatches", more[0]] if more else []


def less_memory_hint(config: TrainConfig, parameters: Parameters) -> str:
    """Advice for a step out of memory, in words."""
    options = " ".join(less_memory(config, parameters))
    return f"{f'add {options}, or ' if options else ''}divide it over more devices with mesh.fsdp"


@contextlib.contextmanager
def noting_less_memory(step: TrainStep) -> Iterator[None]:
    """Add advice to XLA's out-of-memory errors, as a note, which the command line prints."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            error.add_note(less_memory_hint(step.config, step.parameters))
        raise


def make_estimate(
    config: TrainConfig, parameters: Parameters, state: TrainState
) -> Estimate | None:
    """Make a function that estimates the memory of a step on one device, for any microbatches and
    policy of a config; None for a module of the user's own.

    The estimate is arithmetic: state and gradients, exactly; the activations that each layer saves
    for the backward pass; and those of one layer at work. The constants for activations come from
    compiled programs for TPUs.

    Args:
      config: what to train; `model.compute_dtype` is not `auto`.
      parameters: parameters of the model, on the mesh.
      state: abstract state of the run.
    """
    model, mesh = config.model, parameters.mesh
    platform = mesh.devices.flat[0].platform
    if not isinstance(model, GPT2Config):
        return None
    shards, tensor = sharding.batch_shards(mesh), mesh.shape["tensor"]
    state_bytes, params_bytes = map(sharding.bytes_on_chip, (state, state.params))
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    tx = make_optimizer(config.optimizer, parameters, config.optimizer.learning_rate)
    further = len(requests_of(tx))  # gradients that the optimizer requests beside the usual one
    is_plain = choose_attention(model, platform).implementation == "plain"
    # The token embedding and its gradient, both whole on each device.
    table = model.padded_vocab_size * model.embed_dim * (4 + itemsize)

    def estimate(config: TrainConfig) -> int:
        remat = config.model.remat
        vectors = _SAVED_ACTIVATIONS[remat]
        if remat is None and platform in sharding.GPUS:
            vectors = _SAVED_ON_GPUS
        # Several microbatches have a sum beside the gradient of the current one.
        gradients = params_bytes * ((2 if config.microbatches > 1 else 1) + further)
        tokens = config.microbatch_size // shards * model.max_seq_len
        vector = tokens * model.embed_dim * itemsize // tensor
        # Plain attention has logits in float32 and probabilities, for each head and pair of tokens.
        square = is_plain * tokens * model.max_seq_len * model.num_heads * (4 + itemsize) // tensor
        saved = model.num_layers * (vectors * vector + (remat is None) * square)
        if model.residual_dtype is not None and itemsize < 4:  # each block's input takes twice that
            saved += model.num_layers * vector
        live = _LIVE_ACTIVATIONS * vector + 2 * square
        return state_bytes + gradients + saved + live + table

    return estimate


def slow_network_warning(
    config: TrainConfig, mesh: Mesh, networks: Sequence[int], topology: str, sent: str
) -> str | None:
    """A warning of a mesh whose `fsdp` or `tensor` crosses the slow network between hosts of GPUs;
    None where only `data` does.

    Args:
      config: what to train.
      mesh: devices of the run.
      networks: for each device, as in `mesh.devices.flat`, the number of its fast network.
      topology: the devices, as `maxmars plan --topology` takes them.
      sent: traffic over the slow network, in words.
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
    """Estimate the bytes that a device sends for `fsdp` in a step: each microbatch gathers the
    weights twice, for the forward and the backward pass, and scatters their gradient."""
    model = config.model  # an own module has no `compute_dtype`
    dtype = model.compute_dtype if isinstance(model, GPT2Config) else "float32"
    itemsize = jnp.dtype(dtype).itemsize
    fsdp, tensor = (parameters.mesh.shape[axis] for axis in ("fsdp", "tensor"))
    size = parameters.count * itemsize // tensor
    return 3 * config.microbatches * size * (fsdp - 1) // fsdp


def with_remat(config: TrainConfig, remat: Remat) -> TrainConfig:
    """The config with this policy of rematerialisation, or `auto`."""
    model: Any = config.model
    return dataclasses.replace(config, model=dataclasses.replace(model, remat=remat))
