"""What a run will need, before its chips are paid for.

`make_plan` compiles the train step that `train` runs, and the evaluation step, for devices that
need not be there, and reads memory and traffic from the compiled programs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from maxmars import __version__, sharding
from maxmars.config import TrainConfig, to_dict
from maxmars.model import num_parameters
from maxmars.optim import OrthogonalizationPlan, plan_orthogonalization
from maxmars.optimizer_config import MarsConfig, MuonConfig
from maxmars.optimizer_factory import matrix_specs
from maxmars.plan.compiled import Compiled, compile_eval_step
from maxmars.plan.estimate import ASSUMPTIONS, Estimate, Flops, count_flops, estimate
from maxmars.plan.fit import compile_chosen
from maxmars.plan.memory import ChipMemory, chip_memory, peak_bytes
from maxmars.plan.topology import Topology
from maxmars.plan.traffic import Traffic, largest_bytes, traffic
from maxmars.precision import choose_precision
from maxmars.train_step import make_train_step


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs on a topology."""

    config: TrainConfig
    topology: Topology
    mesh: Mesh
    num_parameters: int
    memory: ChipMemory
    collectives: tuple[Traffic, ...]
    """Of one train step."""
    largest_mixed_bytes: int
    """Bytes of the largest execution of a `mixed` collective."""
    exchange: OrthogonalizationPlan | None
    """Which chip orthogonalises which matrix; None where the optimizer does not orthogonalise."""
    flops: Flops
    estimate: Estimate | None
    """None on fake devices, whose speed means nothing."""
    train_step: Compiled
    eval_step: Compiled | None
    """None where the config never evaluates, or was not asked for."""

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready values; bytes are per chip, and those of one step."""
        memory = dataclasses.asdict(self.memory)
        memory["headroom_bytes"] = self.memory.headroom_bytes
        chip = self.topology.chip
        return {
            "maxmars": __version__,
            "jax": jax.__version__,
            "config": to_dict(self.config),
            "topology": self.topology.name,
            "num_slices": self.topology.num_slices,
            "num_chips": self.mesh.size,
            "device_kind": self.mesh.devices.flat[0].device_kind,
            "chip": None if chip is None else dataclasses.asdict(chip),
            "mesh": dict(self.mesh.shape),
            "num_parameters": self.num_parameters,
            "memory": memory,
            "collectives": [dataclasses.asdict(row) for row in self.collectives],
            "largest_mixed_bytes": self.largest_mixed_bytes,
            "orthogonalization": self._exchange_json(),
            "flops": dataclasses.asdict(self.flops),
            "estimate": None if self.estimate is None else dataclasses.asdict(self.estimate),
            "assumptions": list(ASSUMPTIONS),
            "eval": None if self.eval_step is None else self._eval_json(self.eval_step),
            "lower_time_s": self.train_step.lower_s,
            "compile_time_s": self.train_step.compile_s,
        }

    def _eval_json(self, step: Compiled) -> dict[str, Any]:
        rows = traffic(step.collectives, self.mesh, self.topology)
        return {
            "peak_bytes": peak_bytes(step.memory, self.topology.chip),
            "compiler": dataclasses.asdict(step.memory),
            "collectives": [dataclasses.asdict(row) for row in rows],
            "lower_time_s": step.lower_s,
            "compile_time_s": step.compile_s,
        }

    def _exchange_json(self) -> dict[str, Any] | None:
        if self.exchange is None:
            return None
        return {
            "elements": self.exchange.elements,
            "padded_elements": self.exchange.padded_elements,
            "transfer_bytes": self.exchange.transfer_bytes(),
        }


def make_plan(
    config: TrainConfig,
    topology: Topology,
    *,
    price: float | None = None,
    evaluate: bool = True,
) -> Plan:
    """Compile a run's programs for a topology and read from them what it needs.

    Args:
      config: what to train; its mesh must fit the topology. Of `model.remat` and
        `model.compute_dtype` `auto` the plan has what `train` chooses there.
      topology: from `get_topology`.
      price: of a chip for an hour, in any currency.
      evaluate: whether to compile the evaluation step as well.

    Raises:
      ValueError: the mesh fits neither the devices nor the model and its batch.
      DoesNotFitError: the compiler refuses a program that the chip has no memory for.
    """
    if price is not None and not price >= 0:
        raise ValueError(f"--price {price} must not be negative: it is money a chip and hour.")
    mesh = sharding.make_mesh(config.mesh, topology.devices)
    config = choose_precision(config, mesh)
    chip = topology.chip
    config, step = compile_chosen(config, mesh, topology)
    rows = traffic(step.collectives, mesh, topology)
    tokens = config.num_microbatches * config.microbatch_size * (config.model.max_seq_len + 1)
    memory = chip_memory(
        step.state,
        4 * tokens // sharding.batch_shards(mesh),
        step.memory,
        chip,
    )
    flops = count_flops(config, num_parameters(config.model), step.flops)
    asked = evaluate and config.eval.every is not None
    return Plan(
        config=config,
        topology=topology,
        mesh=mesh,
        num_parameters=num_parameters(config.model),
        memory=memory,
        collectives=rows,
        largest_mixed_bytes=largest_bytes(step.collectives, "mixed"),
        exchange=_exchange(config, step.state.params, mesh),
        flops=flops,
        estimate=None
        if chip is None
        else estimate(config, flops, memory, rows, chip, mesh.size, price),
        train_step=step,
        eval_step=compile_eval_step(config, step.state.params, mesh, topology) if asked else None,
    )


def _exchange(config: TrainConfig, params: Any, mesh: Mesh) -> OrthogonalizationPlan | None:
    """The exchange that the optimizer plans for its matrices."""
    optimizer = config.optimizer
    if not isinstance(optimizer, MarsConfig | MuonConfig):
        return None
    if isinstance(optimizer, MarsConfig) and optimizer.variant not in ("shampoo", "m"):
        return None
    specs = matrix_specs(config.model, qkv=optimizer.qkv, mesh=mesh)
    paths = jax.tree_util.tree_leaves_with_path(params)
    with_embeddings = getattr(optimizer, "embeddings", "adamw") == "orthogonalize"
    kept = {
        jax.tree_util.keystr(path, simple=True, separator="."): (leaf, spec)
        for (path, leaf), spec in zip(paths, jax.tree.leaves(specs), strict=True)
        if spec.is_matrix and (with_embeddings or not spec.embedding)
    }
    leaves = {name: leaf for name, (leaf, _) in kept.items()}
    kept_specs = {name: spec for name, (_, spec) in kept.items()}
    axes = mesh.axis_names if optimizer.own_over_data else None
    return plan_orthogonalization(leaves, kept_specs, mesh=mesh, ownership_axes=axes)


def save_executable(plan: Plan, path: Path) -> None:
    """Write the compiled train step to a file; only for the same JAX, on the same kind of chips.

    Raises:
      ValueError: this compiler's programs cannot be written.
    """
    try:
        payload, _, _ = serialize_executable.serialize(plan.train_step.executable)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(
            f"programs for {plan.topology.name} cannot be written to a file: "
            f"{str(error).splitlines()[0]} Leave --save-executable out."
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(payload)


def load_executable(path: Path, config: TrainConfig, mesh: Mesh) -> Any:
    """The train step that `save_executable` wrote, to call with a state and tokens.

    Loading runs code of the file: read only what you wrote.

    Args:
      path: the file.
      config: what the plan was made for.
      mesh: its devices, now there.
    """
    step = make_train_step(config, mesh)
    arguments = (step.abstract_state, step.abstract_tokens)
    with jax.set_mesh(mesh):
        results = jax.eval_shape(step.jitted, *arguments)
    return serialize_executable.deserialize_and_load(
        path.read_bytes(),
        jax.tree.structure((arguments, {})),
        jax.tree.structure(results),
        execution_devices=mesh.devices.flatten().tolist(),
    )
