"""Costs of a plan, without a cluster: the sharding of each parameter, memory per rank, communication per step."""

from maxmoe.planning.estimate import Estimate, estimate
from maxmoe.planning.explain import Explanation, explain
from maxmoe.planning.traffic import Traffic

__all__ = ["Estimate", "Explanation", "Traffic", "estimate", "explain"]
