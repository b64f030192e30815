import dataclasses

import pytest
from tiny import tiny_config

from maxmars.config import MeshConfig
from maxmars.hlo import Memory
from maxmars.plan import fit
from maxmars.plan.chips import CHIPS
from maxmars.plan.compiled import CompiledTrainStep
from maxmars.plan.topology import get_topology
from maxmars.sharding import make_mesh

BYTES = {None: 100, "dots": 60, "attention": 40, "full": 20}
"""Memory of a sequence on a chip by policy, on top of 50 bytes of state."""


@pytest.fixture
def compiled(monkeypatch):
    """Replaces the compiler by a rule; returns what was compiled."""
    found = []

    def compile_train_step(config, mesh, topology):
        found.append((config.model.remat, config.num_microbatches))
        rows = config.microbatch_size // 8
        if rows == 8:
            raise fit.DoesNotFitError("the compiler itself refuses this")
        memory = Memory(50, 50, 50, rows * BYTES[config.model.remat], 0, None)
        step = object.__new__(CompiledTrainStep)  # all else that it has is not needed here
        object.__setattr__(step, "memory", memory)
        return step

    monkeypatch.setattr(fit, "compile_train_step", compile_train_step)
    return found


@pytest.mark.parametrize(
    ("limit", "remat", "count"),
    [
        (460, None, 2),
        (449, None, 4),
        (150, None, 8),
        (149, "dots", 8),
        (90, "attention", 8),
        (89, "full", 8),
    ],
)
def test_the_cheapest_policy_and_the_largest_microbatch(compiled, limit, remat, count):
    config = tiny_config(global_batch_size=64, num_microbatches=1, mesh=MeshConfig(fsdp=8))
    found = fit.find_fit(config, get_topology("cpu:8"), limit)
    assert (found.config.model.remat, found.config.num_microbatches) == (remat, count)
    assert found.overrides == ("--num-microbatches", str(count), "--model.remat", str(remat))
    assert [(t.remat, t.num_microbatches) for t in found.tried] == compiled
    assert len(set(compiled)) == len(compiled)


def test_nothing_fits(compiled):
    config = tiny_config(global_batch_size=64, num_microbatches=1)
    with pytest.raises(
        ValueError, match=r"does not fit in 0\.00 GB a chip on cpu:8, not even with 8"
    ):
        fit.find_fit(config, get_topology("cpu:8"), 60)


@pytest.mark.parametrize(("limit", "remat"), [(94, "full"), (95, "attention"), (200, None)])
def test_what_a_plan_takes_for_auto_is_what_fits(compiled, limit, remat):
    model = dataclasses.replace(tiny_config().model, remat="auto")
    config = tiny_config(global_batch_size=8, num_microbatches=1, model=model)
    # Of 95 bytes 90 may be used: those of state, 50, and of what `attention` keeps, 40.
    chip = dataclasses.replace(CHIPS["h100"], memory_bytes=limit)
    topology = dataclasses.replace(get_topology("cpu:8"), chip=chip)
    chosen, step = fit.compile_chosen(config, make_mesh(config.mesh), topology)
    assert chosen.model.remat == remat
    assert compiled[-1] == (remat, 1)
    assert step.memory.temp_bytes == BYTES[remat]


def test_a_plan_takes_no_rematerialisation_for_auto_on_fake_devices(compiled):
    model = dataclasses.replace(tiny_config().model, remat="auto")
    config = tiny_config(global_batch_size=8, num_microbatches=1, model=model)
    chosen, _ = fit.compile_chosen(config, make_mesh(config.mesh), get_topology("cpu:8"))
    assert (chosen.model.remat, compiled) == (None, [(None, 1)])
