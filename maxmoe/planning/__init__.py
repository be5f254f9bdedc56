"""Costs of a plan, without a cluster: shardings, memory, communication and time of a step, and a search."""

from maxmoe.planning.estimate import Estimate, estimate
from maxmoe.planning.explain import Explanation, explain
from maxmoe.planning.plan_search import FoundPlan, NoPlanFits, SearchResult, predict, search
from maxmoe.planning.state_dtypes import StateDtypes
from maxmoe.planning.time_model import Device, Link
from maxmoe.planning.traffic import Traffic

__all__ = [
    "Device",
    "Estimate",
    "Explanation",
    "FoundPlan",
    "Link",
    "NoPlanFits",
    "SearchResult",
    "StateDtypes",
    "Traffic",
    "estimate",
    "explain",
    "predict",
    "search",
]
