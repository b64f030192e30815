"""Plans for TPU slices that are not there; needs the compiler of the extra `tpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absent_chips import FOR_TPUS
from refusals import refused
from running import run_python
from tiny import tiny_config

from maxmars.config import MarsConfig, MeshConfig
from maxmars.distributed.sharding import make_mesh
from maxmars.plan import make_plan
from maxmars.plan.topology import get_topology

pytestmark = FOR_TPUS

ROOT = Path(__file__).parents[2]
BUDGETS = ROOT / "tests" / "plan" / "traffic_tpu.json"
PLANS = {
    "mars v5p:2x2x2 x 2": MarsConfig(),
    "shampoo v5p:2x2x2 x 2": MarsConfig(variant="shampoo"),
    "shampoo v5p:2x2x1 x 1": MarsConfig(variant="shampoo"),
}


@pytest.fixture(scope="module")
def plans(uncached):
    plans = {}
    for name, optimizer in PLANS.items():
        _, topology, _, slices = name.split()
        config = tiny_config(optimizer=optimizer, global_batch_size=32)
        plans[name] = make_plan(config, get_topology(topology, int(slices)), evaluate=False)
    return plans


def test_no_place_of_data_lies_in_two_slices(plans):
    plan = plans["mars v5p:2x2x2 x 2"]
    slices = [{d.slice_index for d in row.flat} for row in plan.mesh.devices]
    assert slices == [{0}, {0}, {1}, {1}]
    # An eighth of a width of 32 would not fill a tile of 8 rows.
    assert plan.mesh.shape == {"data": 4, "fsdp": 4, "tensor": 1}
    with refused(ValueError, "mesh.data=1", "2 slices"):
        make_plan(tiny_config(mesh=MeshConfig(data=1, fsdp=16)), plan.topology)


@pytest.mark.parametrize(("slices", "data"), [(1, 2), (2, 4)])
def test_axes_that_take_part_of_an_axis_of_the_torus(slices, data):
    devices = get_topology("v5p:4x4x8", slices).devices  # 64 is no product of 4, 4 and 8
    mesh = make_mesh(MeshConfig(data=data, fsdp=64), devices)
    assert mesh.shape == {"data": data, "fsdp": 64, "tensor": 1}
    per_slice = mesh.devices.reshape(slices, -1)
    assert len({device.id for device in mesh.devices.flat}) == len(devices)
    if slices == 2:
        assert [{d.slice_index for d in row} for row in per_slice] == [{0}, {1}]


def test_only_gradients_and_scalars_go_between_slices(plans):
    for name, plan in plans.items():
        between = [row for row in plan.collectives if row.network == "DCN"]
        assert bool(between) == ("x 2" in name)
        assert {row.axes for row in between} <= {("data",)}
        optimizer = sum(row.bytes for row in between if row.phase != "model")
        assert optimizer < 100_000, name  # scalars, each padded to a tile


def test_optimizer_traffic(plans):
    for name, plan in plans.items():
        rows = [row for row in plan.collectives if row.phase == "optimizer"]
        exchanged = sum(row.bytes for row in rows if row.op == "all-to-all")
        mixed = [c for c in plan.train_step.collectives if c.phase == "mixed"]
        assert all(c.bytes <= 10**6 * c.count for c in mixed)
        assert sum(row.bytes for row in rows) - exchanged < 20_000, name
        if "shampoo" in name:
            padded = sum(group.padded_elements for group in plan.exchange)
            assert 0 < exchanged <= 1.1 * 2 * 2 * padded / plan.mesh.shape["fsdp"]
        else:
            assert exchanged == 0


def test_memory_is_the_compilers(plans):
    for plan in plans.values():
        stats = plan.train_step.executable.memory_analysis()
        assert plan.memory.peak_bytes == stats.peak_memory_in_bytes
        assert (
            plan.memory.headroom_bytes == plan.topology.chip.memory_bytes - plan.memory.peak_bytes
        )
        assert plan.memory.padding_bytes > 0


def test_traffic_stays_within_the_budgets(plans, request):
    moved = {
        name: {
            f"{row.phase} {row.op} {','.join(row.axes or '?')} {row.network}": row.bytes
            for row in plan.collectives
            if row.bytes >= 1000
        }
        for name, plan in plans.items()
    }
    if request.config.getoption("--update-goldens"):
        BUDGETS.write_text(json.dumps(moved, indent=1, sort_keys=True) + "\n")
    stored = json.loads(BUDGETS.read_text())
    assert stored.keys() == moved.keys()
    for name, kinds in moved.items():
        for kind, size in kinds.items():
            assert size <= 1.1 * stored[name].get(kind, 0), (name, kind)


COMPILE = """
import sys
from maxmars.config import AdamWConfig, GPT2Config, MeshConfig, PythonSourcesConfig, TrainConfig
from maxmars.model.parameters import Parameters
from maxmars.plan import get_topology
from maxmars.train.step import make_train_step

model = GPT2Config(num_layers=1, num_heads=4, embed_dim=256, max_seq_len=256, vocab_size=512)
config = TrainConfig(
    name="one", num_steps=1, global_batch_size=64, num_microbatches=1, mesh=MeshConfig(fsdp=4),
    model=model, optimizer=AdamWConfig(), data=PythonSourcesConfig(),
)
mesh = get_topology("v5e:2x2").mesh(config)
print(make_train_step(config, Parameters(model, mesh)).text())
"""


def test_the_steps_options_reach_the_compiler_of_absent_chips():
    """Without them the products are taken apart. libtpu reads the environment once: a process."""
    done = run_python("-c", COMPILE, environment=os.environ | {"LIBTPU_INIT_ARGS": ""})
    assert "ENTRY" in done.stdout
    assert "collective-permute" not in done.stdout


CONFIG = """
from maxmars.config import GPT2Config, MarsConfig, PythonSourcesConfig, TrainConfig

def get_config():
    return TrainConfig(
        name="one-layer",
        num_steps=10,
        global_batch_size=16,
        model=GPT2Config(num_layers=1, num_heads=2, embed_dim=16, max_seq_len=16, vocab_size=64),
        optimizer=MarsConfig(),
        data=PythonSourcesConfig(),
    )
"""


def test_two_plans_at_once(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    command = [sys.executable, "-m", "maxmars", "plan", str(tmp_path / "config.py")]
    command += ["--topology", "v5e:2x2", "--mesh.fsdp", "4", "--output"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    outputs = [tmp_path / f"{i}.json" for i in range(2)]
    running = [
        subprocess.Popen([*command, str(output)], env={**os.environ, "PYTHONPATH": path})
        for output in outputs
    ]
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    first, second = (json.loads(output.read_text())["collectives"] for output in outputs)
    assert first == second
