"""The step of a run under every policy of rematerialisation."""

import dataclasses

import pytest
from tiny import tiny_config

from maxmars.config import MeshConfig
from maxmars.config.chips import CHIPS
from maxmars.plan import get_topology
from maxmars.plan.policies import best_policy, plan_policies


@pytest.mark.slow
def test_of_the_policies_that_fit_the_fastest_is_the_best():
    config = tiny_config(num_microbatches=1, mesh=MeshConfig(fsdp=8))
    topology = dataclasses.replace(get_topology("cpu:8"), chip=CHIPS["v5e"])
    rows = list(plan_policies(config, topology))
    assert [row.config.model.remat for row in rows] == [None, "dots", "attention", "full"]
    assert [row.is_auto for row in rows] == [True, False, False, False]  # these devices are CPUs
    times = [row.step_seconds for row in rows]
    assert best_policy(rows).step_seconds == min(times)
    peaks = [row.plan.memory.peak_bytes for row in rows]
    assert peaks[-1] < peaks[0]
    first = next(plan_policies(config, topology, memory_bytes=peaks[0] - 1))
    assert (first.plan.memory.peak_bytes, first.fits) == (peaks[0], False)
    assert best_policy([first, *rows[1:]]).step_seconds == min(times[1:])
