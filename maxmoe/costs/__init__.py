"""Costs of a training step, without a cluster: shardings, memory, communication and operators of a rank."""

from maxmoe.costs.device import Device, Link
from maxmoe.costs.estimate import estimate
from maxmoe.costs.explain import Explanation, explain
from maxmoe.costs.report import Estimate, RankEstimate, Traffic
from maxmoe.costs.search import search
from maxmoe.costs.search_result import FoundPlan, NoPlanFits, SearchResult
from maxmoe.costs.stored import StateDtypes

__all__ = [
    "Device",
    "Estimate",
    "Explanation",
    "FoundPlan",
    "Link",
    "NoPlanFits",
    "RankEstimate",
    "SearchResult",
    "StateDtypes",
    "Traffic",
    "estimate",
    "explain",
    "search",
]
