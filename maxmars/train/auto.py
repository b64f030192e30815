"""What a run chooses by itself: `model.compute_dtype` and `model.remat`, where they are `auto`, and
`num_microbatches`, where it is None; and a warning of a mesh that slows the run down.

`prepare` makes the choices and the train step, for `train`, `plan`, `audit`, `compare` and the
benchmarks alike; the config of that step is the one that a run writes down.

The type of matrix products follows from a rule and not from a measurement: two runs of one config
on one machine, and a run and its resume, must compute in the same type. A run keeps the type that
it began with, wherever it continues.

The number of microbatches follows from an estimate of memory, without compiling: it must be known
before the data are read.

The policies of rematerialisation give the same loss and gradients but for rounding. Which of them
fits is read from the compiled train step, so that a run neither recomputes what it has the memory
to keep, nor ends out of memory. On TPUs their compiler says as well how long a step takes, and the
shortest is taken: to keep an array and read it again may take longer than to compute it.

A run that continues on the same mesh and kind of device keeps the last two, while they fit.
`maxmars plan --max-memory` finds both by compiling: see `search`.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxmars.config import GPT2Config, MeshConfig, TrainConfig
from maxmars.config.chips import CHIPS, chip_name
from maxmars.config.mesh import choose_mesh, mesh_shape, possible_microbatches
from maxmars.config.numbers import short
from maxmars.data.windows import Types
from maxmars.distributed import processes, sharding
from maxmars.distributed.step_clock import step_clock
from maxmars.model.attention import choose_attention
from maxmars.model.gpt2 import GPT2
from maxmars.model.parameters import Parameters
from maxmars.train.optimizer import check_optimizer, follows_rate
from maxmars.train.step import TrainState, TrainStep, abstract_train_state, make_train_step

ComputeDtype = Literal["auto", "bfloat16", "float32", "float64"]

Remat = str | None
Estimate = Callable[[TrainConfig], int]
"""Bytes that a step needs on one device; see `make_estimate`."""
POLICIES: tuple[Remat, ...] = (None, *GPT2.remat_policies)
"""GPT-2's policies of rematerialisation, from the least arithmetic to the least memory."""

USABLE = 0.95
"""Share of a device's memory that a step may take; the rest is for batches that are read ahead."""

# Vectors of embed_dim numbers: that each layer keeps of a token, and that the layer at work takes.
_VECTORS_KEPT = {"full": 1, "auto": 1, "attention": 9, "dots": 11, None: 36}
_VECTORS_KEPT_BY_GPUS = 18  # under None: 16.3 in GPT-2 small and 16.7 in XL, on an H200
_VECTORS_AT_WORK = 30


def prepare(
    config: TrainConfig,
    parameters: Parameters,
    types: Types | None = None,
    *,
    log: Callable[[str], None] = lambda _: None,
    kept: TrainConfig | None = None,
    memory_bytes: int | None = None,
    max_bytes: int | None = None,
    measure: Callable[[TrainStep], Needs] | None = None,
) -> TrainStep:
    """Choose precision, microbatches and rematerialisation, and make the train step; nothing is
    left to choose in its config.

    Args:
      config: what to train.
      parameters: of its model, on its devices, which may be absent.
      types: of a batch's arrays; see `make_train_step`.
      log: gets each choice and its reason, in one line.
      kept: what the run had before on this mesh, which stays where it still fits.
      memory_bytes: memory of a device that programs may use; None asks the devices.
      max_bytes: of a device; given, policy and number of microbatches are both searched by
        compiling, whatever the config says of them; see `search`.
      measure: says what a step needs, by compiling it; None is `measured`, for the devices.

    Raises:
      ValueError: the mesh does not divide the model or the batch, or a device, the model and the
        optimizer do not go together.
    """
    mesh, state = parameters.mesh, abstract_train_state(config, parameters)
    check_optimizer(config.optimizer, parameters, config.ema_decay)
    if not follows_rate(config.optimizer, parameters):
        log(
            "the optimizer leaves optimizer.learning_rate and the schedule aside, so its own rate "
            "is not known: there is no metric train/learning_rate"
        )
    config, policies = choose_precision(config, mesh, log), parameters.remat_policies

    def needs(config: TrainConfig) -> Needs:
        return (measure or measured)(make_train_step(config, parameters, types))

    if max_bytes is not None:
        config = search(config, mesh, policies, needs, max_bytes)
    else:
        memory, estimate = memory_bytes or memory_bytes_of(mesh), make_estimate(config, mesh, state)
        config = choose_microbatches(config, mesh, estimate, memory, log, kept=kept)
        config = choose_remat(
            config, mesh, policies, needs, estimate, log, kept=kept, memory_bytes=memory_bytes
        )
    if isinstance(config.model, GPT2Config):
        attention = choose_attention(config.model, mesh.devices.flat[0].platform)
        if attention.reason is not None:
            log(f"attention is {attention.implementation} and slower: {attention.reason}")
    return make_train_step(config, parameters, types)


