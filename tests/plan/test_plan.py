"""Plans for eight fake CPU devices: memory, traffic, and that the program is the one that runs."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import ADAMW, MODEL, tiny_config

from maxmars import sharding
from maxmars.config import CheckpointConfig, EvalConfig, MeshConfig
from maxmars.optimizer_config import MarsConfig
from maxmars.plan import load_executable, make_plan, save_executable
from maxmars.plan.chips import CHIPS
from maxmars.plan.estimate import estimate
from maxmars.plan.flops import matmul_flops
from maxmars.plan.memory import bytes_on_chip, optimizer_state_bytes
from maxmars.plan.topology import get_topology
from maxmars.train import train
from maxmars.train_step import (
    TrainStep,
    abstract_train_state,
    init_train_state,
    make_train_step,
)

ROOT = Path(__file__).parents[2]
BUDGETS = ROOT / "tests" / "plan" / "traffic_cpu.json"
MB = 10**6
PLAIN = dataclasses.replace(MODEL, use_bias=False)
OPTIMIZERS = {
    "adamw": ADAMW,
    "mars": MarsConfig(),
    "shampoo": MarsConfig(variant="shampoo"),
}
EXACT = MarsConfig(exact=True)


def config_of(optimizer, **changes):
    mesh = MeshConfig(data=1, fsdp=4, tensor=2)
    return tiny_config(optimizer=optimizer, model=PLAIN, mesh=mesh, num_steps=1, **changes)


@pytest.fixture(scope="module")
def plans():
    """One plan for each optimizer, the evaluation only in the first."""
    topology = get_topology("cpu:8")
    return {
        name: make_plan(config_of(optimizer), topology, evaluate=name == "adamw")
        for name, optimizer in OPTIMIZERS.items()
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_is_the_compilers(plans, name):
    plan = plans[name]
    stats = plan.train_step.executable.memory_analysis()
    memory = plan.memory
    assert memory.compiler.argument_bytes == stats.argument_size_in_bytes
    assert memory.compiler.temp_bytes == stats.temp_size_in_bytes
    assert memory.compiler.alias_bytes == stats.alias_size_in_bytes
    made = stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert memory.peak_bytes == stats.argument_size_in_bytes + stats.temp_size_in_bytes + made
    counted = memory.parameters_bytes + sum(memory.optimizer_state_bytes.values())
    counted += memory.previous_parameters_bytes + memory.other_arguments_bytes
    assert counted + memory.padding_bytes == stats.argument_size_in_bytes
    assert memory.padding_bytes == 0  # a CPU has no tiles
    rest = memory.gradients_bytes + memory.temporaries_bytes
    assert rest == memory.peak_bytes - stats.argument_size_in_bytes


@pytest.mark.parametrize("name", [*OPTIMIZERS, "exact"])
def test_state_bytes_are_the_arithmetic_of_the_config(plans, name):
    d, layers, vocab, length = 32, 3, 264, 16
    kernels = 4 * 12 * layers * d * d // 8  # split over fsdp and tensor
    embeddings = 4 * (vocab * d // 8 + length * d // 4)  # positions over fsdp only
    vectors = 4 * (2 * layers + 1) * d  # a copy everywhere
    every = kernels + embeddings + vectors
    expected = {
        "adamw": {"mu": every, "nu": every},
        "mars": {"mu": every, "nu": every, "last_grad": kernels + embeddings},
        "shampoo": {"mu": every, "nu": embeddings + vectors, "last_grad": kernels},
        "exact": {"mu": every, "nu": every},
    }[name]
    if name == "exact":
        state = abstract_train_state(config_of(EXACT), plans["mars"].mesh)
        found = optimizer_state_bytes(state.opt_state)
        assert bytes_on_chip(state.prev_params) == bytes_on_chip(state.params) == every
    else:
        found = plans[name].memory.optimizer_state_bytes
        assert plans[name].memory.parameters_bytes == every
        assert plans[name].memory.previous_parameters_bytes == 0
    assert {kind: size for kind, size in found.items() if size > 100} == expected


def rows_of(plan, phase):
    return [row for row in plan.collectives if row.phase == phase]


def test_mars_adamw_adds_no_traffic_but_scalars(plans):
    adamw, mars = plans["adamw"], plans["mars"]
    assert sum(row.bytes for row in rows_of(mars, "optimizer")) < 1000
    total = [sum(row.bytes for row in plan.collectives) for plan in (adamw, mars)]
    assert abs(total[1] - total[0]) < 1000


def test_mars_shampoo_moves_what_its_plan_says(plans):
    plan = plans["shampoo"]
    rows = rows_of(plan, "optimizer")
    exchanged = sum(row.bytes for row in rows if row.op == "all-to-all")
    assert exchanged == plan.exchange.transfer_bytes() > 0
    assert exchanged <= 1.1 * 2 * 2 * plan.exchange.padded_elements / 8
    assert sum(row.bytes for row in rows if row.op != "all-to-all") < 1000
    assert {row.axes for row in rows if row.op == "all-to-all"} == {("fsdp", "tensor")}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_the_compiler_merged_is_small(plans, name):
    assert plans[name].largest_mixed_bytes <= MB


def budgets(plan):
    """Bytes and executions of one step by what they are."""
    return {
        f"{row.phase} {row.op} {','.join(row.axes or '?')}": [row.bytes, row.count]
        for row in plan.collectives
        if row.bytes >= 1000
    }


def test_traffic_stays_within_the_budgets(plans, request):
    found = {name: budgets(plan) for name, plan in plans.items()}
    if request.config.getoption("--update-goldens"):
        BUDGETS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    stored = json.loads(BUDGETS.read_text())
    assert stored.keys() == found.keys()
    for name, kinds in found.items():
        for kind, (size, count) in kinds.items():
            # Compilers of other versions may arrange a little differently.
            limit = stored[name].get(kind, [0, 0])
            assert size <= 1.05 * limit[0], (name, kind, size, limit)
            assert count <= 2 * limit[1], (name, kind, count, limit)


def test_flops_of_the_model(plans):
    plan = plans["adamw"]
    tokens, d, layers, length = plan.config.tokens_per_step, 32, 3, 16
    forward = 2 * 12 * layers * d * d + 2 * 264 * d + 4 * layers * length * d
    assert plan.flops.hardware == 3 * forward * tokens  # no rematerialisation
    assert plan.flops.optimizer == 0
    exchange = plans["shampoo"].exchange
    on_devices = 8 * sum(group.flops() for group in exchange.groups)
    assert plans["shampoo"].flops.optimizer == pytest.approx(on_devices, rel=0.01)
    exact = make_train_step(config_of(EXACT), plan.mesh)
    assert matmul_flops(exact.trace().jaxpr).total() == 2 * plan.flops.hardware
    assert plan.flops.model / tokens == 6 * plan.num_parameters + 12 * layers * d * length


def test_estimate_adds_up(plans):
    plan, chip = plans["shampoo"], CHIPS["v5e"]
    row = plan.collectives[0]
    rows = [
        dataclasses.replace(row, network="ICI", wire_bytes=2 * chip.network_bandwidth),
        dataclasses.replace(row, network="DCN", wire_bytes=3 * chip.dcn_bandwidth),
    ]
    flops = dataclasses.replace(
        plan.flops, hardware=int(8 * chip.peak_flops * 6), optimizer=0, model=int(8e12)
    )
    found = estimate(plan.config, flops, plan.memory, rows, chip, 8, price=2.0)
    assert found.communication_s == pytest.approx({"ICI": 2, "DCN": 3})
    assert found.step_time_s == pytest.approx(11, abs=1e-3)
    assert found.overlapped_step_time_s == pytest.approx(6, abs=1e-3)
    assert found.mfu == pytest.approx(8e12 / (8 * chip.peak_flops * found.step_time_s))
    assert found.tokens_per_day == pytest.approx(256 / found.step_time_s * 86400)
    hours = found.step_time_s * plan.config.num_steps / 3600
    assert found.cost == pytest.approx(2 * 8 * hours)


def normalized(compiled):
    """A program's text without the places in the source that it comes from."""
    text = compiled.as_text()
    text = text[text.index("\n\n%") if "\n\n%" in text else 0 :]
    return re.sub(r" stack_frame_id=\d+| source_(file|line)=\S+?(?=[ }])", "", text)


