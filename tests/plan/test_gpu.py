"""Plans for GPUs that are not there; needs XLA's GPU compiler, of the extra `cuda`."""

import pytest
from absent_chips import FOR_GPUS
from tiny import tiny_config

from maxmars.config import MarsConfig, MeshConfig
from maxmars.plan import make_plan
from maxmars.plan.clock import COLLECTIVES, LOSS_ELEMENTWISE, LOSS_PRODUCTS, OPTIMIZER, PRODUCTS
from maxmars.plan.topology import get_topology

pytestmark = FOR_GPUS

OPTIMIZERS = {"mars": MarsConfig(), "shampoo": MarsConfig(variant="shampoo")}
MESHES = {"h100:8": MeshConfig(fsdp=8), "h200:16": MeshConfig(data=2, fsdp=8)}


@pytest.fixture(scope="module")
def plans(uncached):
    plans = {}
    for name, topology in (("shampoo", "h100:8"), ("shampoo", "h200:16"), ("mars", "h200:16")):
        mesh, optimizer = MESHES[topology], OPTIMIZERS[name]
        config = tiny_config(optimizer=optimizer, mesh=mesh, global_batch_size=32)
        plans[name, topology] = make_plan(config, get_topology(topology), evaluate=False)
    return plans


def test_memory_is_the_compilers(plans):
    for plan in plans.values():
        stats = plan.train_step.executable.memory_analysis()
        made = stats.output_size_in_bytes - stats.alias_size_in_bytes
        peak = stats.argument_size_in_bytes + stats.temp_size_in_bytes + made
        assert plan.memory.peak_bytes == peak
        assert plan.memory.headroom_bytes == plan.topology.chip.memory_bytes - peak


def test_the_clock_has_all_kinds_and_is_no_faster_than_the_bound(plans):
    for (name, _), plan in plans.items():
        clock = plan.train_step.clock
        for kind in (PRODUCTS, LOSS_PRODUCTS, LOSS_ELEMENTWISE, OPTIMIZER, COLLECTIVES):
            assert clock.kinds[kind].seconds > 0, (name, kind)
        assert clock.seconds > plan.bound.overlapped_step_time_s
        assert clock.guessed == ()


@pytest.mark.parametrize("rows", [24, 64])
def test_no_number_of_rows_transposes_the_residual_stream(rows):
    config = tiny_config(global_batch_size=rows, num_microbatches=1)
    plan = make_plan(config, get_topology("h100:1"), evaluate=False)
    length, width = config.model.max_seq_len, config.model.embed_dim
    program = plan.train_step.executable.as_text()
    assert f"[{rows},{length},{width}]{{2,1,0}}" in program
    assert f"[{length},{width},{rows}]{{2,1,0}}" not in program
    assert f"[{rows},{length},{width}]{{0,2,1}}" not in program


def test_optimizer_traffic_stays_within_the_host(plans):
    for (name, topology), plan in plans.items():
        rows = [row for row in plan.collectives if row.phase == "optimizer"]
        exchanged = sum(row.bytes for row in rows if row.op == "all-to-all")
        mixed = [c for c in plan.train_step.collectives if c.phase == "mixed"]
        assert all(c.bytes <= 10**6 * c.count for c in mixed)
        assert sum(row.bytes for row in rows) - exchanged < 20_000, name
        assert {row.network for row in rows if row.op == "all-to-all"} <= {"NVLink"}
        assert bool(exchanged) == (name == "shampoo")
        if exchanged:
            assert exchanged <= 1.1 * 2 * 2 * sum(g.padded_elements for g in plan.exchange) / 8
        between = [row for row in plan.collectives if row.network == "DCN"]
        assert bool(between) == (topology == "h200:16")
        assert all(row.axes is None or "data" in row.axes for row in between)