def choose_precision(
    config: TrainConfig, mesh: Mesh, log: Callable[[str], None] = lambda _: None
) -> TrainConfig:
    """The config with `model.compute_dtype` chosen, if it is `auto`: bfloat16 on accelerators,
    float32 on CPUs. `log` gets the choice in one line."""
    if config.model.compute_dtype != "auto":
        return config
    platform = mesh.devices.flat[0].platform
    dtype = auto_dtype(platform)
    log(f"model.compute_dtype=auto: {dtype}, as the devices are of platform {platform}")
    return with_compute_dtype(config, dtype)


def auto_dtype(platform: str) -> Literal["bfloat16", "float32"]:
    """The type of matrix products for `auto` on a platform (`jax.Device.platform`)."""
    # Some CPUs multiply bfloat16 fast, but whether jaxlib then does depends on its version.
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


def choose_microbatches(
    config: TrainConfig,
    mesh: Mesh,
    estimate: Estimate | None,
    memory_bytes: int | None,
    log: Callable[[str], None],
    *,
    kept: TrainConfig | None = None,
) -> TrainConfig:
    """The config with `num_microbatches` chosen, if it is None: the fewest that divide over the
    mesh and fit in memory by the estimate. Where that is not known, the fewest that divide.

    Args:
      config: what to train; it fits the mesh, and `model.compute_dtype` is chosen.
      mesh: its devices.
      estimate: see `make_estimate`.
      memory_bytes: memory of a device; see `memory_bytes_of`.
      log: gets the choice and its reason, in one line, where it is more than one microbatch.
      kept: what the run had before, whose number stays unless more are needed.
    """
    if config.num_microbatches is not None:
        return config
    before = 1 if kept is None else kept.microbatches
    counts = [count for count in _counts(config, mesh) if count >= before]
    if memory_bytes is None or estimate is None:
        return dataclasses.replace(config, num_microbatches=counts[0])
    usable = int(USABLE * memory_bytes)
    chosen, needs = fewest_that_fit(config, counts, lambda c: Needs(estimate(c)), usable)
    if chosen.microbatches > before:
        verdict = "the fewest that fit" if needs.fit(usable) else "of which not even the last fits"
        log(
            f"num_microbatches={chosen.microbatches}, {verdict}: a step needs about "
            f"{needs} of {usable / 1e9:.3f} GB a device"
        )
    return chosen


def _counts(config: TrainConfig, mesh: Mesh) -> list[int]:
    return possible_microbatches(config.global_batch_size, sharding.batch_shards(mesh))


def search(
    config: TrainConfig,
    mesh: Mesh,
    policies: Sequence[Remat],
    measure: Callable[[TrainConfig], Needs],
    usable_bytes: int,
) -> TrainConfig:
    """The config with the `best_policy`, each with the fewest microbatches that fit; where nothing
    fits, with the last policy and the most microbatches.

    A policy that recomputes less is preferred, whatever its microbatch: each recomputed product
    costs arithmetic in every step, where a smaller microbatch costs only parameters gathered more
    often.
    """
    counts = _counts(config, mesh)
    chosen: dict[Remat, TrainConfig] = {}

    def fewest(remat: Remat) -> Needs:
        tried = with_remat(config, remat)
        chosen[remat], needs = fewest_that_fit(tried, counts, measure, usable_bytes)
        return needs

    remat, _ = best_policy(fewest, usable_bytes, policies)
    return chosen[remat]