def test_the_planned_program_is_the_trained_one(tmp_path, monkeypatch, plans):
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path / "cache"))
    quick = {"eval": EvalConfig(every=None), "checkpoint": CheckpointConfig(every=None)}
    config = config_of(OPTIMIZERS["shampoo"], **quick)
    call, ran = TrainStep.__call__, []

    def recorded(self, state, tokens):
        with jax.set_mesh(self.mesh):
            ran.append(self.jitted.lower(state, tokens).compile())
        return call(self, state, tokens)

    monkeypatch.setattr(TrainStep, "__call__", recorded)
    train(config, tmp_path / "run")
    assert len(ran) == 1
    assert normalized(plans["shampoo"].train_step.executable) == normalized(ran[0])


def test_a_written_executable_runs(tmp_path, plans):
    plan = plans["adamw"]
    save_executable(plan, tmp_path / "step")
    loaded = load_executable(tmp_path / "step", plan.config, plan.mesh)
    tokens = jax.device_put(
        np.arange(2 * 8 * 17, dtype=np.int32).reshape(2, 8, 17) % 257,
        sharding.batch_sharding(plan.mesh),
    )
    losses = []
    for step in (loaded, plan.train_step.executable):
        _, metrics = step(init_train_state(plan.config, plan.mesh), tokens)
        losses.append(float(metrics["train/loss"]))
    assert losses[0] == losses[1] == pytest.approx(math.log(257), abs=0.1)


def test_json_has_everything(plans):
    written = json.loads(json.dumps(plans["adamw"].to_json()))
    assert {row["phase"] for row in written["collectives"]} <= {"model", "optimizer", "mixed"}
    assert {"op", "axes", "network", "phase", "count", "bytes"} <= written["collectives"][0].keys()
    assert written["memory"]["headroom_bytes"] is None
    assert written["eval"]["compiler"]["argument_bytes"] > 0
    assert written["estimate"] is None
