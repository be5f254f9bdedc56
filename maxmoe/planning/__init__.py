"""What a plan costs before there is a cluster: where parameters go and why, memory of a rank, collectives of a step."""

from maxmoe.planning.estimate import Estimate, Traffic, estimate
from maxmoe.planning.explain import Explanation, explain

__all__ = ["Estimate", "Explanation", "Traffic", "estimate", "explain"]