def fewest_that_fit(
    config: TrainConfig,
    counts: Sequence[int],
    measure: Callable[[TrainConfig], Needs],
    usable_bytes: int,
) -> tuple[TrainConfig, Needs]:
    """The config with the first of ascending numbers of microbatches that fits, or the last one,
    and what it needs. By bisection; none is measured twice."""
    tried: dict[int, tuple[TrainConfig, Needs]] = {}

    def fits(i: int) -> bool:
        some = dataclasses.replace(config, num_microbatches=counts[i])
        tried[i] = some, measure(some)
        return tried[i][1].fit(usable_bytes)

    last = len(counts) - 1
    if fits(0) or last == 0 or not fits(last):
        return tried[max(tried)]
    return tried[1 + bisect.bisect_left(range(1, last), True, key=fits)]


def make_estimate(config: TrainConfig, mesh: Mesh, state: TrainState) -> Estimate | None:
    """How much memory a step needs on one device, by arithmetic alone, for any microbatches and
    policy of this config; None for a module of the user's own, of which nothing is known.

    These are the state and the gradients, exactly; what each layer keeps of a token for the
    backward pass, in vectors of `embed_dim` numbers; and what the layer at work takes, by compiled
    programs for TPUs. `remat=auto` counts as `full`, the least memory, on TPUs
    alone: elsewhere it is to take None, which on GPUs is faster than a larger microbatch.

    Args:
      config: what to train; `model.compute_dtype` is chosen.
      mesh: its devices.
      state: its abstract state.
    """
    model, platform = config.model, mesh.devices.flat[0].platform
    if not isinstance(model, GPT2Config):
        return None
    shards, tensor = sharding.batch_shards(mesh), mesh.shape["tensor"]
    held, params = (sharding.bytes_on_chip(tree) for tree in (state, state.params))
    itemsize = jnp.dtype(model.compute_dtype or "float32").itemsize
    is_plain = choose_attention(model, platform).implementation == "plain"
    table = model.padded_vocab_size * model.embed_dim * (4 + itemsize)  # whole, and its gradient

    def estimate(config: TrainConfig) -> int:
        remat = config.model.remat
        remat = None if remat == "auto" and platform != "tpu" else remat
        vectors = _VECTORS_KEPT[remat]
        if remat is None and platform in sharding.GPUS:
            vectors = _VECTORS_KEPT_BY_GPUS
        gradients = params * (2 if config.microbatches > 1 else 1)
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
    itemsize = jnp.dtype(config.model.compute_dtype or "float32").itemsize
    parts, tensor = (parameters.mesh.shape[axis] for axis in ("fsdp", "tensor"))
    size = parameters.count * itemsize // tensor
    return 3 * config.microbatches * size * (parts - 1) // parts


def choose_remat(
    config: TrainConfig,
    mesh: Mesh,
    policies: Sequence[Remat],
    measure: Callable[[TrainConfig], Needs],
    estimate: Estimate | None,
    log: Callable[[str], None],
    *,
    kept: TrainConfig | None = None,
    memory_bytes: int | None = None,
) -> TrainConfig:
    """The config with `model.remat` chosen by `best_policy`, if it is `auto`; all processes choose
    the same. Where a device's memory is not known, as on a CPU, nothing is measured, and nothing is
    recomputed unless it was before.

    Args:
      config: what to train; it fits the mesh.
      mesh: its devices.
      policies: of its model; see `Parameters.remat_policies`.
      measure: what the step of a config needs; it compiles.
      estimate: see `make_estimate`.
      log: gets the choice and its reason, in one line.
      kept: what the run had before, whose policy stays unless one of less memory is needed.
      memory_bytes: memory of a device that programs may use; None asks the device.
    """
    if config.model.remat != "auto":
        return config
    before: Remat = None  # which a run from before choices were recorded may have had, or not
    if kept is not None and kept.model.remat in policies:
        before = kept.model.remat
    limit = memory_bytes or device_memory_bytes(mesh.local_devices[0])
    if not processes.all_processes(limit is not None):
        log(f"model.remat=auto: {before}, as this device's memory is not known")
        return with_remat(config, before)
    assert limit is not None
    usable = int(USABLE * limit)

    def measure_everywhere(remat: Remat) -> Needs:
        needs = measure(with_remat(config, remat))
        if not processes.all_processes(needs.fit(usable)) and needs.fit(usable):
            return Needs(None)  # another process's devices have less memory
        return needs

    policies = policies[policies.index(before) :]
    if estimate is not None:
        policies = possible_policies(config, estimate, usable, policies)
    remat, needs = best_policy(measure_everywhere, usable, policies, keep=kept is not None)
    problem = "" if needs.fit(usable) else ", and nothing fits; raise num_microbatches or mesh.fsdp"
    usable_gb = f"{usable / 1e9:.2f} GB of a device may be taken"
    log(f"model.remat=auto: {remat} takes {needs}; {usable_gb}{problem}")
    return with_remat(config, remat)


