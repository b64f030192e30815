"""The step of a run under policies of rematerialisation; all of them: `test_plan_command.py`."""

import dataclasses
import itertools
import math

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
    none, dots = itertools.islice(plan_policies(config, topology), 2)
    assert (none.is_auto, dots.is_auto) == (True, False)  # these devices are CPUs
    fastest = min(none.step_seconds, dots.step_seconds)
    assert best_policy([dots, none]).step_seconds == fastest < math.inf
    less = none.plan.memory.peak_bytes - 1
    too_large = next(plan_policies(config, topology, memory_bytes=less))
    assert (too_large.config.model.remat, too_large.fits) == (None, False)
    assert best_policy([too_large, dots]) is dots
