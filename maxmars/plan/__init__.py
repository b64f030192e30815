"""What a run will need, before its chips are paid for. README.md says how it is counted."""

from maxmars.plan.plan import Plan, make_plan
from maxmars.plan.topology import Topology, get_topology

__all__ = ["Plan", "Topology", "get_topology", "make_plan"]