def with_remat(config: TrainConfig, remat: Remat) -> TrainConfig:
    """The config with this policy, or `auto`."""
    model: Any = config.model
    return dataclasses.replace(config, model=dataclasses.replace(model, remat=remat))


def possible_policies(
    config: TrainConfig, estimate: Estimate, usable_bytes: int, policies: Sequence[Remat]
) -> Sequence[Remat]:
    """Those of the policies whose steps are worth compiling; the last one always is.

    The others do not fit even if the estimate is 1.7 times too high; 1.5 times what the compiler
    for TPUs took is the most that was seen.
    """
    possible = [p for p in policies if estimate(with_remat(config, p)) <= 1.7 * usable_bytes]
    return [*(p for p in possible if p != policies[-1]), policies[-1]]


class Needs(NamedTuple):
    """What a compiled train step takes on one device."""

    peak_bytes: int | None
    """None where the compiler refuses it for want of memory, as then does `fit`."""
    seconds: float | None = None
    """By `step_clock`, on TPUs. None elsewhere: on a GPU the policy that recomputes least was the
    fastest, and to compile all of them takes minutes."""

    def fit(self, usable_bytes: int) -> bool:
        return self.peak_bytes is not None and self.peak_bytes <= usable_bytes

    def __str__(self) -> str:
        if self.peak_bytes is None:
            return "too much memory"
        time = "" if self.seconds is None else f"{self.seconds * 1e3:,.1f} ms and "
        return f"{time}{self.peak_bytes / 1e9:.3f} GB"


def best_policy(
    measure: Callable[[Remat], Needs],
    usable_bytes: int,
    policies: Sequence[Remat] = POLICIES,
    *,
    keep: bool = False,
) -> tuple[Remat, Needs]:
    """The policy to take, and what it needs: of those that fit, the one of the shortest step;
    where its time is not known, the first.

    Args:
      measure: what the step needs under a policy; it compiles, so it is asked only as often as the
        choice needs it.
      usable_bytes: memory of one device that the step may take.
      policies: those to choose from, from the least arithmetic to the least memory. If none fits,
        it is the last.
      keep: take the first that fits, whatever its time: that of the run so far.
    """
    fitting: dict[Remat, Needs] = {}
    needs = Needs(None)
    for remat in policies:
        needs = measure(remat)
        if needs.fit(usable_bytes):
            if keep or needs.seconds is None:
                return remat, needs
            fitting[remat] = needs
    if not fitting:
        return policies[-1], needs
    return min(fitting.items(), key=lambda item: item[1].seconds or 0.0)


def measured(train_step: TrainStep) -> Needs:
    """What a train step takes on one device of its mesh, by its compiled program."""
    try:
        compiled = train_step.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Needs(None)  # the compiler itself refuses the program
    device = train_step.mesh.devices.flat[0]
    is_tpu, name = device.platform == "tpu", chip_name(device.device_kind)
    clock = step_clock(compiled, CHIPS[name]) if is_tpu and name is not None else None
    return Needs(peak_bytes(compiled, tpu=is_tpu), None if clock is None else clock.seconds)


def peak_bytes(compiled: jax.stages.Compiled, *, tpu: bool) -> int:
    """Most bytes that a compiled program has in use on one device.

    For TPUs this is the compiler's own figure, by which it decides whether a program fits.
    Elsewhere it is the arguments, the temporaries and the outputs that take no argument's place:
    XLA's own peak of a CPU program leaves these out.

    Raises:
      ValueError: the backend has no memory analysis.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend has no memory analysis of compiled programs.")
    if tpu and stats.peak_memory_in_bytes:
        return stats.peak_memory_in_bytes
    made = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + stats.temp_size_in_bytes + made
