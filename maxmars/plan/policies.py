"""The step of a run, compiled under every policy of rematerialisation: `plan --remat all`.

`model.remat=auto` chooses by a rule, without compiling. This table shows what the rule gains or
loses: one row a policy, each with the number of microbatches that `train` would choose under it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from maxmars.config import TrainConfig, to_dict
from maxmars.model.parameters import Parameters
from maxmars.plan.compile import DoesNotFitError
from maxmars.plan.plan import Plan, make_plan, resolve_on
from maxmars.plan.topology import Topology
from maxmars.train.auto import with_remat

HEADER = f"{'remat':<10} {'microbatches':>12} {'ms a step':>10} at memory's rate "
HEADER += f"{'peak GB':>8} {'sent GB':>8}"


@dataclass(frozen=True, kw_only=True)
class PolicyPlan:
    """A run under one policy."""

    config: TrainConfig
    """The config with the `num_microbatches` that `train` chooses under this policy."""
    plan: Plan | None
    """None if the compiler refuses the step, which needs more memory than a chip has."""
    is_auto: bool
    """Whether `model.remat=auto` takes this policy, in as many microbatches."""

    @property
    def fits(self) -> bool:
        """Whether the step fits in the memory that it may use."""
        return self.plan is not None and self.plan.fits

    @property
    def step_seconds(self) -> float:
        """Seconds of a step by the clock; `inf` for fake devices and where it does not fit."""
        return self.plan.step_seconds if self.plan is not None and self.fits else math.inf

    @property
    def overrides(self) -> list[str]:
        """Words of a command line for `train` with this policy."""
        words = ["--num-microbatches", str(self.config.microbatches)]
        return [*words, "--model.remat", str(self.config.model.remat)]

    def __str__(self) -> str:
        """The row of the policy in a table below `HEADER`."""
        row = f"{self.config.model.remat!s:<10} {self.config.microbatches:>12} "
        if self.plan is None:
            return f"{row}{'refused by the compiler: too much memory':>45}"
        sent_bytes = sum(c.wire_bytes for c in self.plan.collectives)
        times = ((self.plan.step_seconds, 10), (self.plan.at_memory_rate_seconds, 16))
        for seconds, width in times:
            is_known = seconds is not None and math.isfinite(seconds)
            row += f"{f'{1e3 * seconds:,.1f}' if is_known else '':>{width}} "
        row += f"{self.plan.memory.peak_bytes / 1e9:>8.2f} {sent_bytes / 1e9:>8.2f}"
        return row + ("" if self.fits else "  too much memory") + self.is_auto * "  auto"

    def to_json(self) -> dict[str, Any]:
        """The row as JSON-ready values."""
        return {
            "config": to_dict(self.config),
            "overrides": self.overrides,
            "auto": self.is_auto,
            "fits": self.fits,
            "plan": None if self.plan is None else self.plan.to_json(),
        }


def plan_policies(
    config: TrainConfig, topology: Topology, *, memory_bytes: int | None = None
) -> Iterator[PolicyPlan]:
    """Compile the train step under each policy of the model, from the least arithmetic to the
    least memory.

    Args:
      config: the run; its `model.remat` is ignored. Where `num_microbatches` is None, each policy
        gets the fewest that fit.
      topology: from `get_topology`.
      memory_bytes: see `make_plan`.
    """
    policies = Parameters(config.model, topology.mesh(config)).remat_policies

    def resolved(remat: str | None) -> TrainConfig:
        return resolve_on(with_remat(config, remat), topology, memory_bytes).config

    auto = resolved("auto" if len(policies) > 1 else None)  # a model may know one policy alone
    for remat in policies:
        policy_config, plan = resolved(remat), None
        with contextlib.suppress(DoesNotFitError):
            plan = make_plan(policy_config, topology, evaluate=False, memory_bytes=memory_bytes)
        yield PolicyPlan(config=policy_config, plan=plan, is_auto=policy_config == auto)


def best_policy(policies: list[PolicyPlan]) -> PolicyPlan:
    """The policy of the shortest step that fits; without a clock, the policy of `auto`."""
    return min(policies, key=lambda policy: (policy.step_seconds, not policy.is_auto))
