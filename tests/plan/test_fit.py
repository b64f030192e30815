import types

import pytest
from tiny import tiny_config

from maxmars.config import MeshConfig
from maxmars.hlo import Memory
from maxmars.plan import fit
from maxmars.plan.topology import get_topology

BYTES = {None: 100, "dots": 60, "full": 20}
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
        return types.SimpleNamespace(memory=memory)

    monkeypatch.setattr(fit, "compile_train_step", compile_train_step)
    return found


@pytest.mark.parametrize(
    ("limit", "remat", "count"),
    [(460, None, 2), (449, None, 4), (150, None, 8), (149, "dots", 8), (90, "full", 4)],
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
