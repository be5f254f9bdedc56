"""What a plan costs before there is a cluster: where parameters go and why, memory of a rank, collectives of a step."""

from maxmoe.planning.estimate import Estimate, estimate
from maxmoe.planning.explain import Explanation, explain
from maxmoe.planning.traffic import Traffic

__all__ = ["Estimate", "Explanation", "Traffic", "estimate", "explain"]
