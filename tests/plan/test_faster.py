"""What a plan says of settings with which the same step is shorter."""

import dataclasses

import pytest
from tiny import MODEL, tiny_config

from maxmars.config import MarsConfig, MeshConfig
from maxmars.config.chips import CHIPS
from maxmars.plan import get_topology, make_plan
from maxmars.plan.faster import find_faster

CPUS = get_topology("cpu:8")
CHIPS_OF_A_SLICE = dataclasses.replace(CPUS, chip=CHIPS["v5e"])
RECOMPUTING = dataclasses.replace(MODEL, remat="full")


@pytest.mark.slow
def test_a_faster_setting_has_its_flags():
    config = tiny_config(model=RECOMPUTING, mesh=MeshConfig(fsdp=8), num_microbatches=2)
    plan, lines = make_plan(config, CHIPS_OF_A_SLICE, evaluate=False), []
    faster = find_faster(config, plan, log=lines.append)
    assert faster.plan.step_seconds == pytest.approx((1 - faster.saved) * plan.step_seconds)
    assert faster.plan.config.model.remat is None
    flags = dict(zip(faster.flags[::2], faster.flags[1::2], strict=True))
    assert flags["--model.remat"] == "None"
    assert flags["--num-microbatches"] == "1"
    questions = [line for line in lines if line.endswith("?")]
    assert len(questions) == len(set(questions)) == 2  # no program is compiled twice
    # The flags make that plan, than which nothing is faster.
    better = dataclasses.replace(faster.plan.config, num_microbatches=1)
    again = make_plan(better, CHIPS_OF_A_SLICE, evaluate=False)
    assert again.step_seconds == faster.plan.step_seconds
    assert find_faster(better, again, log=lines.append) is None


@pytest.mark.slow
def test_a_setting_that_does_not_fit_is_left_out():
    config = tiny_config(model=RECOMPUTING, mesh=MeshConfig(fsdp=8), num_microbatches=2)
    plan = make_plan(config, CHIPS_OF_A_SLICE, evaluate=False)
    chip = dataclasses.replace(CHIPS["v5e"], memory_bytes=plan.memory.peak_bytes)
    full = dataclasses.replace(plan, topology=dataclasses.replace(CPUS, chip=chip))
    faster = find_faster(config, full, log=lambda _: None)
    assert faster is None or faster.plan.memory.peak_bytes <= chip.memory_bytes


@pytest.mark.slow
def test_a_mesh_that_does_not_divide_the_batch_is_left_out():
    config = tiny_config(mesh=MeshConfig(fsdp=4, tensor=2), global_batch_size=4, num_microbatches=1)
    plan, lines = make_plan(config, CHIPS_OF_A_SLICE, evaluate=False), []
    assert find_faster(config, plan, log=lines.append) is None
    assert {line.split(",")[0][-22:] for line in lines if line.endswith("?")} == {
        "data=1 fsdp=4 tensor=2"
    }


@pytest.mark.slow
def test_matrices_that_each_replica_orthogonalises_again():
    model = dataclasses.replace(MODEL, num_layers=8, embed_dim=256)
    optimizer = MarsConfig(variant="shampoo")
    config = tiny_config(model=model, optimizer=optimizer, mesh=MeshConfig(data=4, fsdp=2))
    config = dataclasses.replace(config, num_microbatches=1)
    plan = make_plan(config, CHIPS_OF_A_SLICE, evaluate=False)
    faster = find_faster(config, plan, log=lambda _: None)
    assert faster.flags == ("--optimizer.own-over-data", "True")
    # Nobody's clock counts what goes between slices, over which `data` goes.
    between = dataclasses.replace(CHIPS_OF_A_SLICE, num_slices=4)
    lines = []
    find_faster(config, dataclasses.replace(plan, topology=between), log=lines.append)
    assert not any("owned over data" in line for line in lines)


def test_fake_devices_have_no_speed(plan_of):
    plan = plan_of("shampoo")
    assert find_faster(plan.config, plan, log=pytest.fail) is None
